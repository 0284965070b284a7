"""One file of a merge: read, put on the run's clock, laid out in rows, encoded as a part of the output.

Events are encoded as they are read. Only their times are sorted and laid out; then their bytes are put on their rows.
Files of more than ``segment`` events are done in several segments, so memory has a bound whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.arrows import Bound
from traceview.encoder import Encoder, Placed
from traceview.ends import EndsFile
from traceview.intake import Intake
from traceview.lanes import MAX_ROWS
from traceview.layout import Layout
from traceview.part_report import PartJob, PartReport
from traceview.problems import Problems
from traceview.processes import Processes, Thread
from traceview.reader import Blocks, Source, read_columns
from traceview.segment import SPAN, Segment

__all__ = ["merge_part"]

_BATCH: Final = 2048  # as few as fit a processor's cache
_ROWS_PER_FILE: Final = 100_000
_FIRST_TID: Final = 1_000_001
_LARGE: Final = 16 << 20
"""Bytes of a file from which on its events wait on disk alone."""

Ints = NDArray[np.int64]


def merge_part(
    job: PartJob,
    encoder: Encoder,
    directory: Path,
    problems: Problems,
    put: Callable[[bytes], None],
    ends: EndsFile,
) -> PartReport:
    """Merge one file: its bytes go to ``put``, the numbers of its arrow ends to ``ends``.

    Raises:
        OutputError: From ``put``, or the directory takes no temporary file.
    """
    part = _Part(job, encoder, directory, problems, put, ends)
    try:
        part.read()
        put(encoder.finish())
        return part.finish()
    finally:
        part.close()


class _Part:
    def __init__(
        self,
        job: PartJob,
        encoder: Encoder,
        directory: Path,
        problems: Problems,
        put: Callable[[bytes], None],
        ends: EndsFile,
    ) -> None:
        self._job = job
        self._encoder = encoder
        self._directory = directory
        self._problems = problems
        self._put = put
        self._ends = ends
        self._report = PartReport()
        self._processes = Processes(job, problems)
        self._crowded = 0
        self._next_tid = _FIRST_TID + job.number * _ROWS_PER_FILE
        self._intake = Intake(job, self._processes, encoder, self._new_segment(), problems)

    def read(self) -> None:
        """Read the file, and its spill as a second part of it."""
        blocks = Blocks()
        sources = [self._job.source]
        if self._job.source.spill is not None:
            spill, first = self._job.source.spill, self._job.source
            sources.append(Source(spill, f"{first.label} (spill)", first.role, first.rank))
        for source in sources:
            for batch in read_columns(source, self._problems, self._job.base_us, blocks):
                self._intake.take(batch)
                del batch  # before the next one is read
                if len(self._intake.segment) >= self._job.segment:
                    self._write()
        self._intake.finish()
        self._write()

    def finish(self) -> PartReport:
        """Return the report, with the names of all rows."""
        self._processes.finish(self._report)
        return self._report

    def close(self) -> None:
        """Release the temporary file and what refers to itself."""
        self._intake.segment.store.close()
        self._processes.close()

    def _new_segment(self) -> Segment:
        source = self._job.source
        large = source.path.stat().st_size > _LARGE if source.path.exists() else False
        return Segment(self._directory, 0 if large else self._job.memory_events, source.label)

    def _write(self) -> None:
        """Write the segment: rows for all its events, then the events in order of time."""
        segment = self._intake.segment
        if not len(segment):
            return
        segment.freeze()
        threads = self._processes.threads
        layout = Layout(segment, threads, self._new_tid)
        bound = layout.arrows(self._encoder)
        gone = self._count(segment, bound)
        order = layout.order[~gone[layout.order]]
        pid_of = np.array([one.process.pid for one in threads], dtype=np.int64)
        for at in range(0, len(order), _BATCH):
            numbers = order[at : at + _BATCH]
            bodies = segment.store.get(numbers, *self._encoder.trim)
            placed = Placed(
                bodies,
                pid_of[segment.thread[numbers]],
                layout.tids[numbers],
                segment.start[numbers],
                segment.end[numbers],
            )
            if bound is not None:
                placed.arrows, placed.kept = bound.of_spans(numbers), bound.of_ends(numbers)
            self._put(self._encoder.place(placed))
        layout.note_floors()
        crowded = sum(one.lanes.crowded for one in threads) - self._crowded
        if crowded:
            self._crowded += crowded
            text = f"{self._job.source.label} has more than {MAX_ROWS} spans at once on one thread: viewers show a part"
            self._problems.add("ZT0120", "many_overlaps", text, crowded)
        segment.store.close()
        self._intake.segment = self._new_segment()

    def _count(self, segment: Segment, bound: Bound | None) -> NDArray[np.bool_]:
        """Count what is written, and return which events are not: the ends of arrows that spans took."""
        gone = segment.arrows.slots(len(segment)) >= 0
        for numbers, place in ((segment.leaving, 0), (segment.arriving, 1)):
            self._report.arrows[place] += len(numbers)
        self._ends.add(segment.leaving, segment.arriving)
        if bound is not None:
            if bound.kept is not None:
                gone &= bound.kept < 0
            self._report.arrows[0] += len(bound.leaving)
            self._report.arrows[1] += len(bound.arriving)
            self._ends.add(bound.leaving, bound.arriving)
        if segment.arrows.alone:
            text = f"{self._job.source.label} has arrow ends outside of any span: dropped"
            self._problems.add("ZT0109", "arrow_without_span", text, segment.arrows.alone)
        counts = np.bincount(segment.thread[~gone], minlength=len(self._processes.threads))
        for one, count in zip(self._processes.threads, counts.tolist(), strict=True):
            one.process.report.events += count
        self._report.spans += int((segment.phase == SPAN).sum())
        return gone

    def _new_tid(self, one: Thread) -> int:
        if self._next_tid == _FIRST_TID + (self._job.number + 1) * _ROWS_PER_FILE - 1:
            text = f"{self._job.source.label} needs more than {_ROWS_PER_FILE} rows: viewers show a part of the last"
            self._problems.add("ZT0120", "many_rows", text)
            return self._next_tid
        self._next_tid += 1
        if one.tids:
            self._report.lanes += 1
        return self._next_tid - 1
