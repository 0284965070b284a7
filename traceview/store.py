"""The events of one file between reading and writing: in memory while they are few, else in an unnamed file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.event import Event, decode_events, encode_event
from traceview.output import temporary_fd

__all__ = ["Store"]

_GAP: Final = 1 << 15
"""Bytes that are read and thrown away rather than reading twice."""


class Store:
    """Takes events in file order and gives them back by number, in any order; use it once.

    Args:
        directory: For the file; needs about the size of the inflated input.
        limit: Events held in memory at most.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._events: list[Event] = []
        self._fd = -1
        self._sizes: list[NDArray[np.int64]] = []
        self._offsets: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._spilled = 0

    def __len__(self) -> int:
        return self._spilled + len(self._events)

    def extend(self, events: list[Event]) -> None:
        """Take events; the list is not kept."""
        self._events.extend(events)
        if len(self._events) > self._limit:
            self._spill()

    def freeze(self) -> None:
        """Call once between the last ``extend`` and the first ``get``."""
        if self._fd >= 0:
            self._spill()
            self._offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._sizes))])

    def get(self, numbers: NDArray[np.int64]) -> list[Event]:
        """Return the events with these numbers, to be changed at will."""
        if self._fd < 0:
            events = self._events
            return [events[n] for n in numbers.tolist()]
        lines = self._lines(numbers)
        return decode_events(b"[" + b",".join(lines) + b"]")

    def one(self, number: int) -> Event:
        """Return one event, not to be changed."""
        return self._events[number] if self._fd < 0 else self.get(np.array([number]))[0]

    def args(self, number: int) -> bytes:
        """Return the args of an event, encoded."""
        return bytes(self.one(number).args)

    def with_arrow(self, numbers: list[int]) -> set[int]:
        """Return which of these events have an arrow of their own."""
        found: set[int] = set()
        for at in range(0, len(numbers), 4096):
            some = numbers[at : at + 4096]
            events = self.get(np.array(some, dtype=np.int64))
            found.update(number for number, event in zip(some, events, strict=True) if event.bind_id != "")
        return found

    def close(self) -> None:
        """Release memory and file."""
        self._events = []
        self._sizes = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _spill(self) -> None:
        if self._fd < 0:
            self._fd = temporary_fd(self._directory)
        for at in range(0, len(self._events), 4096):
            lines = list(map(encode_event, self._events[at : at + 4096]))
            self._sizes.append(np.fromiter(map(len, lines), dtype=np.int64, count=len(lines)))
            view = memoryview(b"".join(lines))
            while view:
                view = view[os.write(self._fd, view) :]
        self._spilled += len(self._events)
        self._events = []

    def _lines(self, numbers: NDArray[np.int64]) -> Sequence[bytes]:
        """Return the encoded events, reading neighbours at once."""
        order = np.argsort(numbers, kind="stable")
        begins = self._offsets[numbers[order]].tolist()
        ends = self._offsets[numbers[order] + 1].tolist()
        lines = [b""] * len(begins)
        first = 0
        while first < len(begins):
            last = first
            while last + 1 < len(begins) and begins[last + 1] - ends[last] <= _GAP:
                last += 1
            base = begins[first]
            data = _pread(self._fd, ends[last] - base, base)
            for place, begin, end in zip(
                order[first : last + 1].tolist(), begins[first : last + 1], ends[first : last + 1], strict=True
            ):
                lines[place] = data[begin - base : end - base]
            first = last + 1
        return lines


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
