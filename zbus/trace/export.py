"""From a process to the trial's sidecar: blocks with numbers, kept until acknowledged, spilled when they are not.

A block is safe when the sidecar acknowledged it or when it is in ``traces_{rank}.spill.jsonl``. An acknowledgement is
awaited for a quarter of the flush period; after that the sidecar counts as silent and blocks go to the spill at once,
at the cost of one non-blocking send per period; so they do while more than 8 MiB are under way. When it answers again
the spill is sent and then removed. If even the spill fails, blocks are kept up to 8 MiB, and beyond that the newest are
dropped and counted.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from zbus.errors import ZbusError
from zbus.registry.file import FileRegistry
from zbus.trace import wire
from zbus.trace.blocks import Block, ClockLine, encode_block
from zbus.trace.clocksync import ClockFilter, ClockPoint
from zbus.trace.events import encode_event
from zbus.trace.spool import SourceLines
from zbus.trace.tracefile import ClockId, LineFile, clock_id, spill_path
from zbus.trace.writer import TraceWriter
from zbus.transport.multipart import Receiver, send
from zbus.transport.sockets import SocketFactory

__all__ = ["SIDECAR_KEY", "Exporter", "Spill", "connect", "sidecar_record"]

SIDECAR_KEY: Final = "trace/sidecar"
"""Registry key of the sidecar's record."""

_BACKLOG: Final = 8 << 20
_IN_FLIGHT: Final = 1 << 20
_HELLO_S: Final = 0.25
_END_S: Final = 2.0
_BURST: Final = 16
_STALE_S: Final = 5.0
_inherited: Final[list[Any]] = []  # sockets of a parent process: collecting one here would touch the parent's threads


def sidecar_record(registry: Path) -> wire.SidecarRecord | None:
    """Return where the trial's sidecar listens, or None where there is none (or its record is not usable)."""
    try:
        store = FileRegistry(registry, create=False)
        try:
            value = store.get(SIDECAR_KEY)
        finally:
            store.close()
        return None if value is None else msgspec.json.decode(value, type=wire.SidecarRecord)
    except (ZbusError, msgspec.DecodeError):
        return None


def connect(writer: TraceWriter, registry: Path) -> Exporter | None:
    """Return a way from ``writer`` to the sidecar whose record stands in ``registry``, or None if none answers.

    Waits at most a quarter of a second.
    """
    record = sidecar_record(registry)
    if record is None or not record.endpoints:
        return None
    exporter = Exporter(writer, registry, record)
    if exporter.greet(_HELLO_S):
        return exporter
    exporter.discard()
    return None


class _Entry:
    """One block that is in memory."""

    __slots__ = ("payload", "records", "seq")

    def __init__(self, seq: int, records: int, payload: bytes) -> None:
        self.seq = seq
        self.records = records
        self.payload = payload


