"""From a process to the trial's sidecar: blocks with numbers, kept until acknowledged, spilled when they are not.

A block is safe when the sidecar acknowledged it or when it is in ``traces_{rank}.spill.jsonl``. An acknowledgement is
awaited for a quarter of the flush period; after that the sidecar counts as silent and blocks go to the spill at once,
at the cost of one non-blocking send per period; so they do while more than 8 MiB are under way. When it answers again
the spill is sent and then removed. If even the spill fails, blocks are kept up to 8 MiB, and beyond that the newest are
dropped and counted.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from zbus.clock import ClockId, clock_id
from zbus.errors import ZbusError
from zbus.protocol.redial import Redial
from zbus.registry.file import FileRegistry
from zbus.trace import wire
from zbus.trace.blocks import Block, ClockLine, LossLine, encode_block
from zbus.trace.clocksync import ClockFilter, ClockPoint
from zbus.trace.events import encode_event
from zbus.trace.outbox import Outbox, Wait
from zbus.trace.spool import SourceLines
from zbus.trace.tracefile import LineFile, spill_path
from zbus.trace.writer import TraceWriter
from zbus.transport.multipart import Receiver, send
from zbus.transport.sockets import SocketFactory

__all__ = ["SIDECAR_KEY", "Exporter", "Spill", "connect", "sidecar_record"]

SIDECAR_KEY: Final = "trace/sidecar"
"""Registry key of the sidecar's record."""

_HELLO_S: Final = 0.25
_BURST: Final = 16
_LOG: Final = logging.getLogger("zbus.trace")
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


