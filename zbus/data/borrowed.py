"""What one process has open of another's slots: the reader's half of ``pool``'s rules. Pure: the shell has the table.

A message may come again, and late. A slot of which one generation is open is never marked for another one, so that a
late copy gives nothing away; it is refused instead.
"""

from __future__ import annotations

from typing import Protocol

from zbus.data.pool import let_go, opened

__all__ = ["Borrowed", "Marks"]


class Marks(Protocol):
    """Our column of the owner's table."""

    def mark(self, row: int, value: int) -> None:
        """Write our cell of a row, before any word is read after it."""
        ...

    def word(self, row: int) -> int:
        """Return the generation of a row that may be opened, 0 for none."""
        ...


class Borrowed:
    """Slots of one owner that are open here. One mutator at a time.

    Args:
        marks: Where the owner sees what we do.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._open: dict[int, list[int]] = {}  # by row: generation, how many objects of it live

    def enter(self, row: int, generation: int) -> bool:
        """Count one more object of a generation; False if it may not be opened (any more)."""
        known = self._open.get(row)
        if known is not None:
            if known[0] != generation:
                return False
            known[1] += 1
            return True
        self._marks.mark(row, opened(generation))
        if self._marks.word(row) != generation:
            self._marks.mark(row, let_go(generation))
            return False
        self._open[row] = [generation, 1]
        return True

    def leave(self, row: int) -> None:
        """One object of an open row is gone."""
        known = self._open[row]
        known[1] -= 1
        if not known[1]:
            del self._open[row]
            self._marks.mark(row, let_go(known[0]))
