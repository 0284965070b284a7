"""Span statistics per role and name, in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from traceview.event import NO_ARGS, Event
from traceview.problems import Problems
from traceview.reader import find_sources, read_events

__all__ = ["Distribution", "collect_stats"]

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
        """Return count, and p50, p99, max and total in microseconds."""
        p50, p99 = self.percentile(0.5) / 1000, self.percentile(0.99) / 1000
        return {
            "count": self.count,
            "p50_us": round(p50, 3),
            "p99_us": round(p99, 3),
            "max_us": self.maximum / 1000,
            "total_us": self.total / 1000,
        }


def collect_stats(inputs: Collection[str], problems: Problems) -> list[dict[str, Any]]:
    """Return one row per role and span name, longest total first.

    Raises:
        InputError: No trace file is found.
    """
    table: dict[tuple[str, str], Distribution] = {}
    for source in find_sources(inputs, problems):
        default = source.role or source.path.name
        roles: dict[int, str] = {}
        for event in read_events(source, problems):
            if event.ph == "X":
                role = roles.get(event.pid, default)
                table.setdefault((role, event.name), Distribution()).add(_ns(event))
            elif event.ph == "M" and event.name in ("zbus_meta", "process_name"):
                roles[event.pid] = _role(event) or roles.get(event.pid, default)
    rows = [{"role": role, "name": name, **spans.to_dict()} for (role, name), spans in table.items()]
    return sorted(rows, key=lambda row: (-row["total_us"], row["role"], row["name"]))


def _role(event: Event) -> str:
    try:
        args = msgspec.json.decode(event.args) if event.args is not NO_ARGS else {}
    except msgspec.DecodeError:
        return ""
    role = args.get("role") if isinstance(args, dict) else None
    return role if isinstance(role, str) else ""


def _ns(event: Event) -> int:
    return max(0, round((event.dur or 0.0) * 1000))
