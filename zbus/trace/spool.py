"""The sidecar's spool: blocks as they came, until they are lines; and the turning of one into the other.

Segments ``{root}/spool/{n}.spool`` of checked frames. A block is acknowledged once its frame is in a segment, and a
segment is removed once all its blocks are lines. What a killed sidecar leaves is read by its successor, or by a merge
(``read_spool``); blocks that were lines already are told by their markers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from zbus.trace import wire
from zbus.trace.blocks import decode_block, expand, marker
from zbus.trace.events import Event, Expander, encode_event
from zbus.trace.intake import SeqSet
from zbus.trace.tracefile import trace_path
from zbus.trace.writer import opening_lines

__all__ = ["SeqSet", "SourceLines", "Spool", "SpoolPart", "block_at", "read_spool", "scan_blocks"]

_MARK: Final = b'{"name":"zbus_block"'
_ROTATE: Final = 8 << 20
_IDLE_ROTATE: Final = 1 << 20


_decode_lines: Final = msgspec.json.Decoder(Event).decode_lines


class SourceLines:
    """Turns the blocks of one source into lines of its file.

    Args:
        message: What the process said of itself.
        root: Trace root.

    Raises:
        ValueError: Its facts are no facts, or name a file outside the root.
    """

    def __init__(self, message: wire.Open, root: Path) -> None:
        facts = message.facts
        try:
            self.role, self.rank, self.start = str(facts["role"]), int(facts["rank"]), int(facts["start"])
            self.pid, epoch_ns, run = int(facts["pid"]), int(facts["epoch_mono_ns"]), str(facts["run"])
            int(facts["mono_ns"]), str(facts["host"])
        except (KeyError, TypeError, ValueError) as error:
            text = f"facts of source {message.source!r} are not usable: {error!r}"
            raise ValueError(text) from None
        path = trace_path(root, self.role, self.rank, self.start)
        if message.fork:
            path = path.with_name(f"{path.name.removesuffix('.jsonl')}.fork{int(message.fork)}.jsonl")
        self.path = path
        self.source = message.source
        self.open = message
        self.malformed = 0
        self._who = {"role": self.role, "rank": self.rank}
        self._expander = Expander(self.pid, epoch_ns, run)
        self._names: dict[int, str] = {}

    def opening(self) -> bytes:
        """Return the lines that open the file."""
        return opening_lines(self.open.facts, self._expander)

    def lines(self, message: wire.Data, payload: bytes | memoryview) -> tuple[bytes, list[Event], int]:
        """Return a block's lines (its marker first), its events, and how many of its records were malformed."""
        events: list[Event] = []
        bad = 0
        if message.form == wire.LINES:
            data = bytes(payload)
            with suppress(msgspec.DecodeError):  # whoever reads the file tells of it
                events = _decode_lines(data)
        else:
            try:
                found = expand(decode_block(payload), self._expander, self._names, self._who, self.pid)
                data, events, bad = found.data, found.events, found.malformed
            except msgspec.DecodeError:
                data, bad = b"", message.records
        if bad:
            data += self._malformed(bad, events)
        return marker(self.source, message.seq, message.records - bad, len(data), self.pid) + data, events, bad

    def _malformed(self, lost: int, events: list[Event]) -> bytes:
        """Return the line that says that records of a block could not be read."""
        times = [event.ts for event in events if event.ts is not None] or [0.0]
        since, until = min(times), max(times)
        args = {"reason": "malformed", "lost": lost, "since_us": since, "until_us": until}
        return encode_event(Event("zbus_loss", "M", until, pid=self.pid, args=args))

    def end(self, message: wire.End) -> bytes:
        """Return the lines of the end."""
        return marker(self.source, message.seq, 0, len(message.event), self.pid) + message.event

    def forget_names(self) -> None:
        """Announce threads and rows anew: lines that announced them were not written."""
        self._names.clear()
        self._expander.forget_names()


def scan_blocks(path: Path) -> tuple[dict[str, SeqSet], int]:
    """Return which blocks a file of lines holds, by source, and the size up to which it is whole.

    Raises:
        OSError: The file cannot be read.
    """
    found: dict[str, SeqSet] = {}
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return found, 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            while (begin := data.find(_MARK, at)) >= 0:
                if begin and data[begin - 1] != 0x0A:
                    at = begin + 1
                    continue
                end = data.find(b"\n", begin)
                block = _marked(data[begin:end]) if end >= 0 else None
                if end >= 0 and block is None:
                    at = begin + 1
                    continue
                if block is None or end + 1 + block[2] > size:
                    return found, begin  # torn: the marker, or the lines it announces
                source, seq, length = block
                found.setdefault(source, SeqSet()).add(seq)
                at = end + 1 + length
            tail = data.rfind(b"\n") + 1
            if at <= tail < size <= tail + len(_MARK) and _MARK.startswith(data[tail:size]):
                return found, tail  # torn so early that it cannot be told for a marker
    return found, size


