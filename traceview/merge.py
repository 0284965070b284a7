"""Many files, one timeline: aligned, with unique pids and tids, own names, lanes and arrows.

Files are merged one after another, each sorted by itself: memory does not grow with the input, and viewers sort
across processes anyway. Damage is reported, not raised.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

import msgspec

from traceview.align import MAX_US, Anchor, Shift, align, anchor_of
from traceview.chrome import ChromeWriter
from traceview.event import NO_ARGS, Event, encode_args
from traceview.lanes import Lanes
from traceview.problems import InputError, Problems, Warned
from traceview.reader import Source, find_sources, read_batches, read_events
from traceview.sorting import Sorter

__all__ = ["FORMAT", "MergeReport", "ProcessReport", "merge"]

FORMAT: Final = 1
"""Newest trace format this program knows."""

_HEAD_EVENTS: Final = 1000
_BATCH: Final = 4096
_MAX_ARROW_ENDS: Final = 1 << 20
_LOSS_TID: Final = -(1 << 40)


@dataclass(slots=True)
class ProcessReport:
    """One process of the merged trace.

    Attributes:
        name: As the viewer shows it.
        role, rank: None where nothing tells.
        file: Its input.
        events: Written events, without metadata.
        complete: Whether its end event was there (None: a file that has none by nature).
        lost: Records its own process reported as lost, by reason.
        clock: How its times were matched: ``reference``, ``shared``, ``wall`` or ``none``.
        shift_us: What was added to its times.
    """

    name: str
    role: str | None
    rank: int | None
    file: str
    events: int = 0
    complete: bool | None = None
    lost: dict[str, int] = field(default_factory=dict)
    clock: str = "none"
    shift_us: float = 0.0


@dataclass(slots=True)
class MergeReport:
    """What a merge did; ``to_dict`` is the JSON form.

    Attributes:
        output: The file written.
        events: Events in it, without metadata.
        spans: Spans among them.
        lanes: Rows added because spans overlapped on one thread.
        arrows: ``out`` and ``in`` ends, and how many ids had both (``joined``; None: too many to check).
        processes: Every process, in the viewer's order.
        problems: Damage and doubts, by kind.
        warnings: The first places of each kind, as (code, text).
        incomplete: Whether ``--strict`` would refuse.
        bytes: Size of the output.
        wall_s: Seconds taken.
    """

    output: str
    events: int = 0
    spans: int = 0
    lanes: int = 0
    arrows: dict[str, int | None] = field(default_factory=dict)
    processes: list[ProcessReport] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    incomplete: bool = False
    bytes: int = 0
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with its schema name."""
        return {"schema": "zbus.traceview.merge/1", **asdict(self)}


def merge(
    inputs: Collection[str],
    output: Path,
    *,
    roles: Collection[str] = (),
    ranks: Collection[int] = (),
    all_runs: bool = False,
    on_warning: Callable[[Warned], None] | None = None,
    run_events: int = 100_000,
) -> MergeReport:
    """Merge the trace files behind ``inputs`` into the Chrome trace ``output``.

    Args:
        inputs: Trial directories, directories, files or globs.
        output: Written whole or not at all; gz by suffix. Never one of the inputs.
        roles: Only these roles; empty: all.
        ranks: Only these ranks; empty: all.
        all_runs: Keep files of older runs that lie in the same tree.
        on_warning: Told of the first problems of each kind, at once.
        run_events: Events held in memory at most.

    Raises:
        InputError: No input, or the output is one of the inputs.
        OutputError: The output cannot be written; nothing of it stays behind.
    """
    began = time.monotonic()
    problems = Problems(on_warning=on_warning)
    sources = find_sources(inputs, problems, exclude=output)
    _refuse_overwrite(inputs, output)
    kept = _choose(sources, problems, roles, ranks, all_runs=all_runs)
    report = MergeReport(str(output))
    with ChromeWriter(output) as writer:
        merger = _Merger(writer, problems, report, output.parent, run_events)
        for source, shift in kept:
            merger.file(source, shift)
        report.arrows = merger.arrows()
        _sum_up(report, problems)
        writer.finish(
            {
                "tool": "zbus traceview",
                "processes": [asdict(p) for p in report.processes],
                "problems": report.problems,
                "warnings": report.warnings,
                "arrows": report.arrows,
            }
        )
        report.bytes = writer.bytes
    report.wall_s = round(time.monotonic() - began, 3)
    return report


