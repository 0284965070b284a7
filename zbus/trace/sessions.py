"""Tasks and their sessions: one record per rollout, with any phases, counters, a status and a reason.

A task has one or more sessions; ids are ints that a rank never uses twice. The current task and session are context
variables, so they follow asyncio tasks. All functions act on the current tracer's recorder, may be called from any
thread or task, do nothing where sessions are off, and never raise for a reason of tracing. A finished session is
handed to the writer and forgotten; a task is forgotten with its last open session.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from zbus.trace.args import freeze
from zbus.trace.tracer import get_tracer
from zbus.trace.wrap import wrap

__all__ = [
    "SessionRecorder",
    "atrace_session_phase",
    "get_session_id",
    "get_task_id",
    "register_session",
    "register_task",
    "session_context",
    "set_session_id",
    "set_task_id",
    "trace_session",
    "trace_session_event",
    "trace_session_phase",
]

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("zbus.trace")
_MAX_OPEN: Final = 100_000
_RESERVED: Final = frozenset({"total", "total_sum"})
_STARTS_BITS: Final = 32
_ids: Final = itertools.count(1)  # one for all recorders and all their resets: an id is never used twice

_task_id: contextvars.ContextVar[int | None] = contextvars.ContextVar("zbus_task_id", default=None)
_session_id: contextvars.ContextVar[int | None] = contextvars.ContextVar("zbus_session_id", default=None)


class _Open:
    """An open session. Times are monotonic nanoseconds."""

    __slots__ = ("counters", "finalized_ns", "payload", "phases", "reason", "session_id", "status", "submit_ns", "task")

    def __init__(self, task: int, session_id: int, submit_ns: int, payload: dict[str, Any]) -> None:
        self.task = task
        self.session_id = session_id
        self.submit_ns = submit_ns
        self.finalized_ns: int | None = None
        self.status = "pending"
        self.reason: str | None = None
        self.phases: dict[str, list[list[int | None]]] = {}
        self.counters: dict[str, int | float] = {}
        self.payload = payload


class SessionRecorder:
    """The open sessions of one role and rank, and the finished ones that are not written yet.

    Args:
        role, rank: Whose sessions.
        start: Start counter of the rank; part of the ids, so that a restarted rank never repeats one.
        now: Monotonic clock in nanoseconds.
        epoch_ns: That clock at the run epoch.
        on_ready: Told after a session was finished how many wait to be written; any thread, must be quick.

    Attributes:
        recorded: Sessions begun.
        lost: Sessions lost, by reason.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        *,
        start: int,
        now: Callable[[], int],
        epoch_ns: int,
        on_ready: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.epoch_ns = epoch_ns
        self.recorded = 0
        self.lost: dict[str, int] = {}
        self.now = now
        self._base = start << _STARTS_BITS
        self._on_ready = on_ready
        self._lock = threading.RLock()  # a signal handler may finish a session while we hold it
        self._tasks: dict[int, dict[int, _Open]] = {}
        self._task_facts: dict[int, tuple[int, dict[str, Any]]] = {}
        self._open: dict[int, _Open] = {}
        self._ready: list[dict[str, Any]] = []

    # -- events ---------------------------------------------------------------------------------------------------

    def register_task(self, payload: Mapping[str, Any]) -> int:
        """Begin a task and return its id."""
        task = self._base + next(_ids)
        with self._lock:
            self._task_facts[task] = (self.now(), _frozen(payload))
            if len(self._task_facts) > _MAX_OPEN:  # tasks that never got a session and never ended
                self._task_facts.pop(next(iter(self._task_facts)))
        return task

    def register_session(self, task: int) -> int:
        """Begin a session of a task and return its id; the first one counts from the task's beginning."""
        session_id = self._base + next(_ids)
        with self._lock:
            submit, payload = self._task_facts.pop(task, (self.now(), {}))
            session = _Open(task, session_id, submit, payload)
            self._tasks.setdefault(task, {})[session_id] = session
            self._open[session_id] = session
            self.recorded += 1
            if len(self._open) > _MAX_OPEN:
                self._forget(next(iter(self._open.values())))
                self.lost["too_many_open"] = self.lost.get("too_many_open", 0) + 1
        return session_id

    def finalize(self, task: int | None, session_id: int | None, status: str | None, reason: str | None) -> None:
        """Finish a session, or with a task all its open sessions (one is made for a task that had none)."""
        at = self.now()
        with self._lock:
            if session_id is None and task is not None and task in self._task_facts:
                self.register_session(task)
            for session in self._chosen(task, session_id):
                session.finalized_ns = at
                session.status = status or ("accepted" if session.status == "pending" else session.status)
                session.reason = reason if reason is not None else session.reason
                self._forget(session)
                self._ready.append(self._record(session))
            ready = len(self._ready)
        self._on_ready(ready)

    def set_status(self, session_id: int, status: str, reason: str | None) -> None:
        """Note how a session will end, before it does."""
        with self._lock:
            for session in self._chosen(None, session_id):
                session.status, session.reason = status, reason

    def begin_phase(
        self, task: int | None, session_id: int | None, phase: str, payload: Mapping[str, Any]
    ) -> list[list[int | None]]:
        """Begin one instance of a phase, in each session meant; return the instances."""
        at = self.now()
        with self._lock:
            made: list[list[int | None]] = []
            for session in self._chosen(task, session_id):
                instance: list[int | None] = [at, None]
                session.phases.setdefault(phase, []).append(instance)
                session.payload.update(_frozen(payload))
                made.append(instance)
            return made

    def end_phase(
        self,
        task: int | None,
        session_id: int | None,
        phase: str,
        payload: Mapping[str, Any],
        instances: list[list[int | None]] | None = None,
    ) -> None:
        """End instances of a phase: those given, else the oldest open one of each session meant.

        An end without a beginning is kept as an instance of no length.
        """
        at = self.now()
        with self._lock:
            if instances is not None:
                for instance in instances:
                    instance[1] = at
            for session in self._chosen(task, session_id):
                session.payload.update(_frozen(payload))
                if instances is None:
                    running = session.phases.setdefault(phase, [])
                    current = next((i for i in running if i[1] is None), None)
                    if current is None:
                        running.append([at, at])
                    else:
                        current[1] = at

    def count(self, task: int | None, session_id: int | None, name: str, value: float) -> None:
        """Add to a counter of each session meant."""
        with self._lock:
            for session in self._chosen(task, session_id):
                session.counters[name] = session.counters.get(name, 0) + value

    # -- writing --------------------------------------------------------------------------------------------------

    def take(self, *, unfinished: bool = False) -> list[dict[str, Any]]:
        """Remove and return the finished records; with ``unfinished`` all others too, as they are."""
        with self._lock:
            records, self._ready = self._ready, []
            if unfinished:
                for session in list(self._open.values()):
                    self._forget(session)
                    records.append(self._record(session))
                self._task_facts.clear()
            return records

    def sizes(self) -> tuple[int, int, int]:
        """Return how many tasks, open sessions and finished records are held."""
        with self._lock:
            return len(self._tasks) + len(self._task_facts), len(self._open), len(self._ready)

    def after_fork(self) -> None:
        """In a forked child: what was begun before belongs to the parent."""
        self._lock = threading.RLock()
        self._tasks, self._task_facts, self._open, self._ready = {}, {}, {}, []
        self.recorded, self.lost = 0, {}

    # -- inside ---------------------------------------------------------------------------------------------------

    def _chosen(self, task: int | None, session_id: int | None) -> list[_Open]:
        if session_id is not None:
            session = self._open.get(session_id)
            return [] if session is None else [session]
        return list(self._tasks.get(task, {}).values()) if task is not None else []

    def _forget(self, session: _Open) -> None:
        self._open.pop(session.session_id, None)
        siblings = self._tasks.get(session.task)
        if siblings is not None:
            siblings.pop(session.session_id, None)
            if not siblings:
                del self._tasks[session.task]

    def _seconds(self, at_ns: int | None) -> float | None:
        return None if at_ns is None else (at_ns - self.epoch_ns) / 1e9

    def _record(self, session: _Open) -> dict[str, Any]:
        end = session.finalized_ns
        record: dict[str, Any] = {
            "task_id": session.task,
            "session_id": session.session_id,
            "rank": self.rank,
            "role": self.role,
            "status": session.status,
        }
        if session.reason is not None:
            record["reason"] = session.reason
        record["submit_ts"] = self._seconds(session.submit_ns)
        if end is not None:
            record["finalized_ts"] = self._seconds(end)
            record["total_s"] = (end - session.submit_ns) / 1e9
        for phase, instances in session.phases.items():
            if phase not in _RESERVED:
                union, total = _lengths(instances)
                record[f"{phase}_s"] = union / 1e9
                record[f"{phase}_sum_s"] = total / 1e9
        if session.phases:
            record["phases"] = {
                phase: [{"start_ts": self._seconds(i[0]), "end_ts": self._seconds(i[1])} for i in instances]
                for phase, instances in session.phases.items()
            }
        if session.counters:
            record["counters"] = session.counters
        if session.payload:
            record["payload"] = session.payload
        return record


