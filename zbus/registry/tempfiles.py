"""Names of temporary files, and which of them are leftovers.

``.tmp~<pid space>~<pid>~<start>~<n>``: ``~`` is not allowed in record names, so the two never meet. A temporary file
lives for milliseconds; one whose process is gone is a leftover. Processes of other hosts cannot be asked, so their
files are leftovers once this observer has seen them lie for ``_FOREIGN_AGE_NS`` by its own clock (wall clocks of hosts
are never compared). A writer whose file is swept wrongly writes another.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Collection
from typing import Final

from zbus.clock import Clock
from zbus.registry.identity import pid_space, pid_start

__all__ = ["TempNames", "is_temp"]

_PREFIX: Final = ".tmp~"
_PARTS: Final = 5
_FOREIGN_AGE_NS: Final = 600 * 1_000_000_000
_numbers: Final = itertools.count()  # shared by all registries of the process, so that names never repeat


def is_temp(name: str) -> bool:
    """Return whether a file name is a temporary one."""
    return name.startswith(_PREFIX)


class TempNames:
    """Makes names and judges others'. Every method may be called from any thread.

    Args:
        clock: This observer's clock, for the age of files of other hosts.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first_seen: dict[tuple[str, str], int] = {}
        self._me = (0, 0)

    def new(self) -> str:
        """Return a name that no other thread, process or host uses."""
        pid = os.getpid()
        if self._me[0] != pid:  # first use, or forked
            self._me = (pid, pid_start(pid))
        return f"{_PREFIX}{pid_space()}~{pid}~{self._me[1]}~{next(_numbers)}"

    def dead(self, area: str, name: str) -> bool:
        """Return whether a temporary file is a leftover that may be removed."""
        parts = name.split("~")
        if len(parts) == _PARTS and parts[1] == pid_space() and parts[2].isdecimal():
            return str(pid_start(int(parts[2]))) != parts[3]
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            return now_ns - self._first_seen.setdefault((area, name), now_ns) >= _FOREIGN_AGE_NS

    def keep(self, area: str, present: Collection[str]) -> None:
        """Forget the age of files of an area that are no longer there."""
        with self._lock:
            for key in [key for key in self._first_seen if key[0] == area and key[1] not in present]:
                del self._first_seen[key]