def _sum_up(report: MergeReport, problems: Problems) -> None:
    report.problems = problems.by_kind()
    report.warnings = [(w.code, w.text) for w in problems.first]
    report.incomplete = problems.incomplete()
    report.events = sum(p.events for p in report.processes)


def _refuse_overwrite(inputs: Collection[str], output: Path) -> None:
    """Refuse an output that is an input under any name."""
    if not output.exists():
        return
    for text in inputs:
        path = Path(text)
        if path.is_file() and path.samefile(output):
            msg = f"the output {output} is one of the inputs"
            raise InputError(msg, hint="name another output with -o")
    if output.name.endswith((".jsonl", ".jsonl.gz")):
        msg = f"the output {output} exists and looks like a trace of one rank"
        raise InputError(msg, hint="name another output with -o, such as merged.json.gz")


# -- which files, which clock --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Head:
    """What the beginning of a file tells."""

    source: Source
    anchor: Anchor
    role: str | None
    rank: int | None
    run: str
    epoch_wall: int


def _choose(
    sources: list[Source], problems: Problems, roles: Collection[str], ranks: Collection[int], *, all_runs: bool
) -> list[tuple[Source, Shift]]:
    heads = [_head(source) for source in sources]
    if not all_runs:
        heads = _one_run(heads, problems)
    shifts = align([head.anchor for head in heads])
    kept = []
    for head, shift in zip(heads, shifts, strict=True):
        if (roles and head.role not in roles) or (ranks and head.rank not in ranks):
            continue
        if shift.how == "wall":
            text = f"{head.source.label} is matched by wall clock: its error was not measured"
            problems.add("ZT0112", "clock_by_wall", text)
        elif shift.how == "none" and len(heads) > 1:
            text = f"{head.source.label} says nothing about its clock: its times are taken as they are"
            problems.add("ZT0112", "clock_unknown", text)
        kept.append((head.source, shift))
    if not kept:
        msg = "no trace file has the roles and ranks asked for"
        raise InputError(msg, hint=f"found: {', '.join(sorted({f'{h.role}/{h.rank}' for h in heads}))}")
    return kept


def _head(source: Source) -> _Head:
    first: float | None = None
    for number, event in enumerate(read_events(source, Problems())):
        if event.name == "zbus_meta" and event.ph == "M":
            meta = _args(event)
            anchor = anchor_of(meta, event.ts)
            if anchor is not None:
                role, rank = meta.get("role", source.role), meta.get("rank", source.rank)
                return _Head(source, anchor, role, rank, anchor.run, _epoch_of(meta, anchor))
        ts = event.ts
        if event.ph != "M" and ts is not None and -MAX_US < ts < MAX_US and (first is None or ts < first):
            first = ts
        if number >= _HEAD_EVENTS:
            break
    return _Head(source, Anchor(round((first or 0.0) * 1000)), source.role, source.rank, "", 0)


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -MAX_US < value < MAX_US


def _epoch_of(meta: dict[str, Any], anchor: Anchor) -> int:
    epoch = meta.get("run_epoch_wall_ns")
    return epoch if type(epoch) is int else anchor.epoch_wall_ns


def _one_run(heads: list[_Head], problems: Problems) -> list[_Head]:
    """Keep the newest run; a tree may still hold files of an older one.

    Another run differs in name and in epoch: processes begun by hand share only the name, a damaged name only the
    epoch.
    """
    named = [head for head in heads if head.run]
    if not named:
        return heads
    newest = max(named, key=lambda head: head.epoch_wall)
    kept = []
    for head in heads:
        if head.run in ("", newest.run) or head.epoch_wall == newest.epoch_wall:
            kept.append(head)
        else:
            text = f"{head.source.label} belongs to run {head.run}, not {newest.run}: skipped (--all-runs keeps it)"
            problems.add("ZT0105", "other_run", text)
    return kept


def _args(event: Event) -> dict[str, Any]:
    if event.args is NO_ARGS or not bytes(event.args):
        return {}
    try:
        args = msgspec.json.decode(event.args)
    except msgspec.DecodeError:
        return {}
    return args if isinstance(args, dict) else {}


# -- one file ------------------------------------------------------------------------------------------------------


class _Thread:
    """One thread of a process: its rows in the output."""

    __slots__ = ("lanes", "name", "order", "tids")

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.tids: list[int] = []
        self.name = ""
        self.order = 0


