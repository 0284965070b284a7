"""The background writer: every period it takes one tracer's rings as a block, for a file or for the sidecar.

No fsync: a killed process loses nothing that reached the kernel, so at most one flush period. A failed write (disk
full) is undone to the last whole line, its records are counted as lost, and the run goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.trace.blocks import Block, ClockLine, LossLine, ThreadPart, encode_block, expand
from zbus.trace.config import TraceConfig
from zbus.trace.events import Event, Expander, encode_event
from zbus.trace.tracefile import (
    FORMAT,
    LineFile,
    new_source,
    opening_facts,
    run_epoch,
    trace_path,
)
from zbus.trace.tracer import Level, Ring, Tracer

__all__ = ["FORMAT", "LOOK_S", "Outlet", "TraceWriter", "opening_lines", "trace_path"]

_BLOCK: Final = 1024
_MAX_PAYLOAD: Final = 4 << 20
_STOP_S: Final = 5.0
_CLOCKS: Final = 1024
LOOK_S: Final = 1.0
"""Seconds between looks for a sidecar."""

_LOG = logging.getLogger("zbus.trace")


class Outlet(Protocol):
    """Takes blocks instead of the writer's own file: the way to the sidecar (``zbus.trace.export``).

    Called by the writer under its lock, but for ``settle``.
    """

    def offer(self, payload: bytes, records: int) -> None:
        """Take one block. Never waits, never raises."""

    def settle(self) -> None:
        """Wait a part of the flush period for what was offered to be safe, then see to it that it is."""

    def close(self, counts: Callable[[], dict[str, Any]]) -> None:
        """Bring everything to safety and say the end, with the last ``counts``; bounded."""

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return records written, pending, and lost by reason."""
        ...


