"""One clock for all files: how many nanoseconds to add to the times of each.

Pure. Files whose processes shared a boot id and a time namespace share CLOCK_MONOTONIC, so their shift is exact.
Others are matched by the offsets that the run measured (``zbus_clock`` lines), with their bound; without any, by their
wall-clock anchors, whose error nobody has measured: said as a doubt, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

__all__ = ["MAX_US", "Anchor", "ClockPoint", "Shift", "align", "anchor_of", "clock_point"]

MAX_US: Final = 4e15
"""Times beyond this many µs (126 years) mean nothing; in ns, sums of two still fit into 64 bits."""

_EPOCH_US: Final = 1e14
"""Times beyond this many µs (year 1973) count from the Unix epoch, as torch's profiler writes them."""


_MAX_SLOPE: Final = 5e-4
"""No quartz drifts by more than this; a steeper line beyond the measured points is measurement error."""


@dataclass(frozen=True, slots=True, order=True)
class ClockPoint:
    """At the process's monotonic ``at_ns`` the clock ``ref`` showed ``at_ns + offset_ns``, within ``bound_ns``."""

    at_ns: int
    offset_ns: int
    bound_ns: int
    ref: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Anchor:
    """What one file says about its clock; without a ``zbus_meta`` line all but the first time are unknown.

    Attributes:
        first_ns: Earliest time known from the file's beginning, on its own scale.
        role: Of the process, to find the reference.
        run: Name of the run.
        clock: (boot id, time namespace) that own the monotonic clock; None: unknown.
        epoch_mono_ns: Monotonic clock at the file's time 0.
        epoch_wall_ns: Wall clock at the file's time 0, by its own anchor.
        points: Measured offsets to other clocks.
    """

    first_ns: int
    role: str = ""
    run: str = ""
    clock: tuple[str, int] | None = None
    epoch_mono_ns: int = 0
    epoch_wall_ns: int = 0
    points: list[ClockPoint] = field(default_factory=list, compare=False)

    def is_absolute(self) -> bool:
        """Return whether the times count from the Unix epoch."""
        return self.clock is None and self.first_ns > _EPOCH_US * 1000

    def by_wall(self) -> Anchor:
        """Return the anchor of one that shares its monotonic clock with nobody."""
        return self if self.clock is None else replace(self, clock=(f"{self.clock[0]} {id(self)}", 0), points=[])


@dataclass(frozen=True, slots=True)
class Shift:
    """How to move a file's times.

    Attributes:
        add_ns: Add this.
        how: ``reference``, ``shared``, ``measured``, ``wall``, ``start`` or ``none``.
        bound_ns: The error at most; None: unknown.
        at_ns, offset_ns: Add the offset too, in a straight line between these times (before any shift).
    """

    add_ns: int
    how: str
    bound_ns: int | None = None
    at_ns: tuple[int, ...] = ()
    offset_ns: tuple[int, ...] = ()

    def moved(self, ns: int) -> int:
        """Return a time of the file on the run's clock."""
        return ns + self.add_ns + round(self._offset(ns))

    def _offset(self, ns: int) -> float:
        at, offset = self.at_ns, self.offset_ns
        if not at:
            return 0.0
        if len(at) == 1:
            return float(offset[0])
        right = next((i for i, t in enumerate(at) if t >= ns), len(at) - 1) or 1
        span = at[right] - at[right - 1]
        slope = (offset[right] - offset[right - 1]) / span if span else 0.0
        if not at[0] <= ns <= at[-1]:
            slope = max(-_MAX_SLOPE, min(_MAX_SLOPE, slope))
        return offset[right] + slope * (ns - at[right]) if ns > at[0] else offset[0] + slope * (ns - at[0])


def anchor_of(meta: Mapping[str, Any], ts_us: float | None) -> Anchor | None:
    """Return the anchor in the args of a ``zbus_meta`` event, or None if they are not usable."""
    try:
        mono, wall = int(meta["mono_ns"]), int(meta["wall_ns"])
        epoch = int(meta["epoch_mono_ns"])
        boot = str(meta["boot_id"])
        clock = (boot, int(meta.get("time_ns", 0))) if boot else None
        first = round((ts_us or 0.0) * 1000)
        if max(abs(first), abs(mono), abs(wall), abs(epoch)) > MAX_US * 1000:
            return None
        run, role = str(meta.get("run", "")), str(meta.get("role", ""))
        return Anchor(first, role, run, clock, epoch, wall - mono + epoch)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def clock_point(args: Mapping[str, Any], ts_us: float | None) -> ClockPoint | None:  # noqa: ARG001  # as anchor_of
    """Return the measurement in the args of a ``zbus_clock`` event, or None if they are not usable."""
    try:
        at, offset, bound = int(args["at_ns"]), int(args["offset_ns"]), int(args["bound_ns"])
        if max(abs(at), abs(offset), abs(bound)) > MAX_US * 1000:
            return None
        return ClockPoint(at, offset, abs(bound), (str(args.get("ref_boot_id", "")), int(args.get("ref_time_ns", 0))))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def align(anchors: Sequence[Anchor]) -> list[Shift]:
    """Return the shift of each file, in order; the controller's clock, else the first known one, is the reference.

    The earliest known time is never moved below 0.
    """
    known = [a for a in anchors if a.clock is not None]
    reference = next((a for a in known if a.role == "controller"), known[0] if known else None)
    absolute = [a.first_ns for a in anchors if a.is_absolute()]
    zero_wall = reference.epoch_wall_ns if reference is not None else min(absolute, default=0)
    shifts = [_shift(anchor, reference, zero_wall) for anchor in anchors]
    lowest = min((s.moved(a.first_ns) for a, s in zip(anchors, shifts, strict=True)), default=0)
    return [replace(s, add_ns=s.add_ns - min(0, lowest)) for s in shifts]


def _shift(anchor: Anchor, reference: Anchor | None, zero_wall: int) -> Shift:
    if anchor.clock is None or reference is None:
        if anchor.is_absolute():
            return Shift(-zero_wall, "wall")
        return Shift(0, "none")
    if anchor is reference:
        return Shift(0, "reference", 0)
    add = anchor.epoch_mono_ns - reference.epoch_mono_ns
    if anchor.clock == reference.clock:
        return Shift(add, "shared", 0)
    points = sorted(p for p in anchor.points if p.ref in (reference.clock, ("", 0)))
    if points:
        at = tuple(p.at_ns - anchor.epoch_mono_ns for p in points)
        return Shift(add, "measured", max(p.bound_ns for p in points), at, tuple(p.offset_ns for p in points))
    return Shift(anchor.epoch_wall_ns - reference.epoch_wall_ns, "wall")
