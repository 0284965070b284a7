"""A block around a function of any kind: plain, coroutine, generator or async generator.

What ``traced``, ``trace_session`` and ``session_context`` share. The block of a generator lasts from its first step to
its end or close, whatever happens between the steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["wrap"]

Begin = Callable[[], AbstractContextManager[Any]]
Step = Callable[[Any], AbstractContextManager[Any]]


def wrap(function: Any, begin: Begin, step: Step | None = None) -> Any:
    """Return ``function`` with a block around each call.

    Args:
        function: Any function; it keeps its name, and its kind.
        begin: Makes the block.
        step: Makes, from what the block gave, a block around each step of a generator: for what must not be in force
            while the generator stands still, since then its caller's code runs.
    """
    if inspect.isasyncgenfunction(function):
        return _wrap_async_generator(function, begin, step)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*a: Any, **k: Any) -> Any:
            with begin():
                return await function(*a, **k)

        return call_async
    if inspect.isgeneratorfunction(function):
        return _wrap_generator(function, begin, step)

    @functools.wraps(function)
    def call(*a: Any, **k: Any) -> Any:
        with begin():
            return function(*a, **k)

    return call


def _no_step(_entered: Any) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _wrap_generator(function: Any, begin: Begin, step: Step | None) -> Any:
    if step is None:

        @functools.wraps(function)
        def generate(*a: Any, **k: Any) -> Any:
            with begin():
                return (yield from function(*a, **k))

        return generate

    @functools.wraps(function)
    def generate_by_step(*a: Any, **k: Any) -> Any:
        inner = function(*a, **k)
        with begin() as entered:
            try:
                with step(entered):
                    item = next(inner)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        with step(entered):
                            inner.close()
                        raise
                    except BaseException as error:  # noqa: BLE001  # thrown in by the consumer: the inner one decides
                        with step(entered):
                            item = inner.throw(error)
                    else:
                        with step(entered):
                            item = inner.send(sent)
            except StopIteration as stop:
                return stop.value

    return generate_by_step


def _wrap_async_generator(function: Any, begin: Begin, step: Step | None) -> Any:
    step = step or _no_step

    @functools.wraps(function)
    async def generate(*a: Any, **k: Any) -> Any:
        inner = function(*a, **k)
        with begin() as entered:
            try:
                with step(entered):
                    item = await anext(inner)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001  # thrown in by the consumer: the inner one decides
                        with step(entered):
                            item = await inner.athrow(error)
                    else:
                        with step(entered):
                            item = await inner.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                with step(entered):
                    await inner.aclose()

    return generate
