"""The agent's I/O thread: registry writes and reads that may hang with the disk, away from the loop that sees exits."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from zbus.errors import RegistryError

__all__ = ["Background"]

log = logging.getLogger("zbus.agent")

_RETRY_S: Final = 1.0
_ATTEMPTS: Final = 30


class Background:
    """One daemon thread that runs jobs in order of their due time, and in submission order where those are equal.

    ``submit``, ``every`` and ``stop`` may be called from any thread. A job that raises ``RegistryError`` is tried
    again every second, 30 times; any other exception goes to ``on_crash``.

    Args:
        on_crash: Called on the I/O thread with an exception nobody expected.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._jobs: list[tuple[float, int, Callable[[], object], int]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="zbus-agent-io", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Callable[[], object], *, delay_s: float = 0.0) -> None:
        """Run ``job`` on the I/O thread, ``delay_s`` seconds from now."""
        self._push(time.monotonic() + delay_s if delay_s else 0.0, job, 0)

    def every(self, job: Callable[[], float | None]) -> None:
        """Run ``job`` again and again; it returns the seconds until it wants to be called next, None to end."""

        def step() -> None:
            pause = job()
            if pause is not None:
                self.submit(step, delay_s=max(pause, 0.001))

        self.submit(step)

    def _push(self, due: float, job: Callable[[], object], attempt: int) -> None:
        with self._changed:
            heapq.heappush(self._jobs, (due, next(self._order), job, attempt))
            self._changed.notify()

    def _next(self) -> tuple[Callable[[], object], int] | None:
        """Wait for a due job; None when the thread shall end: jobs without delay are always done before."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._jobs and self._jobs[0][0] <= now:
                    _, _, job, attempt = heapq.heappop(self._jobs)
                    return job, attempt
                if self._stop_at is not None:
                    return None
                self._changed.wait(self._jobs[0][0] - now if self._jobs else None)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            job, attempt = item
            try:
                job()
            except RegistryError as error:
                if attempt == 0:
                    log.warning("%s; trying again", error)
                if attempt + 1 < _ATTEMPTS and self._stop_at is None:
                    self._push(time.monotonic() + _RETRY_S, job, attempt + 1)
                else:
                    log.error("given up: %s", error)  # noqa: TRY400  # the sentence says it all; no traceback
            except BaseException as error:  # noqa: BLE001  # the agent must hear of it, whatever it is
                self._on_crash(error)

    def stop(self, timeout_s: float) -> bool:
        """Finish what is due, then end the thread; return whether it ended within ``timeout_s`` seconds."""
        with self._changed:
            self._stop_at = time.monotonic()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
