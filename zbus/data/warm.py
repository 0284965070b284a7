"""Memory of this process that is used again: a large array gets pages that it need not wait for.

The pages of a fresh array of tens of megabytes cost more time than what is copied into them. Here they come from memory
that an earlier array of that size has left. It is anonymous and private: the array is the user's own, whatever becomes
of the process that its bytes came from, and a forked child has its own copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from zbus.data.pool import size_class
from zbus.data.views import keeping

__all__ = ["WARM_FROM", "WarmMemory"]

WARM_FROM: Final = 1 << 18
"""Bytes from which an array comes from here; below, the C library reuses memory as well."""

_KEPT_BYTES: Final = 1 << 29
_KEPT_NS: Final = 60_000_000_000


class WarmMemory:
    """Lends memory for as long as any view of an array lives. Any thread may call.

    Args:
        kept_bytes: Most memory kept while nobody uses it.
        kept_ns: How long at most; looked at when memory is asked for, and when some comes back.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, kept_ns: int = _KEPT_NS) -> None:
        self._kept_bytes = kept_bytes
        self._kept_ns = kept_ns
        self._lock = threading.Lock()
        self._returned: deque[tuple[mmap.mmap, int]] = deque()
        self._idle: list[tuple[mmap.mmap, int]] = []  # and since when (monotonic), oldest first
        self.made = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an uninitialised array, writable and nobody else's.

        Args:
            shape: Sizes of the dimensions.
            dtype: numpy dtype, not of objects.
        """
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < WARM_FROM or kind.hasobject:
            return np.empty(shape, kind)
        memory = self._take(size_class(nbytes))
        return np.ndarray(shape, kind, keeping(memory, nbytes, _Return(memory, self._came_back)).data)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        with self._lock:
            self._settle(time.monotonic_ns())
            kept = sum(len(memory) for memory, _ in self._idle)
        self._settle_returned()
        return kept

    def _take(self, size: int) -> mmap.mmap:
        memory = self._used_before(size)
        self._settle_returned()
        if memory is not None:
            return memory
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _used_before(self, size: int) -> mmap.mmap | None:
        with self._lock:
            self._settle(time.monotonic_ns())
            for index in range(len(self._idle) - 1, -1, -1):  # the one used last is the one in the caches
                if len(self._idle[index][0]) == size:
                    return self._idle.pop(index)[0]
            self.made += 1
        return None

    def _came_back(self, memory: mmap.mmap) -> None:
        """Take memory back. Waits for no lock: it may be called out of the garbage collector, amid anything here."""
        self._returned.append((memory, time.monotonic_ns()))
        self._settle_returned()

    def _settle_returned(self) -> None:
        """See to what came back while the lock was held: whoever held it looks here after letting it go."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._settle(time.monotonic_ns())
            finally:
                self._lock.release()

    def _settle(self, now_ns: int) -> None:
        """Take in what came back, and let go of what is too old or too much."""
        while self._returned:
            self._idle.append(self._returned.popleft())
        kept = sum(len(memory) for memory, _ in self._idle)
        while self._idle and (kept > self._kept_bytes or self._idle[0][1] < now_ns - self._kept_ns):
            kept -= len(self._idle.pop(0)[0])


class _Return:
    """Lives as long as an array does."""

    def __init__(self, memory: mmap.mmap, came_back: Callable[[mmap.mmap], None]) -> None:
        self._memory = memory
        self._came_back = came_back

    def __del__(self) -> None:
        self._came_back(self._memory)
