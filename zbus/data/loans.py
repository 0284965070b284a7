"""The reader's side: lent slots, mapped once and read in place; the owner sees when the last view is gone."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from zbus.codec.decoder import Lender
from zbus.data.arena import COLUMNS, LEDGER, READER, ROWS
from zbus.data.borrowed import Borrowed
from zbus.data.lease import DESCRIPTOR, MAGIC
from zbus.data.views import keeping
from zbus.errors import CodecError

__all__ = ["Lent", "Loans"]

_COPY_BELOW: Final = 1 << 21
"""Below this a private copy costs less than a private mapping."""


class Lent(np.ndarray[Any, Any], Lender):
    """Bytes of somebody else's slot, read-only. The slot is given back when this and all views of it are gone."""

    loan: _Loan | None = None

    def private(self) -> memoryview:
        """Return the same bytes in memory that is writable and nobody else's; the slot stays lent meanwhile."""
        loan = self.loan
        source = None if loan is None else loan.source
        if loan is None or source is None or self.nbytes < _COPY_BELOW:
            return memoryview(bytearray(self))
        try:
            descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # its owner has ended since; the mapping of this object is still good
            return memoryview(bytearray(self))
        within = loan.offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                descriptor,
                within + self.nbytes,
                mmap.MAP_PRIVATE,
                mmap.PROT_READ | mmap.PROT_WRITE,
                offset=loan.offset - within,
            )
        finally:
            os.close(descriptor)
        # Pages not written to are still the owner's: they must stay lent as long as this memory lives.
        return keeping(mapped, self.nbytes, self, within).data


class _Loan:
    """One object of a slot that is open here; with its end the slot is told."""

    __slots__ = ("_ended", "_place", "_row", "offset", "source")

    def __init__(self, ended: Callable[[_Owner, int], None], place: _Owner, row: int, offset: int) -> None:
        self.source: _Source | None = None
        self.offset = offset
        self._ended = ended
        self._place = place
        self._row = row

    def __del__(self) -> None:
        self._ended(self._place, self._row)


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    birth: int
    memory: mmap.mmap


class _Table:
    """Our column of an owner's cells."""

    def __init__(self, path: Path, reader: str) -> None:
        self._column = _column(path / f"{READER}{reader}")
        self._fence = threading.Lock()
        descriptor = _open(path / LEDGER, os.O_RDWR)
        try:
            self._cells = memoryview(mmap.mmap(descriptor, ROWS * COLUMNS * 8)).cast("Q")
        finally:
            os.close(descriptor)

    def mark(self, row: int, value: int) -> None:
        self._cells[row * COLUMNS + self._column] = value
        with self._fence:  # as in the arena: the owner's word is read after the store
            pass

    def word(self, row: int) -> int:
        return self._cells[row * COLUMNS]


class _Owner:
    """One process that lends to us. Nothing in it refers back to it, so that it goes with the last view."""

    def __init__(self, path: Path, reader: str) -> None:
        self.path = path
        self.sources: dict[int, _Source] = {}
        self.borrowed = Borrowed(_Table(path, reader))

    def source(self, row: int, birth: int) -> _Source:
        found = self.sources.get(row)
        if found is None or found.birth != birth:
            path = self.path / f"{row}.{birth}"
            descriptor = _open(path, os.O_RDONLY)
            try:
                mapped = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(descriptor)
            found = self.sources[row] = _Source(path, birth, mapped)
        return found


def _open(path: Path, how: int) -> int:
    """Open what its owner says is a file of its own; a pipe in its place holds nobody up, a link leads nowhere."""
    return os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _column(path: Path) -> int:
    """Read which column is ours.

    Raises:
        ValueError: It is none that a reader can have.
    """
    descriptor = _open(path, os.O_RDONLY)
    try:
        column = int(os.read(descriptor, 16))
    finally:
        os.close(descriptor)
    if not 0 < column < COLUMNS:
        msg = f"it gives us column {column}"
        raise ValueError(msg)
    return column


class Loans:
    """What this process has opened. Any thread may call.

    Args:
        root: Directory of all processes of this user.
        token: Of this process.
    """

    def __init__(self, root: Path, token: str) -> None:
        self._root = root
        self._token = token
        self._process = os.getpid()
        self._owners: dict[str, _Owner] = {}
        self._gone: deque[tuple[_Owner, int]] = deque()
        self._lock = threading.Lock()

    def open(self, frame: bytes, owner: str) -> Lent:
        """Return the bytes that a descriptor names.

        Args:
            frame: The descriptor.
            owner: Token of the process it came from.

        Raises:
            CodecError: It names nothing that is lent to us now.
        """
        magic, row, birth, generation, offset, nbytes = DESCRIPTOR.unpack(frame)
        if magic != MAGIC or row >= ROWS:
            msg = "a frame came that names no array"
            raise CodecError(msg)
        loan: _Loan | None = None
        try:
            with self._lock:
                place = self._owners.get(owner) or self._owners.setdefault(
                    owner, _Owner(self._root / owner, self._token)
                )
                if not place.borrowed.enter(row, generation):
                    msg = f"an array in shared memory of process {owner} came too late: its place is used again"
                    raise CodecError(msg)
                loan = _Loan(self._finished, place, row, offset)
                source = loan.source = place.source(row, birth)
        except (OSError, ValueError) as error:
            loan = None  # now, not with the error, which somebody may keep
            msg = f"an array in shared memory of process {owner} cannot be opened: {error}"
            raise CodecError(msg) from error
        finally:
            self._drain()
        if offset + nbytes > len(source.memory):
            loan = None
            msg = f"a frame of process {owner} names bytes {offset:,} to {offset + nbytes:,} of a smaller place"
            raise CodecError(msg)
        lent = Lent((nbytes,), np.uint8, source.memory, offset)  # see ``keeping``
        lent.loan = loan
        return lent

    def _finished(self, place: _Owner, row: int) -> None:
        """One object is gone. On any thread, also out of the garbage collector while that thread holds the lock."""
        if os.getpid() == self._process:  # a forked child has copies of the objects, and nothing to give back
            self._gone.append((place, row))
            self._drain()

    def _drain(self) -> None:
        """Give back what is gone; whoever holds the lock now does it when it has let go of it."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    place, row = self._gone.popleft()
                    place.borrowed.leave(row)
            finally:
                self._lock.release()

    def forget(self, owner: str) -> None:
        """Drop the mappings of a process that is gone; views that live on keep theirs."""
        with self._lock:
            self._owners.pop(owner, None)
        self._drain()

    def close(self) -> None:
        """Drop all mappings; views that live on keep theirs."""
        with self._lock:
            self._owners.clear()
        self._drain()
