"""The background writer: every period it turns the rings of one tracer into lines of one append-only file.

No fsync: a killed process loses nothing that reached the kernel, so at most one flush period. A failed write (disk
full) is undone to the last whole line, its records are counted as lost, and the run goes on.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any, Final

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.trace.config import TraceConfig
from zbus.trace.events import Event, Expander, encode_event, encode_events
from zbus.trace.tracer import Level, Record, Ring, Tracer

__all__ = ["FORMAT", "TraceWriter", "boot_id", "time_namespace", "trace_path"]

FORMAT: Final = 1
"""Version of the trace format, in every opening metadata event."""

_BLOCK: Final = 4096
_STOP_S: Final = 5.0
_LOG = logging.getLogger("zbus.trace")
_COMPONENT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def trace_path(root: str | Path, role: str, rank: int, start: int = 0) -> Path:
    """Return ``{root}/{role}/traces_{rank}.jsonl``; with a start n > 0 ``traces_{rank}.{n}.jsonl``.

    Raises:
        ValueError: The role could leave the root, or the rank is negative.
    """
    if not _COMPONENT.fullmatch(role) or not role.strip(".") or rank < 0 or start < 0:
        msg = f"no trace file for role {role!r}, rank {rank}, start {start}"
        raise ValueError(msg)
    return Path(root) / role / (f"traces_{rank}.{start}.jsonl" if start else f"traces_{rank}.jsonl")


def boot_id() -> str:
    """Return the kernel's boot id, or an empty text where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def time_namespace() -> int:
    """Return the inode of this process's time namespace (0 where unknown): it owns CLOCK_MONOTONIC's offset."""
    try:
        return os.stat("/proc/self/ns/time").st_ino  # noqa: PTH116  # a magic link: stat, not a path question
    except OSError:
        return 0