def _lengths(instances: list[list[int | None]]) -> tuple[int, int]:
    """Return (union, sum) of the ended instances, in nanoseconds."""
    union = total = reached = 0
    for start, end in sorted((i[0] or 0, i[1]) for i in instances if i[1] is not None):
        total += end - start
        union += max(0, end - max(start, reached))
        reached = max(reached, end)
    return union, total


def _frozen(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): freeze(value) for key, value in payload.items()}


# -- the current task and session ----------------------------------------------------------------------------------


def _recorder() -> SessionRecorder | None:
    found: SessionRecorder | None = get_tracer().sessions
    return found


def set_task_id(task_id: int | None) -> None:
    """Make a task the current one of this context (thread or asyncio task)."""
    _task_id.set(task_id)


def get_task_id() -> int | None:
    """Return the current task's id, or None."""
    return _task_id.get()


def set_session_id(session_id: int | None) -> None:
    """Make a session the current one of this context."""
    _session_id.set(session_id)


def get_session_id() -> int | None:
    """Return the current session's id, or None."""
    return _session_id.get()


def register_task(**payload: Any) -> int | None:
    """Begin a task and return its id, or None where sessions are off. Does not make it current."""
    recorder = _recorder()
    return None if recorder is None else recorder.register_task(payload)


def register_session(task_id: int | None = None) -> int | None:
    """Begin a session of a task (the current one by default) and return its id, or None where sessions are off."""
    recorder = _recorder()
    if recorder is None:
        return None
    task = task_id if task_id is not None else _task_id.get()
    return recorder.register_session(task if task is not None else recorder.register_task({}))


