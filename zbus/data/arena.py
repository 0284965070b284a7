"""The owner's side: files in shared memory, lent out with the bytes of arrays, used again when every reader let go."""

from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from zbus.data.lease import Lease
from zbus.data.pool import Pool, Slot
from zbus.data.presence import Presence, lives
from zbus.data.views import keeping

__all__ = ["COLUMNS", "LEDGER", "READER", "ROWS", "Arena", "host_memory"]

log = logging.getLogger("zbus.data")

ROWS: Final = 1024
COLUMNS: Final = 2048
LEDGER: Final = "ledger"
READER: Final = "reader."
"""Before a reader's token: the file that tells it its column."""

_IDLE_NS: Final = 60_000_000_000
"""Slots unused for so long are given back to the system."""

_LOOK_NS: Final = 1_000_000_000
"""How often is looked for them."""

_CELLS_OF_A_PAGE: Final = 512

_OWNER: Final = 0
"""The column in which the owner writes a slot's current generation."""


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def leaves_room(nbytes: int, available: int, total: int, free: int, size: int) -> bool:
    """Tell whether a new slot leaves the others of this host enough: each process has a limit, they share the memory.

    Args:
        nbytes: Of the slot.
        available: Memory of the host that is free for use, bytes.
        total: All memory of the host.
        free: What is free of the file system in memory.
        size: Of that file system; it may be as large as the memory itself.
    """
    return available - nbytes >= total // 10 and free - nbytes >= size // 10


def host_memory() -> tuple[int, int]:
    """Return the available and the total memory in bytes; without limits where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        facts = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        return facts["MemAvailable"], facts["MemTotal"]
    except (OSError, ValueError, IndexError, KeyError):
        return 1 << 62, 0


def _file_system(path: Path) -> tuple[int, int]:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


class _Cells:
    """The table, in a file of our directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = 1
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, ROWS * COLUMNS * 8)  # sparse: only lines in use take memory
            self._cells = memoryview(mmap.mmap(descriptor, ROWS * COLUMNS * 8)).cast("Q")
        finally:
            os.close(descriptor)
        self._fence = threading.Lock()

    def make(self, rows: Iterable[int], column: int = 0) -> None:
        """Have memory for these rows up to a column, or the highest before: without, a full file system is a SIGBUS.

        Raises:
            OSError: There is none.
        """
        self._columns = max(self._columns, column + 1)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for row in rows:
                os.posix_fallocate(descriptor, row * COLUMNS * 8, self._columns * 8)
        finally:
            os.close(descriptor)

    def cell(self, row: int, column: int) -> int:
        return self._cells[row * COLUMNS + column]

    def close(self, row: int) -> None:
        self.let_open(row, 0)
        with self._fence:  # an atomic operation of the processor: what is read next is read after the store above
            pass

    def wipe(self, row: int, column: int) -> None:
        self._cells[row * COLUMNS + column] = 0

    def let_open(self, row: int, generation: int) -> None:
        self._cells[row * COLUMNS + _OWNER] = generation


