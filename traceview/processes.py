"""The processes and threads of one file of a merge, as its metadata events tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeGuard

from traceview.align import MAX_US
from traceview.event import Event, args_of
from traceview.lanes import Lanes
from traceview.part_report import PartJob, PartReport, ProcessReport
from traceview.problems import Problems

__all__ = ["COUNTER_TID", "FORMAT", "Process", "Processes", "Thread"]

FORMAT: Final = 1
"""Newest trace format this program knows."""

_MANY_THREADS: Final = 20_000
_MANY_PROCESSES: Final = 2_000
"""Of one file; what comes beyond shares the rows of one."""

_LOSS_TID: Final = -(1 << 40)
_MORE_TID: Final = _LOSS_TID - 2
COUNTER_TID: Final = _LOSS_TID - 1
"""Counters belong to their process, not to a thread: they are kept as if on this one."""


class Thread:
    """One thread of a process: its rows in the output."""

    __slots__ = ("floor", "index", "lanes", "name", "order", "process", "tids", "tracked")

    def __init__(self, index: int, process: Process) -> None:
        self.index = index
        self.process = process
        self.order = len(process.threads) + 1
        self.lanes = Lanes()
        self.floor = -(1 << 62)
        self.tids: list[int] = []
        self.name = ""
        self.tracked = False


class Process:
    """One process of one file: one incarnation, with its own row group in the output."""

    def __init__(self, report: ProcessReport) -> None:
        self.report = report
        self.pid = report.pid
        self.threads: dict[int, Thread] = {}
        self.open: dict[int, list[Event]] = {}
        self.source = ""
        self.labels = ""
        self.first_ns = 1 << 62
        self.last_ns = -(1 << 62)


class Processes:
    """All processes of one file.

    Args:
        job: The file, and what is known of it.
        problems: Told of losses and of a format that is too new.

    Attributes:
        all: In order of their first sign.
        threads: Of all processes, by their index.
        headed: Whether a header was seen.
        writer_pid: Of the process that writes the file, as its header says.
    """

    def __init__(self, job: PartJob, problems: Problems) -> None:
        self._job = job
        self._label = job.source.label
        self._problems = problems
        self._current: dict[int, Process] = {}  # pid in the file -> process
        self.all: list[Process] = []
        self.threads: list[Thread] = []
        self.headed = False
        self.writer_pid: int | None = None

    def of(self, pid: int) -> Process:
        """Return the process that has this pid in the file now."""
        return self._current.get(pid) or self._new(pid)

    def thread(self, process: Process, tid: int) -> Thread:
        """Return a thread of a process."""
        thread = process.threads.get(tid)
        if thread is None and len(self.threads) >= _MANY_THREADS and tid != COUNTER_TID:
            text = f"{self._label} has more than {_MANY_THREADS} threads: the others share one row group"
            self._problems.add("ZT0120", "many_threads", text)
            tid = _MORE_TID
            thread = process.threads.get(tid)
        if thread is None:
            thread = process.threads[tid] = Thread(len(self.threads), process)
            thread.name = "more threads" if tid == _MORE_TID else ""
            self.threads.append(thread)
        return thread

    def indexes(self, pid: int, tids: Iterable[int]) -> dict[int, int]:
        """Return the indexes of the threads with these tids of a process, new ones in this order."""
        process = self.of(pid)
        return {tid: self.thread(process, tid).index for tid in tids}

    def metadata(self, event: Event) -> Event | None:
        """Take a metadata event; return the span that shows it, if it tells of a loss."""
        name, args = event.name, args_of(event)
        if name == "zbus_meta":
            self._header(event, args)
            return None
        if name == "text_id":
            self._name_text_id(event.pid, str(args.get("name")))
            return None
        process = self.of(event.pid)
        report = process.report
        if name == "process_name" and isinstance(args.get("name"), str):
            report.name = args["name"]
            report.role = args["role"].strip() if isinstance(args.get("role"), str) else report.role
            report.rank = _rank(args.get("rank"), report.rank)
        elif name == "process_labels" and isinstance(args.get("labels"), str):
            process.labels = args["labels"]
        elif name == "thread_name" and isinstance(args.get("name"), str):
            _name_thread(self.thread(process, event.tid), args["name"])
        elif name == "zbus_end":
            report.complete = True
            self._count_lost(report, args.get("lost"))
        elif name == "zbus_loss":
            return self._loss(process, event.pid, args)
        return None

    def finish(self, report: PartReport) -> None:
        """Put the processes and their rows into a report."""
        for process in self.all:
            told = process.report
            if told.complete is False:
                text = f"{self._label} has no end event: {told.name or 'its process'} did not end in order"
                text += "; if it was killed, its last flush period (0.25 s unless configured) is missing"
                self._problems.add("ZT0110", "no_end", text)
            if told.name and process.labels:
                told.name = f"{told.name} ({process.labels})"
            if process.first_ns <= process.last_ns:
                told.first_us, told.last_us = process.first_ns / 1000, process.last_ns / 1000
                told.clock_bound_us = self._job.shift.worst_us(process.first_ns, process.last_ns)
            report.processes.append(told)
            for raw, thread in process.threads.items():
                if raw == COUNTER_TID:
                    continue
                name = thread.name or f"thread {raw}"
                for row, tid in enumerate(thread.tids):
                    shown = name if not row else f"{name} ({row + 1})"
                    report.rows.append((process.pid, tid, shown, thread.order * 1000 + row))

    def close(self) -> None:
        """Forget what refers to itself: nobody collects garbage during a merge."""
        for process in self.all:
            process.threads.clear()
        self.threads.clear()

    def _new(self, pid: int) -> Process:
        job = self._job
        if len(self.all) > _MANY_PROCESSES:
            text = f"{self._label} has more than {_MANY_PROCESSES} processes: the others are shown as the last"
            self._problems.add("ZT0120", "many_processes", text)
            return self.all[-1]
        report = ProcessReport("", job.role, job.rank, self._label)
        report.clock, report.shift_us = job.shift.how, (job.shift.add_ns + job.base_us * 1000) / 1000
        report.clock_bound_us = job.shift.bound_ns / 1000 if job.shift.bound_ns is not None else None
        report.pid = 1 + job.number + len(self.all) * job.files
        process = self._current[pid] = Process(report)
        self.all.append(process)
        return process

    def _count_lost(self, report: ProcessReport, told: object) -> None:
        """Take what a process says at its end that it lost; what no line told before is told here."""
        for reason, lost in told.items() if isinstance(told, dict) else ():
            more = lost - report.lost.get(str(reason), 0) if type(lost) is int else 0
            if more > 0:
                report.lost[str(reason)] = lost
                self._problems.add("ZT0111", "lost", f"{self._label} lost {more} records ({reason})", more)

    def _name_text_id(self, number: int, text: str) -> None:
        """Give a pid or tid that was text in the file its text back as a name."""
        process = self._current.get(number)
        if process is not None and not process.report.name:
            process.report.name = text
        for one in self.all:
            thread = one.threads.get(number)
            if thread is not None and not thread.name:
                thread.name = text

    def _header(self, event: Event, args: dict[str, Any]) -> None:
        """Begin a new process: a restarted one may go on in the file of its predecessor, under the same pid."""
        if isinstance(args.get("format"), int) and args["format"] > FORMAT:
            text = f"{self._label} has format {args['format']}, newer than {FORMAT}: read as far as known"
            self._problems.add("ZT0106", "newer_format", text)
        self.headed = True
        self.writer_pid = event.pid
        source = str(args.get("source") or "")
        before = self._current.get(event.pid)
        if before is not None and source and before.source == source:
            return  # the same process, in its spill
        process = self._new(event.pid)
        process.source = source
        report = process.report
        report.complete = False
        if isinstance(args.get("role"), str):
            report.role = args["role"].strip()
        report.rank = _rank(args.get("rank"), report.rank)

    def _loss(self, process: Process, pid: int, args: dict[str, Any]) -> Event | None:
        """Show a loss where it happened."""
        lost, since, until = args.get("lost"), args.get("since_us"), args.get("until_us")
        if type(lost) is not int or not _is_time(since) or not _is_time(until):
            return None
        reason = str(args.get("reason", ""))
        process.report.lost[reason] = process.report.lost.get(reason, 0) + lost
        self.thread(process, _LOSS_TID).name = "losses"
        shown = f"lost {lost} records ({reason})"
        self._problems.add("ZT0111", "lost", f"{self._label} lost {lost} records ({reason})", lost)
        return Event(shown, "X", since - self._job.base_us, max(0.0, until - since), pid, _LOSS_TID)


def _name_thread(thread: Thread, name: str) -> None:
    """Name a thread; of one that was renamed all names are kept, the last first."""
    before = [part for part in thread.name.split(" ← ") if part and part != name]
    thread.name = " ← ".join([name, *before[:3]])


def _rank(value: object, known: int | None) -> int | None:
    """Return a rank written as a number or in quotes; anything else leaves what is known."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, float) and value.is_integer() and value >= 0:
        return int(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else known


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -MAX_US < value < MAX_US
