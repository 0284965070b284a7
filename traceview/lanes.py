"""Lanes: rows on which spans nest, because viewers drop or misplace spans that overlap on one thread.

Pure. Spans of one thread come in order of start (longest first at equal starts). A span goes where an enclosing span
of its own track is open, else to the first row that is free. Spans of different tracks (calls, asyncio tasks) never
nest into one another, however their times fall.
"""

from __future__ import annotations

__all__ = ["Lanes"]


class Lanes:
    """The rows of one thread. Times are integers of any one unit."""

    __slots__ = ("_home", "_stacks")

    def __init__(self) -> None:
        self._stacks: list[list[tuple[int, str]]] = []  # open spans per row, as (end, track), outermost first
        self._home: dict[str, int] = {}  # track -> row that holds its open spans

    def __len__(self) -> int:
        return len(self._stacks)

    def place(self, start: int, end: int, track: str) -> int:
        """Return the row (0, 1, …) for a span and remember it there."""
        home = self._home.get(track)
        if home is not None and self._try(home, start, end, track):
            return home
        for row in range(len(self._stacks)):
            if row != home and self._try(row, start, end, track):
                return row
        self._stacks.append([(end, track)])
        self._home[track] = len(self._stacks) - 1
        return len(self._stacks) - 1

    def at(self, start: int, track: str) -> int:
        """Return the row where ``track`` has a span open at ``start``, else row 0."""
        home = self._home.get(track)
        if home is None:
            return 0
        self._close(home, start)
        return home if self._stacks[home] else 0

    def _try(self, row: int, start: int, end: int, track: str) -> bool:
        stack = self._stacks[row]
        if stack and stack[-1][0] <= start:
            self._close(row, start)
        if not stack:
            self._home[track] = row
        elif stack[-1][1] != track or end > stack[-1][0]:
            return False
        stack.append((end, track))
        return True

    def _close(self, row: int, start: int) -> None:
        stack = self._stacks[row]
        track = ""
        while stack and stack[-1][0] <= start:
            track = stack.pop()[1]
        if not stack and self._home.get(track) == row:
            del self._home[track]
