"""The encoded events of one file between reading and writing: in memory while they are few, else in an unnamed file."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.output import temporary_fd

__all__ = ["Store"]

_WINDOW: Final = 4 << 20
"""Bytes that are read at once although not all of them are wanted."""
_GAP: Final = 1 << 15
"""Bytes between two wanted events that are read and thrown away rather than reading twice."""

Ints = NDArray[np.int64]


class Store:
    """Takes events in file order and gives them back by number, in any order; use it once.

    Args:
        directory: For the file; needs about the size of the inflated input.
        limit: Events held in memory at most.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._count = 0
        self._held: list[bytes] = []
        self._whole: bytes | None = None
        self._fd = -1
        self._sizes = bytearray()
        self._offsets: Ints = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, encoded: bytes, sizes: NDArray[np.int32]) -> None:
        """Take events, one behind the other, with the size of each."""
        self._count += len(sizes)
        self._held.append(encoded)
        self._sizes += sizes.tobytes()
        if self._count > self._limit:
            self._spill()

    def freeze(self) -> None:
        """Call once between the last ``add`` and the first ``get``."""
        if self._fd < 0:
            self._whole = b"".join(self._held)
            self._held = []
        self._offsets = np.zeros(self._count + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(self._sizes, dtype=np.int32), out=self._offsets[1:])
        self._sizes = bytearray()

    def get(self, numbers: Ints, before: int = 0, after: int = 0) -> list[bytes]:
        """Return the events with these numbers, without so many bytes before and after each."""
        begins, ends = self._offsets[numbers], self._offsets[numbers + 1]
        if not len(numbers):
            return []
        if self._whole is not None:
            return _cut(self._whole, begins + before, ends - after)
        first, last = int(begins.min()), int(ends.max())
        if last - first <= _WINDOW:
            return _cut(_pread(self._fd, last - first, first), begins + (before - first), ends - (after + first))
        return self._scattered(begins, ends, before, after)

    def close(self) -> None:
        """Release memory and file."""
        self._held, self._whole = [], None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _spill(self) -> None:
        if self._fd < 0:
            self._fd = temporary_fd(self._directory)
        for encoded in self._held:
            view = memoryview(encoded)
            while view:
                view = view[os.write(self._fd, view) :]
        self._held = []

    def _scattered(self, begins: Ints, ends: Ints, before: int, after: int) -> list[bytes]:
        """Return events that lie far apart, reading neighbours at once."""
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], ends[order]
        breaks = np.flatnonzero(begins[1:] - ends[:-1] > _GAP) + 1
        found: list[bytes] = []
        bounds = [0, *breaks.tolist(), len(order)]
        for first, last in pairwise(bounds):
            base = int(begins[first])
            data = _pread(self._fd, int(ends[last - 1]) - base, base)
            found += _cut(data, begins[first:last] + (before - base), ends[first:last] - (after + base))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return [found[place] for place in back.tolist()]


def _cut(data: bytes, begins: Ints, ends: Ints) -> list[bytes]:
    return [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
