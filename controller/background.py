"""Threads for what must happen when nobody waits: later retries and refilled maps; callbacks of users apart."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Background", "callbacks", "shared"]

_log = logging.getLogger("zbus.controller")


class Background:
    """Runs small jobs in order of their time on a daemon thread that starts with the first. Thread-safe.

    A job that raises is logged and forgotten. Jobs may come out of the garbage collector at any point, also of this
    thread's own steps: what they come through takes no lock and loses none of them.
    """

    def __init__(self, name: str = "zbus-background") -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[tuple[float, int, Callable[[], None]]] = queue.SimpleQueue()
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # the thread's own
        self._numbers = itertools.count()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None

    def call(self, job: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run ``job`` after ``delay_s`` seconds. Quick; may be called under any lock."""
        self._inbox.put((time.monotonic() + delay_s, next(self._numbers), job))
        if self._thread is None:
            with self._starting:
                self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._run_one()

    def _run_one(self) -> None:
        """Run the next job; a function of its own, so that nothing of the job lives on while the next is waited for."""
        job = self._next()
        try:
            job()
        except Exception:  # noqa: BLE001  # one bad job must not end the others
            _log.exception("a background job failed")

    def _next(self) -> Callable[[], None]:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    heapq.heappush(self._jobs, self._inbox.get_nowait())
            now = time.monotonic()
            if self._jobs and self._jobs[0][0] <= now:
                return heapq.heappop(self._jobs)[2]
            with contextlib.suppress(queue.Empty):
                heapq.heappush(self._jobs, self._inbox.get(timeout=self._jobs[0][0] - now if self._jobs else None))


@functools.cache
def shared() -> Background:
    """Return the process's thread for the bus's own jobs; it idles when there is nothing to do."""
    return Background()


@functools.cache
def callbacks() -> Background:
    """Return the process's thread for callbacks of users: a slow one holds up other callbacks, never the bus."""
    return Background("zbus-callbacks")


def _forget() -> None:
    shared.cache_clear()
    callbacks.cache_clear()


os.register_at_fork(after_in_child=_forget)  # a thread does not survive a fork
