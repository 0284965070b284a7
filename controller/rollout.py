"""``RolloutController``: a stream of rollouts over the ranks of a role, by the founding method names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from controller.futures import BatchFuture
from controller.outcomes import WaitTimeout
from zbus.engine import AnyOne
from zbus.errors import ConfigError

if TYPE_CHECKING:
    from controller.controller import Controller

__all__ = ["RolloutController"]


class RolloutController:
    """Submits items to an ``AnyOne`` endpoint and hands out the answers. Methods may be called from any thread.

    Args:
        bus: A launched controller.
        role: Name of the rollout role.
        endpoint: Name of the endpoint that makes one rollout.

    Raises:
        AttributeError: The role has no such endpoint.
        ConfigError: The endpoint is not ``AnyOne``.
    """

    def __init__(self, bus: Controller, role: str = "rollout", endpoint: str = "generate") -> None:
        self.bus = bus
        self.group = bus.group(role)
        self._method = getattr(self.group, endpoint)
        if not isinstance(self._method.spec.dispatch, AnyOne):
            msg = f"endpoint `{endpoint}` of role {role!r} is not AnyOne, so rollouts cannot be spread"
            raise ConfigError(msg, hint="declare it with AnyOne()")
        self._lock = threading.Lock()
        self._open: dict[int, BatchFuture[Any]] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"<RolloutController {self.group!r}, {len(self._open)} open>"

    def submit(self, item: Any) -> int:
        """Start one rollout on the least loaded ready rank and return its number."""
        future = self._method.submit(item)
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = future
        return number

    def wait(self, count: int, timeout: float | None = None) -> list[Any]:
        """Return ``count`` finished rollouts, taken once each, in the order in which they were submitted.

        Args:
            count: How many.
            timeout: Seconds; None: each rollout's own deadline decides.

        Raises:
            CallTimeout: Fewer finished in time; none was taken.
            ValueError: Fewer are open.
            Exception: The error of a rollout among them; that one is taken, the others are not.
        """
        with self._lock:
            if count > len(self._open):
                msg = f"{count} rollouts asked for, {len(self._open)} are open"
                raise ValueError(msg)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            done = [number for number, future in list(self._open.items()) if future.done()][:count]
            if len(done) == count:
                return [self._take(number) for number in done]
            remaining = None if until is None else until - time.monotonic()
            if remaining is not None and remaining <= 0:
                msg = f"{len(done)} of {count} rollouts finished within {timeout:g} s"
                raise WaitTimeout(msg, results={}, late={}, outcome="UNKNOWN", reason="wait")
            self._wait_for_more(count, remaining)

    def _wait_for_more(self, count: int, remaining: float | None) -> None:
        self.group.placer.wait(lambda: sum(f.done() for f in list(self._open.values())) >= count, remaining)

    def _take(self, number: int) -> Any:
        with self._lock:
            future = self._open.pop(number)
        return future.result()

    def rollout_batch(self, items: Iterable[Any]) -> list[Any]:
        """Run one rollout per item and return them in the order of the items."""
        return list(self._method.map(items).result())

    def cancel(self) -> None:
        """Cancel every open rollout and forget them."""
        with self._lock:
            gone, self._open = self._open, {}
        for future in gone.values():
            future.cancel()
