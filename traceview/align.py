"""One clock for all files: how many nanoseconds to add to the times of each.

Pure. Files whose processes shared a boot id and a time namespace share CLOCK_MONOTONIC, so their shift is exact.
Others are matched by their wall-clock anchors, whose error nobody has measured: said as a doubt, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["MAX_US", "Anchor", "Shift", "align", "anchor_of"]

MAX_US: Final = 1e16
"""Times beyond this many µs (three centuries) mean nothing."""

_EPOCH_US: Final = 1e14
"""Times beyond this many µs (year 1973) count from the Unix epoch, as torch's profiler writes them."""


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
    """

    first_ns: int
    role: str = ""
    run: str = ""
    clock: tuple[str, int] | None = None
    epoch_mono_ns: int = 0
    epoch_wall_ns: int = 0


@dataclass(frozen=True, slots=True)
class Shift:
    """Add ``add_ns`` to a file's times; ``how`` is ``reference``, ``shared``, ``wall`` or ``none``."""

    add_ns: int
    how: str


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


def align(anchors: Sequence[Anchor]) -> list[Shift]:
    """Return the shift of each file, in order; the controller's clock, else the first known one, is the reference.

    The earliest known time is never moved below 0.
    """
    known = [a for a in anchors if a.clock is not None]
    reference = next((a for a in known if a.role == "controller"), known[0] if known else None)
    absolute = [a.first_ns for a in anchors if a.clock is None and a.first_ns > _EPOCH_US * 1000]
    zero_wall = reference.epoch_wall_ns if reference is not None else min(absolute, default=0)
    shifts = [_shift(anchor, reference, zero_wall) for anchor in anchors]
    lowest = min((a.first_ns + s.add_ns for a, s in zip(anchors, shifts, strict=True)), default=0)
    return [Shift(s.add_ns - min(0, lowest), s.how) for s in shifts]


def _shift(anchor: Anchor, reference: Anchor | None, zero_wall: int) -> Shift:
    if anchor.clock is None or reference is None:
        if anchor.first_ns > _EPOCH_US * 1000:
            return Shift(-zero_wall, "wall")
        return Shift(0, "none")
    if anchor is reference:
        return Shift(0, "reference")
    if anchor.clock == reference.clock:
        return Shift(anchor.epoch_mono_ns - reference.epoch_mono_ns, "shared")
    return Shift(anchor.epoch_wall_ns - reference.epoch_wall_ns, "wall")
