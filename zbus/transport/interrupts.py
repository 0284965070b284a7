"""The signal gate: no Python signal handler runs between two frames of one message.

Python runs signal handlers on the main thread, between bytecodes and inside pyzmq calls. A handler that raises there
(Ctrl-C does) would leave half a message in a socket, and the next message would be glued onto it. So every multipart
send or receive runs inside ``with gate:``. Handlers that fall due there are kept and run, in order, when the outermost
section ends; their exceptions leave the ``with`` statement after the message is whole.
"""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal as _installed  # type: ignore[import-not-found]  # 0.03 µs; signal.getsignal is 20 times that
from collections.abc import Callable
from functools import partial
from itertools import starmap
from operator import call
from threading import get_ident
from types import FrameType
from typing import Any, Final

__all__ = ["GATED_SIGNALS", "SignalGate", "gate"]

GATED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals whose Python handlers the gate defers."""

_NUMBERS: Final = tuple(int(number) for number in GATED_SIGNALS)

_Handler = Callable[[int, FrameType | None], Any]


class _Deferring:
    """A handler that runs the program's own one at once, or keeps it while the gate is closed."""

    __slots__ = ("gate", "handler")

    def __init__(self, owner: SignalGate, handler: _Handler) -> None:
        self.gate = owner
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.gate._arrived(self.handler, number, frame)  # noqa: SLF001  # one mechanism in two classes


class SignalGate:
    """Defers Python signal handlers on the main thread; does nothing on any other thread.

    The first entry replaces each installed Python handler of ``GATED_SIGNALS`` by a wrapper; a handler that the
    program installs later is wrapped at the next entry. ``release`` puts the program's own back. Signals belong to the
    process, so use the one instance ``gate``. As with signals themselves, several of one number that fall due in one
    section become one.
    """

    __slots__ = ("_depth", "_main", "_pending", "_seen")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._pending: dict[int, tuple[_Handler, int, FrameType | None]] = {}
        self._seen: list[Any] = []  # what was last seen installed, in the order of the signals

    def __enter__(self) -> None:
        """Begin a section. Any thread may call; sections nest."""
        if get_ident() == self._main:
            if self._depth == 0 and list(map(_installed, _NUMBERS)) != self._seen:
                self._seen = list(map(self._wrap, _NUMBERS))
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        """End a section; at the outermost end run what fell due, letting a handler's exception out."""
        if get_ident() == self._main:
            self._depth -= 1
            if self._pending and self._depth == 0:
                self._run_pending()

    @property
    def closed(self) -> bool:
        """Whether the calling thread is the main thread and inside a section."""
        return self._depth > 0 and get_ident() == self._main

    def original(self, number: int) -> Any:
        """Return the handler the program installed for signal ``number``, seen through the wrapper."""
        current = signal.getsignal(number)
        return current.handler if isinstance(current, _Deferring) else current

    def release(self) -> None:
        """Put the program's own handlers back. Main thread only, outside a section; the next entry wraps again."""
        for number in GATED_SIGNALS:
            current = _installed(number)
            if isinstance(current, _Deferring):
                signal.signal(number, current.handler)

    def _wrap(self, number: int) -> Any:
        """Wrap the installed handler if it is a Python one of someone else; return what is installed now."""
        handler = _installed(number)
        if not callable(handler) or isinstance(handler, _Deferring):
            return handler
        wrapper = _Deferring(self, handler)
        signal.signal(number, wrapper)
        return wrapper

    def _arrived(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending[number] = (handler, number, frame)
        elif self._pending:  # a section is just ending: keep the order
            self._pending.setdefault(number, (handler, number, frame))
            self._run_pending()
        else:
            handler(number, frame)

    def _run_pending(self) -> None:
        """Run every kept handler once. One that raises keeps no other from running; the last exception leaves.

        A signal may arrive between any two bytecodes here, and its handler then runs the rest (``_arrived``) or raises.
        So a handler is taken and called in one go in C: none can be taken twice, or taken and then not called.
        """
        waiting = list(self._pending)
        if not waiting:
            return
        take = partial(self._pending.pop, waiting[0], None)
        try:
            next(starmap(call, iter(take, None)), None)
        finally:
            self._run_pending()

    def _after_fork(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._pending.clear()


gate: Final = SignalGate()
"""The gate of this process."""

os.register_at_fork(after_in_child=gate._after_fork)  # noqa: SLF001  # module private: the gate is made here
