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

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import TrialError, ZbusError
from zbus.trace import wire
from zbus.trace.live import Live
from zbus.trace.spool import SeqSet, SourceLines, Spool, scan_blocks
from zbus.trace.tracefile import LineFile, boot_id, time_namespace
from zbus.transport.multipart import Receiver, send
from zbus.transport.sockets import SocketFactory

__all__ = ["Collector"]

_LOG: Final = logging.getLogger("zbus.trace")
_BURST: Final = 64
_RETRY_S: Final = 1.0
_MAX_SOURCES: Final = 100_000


class _Source:
    """What is known of one process's stream."""

    def __init__(self, lines: SourceLines) -> None:
        self.lines = lines
        self.seen = SeqSet()  # in the spool or in the file
        self.written = SeqSet()  # in the file
        self.records = 0
        self.ended = False


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
        self._sources: dict[str, _Source] = {}
        self._retry_at = 0.0
        self.refused: dict[str, int] = {}
        self._clock_id = boot_id(), time_namespace()
        self._socket = factory.router("ctl")
        self._receiver = Receiver(self._socket)
        self._poll = select.poll()
        self._poll.register(int(self._socket.fileno()), select.POLLIN)
        for message in self._spool.found():
            self._recover(message)

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
            found = self._spool.peek()
            if found is None:
                if self._spool.full:
                    self._spool.rotate()
                return False
            if not self._to_file(*found):
                self._retry_at = time.monotonic() + _RETRY_S
                return False
            self._spool.take()
        except OSError as error:
            self._refuse("unreadable", error)
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        return True

    def ledger(self) -> list[dict[str, Any]]:
        """Return one row per source: who, blocks and records received and written, and whether it ended in order."""
        rows: list[dict[str, Any]] = []
        for name, source in sorted(self._sources.items(), key=lambda item: str(item[1].lines.path)):
            lines = source.lines
            row: dict[str, Any] = {
                "source": name,
                "role": lines.role,
                "rank": lines.rank,
                "start": lines.start,
                "pid": lines.pid,
            }
            counts = {"blocks": len(source.seen), "blocks_written": len(source.written), "records": source.records}
            rows.append({**row, **counts, "malformed": lines.malformed, "ended": source.ended})
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
        elif isinstance(message, wire.Data):
            self._on_data(peer, message, frames[0], frames[1])
        elif isinstance(message, wire.Open):
            self._on_open(peer, message, frames[0])
        elif isinstance(message, wire.End):
            self._on_end(peer, message, frames[0])
        else:
            self._say(peer, wire.State(), json.dumps(self._state(message.since)).encode())

    def _on_open(self, peer: bytes, message: wire.Open, raw: bytes) -> None:
        if message.source not in self._sources:
            if len(self._sources) >= _MAX_SOURCES:
                self._refuse("too_many_sources", message.source)
                return
            source = self._learn(message)
            if not self._store(bytes(raw)):
                del self._sources[message.source]
                return
            _LOG.info("collecting from %s/%d (pid %d)", source.lines.role, source.lines.rank, source.lines.pid)
        self._say(peer, wire.Opened(message.source))

    def _on_data(self, peer: bytes, message: wire.Data, raw: bytes, payload: Any) -> None:
        source = self._sources.get(message.source)
        if source is None:
            self._say(peer, wire.Unknown(message.source))
            return
        if message.seq < 0 or message.records < 0:
            self._refuse("malformed", message)
            return
        stored = message.seq in source.seen
        if not stored:
            stored = self._store(bytes(raw), payload)
            if stored:
                source.seen.add(message.seq)
                source.records += message.records
        self._say(peer, wire.Ack(message.source, message.seq, stored))

    def _on_end(self, peer: bytes, message: wire.End, raw: bytes) -> None:
        source = self._sources.get(message.source)
        if source is None:
            self._say(peer, wire.Unknown(message.source))
            return
        if not message.event.endswith(b"\n") or message.event.count(b"\n") != 1 or message.seq < 0:
            self._refuse("malformed", message)
            return
        if not source.ended:
            if not self._store(bytes(raw)):
                return
            source.ended = True
        self._say(peer, wire.Ended(message.source))

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

    # -- storing --------------------------------------------------------------------------------------------------

    def _store(self, raw: bytes, payload: Any = b"") -> bool:
        if self._spool.full:
            self._spool.rotate()
        known = self._spool.error is not None
        if self._introduce() and self._spool.append(raw, payload):
            return True
        if not known:
            _LOG.warning("the spool takes nothing (%s): processes keep their records", self._spool.error)
        return False

    def _introduce(self) -> bool:
        """Let a new segment begin with the introductions of all streams that go on: each can be read alone."""
        if not self._spool.fresh:
            return True
        opens = [wire.encode(source.lines.open) for source in self._sources.values() if not source.ended]
        if all(self._spool.append(message) for message in opens):
            return True
        self._spool.rotate()  # what it holds is harmless; the next attempt begins another
        return False

    def _learn(self, message: wire.Open) -> _Source:
        """Take a stream on.

        Raises:
            ValueError: Its facts are not usable.
            OSError: Its file cannot be read.
        """
        source = self._sources[message.source] = _Source(SourceLines(message, self.root))
        path = source.lines.path
        try:
            found, size = scan_blocks(path)
            if path.stat().st_size > size:  # torn by a sidecar that was killed in it: the block is still in the spool
                os.truncate(path, size)
            source.seen = found.get(message.source, SeqSet())
            source.written = found.get(message.source, SeqSet()).copy()
        except FileNotFoundError:
            pass
        except BaseException:
            del self._sources[message.source]
            raise
        return source

    def _recover(self, message: wire.ToSidecar) -> None:
        """Note what an earlier sidecar left in the spool; ``convert`` comes to it."""
        try:
            if isinstance(message, wire.Open) and message.source not in self._sources:
                self._learn(message)
            elif isinstance(message, wire.Data) and message.source in self._sources:
                self._sources[message.source].seen.add(message.seq)
            elif isinstance(message, wire.End) and message.source in self._sources:
                self._sources[message.source].ended = True
        except (ValueError, OSError) as error:
            self._refuse("unreadable", error)

    # -- converting -----------------------------------------------------------------------------------------------

    def _to_file(self, message: wire.ToSidecar, payload: bytes) -> bool:
        if isinstance(message, wire.Open):
            return message.source not in self._sources or self._begin_file(self._sources[message.source])
        if isinstance(message, wire.Data) and message.source in self._sources:
            source = self._sources[message.source]
            if message.seq in source.written:
                return True
            data, events, malformed = source.lines.lines(message, payload)
            if not self._append(source, data):
                return False
            source.lines.malformed += malformed
            source.written.add(message.seq)
            if events:
                self.live.feed(source.lines.role, source.lines.rank, events, self._clock.monotonic_ns())
        elif isinstance(message, wire.End) and message.source in self._sources:
            source = self._sources[message.source]
            self.live.gone(source.lines.role, source.lines.rank)
            if message.seq not in source.written:
                if not self._append(source, source.lines.end(message)):
                    return False
                source.written.add(message.seq)
        return True

    def _begin_file(self, source: _Source) -> bool:
        """Write the opening lines, unless the process did, in a file we see too, or we did."""
        path = source.lines.path
        try:
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) == tuple(source.lines.open.file):
                return True
            if f'"source":"{source.lines.source}"'.encode() in path.read_bytes()[: 1 << 20]:
                return True
        except OSError:
            pass
        return self._append(source, source.lines.opening())

    def _append(self, source: _Source, data: bytes) -> bool:
        file = LineFile(source.lines.path)
        try:
            file.open()
            done = file.append(data)
        except OSError as error:
            done = False
            _LOG.debug("%s", error)
        finally:
            file.close()
        if not done:
            source.lines.forget_names()
        return done

    def _refuse(self, why: str, what: object) -> None:
        if why not in self.refused:
            _LOG.warning("refused (%s): %.200r", why, what)
        self.refused[why] = self.refused.get(why, 0) + 1
