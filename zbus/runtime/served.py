"""What a process serves: the engine's endpoints and the bus's own methods, found by the names that requests bring."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from zbus.engine import EndpointSpec, Engine
from zbus.protocol.messages import Execute

__all__ = ["Builtin", "Served"]

Builtin = Callable[..., Any]


class Served:
    """One engine, or none yet, beside the bus's own methods. Changed on the main thread; any thread may read.

    Args:
        name: ``role/rank``, for messages.
        builtins: The bus's own methods by lane and full name (``ctl:zbus.ping`` …).

    Attributes:
        engine: The engine served now.
        table: Its endpoints by name.
        async_lanes: Lanes with an async endpoint.
    """

    def __init__(self, name: str, builtins: Mapping[str, Builtin]) -> None:
        self.name = name
        self.engine: Engine | None = None
        self.table: dict[str, EndpointSpec] = {}
        self.async_lanes: frozenset[str] = frozenset()
        self._builtins = dict(builtins)
        self._functions: dict[str, Callable[..., Any]] = {}

    def install(self, engine: Engine, table: Mapping[str, EndpointSpec]) -> None:
        """Serve ``engine`` from now on."""
        self.table = dict(table)
        self.async_lanes = frozenset(spec.lane for spec in table.values() if spec.is_async)
        self._functions = {name: getattr(engine, name) for name in table}
        self.engine = engine

    def remove(self) -> Engine | None:
        """Serve no engine any more and return the one that was."""
        engine, self.engine = self.engine, None
        self.table = {}
        return engine

    def is_sync(self, method: str) -> bool:
        """Tell whether a method is an endpoint of the engine's that is not async."""
        spec = self.table.get(method)
        return spec is not None and not spec.is_async

    def width(self, lane: str) -> int:
        """Return how many calls of a lane may run at once."""
        return max((spec.concurrency or 1 for spec in self.table.values() if spec.lane == lane), default=1)

    def resolve(self, request: Execute, method: Any) -> Callable[..., Any]:
        """Return what a request calls by a name.

        Raises:
            AttributeError: There is no such method on its lane.
            PermissionError: It is not for a guest.
            TypeError: A name is text.
        """
        lane = request.lane
        if request.epoch and type(method) is str:
            spec = self.table.get(method)
            if spec is not None and spec.lane == lane:
                return self._functions[method]
        if type(method) is not str:
            msg = f"a method name is text, not {type(method).__name__}"
            raise TypeError(msg)
        if method.startswith("zbus."):
            builtin = self._builtins.get(f"{lane}:{method}")
            if builtin is None or (lane != "ctl" and request.epoch == 0):
                msg = f"{self.name} has no method {method!r} on lane {lane!r}"
                raise AttributeError(msg)
            return builtin
        spec = self.table.get(method)
        if spec is None or spec.lane != lane:
            raise AttributeError(self._missing(method, spec, lane))
        if spec.effect != "pure" and request.epoch == 0:
            msg = f"endpoint {method!r} of {self.name} is declared {spec.effect!r}; a guest may only make pure calls"
            raise PermissionError(msg)
        return self._functions[method]

    def _missing(self, method: str, spec: EndpointSpec | None, lane: str) -> str:
        if spec is not None:
            return f"endpoint {method!r} of {self.name} is on lane {spec.lane!r}, not {lane!r}"
        if self.engine is None:
            return f"{self.name} has no engine yet"
        near = difflib.get_close_matches(method, self.table, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"engine {type(self.engine).__name__} of {self.name} has no endpoint {method!r}{hint}"
