"""The disk of the simulated traces: spills, spool and files of blocks, which outlive whoever writes them.

Every write is an effect: a fault may strike before it, after it, or in its middle, and then what was written is torn.
A full disk takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView
from typing import Final, Protocol

from zbus.trace import wire
from zbus.trace.intake import SeqSet

__all__ = ["Block", "Died", "SimFiles", "SimSpill", "SimSpool", "StoredFile", "Strikes", "Torn"]

_SEGMENT: Final = 8
"""Frames of a spool segment, few, so that segments come and go in a run."""


class Strikes(Protocol):
    """Says what befalls an effect."""

    def __call__(self, what: str) -> int:
        """Return 1 if a write happens whole, 0 if the disk takes nothing; or raise, after a torn write or none."""


class Block:
    """One block as it lies in a file: its number, what it holds, and whether it is whole."""

    __slots__ = ("payload", "records", "seq", "whole")

    def __init__(self, seq: int, records: int, payload: bytes, *, whole: bool = True) -> None:
        self.seq = seq
        self.records = records
        self.payload = payload
        self.whole = whole


class StoredFile:
    """A file of blocks. ``ends`` counts how often the end of its stream stands in it."""

    __slots__ = ("blocks", "end", "ends", "opened")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.ends = 0
        self.end: wire.End | None = None
        self.opened = False

    def put(self, block: Block) -> None:
        """Append a block."""
        self.blocks.append(block)

    def whole(self) -> Iterator[Block]:
        """Yield the blocks that can be read."""
        return (block for block in self.blocks if block.whole)


class SimSpill:
    """A process's spill (``SpillPort``). What it remembers goes with the process; the file stays.

    Args:
        strikes: Asked at every write.
    """

    __slots__ = ("_blocks", "_strikes", "file")

    def __init__(self, strikes: Strikes) -> None:
        self.file = StoredFile()
        self._strikes = strikes
        self._blocks: dict[int, Block] = {}

    @property
    def waiting(self) -> KeysView[int]:
        """See ``SpillPort``."""
        return self._blocks.keys()

    def put(self, seq: int, records: int, payload: bytes) -> bool:
        """See ``SpillPort``."""
        block = Block(seq, records, payload)
        if not _write(self._strikes, "spill", lambda: self.file.put(block), lambda: self._tear(seq)):
            return False
        self._blocks[seq] = block
        return True

    def _tear(self, seq: int) -> None:
        self.file.put(Block(seq, 0, b"", whole=False))

    def end(self, message: wire.End) -> bool:
        """See ``SpillPort``."""

        def write() -> None:
            self.file.ends += 1
            self.file.end = message

        return _write(self._strikes, "spill", write, lambda: None)

    def read(self, seq: int) -> tuple[bytes, int]:
        """See ``SpillPort``."""
        block = self._blocks[seq]
        return block.payload, block.records

    def done(self, seq: int) -> None:
        """See ``SpillPort``; the file goes with its last block."""
        self._blocks.pop(seq, None)
        if not self._blocks:
            self._strikes("spill")
            self.file.blocks.clear()


class SimSpool:
    """The spool (``SpoolPort``): ``segments`` lie on the disk, the rest is the memory of one sidecar.

    Args:
        segments: What earlier sidecars left.
        strikes: Asked at every write.
    """

    __slots__ = ("_at", "_current", "_strikes", "segments")

    def __init__(self, segments: list[list[tuple[wire.ToSidecar, bytes] | None]], strikes: Strikes) -> None:
        self.segments = segments
        self._strikes = strikes
        self._current: list[tuple[wire.ToSidecar, bytes] | None] | None = None
        self._at = 0

    def found(self) -> Iterator[wire.ToSidecar]:
        """See ``SpoolPort``."""
        for segment in list(self.segments):
            for frame in segment:
                if frame is None:
                    break
                yield frame[0]

    @property
    def full(self) -> bool:
        """See ``SpoolPort``."""
        current = self._current
        return current is not None and (len(current) >= _SEGMENT or (len(current) > 2 and self.peek() is None))

    @property
    def fresh(self) -> bool:
        """See ``SpoolPort``."""
        return self._current is None

    def append(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        """See ``SpoolPort``."""
        if self._current is None:
            self._current = []
            self.segments.append(self._current)
        current = self._current
        frame = (wire.decode_to_sidecar(message), bytes(payload))
        return _write(self._strikes, "spool", lambda: current.append(frame), lambda: current.append(None))

    def rotate(self) -> None:
        """See ``SpoolPort``."""
        self._current = None

    def peek(self) -> tuple[wire.ToSidecar, bytes] | None:
        """See ``SpoolPort``; segments that are done with are removed."""
        while self.segments:
            segment = self.segments[0]
            if self._at < len(segment) and (frame := segment[self._at]) is not None:
                return frame
            if segment is self._current:
                return None
            del self.segments[0]
            self._at = 0
        return None

    def take(self) -> None:
        """See ``SpoolPort``."""
        self._at += 1
        self.peek()


class SimFiles:
    """The ranks' files (``FilesPort``), written by sidecars.

    Args:
        stored: The files by source, on the disk.
        strikes: Asked at every write.
    """

    __slots__ = ("_strikes", "stored")

    def __init__(self, stored: dict[str, StoredFile], strikes: Strikes) -> None:
        self.stored = stored
        self._strikes = strikes

    def learn(self, message: wire.Open) -> SeqSet:
        """See ``FilesPort``; a torn end is cut off."""
        found = SeqSet()
        file = self.stored.get(message.source)
        if file is not None:
            if file.blocks and not file.blocks[-1].whole:
                file.blocks.pop()
            for block in file.blocks:
                found.add(block.seq)
            if file.end is not None:
                found.add(file.end.seq)
        return found

    def begin(self, source: str) -> bool:
        """See ``FilesPort``."""
        file = self.stored.setdefault(source, StoredFile())
        if file.opened:
            return True

        def write() -> None:
            file.opened = True

        return _write(self._strikes, "file", write, lambda: None)

    def block(self, message: wire.Data, payload: bytes) -> bool:
        """See ``FilesPort``."""
        file = self.stored.setdefault(message.source, StoredFile())
        block = Block(message.seq, message.records, payload)
        torn = Block(message.seq, 0, b"", whole=False)
        return _write(self._strikes, "file", lambda: file.put(block), lambda: file.put(torn))

    def end(self, message: wire.End) -> bool:
        """See ``FilesPort``."""
        file = self.stored.setdefault(message.source, StoredFile())

        def write() -> None:
            file.ends += 1
            file.end = message

        return _write(self._strikes, "file", write, lambda: None)


class Torn(Exception):
    """Raised by ``Strikes``: the writer dies in this write, and a part of it stays."""


class Died(Exception):
    """Raised by ``Strikes``: the writer dies, before the effect or right after it (``after``)."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.after = after


def _write(strikes: Strikes, what: str, whole: Callable[[], None], torn: Callable[[], None]) -> bool:
    try:
        if not strikes(what):
            return False
    except Torn:
        torn()
        raise
    except Died as death:
        if death.after:
            whole()
        raise
    whole()
    return True
