"""Ranks whose times look like another unit: the format counts microseconds, and some writers count nanoseconds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from traceview.survey import Rank

__all__ = ["UNITS", "doubtful_units"]

UNITS: Final = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
"""Microseconds in one of each."""

_FROM: Final = 500.0
"""A rank may be this much slower than its peers and no more: a unit is a factor of 1,000."""


def doubtful_units(ranks: Collection[Rank]) -> Iterator[tuple[Rank, float]]:
    """Yield ranks of one role whose typical span is about 1,000 times as long as that of its peers, with the factor.

    Compared name by name with the median of the other ranks, so that ranks which do different things are not.
    """
    for rank in ranks:
        factors = []
        for name, spans in rank.spans.items():
            others = [
                other.spans[name].times.percentile(0.5) for other in ranks if other is not rank and name in other.spans
            ]
            peers = statistics.median(others) if others else 0.0
            if peers > 0:
                factors.append(spans.times.percentile(0.5) / peers)
        if factors and (factor := statistics.median(factors)) >= _FROM:
            yield rank, factor
