"""Awaitable twins of blocking operations that follow one another: each runs on one thread of its own, in turn."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = ["Turns"]

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Makes twins whose operations never run side by side, whoever awaits them. Any loop may await.

    An operation that has begun goes on though its await is cancelled, and the next one waits for its end: what ranks
    were asked to do together, such as a step, is not torn apart. One that still waits for its turn is not begun then.

    Args:
        name: Of the thread, which starts with the first operation.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, name)

    def twin(
        self, operation: Callable[P, T], context: contextvars.Context | None = None
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return what runs ``operation`` on the thread, in ``context`` or a copy of the caller's, and awaits it."""

        async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
            inside = contextvars.copy_context() if context is None else context
            begin = partial(inside.run, operation, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, begin)

        return awaited

    def begin(self, operation: Callable[[], T], context: contextvars.Context) -> Future[T]:
        """Have ``operation`` run in its turn, in ``context``. What is told of its end runs before the next one."""
        return self._threads.submit(context.run, operation)