class _Process:
    """One process of one file: one incarnation, with its own row group in the output."""

    def __init__(self, pid: int, report: ProcessReport, order: int) -> None:
        self.pid = pid
        self.report = report
        self.named = False
        self.order = order
        self.threads: dict[int, _Thread] = {}
        self.last_ns = 0
        self.open: dict[int, list[Event]] = {}


class _Merger:
    """Writes file after file into one trace, keeping what must be unique over all of them."""

    def __init__(
        self, writer: ChromeWriter, problems: Problems, report: MergeReport, directory: Path, run_events: int
    ) -> None:
        self._writer = writer
        self._problems = problems
        self._report = report
        self._directory = directory
        self._run_events = run_events
        self._next_pid = 1
        self._next_tid = 1_000_001
        self._names: Counter[str] = Counter()
        self._out_ends = array("Q")
        self._in_ends = array("Q")
        self._arrow_counts = [0, 0]

    def arrows(self) -> dict[str, int | None]:
        """Return how many arrow ends there were, and how many ids had both."""
        out, into = self._arrow_counts
        joined: int | None = None
        if out + into <= _MAX_ARROW_ENDS:
            joined = len(set(self._out_ends) & set(self._in_ends))
        return {"out": out, "in": into, "joined": joined}

    def file(self, source: Source, shift: Shift) -> None:
        """Merge one file."""
        sorter = Sorter(self._directory, self._run_events)
        try:
            part = _FileMerge(self, source, shift, sorter)
            part.collect()
            part.write()
        finally:
            sorter.close()

    # -- shared numbers and names ----------------------------------------------------------------------------------

    def new_process(self, source: Source, shift: Shift) -> _Process:
        report = ProcessReport("", source.role, source.rank, source.label)
        report.clock, report.shift_us = shift.how, shift.add_ns / 1000
        self._report.processes.append(report)
        pid = self._next_pid
        self._next_pid += 1
        return _Process(pid, report, pid)

    def new_tid(self) -> int:
        self._next_tid += 1
        return self._next_tid - 1

    def unique_name(self, name: str) -> str:
        self._names[name] += 1
        count = self._names[name]
        return name if count == 1 else f"{name} #{count}"

    def arrow_end(self, event: Event) -> None:
        try:
            number = int(event.bind_id, 0) if isinstance(event.bind_id, str) else event.bind_id
        except ValueError:
            number = hash(event.bind_id)
        number &= (1 << 64) - 1
        kept = sum(self._arrow_counts) <= _MAX_ARROW_ENDS
        if event.flow_out:
            self._arrow_counts[0] += 1
            if kept:
                self._out_ends.append(number)
        if event.flow_in:
            self._arrow_counts[1] += 1
            if kept:
                self._in_ends.append(number)

    def emit(self, events: list[Event]) -> None:
        self._writer.events(events)

    def count_spans(self, count: int) -> None:
        self._report.spans += count

    def count_lane(self) -> None:
        self._report.lanes += 1

    def problem(self, code: str, kind: str, text: str, count: int = 1) -> None:
        self._problems.add(code, kind, text, count)

    def batches(self, source: Source) -> Iterator[list[Event]]:
        return read_batches(source, self._problems)


