"""A clock that stands still until it is told to go on."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """A ``zbus.clock.Clock`` whose time a test sets. Times in nanoseconds; set and read it from any thread.

    Args:
        monotonic_ns: First reading of the monotonic clock.
        wall_ns: First reading of the wall clock; a day in 2026 by default.
    """

    __slots__ = ("_monotonic_ns", "_wall_ns")

    def __init__(self, monotonic_ns: int = 0, wall_ns: int = 1_767_225_600_000_000_000) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns

    def monotonic_ns(self) -> int:
        """Return the monotonic time last set."""
        return self._monotonic_ns

    def wall_ns(self) -> int:
        """Return the wall time last set."""
        return self._wall_ns

    def advance(self, seconds: float = 0.0, *, ns: int = 0) -> int:
        """Let time pass on both clocks and return the new monotonic time.

        Raises:
            ValueError: The step is negative; a monotonic clock never goes back.
        """
        step = round(seconds * 1e9) + ns
        if step < 0:
            msg = f"a monotonic clock does not go back ({step} ns)"
            raise ValueError(msg)
        self._monotonic_ns += step
        self._wall_ns += step
        return self._monotonic_ns

    def set_wall(self, wall_ns: int) -> None:
        """Step the wall clock, as an administrator or NTP does; the monotonic clock does not notice."""
        self._wall_ns = wall_ns
