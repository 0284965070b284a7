"""One event loop in a thread of its own, asked from any thread or any other loop.

``run`` blocks a thread, ``aio`` awaits on the caller's loop; nothing is ever run by ``asyncio.run`` inside a running
loop. What an operation hands over reaches its caller or, if that has gone meanwhile, is undone: nothing gets lost
between the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from zbus.errors import ConfigError

__all__ = ["OwnLoop"]

_GRACE_S: Final = 1.0
"""How long what was cancelled has to end when the loop is closed."""

_CLOSE_S: Final = 15.0
"""How long closing may take as a whole; what is cancelled in order has 5 s and then twice the grace."""

_FRAMES: Final = 3

log = logging.getLogger("zbus.rollout")

T = TypeVar("T")


class OwnLoop:
    """The loop; its thread starts with the first operation. Methods may be called from any thread.

    Args:
        name: Of the thread, and in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._open: set[Future[Any]] = set()  # operations whose callers wait

    def run(self, operation: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Run an operation on the loop and block until it has ended; an interrupt of this thread ends it.

        Args:
            operation: What to run.
            undo: Takes back, on the loop, a result whose caller has gone.

        Raises:
            ConfigError: Called on the loop's own thread, which would wait for itself; or the loop is closed.
        """
        if threading.current_thread() is self._thread:
            operation.close()
            msg = f"{self._name}: a blocking call inside a workflow would wait for itself"
            raise ConfigError(msg, hint="await the method's .aio twin there")
        future = self._begin(operation, undo)
        try:
            future.exception()
        except BaseException:  # of this thread, such as Ctrl-C; an error of the operation is not raised here
            self._give_up(future, undo)
            raise
        return future.result()

    async def aio(self, operation: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Run an operation on the loop and await it on the caller's; cancelling the await ends it."""
        future = self._begin(operation, undo)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._give_up(future, undo)
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], limit_s: float = _CLOSE_S) -> None:
        """Run ``last``, end what still runs, stop the thread. Idempotent; not from the loop's own thread.

        Args:
            last: What ends in order what runs.
            limit_s: Seconds until the thread is left behind: something on the loop blocks it, and is named in the log.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            loop, thread = self._loop, self._thread
        if closed or loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(_wind_up(last), loop)
        if not wait([ending], limit_s).done:
            log.error("%s does not end within %g s and is left behind: %s", self._name, limit_s, _place_of(thread))
            self._tell_those_who_wait()
            ending.add_done_callback(lambda _: loop.stop())  # it ends in order once nothing blocks it any more
            return
        ending.result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tell_those_who_wait(self) -> None:
        with self._lock:
            open_ = list(self._open)
        for future in open_:
            if future.set_running_or_notify_cancel():
                future.set_exception(_destroyed())

    def _begin(self, operation: Coroutine[Any, Any, T], undo: Callable[[T], object] | None) -> Future[T]:
        future: Future[T] = Future()

        def start() -> None:
            task = loop.create_task(operation)
            task.add_done_callback(partial(_hand_over, future, undo))
            future.add_done_callback(lambda one: one.cancelled() and loop.call_soon_threadsafe(task.cancel))

        try:
            with self._lock:  # it is begun before `close` looks for what still runs, or refused
                loop = self._running()
                self._open.add(future)
                loop.call_soon_threadsafe(start)
        except BaseException:
            operation.close()
            raise
        future.add_done_callback(self._open.discard)
        return future

    def _give_up(self, future: Future[T], undo: Callable[[T], object] | None) -> None:
        """The caller has gone: end the operation, or undo what it has just handed over."""
        if future.cancel() or undo is None:
            return
        future.exception()  # it is being set at this moment
        loop = self._loop
        if future.exception() is None and loop is not None and not self._closed:
            loop.call_soon_threadsafe(undo, future.result())

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop, begun if it was not; the lock is held."""
        if self._closed:
            msg = f"{self._name} was destroyed"
            raise ConfigError(msg, hint="make a new one")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _hand_over(future: Future[T], undo: Callable[[T], object] | None, task: asyncio.Task[T]) -> None:
    """Give what an operation came to to its caller; after this moment, no cancel is possible. On the loop."""
    error = None if task.cancelled() else task.exception()
    if future.done() and not future.cancelled():  # it was told that the loop is left behind
        return
    if not future.set_running_or_notify_cancel():
        if undo is not None and error is None and not task.cancelled():
            undo(task.result())
    elif task.cancelled():
        future.set_exception(_destroyed())
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _destroyed() -> ConfigError:
    return ConfigError("the rollout controller was destroyed meanwhile", hint="make a new one")


def _place_of(thread: threading.Thread) -> str:
    """Say what blocks a thread: the innermost frames of it, the outermost first."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # there is no public way to look at a thread
    places = [] if frame is None else traceback.extract_stack(frame)[-_FRAMES:]
    blocked = " > ".join(f"{place.filename}:{place.lineno} in {place.name}" for place in places)
    return blocked or "its thread is at no line of Python"


async def _wind_up(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await last()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:  # but one that goes on though it was cancelled would be waited for for ever
        await asyncio.wait(others, timeout=_GRACE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            await asyncio.get_running_loop().shutdown_asyncgens()
