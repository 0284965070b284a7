"""The stacks of a worker: told by its own word, or written by a signal while native code holds its interpreter.

Whoever asks for them asks over ``ctl`` first. The frames are then read under the GIL, when none of them changes, and
that can be done at any time. The signal is for a worker that cannot answer, because native code holds the GIL: its
handler is C code that reads frames without the GIL, and one that hits a thread in the middle of a call or a return
reads a half-made frame and ends the process with SIGSEGV (measured: one in 900 signals to a process that does nothing
but call Python functions). See ``zbus.runtime.gil`` for when the signal may be sent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = ["StackFile", "describe_threads"]

_MOST_BYTES: Final = 8 << 20
"""A file of stacks grows to this: some thousand dumps."""

_MOST_FRAMES: Final = 100
_MOST_THREADS: Final = 100
"""Both as faulthandler has them."""


class StackFile:
    """The file of one start of one rank: its own dumps, and those that SIGUSR2 makes, in one format.

    Args:
        path: ``stacks/<role>.<rank>.<start>.txt`` of the trial directory.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def arm(self) -> None:
        """Have SIGUSR2 append a stack, by a C handler that needs no GIL. Main thread; once in a process.

        Only of the thread that gets the signal, the main thread as a rule: it stands still while its own handler runs,
        the others may not. The handler is chained to an ignored signal, because only then does it put ``errno`` back:
        libzmq asserts what it finds there after a system call, and a dump in between ended the process.
        """
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR2, file=self._fd, all_threads=False, chain=True)

    def dump(self) -> dict[str, Any]:
        """Return the stacks of all threads but the calling one, and append them to the file. Any thread.

        Returns:
            ``text``, as faulthandler writes it, the main thread last; ``saved``, whether the file has it too: not once
            it is full, nor where the disk is.
        """
        text = "\n\n".join(map("\n".join, _threads())) + "\n"
        data = text.encode(errors="backslashreplace")  # file names are bytes, and need not be text
        return {"text": data.decode(), "saved": self._append(b"\n" + data)}

    def _append(self, data: bytes) -> bool:
        try:
            # One write, so that dumps of several threads do not mix.
            return os.fstat(self._fd).st_size < _MOST_BYTES and os.write(self._fd, data) == len(data)
        except OSError:
            return False


def _threads() -> Iterator[list[str]]:
    frames = sys._current_frames()  # documented for such uses  # noqa: SLF001
    frames.pop(threading.get_ident(), None)
    for ident, frame in list(frames.items())[-_MOST_THREADS:]:
        yield [f"Thread 0x{ident:016x} (most recent call first):", *_lines(frame)]


def _lines(frame: FrameType | None) -> Iterator[str]:
    # Not ``traceback``: it reads the source files, and those may be on a disk that does not answer.
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        frame = frame.f_back
    yield "  ..."


def describe_threads() -> str:
    """Return the stacks of all threads with their names and source lines, as tracebacks are printed. Any thread."""
    import traceback

    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {threads.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # as above  # noqa: SLF001
    )
