"""Who waits, drives: readiness of many sockets under one mutex, without a thread hop in the common case.

A zmq socket is readable when its event descriptor says so *and* asking it confirms; every send may swallow that signal
(the descriptor is edge-triggered in effect), so whoever sends asks again afterwards. The reactor therefore never polls
zmq sockets: it polls descriptors with epoll, outside the mutex, and touches sockets only under ``lock``.

Leadership: exactly one thread polls at a time. A caller that waits for an answer takes the lead (``drive``), so that
the answer arrives on its own thread; others that wait follow, and are told after each round. A background thread leads
when nobody waits, so that acknowledgements and liveness go on while the program computes. It steps back when a caller
wants to lead and returns ``IDLE_GRACE_S`` after the last one left: a tight loop of calls never changes threads. An
asyncio loop watches ``fileno()`` itself (``attach_loop``).

Measured against the alternatives in ``docs/decisions/0003-who-drives-the-sockets.md``.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.transport.interrupts import gate

if TYPE_CHECKING:  # importing it costs an agent a sixth of its start
    import asyncio

__all__ = ["Reactor"]

IDLE_GRACE_S: Final = 0.002
"""How long after the last waiting caller the background thread takes the lead again."""

_ENDLESS: Final = float("inf")
_LOOP_GRACE_S: Final = 0.02
_MAX_SLEEP_S: Final = 30.0
_NEVER: Final = 1 << 62
_YIELD_S: Final = 0.001
"""How long an asyncio loop leaves what is ready to the thread that leads before it looks again."""


class Reactor:
    """Descriptors, timers and one mutex; see the module docstring. All methods may be called from any thread.

    Args:
        clock: Source of monotonic time for timers.
        lock: The mutex under which every callback runs and every socket is touched; shared with other reactors of
            the same process where one core serves several sockets.
        name: Thread name of the background thread.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, lock: threading.RLock | None = None, name: str = "zbus") -> None:
        self.clock = clock
        self.lock = lock if lock is not None else threading.RLock()
        self._name = name
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._tickers: list[Callable[[int], int]] = []
        self._next_due = _NEVER
        self._sleep_until = 0
        self._leadership = threading.Lock()
        self._progress = threading.Condition(threading.Lock())
        self._followers = 0
        self._wanted = 0
        self._owner: int | None = None
        self._os_thread: threading.Thread | None = None
        self._thread_leads = False
        self._last_led = 0.0
        self._again: list[int] = []
        self._to_check: dict[int, Callable[[], bool]] = {}
        self._now = clock.monotonic_ns
        self.round_ns = 0  # since when a round does what is ready; 0 between rounds
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._readers: set[asyncio.AbstractEventLoop] = set()
        self._closed = False

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` under the lock whenever ``fd`` is readable."""
        with self.lock:
            self._epoll.register(fd, select.EPOLLIN)  # first: where there is no room for it, nothing is registered
            self._callbacks[fd] = callback

    def unregister(self, fd: int) -> None:
        """Forget ``fd``. Call before it is closed."""
        with self.lock:
            self._to_check.pop(fd, None)
            if self._callbacks.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def add_ticker(self, ticker: Callable[[int], int]) -> None:
        """Call ``ticker(now_ns)`` under the lock when due; it returns the monotonic ns of its next need."""
        with self.lock:
            self._tickers.append(ticker)
            self._next_due = 0
        self.wake()

    def remove_ticker(self, ticker: Callable[[int], int]) -> None:
        """Stop calling ``ticker``."""
        with self.lock:
            if ticker in self._tickers:
                self._tickers.remove(ticker)

    def note_due(self, due_ns: int) -> None:
        """Tell that a ticker needs the time ``due_ns`` now; wakes a leader that would sleep past it. Under the lock."""
        if due_ns < self._next_due:
            self._next_due = due_ns
            if due_ns < self._sleep_until:
                self.wake()

    def wake(self) -> None:
        """Make the leader return from its poll. Does nothing once closed: the descriptor's number may be another's."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def call_again(self, fd: int) -> None:
        """Call back ``fd`` in the next round: its burst was cut, and its descriptor may be silent. Under the lock."""
        self._again.append(fd)
        self.wake()

    def check_later(self, fd: int, check: Callable[[], bool]) -> None:
        """Call ``check`` before the next poll: ``fd`` may be silent about what is there. Under the lock.

        It takes what is there and returns whether there was anything. So whoever leads need not look again before it
        hands on what it has taken: its next round, or the next leader's first, begins with the look.
        """
        self._to_check[fd] = check

    def look_soon(self, key: int, check: Callable[[], bool]) -> None:
        """As ``check_later``, where nobody can tell when the next round begins: whoever else leads begins one now.

        Args:
            key: Stands for the descriptor; below 0.
            check: See ``check_later``.
        """
        self._to_check[key] = check
        if self._thread_leads or self._loops or self._owner not in (None, threading.get_ident()):
            self.wake()

    def checked(self, fd: int) -> None:
        """Undo ``check_later``: somebody has looked since. Under the lock."""
        self._to_check.pop(fd, None)

    # -- driving -------------------------------------------------------------------------------------------------

    def drive(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Drive, or follow who drives, until ``done()``; True if it is, False when the time ran out first.

        ``done`` is called without the lock, often; it must be cheap. A signal handler may raise out of here; nothing
        is lost then.
        """
        if done():
            return True
        deadline = _ENDLESS if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        try:
            while True:
                remaining = _MAX_SLEEP_S if deadline == _ENDLESS else deadline - time.monotonic()
                if remaining <= 0 or self._closed:
                    return done()
                if self._owner == me or self._lead(me):
                    if done():  # it came while another thread led
                        return True
                    self.once(remaining)
                else:
                    self._follow(done, min(remaining, 0.05))
                if done():
                    return True
        finally:
            if self._owner == me:
                # No call ends between these two, and signal handlers run where calls end: they are one step.
                self._owner = None
                self._leadership.release()
                self._last_led = time.monotonic()
                if self._followers:
                    self._tell_followers()

    def poll_nowait(self) -> bool:
        """Do what is ready now, unless another thread leads (it will); tell whether this one did."""
        with gate:
            if not self._leadership.acquire(blocking=False):
                return False
            try:
                self.once(0.0)
                while self._to_check and self._look():  # the loop polls for itself, and may not do so again for long
                    pass
            finally:
                self._leadership.release()
            if self._followers:  # else this would wake the background thread, which fights for the GIL at every call
                self._tell_followers()
        return True

    def fileno(self) -> int:
        """Return a descriptor that is readable when something is ready."""
        return self._epoll.fileno()

    def attach_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let an asyncio loop drive while it has calls out. Call on that loop; pair with ``detach_loop``."""
        count = self._loops.get(loop, 0)
        self._loops[loop] = count + 1
        if count == 0:
            if loop not in self._readers:
                self._readers = {other for other in self._readers if not other.is_closed()} | {loop}
                loop.add_reader(self._epoll.fileno(), self._poll_from, loop)
            if self._thread_leads:  # it looks for loops before each round, so one that starts now needs no waking
                self.wake()

    def detach_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo one ``attach_loop``. Call on that loop."""
        count = self._loops.get(loop, 0) - 1
        if count > 0:
            self._loops[loop] = count
            return
        self._loops.pop(loop, None)
        self._last_led = time.monotonic()

    def _poll_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drive from a loop; its reader outlives its calls until the next event, since awaited calls follow closely."""
        if loop in self._loops:
            if not self.poll_nowait():  # until the other thread gets there, the descriptor would call again and again
                loop.remove_reader(self._epoll.fileno())
                loop.call_later(_YIELD_S, self._read_again, loop)
        elif not self._closed:
            self._readers.discard(loop)
            loop.remove_reader(self._epoll.fileno())

    def _read_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have a loop drive that had left it to another thread."""
        if not self._closed and loop in self._readers:
            loop.add_reader(self._epoll.fileno(), self._poll_from, loop)

    def once(self, timeout_s: float) -> None:
        """One round: wait at most ``timeout_s``, then do what is ready and due. The leader calls it."""
        if self._to_check and self._look():
            timeout_s = 0.0
        now = self._now()
        limit_ns = self._next_due - now
        if limit_ns < timeout_s * 1e9:
            timeout_s = max(0.0, limit_ns / 1e9)
        self._sleep_until = now + int(timeout_s * 1e9)
        events = self._epoll.poll(timeout_s)
        self._sleep_until = 0
        self.round_ns = self._now()
        try:
            with gate, self.lock:
                if self._again:
                    events, self._again = [*events, *((fd, 1) for fd in self._again)], []
                for fd, _ in events:
                    callback = self._callbacks.get(fd)
                    if callback is not None:
                        callback()
                    elif fd == self._wake_fd:
                        self._drain_wake()
                now = self._now()
                if now >= self._next_due:
                    self.tick(now)
        finally:
            self.round_ns = 0
        if self._followers:
            self._tell_followers()

    def _look(self) -> bool:
        """Run the checks that are due; True if one took something."""
        with gate, self.lock:
            checks, self._to_check = self._to_check, {}
            took = False
            for check in checks.values():
                took = check() or took
        return took

    def tick(self, now: int) -> None:
        """Run the tickers. Under the lock."""
        self._next_due = _NEVER
        due = min((ticker(now) for ticker in list(self._tickers)), default=_NEVER)
        self._next_due = min(self._next_due, due)

    def round_since(self) -> tuple[int, int] | None:
        """Return since when (monotonic ns) a round does what is ready, and on which thread; None between rounds."""
        since = self.round_ns
        thread = self._owner or (None if self._os_thread is None else self._os_thread.ident)
        return (since, thread) if since and thread else None

    # -- the background thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that leads when nobody waits. Idempotent."""
        if self._os_thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._os_thread = thread  # only one that runs can be waited for

    def close(self) -> None:
        """Stop the thread and free the descriptors. Sockets are their owners' to close, before this. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake_fd, 1)
        for loop in list(self._readers):
            if loop.is_closed():
                continue
            if loop is _running_loop():  # now, before the number of the descriptor means something else
                loop.remove_reader(self._epoll.fileno())
            else:
                loop.call_soon_threadsafe(loop.remove_reader, self._epoll.fileno())
        self._readers = set()
        self._loops.clear()
        if self._os_thread is not None and self._os_thread is not threading.current_thread():
            self._os_thread.join(5.0)
        with self._leadership:  # whoever polls has been woken by now
            self._epoll.close()
            os.close(self._wake_fd)
        self._tell_followers()

    def _run(self) -> None:
        while not self._closed:
            if self._callers_lead():
                with self._progress:
                    self._progress.wait(_LOOP_GRACE_S if self._loops else IDLE_GRACE_S)
                if self._loops:
                    self.poll_nowait()
                continue
            if not self._leadership.acquire(timeout=IDLE_GRACE_S):
                continue
            self._thread_leads = True
            try:
                while not self._callers_lead():
                    self.once(_MAX_SLEEP_S)
            finally:
                self._thread_leads = False
                self._leadership.release()

    def _callers_lead(self) -> bool:
        if self._closed or self._wanted or self._owner is not None or self._loops:
            return True
        return time.monotonic() - self._last_led < IDLE_GRACE_S

    def _lead(self, me: int) -> bool:
        """Try to become the leader; takes it from the background thread, never from another caller."""
        with gate:
            if self._leadership.acquire(blocking=False):
                self._owner = me
                return True
            if not self._thread_leads:
                return False
            self._wanted += 1
            try:
                self.wake()
                if self._leadership.acquire(timeout=0.05):
                    self._owner = me
                    return True
                return False
            finally:
                self._wanted -= 1

    def _follow(self, done: Callable[[], bool], timeout_s: float) -> None:
        with self._progress:
            self._followers += 1
            try:
                if not done():
                    self._progress.wait(timeout_s)
            finally:
                self._followers -= 1

    def _tell_followers(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs on this thread, without loading asyncio for it."""
    module = sys.modules.get("asyncio")
    if module is None:
        return None
    found: asyncio.AbstractEventLoop | None = module._get_running_loop()  # documented for such uses  # noqa: SLF001
    return found
