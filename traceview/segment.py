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
        # Columns grow in place: pieces to be joined at the end would take their memory twice.
        self._starts, self._ends, self._threads, self._phases = bytearray(), bytearray(), bytearray(), bytearray()
        self._tracks: list[tuple[int, Ints]] = []  # with the number of the first event

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
        if track is not None:
            self._tracks.append((len(self), track))
        self.store.add(encoded, sizes)
        self._starts += start.tobytes()
        self._ends += end.tobytes()
        self._threads += thread.tobytes()
        self._phases += phase.tobytes()

    def freeze(self) -> None:
        """Call once when all events are in."""
        self.store.freeze()
        self.start = np.frombuffer(self._starts, dtype=np.int64)
        self.end = np.frombuffer(self._ends, dtype=np.int64)
        self.thread = np.frombuffer(self._threads, dtype=np.int32)
        self.phase = np.frombuffer(self._phases, dtype=np.uint8)
        self.track = None
        if self._tracks:
            self.track = np.zeros(len(self), dtype=np.int64)
            for first, track in self._tracks:
                self.track[first : first + len(track)] = track
            self._tracks = []

    def order(self) -> Ints:
        """Return the event numbers in order of time: an enclosing span before what it encloses, then in file order."""
        order: Ints = np.argsort(self.start, kind="stable")
        same = np.diff(self.start[order]) == 0
        if same.any():
            tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
            some = order[tied]
            longest = -(self.end[some] * 2 + (self.phase[some] == SPAN))
            order[tied] = some[np.lexsort((longest, self.start[some]))]
        return order
