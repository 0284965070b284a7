"""A poll loop on the main thread: descriptors, signals, posts of other threads, and one deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

__all__ = ["PollLoop"]


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class PollLoop:
    """Waits for many things at once. Main thread only, but for ``post``.

    Args:
        on_signal: Takes each signal that arrived, on the loop, never inside other code.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._selector = selectors.DefaultSelector()
        self._posts: deque[Callable[[], None]] = deque()
        self._signals: deque[int] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._awake)

    def watch(self, source: _HasFileno | int, job: Callable[[], None]) -> None:
        """Call ``job`` whenever ``source`` is readable."""
        self._selector.register(source, selectors.EVENT_READ, job)

    def unwatch(self, source: _HasFileno | int) -> None:
        """Stop watching ``source``, which must be open still."""
        self._selector.unregister(source)

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the loop. Any thread; dropped once the loop is closed."""
        self._posts.append(job)
        if not self._closed:
            with contextlib.suppress(OSError):  # closed meanwhile
                os.eventfd_write(self._wake_fd, 1)

    @contextlib.contextmanager
    def signals(self, wanted: Sequence[signal.Signals]) -> Iterator[None]:
        """Have ``wanted`` signals wake the loop, inside the block; close the loop after it.

        From then on this process is about to end, so a late request to end is ignored, not obeyed half-way.
        """
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)  # noqa: FBT003  # its only parameter
        for signum in wanted:
            signal.signal(signum, self._note_signal)
        # A handler alone does not end a wait: the wait is resumed (PEP 475). The descriptor does.
        old_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.watch(reader, lambda: _drain(reader))
        try:
            yield
        finally:
            for signum in wanted:
                signal.signal(signum, signal.SIG_DFL if signum == signal.SIGCHLD else signal.SIG_IGN)
            signal.set_wakeup_fd(old_wakeup)
            self._closed = True
            self._selector.close()
            reader.close()
            writer.close()
            os.close(self._wake_fd)

    def once(self, timeout_s: float, going_on: Callable[[], bool]) -> None:
        """Wait up to ``timeout_s`` seconds, then do what is due, as long as ``going_on`` says so."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if not going_on():
                return
            cast("Callable[[], None]", key.data)()
        while self._signals and going_on():
            self._on_signal(self._signals.popleft())
        while self._posts and going_on():
            self._posts.popleft()()

    def _awake(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _note_signal(self, signum: int, _frame: Any) -> None:
        self._signals.append(signum)


def _drain(reader: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while reader.recv(4096):
            pass
