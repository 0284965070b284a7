"""Which piece of shared memory is lent to whom, and which may be used again. Pure: files and clocks are the shell's.

A *slot* is one file of a fixed size. Each time it is lent out it enters a new *generation*. It may be used again when

- nobody here holds its *lease* any more (whoever keeps a message to send it again holds one), and
- no reader still has it open. Both sides map a table. The cell of (slot, reader) holds ``2 * generation`` once the
  reader has opened it and ``2 * generation + 1`` once it has let go; the cell of (slot, owner) holds the generation
  that may be opened, 0 for none. When the leases are gone the owner first writes 0, then looks at the readers' cells; a
  reader first writes its own, then looks at the owner's. So whichever comes second sees the other.

No message is needed to give memory back, and none can be lost. A reader that died is told from outside (``died``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Pool", "Slot", "Table", "let_go", "opened", "size_class"]


class Table(Protocol):
    """The cells that both sides map."""

    def cell(self, row: int, column: int) -> int:
        """Return what a reader wrote last."""
        ...

    def close(self, row: int) -> None:
        """Write that no generation of a slot may be opened, before any cell is read after it."""
        ...

    def wipe(self, row: int, column: int) -> None:
        """Forget what a reader wrote that writes no more."""
        ...


def opened(generation: int) -> int:
    """Return what a reader writes when it opens a generation."""
    return 2 * generation


def let_go(generation: int) -> int:
    """Return what a reader writes when it has no view of a generation left."""
    return 2 * generation + 1


def size_class(nbytes: int) -> int:
    """Return the size of the slot for ``nbytes``: up to an eighth more, so that sizes that vary a little share one."""
    step = max(1 << 16, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


@dataclass(slots=True)
class Slot:
    """One file of shared memory.

    Attributes:
        row: Its line in the table of cells.
        size: Bytes.
        birth: Tells it from earlier files that had this row.
        generation: New each time it is lent; no two lendings of one owner share one, so stale cells mean nothing.
        leases: How many objects here still name the current generation.
        readers: Columns of those it was lent to in this generation.
        closed: Nobody may open this generation any more.
        idle_since: When it was found free, nanoseconds.
    """

    row: int
    size: int
    birth: int
    generation: int = 0
    leases: int = 0
    readers: set[int] = field(default_factory=set)
    closed: bool = False
    idle_since: int = 0


class Pool:
    """The slots of one owner. One mutator at a time.

    Args:
        limit: Bytes of all slots together.
        rows: Most slots.
        table: Where readers say what they do.
    """

    def __init__(self, limit: int, rows: int, table: Table) -> None:
        self._table = table
        self.limit = limit
        self.total = 0
        self.slots: dict[int, Slot] = {}
        self._busy: dict[int, Slot] = {}
        self._free_rows = list(range(rows - 1, -1, -1))
        self._births = 0
        self._generations = 0

    def take(self, nbytes: int, now_ns: int) -> Slot | None:
        """Return a slot of at least ``nbytes`` in a new generation with one lease, or None: make one (``grow``)."""
        self.collect(now_ns)
        wanted = size_class(nbytes)
        most, busy = 2 * wanted, self._busy
        best: Slot | None = None
        for row, slot in self.slots.items():  # each array that is lent comes by here
            if row in busy or not wanted <= slot.size <= most:
                continue
            if best is None or (slot.size, row) < (best.size, best.row):
                best = slot
        return None if best is None else self._lend(best)

    def grow(self, nbytes: int) -> tuple[list[Slot], Slot | None]:
        """Make room for one more slot and enter it, lent with one lease.

        Returns:
            Free slots that must go first (they are forgotten here already), and the new slot: None if it cannot be.
        """
        size = size_class(nbytes)
        gone: list[Slot] = []
        for slot in sorted(self.free(), key=lambda slot: slot.idle_since):
            if self.total + size <= self.limit and self._free_rows:
                break
            gone.append(self.forget(slot))
        if self.total + size > self.limit or not self._free_rows:
            return gone, None
        self._births += 1
        slot = Slot(self._free_rows.pop(), size, self._births)
        self.slots[slot.row] = slot
        self.total += size
        return gone, self._lend(slot)

    def undo(self, slot: Slot) -> None:
        """Take back a slot that ``grow`` has just entered: there is no memory for it, nor for its cells."""
        del self._busy[slot.row]
        self.forget(slot)

    def _lend(self, slot: Slot) -> Slot:
        self._generations += 1
        slot.generation = self._generations
        slot.leases = 1
        slot.closed = False
        slot.readers.clear()
        self._busy[slot.row] = slot
        return slot

    def drop(self, row: int, generation: int) -> None:
        """One lease of a generation is gone."""
        slot = self._busy.get(row)
        if slot is not None and slot.generation == generation:
            slot.leases -= 1

    def collect(self, now_ns: int) -> None:
        """Find the slots that nobody uses any more."""
        for slot in list(self._busy.values()):
            if slot.leases <= 0:
                if not slot.closed:
                    slot.closed = True
                    self._table.close(slot.row)
                if not self._open_columns(slot):
                    del self._busy[slot.row]
                    slot.idle_since = now_ns

    def _open_columns(self, slot: Slot) -> set[int]:
        """Return the readers that still have the current generation of a slot open."""
        held = opened(slot.generation)
        return {column for column in slot.readers if self._table.cell(slot.row, column) == held}

    def awaited(self) -> set[int]:
        """Return the readers for which alone some slot is not free: if one of them is gone, say ``died``."""
        waiting: set[int] = set()
        for slot in self._busy.values():
            if slot.closed:
                waiting |= self._open_columns(slot)
        return waiting

    def died(self, column: int) -> None:
        """Forget a reader that is gone; nothing is lent to it any more, and its column may be another's."""
        for slot in self._busy.values():
            slot.readers.discard(column)
            self._table.wipe(slot.row, column)  # or it would speak for the next one that this generation is lent to

    def free(self) -> list[Slot]:
        """Return the slots that may be lent."""
        return [slot for slot in self.slots.values() if slot.row not in self._busy]

    def idle(self, before_ns: int) -> list[Slot]:
        """Return the slots that were free already at ``before_ns``."""
        return [slot for slot in self.free() if slot.idle_since <= before_ns]

    def forget(self, slot: Slot) -> Slot:
        """Remove a free slot; its row may be used again by a slot of a later birth."""
        del self.slots[slot.row]
        self._free_rows.append(slot.row)
        self.total -= slot.size
        return slot

    @property
    def lent(self) -> int:
        """Bytes of the slots in use."""
        return sum(slot.size for slot in self._busy.values())