class Spill:
    """The file of blocks that the sidecar did not take. Made with the first block, removed when all were sent.

    Args:
        path: Of the file.
        lines: Turns blocks into lines.
    """

    def __init__(self, path: Path, lines: SourceLines) -> None:
        self._file = LineFile(path)
        self._lines = lines
        self.index: dict[int, tuple[int, int, int]] = {}  # seq -> (offset, bytes, records) of the lines

    def put(self, seq: int, records: int, payload: bytes) -> bool:
        """Append one block; False if the disk does not take it."""
        if not self._open():
            return False
        at = self._file.size
        data, _, _ = self._lines.lines(wire.Data(self._lines.source, seq, records), payload)
        if not self._file.append(data):
            self._lines.forget_names()
            return False
        head = data.index(b"\n") + 1
        self.index[seq] = at + head, len(data) - head, records
        return True

    def end(self, message: wire.End) -> bool:
        """Append the end of the stream."""
        return self._open() and self._file.append(self._lines.end(message))

    def read(self, seq: int) -> tuple[bytes, int]:
        """Return (lines, records) of a block.

        Raises:
            OSError: The file cannot be read.
        """
        offset, size, records = self.index[seq]
        return os.pread(self._file.fd, size, offset), records

    def done(self, seq: int) -> None:
        """The sidecar has this block; with the last one the file goes."""
        self.index.pop(seq, None)
        if not self.index:
            self.remove()

    def remove(self) -> None:
        """Remove the file."""
        if self._file.fd >= 0:
            self._file.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Close the file and leave it."""
        self._file.close()
        self._lines.forget_names()

    def _open(self) -> bool:
        if self._file.fd >= 0:
            return True
        try:
            self._file.open()
        except OSError as error:
            self._file.error = error
            return False
        if not self._file.append(self._lines.opening()):
            self._file.close()
            return False
        return True


class Exporter:
    """The way to the sidecar: an ``Outlet`` of a writer, on whose flush thread it lives.

    Args:
        writer: Whose blocks.
        registry: Registry directory, where a restarted sidecar is found again.
        record: Where the sidecar listens.
        factory: Makes the socket; its own by default.
    """

    def __init__(
        self,
        writer: TraceWriter,
        registry: Path,
        record: wire.SidecarRecord,
        *,
        factory: SocketFactory | None = None,
    ) -> None:
        facts = writer.opening_facts()
        try:
            stat = writer.path.stat()
            file = stat.st_dev, stat.st_ino
        except OSError:
            file = 0, 0
        forked = writer.path.name.partition(".fork")[2].partition(".")[0]
        self._open = wire.Open(writer.source, facts, file, int(forked) if forked.isdecimal() else 0)
        self._writer = writer
        self._registry = registry
        self._record = record
        self._factory = factory or SocketFactory(max_sockets=8)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._held: dict[int, _Entry] = {}
        self._held_bytes = 0
        self._spill = Spill(spill_path(writer.path), SourceLines(self._open, Path(writer.config.root)))
        self._sent: dict[int, int] = {}  # seq -> bytes: under way, not acknowledged yet
        self._next = 0
        self._written = 0
        self._lost: dict[str, int] = {}
        self._alive = False
        self._ended = False
        self._next_look = 0.0
        self._own_clock = clock_id()
        self._clocks = ClockFilter()
        self._points: list[ClockLine] = []
        self._pongs = 0
        self._last_ack = 0.0
        _inherited.append(self._factory)
        self._connect(record)

    # -- the writer's side ----------------------------------------------------------------------------------------

    def offer(self, payload: bytes, records: int) -> None:
        """Take one block: send it, or spill it where the sidecar is silent. Never waits."""
        with self._lock:
            seq = self._next
            self._next += 1
            self._held[seq] = _Entry(seq, records, payload)
            self._held_bytes += len(payload)
            if not self._alive or sum(self._sent.values()) > _BACKLOG or not self._send(self._held[seq]):
                self._secure()

    def settle(self) -> None:
        """Wait up to a quarter of the flush period for acknowledgements, then spill what has none."""
        self._take_answers(self._writer.config.flush_period_s / 4, lambda: not self._held)
        with self._lock:
            if self._held:
                self._alive = False
                self._secure()
            if self._alive:
                if time.monotonic() - self._last_ack > _STALE_S:
                    self._sent.clear()  # lost with a connection that came back by itself
                self._resend()
                self._sample_clock()
            else:
                self._look_again()
                self._say(self._open)

    def close(self, counts: Callable[[], dict[str, Any]]) -> None:
        """Bring everything to the sidecar or the spill, say the end, and close; at most about two seconds."""
        deadline = time.monotonic() + _END_S
        period = self._writer.config.flush_period_s / 4
        self._take_answers(period if self._alive else 0.0, lambda: not self._held)
        with self._lock:
            point = self._clocks.finish() if self._alive else None
            if point is not None:
                self._note(point)
                self._offer_points()
        while self._alive and (self._held or self._spill.index) and time.monotonic() < deadline:
            with self._lock:
                self._resend()
            self._take_answers(period, lambda: not self._held and not self._sent)
            if self._held:
                self._alive = False
        with self._lock:
            self._secure()
            event = self._writer.end_event()
            event.args = {**counts(), "by": "process"}
            end = wire.End(self._open.source, self._next, encode_event(event))
            if self._alive and not self._spill.index and not self._held:
                self._say(end)
                self._take_answers(max(period, deadline - time.monotonic()), lambda: self._ended)
            if not self._ended:
                self._spill.end(end)
            self._spill.close()
        self.discard()

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return records written, pending, and lost by reason."""
        with self._lock:
            return self._written, sum(entry.records for entry in self._held.values()), dict(self._lost)

    def greet(self, timeout_s: float) -> bool:
        """Introduce this process and wait for an answer; return whether there was one."""
        deadline = time.monotonic() + timeout_s
        while not self._alive and time.monotonic() < deadline:
            self._say(self._open)
            self._take_answers(0.02, lambda: self._alive)
        return self._alive

    def discard(self) -> None:
        """Close the socket and its context. Never waits for the sidecar."""
        with self._lock:
            self._socket.close(0)
            self._factory.close()
            if self._factory in _inherited and os.getpid() == self._pid:
                _inherited.remove(self._factory)

    # -- securing -------------------------------------------------------------------------------------------------

    def _secure(self) -> None:
        """Bring what is in memory to the spill; beyond the bound drop the newest."""
        for entry in list(self._held.values()):
            if not self._spill.put(entry.seq, entry.records, entry.payload):
                break
            self._forget(entry)
            self._written += entry.records
        while self._held_bytes > _BACKLOG:
            entry = self._held[next(reversed(self._held))]
            self._forget(entry)
            if entry.records:
                self._lost["spill_failed"] = self._lost.get("spill_failed", 0) + entry.records

    def _forget(self, entry: _Entry) -> None:
        del self._held[entry.seq]
        self._held_bytes -= len(entry.payload)

    def _resend(self) -> None:
        """Send what was kept or spilled, oldest first, a bounded part at a time."""
        room = _IN_FLIGHT - sum(self._sent.values())
        for seq in list(self._spill.index):
            if room <= 0:
                return
            if seq in self._sent:
                continue
            try:
                lines, records = self._spill.read(seq)
            except OSError:
                return
            if not self._say(wire.Data(self._open.source, seq, records, wire.LINES), lines):
                return
            self._sent[seq] = len(lines)
            room -= len(lines)

    # -- the sidecar's side ---------------------------------------------------------------------------------------

    def _connect(self, record: wire.SidecarRecord) -> None:
        self._sent.clear()
        self._socket = self._factory.dealer("ctl")
        self._receiver = Receiver(self._socket)
        self._fd = int(self._socket.fileno())
        here = self._own_clock.boot_id == record.boot_id
        near = [e for e in record.endpoints if e.startswith("ipc://") == here] or record.endpoints
        self._factory.connect(self._socket, near[0])  # one: a DEALER with two would spread its messages over both
        self._record = record

    def _look_again(self) -> None:
        """Look, once a second, whether the sidecar is somewhere else by now."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        record = sidecar_record(self._registry)
        if record is not None and record.endpoints and record != self._record:
            self._socket.close(0)
            self._clocks = ClockFilter()
            self._connect(record)

    def _say(self, message: wire.ToSidecar, payload: bytes | None = None) -> bool:
        frames = [wire.encode(message)] if payload is None else [wire.encode(message), payload]
        with self._lock:
            try:
                return send(self._socket, frames)
            except ZbusError:
                return False

    def _send(self, entry: _Entry) -> bool:
        sent = self._say(wire.Data(self._open.source, entry.seq, entry.records), entry.payload)
        if sent:
            self._sent[entry.seq] = len(entry.payload)
        else:
            self._alive = False
        return sent

    def _take_answers(self, timeout_s: float, done: Callable[[], bool]) -> None:
        """Take what the sidecar says until ``done``, at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            with self._lock:
                while (frames := self._receiver.recv()) is not None:
                    self._on_message(bytes(frames[0]))
            rest = deadline - time.monotonic()
            if done() or rest <= 0:
                return
            poll.poll(min(rest, 0.02) * 1000)

    def _on_message(self, data: bytes) -> None:
        arrived = self._writer.clock.monotonic_ns()
        try:
            message = wire.decode_from_sidecar(data)
        except msgspec.DecodeError:
            return
        if isinstance(message, wire.Pong):
            self._on_pong(message, arrived)
            return
        if getattr(message, "source", None) != self._open.source:
            return
        if isinstance(message, wire.Unknown):
            self._alive = False
            self._say(self._open)
            return
        if isinstance(message, wire.Opened):
            if not self._alive:
                self._sent.clear()  # what was under way may have been lost with the connection; a double is harmless
                self._alive = True
                for entry in list(self._held.values()):
                    self._send(entry)
        elif isinstance(message, wire.Ack):
            self._on_ack(message)
        elif isinstance(message, wire.Ended):
            self._ended = True

    def _on_ack(self, ack: wire.Ack) -> None:
        if not ack.ok:
            self._alive = False
            return
        self._alive = True
        self._last_ack = time.monotonic()
        self._sent.pop(ack.seq, None)
        entry = self._held.get(ack.seq)
        if entry is not None:
            self._forget(entry)
            self._written += entry.records
        if ack.seq in self._spill.index:
            self._spill.done(ack.seq)

    # -- the clock ------------------------------------------------------------------------------------------------

    def _shares_clock(self) -> bool:
        return bool(self._own_clock.boot_id) and self._own_clock == ClockId(self._record.boot_id, self._record.time_ns)

    def _sample_clock(self) -> None:
        """Ask for the time; where the clock is shared there is nothing to ask."""
        if self._shares_clock():
            return
        for _ in range(1 if self._clocks.settled else _BURST):
            if not self._say(wire.Ping(self._writer.clock.monotonic_ns())):
                return
            before = self._pongs
            self._take_answers(0.005, lambda before=before: self._pongs != before)  # type: ignore[misc]
        self._offer_points()

    def _offer_points(self) -> None:
        if self._points:
            block = Block(clocks=self._points)
            self._points = []
            self.offer(encode_block(block), 0)

    def _on_pong(self, pong: wire.Pong, arrived: int) -> None:
        self._pongs += 1
        if (pong.boot_id, pong.time_ns) == (self._record.boot_id, self._record.time_ns):
            point = self._clocks.add(pong.t1, pong.t2, pong.t3, arrived)
            if point is not None:
                self._note(point)

    def _note(self, point: ClockPoint) -> None:
        record = self._record
        self._points.append(ClockLine(**point._asdict(), ref_boot_id=record.boot_id, ref_time_ns=record.time_ns))
