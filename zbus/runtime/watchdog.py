"""Notices handlers that take too long on threads that must never wait: who, for how long, and where it stands.

A handler that blocks on a bus thread stops admission, acknowledgements and ``ctl`` without a word; so somebody else
looks. What is seen at two looks running is told, with its stack. A look that came late itself proves nothing: then the
process was stopped, or one call held the GIL, and every handler waited.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from zbus.clock import SYSTEM_CLOCK, Clock

__all__ = ["LOOK_S", "Handler", "SlowHandler", "Watchdog"]

log = logging.getLogger("zbus.watchdog")

LOOK_S: Final = 0.25
"""Time between two looks: a handler that takes twice as long is surely told."""

_FRAMES: Final = 12
_KEPT: Final = 16


class Handler(NamedTuple):
    """A handler that runs: its name, when it began (monotonic ns), and its thread."""

    name: str
    began_ns: int
    thread: int


class SlowHandler(NamedTuple):
    """One that took too long: its name, how long it ran when it was seen, and its stack, innermost frame first."""

    name: str
    seconds: float
    stack: tuple[str, ...]


class Watchdog:
    """Looks at handlers. ``look`` belongs to one thread, which ``start`` makes; the rest may be called from any.

    Args:
        look_s: Time between two looks, in seconds.

    Attributes:
        count: How many handlers were told of.
        slow: The last of them.
    """

    def __init__(self, *, look_s: float = LOOK_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._look_s = look_s
        self._now = clock.monotonic_ns
        self._sources: list[Callable[[], Iterable[Handler]]] = []
        self._seen: set[Handler] = set()
        self._told: set[Handler] = set()
        self._looked_ns = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.count = 0
        self.slow: deque[SlowHandler] = deque(maxlen=_KEPT)

    def watch(self, source: Callable[[], Iterable[Handler]]) -> None:
        """Look at what ``source`` returns: the handlers that run now. It is called on the looking thread."""
        self._sources.append(source)

    def start(self) -> None:
        """Look from a thread of its own until ``close``."""
        thread = threading.Thread(target=self._run, name="zbus-watchdog", daemon=True)
        thread.start()
        self._thread = thread  # only one that runs can be waited for

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def look(self) -> None:
        """Tell of each handler that ran at the last look already; once. Looks that come too soon do nothing."""
        now = self._now()
        if now - self._looked_ns < 0.5e9 * self._look_s:
            return
        late = now - self._looked_ns > 2e9 * self._look_s
        self._looked_ns = now
        running = {handler for source in self._sources for handler in source()}
        for handler in self._told - running:
            log.warning("%s has ended, after less than %.1f s", handler.name, (now - handler.began_ns) / 1e9)
        if not late:
            for handler in (running & self._seen) - self._told:
                self._tell(handler, now)
        self._told &= running
        if not late:
            self._told |= running & self._seen
        self._seen = running

    def facts(self) -> dict[str, Any]:
        """Return what was seen, for ``zbus.status``: ``count``, and the last ones with name, seconds and stack."""
        return {"count": self.count, "last": [{**one._asdict(), "stack": list(one.stack)} for one in self.slow]}

    def _tell(self, handler: Handler, now: int) -> None:
        frame = sys._current_frames().get(handler.thread)  # documented for such uses  # noqa: SLF001
        found = [] if frame is None else traceback.extract_stack(frame, limit=_FRAMES)
        stack = tuple(f"{one.filename}:{one.lineno} in {one.name}" for one in reversed(found))
        seconds = (now - handler.began_ns) / 1e9
        self.count += 1
        self.slow.append(SlowHandler(handler.name, seconds, stack))
        where = "".join(f"\n  {line}" for line in stack)
        log.warning("%s has run for %.1f s on a thread that must not wait:%s", handler.name, seconds, where)

    def _run(self) -> None:
        while not self._over.wait(self._look_s):
            self.look()
