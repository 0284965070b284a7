"""What the sidecar does with what processes send, as a machine without sockets, files, threads or a clock.

A block is acknowledged once the spool has it, and turned into lines behind. A block counts once, whatever is sent
again, also over a restart: which blocks are in a rank's file is told by the file, which are in the spool by the spool.
``zbus.trace.collector`` is the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from zbus.trace import wire

__all__ = ["FilesPort", "Intake", "SeqSet", "SpoolPort", "Stream"]

_MAX_SOURCES: Final = 100_000


class SeqSet:
    """A set of sequence numbers that is mostly 0 … n."""

    __slots__ = ("_below", "_more")

    def __init__(self) -> None:
        self._below = 0
        self._more: set[int] = set()

    def add(self, seq: int) -> None:
        """Add a number ≥ 0."""
        if seq >= self._below:
            self._more.add(seq)
            while self._below in self._more:
                self._more.discard(self._below)
                self._below += 1

    def copy(self) -> SeqSet:
        """Return another set with the same numbers."""
        other = SeqSet()
        other._below, other._more = self._below, set(self._more)
        return other

    def missing(self) -> list[int]:
        """Return the numbers below the highest that are not in the set."""
        if not self._more:
            return []
        return [seq for seq in range(self._below, max(self._more)) if seq not in self._more]

    def __iter__(self) -> Iterator[int]:
        yield from range(self._below)
        yield from sorted(self._more)

    def __contains__(self, seq: int) -> bool:
        return seq < self._below or seq in self._more

    def __len__(self) -> int:
        return self._below + len(self._more)


class SpoolPort(Protocol):
    """Where blocks wait until they are lines: first in, first out."""

    @property
    def full(self) -> bool:
        """Whether the segment that is written should be ended."""
        ...

    @property
    def fresh(self) -> bool:
        """Whether the next append begins a segment."""
        ...

    def found(self) -> Iterator[wire.ToSidecar]:
        """Yield what earlier sidecars left, without taking it."""
        ...

    def append(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        """Store one frame; or nothing, and return False."""
        ...

    def rotate(self) -> None:
        """End the segment that is written."""
        ...

    def peek(self) -> tuple[wire.ToSidecar, bytes] | None:
        """Return the oldest frame that was not taken, or None."""
        ...

    def take(self) -> None:
        """Count the frame that ``peek`` returned as done."""
        ...


class FilesPort(Protocol):
    """The files of lines, one per stream."""

    def learn(self, message: wire.Open) -> SeqSet:
        """Take a stream on; return which of its blocks are lines already.

        Raises:
            ValueError: Its facts are not usable.
            OSError: Its file cannot be read.
        """
        ...

    def begin(self, source: str) -> bool:
        """Write the opening lines unless they stand there; False if the disk does not take them."""
        ...

    def block(self, message: wire.Data, payload: bytes) -> bool:
        """Append the lines of a block; False if the disk does not take them."""
        ...

    def end(self, message: wire.End) -> bool:
        """Append the end of a stream; False if the disk does not take it."""
        ...


class Stream:
    """What is known of one process's stream.

    Attributes:
        open: How it introduced itself.
        seen: Blocks that are in the spool or in the file.
        written: Blocks that are in the file.
        records: Received by this sidecar.
        ended: Whether it ended in order.
    """

    __slots__ = ("ended", "open", "records", "seen", "written")

    def __init__(self, message: wire.Open, written: SeqSet) -> None:
        self.open = message
        self.seen = written.copy()
        self.written = written
        self.records = 0
        self.ended = False


class Intake:
    """All streams of one sidecar. One thread.

    Args:
        spool: Where blocks wait.
        files: Where they go.
        refuse: Told of what is not taken: a reason, and the thing.
    """

    def __init__(self, spool: SpoolPort, files: FilesPort, refuse: Callable[[str, object], None]) -> None:
        self.streams: dict[str, Stream] = {}
        self._spool = spool
        self._files = files
        self._refuse = refuse
        for message in spool.found():
            self._recover(message)

    def receive(self, message: wire.ToSidecar, raw: bytes, payload: bytes | memoryview) -> wire.FromSidecar | None:
        """Take one message and return the answer, if there is one.

        Args:
            message: Decoded.
            raw: As it came: it is stored so.
            payload: Of a block.

        Raises:
            ValueError: A stream introduces itself with facts that are not usable.
            OSError: Its file cannot be read.
        """
        if isinstance(message, wire.Data):
            return self._on_data(message, raw, payload)
        if isinstance(message, wire.Open):
            return self._on_open(message, raw)
        if isinstance(message, wire.End):
            return self._on_end(message, raw)
        return None

    def convert(self) -> bool | None:
        """Turn the oldest frame of the spool into lines; False if the disk takes none now, None if there is no frame.

        Raises:
            OSError: The spool cannot be read, or a file.
        """
        found = self._spool.peek()
        if found is None:
            if self._spool.full:
                self._spool.rotate()
            return None
        if not self._to_file(*found):
            return False
        self._spool.take()
        return True

    # -- messages ----------------------------------------------------------------------------------------------------

    def _on_open(self, message: wire.Open, raw: bytes) -> wire.FromSidecar | None:
        if message.source not in self.streams:
            if len(self.streams) >= _MAX_SOURCES:
                self._refuse("too_many_sources", message.source)
                return None
            self._learn(message)
            if not self._store(raw):
                del self.streams[message.source]
                return None
        return wire.Opened(message.source)

    def _on_data(self, message: wire.Data, raw: bytes, payload: bytes | memoryview) -> wire.FromSidecar | None:
        stream = self.streams.get(message.source)
        if stream is None:
            return wire.Unknown(message.source)
        if message.seq < 0 or message.records < 0:
            self._refuse("malformed", message)
            return None
        stored = message.seq in stream.seen
        if not stored:
            stored = self._store(raw, payload)
            if stored:
                stream.seen.add(message.seq)
                stream.records += message.records
        return wire.Ack(message.source, message.seq, stored)

    def _on_end(self, message: wire.End, raw: bytes) -> wire.FromSidecar | None:
        stream = self.streams.get(message.source)
        if stream is None:
            return wire.Unknown(message.source)
        if not message.event.endswith(b"\n") or message.event.count(b"\n") != 1 or message.seq < 0:
            self._refuse("malformed", message)
            return None
        if not stream.ended:
            if not self._store(raw):
                return None
            stream.ended = True
        return wire.Ended(message.source)

    # -- the spool ---------------------------------------------------------------------------------------------------

    def _store(self, raw: bytes, payload: bytes | memoryview = b"") -> bool:
        if self._spool.full:
            self._spool.rotate()
        return self._introduce() and self._spool.append(raw, payload)

    def _introduce(self) -> bool:
        """Let a new segment begin with the introductions of all streams that go on: each can be read alone."""
        if not self._spool.fresh:
            return True
        opens = [wire.encode(stream.open) for stream in self.streams.values() if not stream.ended]
        if all(self._spool.append(message) for message in opens):
            return True
        self._spool.rotate()  # what it holds is harmless; the next attempt begins another
        return False

    def _learn(self, message: wire.Open) -> None:
        self.streams[message.source] = Stream(message, self._files.learn(message))

    def _recover(self, message: wire.ToSidecar) -> None:
        """Note what an earlier sidecar left in the spool; ``convert`` comes to it."""
        try:
            if isinstance(message, wire.Open) and message.source not in self.streams:
                self._learn(message)
            elif isinstance(message, wire.Data) and message.source in self.streams:
                self.streams[message.source].seen.add(message.seq)
            elif isinstance(message, wire.End) and message.source in self.streams:
                self.streams[message.source].ended = True
        except (ValueError, OSError) as error:
            self._refuse("unreadable", error)

    # -- the files ---------------------------------------------------------------------------------------------------

    def _to_file(self, message: wire.ToSidecar, payload: bytes) -> bool:
        """Write a frame's lines unless they are there; False if the disk takes none."""
        stream = self.streams.get(getattr(message, "source", ""))
        if stream is None:
            return True
        if isinstance(message, wire.Open):
            return self._files.begin(message.source)
        if isinstance(message, wire.Data):
            done = message.seq in stream.written or self._files.block(message, payload)
        elif isinstance(message, wire.End):
            done = message.seq in stream.written or self._files.end(message)
        else:
            return True
        if done:
            stream.written.add(message.seq)
        return done
