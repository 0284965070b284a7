"""Spans of one process: record them cheaply, write them beside each other, never harm the run.

``span``, ``traced``, ``instant``, ``counter`` and ``flow`` record into a per-thread ring; a background thread turns
the rings into ``{root}/{role}/traces_{rank}.jsonl`` (``docs/reference/trace-format.md``). Recording never raises and
never blocks; with the level ``off`` it costs a function call. ``trace_scope``, ``atrace_scope`` and ``trace_perf``
are the founding spellings of ``span`` and ``traced``. ``register_task``, ``session_context``, ``trace_session_phase``
and friends record rollouts into ``sessions_{rank}.jsonl`` (``zbus.trace.sessions``).

Importing this package loads neither msgspec nor numpy: the writer is loaded by ``configure``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zbus.trace.config import TraceConfig
from zbus.trace.sessions import (
    atrace_session_phase,
    get_session_id,
    get_task_id,
    register_session,
    register_task,
    session_context,
    set_session_id,
    set_task_id,
    trace_session,
    trace_session_event,
    trace_session_phase,
)
from zbus.trace.span import (
    Span,
    atrace_scope,
    counter,
    flow,
    instant,
    span,
    trace_perf,
    trace_scope,
    traced,
)
from zbus.trace.tracer import Level, Tracer, get_tracer, set_tracer, use_tracer

if TYPE_CHECKING:
    from zbus.trace.control import (
        config_perf_tracer,
        configure,
        is_configured,
        mark_step,
        reset,
        save,
        save_perf_tracer,
        shutdown,
        tracers,
    )

__all__ = [
    "Level",
    "Span",
    "TraceConfig",
    "Tracer",
    "atrace_scope",
    "atrace_session_phase",
    "config_perf_tracer",
    "configure",
    "counter",
    "flow",
    "get_session_id",
    "get_task_id",
    "get_tracer",
    "instant",
    "is_configured",
    "mark_step",
    "register_session",
    "register_task",
    "reset",
    "save",
    "save_perf_tracer",
    "session_context",
    "set_session_id",
    "set_task_id",
    "set_tracer",
    "shutdown",
    "span",
    "trace_perf",
    "trace_scope",
    "trace_session",
    "trace_session_event",
    "trace_session_phase",
    "traced",
    "tracers",
    "use_tracer",
]

_CONTROL = frozenset(
    {
        "config_perf_tracer",
        "configure",
        "is_configured",
        "mark_step",
        "reset",
        "save",
        "save_perf_tracer",
        "shutdown",
        "tracers",
    }
)


def __getattr__(name: str) -> Any:
    """Load the writing side on first use of it."""
    if name in _CONTROL:
        from importlib import import_module  # by name, so that the recording core does not depend on the writer

        return getattr(import_module("zbus.trace.control"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
