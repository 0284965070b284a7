"""Lanes: rows on which spans nest, because viewers drop or misplace spans that overlap on one thread.

Pure. Spans of one thread come in order of start (longest first at equal starts). A span goes where an enclosing span
of its own track is open, else to the first row that is free. Spans of different tracks (calls, asyncio tasks) never
nest into one another, however their times fall.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

__all__ = ["Lanes"]

_NEVER: Final = 1 << 62


class Lanes:
    """The rows of one thread. Times are integers of any one unit."""

    __slots__ = ("_home", "_owner", "_stacks")

    def __init__(self) -> None:
        self._stacks: list[list[int]] = []  # ends of the open spans of a row, outermost first
        self._owner: list[Hashable] = []  # the track a row belongs to, until another one takes it over
        self._home: dict[Hashable, int] = {}  # track -> the row it used last, while it owns it

    def __len__(self) -> int:
        return len(self._stacks)

    def reserve(self, rows: int) -> None:
        """Leave rows below this number to somebody else: new ones come behind."""
        while len(self._stacks) < rows:
            self._stacks.append([_NEVER])
            self._owner.append(None)

    def place(self, start: int, end: int, track: Hashable) -> int:
        """Return the row (0, 1, …) for a span and remember it there."""
        home = self._home.get(track)
        if home is not None:
            stack = self._stacks[home]
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or end <= stack[-1]:
                stack.append(end)
                return home
        return self._find(start, end, track)

    def place_all(
        self, starts: Sequence[int], ends: Sequence[int], tracks: Sequence[Hashable], spans: Sequence[bool]
    ) -> list[int]:
        """Return the rows of events in order of time, as ``place`` gives them to spans and ``at`` to all others."""
        rows: list[int] = []
        add = rows.append
        stacks, homes, find = self._stacks, self._home, self._find
        for start, end, track, is_span in zip(starts, ends, tracks, spans, strict=True):
            row = homes.get(track)
            if row is None:
                add(find(start, end, track) if is_span else 0)
                continue
            stack = stacks[row]
            while stack and stack[-1] <= start:
                stack.pop()
            if not is_span:
                add(row if stack else 0)
            elif not stack or end <= stack[-1]:
                stack.append(end)
                add(row)
            else:
                add(find(start, end, track))
        return rows

    def at(self, start: int, track: Hashable) -> int:
        """Return the row where ``track`` has a span open at ``start``, else row 0."""
        home = self._home.get(track)
        if home is None:
            return 0
        stack = self._stacks[home]
        while stack and stack[-1] <= start:
            stack.pop()
        return home if stack else 0

    def _find(self, start: int, end: int, track: Hashable) -> int:
        for row, stack in enumerate(self._stacks):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack:
                self._take(row, track)
            elif self._owner[row] != track or end > stack[-1]:
                continue
            stack.append(end)
            return row
        self._stacks.append([end])
        self._owner.append(track)
        self._home[track] = len(self._stacks) - 1
        return len(self._stacks) - 1

    def _take(self, row: int, track: Hashable) -> None:
        before = self._owner[row]
        if self._home.get(before) == row:
            del self._home[before]
        self._owner[row] = track
        self._home[track] = row
