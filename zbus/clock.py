"""Time as an interface: whoever needs the time is handed a ``Clock``; and which monotonic clock a process has.

Pure code never reads a clock; it takes ``now_ns``. Edges hold a ``Clock`` so that tests can hand in a fake one
(``zbus.testing.FakeClock``).
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "ClockId", "SystemClock", "boot_id", "clock_id", "time_namespace"]


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


class ClockId(NamedTuple):
    """What owns a monotonic clock: processes with equal ids share it exactly."""

    boot_id: str
    time_ns: int


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of this machine, or an empty text where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def time_namespace() -> int:
    """Return the inode of this process's time namespace (0 where unknown): it owns CLOCK_MONOTONIC's offset."""
    try:
        return os.stat("/proc/self/ns/time").st_ino  # noqa: PTH116  # a magic link: stat, not a path question
    except OSError:
        return 0


def clock_id() -> ClockId:
    """Return the id of this process's monotonic clock."""
    return ClockId(boot_id(), time_namespace())
