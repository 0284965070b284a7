"""The offset between two clocks from requests and replies alone. Pure.

A request leaves before it arrives, a reply too. So every request says that the caller's clock is *at least* so much
ahead of the worker's (sent minus arrived), and every reply that it is *at most* so much ahead (received minus
answered), whatever the ways took. Those that took least say most. Requests and replies need not belong together, and a
method may run for minutes.

Time is cut into cells; at each border between two the offset is all that a line through the cells beside it leaves
open: the middle is the estimate, half the width the bound. Where no line is left, the clock was stopped or set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.clockline import BEYOND_NS, MAX_RATE, WANDER, ClockLine, Step

__all__ = ["Limits", "fit"]

_CELL: Final = 128
"""Requests, and replies, that a cell has at least, unless it would be longer than ``_CELL_NS``."""

_CELL_NS: Final = 30_000_000_000
_CELLS: Final = 512
_KEPT: Final = 8
"""Limits of each kind kept of a cell: the narrowest of each eighth of it."""

_SLACK_NS: Final = 2
"""Times are written rounded to the nanosecond."""

_RATES_MAY_CHANGE: Final = (WANDER, 20e-6, 200e-6)
"""How much the rate may change within the cells around a border: the least that explains what is seen is taken."""

_REFINED: Final = 4
"""Times that points are added where the line exceeds a limit between two points."""

_STEPS: Final = 50
_MOST_SPLITS: Final = 32
_GOLD: Final = (5**0.5 - 1) / 2

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What is known of an offset: at ``at_ns`` it is at least (or, with ``most``, at most) ``offset_ns``.

    In any order; ``most`` says of each which of the two it is.
    """

    at_ns: Ints
    offset_ns: Ints
    most: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.at_ns)

    @classmethod
    def all_of(cls, parts: Sequence[Limits]) -> Limits:
        """Return all limits of several."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("at_ns", "offset_ns", "most"))
        )

    def part(self, which: Ints | slice | NDArray[np.bool_]) -> Limits:
        """Return some of them."""
        return Limits(self.at_ns[which], self.offset_ns[which], self.most[which])


def fit(limits: Limits) -> ClockLine | None:
    """Return the line that the limits leave; None if they say nothing, or contradict one another too often."""
    limits = limits.part(np.argsort(limits.at_ns, kind="stable"))
    pieces: list[_Piece] = []
    todo = [limits]
    steps: list[tuple[int, int]] = []
    while todo:
        part = todo.pop()
        if part.most.all() or not part.most.any():
            continue
        piece = _Piece.of(part)
        if piece.torn is None:
            pieces.append(piece)
            continue
        if len(steps) >= _MOST_SPLITS:
            return None
        left, right = _tear(part, *piece.torn)
        steps.append((int(left.at_ns[-1]), int(right.at_ns[0])))
        todo += [right, left]
    return _line(pieces, steps) if pieces else None


def _line(pieces: list[_Piece], torn: list[tuple[int, int]]) -> ClockLine | None:
    pieces = [piece for piece in pieces if len(piece.at)]
    if not pieces:
        return None
    at, offset, bound = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("at", "offset", "bound"))
    far, ends = np.array([-BEYOND_NS, BEYOND_NS]), np.array([0, -1])
    rates = np.array([pieces[0].rate[0], pieces[-1].rate[-1]])
    doubts = np.array([pieces[0].doubt[0], pieces[-1].doubt[-1]]) + WANDER
    columns = (
        _around(at, at[ends] + far),
        _around(offset, offset[ends] + np.rint(rates * far).astype(np.int64)),
        _around(bound, bound[ends] + np.ceil(doubts * BEYOND_NS).astype(np.int64)),
    )
    jumps = ClockLine(*columns).offset(np.array(torn, dtype=np.int64).reshape(-1))
    steps = [Step(a, b, int(jumps[2 * n + 1] - jumps[2 * n])) for n, (a, b) in enumerate(torn)]
    return ClockLine(*columns, tuple(sorted(steps, key=lambda step: step.after_ns)))


def _around(inner: Ints, ends: Ints) -> Ints:
    found: Ints = np.concatenate([ends[:1], inner, ends[1:]])
    return found


# -- cells -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Piece:
    """A time without a step: offset, bound, rate and what is open of it at the borders of its cells.

    ``torn``: the first border where no line is left, if there is one: the limits around it (from … to), and its time.
    """

    at: Ints
    offset: Ints
    bound: Ints
    rate: Floats
    doubt: Floats
    torn: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, limits: Limits) -> _Piece:
        """Work out one piece of sorted limits."""
        cells = _Cells(limits)
        found = cells.open_at(cells.borders)
        empty = np.zeros(0, dtype=np.int64)
        if not found.possible.all():
            border = int(cells.borders[int(np.argmin(found.possible))])
            return cls(empty, empty, empty, np.zeros(0), np.zeros(0), (*cells.around(border), border))
        piece = cls(cells.borders, *cells.column(found), found.rate, found.doubt)
        for _ in range(_REFINED):
            if not piece.refine(limits, cells):
                break
        return piece

    def refine(self, limits: Limits, cells: _Cells) -> bool:
        """Add a point at the limit that is exceeded most between each two points; False if none is."""
        line = np.rint(np.interp(limits.at_ns - self.at[0], self.at - self.at[0], self.offset - self.offset[0]))
        beyond = line.astype(np.int64) + self.offset[0] - limits.offset_ns
        beyond = np.where(limits.most, beyond, -beyond)
        wrong = np.flatnonzero(beyond > _SLACK_NS)
        if not len(wrong):
            return False
        gap = np.searchsorted(self.at, limits.at_ns[wrong])
        order = np.lexsort((-beyond[wrong], gap))
        worst = wrong[order[np.flatnonzero(np.diff(gap[order], prepend=-1))]]
        worst = worst[~np.isin(limits.at_ns[worst], self.at)]
        if not len(worst):
            return False
        at = limits.at_ns[worst]
        found = cells.open_at(at)
        known = (limits.offset_ns[worst] - cells.base).astype(np.float64)
        found.low = np.where(limits.most[worst], found.low, np.maximum(found.low, known))
        found.high = np.where(limits.most[worst], np.minimum(found.high, known), found.high)
        good = found.possible & (found.low <= found.high)
        order = np.argsort(np.concatenate([self.at, at[good]]), kind="stable")
        offset, bound = cells.column(found)
        for name, more in (
            ("at", at), ("offset", offset), ("bound", bound), ("rate", found.rate), ("doubt", found.doubt)
        ):  # fmt: skip
            setattr(self, name, np.concatenate([getattr(self, name), more[good]])[order])
        return bool(good.any())


class _Cells:
    """Sorted limits cut into cells, and the narrowest limits of each."""

    def __init__(self, limits: Limits) -> None:
        self._starts = _cells(limits)
        self._ends = np.append(self._starts, len(limits))
        self._begins = limits.at_ns[self._starts]
        self.borders = np.unique(np.append(self._begins, limits.at_ns[-1]))
        self._base_at, self.base = int(self._begins[0]), int(np.median(limits.offset_ns))
        kept = [_kept(limits, self._starts, most=most) for most in (False, True)]
        self._kept = [((at - self._base_at).astype(float), (offset - self.base).astype(float)) for at, offset in kept]

    def _first(self, at: Ints) -> Ints:
        """Return the first of the four cells around each time."""
        cell = np.searchsorted(self._begins, at, side="right") - 1
        return np.clip(cell - 2, 0, max(0, len(self._starts) - 4))

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return which limits the cells around a time hold: from … to."""
        first = int(self._first(np.array([at_ns]))[0])
        return int(self._ends[first]), int(self._ends[min(first + 4, len(self._starts))])

    def open_at(self, at: Ints) -> _Open:
        """Return what the limits around these times leave open there, relative to ``base``."""
        cells = self._first(at)[:, None] + np.arange(min(4, len(self._starts)))[None, :]
        here = (at - self._base_at).astype(np.float64)[:, None]
        rows = [
            (times[cells].reshape(len(at), -1) - here, offsets[cells].reshape(len(at), -1))
            for times, offsets in self._kept
        ]
        return _Open.at(*rows)

    def column(self, found: _Open) -> tuple[Ints, Ints]:
        """Return (offset, bound): the middle of what is open, and half its width."""
        middle = np.rint((found.low + found.high) / 2).astype(np.int64) + self.base
        return middle, np.ceil((found.high - found.low) / 2).astype(np.int64) + 1


