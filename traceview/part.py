"""One file of a merge: read, put on the run's clock, laid out in rows, encoded as a part of the output.

Spans are sorted and laid out by arrays of their times; the events themselves wait in a ``Store``. Files of more than
``segment`` events are done in several segments, so memory has a bound whatever the size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceview.align import MAX_US, Shift
from traceview.arrows import Arrows, arrow_number
from traceview.event import NO_ARGS, Event, args_of, encode_args, encode_event
from traceview.keep import Keep
from traceview.lanes import Lanes
from traceview.problems import Problems
from traceview.reader import Blocks, Source, read_batches
from traceview.store import Store

__all__ = [
    "FORMAT",
    "Encoder",
    "PartJob",
    "PartReport",
    "ProcessReport",
    "Row",
    "merge_part",
    "report_dict",
    "report_of",
]

FORMAT: Final = 1
"""Newest trace format this program knows."""

_BATCH: Final = 4096
_LOSS_TID: Final = -(1 << 40)
_COUNTER_TID: Final = _LOSS_TID - 1
_ROWS_PER_FILE: Final = 100_000
_FIRST_TID: Final = 1_000_001
_KEPT_ARROWS: Final = 1 << 20

Ints = NDArray[np.int64]


class Encoder(Protocol):
    """Makes bytes of the output's format from events with their final pids and tids."""

    @property
    def several_arrows(self) -> bool:
        """Whether a span can have several arrows."""

    def encode(
        self, events: list[Event], starts: list[int], ends: list[int], more: dict[int, list[tuple[int, bool, bool]]]
    ) -> bytes:
        """Return the bytes of events in order of time; ``more``: further arrows, by place in ``events``."""

    def finish(self) -> bytes:
        """Return the bytes that end the part."""


@dataclass(slots=True)
class ProcessReport:
    """One process of the merged trace.

    Attributes:
        name: As the viewer shows it.
        role, rank: None where nothing tells.
        file: Its input.
        pid: In the output.
        events: Written events, without metadata.
        complete: Whether its end event was there (None: a file that has none by nature).
        lost: Records its own process reported as lost, by reason.
        clock: How its times were matched, see ``align.Shift.how``.
        shift_us: What was added to its times.
        clock_bound_us: The error of that at most; None: unknown.
        first_us, last_us: Of its events, on the run's clock; None without events.
    """

    name: str
    role: str | None
    rank: int | None
    file: str
    pid: int = 0
    events: int = 0
    complete: bool | None = None
    lost: dict[str, int] = field(default_factory=dict)
    clock: str = "none"
    shift_us: float = 0.0
    clock_bound_us: float | None = None
    first_us: float | None = None
    last_us: float | None = None


Row = tuple[int, int, str, int]
"""(pid, tid, name, sort index) of one row of the output."""


@dataclass(slots=True)
class PartReport:
    """What became of one file; arrow ends are 64-bit numbers."""

    processes: list[ProcessReport] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    spans: int = 0
    lanes: int = 0
    out_ends: array[int] = field(default_factory=lambda: array("Q"))
    in_ends: array[int] = field(default_factory=lambda: array("Q"))
    arrows: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True, slots=True)
class PartJob:
    """One file to merge.

    Attributes:
        source: The file.
        shift: Of its clock.
        number: Of the file, from 0; ``files`` is how many there are. They make pids and tids unique.
        base_us: See ``Choice``.
        role, rank: As far as known.
        keep: What to keep.
        memory_events: Events held decoded at most.
        segment: Events laid out at once at most.
    """

    source: Source
    shift: Shift
    number: int
    files: int
    base_us: int = 0
    role: str | None = None
    rank: int | None = None
    keep: Keep = field(default_factory=Keep)
    memory_events: int = 60_000
    segment: int = 2_000_000


