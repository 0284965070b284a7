"""An engine that knows the true time, whatever its time namespace shows, and can be slow in chosen ways."""

from __future__ import annotations

import time
from pathlib import Path

import zbus
from zbus import Everywhere, PerRank

OFFSETS = Path("/proc/self/timens_offsets")


def ahead_ns() -> int:
    """Return by how much this process's monotonic clock is ahead of the machine's."""
    for line in OFFSETS.read_text().splitlines():
        name, seconds, nanoseconds = line.split()
        if name in ("monotonic", "1"):
            return int(seconds) * 10**9 + int(nanoseconds)
    return 0


class Working(zbus.Engine):
    """Works for some milliseconds per step, in two phases; one rank may be planted slow.

    Args:
        slow_rank: Which rank is slow; -1: none.
        how: ``rank`` (all takes 2.5 times as long), ``phase`` (only ``reward`` takes 5 times as long) or ``late`` (it
            works 30 ms on something else before each call).
    """

    def __init__(self, slow_rank: int = -1, how: str = "") -> None:
        self.slow_rank, self.how = slow_rank, how
        self.ahead = ahead_ns()

    def setup(self, ctx: zbus.Context) -> None:
        self.planted = self.how if ctx.rank == self.slow_rank else ""

    def _phase(self, name: str, milliseconds: float) -> None:
        with zbus.span(name, category="compute", before_ns=time.monotonic_ns() - self.ahead) as span:
            span.set(after_ns=time.monotonic_ns() - self.ahead)
            time.sleep(milliseconds / 1000)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def train(self, step: int, load: bytes = b"") -> int:
        factor = 2.5 if self.planted == "rank" else 1.0
        self._phase("forward", 10.0 * factor)
        self._phase("reward", 5.0 * (5.0 if self.planted == "phase" else factor))
        return step

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def prepare(self) -> None:
        if self.planted == "late":
            time.sleep(0.03)
