"""Span statistics per role or rank and name."""

from __future__ import annotations

from typing import Any

from traceview.distribution import Distribution
from traceview.survey import Survey, spans_of

__all__ = ["span_rows"]


def span_rows(found: Survey, *, by: str = "role") -> list[dict[str, Any]]:
    """Return one row per role (or rank, or category) and span name, longest total first.

    Args:
        found: The survey of the run.
        by: ``role``, ``rank`` or ``category``.
    """
    table: dict[tuple[str, str], Distribution] = {}
    for rank, name, spans in spans_of(found.ranks.values()):
        group = {"role": rank.role, "rank": rank.name, "category": spans.category or "-"}[by]
        table.setdefault((group, name), Distribution()).join(spans.times)
    rows = [{by: group, "name": name, **spans.to_dict()} for (group, name), spans in table.items()]
    return sorted(rows, key=lambda row: (-row["total_us"], row[by], row["name"]))
