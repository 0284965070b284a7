"""The span API: ``span``, ``traced``, ``instant``, ``counter``, ``flow`` and the founding spellings.

All act on the current tracer (``get_tracer``), may be called from any thread, task or generator, never raise for a
reason of tracing, and do nothing unless the level is ``full``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from zbus.trace import tracer as tracer_module
from zbus.trace.args import freeze_in_place
from zbus.trace.tracer import COUNTER, FLOW, INSTANT, SPAN, Tracer, current_task_name, get_tracer

__all__ = [
    "Span",
    "atrace_scope",
    "counter",
    "flow",
    "instant",
    "span",
    "trace_perf",
    "trace_scope",
    "traced",
]

F = TypeVar("F", bound=Callable[..., Any])

_ASYNCIO: Final = "asyncio.tasks"
_modules = sys.modules
_current = tracer_module._current  # noqa: SLF001  # the hot path reads it where it stands


class Span:
    """A time span, as a context manager for ``with`` and ``async with``; use each instance once.

    An exception that leaves the block is noted as ``args.error`` and goes on.
    """

    __slots__ = ("_args", "_category", "_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer | None, name: str, category: str, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._category = category
        self._args = args

    def set(self, **args: Any) -> None:
        """Add or replace arguments, known only inside the block."""
        if self._tracer is not None:
            self._args.update(args)

    def __enter__(self) -> Self:
        if self._tracer is not None:
            self._start = self._tracer.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracer = self._tracer
        if tracer is None:
            return
        end = tracer.now()
        args = self._args
        if kind is not None:
            args["error"] = kind.__name__
        if args:
            freeze_in_place(args)
        task = current_task_name() if _ASYNCIO in _modules else None
        tracer.append((SPAN, self._name, self._category, self._start, end, args, task))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


_OFF: Final = Span(None, "", "", {})


def span(name: str, /, category: str = "misc", **args: Any) -> Span:
    """Return a context manager that records the time spent inside it.

    Args:
        name: What is done; few distinct names make good statistics, so put numbers into ``args``.
        category: ``compute``, ``comm``, ``io``, ``sync``, ``scheduler``, ``instr``, ``misc`` or any other text.
        **args: Shown with the span; any value is taken (see ``zbus.trace.args``).
    """
    tracer = _current.get() or tracer_module._default  # get_tracer, without the call  # noqa: SLF001
    return Span(tracer, name, category, args) if tracer.on else _OFF


def instant(name: str, /, category: str = "misc", *, scope: str = "t", **args: Any) -> None:
    """Record a moment; ``scope`` is ``t`` (thread), ``p`` (process) or ``g`` (whole trace)."""
    tracer = get_tracer()
    if tracer.on:
        at = tracer.now()
        freeze_in_place(args)
        tracer.append((INSTANT, name, category, at, scope, args, current_task_name()))


def counter(name: str, /, value: float | None = None, **series: float) -> None:
    """Record numbers that change over time: one ``value``, or several named series of one counter."""
    tracer = get_tracer()
    if tracer.on:
        at = tracer.now()
        if value is not None:
            series["value"] = value
        freeze_in_place(series)
        tracer.append((COUNTER, name, at, series))


def flow(key: str, direction: str = "out") -> None:
    """Mark an end of an arrow in the current span: ``out`` where it leaves, ``in`` where it arrives.

    Ends with the same ``key`` are joined, also across processes of one run; a key is used for one arrow.
    """
    tracer = get_tracer()
    if tracer.on:
        tracer.append((FLOW, str(key), direction, tracer.now(), current_task_name()))


@overload
def traced(target: F, /) -> F: ...
@overload
def traced(target: str | None = None, /, category: str = "misc", **args: Any) -> Callable[[F], F]: ...
def traced(target: Any = None, /, category: str = "misc", **args: Any) -> Any:
    """Decorate a function, coroutine, generator or async generator so that each call is a span.

    A generator's span runs from its first step to its end or close, whatever happens between the steps.
    Used as ``@traced``, ``@traced("name")`` or ``@traced(category="io", shard=3)``; the name is the function's
    qualified name by default.
    """
    if callable(target):
        return _wrap(target, target.__qualname__, category, args)

    def decorate(function: Any) -> Any:
        return _wrap(function, target or function.__qualname__, category, args)

    return decorate


def _wrap(function: Any, name: str, category: str, args: Mapping[str, Any]) -> Any:
    if inspect.isasyncgenfunction(function):
        return _wrap_async_generator(function, name, category, args)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*a: Any, **k: Any) -> Any:
            with span(name, category, **args):
                return await function(*a, **k)

        return call_async
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*a: Any, **k: Any) -> Any:
            with span(name, category, **args):
                return (yield from function(*a, **k))

        return generate

    @functools.wraps(function)
    def call(*a: Any, **k: Any) -> Any:
        with span(name, category, **args):
            return function(*a, **k)

    return call


def _wrap_async_generator(function: Any, name: str, category: str, args: Mapping[str, Any]) -> Any:
    @functools.wraps(function)
    async def generate(*a: Any, **k: Any) -> Any:
        inner = function(*a, **k)
        with span(name, category, **args):
            try:
                item = await anext(inner)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001  # thrown in by the consumer: the inner one decides
                        item = await inner.athrow(error)
                    else:
                        item = await inner.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await inner.aclose()

    return generate


# -- founding spellings --------------------------------------------------------------------------------------------


def trace_scope(
    name: str,
    category: str | None = None,
    args: Mapping[str, Any] | None = None,
    *,
    enable_profiler: bool = False,
    profiler_args: Mapping[str, Any] | None = None,
) -> Span:
    """Return ``span(name, category, **args)``; the founding spelling, with args as a mapping.

    Args:
        name: What is done.
        category: As of ``span``; ``misc`` by default.
        args: Shown with the span. ``global_step`` in it holds for the scopes inside.
        enable_profiler: Run torch's profiler in it at the steps listed in ``profile_steps``: one scope at a time in a
            process, others are noted as skipped. Its events are added to the trace.
        profiler_args: For ``torch.profiler.profile``.
    """
    tracer = get_tracer()
    if not tracer.on:
        return _OFF
    values = dict(args or {})
    if tracer.profile_steps and (enable_profiler or "global_step" in values):
        from zbus.trace.profiler import ProfiledScope

        kind = category or "misc"
        return ProfiledScope(tracer, name, kind, values, enable=enable_profiler, profiler_args=profiler_args)
    return Span(tracer, name, category or "misc", values)


atrace_scope = trace_scope
"""The founding spelling for ``async with``."""


def trace_perf(name: str, category: str | None = None) -> Callable[[F], F]:
    """Decorate as ``traced(name, category)`` does; the founding spelling."""
    decorate: Callable[[F], F] = traced(name, category=category or "misc")
    return decorate
