"""Calls of a role that wait for a rank to return stand in line: a call submitted later does not overtake them.

So what one thread submits still starts in its order (P4), also across a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Protocol

from controller.background import shared

__all__ = ["LOOK_AGAIN_S", "Line", "Waiting"]

LOOK_AGAIN_S: Final = 0.05
"""How often those in line are tried."""


class Waiting(Protocol):
    """What stands in line."""

    @property
    def place_in(self) -> tuple[str, Sequence[int]] | None:
        """Lane and ranks that must be free of earlier calls; None: any rank will do, so there is no order to keep."""

    def look_again(self, *, free: bool) -> bool:
        """Try to leave the line; ``free``: no earlier call is in the way. Return whether it still waits."""


class Line:
    """The line of one role. Thread-safe; those in it are tried on the background thread, in order."""

    def __init__(self) -> None:
        self._line: list[Waiting] = []
        self._looking = False
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._line)

    def blocks(self, one: Waiting) -> bool:
        """Tell whether a call that is not in line has earlier ones in its way."""
        with self._lock:
            return _in_the_way(self._line, one)

    def join(self, one: Waiting) -> None:
        """Stand in line, at its end."""
        with self._lock:
            self._line.append(one)
            if not self._looking:
                self._looking = True
                shared().call(self._look, LOOK_AGAIN_S)

    def hurry(self, delay_s: float = 0.0) -> None:
        """Try those in line after ``delay_s`` seconds: something has changed for one of them by then."""
        shared().call(self._try_all, delay_s)

    def _look(self) -> None:
        self._try_all()
        with self._lock:
            self._looking = bool(self._line)
            if self._looking:
                shared().call(self._look, LOOK_AGAIN_S)

    def _try_all(self) -> None:
        with self._lock:
            line = list(self._line)
        still: list[Waiting] = []
        for one in line:
            if one.look_again(free=not _in_the_way(still, one)):
                still.append(one)
            else:
                with self._lock:
                    self._line.remove(one)


def _in_the_way(earlier: Sequence[Waiting], one: Waiting) -> bool:
    place = one.place_in
    if place is None or not earlier:
        return False
    lane, ranks = place
    for other in earlier:
        theirs = other.place_in
        if theirs is not None and theirs[0] == lane and not set(theirs[1]).isdisjoint(ranks):
            return True
    return False
