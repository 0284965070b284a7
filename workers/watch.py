"""The processes of an agent: each held by a pidfd, its end seen at once, its status exact, its leftovers ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

import msgspec

from workers.cgroup import MemoryWatch, OomVerdict
from workers.loop import PollLoop
from workers.spec import RankSpec
from zbus.runtime.processes import ProcessHandle, children_of

__all__ = ["Ended", "ProcessTable", "kill_children"]


class Ended(msgspec.Struct, frozen=True):
    """A process that ended, as the kernel told it."""

    spec: RankSpec
    pid: int
    exit_code: int | None
    signum: int | None
    oom: OomVerdict
    started_wall_ns: int


class _Process(msgspec.Struct):
    spec: RankSpec
    handle: ProcessHandle
    memory: MemoryWatch
    started_wall_ns: int
    killed: bool = False


class ProcessTable:
    """The living ranks of an agent. Main thread only.

    Args:
        loop: Watches the pidfds.
        on_exit: Takes each end, once.
    """

    def __init__(self, loop: PollLoop, on_exit: Callable[[Ended], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._processes: dict[int, _Process] = {}

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, spec: RankSpec, pid: int) -> bool:
        """Watch a child; return False if it is gone without a trace (it was no child of ours)."""
        handle = ProcessHandle.open(pid)
        if handle is None:
            return False
        self._processes[spec.rank] = _Process(spec, handle, MemoryWatch(pid), time.time_ns())
        self._loop.watch(handle, lambda: self._ended(spec.rank))
        return True

    def pid(self, rank: int) -> int | None:
        """Return the pid of a living rank. May be called from any thread."""
        process = self._processes.get(rank)
        return None if process is None else process.handle.pid

    def started(self, rank: int) -> int | None:
        """Return when a living rank started, in clock ticks since boot: with its pid, what tells it from any other."""
        process = self._processes.get(rank)
        return None if process is None else process.handle.started

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank, if it lives."""
        process = self._processes.get(rank)
        if process is not None:
            process.killed = process.killed or signum == signal.SIGKILL
            process.handle.signal(signum)

    def refresh(self) -> None:
        """Look again which cgroups the ranks are in."""
        for process in self._processes.values():
            process.memory.refresh()

    def reap_strays(self, known: Iterable[int]) -> None:
        """Reap what ranks left behind and the kernel gave to this subreaper; ``known`` children are left alone."""
        mine = {process.handle.pid for process in self._processes.values()} | set(known)
        for pid in children_of(os.getpid()):
            if pid not in mine:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """Let go of what still runs."""
        for process in self._processes.values():
            process.handle.close()
        self._processes.clear()

    def _ended(self, rank: int) -> None:
        process = self._processes[rank]
        fd = process.handle.fileno()
        status = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return
        exited = status.si_code == os.CLD_EXITED
        exit_code, signum = (status.si_status, None) if exited else (None, status.si_status)
        verdict = process.memory.verdict(signum, by_us=process.killed)
        # The rank is a zombie still, so its pid, and with it the number of its process group, is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.handle.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, fd, os.WEXITED)
        self._loop.unwatch(process.handle)
        process.handle.close()
        del self._processes[rank]
        self._on_exit(Ended(process.spec, process.handle.pid, exit_code, signum, verdict, process.started_wall_ns))


def kill_children(timeout_s: float = 3.0) -> None:
    """Kill and reap every child of this process, also what ranks left in sessions of their own. Bounded."""
    deadline = time.monotonic() + timeout_s
    while (children := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            handle = ProcessHandle.open(pid)
            if handle is not None:
                handle.signal(signal.SIGKILL)
                handle.wait(0.2)
                handle.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