class Arena:
    """What this process lends. Any thread may call; a forked child must not.

    Args:
        presence: This process's directory.
        limit: Most bytes at once.
    """

    def __init__(self, presence: Presence, limit: int) -> None:
        self._presence = presence
        self._cells = _Cells(presence.path / LEDGER)
        self._pool = Pool(limit, ROWS, self._cells)
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}  # by row: the map as bytes
        self._columns: dict[str, int] = {}
        self._free_columns = list(range(COLUMNS - 1, _OWNER, -1))
        self._dropped: deque[tuple[int, int]] = deque()
        self._reserved: dict[int, tuple[int, int, int]] = {}  # by address: row, generation, bytes
        self._reserved_at: list[int] = []  # the addresses, sorted
        self._looked_ns = 0
        self._warned = False
        self.refused = 0

    # -- lending -------------------------------------------------------------------------------------------------------

    def lend(self, data: memoryview | bytes) -> Lease | None:
        """Copy ``data``, which is contiguous, into a slot that nobody may read yet; None if there is no room.

        Memory that ``reserve`` gave is lent as it stands.
        """
        source = np.frombuffer(data, np.uint8)
        lease = self._lend_in_place(source) if self._reserved else None
        if lease is not None:
            return lease
        taken = self._take(source.nbytes)
        if taken is None:
            return None
        slot, memory = taken
        np.copyto(memory[: source.nbytes], source)  # without the interpreter's lock
        return Lease(self, slot.row, slot.birth, slot.generation, 0, source.nbytes)

    def reserve(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Return memory of a slot to fill, for as long as any view of it lives; None if there is no room."""
        taken = self._take(nbytes)
        if taken is None:
            return None
        slot, memory = taken
        address = _address(memory)
        with self._lock:
            if address not in self._reserved:
                bisect.insort(self._reserved_at, address)
            self._reserved[address] = (slot.row, slot.generation, nbytes)
        lease = Lease(self, slot.row, slot.birth, slot.generation, 0, nbytes)
        return keeping(self._maps[slot.row], nbytes, lease)

    def _lend_in_place(self, source: np.ndarray[Any, Any]) -> Lease | None:
        """Return one more lease of reserved memory, if these bytes are a part of some."""
        address = _address(source)
        with self._lock:
            index = bisect.bisect_right(self._reserved_at, address) - 1
            if index < 0:
                return None
            begin = self._reserved_at[index]
            row, generation, nbytes = self._reserved[begin]
            slot = self._pool.slots.get(row)
            if slot is None or slot.generation != generation:
                del self._reserved[begin], self._reserved_at[index]
                return None
            if address + source.nbytes > begin + nbytes:
                return None
            slot.leases += 1
            return Lease(self, row, slot.birth, generation, address - begin, source.nbytes)

    def _take(self, nbytes: int) -> tuple[Slot, np.ndarray[Any, Any]] | None:
        """Return a slot to fill, with one lease that nobody holds yet."""
        with self._lock:
            now = time.monotonic_ns()
            self._take_back()
            pool = self._pool
            slot = pool.take(nbytes, now)
            if slot is None and self._bury(pool.awaited()):
                slot = pool.take(nbytes, now)
            if slot is None:
                slot = self._make(nbytes)
            if now - self._looked_ns > _LOOK_NS:
                self._looked_ns = now
                for idle in pool.idle(now - _IDLE_NS):
                    self._remove(pool.forget(idle))
            if slot is None:
                self._refuse(nbytes)
                return None
            self._cells.let_open(slot.row, slot.generation)
            return slot, self._memory[slot.row]

    def address(self, lease: Lease, reader: str) -> bool:
        """Let the process of a token read what is lent; False if that cannot be.

        A reader that is not known yet costs a small file.
        """
        with self._lock:
            slot = self._pool.slots.get(lease.row)
            if lease.arena is not self or slot is None or slot.generation != lease.generation:
                return False
            try:
                slot.readers.add(self._column(reader))
            except OSError:
                return False
            return True

    def view(self, lease: Lease) -> memoryview:
        """Return the bytes of a lease of ours, read-only; the lease lives as long as they do."""
        return keeping(self._maps[lease.row], lease.nbytes, lease, lease.offset).data.toreadonly()

    def dropped(self, row: int, generation: int) -> None:
        """A lease is gone. From any thread, also out of the garbage collector, so it takes no lock."""
        self._dropped.append((row, generation))

    def died(self, reader: str) -> None:
        """Take back what a reader had open, if its process is really gone."""
        with self._lock:
            if reader in self._columns:
                self._bury({self._columns[reader]})

    # -- state ---------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return bytes held, bytes in use, number of slots, and how often there was no room.

        What only readers that are gone have open is not in use.
        """
        with self._lock:
            self._take_back()
            self._pool.collect(time.monotonic_ns())
            if self._bury(self._pool.awaited()):
                self._pool.collect(time.monotonic_ns())
            return {
                "shared_bytes": self._pool.total,
                "shared_lent_bytes": self._pool.lent,
                "shared_slots": len(self._pool.slots),
                "shared_refused": self.refused,
            }

    def close(self) -> None:
        """Forget everything; the files go with the presence. Views that peers have stay readable."""
        with self._lock:
            self._pool = Pool(0, 1, self._cells)
            self._maps.clear()  # the memory goes with the last view of it
            self._memory.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        dropped = self._dropped
        while dropped:
            self._pool.drop(*dropped.popleft())

    def _column(self, reader: str) -> int:
        column = self._columns.get(reader)
        if column is None:
            if not self._free_columns:
                self._bury(set(self._columns.values()))
            column = self._free_columns[-1]
            if column % _CELLS_OF_A_PAGE == 0:
                self._cells.make(self._pool.slots, column)
            (self._presence.path / f"{READER}{reader}").write_text(str(column), encoding="ascii")
            self._free_columns.pop()
            self._columns[reader] = column
        return column

    def _bury(self, columns: set[int]) -> bool:
        """Forget those readers that are gone; tell whether there were any."""
        root = self._presence.path.parent
        gone = [token for token, column in self._columns.items() if column in columns and not lives(root, token)]
        for token in gone:
            column = self._columns.pop(token)
            (self._presence.path / f"{READER}{token}").unlink(missing_ok=True)
            self._pool.died(column)
            self._free_columns.append(column)
        return bool(gone)

    def _make(self, nbytes: int) -> Slot | None:
        gone, slot = self._pool.grow(nbytes)
        for old in gone:
            self._remove(old)
        if slot is None:
            return None
        path = self._presence.path / f"{slot.row}.{slot.birth}"
        try:
            if not leaves_room(slot.size, *host_memory(), *_file_system(self._presence.path)):
                raise OSError(errno.ENOSPC, "memory is short")  # the same end as if the kernel said so
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Without this a full file system is a SIGBUS at the first touch instead of an error here.
                os.posix_fallocate(descriptor, 0, slot.size)
                self._cells.make([slot.row])
                mapped = mmap.mmap(descriptor, slot.size)
            finally:
                os.close(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            self._pool.undo(slot)
            return None
        self._maps[slot.row] = mapped
        self._memory[slot.row] = np.frombuffer(mapped, np.uint8)
        return slot

    def _remove(self, slot: Slot) -> None:
        """Give back the memory of a slot that nobody has open, or will open: readers may have mapped it still."""
        self._maps.pop(slot.row, None)
        self._memory.pop(slot.row, None)
        path = self._presence.path / f"{slot.row}.{slot.birth}"
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
            path.unlink()

    def _refuse(self, nbytes: int) -> None:
        self.refused += 1
        if not self._warned:
            self._warned = True
            log.warning(
                "no room for an array of %d bytes in shared memory (%s holds %d of at most %d): arrays go through "
                "sockets, which is slower. More room: data.shared_memory, or a larger /dev/shm",
                nbytes, self._presence.path, self._pool.total, self._pool.limit,
            )  # fmt: skip
