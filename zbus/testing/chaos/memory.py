"""Whether memory stays flat: what this process and the agents hold, sampled while the soak runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from zbus.testing.memory import rss_mib

__all__ = ["Memory"]

_ENOUGH: Final = 9


class Memory:
    """Samples resident memory on a thread of its own.

    Memory that was freed is given back to the system before this process is measured: the C library keeps freed pieces
    for each thread, which grow for minutes under messages of all sizes and say nothing of what is held.

    Args:
        every_s: Seconds between samples.
        others: Gives the processes to watch beside this one, by name.
    """

    def __init__(self, every_s: float, others: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._every_s = every_s
        self._others = others
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-memory", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._over.set()
        self._thread.join()

    def lows(self) -> tuple[float, float]:
        """Return the lowest of the first and of the last third of this process's samples, in MiB.

        The lowest, since a sample also sees the payloads that are under way just then.
        """
        own = [size for _, size in self._samples["self"]]
        third = max(1, len(own) // 3)
        return round(min(own[:third]), 1), round(min(own[-third:]), 1)

    def slopes(self) -> dict[str, float]:
        """Return the growth of each process that was there all the time, in MiB per minute, between the two lows."""
        longest = max(map(len, self._samples.values()))
        return {
            name: round(_slope(samples), 2)
            for name, samples in sorted(self._samples.items())
            if len(samples) == longest >= _ENOUGH
        }

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._take()
        self._take()

    def _take(self) -> None:
        now = time.monotonic()
        _give_back()
        self._samples["self"].append((now, rss_mib(os.getpid())))
        for name, pid in self._others():
            with contextlib.suppress(OSError):
                self._samples[name].append((now, rss_mib(pid)))


def _slope(samples: list[tuple[float, float]]) -> float:
    third = len(samples) // 3
    (begin, low), (end, high) = (min(part, key=lambda one: one[1]) for part in (samples[:third], samples[-third:]))
    return 60.0 * (high - low) / (end - begin)


def _give_back() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
