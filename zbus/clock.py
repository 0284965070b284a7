"""Time as an interface: whoever needs the time is handed a ``Clock``.

Pure code never reads a clock; it takes ``now_ns``. Edges hold a ``Clock`` so that tests can hand in a fake one
(``zbus.testing.FakeClock``).
"""

from __future__ import annotations

import time
from typing import Final, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """What zbus asks of a clock. Both methods may be called from any thread."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds of a clock that never goes back; the origin means nothing across hosts."""
        ...

    def wall_ns(self) -> int:
        """Return nanoseconds since the Unix epoch, for display only: never compared, never used for expiry."""
        ...


class SystemClock:
    """The machine's clocks (CLOCK_MONOTONIC and CLOCK_REALTIME)."""

    __slots__ = ()

    # The functions themselves: a small call asks some ten times, and a method around each would cost more than they do.
    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


SYSTEM_CLOCK: Final = SystemClock()