class _FileMerge:
    """The merge of one file: first all events into the sorter, then out in order, with lanes."""

    def __init__(self, merger: _Merger, source: Source, shift: Shift, sorter: Sorter) -> None:
        self._merger = merger
        self._source = source
        self._shift = shift
        self._sorter = sorter
        self._current: dict[int, _Process] = {}  # pid in the file -> process
        self._by_pid: dict[int, _Process] = {}  # pid in the output -> process
        self._headed = False
        self._writer_pid: int | None = None

    # -- pass one: collect -----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Read the file into the sorter; afterwards all names are known."""
        for batch in self._merger.batches(self._source):
            for event in batch:
                self._take(event)
        self._close_open()
        self._check_ends()

    def _take(self, event: Event) -> None:
        phase = event.ph
        if phase == "M":
            self._metadata(event)
            return
        process = self._current.get(event.pid) or self._process(event.pid)
        if self._headed and event.pid != self._writer_pid:
            self._shared_file(event.pid)
        ts = event.ts
        if ts is None or not -MAX_US < ts < MAX_US:
            self._merger.problem("ZT0109", "no_ts", f"{self._source.label} has an event without a usable ts: dropped")
            return
        if phase == "X":
            self._span(event, process, ts)
        elif phase in "BE":
            self._pair(event, process, ts)
        elif phase != "C" or self._clean_counter(event):
            event.pid = process.pid
            start = round(ts * 1000) + self._shift.add_ns
            if start > process.last_ns:  # noqa: PLR1730  # the hot path: max() costs a call
                process.last_ns = start
            self._sorter.add(start, start, event)

    def _span(self, event: Event, process: _Process, ts: float) -> None:
        """Take a span; its end is rounded, not its duration, so that a child never leaves its parent."""
        dur = event.dur
        if dur is None or not 0 <= dur < MAX_US:
            dur = self._no_duration(dur)
        shift = self._shift.add_ns
        end = round((ts + dur) * 1000) + shift
        if end > process.last_ns:  # noqa: PLR1730  # as above
            process.last_ns = end
        event.pid = process.pid
        self._sorter.add(round(ts * 1000) + shift, end, event)

    def _shared_file(self, pid: int) -> None:
        text = f"{self._source.label} was written by two processes at once (pids {self._writer_pid} and {pid})"
        self._merger.problem("ZT0113", "shared_file", text)
        self._writer_pid = pid

    def _no_duration(self, dur: float | None) -> float:
        kind, what = ("no_dur", "no") if dur is None else ("negative_dur", "a negative or absurd")
        self._merger.problem("ZT0108", kind, f"{self._source.label} has a span with {what} duration: 0 instead")
        return 0.0

    def _process(self, pid: int) -> _Process:
        process = self._merger.new_process(self._source, self._shift)
        self._current[pid] = process
        self._by_pid[process.pid] = process
        return process

    def _metadata(self, event: Event) -> None:
        name, args = event.name, _args(event)
        if name == "zbus_meta":
            self._header(event, args)
            return
        process = self._current.get(event.pid) or self._process(event.pid)
        if name == "process_name" and isinstance(args.get("name"), str):
            process.report.name = args["name"]
            process.report.role = args["role"] if isinstance(args.get("role"), str) else process.report.role
            rank = args.get("rank")
            process.report.rank = rank if type(rank) is int else process.report.rank
        elif name == "thread_name" and isinstance(args.get("name"), str):
            self._thread(process, event.tid).name = args["name"]
        elif name == "zbus_end":
            process.report.complete = True
            lost = args.get("lost")
            if isinstance(lost, dict):
                process.report.lost = {str(k): v for k, v in lost.items() if type(v) is int}
        elif name == "zbus_loss":
            self._loss(process, args)

    def _header(self, event: Event, args: dict[str, Any]) -> None:
        """Begin a new process: a restarted one may go on in the file of its predecessor, under the same pid."""
        if isinstance(args.get("format"), int) and args["format"] > FORMAT:
            text = f"{self._source.label} has format {args['format']}, newer than {FORMAT}: read as far as known"
            self._merger.problem("ZT0106", "newer_format", text)
        self._headed = True
        self._writer_pid = event.pid
        process = self._process(event.pid)
        process.report.complete = False
        if isinstance(args.get("role"), str):
            process.report.role = args["role"]
        if type(args.get("rank")) is int:
            process.report.rank = args["rank"]

    def _loss(self, process: _Process, args: dict[str, Any]) -> None:
        """Show a loss where it happened."""
        lost, since, until = args.get("lost"), args.get("since_us"), args.get("until_us")
        if type(lost) is not int or not _is_time(since) or not _is_time(until):
            return
        reason = str(args.get("reason", ""))
        process.report.lost[reason] = process.report.lost.get(reason, 0) + lost
        start = round(since * 1000) + self._shift.add_ns
        event = Event(f"lost {lost} records ({reason})", "X", since, max(0.0, until - since), process.pid, _LOSS_TID)
        self._thread(process, _LOSS_TID).name = "losses"
        self._sorter.add(start, start + round(max(0.0, until - since) * 1000), event)
        self._merger.problem("ZT0111", "lost", f"{self._source.label} lost {lost} records ({reason})", lost)

    def _pair(self, event: Event, process: _Process, ts: float) -> None:
        """Make one span of a begin and its end."""
        stack = process.open.setdefault(event.tid, [])
        if event.ph == "B":
            stack.append(event)
            process.last_ns = max(process.last_ns, round(ts * 1000) + self._shift.add_ns)
            return
        if not stack:
            text = f"{self._source.label} has an end without a begin ({event.name or 'no name'}): dropped"
            self._merger.problem("ZT0109", "end_without_begin", text)
            return
        begun = stack.pop()
        begun.ph = "X"
        begun.dur = ts - (begun.ts or 0.0)
        if event.args is not NO_ARGS:
            begun.args = encode_args({**_args(begun), **_args(event)})
        self._span(begun, process, begun.ts or 0.0)

    def _close_open(self) -> None:
        """End what a crash left open at the process's last sign of life."""
        for process in self._by_pid.values():
            for event in (e for stack in process.open.values() for e in stack):
                start = round((event.ts or 0.0) * 1000) + self._shift.add_ns
                event.ph, event.pid = "X", process.pid
                event.args = encode_args({**_args(event), "unfinished": True})
                self._sorter.add(start, max(start, process.last_ns), event)
                text = f"{self._source.label} has a span without an end ({event.name}): ended at the last event"
                self._merger.problem("ZT0110", "unfinished_span", text)

    def _clean_counter(self, event: Event) -> bool:
        """Keep the numeric series only: viewers refuse others."""
        args = _args(event)
        numbers = {k: v for k, v in args.items() if isinstance(v, int | float) and type(v) is not bool}
        if self._headed is False:
            numbers.pop("rank", None)
        if not numbers:
            self._merger.problem("ZT0109", "counter_without_numbers", f"{self._source.label}: {event.name} dropped")
            return False
        if len(numbers) != len(args):
            event.args = encode_args(numbers)
        return True

    def _check_ends(self) -> None:
        for process in self._by_pid.values():
            report = process.report
            if report.complete is False:
                text = f"{self._source.label} has no end event: {report.name or 'its process'} did not end in order"
                self._merger.problem("ZT0110", "no_end", text)

    # -- pass two: write -------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the process names, the events in order of time, and the names of all rows."""
        for process in self._by_pid.values():
            self._name_process(process)
        merger, by_pid = self._merger, self._by_pid
        batch: list[Event] = []
        spans = 0
        for start, minus_dur, _, event in self._sorter.events():
            process = by_pid[event.pid]
            thread = process.threads.get(event.tid) or self._thread(process, event.tid)
            event.ts = start / 1000
            if event.ph == "X":
                spans += 1
                event.dur = -minus_dur / 1000
                row = thread.lanes.place(start, start - minus_dur, event.track)
                event.track = ""
                if event.bind_id != "":
                    merger.arrow_end(event)
            else:
                row = self._place_other(event, thread, start)
            tids = thread.tids
            event.tid = tids[row] if row < len(tids) else self._new_row(thread, row)
            process.report.events += 1
            batch.append(event)
            if len(batch) >= _BATCH:
                merger.emit(batch)
                batch = []
        merger.emit(batch)
        merger.count_spans(spans)
        for process in self._by_pid.values():
            self._name_threads(process)

    def _place_other(self, event: Event, thread: _Thread, start: int) -> int:
        """Return the row of an event that is no span."""
        phase = event.ph
        if phase in "ben" and event.id != "":  # of this process, whoever else uses the same number
            event.id2, event.id = encode_args({"local": str(event.id)}), ""
        row = thread.lanes.at(start, event.track) if phase in "istf" else 0
        event.track = ""
        return row

    def _thread(self, process: _Process, tid: int) -> _Thread:
        thread = process.threads.get(tid)
        if thread is None:
            thread = process.threads[tid] = _Thread()
            thread.order = len(process.threads)
        return thread

    def _new_row(self, thread: _Thread, row: int) -> int:
        while len(thread.tids) <= row:
            thread.tids.append(self._merger.new_tid())
            if len(thread.tids) > 1:
                self._merger.count_lane()
        return thread.tids[row]

    def _name_process(self, process: _Process) -> None:
        report = process.report
        known = f"{report.role}/{report.rank}" if report.role is not None and report.rank is not None else ""
        report.name = self._merger.unique_name(report.name or known or self._source.path.name)
        who = {"name": report.name, "role": report.role, "rank": report.rank}
        self._meta(process, "process_name", 0, {key: value for key, value in who.items() if value is not None})
        self._meta(process, "process_sort_index", 0, {"sort_index": process.order})

    def _name_threads(self, process: _Process) -> None:
        for raw, thread in process.threads.items():
            for row, tid in enumerate(thread.tids):
                name = thread.name or f"thread {raw}"
                self._meta(process, "thread_name", tid, {"name": name if not row else f"{name} ({row + 1})"})
                self._meta(process, "thread_sort_index", tid, {"sort_index": thread.order * 1000 + row})

    def _meta(self, process: _Process, name: str, tid: int, args: dict[str, Any]) -> None:
        self._merger.emit([Event(name, "M", pid=process.pid, tid=tid, args=encode_args(args))])
