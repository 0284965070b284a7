"""torch's profiler for chosen steps: one window at a time in a process, its events on the trace's own clock.

Two profilers at once crash torch, so a process-wide guard lets one scope have it and notes the others. What the
profiler calls time is matched by markers that are recorded inside the window between two looks at our clock.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from zbus.trace.span import Span
from zbus.trace.tracer import INSTANT, PROFILE, Tracer

__all__ = ["ProfiledScope", "current_step"]

_LOG: Final = logging.getLogger("zbus.trace")
_MARK: Final = "zbus.clock"
_MARKS: Final = 8
_CHUNK: Final = 1000
_MAX_EVENTS: Final = 1_000_000

current_step: Final[contextvars.ContextVar[int | None]] = contextvars.ContextVar("zbus_global_step", default=None)
"""Step that the innermost enclosing ``trace_scope`` with a ``global_step`` argument named."""

_guard = threading.Lock()
_holder: Any = None


class ProfiledScope(Span):
    """A span that knows its step, and runs torch's profiler in it if that was asked for and the step is listed."""

    __slots__ = ("_anchors", "_profile", "_profiler_args", "_step", "_token", "_wanted")

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        category: str,
        args: dict[str, Any],
        *,
        enable: bool,
        profiler_args: Mapping[str, Any] | None,
    ) -> None:
        self._tracer, self._name, self._category, self._args = tracer, name, category, args
        step = args.get("global_step")
        self._step = step if isinstance(step, int) else None
        self._wanted = enable
        self._profiler_args = dict(profiler_args or {})
        self._profile: Any = None
        self._anchors: list[tuple[int, int]] = []
        self._token: contextvars.Token[int | None] | None = None

    def __enter__(self) -> Self:
        if self._step is not None:
            self._token = current_step.set(self._step)
        tracer = self._tracer
        if self._wanted and current_step.get() in tracer.profile_steps:
            self._begin(tracer)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super_exit = super().__exit__
        try:
            if self._profile is not None:
                self._end(self._tracer)
        finally:
            if self._token is not None:
                try:
                    current_step.reset(self._token)
                except ValueError:  # closed in another context, as an async generator may be
                    self._token = None
            super_exit(kind, error, trace)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, tracer: Tracer) -> None:
        global _holder  # one profiler per process
        if not _guard.acquire(blocking=False):
            self._skip(tracer, f"the profiler is in {_holder!r}")
            return
        try:
            import torch

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profile = torch.profiler.profile(**{"activities": activities, **self._profiler_args})
            profile.__enter__()
        except Exception as error:  # noqa: BLE001  # no torch, or a profiler that refuses: the step goes on
            _guard.release()
            self._skip(tracer, f"{type(error).__name__}: {error}")
            return
        _holder, self._profile = self._name, profile
        self._mark(tracer)

    def _end(self, tracer: Tracer) -> None:
        global _holder  # noqa: PLW0603  # as above
        profile, self._profile = self._profile, None
        try:
            self._mark(tracer)
            profile.__exit__(None, None, None)
            events = _events_of(profile)
            offset, bound = _match(events, self._anchors)
            count = _record(tracer, events, offset)
            self._args["profiled"] = count
            self._args["profiler_clock_bound_ns"] = bound
        except Exception as error:  # noqa: BLE001  # as above
            self._skip(tracer, f"{type(error).__name__}: {error}")
        finally:
            _holder = None
            _guard.release()

    def _mark(self, tracer: Tracer) -> None:
        """Record markers whose time both clocks know."""
        import torch

        for _ in range(_MARKS):
            before = tracer.now()
            with torch.profiler.record_function(_MARK):
                pass
            self._anchors.append((before, tracer.now()))

    def _skip(self, tracer: Tracer, why: str) -> None:
        self._args["profiler_skipped"] = why
        tracer.append(
            (INSTANT, "profiler skipped", "instr", tracer.now(), "t", {"scope": self._name, "why": why}, None)
        )
        _LOG.info("torch's profiler was not run for %s: %s", self._name, why)


_Seen = tuple[str, int, int, str]
"""(name, start ns, end ns, row), on the profiler's clock."""


def _events_of(profile: Any) -> list[_Seen]:
    """Return what the profiler saw, by start."""
    found: list[_Seen] = []
    for event in profile.profiler.kineto_results.events()[:_MAX_EVENTS]:
        start = int(event.start_ns())
        device = str(event.device_type()).rpartition(".")[2].lower()
        if device == "cpu":
            row = f"profiler: thread {event.start_thread_id()}"
        else:
            row = f"profiler: {device}:{event.device_index()} stream {event.device_resource_id()}"
        found.append((str(event.name()), start, start + int(event.duration_ns()), row))
    found.sort(key=lambda seen: (seen[1], -seen[2]))
    return found


def _match(events: list[_Seen], anchors: list[tuple[int, int]]) -> tuple[int, int]:
    """Return (offset, bound): our clock minus the profiler's, from the markers; they came in the same order.

    Raises:
        ValueError: The markers are not in the events.
    """
    marks = [seen for seen in events if seen[0] == _MARK]
    if not marks or len(marks) != len(anchors):
        msg = f"the profiler saw {len(marks)} of {len(anchors)} clock markers"
        raise ValueError(msg)
    low = max(before - start for (before, _), (_, start, _, _) in zip(anchors, marks, strict=True))
    high = min(after - end for (_, after), (_, _, end, _) in zip(anchors, marks, strict=True))
    return (low + high) // 2, abs(high - low) // 2 + 1


def _record(tracer: Tracer, events: list[_Seen], offset: int) -> int:
    rows: dict[str, list[tuple[str, str, int, int, None]]] = {}
    count = 0
    for name, start, end, row in events:
        if name != _MARK:
            count += 1
            rows.setdefault(row, []).append((name, "profiler", start + offset, end + offset, None))
    for row, spans in rows.items():
        for at in range(0, len(spans), _CHUNK):
            tracer.append((PROFILE, row, spans[at : at + _CHUNK]))
    return count


def _after_fork() -> None:
    global _guard, _holder  # the parent's window is not the child's
    _guard, _holder = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
