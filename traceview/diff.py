"""Compare two runs, span by span."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from traceview.distribution import Distribution
from traceview.survey import Survey, spans_of

__all__ = ["METRICS", "Change", "compare"]

METRICS: Final = ("p50", "p90", "p99", "mean", "total", "count")
_MIN_COUNT: Final = 5


@dataclass(slots=True)
class Change:
    """One span name of one role in both runs; times in µs.

    Attributes:
        change: b / a - 1; None if it is in one run only.
        noise: Changes up to this are within the spread of the values.
        significant: Whether there are enough values and the change is above the noise.
    """

    role: str
    name: str
    a: float | None
    b: float | None
    count_a: int
    count_b: int
    change: float | None
    noise: float
    significant: bool

    def grew_by(self, part: float, at_least: float) -> bool:
        """Tell whether the value surely grew by more than ``part`` of itself, and by ``at_least`` (in its own unit)."""
        if not self.significant or self.a is None or self.b is None:
            return False
        return self.b - self.a > part * self.a and self.b - self.a >= at_least

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def compare(before: Survey, after: Survey, metric: str = "p50") -> list[Change]:
    """Return all spans of both runs, the largest significant change first."""
    a, b = _table(before), _table(after)
    rows = []
    for role, name in sorted(a.keys() | b.keys()):
        one, two = a.get((role, name)), b.get((role, name))
        x = _value(one, metric) if one is not None else None
        y = _value(two, metric) if two is not None else None
        change = y / x - 1 if x and y is not None else None
        noise = max(_noise(one), _noise(two))
        counts = one.count if one is not None else 0, two.count if two is not None else 0
        sure = change is not None and min(counts) >= _MIN_COUNT and abs(change) > noise
        rows.append(Change(role, name, x, y, *counts, change, round(noise, 4), sure))
    return sorted(rows, key=lambda r: (not r.significant, -abs(r.change or 0.0), r.role, r.name))


def _table(found: Survey) -> dict[tuple[str, str], Distribution]:
    table: dict[tuple[str, str], Distribution] = {}
    for rank, name, spans in spans_of(found.ranks.values()):
        table.setdefault((rank.role, name), Distribution()).join(spans.times)
    return table


def _value(times: Distribution, metric: str) -> float:
    if metric == "count":
        return float(times.count)
    if metric == "total":
        return times.total / 1000
    if metric == "mean":
        return times.total / 1000 / max(1, times.count)
    return times.percentile(float(metric[1:]) / 100) / 1000


def _noise(times: Distribution | None) -> float:
    """Return the relative error of the median, by the spread of the middle half; at least a bucket's width."""
    if times is None or times.count == 0:
        return 0.0
    middle = times.percentile(0.5)
    spread = times.percentile(0.75) - times.percentile(0.25)
    return max(0.01, 2 * spread / math.sqrt(times.count) / middle) if middle else 1.0
