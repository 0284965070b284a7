"""Where the events of a segment go: a row for each, and arrows for the spans that other tools' arrows belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.arrows import Bound, call_numbers
from traceview.encoder import Encoder
from traceview.lanes import Lanes
from traceview.processes import Thread
from traceview.segment import SPAN, Segment

__all__ = ["Layout", "nested"]

_BATCH: Final = 4096
_ROUNDS: Final = 12

Ints = NDArray[np.int64]


class Layout:
    """Lays out one segment.

    Args:
        segment: Frozen.
        threads: Of the file, by index.
        new_tid: Returns the tid of a row that a thread needs more.

    Attributes:
        order: Event numbers in order of time.
        tids: The row of each event, by its number.
    """

    def __init__(self, segment: Segment, threads: list[Thread], new_tid: Callable[[Thread], int]) -> None:
        self._segment = segment
        self._threads = threads
        self._new_tid = new_tid
        self.order = segment.order()
        self.tids: NDArray[np.int32] = np.zeros(len(self.order), dtype=np.int32)
        thread = segment.thread[self.order]
        if len(threads) <= 1 << 16:
            thread = thread.astype(np.uint16)  # sorted by counting
        self._by_thread = self.order[np.argsort(thread, kind="stable")]
        counts = np.bincount(thread, minlength=len(threads))
        self._present = [(threads[index], int(counts[index])) for index in np.flatnonzero(counts).tolist()]
        for one, numbers in self._of_threads():
            self._place(one, numbers)

    def arrows(self, encoder: Encoder) -> Bound | None:
        """Give the ``s`` and ``f`` events of other tools to the spans they belong to; None if there are none."""
        segment, arrows = self._segment, self._segment.arrows
        if not len(arrows):
            return None
        slot = arrows.slots(len(self.order))
        busy = np.bincount(segment.thread[slot >= 0], minlength=len(self._threads))
        for one, numbers in self._of_threads():
            if not busy[one.index]:
                continue
            span = segment.phase[numbers] == SPAN
            columns = (numbers, segment.start[numbers], segment.end[numbers], span, slot[numbers])
            arrows.find(*columns, lambda some: self._calls(encoder, some))
        return arrows.settle(len(self.order), several=encoder.several_arrows)

    def note_floors(self) -> None:
        """Remember how far the rows of each thread are taken, for the next segment."""
        for one, numbers in self._of_threads():
            one.floor = max(one.floor, int(self._segment.end[numbers].max()))
            if one.lanes and len(one.tids) > len(one.lanes):
                one.lanes.reserve(len(one.tids))

    def _of_threads(self) -> Iterator[tuple[Thread, Ints]]:
        """Yield the events of each thread in order of time."""
        first = 0
        for one, count in self._present:
            yield one, self._by_thread[first : first + count]
            first += count

    def _place(self, one: Thread, numbers: Ints) -> None:
        """Give the events of a thread their rows: several if its spans overlap."""
        segment = self._segment
        starts, ends = segment.start[numbers], segment.end[numbers]
        if not one.tracked and len(one.tids) <= 1 and starts[0] >= one.floor and nested(starts, ends):
            self.tids[numbers] = self._tid(one, 0)
            return
        rows = np.empty(len(numbers), dtype=np.int32)
        late = Lanes()
        for at in range(0, len(numbers), _BATCH):  # as few as that at once as Python's numbers
            here = slice(at, at + _BATCH)
            some = numbers[here]
            spans = (segment.phase[some] == SPAN).tolist()
            tracks = segment.track[some].tolist() if segment.track is not None else [0] * len(some)
            columns = starts[here].tolist(), ends[here].tolist(), tracks, spans
            rows[here] = _rows(one, late, columns) if columns[0][0] < one.floor else one.lanes.place_all(*columns)
        early = rows < 0
        rows[early] = max(len(one.tids), len(one.lanes)) - 1 - rows[early]
        used = np.array([self._tid(one, row) for row in range(int(rows.max()) + 1)], dtype=np.int32)
        self.tids[numbers] = used[rows]

    def _tid(self, one: Thread, row: int) -> int:
        while len(one.tids) <= row:
            one.tids.append(self._new_tid(one))
        return one.tids[row]

    def _calls(self, encoder: Encoder, spans: Ints) -> Ints:
        """Return numbers for the calls that spans name, 0 for none."""
        store, found = self._segment.store, np.zeros(len(spans), dtype=np.int64)
        for at in range(0, len(spans), _BATCH):
            bodies = store.get(spans[at : at + _BATCH], *encoder.trim)
            found[at : at + _BATCH] = call_numbers([_text(call) for call in encoder.calls(bodies)])
        return found


def _text(call: bytes) -> str:
    return call.decode("utf-8", "replace")


def _rows(one: Thread, late: Lanes, columns: tuple[list[int], list[int], list[int], list[bool]]) -> list[int]:
    """Return the row of each event of a thread; -1, -2, … for rows of ``late``, of what began before the segment."""
    rows = []
    lanes, floor = one.lanes, one.floor
    for start, end, track, span in zip(*columns, strict=True):
        if start < floor:
            rows.append(-1 - (late.place(start, end, track) if span else late.at(start, track)))
        else:
            rows.append(lanes.place(start, end, track) if span else lanes.at(start, track))
    return rows


def nested(starts: Ints, ends: Ints) -> bool:
    """Return whether spans in order of time are apart or nested.

    Spans without another inside are taken away, round by round, after a look at the one they begin in; what is nested
    deeper than that is looked at one by one.
    """
    for _ in range(_ROUNDS):
        if len(starts) < 2:  # nothing to overlap
            return True
        inside = starts[1:] < ends[:-1]  # the next one begins in this one
        if not inside.any():
            return True
        holds = np.append(inside, False)
        if (ends[1:][inside] > ends[:-1][inside]).any():
            return False
        outer = np.maximum.accumulate(
            np.where(holds, np.arange(len(starts), dtype=np.int32), np.int32(-1))
        )  # the last one that stays
        known = outer >= 0
        within = known & (starts < ends[outer])
        if (within & ~holds & (ends > ends[outer])).any():
            return False
        stays = holds | (known & ~within)  # what begins behind its neighbour may be in one further out
        starts, ends = starts[stays], ends[stays]
    stack: list[int] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        while stack and stack[-1] <= start:
            stack.pop()
        if stack and end > stack[-1]:
            return False
        stack.append(end)
    return True
