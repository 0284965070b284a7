"""Ctrl-C and SIGTERM of a run: the first stops in order, the second, or a grace that ran out, stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

from controller.console import Console

__all__ = ["Interrupts", "Terminated"]

_WATCHED: Final = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM arrived. A ``SystemExit``, so that ``except Exception`` in user code does not swallow it."""


class Interrupts:
    """Signal policy of one run; used as a context manager on the main thread.

    While the user's code runs, the first signal raises ``KeyboardInterrupt`` or ``Terminated`` in it. During the
    orderly stop (after ``closing``) a first signal changes nothing, because the stop is under way.

    Args:
        console: Where to say what happens.
        at_once: Called before a forced exit, on the signal's or the timer's thread: must be quick.
        grace_s: Seconds from the first signal to the forced exit.
    """

    def __init__(self, console: Console, at_once: Callable[[int], None], grace_s: float = 5.0) -> None:
        self._console = console
        self._at_once = at_once
        self.grace_s = grace_s
        self.received = 0
        self.first: int | None = None
        self._closing = False
        self._timer: threading.Timer | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in _WATCHED:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._timer is not None:
            self._timer.cancel()

    def closing(self) -> None:
        """From now on signals raise nothing: the orderly stop is under way."""
        self._closing = True

    @property
    def exit_code(self) -> int | None:
        """130 or 143 once a signal has come, else None."""
        return None if self.first is None else 128 + self.first

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received += 1
        if self.received > 1:
            self.force()
        self.first = number
        self._timer = threading.Timer(self.grace_s, self.force)
        self._timer.daemon = True
        self._timer.start()
        name = "interrupted" if number == signal.SIGINT else "terminated"
        os.write(2, f"\n{name}: stopping in order; once more to stop at once\n".encode())
        if self._closing:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(128 + number)

    def force(self) -> None:
        """End this process now; local workers end with it."""
        code = self.exit_code or 1
        try:
            self._at_once(code)
        finally:
            os._exit(code)