class Spill:
    """The file of blocks that the sidecar did not take. Made with the first block, removed when all were sent.

    What stands in it already is another process's, which ended without a sidecar: it stays.

    Args:
        path: Of the file.
        lines: Turns blocks into lines.
    """

    def __init__(self, path: Path, lines: SourceLines) -> None:
        self._file = LineFile(path)
        self._lines = lines
        self._foreign = 0
        self.waiting: dict[int, tuple[int, int, int]] = {}  # seq -> (offset, bytes, records) of the lines

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
        self.waiting[seq] = at + head, len(data) - head, records
        return True

    def end(self, message: wire.End) -> bool:
        """Append the end of the stream."""
        return self._open() and self._file.append(self._lines.end(message))

    def read(self, seq: int) -> tuple[bytes, int]:
        """Return (lines, records) of a block.

        Raises:
            OSError: The file cannot be read.
        """
        offset, size, records = self.waiting[seq]
        return os.pread(self._file.fd, size, offset), records

    def done(self, seq: int) -> None:
        """The sidecar has this block; with the last one the file goes."""
        self.waiting.pop(seq, None)
        if not self.waiting:
            self.remove()

    def remove(self) -> None:
        """Remove the file, or our part of it."""
        if self._file.fd >= 0:
            if self._foreign:
                os.ftruncate(self._file.fd, self._foreign)
            else:
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
        self._foreign = self._file.size
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
        redial_s: Seconds of silence after which the sidecar is connected to anew; then less and less often.
    """

    def __init__(
        self,
        writer: TraceWriter,
        registry: Path,
        record: wire.SidecarRecord,
        *,
        factory: SocketFactory | None = None,
        redial_s: float = 2.0,
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
        self._spill = Spill(spill_path(writer.path), SourceLines(self._open, Path(writer.config.root)))
        self._outbox = Outbox(
            self._open, self._spill, self._say, time.monotonic, lambda: self._writer.config.flush_period_s
        )
        self._lost_since = writer.clock.monotonic_ns()
        self._next_look = 0.0
        self._redial = Redial(first_s=redial_s, jitter=random.random())  # noqa: S311  # no secret
        self._own_clock = clock_id()
        self._clocks = ClockFilter()
        self._points: list[ClockLine] = []
        self._pongs = 0
        _inherited.append(self._factory)
        self._connect(record)

    # -- the writer's side ----------------------------------------------------------------------------------------

    def offer(self, payload: bytes, records: int) -> None:
        """Take one block: send it, or spill it where the sidecar is silent. Never waits."""
        with self._lock:
            self._outbox.offer(payload, records)

    def settle(self) -> None:
        """Wait up to a quarter of the flush period for acknowledgements, then spill what has none."""
        self._drive(self._outbox.settle())
        with self._lock:
            self._say_lost()
            if self._outbox.alive:
                self._redial.heard()
                self._sample_clock()
            else:
                self._find_again()
                self._outbox.introduce()

    def close(self, counts: Callable[[], dict[str, Any]]) -> None:
        """Bring everything to the sidecar or the spill, say the end, and close; at most about two seconds."""

        def end() -> bytes:
            event = self._writer.end_event()
            event.args = {**counts(), "by": "process"}
            return encode_event(event)

        self._take_answers(0.0, lambda: True)
        self._next_look = 0.0
        if self._look_again():  # restarted while this process had nothing to say
            self.greet(_HELLO_S)
        with self._lock:
            point = self._clocks.finish() if self._outbox.alive else None
            if point is not None:
                self._note(point)
                self._offer_points()
            self._say_lost()
        self._drive(self._outbox.finish(end))
        with self._lock:
            if left := self._outbox.counts()[1]:
                _LOG.warning("%s: the last %d records found no place on the disk", self._writer.path, left)
            self._spill.close()
        self.discard()

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return records written, pending, and lost by reason."""
        with self._lock:
            return self._outbox.counts()

    def greet(self, timeout_s: float) -> bool:
        """Introduce this process and wait for an answer; return whether there was one."""
        deadline = time.monotonic() + timeout_s
        while not self._outbox.alive and time.monotonic() < deadline:
            self._outbox.introduce()
            self._take_answers(0.02, lambda: self._outbox.alive)
        return self._outbox.alive

    def discard(self) -> None:
        """Close the socket and its context. Never waits for the sidecar."""
        with self._lock:
            self._socket.close(0)
            self._factory.close()
            if self._factory in _inherited and os.getpid() == self._pid:
                _inherited.remove(self._factory)

    # -- the sidecar's side ---------------------------------------------------------------------------------------

    def _connect(self, record: wire.SidecarRecord) -> None:
        self._outbox.reconnected()
        self._socket = self._factory.dealer("ctl")
        self._receiver = Receiver(self._socket)
        self._fd = int(self._socket.fileno())
        here = self._own_clock.boot_id == record.boot_id
        near = [e for e in record.endpoints if e.startswith("ipc://") == here] or record.endpoints
        self._factory.connect(self._socket, near[0])  # one: a DEALER with two would spread its messages over both
        self._record = record

    def _find_again(self) -> None:
        """Turn to where a silent sidecar is by now, or else connect anew: libzmq may have given the connection up."""
        if not self._look_again() and self._redial.silent(time.monotonic_ns()):
            self._socket.close(0)
            self._connect(self._record)

    def _look_again(self) -> bool:
        """Look, once a second, whether the sidecar is somewhere else by now; return whether we turned to it."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + 1.0
        record = sidecar_record(self._registry)
        if record is not None and record.endpoints and record != self._record:
            self._socket.close(0)
            self._clocks = ClockFilter()
            self._connect(record)
            return True
        return False

    def _say(self, message: wire.ToSidecar, payload: bytes | None = None) -> bool:
        frames = [wire.encode(message)] if payload is None else [wire.encode(message), payload]
        with self._lock:
            try:
                return send(self._socket, frames)
            except ZbusError:
                return False

    def _drive(self, steps: Iterator[Wait]) -> None:
        """Take the steps of the outbox, and answers between them."""
        while True:
            with self._lock:
                wait = next(steps, None)
            if wait is None:
                return
            self._take_answers(*wait)

    def _say_lost(self) -> None:
        """Say what was lost, once lines find a place again."""
        now = self._writer.clock.monotonic_ns()
        losses = [LossLine(reason, lost, self._lost_since, now) for reason, lost in self._outbox.unsaid().items()]
        if losses:
            self._outbox.offer(encode_block(Block(losses=losses)), 0)
        if not self._outbox.losing:
            self._lost_since = now

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
        self._outbox.on_message(message)

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
