"""The sidecar of a trial: takes blocks from every process, stores them, acknowledges, and turns them into lines behind.

One thread, one ROUTER. Receiving goes before converting: a block is acknowledged as soon as it is in the spool, and
lines are made when nothing waits. A block counts once, whatever is sent again, also over a restart. When the disk is
full blocks are refused (the process keeps them) and lines wait in the spool; nothing is dropped here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zbus.clock import SYSTEM_CLOCK, Clock, boot_id, time_namespace
from zbus.errors import TrialError, ZbusError
from zbus.trace import wire
from zbus.trace.intake import Intake, SeqSet
from zbus.trace.live import Live
from zbus.trace.spool import SourceLines, Spool, scan_blocks
from zbus.trace.tracefile import LineFile
from zbus.transport.multipart import Receiver, send
from zbus.transport.sockets import SocketFactory

__all__ = ["Collector"]

_LOG: Final = logging.getLogger("zbus.trace")
_BURST: Final = 64
_RETRY_S: Final = 1.0


class TraceFiles:
    """The files of lines of all streams, and what they say to the live view.

    Args:
        root: Trace root.
        live: Fed with what was written.
        clock: For the live view.
    """

    def __init__(self, root: Path, live: Live, clock: Clock) -> None:
        self.lines: dict[str, SourceLines] = {}
        self._root = root
        self._live = live
        self._clock = clock

    def learn(self, message: wire.Open) -> SeqSet:
        """See ``FilesPort``; what a killed sidecar tore at the end of the file is cut off."""
        lines = SourceLines(message, self._root)
        try:
            found, size = scan_blocks(lines.path)
            if lines.path.stat().st_size > size:  # the block is still in the spool
                os.truncate(lines.path, size)
        except FileNotFoundError:
            found = {}
        self.lines[message.source] = lines
        return found.get(message.source, SeqSet())

    def begin(self, source: str) -> bool:
        """Write the opening lines, unless the process did, in a file we see too, or we did."""
        lines = self.lines[source]
        try:
            stat = lines.path.stat()
            if (stat.st_dev, stat.st_ino) == tuple(lines.open.file):
                return True
            if f'"source":"{source}"'.encode() in lines.path.read_bytes()[: 1 << 20]:
                return True
        except OSError:
            pass
        return self._append(lines, lines.opening())

    def block(self, message: wire.Data, payload: bytes) -> bool:
        """Append the lines of a block."""
        lines = self.lines[message.source]
        data, events, malformed = lines.lines(message, payload)
        if not self._append(lines, data):
            return False
        lines.malformed += malformed
        if events:
            self._live.feed(lines.role, lines.rank, events, self._clock.monotonic_ns())
        return True

    def end(self, message: wire.End) -> bool:
        """Append the end of a stream."""
        lines = self.lines[message.source]
        self._live.gone(lines.role, lines.rank)
        return self._append(lines, lines.end(message))

    def _append(self, lines: SourceLines, data: bytes) -> bool:
        file = LineFile(lines.path)
        try:
            file.open()
            done = file.append(data)
        except OSError as error:
            done = False
            _LOG.debug("%s", error)
        finally:
            file.close()
        if not done:
            lines.forget_names()
        return done


class Collector:
    """Receives, stores and converts. All methods on one thread.

    Args:
        root: Trace root.
        factory: Makes the socket.
        clock: For clock samples.

    Raises:
        TrialError: Another sidecar serves this root.
        OSError: The root cannot be written.
    """

    def __init__(self, root: Path, factory: SocketFactory, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.root = root
        self._clock = clock
        self._factory = factory
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(root / ".sidecar.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            msg = f"a sidecar already collects into {root}"
            raise TrialError(msg, hint="stop it first; a stopped (SIGSTOP) one must be killed") from None
        self.live = Live()
        self._spool = Spool(root)
        self._files = TraceFiles(root, self.live, clock)
        self._retry_at = 0.0
        self.refused: dict[str, int] = {}
        self._clock_id = boot_id(), time_namespace()
        self._socket = factory.router("ctl")
        self._receiver = Receiver(self._socket)
        self._poll = select.poll()
        self._poll.register(int(self._socket.fileno()), select.POLLIN)
        self._intake = Intake(self._spool, self._files, self._refuse)

    def bind(self, endpoints: Sequence[str]) -> list[str]:
        """Bind and return the endpoints really bound.

        Raises:
            TransportError: An address cannot be bound.
        """
        return [self._factory.bind(self._socket, endpoint) for endpoint in endpoints]

    def serve(self, stop: Callable[[], bool]) -> None:
        """Receive and convert until ``stop()``, asked at least five times a second."""
        while not stop():
            self.step(0.2)

    def step(self, timeout_s: float) -> None:
        """Take what has come, else convert a block, else wait for something to come."""
        if self.receive() or self.convert():
            return
        self._poll.poll(timeout_s * 1000)

    def receive(self) -> int:
        """Take a burst of messages; return how many."""
        taken = 0
        while taken < _BURST and (frames := self._receiver.recv()) is not None:
            taken += 1
            try:
                self._on_message(bytes(frames[0]), frames[1:])
            except (msgspec.DecodeError, ValueError, IndexError) as error:
                self._refuse("malformed", error)
            except OSError as error:
                self._refuse("unreadable", error)
        return taken

    def convert(self) -> bool:
        """Turn the oldest block of the spool into lines; False if there is none, or the disk takes none now."""
        if time.monotonic() < self._retry_at:
            return False
        try:
            done = self._intake.convert()
        except OSError as error:
            self._refuse("unreadable", error)
            done = False
        if done is False:
            self._retry_at = time.monotonic() + _RETRY_S
        return bool(done)

    def ledger(self) -> list[dict[str, Any]]:
        """Return one row per source: who, blocks and records received and written, and whether it ended in order."""
        rows: list[dict[str, Any]] = []
        for name, stream in self._intake.streams.items():
            lines = self._files.lines[name]
            row: dict[str, Any] = {
                "source": name,
                "role": lines.role,
                "rank": lines.rank,
                "start": lines.start,
                "pid": lines.pid,
            }
            counts = {"blocks": len(stream.seen), "blocks_written": len(stream.written), "records": stream.records}
            rows.append({**row, **counts, "malformed": lines.malformed, "ended": stream.ended})
        rows.sort(key=lambda row: str(self._files.lines[row["source"]].path))
        return rows

    def close(self, timeout_s: float = 10.0) -> bool:
        """Take what still comes, turn it all into lines, write ``sidecar.json``; True if nothing stays in the spool.

        Args:
            timeout_s: Longest time for it; what is left then is read from the spool by a successor or a merge.
        """
        deadline = time.monotonic() + timeout_s
        while self.receive() and time.monotonic() < deadline:
            pass
        self._retry_at = 0.0
        while self.convert() and time.monotonic() < deadline:
            pass
        done = self._spool.peek() is None
        self._spool.close()
        summary = {"sources": self.ledger(), "refused": self.refused, "complete": done}
        try:
            (self.root / "sidecar.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            _LOG.warning("%s", error)
        self._socket.close(0)
        os.close(self._lock_fd)
        return done

    # -- messages -------------------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, frames: Sequence[Any]) -> None:
        arrived = self._clock.monotonic_ns()
        message = wire.decode_to_sidecar(frames[0])
        if isinstance(message, wire.Ping):
            pong = wire.Pong(message.t1, arrived, self._clock.monotonic_ns(), *self._clock_id)
            self._say(peer, pong)
        elif isinstance(message, wire.Query):
            self._say(peer, wire.State(), json.dumps(self._state(message.since)).encode())
        else:
            self._take(peer, message, bytes(frames[0]), frames[1] if isinstance(message, wire.Data) else b"")

    def _take(self, peer: bytes, message: wire.ToSidecar, raw: bytes, payload: Any) -> None:
        known, well = len(self._intake.streams), self._spool.error is None
        answer = self._intake.receive(message, raw, payload)
        if answer is not None:
            self._say(peer, answer)
        if len(self._intake.streams) > known and isinstance(message, wire.Open):
            lines = self._files.lines[message.source]
            _LOG.info("collecting from %s/%d (pid %d)", lines.role, lines.rank, lines.pid)
        if well and self._spool.error is not None:
            _LOG.warning("the spool takes nothing (%s): processes keep their records", self._spool.error)

    def _state(self, since: int) -> dict[str, Any]:
        now = self._clock.monotonic_ns()
        return {
            "schema": "zbus.sidecar/1",
            "lines": self.live.lines(since, now),
            "busiest": self.live.busiest(),
            "sources": self.ledger(),
            "refused": self.refused,
        }

    def _say(self, peer: bytes, message: wire.FromSidecar, payload: bytes | None = None) -> None:
        frames = [peer, wire.encode(message)]
        if payload is not None:
            frames.append(payload)
        try:
            send(self._socket, frames)  # not taken: the process asks again
        except ZbusError:
            return

    def _refuse(self, why: str, what: object) -> None:
        if why not in self.refused:
            _LOG.warning("refused (%s): %.200r", why, what)
        self.refused[why] = self.refused.get(why, 0) + 1