def _cells(limits: Limits) -> Ints:
    """Return the places where cells begin: each has requests and replies, enough of them or of time."""
    at, count = limits.at_ns, len(limits)
    per = max(2 * _CELL, count // _CELLS)
    longest = max(_CELL_NS, int(at[-1] - at[0]) // _CELLS)
    lows, highs = np.flatnonzero(~limits.most), np.flatnonzero(limits.most)
    starts = [0]
    place = 0
    while True:
        both = max(_next(lows, place), _next(highs, place))
        place = max(min(place + per, int(np.searchsorted(at, at[place] + longest))), both + 1)
        rest = max(_next(lows, place), _next(highs, place)) if place < count else count
        if rest >= count:  # what is left would lack one of the two: it belongs to this cell
            return np.array(starts, dtype=np.int64)
        starts.append(place)


def _next(places: Ints, at: int) -> int:
    """Return the first place from ``at`` on; beyond the last one a number larger than all."""
    found = int(np.searchsorted(places, at))
    return int(places[found]) if found < len(places) else 1 << 60


def _kept(limits: Limits, starts: Ints, *, most: bool) -> tuple[Ints, Ints]:
    """Return (at, offset) of the narrowest limits of one kind, a row per cell; rows are filled up with copies."""
    chosen = limits.most == most
    at, offset = limits.at_ns[chosen], limits.offset_ns[chosen]
    cell = np.searchsorted(starts, np.flatnonzero(chosen), side="right") - 1
    count = np.bincount(cell, minlength=len(starts))
    begin = np.cumsum(count) - count
    inside = np.arange(len(at)) - begin[cell]
    eighth = inside * _KEPT // np.maximum(1, count[cell])
    narrow = (offset - _rate_of(at, offset, begin, count) * (at - at[0])) * (1 if most else -1)
    order = np.lexsort((narrow, eighth, cell))
    first = np.flatnonzero(np.diff(cell[order] * _KEPT + eighth[order], prepend=-1))
    best = order[first]
    rows_at, rows_offset = (np.repeat(column[order[begin]], _KEPT).reshape(-1, _KEPT) for column in (at, offset))
    rows_at[cell[best], eighth[best]], rows_offset[cell[best], eighth[best]] = at[best], offset[best]
    return rows_at, rows_offset


def _rate_of(at: Ints, offset: Ints, begin: Ints, count: Ints) -> float:
    """Return roughly how fast the offset changes, to compare limits of different times."""
    means = [np.add.reduceat(column.astype(np.float64), begin) / count for column in (at, offset)]
    if len(begin) < 2:
        return 0.0
    along = np.diff(means[0])
    rates = np.diff(means[1])[along > 0] / along[along > 0]
    return float(np.clip(np.median(rates), -MAX_RATE, MAX_RATE)) if len(rates) else 0.0


# -- what lines are left ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """What the limits around each border leave open: the offset there, and the rate."""

    possible: NDArray[np.bool_]
    low: Floats
    high: Floats
    rate: Floats
    doubt: Floats

    @classmethod
    def at(cls, lows: tuple[Floats, Floats], highs: tuple[Floats, Floats]) -> _Open:
        """Work it out; the arguments are (distance, offset), a row per border."""
        count = len(lows[0])
        found = cls(np.zeros(count, dtype=np.bool_), *(np.zeros(count) for _ in range(4)))
        for change in _RATES_MAY_CHANGE:
            rest = np.flatnonzero(~found.possible)
            if not len(rest):
                break
            found._fill(rest, [part[rest] for part in lows], [part[rest] for part in highs], change)
        return found

    def _fill(self, rows: Ints, lows: list[Floats], highs: list[Floats], change: float) -> None:
        low_at, low = lows[0], lows[1] - change * np.abs(lows[0]) - _SLACK_NS
        high_at, high = highs[0], highs[1] + change * np.abs(highs[0]) + _SLACK_NS

        def least(rate: Floats) -> Floats:
            found: Floats = (low - rate[:, None] * low_at).max(axis=1)
            return found

        def most(rate: Floats) -> Floats:
            found: Floats = (high - rate[:, None] * high_at).min(axis=1)
            return found

        ends = np.full(len(rows), -MAX_RATE), np.full(len(rows), MAX_RATE)
        best = _top(lambda rate: most(rate) - least(rate), *ends)
        good = most(best) >= least(best)
        slowest = _edge(lambda rate: most(rate) >= least(rate), best, ends[0])
        fastest = _edge(lambda rate: most(rate) >= least(rate), best, ends[1])
        bottom = least(_top(lambda rate: -least(rate), slowest, fastest))
        top = most(_top(most, slowest, fastest))
        self.possible[rows] = good
        self.low[rows], self.high[rows] = bottom, top
        self.rate[rows], self.doubt[rows] = (slowest + fastest) / 2, (fastest - slowest) / 2 + change


def _top(value: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Return where a concave function is largest between two ends, row by row: by golden sections."""
    low, high = low.copy(), high.copy()
    one, two = high - _GOLD * (high - low), low + _GOLD * (high - low)
    at_one, at_two = value(one), value(two)
    for _ in range(_STEPS):
        left = at_one >= at_two
        high = np.where(left, two, high)
        low = np.where(left, low, one)
        inside = _GOLD * (high - low)
        new = np.where(left, high - inside, low + inside)  # the other of the two points is known already
        at_new = value(new)
        one, two = np.where(left, new, two), np.where(left, one, new)
        at_one, at_two = np.where(left, at_new, at_two), np.where(left, at_one, at_new)
    return (low + high) / 2


def _edge(good: Callable[[Floats], NDArray[np.bool_]], inside: Floats, end: Floats) -> Floats:
    """Return how far from ``inside`` towards ``end`` it is still good, row by row."""
    inside, outside = inside.copy(), end.copy()
    whole = good(end)
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        ok = good(middle)
        inside = np.where(ok, middle, inside)
        outside = np.where(ok, outside, middle)
    return np.where(whole, end, outside)


def _tear(limits: Limits, first: int, last: int, border_ns: int) -> tuple[Limits, Limits]:
    """Part limits at a step somewhere between two of them; those that may belong to either side are dropped."""
    around = limits.part(slice(first, last))
    after = _contradicted(around, border_ns)
    backwards = around.part(slice(None, None, -1))
    before = len(around) - _contradicted(backwards, border_ns)
    if after <= before:  # each side reaches over the other's end: some one limit contradicts both
        before = after - 1
    cut = max(0, before - 1), after
    return limits.part(slice(0, first + cut[0] + 1)), limits.part(slice(first + cut[1], None))


def _contradicted(limits: Limits, origin_ns: int) -> int:
    """Return the place of the first limit that contradicts all before it, taken together."""
    good, bad = 0, len(limits)
    while bad - good > 1:
        middle = (good + bad) // 2
        if _agree(limits.part(slice(0, middle)), origin_ns):
            good = middle
        else:
            bad = middle
    return bad - 1


def _agree(limits: Limits, origin_ns: int) -> bool:
    """Return whether a line is left."""
    if limits.most.all() or not limits.most.any():
        return True
    at, offset = limits.at_ns - origin_ns, limits.offset_ns - limits.offset_ns[0]
    rows = [
        (at[kind][None, :].astype(np.float64), offset[kind][None, :].astype(np.float64))
        for kind in (~limits.most, limits.most)
    ]
    return bool(_Open.at(*rows).possible[0])
