"""Typed proxies of a role: a group, its slices, its methods, ordered batches.

``group.method(args)`` blocks; ``.submit``, ``.aio``, ``.map`` and ``.stream`` are the other ways of the same call. How
arguments are spread and answers merged stands at the endpoint (``zbus.engine``). Everything may be called from any
thread; calls made by one thread are seen by each worker in that order, and a batch takes its places on all members
at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from controller.batches import BatchBuilder
from controller.calls import Core, Method, View
from controller.placer import Placer, Roster, is_ready
from zbus.engine import EndpointSpec, Start
from zbus.errors import ConfigError
from zbus.retry import RetryPolicy

if TYPE_CHECKING:
    from controller.refs import RefBook
    from zbus.engine import Endpoint

__all__ = ["DEFAULT_DEADLINE_S", "BatchBuilder", "Group", "Method"]

DEFAULT_DEADLINE_S: Final = 1800.0
"""What a call gets when neither the endpoint, nor the caller, nor the config states a deadline."""

P = ParamSpec("P")
T = TypeVar("T")


class Group:
    """All ranks of a role, or a slice of them.

    ``group.train(x)`` calls an endpoint; ``group[0]`` is one rank, ``group[0:2]`` and ``group[{"dp": 0}]`` are slices.
    An endpoint called on one rank gives the bare answer.

    Args:
        roster: Who is in the role now.
        placer: Carries the calls.
        deadline_s: Default deadline of a call in seconds.
        refs: What handles are tied to; None: neither ranks nor the controller keep values.
    """

    def __init__(
        self, roster: Roster, placer: Placer, *, deadline_s: float = DEFAULT_DEADLINE_S, refs: RefBook | None = None
    ) -> None:
        ranks = tuple(range(roster.mesh.size))
        self._view = View(Core(roster, placer, deadline_s, refs), ranks)

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """Name of the role."""
        return self._view.core.roster.role

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group or slice, ascending."""
        return self._view.ranks

    @property
    def mesh(self) -> Mapping[str, int]:
        """Mesh axes of the whole role."""
        return self._view.core.roster.mesh.axes

    @property
    def placer(self) -> Placer:
        """What carries the calls."""
        return self._view.core.placer

    @property
    def roster(self) -> Roster:
        """Who is in the whole role now."""
        return self._view.core.roster

    @property
    def endpoints(self) -> Mapping[str, EndpointSpec]:
        """The endpoint table."""
        return self._view.core.roster.endpoints()

    @property
    def ready(self) -> bool:
        """Whether every rank takes calls now."""
        peers = self._view.core.roster.peers()
        return all(is_ready(peers[rank]) for rank in self._view.ranks)

    def __len__(self) -> int:
        return len(self._view.ranks)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        peers = self._view.core.roster.peers()
        own = [peers[rank] for rank in self._view.ranks]
        ready = sum(map(is_ready, own))
        name = self.role if len(own) == len(peers) else f"{self.role}{list(self._view.ranks)}"
        rest = [f"{peer.name.rank} {peer.state.value}" for peer in own if not is_ready(peer)]
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"<Group {name}: {ready}/{len(own)} ready{''.join(f', rank {text}' for text in rest)}, {mesh}>"

    # -- slicing -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: int | slice | Sequence[int] | Mapping[str, int | Sequence[int]]) -> Group:
        """Return a slice: a position, a range, a list of positions, or mesh coordinates.

        Raises:
            IndexError: No such rank.
            ConfigError: No such axis, or nothing selected.
        """
        size = len(self._view.ranks)
        if isinstance(key, int):
            if not -size <= key < size:
                msg = f"{self.role} has ranks {self._view.ranks[0]}..{self._view.ranks[-1]}, no position {key}"
                raise IndexError(msg)
            return self._slice((self._view.ranks[key],), single=True)
        if isinstance(key, Mapping):
            wanted = set(self._view.core.roster.mesh.select(key))
            return self._slice(tuple(rank for rank in self._view.ranks if rank in wanted))
        if isinstance(key, slice):
            return self._slice(tuple(sorted(self._view.ranks[key])))
        return self._slice(tuple(sorted({self[position].ranks[0] for position in key})))

    def __iter__(self) -> Iterator[Group]:
        """Yield each rank as a group of one."""
        return (self._slice((rank,), single=True) for rank in self._view.ranks)

    def _slice(self, ranks: tuple[int, ...], *, single: bool = False) -> Group:
        if not ranks:
            msg = f"this slice of {self.role} holds no rank"
            raise ConfigError(msg, hint=f"its ranks are {', '.join(map(str, self._view.ranks))}")
        return self._with(replace(self._view, ranks=ranks, single=single))

    def _with(self, view: View) -> Group:
        other = object.__new__(type(self))
        other._view = view  # this class's own
        return other

    def options(
        self,
        *,
        deadline: float | str | None = None,
        retries: int | RetryPolicy | None = None,
        keep: bool | None = None,
    ) -> Group:
        """Return the same group with other defaults for its calls.

        Args:
            deadline: Seconds or text such as ``"2m"``.
            retries: Executions after the first, or a whole policy. They happen only where a second run does no harm.
            keep: Results stay with the ranks that made them, and answers are Refs.
        """
        return self._with(self._view.options(deadline, retries, keep))

    # -- calling -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Method[..., Any]:
        """Return an endpoint by name.

        Raises:
            AttributeError: The engine has no such endpoint; the nearest name is suggested.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        table = self._view.core.roster.endpoints()
        spec = table.get(name)
        if spec is None:
            raise AttributeError(_unknown(self.role, name, table), name=name, obj=self)
        method: Method[..., Any] = Method(self._view, spec)
        self.__dict__[name] = method
        return method

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._view.core.roster.endpoints()})

    def method(self, endpoint: Endpoint[Any, P, Any, T]) -> Method[P, T]:
        """Return an endpoint by its declaration, such as ``Actor.train``, typed for checkers and editors."""
        spec: EndpointSpec = cast("Any", endpoint).__zbus_endpoint__
        return cast("Method[P, T]", getattr(self, spec.name))

    def builtin(self, spec: EndpointSpec) -> Method[..., Any]:
        """Return one of the bus's own methods (``zbus.…``); ``spec`` says how it is called."""
        return Method(self._view, spec)

    def batch(
        self, *, strict: bool = False, deadline: float | str | None = None, start: Start = "each"
    ) -> BatchBuilder:
        """Collect several ordered calls and place them as one.

        ::

            with actor.batch(strict=True) as b:
                b.zero_grad()
                stats = b.train(batch, step)
            print(stats.result())

        Args:
            strict: A failed call makes the later ones NOT_EXECUTED on that rank.
            deadline: For the whole batch: seconds or text.
            start: ``"together"``: the batch begins on no rank until all hold it; also if one of its endpoints says so.
        """
        return BatchBuilder(self._view, self._endpoint, strict=strict, deadline=deadline, start=start)

    def _endpoint(self, name: str) -> Method[..., Any]:
        """Return an endpoint, never another attribute of this class."""
        found = self.__dict__.get(name)
        return found if isinstance(found, Method) else self.__getattr__(name)


def _unknown(role: str, name: str, table: Mapping[str, EndpointSpec]) -> str:
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(table)) or 'none'}"
    return f"role {role!r} has no endpoint {name!r}{hint}"
