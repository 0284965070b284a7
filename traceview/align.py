"""One clock for all files: how many nanoseconds to add to the times of each.

Pure. Files whose processes shared a boot id and a time namespace share CLOCK_MONOTONIC, so their shift is exact.
Between other clocks there are links: offsets that the run measured (``zbus_clock`` lines), and what requests and
replies say (``traceview.envelope``). Every clock is brought to the controller's along the links with the least error;
the errors add up. What no link reaches is matched by its wall-clock anchor, whose error nobody has measured: said as a
doubt, never hidden.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.clockline import FAR_NS, ClockLine, line_through

__all__ = [
    "MAX_US",
    "Anchor",
    "ClockPoint",
    "Link",
    "Shift",
    "align",
    "anchor_of",
    "clock_of",
    "clock_point",
    "measured",
]

MAX_US: Final = 4e15
"""Times beyond this many µs (126 years) mean nothing; in ns, sums of two still fit into 64 bits."""

_EPOCH_US: Final = 1e14
"""Times beyond this many µs (year 1973) count from the Unix epoch, as torch's profiler writes them."""


Ints = NDArray[np.int64]


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
        how: ``reference``, ``shared``, ``measured``, ``rpc``, ``wall``, ``start`` or ``none``.
        bound_ns: The error at most, at the points; None: unknown. ``worst_us`` tells it for all times.
        at_ns, offset_ns: Add the offset too, in a straight line between these times (before any shift).
        bounds_ns: The error at each of these times.
        apart_ns: By how much two ways to match this clock contradict each other, errors included; 0: they do not.
    """

    add_ns: int
    how: str
    bound_ns: int | None = None
    at_ns: tuple[int, ...] = ()
    offset_ns: tuple[int, ...] = ()
    bounds_ns: tuple[int, ...] = ()
    apart_ns: int = 0

    def moved(self, ns: int) -> int:
        """Return a time of the file on the run's clock."""
        at, offset = self.at_ns, self.offset_ns
        moved = ns + self.add_ns
        if at:
            right = min(max(bisect_right(at, ns), 1), len(at) - 1)
            left = right - 1
            slope = (offset[right] - offset[left]) / (at[right] - at[left])
            moved += offset[left] + round(slope * (min(max(ns, at[0]), at[-1]) - at[left]))
        return max(-2 * FAR_NS, min(2 * FAR_NS, moved))

    def move(self, ns: Ints) -> Ints:
        """Return many times of the file on the run's clock."""
        found: Ints = ns + self.add_ns
        return found + self.line().offset(ns) if self.at_ns else found

    def of_sibling(self, own: Anchor, other: Anchor) -> Shift:
        """Return the shift of another file of the same clock; ``own`` is the anchor of the file this one is for."""
        apart = other.epoch_mono_ns - own.epoch_mono_ns
        return replace(self, add_ns=self.add_ns + apart, at_ns=tuple(at - apart for at in self.at_ns))

    def worst_us(self, first_ns: int, last_ns: int) -> float | None:
        """Return the error at most, in µs, between two times of the run as this shift made them; None: unknown."""
        if self.bound_ns is None:
            return None
        if not self.at_ns or first_ns > last_ns:
            return self.bound_ns / 1000
        line = self.line()
        there = np.array([first_ns, last_ns], dtype=np.int64) - self.add_ns
        back = there - line.offset(there - self.offset_ns[len(self.offset_ns) // 2])
        return line.worst(int(back[0]), int(back[1])) / 1000

    def line(self) -> ClockLine:
        """Return the offset at all times; only if there is one."""
        at, offset, bounds = (np.array(c, dtype=np.int64) for c in (self.at_ns, self.offset_ns, self.bounds_ns))
        return ClockLine(at, offset, bounds)


@dataclass(frozen=True, slots=True)
class Link:
    """How one clock compares to another: ``line`` leads from ``clock`` to ``ref``."""

    clock: Hashable
    ref: Hashable
    line: ClockLine
    how: str


def anchor_of(meta: Mapping[str, Any], ts_us: float | None) -> Anchor | None:
    """Return the anchor in the args of a ``zbus_meta`` event, or None if they are not usable."""
    try:
        mono, wall = int(meta["mono_ns"]), int(meta["wall_ns"])
        epoch = int(meta["epoch_mono_ns"])
        boot = str(meta["boot_id"])
        clock = (boot, int(meta.get("time_ns", 0))) if boot else None
        first = round((ts_us or 0.0) * 1000)
        if max(abs(first), abs(mono), abs(wall), abs(epoch), abs(wall - mono + epoch)) > FAR_NS:
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


def clock_of(anchor: Anchor, number: int) -> Hashable:
    """Return the clock of file ``number``; one that nobody knows belongs to that file alone."""
    return anchor.clock if anchor.clock is not None else number


def measured(anchors: Sequence[Anchor]) -> list[Link]:
    """Return the links that the run measured."""
    reference = _reference(anchors)
    points: dict[tuple[Hashable, Hashable], list[ClockPoint]] = {}
    for anchor in anchors:
        for point in anchor.points:
            ref = point.ref if point.ref[0] else (reference.clock if reference is not None else None)
            known = max(abs(point.at_ns), abs(point.at_ns + point.offset_ns), point.bound_ns) < FAR_NS
            if known and anchor.clock is not None and ref not in (None, anchor.clock):
                points.setdefault((anchor.clock, ref), []).append(point)
    return [
        Link(clock, ref, line_through([(p.at_ns, p.offset_ns, p.bound_ns) for p in own]), "measured")
        for (clock, ref), own in points.items()
    ]


def align(anchors: Sequence[Anchor], links: Sequence[Link] | None = None) -> list[Shift]:
    """Return the shift of each file, in order; the controller's clock, else the first known one, is the reference.

    Args:
        anchors: What the files say of their clocks.
        links: How their clocks compare; None: as measured by the run.

    The earliest known time is never moved below 0.
    """
    links = measured(anchors) if links is None else links
    reference = _reference(anchors)
    absolute = [a.first_ns for a in anchors if a.is_absolute()]
    if reference is None and links:
        reference = next((a for a in anchors if a.role == "controller"), anchors[0])
    known_wall = reference is not None and reference.clock is not None
    zero_wall = reference.epoch_wall_ns if reference is not None and known_wall else min(absolute, default=0)
    clocks = [clock_of(anchor, number) for number, anchor in enumerate(anchors)]
    order = sorted(range(len(anchors)), key=lambda n: (anchors[n] is not reference, anchors[n].role != "controller", n))
    shifts = [Shift(0, "none")] * len(anchors)
    todo = dict.fromkeys(order)
    while todo:  # clocks that are linked with one another, around the first of them
        first = next(iter(todo))
        base = _unlinked(anchors[first], reference, zero_wall, alone=not links)
        routes = _routes(clocks[first], links)
        for number in [n for n in todo if clocks[n] in routes]:
            del todo[number]
            shifts[number] = _linked(anchors[number], anchors[first], base, routes[clocks[number]])
        shifts[first] = base
    lowest = min((s.moved(a.first_ns) for a, s in zip(anchors, shifts, strict=True)), default=0)
    return [replace(s, add_ns=max(-2 * FAR_NS, min(2 * FAR_NS, s.add_ns - min(0, lowest)))) for s in shifts]


def _reference(anchors: Sequence[Anchor]) -> Anchor | None:
    known = [a for a in anchors if a.clock is not None]
    return next((a for a in known if a.role == "controller"), known[0] if known else None)


def _unlinked(anchor: Anchor, reference: Anchor | None, zero_wall: int, *, alone: bool) -> Shift:
    """Return the shift of the reference, or of a clock that no link leads to."""
    if anchor is reference and not (alone and anchor.clock is None):
        return Shift(0, "reference", 0)
    if anchor.clock is None or reference is None or reference.clock is None:
        return Shift(-zero_wall, "wall") if anchor.is_absolute() else Shift(0, "none")
    return Shift(anchor.epoch_wall_ns - reference.epoch_wall_ns, "wall")


def _linked(anchor: Anchor, first: Anchor, base: Shift, route: _Route) -> Shift:
    """Return the shift of a clock that is linked with that of ``first``, which is moved by ``base``."""
    add = base.add_ns + anchor.epoch_mono_ns - first.epoch_mono_ns
    sure = base.how == "reference"
    if route.line is None:
        return Shift(add, "shared" if sure else base.how, base.bound_ns)
    line = route.line
    at, offset, bounds = (tuple(c.tolist()) for c in (line.at_ns - anchor.epoch_mono_ns, line.offset_ns, line.bound_ns))
    how, bound = (route.how, max(bounds[1:-1] or bounds)) if sure else (base.how, None)
    return Shift(add, how, bound, at, offset, bounds, route.apart_ns)


# -- ways between clocks -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Route:
    """From a clock to the reference: None as its line is the reference itself."""

    line: ClockLine | None
    how: str = "shared"
    apart_ns: int = 0


def _routes(root: Hashable, links: Sequence[Link]) -> dict[Hashable, _Route]:
    """Return the way of each clock to ``root`` that has the least error; those without one are not in it."""
    ways: dict[Hashable, list[tuple[Hashable, ClockLine, str, int]]] = {}
    for number, link in enumerate(links):
        ways.setdefault(link.ref, []).append((link.clock, link.line, link.how, number))
        ways.setdefault(link.clock, []).append((link.ref, link.line.inverse(), link.how, number))
    routes: dict[Hashable, _Route] = {}
    used: set[int] = set()
    queue: list[tuple[int, int, Hashable, _Route, int]] = [(0, 0, root, _Route(None), -1)]
    count = 0
    while queue:
        _, _, clock, route, through = heapq.heappop(queue)
        if clock in routes:
            continue
        routes[clock] = route
        used.add(through)
        for other, line, how, number in ways.get(clock, []):
            if other in routes:
                continue
            whole = line if route.line is None else line.then(route.line)
            named = how if route.line is None or route.how == how else "rpc"
            count += 1
            heapq.heappush(queue, (_error(whole), count, other, _Route(whole, named), number))
    _compare([link for number, link in enumerate(links) if number not in used], routes)
    return routes


def _error(line: ClockLine) -> int:
    """Return the usual error of a line at its points."""
    return int(np.median(line.bound_ns[1:-1] if len(line.bound_ns) > 2 else line.bound_ns))


def _compare(others: Sequence[Link], routes: dict[Hashable, _Route]) -> None:
    """Look whether the links that were not taken agree with the ways; what they contradict has a wider bound."""
    for link in others:
        one, two = routes.get(link.clock), routes.get(link.ref)
        if one is None or two is None:
            continue
        inner = slice(1, -1)
        at, sure = link.line.at_ns[inner], link.line.sure(link.line.at_ns[inner])
        here, error = (one.line.offset(at), one.line.bound(at)) if one.line is not None else (at * 0, at * 0)
        there = at + link.line.offset_ns[inner]
        sure &= one.line.sure(at) if one.line is not None else True
        if two.line is not None:
            sure &= two.line.sure(there)
            there, error = there + two.line.offset(there), error + two.line.bound(there)
        apart, bound = np.abs(there - at - here), link.line.bound_ns[inner]
        if (apart > error + bound)[sure].any():
            most = int((apart + bound)[sure].max())
            for route in (one, two):
                if route.line is not None:
                    route.line, route.apart_ns = route.line.wider(most), max(route.apart_ns, most)