def _marked(line: bytes) -> tuple[str, int, int] | None:
    try:
        args = msgspec.json.decode(line)["args"]
        return str(args["source"]), int(args["seq"]), int(args["bytes"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


def block_at(path: Path, offset: int) -> tuple[str, int] | None:
    """Return (source, seq) of the block whose marker stands at an offset of a file; None if none does.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        found = _marked(file.readline(1 << 16))
    return None if found is None else found[:2]


class SpoolPart(NamedTuple):
    """Some lines from a spool: the file they belong to, and they themselves (with the block's marker).

    ``seq`` is the number of the block, None where these are the lines that open the file.
    """

    path: Path
    source: str
    data: bytes
    seq: int | None = None


def read_spool(path: Path) -> Iterator[SpoolPart]:
    """Yield the lines of one spool segment, for the files below its trace root; stops at what is not whole.

    Opening lines come as a part of their own for each source. Blocks that are in their file already are yielded too:
    their marker tells.

    Raises:
        OSError: The segment cannot be read.
    """
    root = path.parent.parent
    sources: dict[str, SourceLines] = {}
    for message, payload in _frames(path):
        if isinstance(message, wire.Open):
            if message.source not in sources:
                try:
                    source = sources[message.source] = SourceLines(message, root)
                except ValueError:
                    continue
                yield SpoolPart(source.path, source.source, source.opening())
        elif isinstance(message, wire.Data) and message.source in sources:
            source = sources[message.source]
            yield SpoolPart(source.path, source.source, source.lines(message, payload)[0], message.seq)
        elif isinstance(message, wire.End) and message.source in sources:
            source = sources[message.source]
            yield SpoolPart(source.path, source.source, source.end(message), message.seq)


def _frames(path: Path) -> Iterator[tuple[wire.ToSidecar, bytes]]:
    with path.open("rb") as file:
        at = 0
        while (found := wire.read_frame(file.fileno(), at)) is not None:
            message, payload, at = found
            try:
                yield wire.decode_to_sidecar(message), payload
            except msgspec.DecodeError:  # of another version
                continue


class Spool:
    """The segments of one sidecar. One thread.

    Args:
        root: Trace root.

    Attributes:
        error: What the last failed append met, or None after a good one.
    """

    def __init__(self, root: Path) -> None:
        self._dir = root / "spool"
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._segments = sorted(int(path.stem) for path in self._dir.glob("*.spool") if path.stem.isdecimal())
        self._number = self._segments[-1] + 1 if self._segments else 0  # of the segment that is written, or will be
        self._fd = -1
        self._size = 0
        self._read_fd = -1
        self._at = 0
        self._front: tuple[bytes, bytes, int] | None = None
        self.error: OSError | None = None

    def found(self) -> Iterator[wire.ToSidecar]:
        """Yield what earlier sidecars left, without taking it."""
        for number in list(self._segments):
            for message, _ in _frames(self._path(number)):
                yield message

    def append(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        """Store one frame; or nothing, and return False."""
        data = memoryview(wire.frame(message, payload))
        size = len(data)
        try:
            if self._fd < 0:
                self._begin()
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.error = error
            self._undo()
            return False
        self._size += size
        self.error = None
        return True

    @property
    def full(self) -> bool:
        """Whether the segment that is written should be ended: it is large, or all of it is done with."""
        return self._size >= _ROTATE or (self._size >= _IDLE_ROTATE and self._peek() is None)

    @property
    def fresh(self) -> bool:
        """Whether the next append begins a segment."""
        return self._fd < 0

    def rotate(self) -> None:
        """End the segment that is written; the next append begins another."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._size = -1, 0
            self._number += 1

    def peek(self) -> tuple[wire.ToSidecar, bytes] | None:
        """Return the oldest frame that was not taken, or None."""
        while (found := self._peek()) is not None:
            try:
                return wire.decode_to_sidecar(found[0]), found[1]
            except msgspec.DecodeError:  # of another version
                self.take()
        return None

    def take(self) -> None:
        """Count the frame that ``peek`` returned as done; a segment that is done with is removed."""
        if self._front is not None:
            self._at, self._front = self._front[2], None
        self._peek()

    def close(self) -> None:
        """Close; what is done with is removed, and so is the directory if it is empty."""
        self.rotate()
        self._peek()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
        try:
            self._dir.rmdir()
        except OSError:
            return

    # -- inside ---------------------------------------------------------------------------------------------------

    def _undo(self) -> None:
        """Take back what was torn; where that fails nothing may follow in this segment, since no reader gets past."""
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self.rotate()

    def _path(self, number: int) -> Path:
        return self._dir / f"{number}.spool"

    def _begin(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path(self._number), flags, 0o600)
        self._size = 0
        self._segments.append(self._number)

    def _peek(self) -> tuple[bytes, bytes, int] | None:
        if self._front is not None:
            return self._front
        while self._segments:
            number = self._segments[0]
            if self._read_fd < 0:
                self._read_fd, self._at = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC), 0
            self._front = wire.read_frame(self._read_fd, self._at)
            if self._front is not None:
                return self._front
            if self._fd >= 0 and number == self._number:
                return None
            os.close(self._read_fd)
            self._read_fd = -1
            self._segments.pop(0)
            self._path(number).unlink(missing_ok=True)
        return None
