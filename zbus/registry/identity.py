"""Facts that name a process beyond its pid, read from ``/proc``."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from zbus.clock import boot_id

__all__ = ["pid_space", "pid_start", "same_kernel"]

_FIELD_AFTER_NAME: Final = 19  # field 22 of /proc/PID/stat, counted after the name, which may hold anything


@functools.cache
def pid_space() -> str:
    """Return a token of the space in which a pid and a start time mean something: this boot, pid and time namespace.

    Containers of one kernel have pids of their own; in a time namespace ``/proc`` shows other start times. Only
    processes with equal tokens may look each other up. Letters, digits and two hyphens.
    """
    machine = boot_id() or os.uname().nodename
    return "-".join("".join(filter(str.isalnum, part)) for part in (machine, _namespace("pid"), _namespace("time")))


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}").removeprefix(f"{kind}:")
    except OSError:  # a kernel without such namespaces has one of them
        return ""


def same_kernel(space: str) -> bool:
    """Return whether a ``pid_space`` is of the kernel that runs this process, whatever its namespaces."""
    return space.partition("-")[0] == pid_space().partition("-")[0]


def pid_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 where there is no such process.

    A pid with another start is another process. A zombie still has its start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[_FIELD_AFTER_NAME])
    except (OSError, ValueError, IndexError):
        return 0
