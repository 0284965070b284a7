"""The span API: ``span``, ``traced``, ``instant``, ``counter``, ``flow`` and the founding spellings.

All act on the current tracer (``get_tracer``), may be called from any thread, task or generator, never raise for a
reason of tracing, and do nothing unless the level is ``full``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from zbus.trace import tracer as tracer_module
from zbus.trace.args import MAX_TEXT, freeze_in_place
from zbus.trace.tracer import COUNTER, FLOW, INSTANT, Tracer, current_task_name, get_tracer
from zbus.trace.wrap import wrap

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

_PLAIN: Final = frozenset({float, bool, type(None)})


class Span:
    """A time span, as a context manager for ``with`` and ``async with``; use each instance once.

    An exception that leaves the block is noted as ``args.error`` and goes on.
    """

    # No __init__: a call of it would cost a tenth of a span. Whoever makes one sets all but _start.
    __slots__ = ("_args", "_category", "_name", "_start", "_tracer")

    _args: dict[str, Any]
    _category: str
    _name: str
    _start: int
    _tracer: Tracer

    def set(self, **args: Any) -> None:
        """Add or replace arguments, known only inside the block."""
        self._args.update(args)

    def __enter__(self) -> Self:
        now = self._tracer.now
        self._start = now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracer = self._tracer
        now = tracer.now
        end = now()
        args = self._args
        if kind is not None:
            args["error"] = kind.__name__
        for value in args.values():
            cls = type(value)
            if cls is int:
                if -0x8000_0000_0000_0000 <= value <= 0xFFFF_FFFF_FFFF_FFFF:  # constants: names are looked up each time
                    continue
            elif cls in _PLAIN or (cls is str and len(value) <= MAX_TEXT):
                continue
            freeze_in_place(args)
            break
        task = None if tracer_module.running_loop() is None else current_task_name()
        local = tracer.local  # as Tracer.append, without the call
        try:
            ring = local.ring
        except AttributeError:
            ring = tracer.new_ring()
        spans = ring.spans
        if len(spans) < ring.room:
            spans += (self._name, self._category, self._start, end, args, task)
        else:
            ring.lost += 1

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class _Off(Span):
    """The one span of all that are not recorded."""

    __slots__ = ()

    # Functions in C that take what they are given: methods of Python would double what an unrecorded span costs.
    __exit__: Any = "".format

    def set(self, **args: Any) -> None:
        """Do nothing."""


_OFF: Final = _Off()
_Off.__enter__ = itertools.repeat(_OFF).__next__  # type: ignore[method-assign, assignment]  # as __exit__


def span(name: str, /, category: str = "misc", **args: Any) -> Span:
    """Return a context manager that records the time spent inside it.

    Args:
        name: What is done; few distinct names make good statistics, so put numbers into ``args``.
        category: ``compute``, ``comm``, ``io``, ``sync``, ``scheduler``, ``instr``, ``misc`` or any other text.
        **args: Shown with the span; any value is taken (see ``zbus.trace.args``).
    """
    tracer = tracer_module.sole
    if tracer is None:
        if not tracer_module.any_on:
            return _OFF
        tracer = get_tracer()
        if not tracer.on:
            return _OFF
    made = Span()
    made._tracer = tracer  # noqa: SLF001  # in place of __init__
    made._name = name  # noqa: SLF001
    made._category = category  # noqa: SLF001
    made._args = args  # noqa: SLF001
    return made


def instant(
    name: str,
    /,
    category: str | None = "misc",
    args: Any = None,
    *,
    scope: str = "t",
    **more: Any,
) -> None:
    """Record a moment; ``scope`` is ``t`` (thread), ``p`` (process) or ``g`` (whole trace).

    Args:
        name: What happened.
        category: As of ``span``.
        args: Shown with it, as a mapping: the founding spelling.
        scope: Where it is shown.
        **more: Shown with it.
    """
    tracer = get_tracer()
    if tracer.on:
        at = tracer.now()
        if args is not None:
            more.update(args if isinstance(args, Mapping) else {"args": args})
        freeze_in_place(more)
        tracer.append((INSTANT, name, category or "misc", at, scope, more, current_task_name()))


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
        return wrap(target, functools.partial(span, target.__qualname__, category, **args))

    def decorate(function: Any) -> Any:
        return wrap(function, functools.partial(span, target or function.__qualname__, category, **args))

    return decorate


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
    made = Span()
    made._tracer, made._name, made._category, made._args = tracer, name, category or "misc", values  # noqa: SLF001
    return made


atrace_scope = trace_scope
"""The founding spelling for ``async with``."""


def trace_perf(name: str, category: str | None = None) -> Callable[[F], F]:
    """Decorate as ``traced(name, category)`` does; the founding spelling."""
    decorate: Callable[[F], F] = traced(name, category=category or "misc")
    return decorate