def merge_part(
    job: PartJob, encoder: Encoder, directory: Path, problems: Problems, put: Callable[[bytes], None]
) -> PartReport:
    """Merge one file: its bytes go to ``put``.

    Raises:
        OutputError: From ``put``, or the directory takes no temporary file.
    """
    part = _Part(job, encoder, directory, problems, put)
    try:
        part.read()
        part.write()
        put(encoder.finish())
        return part.finish()
    finally:
        part.close()


class _Thread:
    """One thread of a process: its rows in the output."""

    __slots__ = ("floor", "index", "lanes", "late", "name", "order", "process", "tids", "tracked")

    def __init__(self, index: int, process: _Process) -> None:
        self.index = index
        self.process = process
        self.order = len(process.threads) + 1
        self.lanes = Lanes()
        self.late: Lanes | None = None  # for spans that began before the segment did
        self.floor = -(1 << 62)
        self.tids: list[int] = []
        self.name = ""
        self.tracked = False


class _Process:
    """One process of one file: one incarnation, with its own row group in the output."""

    def __init__(self, report: ProcessReport) -> None:
        self.report = report
        self.pid = report.pid
        self.threads: dict[int, _Thread] = {}
        self.open: dict[int, list[Event]] = {}
        self.source = ""
        self.labels = ""
        self.first_ns = 1 << 62
        self.last_ns = -(1 << 62)


class _Lookup(dict[tuple[int, int], int]):
    """(pid, tid) of the file to the number of its thread; asks once for each."""

    def __init__(self, find: Callable[[int, int], int]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: tuple[int, int]) -> int:
        found = self[key] = self._find(*key)
        return found


class _Segment:
    """Events with the arrays that are sorted by: start, end, thread, track, and whether it is a span."""

    def __init__(self, directory: Path, memory_events: int, label: str) -> None:
        self.store = Store(directory, memory_events)
        self._columns: list[tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]]] = []
        self.arrows = Arrows(label)

    def __len__(self) -> int:
        return len(self.store)

    def add(self, events: list[Event], columns: tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]]) -> None:
        self.store.extend(events)
        self._columns.append(columns)

    def columns(self) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]]:
        """Return the columns, sorted by nothing yet, and forget the pieces."""
        pieces, self._columns = self._columns, []
        start, end, thread, track, span = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return start, end, thread, track, span


