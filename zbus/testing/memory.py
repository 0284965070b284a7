"""What the kernel says of a process's memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["high_water_mb", "rss_mib"]

_MIB: Final = 1 << 20


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process now, in MiB.

    Raises:
        OSError: There is no such process.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / _MIB


def high_water_mb(pid: int) -> int:
    """Return the most resident memory that a process held so far, in whole MiB; 0 if it is gone.

    Of a forked process that runs no program of its own this begins with what its parent held.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)
