"""Lanes: rows on which spans nest, because viewers drop or misplace spans that overlap on one thread.

Pure. Spans of one thread come in order of start (longest first at equal starts). A span goes where an enclosing span
of its own track is open, else to the row its track used last if that is free, else to the first row that is free
(without a track: always the first). Spans of different tracks (calls, asyncio tasks) never
nest into one another, however their times fall.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Final

__all__ = ["MAX_ROWS", "Lanes"]

MAX_ROWS: Final = 10_000
"""Rows of one thread at most; no viewer is of use beyond."""

_LOOKED_AT: Final = 64
"""Rows of its own track that a span is tried on, besides the one that its track used last."""

_NEVER: Final = 1 << 62


class Lanes:
    """The rows of one thread. Times are integers of any one unit.

    Attributes:
        crowded: Spans that found ``MAX_ROWS`` rows taken: they lie on the last one, over others.
    """

    __slots__ = ("_busy", "_home", "_idle", "_latest", "_owner", "_rows_of", "_stacks", "crowded")

    def __init__(self) -> None:
        self._stacks: list[list[int]] = []  # ends of the open spans of a row, outermost first
        self._owner: list[Hashable] = []  # the track a row belongs to, until another one takes it over
        self._home: dict[Hashable, int] = {}  # track -> the row it used last, while it owns it
        self._rows_of: dict[Hashable, list[int]] = {}  # track -> the rows it owns, in order
        self._latest = -_NEVER  # the latest end of all spans
        self._busy: list[tuple[int, int]] = []  # heap of (end of the outermost span, row), may be out of date
        self._idle: list[int] = []  # heap of rows that were free, may have been taken again by their track
        self.crowded = 0

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
            if end <= stack[-1] if stack else not home or bool(track):
                stack.append(end)
                self._latest = max(self._latest, end)
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
            elif stack:
                if end <= stack[-1]:
                    stack.append(end)
                    add(row)
                else:
                    add(find(start, end, track))
            elif not row or bool(track):
                stack.append(end)
                self._latest = max(self._latest, end)
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
        stacks = self._stacks
        self._let_go(start)
        row = self._idle_row(start)
        if end > self._latest:  # no span is open that could enclose it
            self._latest = end
        else:
            for own in self._rows_of.get(track, ())[:_LOOKED_AT]:
                if row is not None and own > row:
                    break
                stack = stacks[own]
                while stack and stack[-1] <= start:
                    stack.pop()
                if stack and self._owner[own] == track and end <= stack[-1]:
                    stack.append(end)
                    return own
        if row is not None:
            heappop(self._idle)
            self._take(row, track)
        elif len(stacks) < MAX_ROWS:
            row = len(stacks)
            stacks.append([])
            self._owner.append(track)
            self._home[track] = row
            self._rows_of.setdefault(track, []).append(row)
        else:
            self.crowded += 1
            return MAX_ROWS - 1
        stacks[row].append(end)
        heappush(self._busy, (end, row))
        return row

    def _let_go(self, start: int) -> None:
        """Move the rows that are free at ``start`` to those that wait."""
        busy, stacks = self._busy, self._stacks
        while busy and busy[0][0] <= start:
            row = heappop(busy)[1]
            stack = stacks[row]
            while stack and stack[-1] <= start:
                stack.pop()
            if stack:  # taken again by its track meanwhile
                heappush(busy, (stack[0], row))
            else:
                heappush(self._idle, row)

    def _idle_row(self, start: int) -> int | None:
        """Return the first row that is free, if any."""
        idle, stacks = self._idle, self._stacks
        while idle:
            row = idle[0]
            stack = stacks[row]
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack:
                return row
            heappop(idle)
            heappush(self._busy, (stack[0], row))
        return None

    def _take(self, row: int, track: Hashable) -> None:
        before = self._owner[row]
        if before != track:
            if self._home.get(before) == row:
                del self._home[before]
            rows = self._rows_of.get(before, [])
            if row in rows:
                rows.remove(row)
            if not rows:
                self._rows_of.pop(before, None)
            insort(self._rows_of.setdefault(track, []), row)
        self._owner[row] = track
        self._home[track] = row