class _Part:
    def __init__(
        self, job: PartJob, encoder: Encoder, directory: Path, problems: Problems, put: Callable[[bytes], None]
    ) -> None:
        self._job = job
        self._encoder = encoder
        self._directory = directory
        self._problems = problems
        self._put = put
        self._label = job.source.label
        self._report = PartReport()
        self._current: dict[int, _Process] = {}  # pid in the file -> process
        self._processes: list[_Process] = []
        self._threads: list[_Thread] = []
        self._lookup = _Lookup(self._find_thread)
        self._headed = False
        self._writer_pid: int | None = None
        self._next_tid = _FIRST_TID + job.number * _ROWS_PER_FILE
        self._segment = _Segment(directory, job.memory_events, self._label)
        shift = job.shift
        self._add_ns = shift.add_ns + job.base_us * 1000
        self._points = None
        if shift.at_ns:
            at = np.array(shift.at_ns, dtype=np.int64) - job.base_us * 1000
            self._points = (at.astype(np.float64), np.array(shift.offset_ns, dtype=np.float64))
        self._spans: list[Event] = []
        self._others: list[Event] = []
        self._clean: dict[bytes, msgspec.Raw] = {}  # args of counters, as they were and without what is no number
        self._plain: set[int] = set()  # threads of the segment whose spans nest
        self._bound_numbers: Ints = np.zeros(0, dtype=np.int64)

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the file, and its spill as a second part of it."""
        blocks = Blocks()
        sources = [self._job.source]
        if self._job.source.spill is not None:
            spill = self._job.source.spill
            sources.append(Source(spill, f"{self._label} (spill)", self._job.source.role, self._job.source.rank))
        for source in sources:
            for batch in read_batches(source, self._problems, self._job.base_us, blocks):
                self._take(batch)
        self._close_open()
        self._flush()
        self._check_ends()

    def _take(self, batch: list[Event]) -> None:
        spans, others = self._spans, self._others
        for event in batch:
            phase = event.ph
            if phase == "X":
                spans.append(event)
            elif phase == "M":
                self._metadata(event)
                spans, others = self._spans, self._others
            elif phase in "BE":
                self._pair(event)
            else:
                others.append(event)
        self._flush()
        if len(self._segment) >= self._job.segment:
            self.write()

    def _flush(self) -> None:
        """Bring what was collected into the segment, as processes are numbered now."""
        spans, self._spans = self._spans, []
        others, self._others = self._others, []
        if spans:
            self._add(spans, spans=True)
        others = [e for e in others if e.ph != "C" or self._clean_counter(e)]
        if others:
            self._add(others, spans=False)

    def _add(self, events: list[Event], *, spans: bool) -> None:
        ts = np.array([e.ts for e in events], dtype=np.float64)
        good = np.abs(ts) < MAX_US  # false for NaN too
        if not good.all():
            text = f"{self._label} has an event without a usable ts: dropped"
            self._problem("ZT0109", "no_ts", text, int(len(ts) - good.sum()))
            events = [e for e, keep in zip(events, good.tolist(), strict=True) if keep]
            ts = ts[good]
        if self._headed:
            self._check_writers(events)
        start = self._moved(ts)
        end = self._moved(ts + self._durations(events)) if spans else start
        if len(start) and int(start.min()) < 0:
            text = f"{self._label} has events before the run began: put to its begin"
            self._problem("ZT0108", "negative_ts", text, int((start < 0).sum()))
            start, end = np.maximum(start, 0), np.maximum(end, 0)
        if not self._job.keep.all():
            kept = self._job.keep.mask(events, start, end, spans=spans)
            events = [e for e, keep in zip(events, kept.tolist(), strict=True) if keep]
            start, end = start[kept], end[kept]
        if not events:
            return
        lookup = self._lookup
        if spans:
            thread = np.array([lookup[e.pid, e.tid] for e in events], dtype=np.int64)
        else:  # counters belong to the process, not to a row
            tids = [_COUNTER_TID if e.ph == "C" else e.tid for e in events]
            thread = np.array([lookup[e.pid, t] for e, t in zip(events, tids, strict=True)], dtype=np.int64)
        tracks = [e.track for e in events]
        if any(tracks):
            track = np.array([hash(one) if one else 0 for one in tracks], dtype=np.int64)
        else:
            track = np.zeros(len(events), dtype=np.int64)
        if not spans:
            self._note_arrows(events)
        self._note_times(thread, start, end, track)
        self._segment.add(events, (start, end, thread, track, np.full(len(events), spans, dtype=np.bool_)))

    def _moved(self, us: NDArray[np.float64]) -> Ints:
        """Return times of the file, in µs, on the run's clock in ns."""
        ns = np.rint(us * 1000).astype(np.int64)
        if self._points is not None:
            ns = ns + np.rint(_between(ns.astype(np.float64), *self._points)).astype(np.int64)
        moved: Ints = ns + self._add_ns
        return moved

    def _durations(self, events: list[Event]) -> NDArray[np.float64]:
        """Return durations in µs; ends are rounded from them, so that a child never leaves its parent."""
        dur = np.array([e.dur for e in events], dtype=np.float64)
        good = (dur >= 0) & (dur < MAX_US)
        if not good.all():
            missing = int(np.isnan(dur).sum())
            for kind, what, count in (
                ("no_dur", "no", missing),
                ("negative_dur", "a negative or absurd", int(len(dur) - good.sum()) - missing),
            ):
                if count:
                    text = f"{self._label} has a span with {what} duration: 0 instead"
                    self._problem("ZT0108", kind, text, count)
            dur = np.where(good, dur, 0.0)
        return dur

    def _note_times(self, thread: Ints, start: Ints, end: Ints, track: Ints) -> None:
        """Remember the first and last sign of life of each process, and which threads have tracks."""
        for index in np.unique(thread).tolist():
            here = thread == index
            process = self._threads[index].process
            process.first_ns = min(process.first_ns, int(start[here].min()))
            process.last_ns = max(process.last_ns, int(end[here].max()))
            if not self._threads[index].tracked and track[here].any():
                self._threads[index].tracked = True

    def _note_arrows(self, events: list[Event]) -> None:
        number = len(self._segment)
        note = self._segment.arrows.note
        for event in events:
            phase = event.ph
            if phase in "stf":
                note(number, event)
            elif phase in "ben" and event.id != "":  # of this process, whoever else uses the same number
                event.id2, event.id = encode_args({"local": str(event.id)}), ""
            number += 1

    def _check_writers(self, events: list[Event]) -> None:
        """Two processes that write one file are told: their lines may have torn each other."""
        for pid in dict.fromkeys([e.pid for e in events]):
            if pid != self._writer_pid:
                text = f"{self._label} was written by two processes at once (pids {self._writer_pid} and {pid})"
                self._problem("ZT0113", "shared_file", text)
                self._writer_pid = pid

    def _problem(self, code: str, kind: str, text: str, count: int = 1) -> None:
        self._problems.add(code, kind, text, count)

    # -- processes and threads -------------------------------------------------------------------------------------

    def _find_thread(self, pid: int, tid: int) -> int:
        return self._thread(self._current.get(pid) or self._process(pid), tid).index

    def _thread(self, process: _Process, tid: int) -> _Thread:
        thread = process.threads.get(tid)
        if thread is None:
            thread = process.threads[tid] = _Thread(len(self._threads), process)
            self._threads.append(thread)
        return thread

    def _process(self, pid: int) -> _Process:
        job = self._job
        report = ProcessReport("", job.role, job.rank, self._label)
        report.clock, report.shift_us = job.shift.how, self._add_ns / 1000
        report.clock_bound_us = job.shift.bound_ns / 1000 if job.shift.bound_ns is not None else None
        report.pid = 1 + job.number + len(self._processes) * job.files
        process = self._current[pid] = _Process(report)
        self._processes.append(process)
        return process

    def _metadata(self, event: Event) -> None:
        name, args = event.name, args_of(event)
        if name == "zbus_meta":
            self._header(event, args)
            return
        if name == "text_id":
            self._name_text_id(event.pid, str(args.get("name")))
            return
        process = self._current.get(event.pid) or self._process(event.pid)
        report = process.report
        if name == "process_name" and isinstance(args.get("name"), str):
            report.name = args["name"]
            report.role = args["role"].strip() if isinstance(args.get("role"), str) else report.role
            report.rank = _rank(args.get("rank"), report.rank)
        elif name == "process_labels" and isinstance(args.get("labels"), str):
            process.labels = args["labels"]
        elif name == "thread_name" and isinstance(args.get("name"), str):
            self._name_thread(self._thread(process, event.tid), args["name"])
        elif name == "zbus_end":
            report.complete = True
            self._count_lost(report, args.get("lost"))
        elif name == "zbus_loss":
            self._loss(process, event.pid, args)

    def _count_lost(self, report: ProcessReport, told: object) -> None:
        """Take what a process says at its end that it lost; what no line told before is told here."""
        for reason, lost in told.items() if isinstance(told, dict) else ():
            more = lost - report.lost.get(str(reason), 0) if type(lost) is int else 0
            if more > 0:
                report.lost[str(reason)] = lost
                self._problem("ZT0111", "lost", f"{self._label} lost {more} records ({reason})", more)

    def _name_thread(self, thread: _Thread, name: str) -> None:
        """Name a thread; of one that was renamed all names are kept, the last first."""
        before = [part for part in thread.name.split(" ← ") if part and part != name]
        thread.name = " ← ".join([name, *before[:3]])

    def _name_text_id(self, number: int, text: str) -> None:
        """Give a pid or tid that was text in the file its text back as a name."""
        process = self._current.get(number)
        if process is not None and not process.report.name:
            process.report.name = text
        for one in self._processes:
            thread = one.threads.get(number)
            if thread is not None and not thread.name:
                thread.name = text

    def _header(self, event: Event, args: dict[str, Any]) -> None:
        """Begin a new process: a restarted one may go on in the file of its predecessor, under the same pid."""
        if isinstance(args.get("format"), int) and args["format"] > FORMAT:
            text = f"{self._label} has format {args['format']}, newer than {FORMAT}: read as far as known"
            self._problem("ZT0106", "newer_format", text)
        self._headed = True
        self._writer_pid = event.pid
        source = str(args.get("source") or "")
        before = self._current.get(event.pid)
        if before is not None and source and before.source == source:
            return  # the same process, in its spill
        self._flush()
        self._lookup.clear()
        process = self._process(event.pid)
        process.source = source
        report = process.report
        report.complete = False
        if isinstance(args.get("role"), str):
            report.role = args["role"].strip()
        report.rank = _rank(args.get("rank"), report.rank)

    def _loss(self, process: _Process, pid: int, args: dict[str, Any]) -> None:
        """Show a loss where it happened."""
        lost, since, until = args.get("lost"), args.get("since_us"), args.get("until_us")
        if type(lost) is not int or not _is_time(since) or not _is_time(until):
            return
        reason = str(args.get("reason", ""))
        process.report.lost[reason] = process.report.lost.get(reason, 0) + lost
        self._thread(process, _LOSS_TID).name = "losses"
        shown = f"lost {lost} records ({reason})"
        self._spans.append(Event(shown, "X", since - self._job.base_us, max(0.0, until - since), pid, _LOSS_TID))
        self._problem("ZT0111", "lost", f"{self._label} lost {lost} records ({reason})", lost)

    # -- repairs ---------------------------------------------------------------------------------------------------

    def _pair(self, event: Event) -> None:
        """Make one span of a begin and its end."""
        process = self._current.get(event.pid) or self._process(event.pid)
        ts = event.ts if event.ts is not None and abs(event.ts) < MAX_US else None
        if ts is None:
            self._problem("ZT0109", "no_ts", f"{self._label} has an event without a usable ts: dropped")
            return
        stack = process.open.setdefault(event.tid, [])
        if event.ph == "B":
            stack.append(event)
            return
        if not stack:
            text = f"{self._label} has an end without a begin ({event.name or 'no name'}): dropped"
            self._problem("ZT0109", "end_without_begin", text)
            return
        begun = stack.pop()
        begun.ph = "X"
        begun.dur = ts - (begun.ts or 0.0)
        if event.args is not NO_ARGS:
            begun.args = encode_args({**args_of(begun), **args_of(event)})
        self._spans.append(begun)

    def _close_open(self) -> None:
        """End what a crash left open at the process's last sign of life."""
        self._flush()
        for process in self._processes:
            still = [event for stack in process.open.values() for event in stack]
            if not still:
                continue
            starts = self._moved(np.array([event.ts for event in still], dtype=np.float64))
            last = max(process.last_ns, int(starts.max()))
            for event, start in zip(still, starts.tolist(), strict=True):
                event.ph = "X"
                event.dur = (last - start) / 1000
                event.args = encode_args({**args_of(event), "unfinished": True})
                self._spans.append(event)
                text = f"{self._label} has a span without an end ({event.name}): ended at the last event"
                self._problem("ZT0110", "unfinished_span", text)

    def _clean_counter(self, event: Event) -> bool:
        """Keep the numeric series only: viewers refuse others."""
        raw = bytes(event.args)
        known = self._clean.get(raw)
        if known is not None:
            event.args = known
            return True
        args = args_of(event)
        numbers = {k: v for k, v in args.items() if isinstance(v, int | float) and type(v) is not bool}
        if self._headed is False:
            numbers.pop("rank", None)
        if not numbers:
            self._problem("ZT0109", "counter_without_numbers", f"{self._label}: {event.name} dropped")
            return False
        if len(numbers) != len(args):
            event.args = msgspec.Raw(encode_event(numbers))
        if len(self._clean) < _BATCH:
            self._clean[raw] = event.args
        return True

    def _check_ends(self) -> None:
        for process in self._processes:
            report = process.report
            if report.complete is False:
                text = f"{self._label} has no end event: {report.name or 'its process'} did not end in order"
                text += "; if it was killed, its last flush period (0.25 s unless configured) is missing"
                self._problem("ZT0110", "no_end", text)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the segment: rows for all its events, then the events in order of time."""
        segment = self._segment
        if not len(segment):
            return
        segment.store.freeze()
        start, end, thread, track, span = segment.columns()
        order = np.lexsort((-end, start))
        rows = self._rows(order, start, end, thread, track, span)
        arrows = self._arrows(segment, order, start, end, thread, span)
        gone = np.zeros(len(order), dtype=bool)
        gone[[number for number in arrows.ends if number not in arrows.kept]] = True
        pids = np.array([t.process.pid for t in self._threads], dtype=np.int64)[thread]
        counts = np.bincount(thread[~gone], minlength=len(self._threads))
        for one, count in zip(self._threads, counts.tolist(), strict=True):
            one.process.report.events += count
        self._report.spans += int(span.sum())
        order = order[~gone[order]]
        for at in range(0, len(order), _BATCH):
            self._emit(order[at : at + _BATCH], start, end, pids, rows, span, arrows)
        self._note_floors(thread, end)
        segment.store.close()
        self._segment = _Segment(self._directory, self._job.memory_events, self._label)

    def _emit(
        self,
        numbers: Ints,
        start: Ints,
        end: Ints,
        pids: Ints,
        rows: Ints,
        span: NDArray[np.bool_],
        arrows: Arrows,
    ) -> None:
        events = self._segment.store.get(numbers)
        starts, ends = start[numbers], end[numbers]
        times: list[float] = (starts / 1000).tolist()
        lengths: list[float | None] = ((ends - starts) / 1000).tolist()
        if not span[numbers].all():
            lengths = [d if s else None for d, s in zip(lengths, span[numbers].tolist(), strict=True)]
        for event, ts, dur, pid, tid in zip(
            events, times, lengths, pids[numbers].tolist(), rows[numbers].tolist(), strict=True
        ):
            event.ts = ts
            event.dur = dur
            event.pid = pid
            event.tid = tid
            if event.track:
                event.track = ""
            if event.bind_id != "":
                self._arrow_end(event.bind_id, out=event.flow_out, into=event.flow_in)
        more: dict[int, list[tuple[int, bool, bool]]] = {}
        if arrows.bound or arrows.kept:
            self._bind(events, numbers, arrows, more)
        self._put(self._encoder.encode(events, starts.tolist(), ends.tolist(), more))

    def _bind(
        self, events: list[Event], numbers: Ints, arrows: Arrows, more: dict[int, list[tuple[int, bool, bool]]]
    ) -> None:
        """Write the arrows found for these spans into them; ends that stay get their new id."""
        known = self._bound_numbers
        nearest = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        wanted = np.flatnonzero(known[nearest] == numbers) if len(known) else nearest[:0]
        for place, number in zip(wanted.tolist(), numbers[wanted].tolist(), strict=True):
            event = events[place]
            ends = arrows.bound.get(number)
            if ends is None:
                event.id, event.bp = hex(arrows.kept[number]), "e"
                continue
            if event.bind_id == "":
                arrow, event.flow_out, event.flow_in = ends[0]
                event.bind_id = hex(arrow)
                ends = ends[1:]
            if ends:
                more[place] = ends

    def _arrow_end(self, bind_id: int | str, *, out: bool, into: bool) -> None:
        try:
            number = int(bind_id, 0) if isinstance(bind_id, str) else bind_id
        except ValueError:
            number = arrow_number(str(bind_id))
        number &= (1 << 64) - 1
        self._count_ends([number] if out else [], [number] if into else [])

    def _count_ends(self, out: list[int], into: list[int]) -> None:
        report = self._report
        report.arrows[0] += len(out)
        report.arrows[1] += len(into)
        if len(report.out_ends) < _KEPT_ARROWS:
            report.out_ends.extend(out)
        if len(report.in_ends) < _KEPT_ARROWS:
            report.in_ends.extend(into)

    def _rows(self, order: Ints, start: Ints, end: Ints, thread: Ints, track: Ints, span: NDArray[np.bool_]) -> Ints:
        """Return the tid of every event: a thread whose spans overlap gets several rows."""
        tids = np.zeros(len(order), dtype=np.int64)
        by_thread = order[np.argsort(thread[order], kind="stable")]
        bounds = np.flatnonzero(np.diff(thread[by_thread], prepend=-1, append=-2))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            numbers = by_thread[first:last]
            one = self._threads[thread[numbers[0]]]
            starts, ends = start[numbers], end[numbers]
            if not one.tracked and len(one.tids) <= 1 and starts[0] >= one.floor and _nested(starts, ends):
                tids[numbers] = self._tid(one, 0)
                self._plain.add(one.index)
                continue
            rows = self._place(one, starts.tolist(), ends.tolist(), track[numbers].tolist(), span[numbers].tolist())
            used = np.array([self._tid(one, row) for row in range(max(rows) + 1)], dtype=np.int64)
            tids[numbers] = used[rows]
        return tids

    def _place(
        self, one: _Thread, starts: list[int], ends: list[int], tracks: list[int], spans: list[bool]
    ) -> list[int]:
        """Return the row of each event of one thread; one that began before this segment goes to rows of its own."""
        lanes, floor = one.lanes, one.floor
        rows = []
        late: Lanes | None = None
        early = []
        for start, end, track, span in zip(starts, ends, tracks, spans, strict=True):
            if start < floor:
                late = late or Lanes()
                rows.append(-1 - (late.place(start, end, track) if span else late.at(start, track)))
                early.append(len(rows) - 1)
            else:
                rows.append(lanes.place(start, end, track) if span else lanes.at(start, track))
        if late is not None:
            used = max(len(one.tids), len(lanes))
            for place in early:
                rows[place] = used - 1 - rows[place]
        return rows

    def _tid(self, one: _Thread, row: int) -> int:
        while len(one.tids) <= row:
            one.tids.append(self._next_tid)
            self._next_tid += 1
            if len(one.tids) > 1:
                self._report.lanes += 1
        return one.tids[row]

    def _note_floors(self, thread: Ints, end: Ints) -> None:
        for index in np.unique(thread).tolist():
            one = self._threads[index]
            one.floor = max(one.floor, int(end[thread == index].max()))
            if one.lanes and len(one.tids) > len(one.lanes):
                one.lanes.reserve(len(one.tids))

    def _arrows(
        self, segment: _Segment, order: Ints, start: Ints, end: Ints, thread: Ints, span: NDArray[np.bool_]
    ) -> Arrows:
        """Give the ``s`` and ``f`` events of other tools to the spans they belong to."""
        arrows = segment.arrows
        if not arrows.ends:
            return arrows
        store = segment.store
        for index in np.unique(thread[list(arrows.ends)]).tolist():
            mine = order[thread[order] == index]
            columns = (mine, start[mine], end[mine], span[mine])
            if index in self._plain and self._find_nested(arrows, *columns):
                continue
            arrows.find(zip(*(column.tolist() for column in columns), strict=True), store.args)
        self._plain.clear()
        if arrows.alone:
            text = f"{self._label} has arrow ends outside of any span: dropped"
            self._problem("ZT0109", "arrow_without_span", text, arrows.alone)
        out, into = arrows.settle(several=self._encoder.several_arrows, taken=store.with_arrow)
        self._count_ends(out, into)
        self._bound_numbers = np.array(sorted({*arrows.bound, *arrows.kept}), dtype=np.int64)
        return arrows

    @staticmethod
    def _find_nested(arrows: Arrows, numbers: Ints, start: Ints, end: Ints, span: NDArray[np.bool_]) -> bool:
        """Give all ends of a thread to the span begun last, if that is still open for all: then it is the inner one."""
        places = np.arange(len(numbers))
        before = np.maximum.accumulate(np.where(span, places, -1))
        mine = np.flatnonzero(~span)
        mine = mine[[number in arrows.ends for number in numbers[mine].tolist()]]
        inner = before[mine]
        if (inner < 0).any() or (end[inner] < start[mine]).any():
            return False
        arrows.take(numbers[mine].tolist(), numbers[inner].tolist())
        return True

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> PartReport:
        """Return the report, with the names of all rows."""
        for process in self._processes:
            report = process.report
            if report.name and process.labels:
                report.name = f"{report.name} ({process.labels})"
            if process.first_ns <= process.last_ns:
                report.first_us, report.last_us = process.first_ns / 1000, process.last_ns / 1000
                report.clock_bound_us = self._job.shift.worst_us(process.first_ns, process.last_ns)
            self._report.processes.append(report)
            for raw, thread in process.threads.items():
                if raw == _COUNTER_TID:
                    continue
                name = thread.name or f"thread {raw}"
                for row, tid in enumerate(thread.tids):
                    shown = name if not row else f"{name} ({row + 1})"
                    self._report.rows.append((process.pid, tid, shown, thread.order * 1000 + row))
        return self._report

    def close(self) -> None:
        """Release the temporary file, and what refers to itself: nobody collects garbage during a merge."""
        self._segment.store.close()
        self._lookup = _Lookup(lambda _pid, _tid: 0)
        for process in self._processes:
            process.threads.clear()
        self._threads.clear()


def _nested(starts: Ints, ends: Ints) -> bool:
    """Return whether spans in order of start are apart or nested."""
    if (starts[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        return True
    stack: list[int] = []
    pop, push = stack.pop, stack.append
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        while stack and stack[-1] <= start:
            pop()
        if stack and end > stack[-1]:
            return False
        push(end)
    return True


def _between(ns: NDArray[np.float64], at: NDArray[np.float64], offset: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return offsets on the straight lines through the points; beyond them along the outer lines."""
    found: NDArray[np.float64] = np.interp(ns, at, offset)
    if len(at) > 1:
        for edge, inner, outside in ((0, 1, ns < at[0]), (-1, -2, ns > at[-1])):
            span = at[edge] - at[inner]
            slope = np.clip((offset[edge] - offset[inner]) / span, -5e-4, 5e-4) if span else 0.0
            found = np.where(outside, offset[edge] + slope * (ns - at[edge]), found)
    return found


def _rank(value: object, known: int | None) -> int | None:
    """Return a rank written as a number or in quotes; anything else leaves what is known."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, float) and value.is_integer() and value >= 0:
        return int(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else known


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -MAX_US < value < MAX_US


def report_dict(report: PartReport) -> dict[str, Any]:
    """Return a part's report as JSON values, to send it to another process."""
    found = asdict(report)
    for name in ("out_ends", "in_ends"):
        found[name] = list(getattr(report, name))
    return found


def report_of(found: dict[str, Any]) -> PartReport:
    """Return the report that ``report_dict`` made these values of."""
    report = PartReport(
        [ProcessReport(**process) for process in found["processes"]],
        [(pid, tid, name, order) for pid, tid, name, order in found["rows"]],
        found["spans"],
        found["lanes"],
        arrows=found["arrows"],
    )
    report.out_ends, report.in_ends = array("Q", found["out_ends"]), array("Q", found["in_ends"])
    return report
