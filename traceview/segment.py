"""The events of a file that are laid out together: their bytes, and the columns that are sorted by."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.arrows import Arrows
from traceview.store import Store

__all__ = ["SPAN", "Segment"]

SPAN: Final = ord("X")

Ints = NDArray[np.int64]


class Segment:
    """Events in file order.

    Attributes:
        store: Their bytes.
        arrows: Those of other tools.
        leaving, arriving: Arrow ends that were decided before.
        start, end: In ns; ``thread``: index of the thread; ``phase``: its letter; ``track``: 0 for none, None if none
            has one. These are there after ``freeze``.
    """

    start: Ints
    end: Ints
    thread: NDArray[np.int32]
    phase: NDArray[np.uint8]
    track: Ints | None

    def __init__(self, directory: Path, memory_events: int, label: str) -> None:
        self.store = Store(directory, memory_events)
        self.arrows = Arrows(label)
        self.leaving, self.arriving = array("Q"), array("Q")
        self._starts: list[Ints] = []
        self._ends: list[Ints] = []
        self._threads: list[NDArray[np.int32]] = []
        self._phases: list[NDArray[np.uint8]] = []
        self._tracks: dict[int, Ints] = {}  # by piece

    def __len__(self) -> int:
        return len(self.store)

    def add(
        self,
        encoded: bytes,
        sizes: NDArray[np.int32],
        start: Ints,
        end: Ints,
        thread: NDArray[np.int32],
        phase: NDArray[np.uint8],
        track: Ints | None,
    ) -> None:
        """Take encoded events with the size of each, and their columns."""
        self.store.add(encoded, sizes)
        if track is not None:
            self._tracks[len(self._starts)] = track
        self._starts.append(start)
        self._ends.append(end)
        self._threads.append(thread)
        self._phases.append(phase)

    def freeze(self) -> None:
        """Call once when all events are in; one column after the other is joined, so that memory holds one twice."""
        self.store.freeze()
        self.track = None
        if self._tracks:
            pieces = [self._tracks.get(n, np.zeros(len(one), np.int64)) for n, one in enumerate(self._starts)]
            self.track = np.concatenate(pieces)
        self._tracks = {}
        self.start, self._starts = np.concatenate(self._starts), []
        self.end, self._ends = np.concatenate(self._ends), []
        self.thread, self._threads = np.concatenate(self._threads), []
        self.phase, self._phases = np.concatenate(self._phases), []

    def order(self) -> Ints:
        """Return the event numbers in order of time: an enclosing span before what it encloses, then in file order."""
        span = self.phase == SPAN
        order: Ints = np.lexsort((-(self.end * 2 + span), self.start))
        return order
