"""Which events a command keeps: by time, length, category and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from traceview.event import Event

__all__ = ["Keep"]


@dataclass(frozen=True, slots=True)
class Keep:
    """A filter; empty keeps all. Times are nanoseconds on the run's clock.

    Attributes:
        since_ns, until_ns: Keep what touches this window; None: open.
        min_dur_ns: Drop shorter spans (marks, counters and arrows stay).
        categories: Keep only these; empty: all. Counters have none and stay.
        windows: Keep what touches one of these (start, end); None: no such filter.
    """

    since_ns: int | None = None
    until_ns: int | None = None
    min_dur_ns: int = 0
    categories: frozenset[str] = field(default_factory=frozenset)
    windows: tuple[tuple[int, int], ...] | None = None

    def all(self) -> bool:
        """Return whether nothing is filtered."""
        return self == Keep()

    def mask(
        self, events: Sequence[Event], start: NDArray[np.int64], end: NDArray[np.int64], span: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which of the events to keep; ``span`` tells which are spans."""
        kept = np.ones(len(events), dtype=bool)
        if self.since_ns is not None:
            kept &= end >= self.since_ns
        if self.until_ns is not None:
            kept &= start <= self.until_ns
        if self.min_dur_ns:
            bound = np.array([event.bind_id != "" for event in events], dtype=bool)
            kept &= ~span | (end - start >= self.min_dur_ns) | bound
        if self.categories:
            wanted = self.categories
            kept &= np.array([event.ph == "C" or event.cat in wanted for event in events], dtype=bool)
        if self.windows is not None:
            inside = np.zeros(len(events), dtype=bool)
            for first, last in self.windows:
                inside |= (end >= first) & (start <= last)
            kept &= inside
        return kept
