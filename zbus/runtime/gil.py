"""Whether native code holds the interpreter (GIL) of a worker, seen from outside; and the signal for that case.

Only then may a signal be sent whose handler reads Python frames without the GIL: in a thread that runs Python code the
handler may find a frame half made, and the process dies of it. Nothing runs in the worker for this: the kernel's own
accounts tell. A thread that waits for the GIL wakes every 5 ms (``sys.getswitchinterval``), asks for it and waits on,
and each wait is a voluntary context switch; Python code that is asked gives it up at once. So a worker was asked
something, one of the threads that could answer has waited many times in a row, and no answer has come: then no Python
code runs. Which thread waits for the GIL depends on when it was taken: others may wait for a lock of that one.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from pathlib import Path
from typing import Final

from zbus.runtime.processes import ProcessHandle, catches, state_of

__all__ = ["DumpSignal", "GilWatch", "name_thread"]

_PREFIX: Final = "zbus-"
"""Begins the names, for the kernel, of the threads of a worker that answer, or may be in the way of an answer."""

_WAITS: Final = 30
"""So often a thread has waited, 150 ms at least. An answer takes some six turns with the GIL, and in a worker of four
threads that all run Python code each turn comes after four waits at most."""

_LEAST_S: Final = 0.004
"""Waits that are shorter on average are none for the GIL: the thread is at work."""

_MOST_NAME: Final = 15
_SWITCHES: Final = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


def name_thread(name: str, thread: int | None = None) -> None:
    """Give a thread of this process the name ``zbus-<name>`` by which others find it, and ``top -H`` shows it.

    Args:
        name: What it does; shortened to what the kernel keeps.
        thread: Its native id; None for the calling one.
    """
    task = threading.get_native_id() if thread is None else thread
    with contextlib.suppress(OSError):  # without it there is no dump by signal
        Path(f"/proc/self/task/{task}/comm").write_bytes(f"{_PREFIX}{name}".encode()[:_MOST_NAME])


class GilWatch:
    """Watches who waits for the GIL in process ``pid``, from now on. Any one thread.

    What remains: the native code may return in the some 50 microseconds between a look and the signal, and the signal
    then hit one of the few instructions that make or drop a frame; and a worker whose answers are lost or held up
    elsewhere, while one of its threads sleeps for five milliseconds or so again and again, is taken for held.

    Args:
        pid: The process, as numbered here. It has been asked something over ``ctl``, or is about to be.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.monotonic()
        self._before = {task: switches for task in _find(pid) if (switches := _switches(task)) is not None}

    def held(self) -> bool:
        """Tell whether native code holds the GIL; ask only while the worker has not answered.

        A process that is stopped, waits for a device or is gone is not held: what a signal finds there, once it goes
        on, nobody knows. Nor is one of which this kernel does not tell.
        """
        if state_of(self._pid) not in ("R", "S"):
            return False
        most = (time.monotonic() - self._since) / _LEAST_S
        waits = (now - before for task, before in self._before.items() if (now := _switches(task)) is not None)
        return any(_WAITS <= count <= most for count in waits)


def _find(pid: int) -> list[Path]:
    """Return the threads of a process that bear our names.

    Not the main thread, which waits for the GIL whenever other threads of the engine run Python code.
    """
    found = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has
                if (task / "comm").read_bytes().startswith(_PREFIX.encode()):
                    found.append(task)
    return found


def _switches(task: Path) -> int | None:
    """Return how often a thread has given up its CPU of its own accord; None where it is gone, or that is not told."""
    try:
        text = (task / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = _SWITCHES.search(text)
    return None if found is None else int(found[1])


class DumpSignal:
    """The signal that has a worker write its stack, sent once, and only while native code holds its GIL. One thread.

    Args:
        handle: The worker, watched from now on; closed by ``close``.
    """

    def __init__(self, handle: ProcessHandle) -> None:
        self._handle = handle
        self._watch = GilWatch(handle.pid)
        self._sent = False

    @classmethod
    def open(cls, pid: int, started: int | None = None) -> DumpSignal | None:
        """Watch process ``pid`` (start time ``started``) from now on; None where it is gone, or is another by now."""
        handle = ProcessHandle.open(pid, started)
        return None if handle is None else cls(handle)

    def send(self) -> bool:
        """Send the signal if the worker is armed for it and its GIL is held now; tell whether it has been sent."""
        if not self._sent and catches(self._handle.pid, signal.SIGUSR2) and self._watch.held():
            self._sent = self._handle.signal(signal.SIGUSR2)
        return self._sent

    def close(self) -> None:
        """Let go of the process."""
        self._handle.close()