class TraceWriter:
    """Writes one tracer's records; ``open`` starts it, ``close`` ends it. Safe from any thread.

    After a fork the child's writer continues into a file of its own, ``….fork<pid>.jsonl``, begun with the first
    thing the child records.

    Args:
        tracer: Whose rings to drain.
        config: Root, run name, run epoch, period.
        incarnation: Of this start of the rank; 0 for the controller or a program of its own.
        start: Start counter of the rank: names the file.
        clock: For the clock anchor and the timestamps of loss records.

    Attributes:
        find_outlet: Asked now and then for a way to the trial's sidecar; None: there is none to look for.
        look_every_s: How often it is asked.
        source: Id of this process's stream of records.
    """

    def __init__(
        self, tracer: Tracer, config: TraceConfig, *, incarnation: int = 0, start: int = 0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.tracer = tracer
        self.config = config
        self.path = trace_path(config.root, tracer.role, tracer.rank, start)
        self.incarnation = incarnation
        self.start = start
        self.source = new_source()
        self.written = 0
        self.lost: dict[str, int] = {}
        self.clock = clock
        self.find_outlet: Callable[[TraceWriter], Outlet | None] | None = None
        self._base = self.path
        self._write_lock = threading.RLock()  # one flush at a time; a signal handler may flush inside one
        self._wake = threading.Event()
        self.opened = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._file = LineFile(self.path)
        self._outlet: Outlet | None = None
        self.look_every_s = LOOK_S
        self._next_look = 0.0
        self._next_sample = 0.0
        self._pid = 0
        self.epoch = run_epoch(config, clock)  # once: sessions and forked children count from the same moment
        self._names: dict[int, str] = {}
        self._expander = Expander(0, 0, "")
        self._unsaid: dict[str, list[int]] = {}  # reason -> [lost, since_ns], not in the file yet
        self._clocks: deque[ClockLine] = deque(maxlen=_CLOCKS)

    # -- life -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the file with its opening metadata and start the flush thread.

        Raises:
            OSError: The file or its directory cannot be made.
        """
        with self._write_lock:
            self._open_file()
        self.opened = True
        self._start_thread()
        self.tracer.on_first_record = self._ensure_here

    def flush(self) -> None:
        """Hand everything recorded so far to the file, or to the way to the sidecar. Never raises."""
        try:
            with self._write_lock:
                self._drain()
        except Exception:  # noqa: BLE001  # the run matters more than its trace
            _LOG.exception("trace of %s/%d: flush failed", self.tracer.role, self.tracer.rank)

    def close(self) -> None:
        """Stop recording, write the rest and the end event. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self.tracer.set_level(Level.OFF)
        self.tracer.on_first_record = None
        if not self.opened or self._pid != os.getpid():  # a fork that never recorded: nothing of it is to be written
            return
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_S)
        self.flush()
        with self._write_lock:
            if self._outlet is not None:
                self._outlet.close(self.counts)
            else:
                self._say_lost()
                self._file.append(encode_event(self.end_event()))
            self._file.close()

    def counts(self) -> dict[str, Any]:
        """Return ``recorded``, ``written``, ``pending`` and ``lost`` (by reason), in records.

        Always recorded = written + pending + the sum of lost. What the sidecar acknowledged counts as written.
        """
        rings = self.tracer.rings()
        pending = sum(map(len, rings))
        written, lost = self.written, dict(self.lost)
        unseen = sum(ring.lost - ring.lost_reported for ring in rings)
        if unseen:
            lost["ring_full"] = lost.get("ring_full", 0) + unseen
        if self._outlet is not None:
            taken, waiting, gone = self._outlet.counts()
            written, pending = written + taken, pending + waiting
            for reason, count in gone.items():
                lost[reason] = lost.get(reason, 0) + count
        recorded = written + pending + sum(lost.values())
        return {"recorded": recorded, "written": written, "pending": pending, "lost": lost}

    def note_clock(self, line: ClockLine) -> None:
        """Have what is known of another clock written with the next flush. Never waits; any thread."""
        self._clocks.append(line)

    # -- for the outlet -------------------------------------------------------------------------------------------

    def opening_facts(self) -> dict[str, Any]:
        """Return the args of ``zbus_meta`` for this process, as of now."""
        return opening_facts(
            self.config,
            role=self.tracer.role,
            rank=self.tracer.rank,
            start=self.start,
            incarnation=self.incarnation,
            source=self.source,
            epoch=self.epoch,
            clock=self.clock,
        )

    def end_event(self) -> Event:
        """Return the event that closes a file in order."""
        at = self._expander.ts(self.clock.monotonic_ns())
        return Event("zbus_end", "M", at, pid=self._pid, args={**self.counts(), "by": "process"})

    # -- thread ---------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        name = f"zbus-trace {self.tracer.role}/{self.tracer.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._next_sample = time.monotonic() + self.config.gauge_period_s
        while not self._closed:
            self._wake.wait(self.config.flush_period_s * (1.0 if self._outlet is None else 0.75))
            self._wake.clear()
            self._sample_gauges()
            self.flush()
            self._look_for_sidecar()
            outlet = self._outlet
            if outlet is not None and not self._closed:
                try:
                    outlet.settle()
                except Exception:  # noqa: BLE001  # as in flush
                    _LOG.exception("trace of %s/%d: the way to the sidecar", self.tracer.role, self.tracer.rank)

    def _sample_gauges(self) -> None:
        period = self.config.gauge_period_s
        if period > 0 and time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + period
            self.tracer.sample_gauges()

    def _look_for_sidecar(self) -> None:
        find = self.find_outlet
        if find is None or self._outlet is not None or self._closed or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.look_every_s
        try:
            outlet = find(self)
        except Exception:  # noqa: BLE001  # no sidecar is no failure: the file goes on
            _LOG.debug("no way to the sidecar", exc_info=True)
            return
        if outlet is not None:
            with self._write_lock:
                self._drain()
                self._outlet = outlet

    def _ensure_here(self) -> None:
        """On a thread's first record: in a forked child, begin the child's own file and thread."""
        if self._pid == os.getpid() or self._closed:
            return
        self._write_lock = threading.RLock()
        self._wake = threading.Event()
        self.written, self.lost, self._unsaid = 0, {}, {}
        self._names, self._outlet = {}, None
        self._clocks.clear()
        self._file.close()
        self.source = new_source()
        self.path = self._base.with_name(f"{self._base.name.removesuffix('.jsonl')}.fork{os.getpid()}.jsonl")
        self._file = LineFile(self.path)
        with self._write_lock:
            self._open_file()
        self._start_thread()

    # -- file -----------------------------------------------------------------------------------------------------

    def _open_file(self) -> None:
        self._file.open()
        self._pid = os.getpid()
        self._expander = Expander(self._pid, self.epoch.mono_ns, self.config.run)
        self._file.append(opening_lines(self.opening_facts(), self._expander))

    def _drain(self) -> None:
        if self._file.fd < 0 or self._pid != os.getpid():
            return
        for ring in self.tracer.rings():
            gone = ring.finished()  # asked first: nothing comes after a yes
            while len(ring):
                part = ThreadPart(ring.tid, _name_of(ring), *ring.take(_BLOCK))
                try:
                    self._put(part)
                except BaseException:  # an interrupt of the caller's thread, say: nothing goes uncounted
                    self._count_lost("interrupted", len(part))
                    raise
            lost = ring.lost - ring.lost_reported
            if lost:
                ring.lost_reported += lost
                self._count_lost("ring_full", lost)
            if gone and not len(ring):
                self.tracer.forget(ring)
        self._say_lost()
        self._say_clocks()

    def _put(self, part: ThreadPart) -> None:
        records = len(part)
        if self._outlet is not None:
            self._offer(self._outlet, part)
            return
        lines = expand(Block([part]), self._expander, self._names, self._who(), self._pid)
        if lines.malformed:
            self._count_lost("malformed", lines.malformed)
        if self._file.append(lines.data):
            self.written += records - lines.malformed
        else:
            self._names.clear()
            self._expander.forget_names()
            self._count_lost("write_error", records - lines.malformed)

    def _offer(self, outlet: Outlet, part: ThreadPart) -> None:
        """Hand over a block, in halves while it is larger than a message may be."""
        records = len(part)
        payload = encode_block(Block([part]))
        if len(payload) <= _MAX_PAYLOAD:
            outlet.offer(payload, records)
        elif records == 1:
            self._count_lost("too_large", 1)
        else:
            for half in part.halves():
                self._offer(outlet, half)

    def _who(self) -> dict[str, Any]:
        return {"role": self.tracer.role, "rank": self.tracer.rank}

    def _count_lost(self, reason: str, count: int) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + count
        entry = self._unsaid.setdefault(reason, [0, self.clock.monotonic_ns()])
        entry[0] += count

    def _say_lost(self) -> None:
        """Put losses into the file as soon as it takes lines again."""
        for reason, (count, since) in list(self._unsaid.items()):
            block = Block(losses=[LossLine(reason, count, since, self.clock.monotonic_ns())])
            if self._outlet is not None:
                self._outlet.offer(encode_block(block), 0)
                del self._unsaid[reason]
            elif self._file.append(expand(block, self._expander, self._names, self._who(), self._pid).data):
                del self._unsaid[reason]

    def _say_clocks(self) -> None:
        while self._clocks:
            block = Block(clocks=[self._clocks[0]])
            if self._outlet is not None:
                self._outlet.offer(encode_block(block), 0)
            elif not self._file.append(expand(block, self._expander, self._names, self._who(), self._pid).data):
                return  # full disk: the next flush tries again
            self._clocks.popleft()


def opening_lines(facts: dict[str, Any], expander: Expander) -> bytes:
    """Return the lines that open a file, from the args of ``zbus_meta``."""
    pid, role, rank, start = facts["pid"], facts["role"], facts["rank"], facts["start"]
    title = f"{role}/{rank} ({facts['host']}, pid {pid})" + (f" start {start}" if start else "")
    who = {"role": role, "rank": rank}
    events = [
        Event("zbus_meta", "M", expander.ts(facts["mono_ns"]), pid=pid, args=facts),
        Event("process_name", "M", pid=pid, args={"name": title, **who}),
        Event("process_sort_index", "M", pid=pid, args={"sort_index": rank, **who}),
    ]
    return b"".join(map(encode_event, events))


def _name_of(ring: Ring) -> str:
    thread = ring.thread()
    return thread.name if thread is not None else ring.name