def trace_session_event(method: str, session_id: int | None = None, task_id: int | None = None, **payload: Any) -> None:
    """Tell one thing of a session, or of all sessions of a task; the current session, else task, by default.

    Args:
        method: ``mark_finalized`` (``status=``, ``reason=``), ``mark_PHASE_start``, ``mark_PHASE_end`` for any phase
            name, ``increment_counter`` (``name=``, ``value=1``), ``set_status`` (``status=``, ``reason=``).
        session_id: Which session.
        task_id: Which task, when it is not about one session.
        **payload: As the method says; what phases are given is kept with the session.
    """
    recorder = _recorder()
    if recorder is None:
        return
    if session_id is None and task_id is None:
        session_id, task_id = _session_id.get(), _task_id.get()
    try:
        _event(recorder, method, session_id, task_id, payload)
    except Exception:  # noqa: BLE001  # a wrong payload must not stop a rollout
        _LOG.warning("session event %r was ignored: %r", method, payload, exc_info=True)


def _event(
    recorder: SessionRecorder, method: str, session_id: int | None, task_id: int | None, payload: dict[str, Any]
) -> None:
    if method == "mark_finalized":
        status, reason = payload.get("status"), payload.get("reason")
        recorder.finalize(
            task_id, session_id, None if status is None else _word(status), None if reason is None else str(reason)
        )
    elif method == "increment_counter":
        recorder.count(task_id, session_id, str(payload["name"]), payload.get("value", 1))
    elif method == "set_status" and session_id is not None:
        reason = payload.get("reason")
        recorder.set_status(session_id, _word(payload["status"]), None if reason is None else str(reason))
    elif method.startswith("mark_") and method.endswith("_start"):
        recorder.begin_phase(task_id, session_id, method[5:-6], payload)
    elif method.startswith("mark_") and method.endswith("_end"):
        recorder.end_phase(task_id, session_id, method[5:-4], payload)
    else:
        _LOG.warning("there is no session event %r", method)


