"""Processes held by identity, never by bare number: pid plus start time, and pidfds.

A pid names whoever bears it now. Everything here that signals a process first opens a pidfd and compares the start
time (field 22 of ``/proc/<pid>/stat``, clock ticks since boot), so that a reused pid is never hit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time
from pathlib import Path
from typing import Final

__all__ = [
    "ProcessHandle",
    "become_subreaper",
    "catches",
    "children_of",
    "describe_exit",
    "die_with_parent",
    "is_alive",
    "parent_of",
    "set_name",
    "start_time",
    "state_of",
]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_STAT_STATE: Final = 0
_STAT_PPID: Final = 1
_STAT_START: Final = 19


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` after the command name, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: the last one closes it.
    return text[text.rindex(")") + 1 :].split()


def start_time(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot, or None when no such process exists."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_STAT_START])


def state_of(pid: int) -> str | None:
    """Return the state letter of ``pid`` (``R``, ``S``, ``T``, ``Z``, …), or None when no such process exists."""
    fields = _stat(pid)
    return None if fields is None else fields[_STAT_STATE]


def parent_of(pid: int) -> int | None:
    """Return the parent pid of ``pid``, or None when no such process exists."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_STAT_PPID])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process (``pid``, start time ``started``) runs. A zombie does not."""
    fields = _stat(pid)
    return fields is not None and int(fields[_STAT_START]) == started and fields[_STAT_STATE] not in "ZX"


def catches(pid: int, signum: int) -> bool:
    """Tell whether ``pid`` has a handler for ``signum``: without one, most signals end a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def children_of(pid: int) -> list[int]:
    """Return the direct children of ``pid`` (of all its threads), zombies included."""
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return []
        raise
    for thread in threads:
        try:
            text = (thread / "children").read_text(encoding="ascii")
        except OSError:  # the thread ended, or the kernel has no such file
            continue
        found.extend(int(word) for word in text.split())
    return found


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, so that their exit statuses arrive here."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, *, signum: int = signal.SIGKILL, timeout_s: float = 5.0) -> bool:
    """Have the kernel send ``signum`` to this process when ``parent`` ends. Call it on the main thread.

    Waits until this process is a child of ``parent`` (a double fork reparents it a moment later).

    Returns:
        False when ``parent`` is gone already: the caller must exit now.
    """
    deadline = time.monotonic() + timeout_s
    while os.getppid() != parent:
        if os.getppid() == 1 or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    # The parent may have died between the check and the call; then no signal will ever come.
    return os.getppid() == parent


def set_name(name: str) -> None:
    """Set the name that ``top`` and ``ps -o comm`` show for this process (15 bytes are kept)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def describe_exit(exit_code: int | None, signum: int | None) -> str:
    """Say in words how a process ended: ``exited with code 7``, ``killed by SIGKILL``."""
    if signum is not None:
        try:
            return f"killed by {signal.Signals(signum).name}"
        except ValueError:
            return f"killed by signal {signum}"
    if exit_code is None:
        return "ended, exit status unknown"
    return f"exited with code {exit_code}"


class ProcessHandle:
    """A live process held by a pidfd: signals reach it or nobody. Close it when done; any thread may use it.

    Attributes:
        pid: Process id.
        started: Start time in clock ticks since boot.
    """

    __slots__ = ("_fd", "pid", "started")

    def __init__(self, pid: int, fd: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self._fd = fd

    @classmethod
    def open(cls, pid: int, started: int | None = None) -> ProcessHandle | None:
        """Hold process ``pid``, or return None when it is gone or, with ``started``, is another process by now."""
        if pid <= 0:
            return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        found = start_time(pid)
        if found is None or (started is not None and found != started):
            os.close(fd)
            return None
        return cls(pid, fd, found)

    def fileno(self) -> int:
        """Return the pidfd, readable once the process has ended (for pollers)."""
        return self._fd

    def signal(self, signum: int) -> bool:
        """Send ``signum``; return False when the process is gone."""
        if self._fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._fd, signum)
        except ProcessLookupError:
            return False
        return True

    def ended(self) -> bool:
        """Tell whether the process has ended (reaped or not)."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait up to ``timeout_s`` seconds (None: without end) for the process to end; tell whether it did."""
        if self._fd < 0:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))

    def close(self) -> None:
        """Let go of the process; it is left as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
