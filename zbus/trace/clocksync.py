"""How two monotonic clocks compare: offsets from four timestamps, with bounds that hold. Pure.

One exchange: the asker stamps t1, the answerer t2 on arrival and t3 on leaving, the asker t4. The answerer's clock
minus the asker's lies between ``t3 - t4`` and ``t2 - t1``, whatever the two ways took; the middle is the estimate and
half the width the bound. Load only ever widens an exchange, so of a window of many the narrowest is kept, never a mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["ClockFilter", "ClockPoint", "offset_at"]

_DRIFT_LIMIT: Final = 200e-6
"""Clocks of machines that are not broken part by less than this rate (200 ppm)."""

_RESOLUTION_NS: Final = 100


class ClockPoint(NamedTuple):
    """The reference clock showed ``at_ns + offset_ns`` when ours showed ``at_ns``, give or take ``bound_ns``.

    Attributes:
        at_ns: On our clock.
        offset_ns: Reference minus ours.
        bound_ns: The true offset at ``at_ns`` is not further away.
        rtt_ns: Round trip it was taken from, without the answerer's own time.
        n: Exchanges in its window.
        drift_ppb: Slope since the point before, 0 for the first.
    """

    at_ns: int
    offset_ns: int
    bound_ns: int
    rtt_ns: int
    n: int
    drift_ppb: int = 0


class ClockFilter:
    """Turns exchanges into points: one per window, from its narrowest exchange.

    Args:
        window_ns: A window ends after this time on our clock …
        min_samples: … and at least this many exchanges, or after twice the time whatever their number; the first one
            ends with the exchanges alone.

    Attributes:
        rejected: Exchanges that cannot be.
        jumps: Times that an exchange contradicted those before it.
    """

    def __init__(self, *, window_ns: int = 30_000_000_000, min_samples: int = 128) -> None:
        self._window_ns = window_ns
        self._min_samples = min_samples
        self._best: ClockPoint | None = None
        self._since: int | None = None
        self._n = 0
        self._recent: deque[ClockPoint] = deque(maxlen=2)
        self._last: ClockPoint | None = None
        self._urgent = False
        self.rejected = 0
        self.jumps = 0

    @property
    def samples(self) -> int:
        """Exchanges in the window that is open."""
        return self._n

    @property
    def settled(self) -> bool:
        """Whether there is a point from a full window."""
        return bool(self._recent)

    def add(self, t1: int, t2: int, t3: int, t4: int) -> ClockPoint | None:
        """Take one exchange; return the window's point if this one ends it.

        An exchange that cannot be (the answer before the question, more time spent there than it took) is counted
        and ignored. One that contradicts those before it ends their window and begins the next, whose first point
        comes with the exchange after it.
        """
        rtt = (t4 - t1) - (t3 - t2)
        if t4 < t1 or t3 < t2 or rtt < 0:
            self.rejected += 1
            return None
        low, high = t3 - t4, t2 - t1
        span = t4 - t1
        bound = (high - low + 1) // 2 + int(span * _DRIFT_LIMIT) + _RESOLUTION_NS
        point = ClockPoint((t1 + t4) // 2, (low + high) // 2, bound, rtt, self._n + 1)
        if self._jumped(point):
            return self._begin_anew(t1, point)
        self._since = t1 if self._since is None else self._since
        self._n += 1
        self._last = point
        if self._best is None or rtt < self._best.rtt_ns:
            self._best = point
        age = t4 - self._since
        enough = self._n >= self._min_samples and (not self._recent or age >= self._window_ns)
        if enough or self._urgent or age >= 2 * self._window_ns:
            return self.finish()
        return None

    def _jumped(self, point: ClockPoint) -> bool:
        known = self._best or (self._recent[-1] if self._recent else None)
        return known is not None and _apart(known, point)

    def _begin_anew(self, since_ns: int, point: ClockPoint) -> ClockPoint | None:
        """End the window with what is known at its last exchange, and begin one with ``point``."""
        self.jumps += 1
        best, last, n = self._best, self._last, self._n
        self._best, self._last, self._since, self._n = point, point, since_ns, 1
        self._recent.clear()
        self._urgent = True
        if best is None or last is None:
            return None
        drifted = best.bound_ns + int((last.at_ns - best.at_ns) * _DRIFT_LIMIT)
        if drifted < last.bound_ns:
            last = last._replace(offset_ns=best.offset_ns, bound_ns=drifted, rtt_ns=best.rtt_ns)
        return last._replace(n=n)

    def finish(self) -> ClockPoint | None:
        """End the window now and return its point; None if it had no exchange."""
        best, n = self._best, self._n
        self._best, self._last, self._since, self._n = None, None, None, 0
        self._urgent = False
        if best is None:
            return None
        drift = 0
        if self._recent and best.at_ns > self._recent[-1].at_ns:
            before = self._recent[-1]
            drift = round((best.offset_ns - before.offset_ns) * 1e9 / (best.at_ns - before.at_ns))
        point = best._replace(n=n, drift_ppb=drift)
        self._recent.append(point)
        return point


def offset_at(points: Sequence[ClockPoint], at_ns: int) -> tuple[int, int]:
    """Return (offset, bound) in nanoseconds at ``at_ns`` of our clock.

    Between two points the offset is their straight line, beyond them the line goes on; one point alone holds
    everywhere. The bound grows with the distance from the points by what the clocks may part meanwhile: beyond the last
    point by what the two points leave open, at a single one by 200 ppm.

    Args:
        points: Sorted by ``at_ns``, at least one.
        at_ns: When.

    Raises:
        ValueError: No points.
    """
    if not points:
        msg = "no clock points"
        raise ValueError(msg)
    if len(points) == 1:
        only = points[0]
        return only.offset_ns, only.bound_ns + int(abs(at_ns - only.at_ns) * _DRIFT_LIMIT)
    right = min(max(bisect_right(points, at_ns, key=lambda p: p.at_ns), 1), len(points) - 1)
    a, b = points[right - 1], points[right]
    width = b.at_ns - a.at_ns
    if width <= 0:
        return b.offset_ns, max(a.bound_ns, b.bound_ns)
    if _apart(a, b):  # a jump somewhere between them
        near = a if at_ns - a.at_ns < b.at_ns - at_ns else b
        open_ns = abs(b.offset_ns - a.offset_ns) if a.at_ns < at_ns < b.at_ns else 0
        return near.offset_ns, near.bound_ns + open_ns + int(abs(at_ns - near.at_ns) * _DRIFT_LIMIT)
    along = (at_ns - a.at_ns) / width
    offset = a.offset_ns + round((b.offset_ns - a.offset_ns) * along)
    if 0 <= along <= 1:
        return offset, round(a.bound_ns * (1 - along) + b.bound_ns * along) + _wander(min(along, 1 - along) * width)
    beyond = -along if along < 0 else along - 1
    nearest = a if along < 0 else b
    return offset, round(nearest.bound_ns + beyond * (a.bound_ns + b.bound_ns)) + _wander(beyond * width)


def _apart(a: ClockPoint, b: ClockPoint) -> bool:
    """Return whether no clock that only drifts comes from one point to the later other."""
    return abs(b.offset_ns - a.offset_ns) > a.bound_ns + b.bound_ns + int((b.at_ns - a.at_ns) * _DRIFT_LIMIT)


def _wander(distance_ns: float) -> int:
    """Return how far a clock's rate may change the line within this time: 1 ppm, as with changing temperature."""
    return int(distance_ns * 1e-6)
