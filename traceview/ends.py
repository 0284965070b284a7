"""The ends of all arrows of a merge, by their numbers: kept in a file, because they grow with the input."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traceview.output import write_all

__all__ = ["EndsFile", "count_joined"]

Numbers = NDArray[np.uint64]

_AT_ONCE: Final = 1 << 18
_READ: Final = 1 << 16
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)


class EndsFile:
    """Blocks of numbers: how many leave, how many arrive, and all of them.

    Args:
        fd: Open for writing, at its end; stays open.
        shown: The output's name, for errors.
    """

    def __init__(self, fd: int, shown: str) -> None:
        self._fd = fd
        self._shown = shown

    def add(self, leaving: array[int] | Numbers, arriving: array[int] | Numbers) -> None:
        """Add numbers; raises OutputError when the disk takes no more."""
        if len(leaving) or len(arriving):
            counts = array("Q", (len(leaving), len(arriving)))
            write_all(self._fd, b"".join((counts.tobytes(), leaving.tobytes(), arriving.tobytes())), self._shown)


def count_joined(fds: Sequence[int], total: int) -> int:
    """Return how many numbers both leave and arrive somewhere; ``total`` ends are held in memory in shares."""
    shares = max(1, -(-total // _AT_ONCE))
    joined = 0
    for share in range(shares):
        leaving: list[Numbers] = []
        arriving: list[Numbers] = []
        for fd in fds:
            for numbers, arrives in _pieces(fd):
                mine = numbers if shares == 1 else numbers[_share(numbers, shares) == share]
                (arriving if arrives else leaving).append(mine)
        if leaving and arriving:  # any piece, even without a number of this share
            joined += _common(np.concatenate(leaving), np.concatenate(arriving))
    return joined


def _common(some: Numbers, others: Numbers) -> int:
    """Return how many numbers are in both."""
    if not len(some) or not len(others):
        return 0
    some.sort()
    others.sort()
    different = np.append(True, others[1:] != others[:-1])
    found = np.searchsorted(some, others)
    return int((different & (some[np.minimum(found, len(some) - 1)] == others)).sum())


def _share(numbers: Numbers, shares: int) -> Numbers:
    share: Numbers = ((numbers * _SPREAD) >> np.uint64(32)) % np.uint64(shares)
    return share


def _pieces(fd: int) -> Iterator[tuple[Numbers, bool]]:
    """Yield (numbers, whether they arrive)."""
    at = 0
    while head := os.pread(fd, 16, at):
        at += len(head)
        for arrives, count in enumerate(np.frombuffer(head, dtype=np.uint64).tolist()):
            end = at + 8 * count
            while at < end:
                data = os.pread(fd, min(8 * _READ, end - at), at)
                at += len(data)
                yield np.frombuffer(data, dtype=np.uint64), bool(arrives)
