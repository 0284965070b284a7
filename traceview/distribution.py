"""Durations in logarithmic buckets: percentiles of any number of values in little memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Distribution"]

_BUCKETS_PER_E: Final = 200  # about 0.5 % wide: the error of a percentile is a quarter of a percent


@dataclass(slots=True)
class Distribution:
    """Durations in nanoseconds, in logarithmic buckets half a percent wide; count, sum and maximum are exact."""

    count: int = 0
    total: int = 0
    maximum: int = 0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, ns: int) -> None:
        """Add one duration, at least 0."""
        self.count += 1
        self.total += ns
        self.maximum = max(self.maximum, ns)
        bucket = int(math.log(ns) * _BUCKETS_PER_E) if ns > 0 else -1
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def join(self, other: Distribution) -> None:
        """Add all of another."""
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def percentile(self, part: float) -> float:
        """Return the duration in ns that ``part`` (0 to 1) of all do not exceed; 0 without any."""
        rank = max(1, math.ceil(part * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                middle = math.exp((bucket + 0.5) / _BUCKETS_PER_E) if bucket >= 0 else 0.0
                return min(middle, float(self.maximum))
        return 0.0

    def to_dict(self) -> dict[str, float]:
        """Return count, and p50, p90, p99, max and total in microseconds."""
        found: dict[str, float] = {"count": self.count}
        for name, part in (("p50_us", 0.5), ("p90_us", 0.9), ("p99_us", 0.99)):
            found[name] = round(self.percentile(part) / 1000, 3)
        return {**found, "max_us": self.maximum / 1000, "total_us": self.total / 1000}