class TraceWriter:
    """Writes one tracer's records to its file; ``open`` starts it, ``close`` ends it. Safe from any thread.

    After a fork the child's writer continues into a file of its own, ``….fork<pid>.jsonl``, begun with the first
    thing the child records.

    Args:
        tracer: Whose rings to drain.
        config: Root, run name, run epoch, period.
        incarnation: Of this start of the rank; 0 for the controller or a program of its own.
        start: Start counter of the rank: names the file.
        clock: For the clock anchor and the timestamps of loss records.
    """

    def __init__(
        self, tracer: Tracer, config: TraceConfig, *, incarnation: int = 0, start: int = 0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.tracer = tracer
        self.config = config
        self.path = trace_path(config.root, tracer.role, tracer.rank, start)
        self.incarnation = incarnation
        self.start = start
        self.written = 0
        self.lost: dict[str, int] = {}
        self._clock = clock
        self._base = self.path
        self._write_lock = threading.Lock()  # one flush at a time
        self._wake = threading.Event()
        self.opened = False
        self._closed = False
        self._warned = False
        self._thread: threading.Thread | None = None
        self._fd = -1
        self._good = 0
        self._pid = 0
        self._epoch_mono: int | None = None
        self._shared = False
        self._names: dict[int, str] = {}
        self._expander = Expander(0, 0, "")
        self._unsaid: dict[str, list[int]] = {}  # reason -> [lost, since_ns], not in the file yet

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
        """Write everything recorded so far; returns when it is in the file (or counted as lost). Never raises."""
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
            self._say_lost()
            self._write(encode_event(self._end_event()))
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def counts(self) -> dict[str, Any]:
        """Return ``recorded``, ``written``, ``pending`` and ``lost`` (by reason), in records.

        Always recorded = written + pending + the sum of lost.
        """
        rings = self.tracer.rings()
        pending = sum(len(ring.items) for ring in rings)
        lost = dict(self.lost)
        unseen = sum(ring.lost - ring.lost_reported for ring in rings)
        if unseen:
            lost["ring_full"] = lost.get("ring_full", 0) + unseen
        return {
            "recorded": self.written + pending + sum(lost.values()),
            "written": self.written,
            "pending": pending,
            "lost": lost,
        }

    # -- thread ---------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        name = f"zbus-trace {self.tracer.role}/{self.tracer.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.config.flush_period_s)
            self._wake.clear()
            self.flush()

    def _ensure_here(self) -> None:
        """On a thread's first record: in a forked child, begin the child's own file and thread."""
        if self._pid == os.getpid() or self._closed:
            return
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self.written, self.lost, self._unsaid = 0, {}, {}
        self._names = {}
        if self._fd >= 0:
            os.close(self._fd)
        self.path = self._base.with_name(f"{self._base.name.removesuffix('.jsonl')}.fork{os.getpid()}.jsonl")
        with self._write_lock:
            self._open_file()
        self._start_thread()

    # -- file -----------------------------------------------------------------------------------------------------

    def _open_file(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._fd = fd
        self._pid = os.getpid()
        self._good = os.fstat(fd).st_size
        if self._epoch_mono is None:  # once: a forked child counts from the same moment
            self._epoch_mono, self._shared = self._epoch()
        epoch_mono, shared = self._epoch_mono, self._shared
        self._expander = Expander(self._pid, epoch_mono, self.config.run)
        torn = self._good > 0 and os.pread(fd, 1, self._good - 1) != b"\n"
        lines = [encode_event(event) for event in self._opening(epoch_mono, shared=shared)]
        self._write(b"\n" * torn + b"".join(lines))

    def _epoch(self) -> tuple[int, bool]:
        """Return this process's monotonic clock at the run epoch, and whether that is exact (one shared clock)."""
        config = self.config
        mono, wall = self._clock.monotonic_ns(), self._clock.wall_ns()
        if not config.run_epoch_wall_ns:
            return mono, True
        same_ns = config.clock_time_ns in (0, time_namespace())
        if config.run_epoch_mono_ns and config.clock_boot_id and config.clock_boot_id == boot_id() and same_ns:
            return config.run_epoch_mono_ns, True
        return mono - (wall - config.run_epoch_wall_ns), False

    def _opening(self, epoch_mono: int, *, shared: bool) -> list[Event]:
        tracer, config, pid = self.tracer, self.config, self._pid
        mono, wall = self._clock.monotonic_ns(), self._clock.wall_ns()
        label = f"{tracer.role}/{tracer.rank}"
        host = socket.gethostname()
        meta = {
            "format": FORMAT,
            "run": config.run,
            "role": tracer.role,
            "rank": tracer.rank,
            "start": self.start,
            "incarnation": f"{self.incarnation:016x}",
            "host": host,
            "pid": pid,
            "boot_id": boot_id(),
            "time_ns": time_namespace(),
            "run_epoch_wall_ns": config.run_epoch_wall_ns or wall - (mono - epoch_mono),
            "epoch_mono_ns": epoch_mono,
            "epoch_clock": "shared" if shared else "wall",
            "mono_ns": mono,
            "wall_ns": wall,
            "level": config.level,
        }
        title = f"{label} ({host}, pid {pid})" + (f" start {self.start}" if self.start else "")
        who = {"role": tracer.role, "rank": tracer.rank}
        at = self._expander.ts(mono)
        return [
            Event("zbus_meta", "M", at, pid=pid, args=meta),
            Event("process_name", "M", pid=pid, args={"name": title, **who}),
            Event("process_sort_index", "M", pid=pid, args={"sort_index": tracer.rank, **who}),
        ]

    def _end_event(self) -> Event:
        at = self._expander.ts(self._clock.monotonic_ns())
        return Event("zbus_end", "M", at, pid=self._pid, args=self.counts())

    def _drain(self) -> None:
        if self._fd < 0 or self._pid != os.getpid():
            return
        for ring in self.tracer.rings():
            gone = ring.finished()  # asked first: nothing comes after a yes
            while batch := ring.take(_BLOCK):
                try:
                    self._write_batch(batch, ring)
                except BaseException:  # an interrupt of the caller's thread, say: nothing goes uncounted
                    self._count_lost("interrupted", len(batch))
                    raise
            lost = ring.lost - ring.lost_reported
            if lost:
                ring.lost_reported += lost
                self._count_lost("ring_full", lost)
            if gone and not ring.items:
                self.tracer.forget(ring)
        self._say_lost()

    def _write_batch(self, batch: list[Record], ring: Ring) -> None:
        out: list[Event] = []
        bad = 0
        self._name_thread(ring, out)
        expand = self._expander.expand
        for record in batch:
            try:
                expand(record, ring.tid, out)
            except Exception:  # noqa: BLE001  # a malformed record must not cost its neighbours
                bad += 1
        if bad:
            self._count_lost("malformed", bad)
        if self._write(encode_events(out)):
            self.written += len(batch) - bad
        else:
            self._names.pop(ring.tid, None)
            self._count_lost("write_error", len(batch) - bad)

    def _name_thread(self, ring: Ring, out: list[Event]) -> None:
        thread = ring.thread()
        name = thread.name if thread is not None else ring.name
        if self._names.get(ring.tid) == name:
            return
        self._names[ring.tid] = name
        who = {"role": self.tracer.role, "rank": self.tracer.rank}
        out.append(Event("thread_name", "M", pid=self._pid, tid=ring.tid, args={"name": name, **who}))

    def _count_lost(self, reason: str, count: int) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + count
        entry = self._unsaid.setdefault(reason, [0, self._clock.monotonic_ns()])
        entry[0] += count

    def _say_lost(self) -> None:
        """Put losses into the file as soon as it takes lines again."""
        for reason, (count, since) in list(self._unsaid.items()):
            until = self._clock.monotonic_ns()
            args = {"reason": reason, "lost": count, "since_us": self._expander.ts(since)}
            args["until_us"] = self._expander.ts(until)
            if self._write(encode_event(Event("zbus_loss", "M", self._expander.ts(until), pid=self._pid, args=args))):
                del self._unsaid[reason]

    def _write(self, data: bytes) -> bool:
        """Append whole lines; on failure take back the torn part and say so. True: all in the file."""
        if self._fd < 0:
            return False
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._undo(error)
            return False
        self._good += len(data)
        return True

    def _undo(self, error: OSError) -> None:
        try:
            os.ftruncate(self._fd, self._good)
        except OSError:
            self._good = os.fstat(self._fd).st_size  # a torn line stays; the reader skips it
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "trace file %s cannot be written (%s): the run goes on, losses are counted", self.path, error.strerror
            )
