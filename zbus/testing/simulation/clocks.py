"""The monotonic clocks of simulated processes: each with its own origin and rate, and jumps."""

from __future__ import annotations

__all__ = ["NodeClock"]


class NodeClock:
    """One process's clock, in nanoseconds.

    Args:
        rate: How fast it goes, as against the world's time; 1 is right.
        origin: What it shows at the world's beginning.
    """

    __slots__ = ("_base", "_since", "rate")

    def __init__(self, rate: float = 1.0, origin: int = 0) -> None:
        self.rate = rate
        self._base = origin
        self._since = 0

    def read(self, world_ns: int) -> int:
        """Return what it shows at a time of the world."""
        if self.rate == 1.0:
            return self._base + world_ns - self._since
        return self._base + int((world_ns - self._since) * self.rate)

    def when(self, shown_ns: int) -> int:
        """Return the first time of the world at which it shows as much."""
        if self.rate == 1.0:
            return self._since + shown_ns - self._base
        return self._since + int((shown_ns - self._base) / self.rate) + 1

    def jump(self, by_ns: int) -> None:
        """Go forward at once, as after a suspended machine wakes up."""
        self._base += by_ns