def _word(status: object) -> str:
    """Return a status as text; enums by their value."""
    return str(getattr(status, "value", status))


class trace_session_phase:  # noqa: N801  # founding spelling of a context manager
    """Time one instance of a phase of the current session, for ``with`` and ``async with``.

    Instances of one phase may overlap, also across asyncio tasks; each is kept, and their union and sum reported.

    Args:
        phase: Any name.
        start_payload, end_payload: Kept with the session.
    """

    def __init__(
        self,
        phase: str,
        start_payload: Mapping[str, Any] | None = None,
        end_payload: Mapping[str, Any] | None = None,
    ) -> None:
        self._phase = phase
        self._start_payload = start_payload or {}
        self._end_payload = end_payload or {}
        self._recorder: SessionRecorder | None = None
        self._where: tuple[int | None, int | None] = (None, None)
        self._instances: list[list[int | None]] = []

    def __enter__(self) -> Self:
        self._recorder = recorder = _recorder()
        if recorder is not None:
            self._where = _task_id.get(), _session_id.get()
            self._instances = recorder.begin_phase(*self._where, self._phase, self._start_payload)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.end_phase(*self._where, self._phase, self._end_payload, self._instances)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


atrace_session_phase = trace_session_phase
"""The founding spelling for ``async with``."""


def trace_session(phase: str) -> Callable[[F], F]:
    """Decorate a function so that each call is one instance of a phase of the current session.

    Also a coroutine, generator or async generator; of the latter two the phase lasts from the first step to the end.
    """

    def decorate(function: F) -> F:
        wrapped: F = wrap(function, functools.partial(trace_session_phase, phase))
        return wrapped

    return decorate


class _Session:
    """A session that is begun, and finished when its block is left; makes nothing current by itself."""

    session_id: int | None = None

    def __enter__(self) -> Self:
        self._recorder = recorder = _recorder()
        if recorder is not None:
            current = _task_id.get()
            self._own = current is None
            self.task_id = recorder.register_task({}) if current is None else current
            self.session_id = recorder.register_session(self.task_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        if kind is not None and kind is not GeneratorExit:  # whoever closes a generator has what it wanted
            recorder.finalize(None, self.session_id, "failed", str(freeze(error)))
        elif self._own:
            recorder.finalize(None, self.session_id, None, None)

    def current(self) -> _Current:
        """Return a block in which this session and its task are the current ones."""
        return _Current(self)


class _Current:
    """See ``_Session.current``."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._tokens: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        if self._session.session_id is not None:
            self._tokens = _task_id.set(self._session.task_id), _session_id.set(self._session.session_id)

    def __exit__(self, *_: object) -> None:
        if self._tokens is None:
            return
        try:
            _task_id.reset(self._tokens[0])
            _session_id.reset(self._tokens[1])
        except ValueError:  # left in another context, as may happen to a task that is torn down
            pass


class session_context(_Session):  # noqa: N801  # founding spelling: a decorator and a context manager
    """Run a block or a function of any kind as one session of the current task, as the current session.

    An exception finishes the session as ``failed`` with the exception as reason. Otherwise it stays open until its
    task is finalized; without a current task it has one of its own and is finished as ``accepted``. Of a generator it
    lasts from the first step to the end, and is current only while the generator runs.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        self._block = self.current()
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__()
        super().__exit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorate a function; each call is a session of its own."""
        stepwise = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        wrapped: F = wrap(function, _Session, _Session.current) if stepwise else wrap(function, session_context)
        return wrapped
