"""How one clock runs beside another: straight lines between points, each with a bound of its error. Pure.

A clock's rate is taken to stay the same between neighbouring points but for ``WANDER``; a clock that stood still or was
set, as of a host that slept, shows as a step: the line before it and the line after it are never bent into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FAR_NS", "MAX_RATE", "WANDER", "ClockLine", "Point", "Step", "line_through"]

MAX_RATE: Final = 5e-4
"""Two clocks that run part by less than this (500 ppm, the most that a kernel slews); more is a step."""

WANDER: Final = 1e-6
"""How much the rate may change between neighbouring points: 1 ppm, as with changing temperature."""

FAR_NS: Final = 1 << 61
"""Times beyond this many ns (73 years) are no times of a clock; differences of two still fit into 64 bits."""

BEYOND_NS: Final = 86_400_000_000_000
"""Lines go on beyond their ends for a day."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Point = tuple[int, int, int]
"""(at, offset, bound) in ns."""


@dataclass(frozen=True, slots=True)
class Step:
    """Between ``after_ns`` and ``before_ns`` of its clock the offset changed at once, by about ``by_ns``."""

    after_ns: int
    before_ns: int
    by_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class ClockLine:
    """The offset from one clock to another at any time of the first.

    Attributes:
        at_ns: Times of the first clock, ascending; at least two.
        offset_ns: The second clock minus the first at these times.
        bound_ns: The true offset is not further away than this.
        steps: Where it changed at once; times between ``after_ns`` and ``before_ns`` are not covered by the bound.
    """

    at_ns: Ints
    offset_ns: Ints
    bound_ns: Ints
    steps: tuple[Step, ...] = ()

    def offset(self, at_ns: Ints) -> Ints:
        """Return the offset at times of the first clock, which begin anywhere."""
        return _between(at_ns, self.at_ns, self.offset_ns)

    def bound(self, at_ns: Ints) -> Ints:
        """Return the error at most of ``offset`` at these times."""
        right = np.clip(np.searchsorted(self.at_ns, at_ns), 1, len(self.at_ns) - 1)
        near = np.minimum(np.abs(at_ns - self.at_ns[right - 1]), np.abs(self.at_ns[right] - at_ns))
        found: Ints = _between(at_ns, self.at_ns, self.bound_ns) + np.ceil(near * WANDER).astype(np.int64)
        return found

    def sure(self, at_ns: Ints) -> NDArray[np.bool_]:
        """Return which times are covered by the bound: those that are not within a step."""
        found = np.ones(len(at_ns), dtype=np.bool_)
        for step in self.steps:
            found &= (at_ns <= step.after_ns) | (at_ns >= step.before_ns)
        return found

    def worst(self, first_ns: int, last_ns: int) -> int:
        """Return the largest bound between two times."""
        inside = self.at_ns[(self.at_ns > first_ns) & (self.at_ns < last_ns)]
        middles = (inside[1:] + inside[:-1]) // 2 if len(inside) > 1 else inside
        ends = np.array([first_ns, (first_ns + last_ns) // 2, last_ns], dtype=np.int64)
        return int(self.bound(np.concatenate([inside, middles, ends])).max())

    def inverse(self) -> ClockLine:
        """Return the line from the second clock to the first."""
        at = np.maximum.accumulate(self.at_ns + self.offset_ns)
        keep = np.diff(at, prepend=at[0] - 1) > 0
        steps = self._steps_there()
        return ClockLine(at[keep], (self.at_ns - at)[keep], self.bound_ns[keep], steps)

    def then(self, other: ClockLine) -> ClockLine:
        """Return the line from the first clock to the second clock of ``other``, whose first clock is our second."""
        back = self.inverse()
        at = np.unique(np.concatenate([self.at_ns, other.at_ns + back.offset(other.at_ns)]))
        middle = at + self.offset(at)
        offset, bound = self.offset(at) + other.offset(middle), self.bound(at) + other.bound(middle)
        bound = np.minimum(bound, FAR_NS)
        ends = np.array([(s.after_ns, s.before_ns) for s in other.steps], dtype=np.int64).reshape(-1, 2)
        ends += back.offset(ends.ravel()).reshape(-1, 2)
        theirs = [Step(int(a), int(b), s.by_ns) for (a, b), s in zip(ends, other.steps, strict=True)]
        return ClockLine(at, offset, bound, (*self.steps, *theirs))

    def wider(self, by_ns: int) -> ClockLine:
        """Return the line with larger bounds."""
        return replace(self, bound_ns=np.minimum(self.bound_ns + by_ns, FAR_NS))

    def _steps_there(self) -> tuple[Step, ...]:
        """Return the steps as the second clock has them."""
        ends = np.array([(s.after_ns, s.before_ns) for s in self.steps], dtype=np.int64).reshape(-1, 2)
        ends += self.offset(ends.ravel()).reshape(-1, 2)
        return tuple(Step(int(min(e)), int(max(e)), -s.by_ns) for e, s in zip(ends, self.steps, strict=True))


def line_through(points: Sequence[Point]) -> ClockLine:
    """Return the line through measured points, in any order; at least one.

    A point that its neighbours make superfluous, because they leave less open there than it does, is left out. Beyond
    the ends the rate is that of the two points that leave least of it open.
    """
    runs: list[list[Point]] = []
    steps: list[Step] = []
    for point in sorted({p[0]: p for p in sorted(points, key=lambda p: -p[2])}.values()):
        before = runs[-1][-1] if runs else None
        if before is not None and not _parted(before, point):
            runs[-1].append(point)
            continue
        if before is not None:
            steps.append(Step(before[0], point[0], point[1] - before[1]))
        runs.append([point])
    runs = [_pruned(run) for run in runs]
    found = [_beyond(runs[0], -1), *(point for run in _joined(runs) for point in run), _beyond(runs[-1], 1)]
    at, offset, bound = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
    return ClockLine(at, offset, bound, tuple(steps))


def _parted(a: Point, b: Point) -> bool:
    """Return whether no clock that only drifts comes from one point to the other."""
    return abs(b[1] - a[1]) > a[2] + b[2] + MAX_RATE * (b[0] - a[0])


def _pruned(run: list[Point]) -> list[Point]:
    """Leave out points that say less than their neighbours do: those of a time of load."""
    kept: list[Point] = []
    for place, point in enumerate(run):
        while kept and kept[-1][2] > _implied(point, kept[-1]):  # the one before says less than we do from here
            kept.pop()
        later = run[place + 1] if place + 1 < len(run) else None
        if kept and point[2] > _implied(kept[-1], point) and later is not None:
            continue
        kept.append(point)
    return kept


def _implied(known: Point, other: Point) -> float:
    """Return the error at most that one point alone leaves open at the time of the other."""
    return known[2] + MAX_RATE * abs(other[0] - known[0])


def _joined(runs: list[list[Point]]) -> list[list[Point]]:
    """Let the line before a step go on to the middle of what is not known, where it is long."""
    found: list[list[Point]] = []
    for place, run in enumerate(runs):
        own = list(run)
        if place and own[0][0] - runs[place - 1][-1][0] > 2_000_000_000:
            before, middle = runs[place - 1][-1], (own[0][0] + runs[place - 1][-1][0]) // 2
            own[:0] = [(middle, before[1], before[2]), (middle + 1, own[0][1], own[0][2])]
        found.append(own)
    return found


def _beyond(run: list[Point], way: int) -> Point:
    """Return a point a day beyond the first (``way`` -1) or last (1) point of a run."""
    end, others = (run[-1], run[:-1]) if way > 0 else (run[0], run[1:])
    rate, doubt = 0.0, MAX_RATE
    for other in others:
        distance = abs(end[0] - other[0])
        open_ns = (end[2] + other[2]) / distance
        if open_ns < doubt:
            rate, doubt = (end[1] - other[1]) / (end[0] - other[0]), open_ns
    rate = max(-MAX_RATE, min(MAX_RATE, rate))
    far = way * BEYOND_NS
    return end[0] + far, end[1] + round(rate * far), end[2] + round((doubt + WANDER) * BEYOND_NS)


def _between(at_ns: Ints, known_ns: Ints, values: Ints) -> Ints:
    """Return values on the straight lines through known ones; exact also for numbers beyond 53 bits."""
    base_at, base = known_ns[0], values[0]
    steps = np.interp((at_ns - base_at).astype(np.float64), (known_ns - base_at), (values - base))
    found: Ints = np.rint(steps).astype(np.int64) + base
    return found
