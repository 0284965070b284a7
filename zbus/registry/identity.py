"""Facts that name a process beyond its pid, read from ``/proc``."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

__all__ = ["boot_id", "pid_space", "pid_start"]

_FIELD_AFTER_NAME: Final = 19  # field 22 of /proc/PID/stat, counted after the name, which may hold anything


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of this machine, or an empty text where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def pid_space() -> str:
    """Return a token of the space in which this process's pids mean something: this boot and pid namespace.

    Letters, digits and one hyphen.
    """
    machine = boot_id() or os.uname().nodename
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "-".join("".join(filter(str.isalnum, part)) for part in (machine, namespace.removeprefix("pid:")))


def pid_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 where there is no such process.

    A pid with another start is another process. A zombie still has its start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[_FIELD_AFTER_NAME])
    except (OSError, ValueError, IndexError):
        return 0
