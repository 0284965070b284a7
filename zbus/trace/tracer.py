"""The tracer: one ring per thread, found through a thread-local; no dict of keys, lock or JSON on the hot path.

A ring is two plain lists: one of tuples, and one that holds the fields of spans one after the other, which costs the
garbage collector nothing. Its thread appends at the end, the flush thread takes a slice from the front; both are single
operations on a list, so no lock is needed. Beyond the ring's size the newest records are dropped and counted.
One process may hold several tracers (one per role and rank); ``get_tracer`` gives the current one.
"""

from __future__ import annotations

import contextvars
import enum
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from zbus.clock import SYSTEM_CLOCK, Clock

__all__ = [
    "BATCH",
    "CLIENT",
    "COUNTER",
    "FLOW",
    "INSTANT",
    "PROFILE",
    "SENT",
    "SERVER",
    "SPAN",
    "SPAN_FIELDS",
    "Level",
    "Record",
    "Ring",
    "Tracer",
    "current_task_name",
    "get_tracer",
    "set_default_tracer",
    "set_tracer",
    "span_records",
    "use_tracer",
]

Record = tuple[Any, ...]
"""One recorded thing; the first item says which: see ``SPAN`` … ``SERVER`` for what follows it."""

SPAN: Final = 0
"""(SPAN, name, category, start_ns, end_ns, args | None, task | None)"""
SPAN_FIELDS: Final = 6
"""Values of a span in ``Ring.spans``: the record ``SPAN`` without its first item."""
INSTANT: Final = 1
"""(INSTANT, name, category, at_ns, scope, args | None, task | None)"""
COUNTER: Final = 2
"""(COUNTER, name, at_ns, {series: number})"""
FLOW: Final = 3
"""(FLOW, key, direction, at_ns, task | None)"""
CLIENT: Final = 4
"""(CLIENT, …) as ``Tracer.bus_client``"""
SERVER: Final = 5
"""(SERVER, …) as ``Tracer.bus_server``, then the task"""
BATCH: Final = 6
"""(BATCH, …) as ``Tracer.bus_batch``, then the task"""
PROFILE: Final = 7
"""(PROFILE, row, [(name, category, start_ns, end_ns, args | None), …]): spans somebody else measured"""

SENT: Final = 8
"""(SENT, …) as ``Tracer.bus_sent``, then when"""

_modules = sys.modules


def span_records(fields: list[Any]) -> list[Record]:
    """Return spans whose fields stand one after the other as records."""
    values = iter(fields)
    return [(SPAN, *span) for span in zip(*[values] * SPAN_FIELDS, strict=False)]


class Level(enum.IntEnum):
    """How much is recorded."""

    OFF = 0
    RPC = 1
    FULL = 2


class Ring:
    """The records of one thread that are not written yet, and what became of the others.

    ``lost`` is written by the ring's thread alone, ``drained`` by the flush thread alone, so both are exact.

    Attributes:
        items: Records.
        spans: Fields of spans, ``SPAN_FIELDS`` for each.
        size: Most ``items``.
        room: Most values in ``spans``.
    """

    __slots__ = ("drained", "items", "lost", "lost_reported", "name", "room", "size", "spans", "thread", "tid")

    def __init__(self, size: int) -> None:
        self.items: list[Record] = []
        self.spans: list[Any] = []
        self.size = size
        self.room = size * SPAN_FIELDS
        self.lost = 0
        self.lost_reported = 0
        self.drained = 0
        self.tid = threading.get_native_id()
        thread = threading.current_thread()
        self.name = thread.name
        self.thread = weakref.ref(thread)

    def __len__(self) -> int:
        """Return how many records wait."""
        return len(self.items) + len(self.spans) // SPAN_FIELDS

    def take(self, limit: int) -> tuple[list[Record], list[Any]]:
        """Remove and return at most ``limit`` oldest items, and the fields of as many spans. Flush thread only."""
        batch = self.items[:limit]
        del self.items[: len(batch)]
        spans = self.spans[: limit * SPAN_FIELDS]
        del self.spans[: len(spans)]
        self.drained += len(batch) + len(spans) // SPAN_FIELDS
        return batch, spans

    def finished(self) -> bool:
        """Return whether the thread has ended, so that nothing more will come."""
        thread = self.thread()
        return thread is None or not thread.is_alive()


class Tracer:
    """Records the spans of one role and rank. Every method but the lifecycle ones may be called from any thread.

    Attributes:
        role, rank: Whose spans these are.
        rpc: Whether bus records are wanted (level ``rpc`` or ``full``); ask before building one.
        on: Whether user spans are wanted (level ``full``); ask before computing costly args.
        now: The monotonic clock in nanoseconds.
        profile_steps: Steps whose scopes run torch's profiler, where they ask for it.
        local: This thread's ring as ``ring``, from its first record on.
        sessions: The recorder of tasks and sessions (``zbus.trace.sessions``), or None where they are off.
    """

    def __init__(self, role: str = "", rank: int = 0, *, ring_size: int = 1 << 17, clock: Clock = SYSTEM_CLOCK) -> None:
        self.role = role
        self.rank = rank
        self.ring_size = ring_size
        self.now: Callable[[], int] = time.monotonic_ns if clock is SYSTEM_CLOCK else clock.monotonic_ns
        self.on = False
        self.rpc = False
        self.on_first_record: Callable[[], None] | None = None
        self.sessions: Any = None
        self.profile_steps: frozenset[int] = frozenset()
        self._gauges: list[tuple[str, Callable[[], Mapping[str, float]]]] = []
        self._batches = itertools.count(1)
        self._lock = threading.RLock()  # a signal handler may record its thread's first span while we hold it
        self._rings: list[Ring] = []
        self.local = threading.local()
        _all.add(self)

    def __repr__(self) -> str:
        return f"<Tracer {self.role}/{self.rank}: {self.level.name.lower()}>"

    @property
    def level(self) -> Level:
        """The level now in force."""
        return Level.FULL if self.on else Level.RPC if self.rpc else Level.OFF

    def set_level(self, level: Level | str) -> None:
        """Switch the level at once, for all threads; spans already begun are still recorded at their end."""
        value = Level[level.upper()] if isinstance(level, str) else level
        self.rpc = value >= Level.RPC
        self.on = value >= Level.FULL
        _tell_spans()

    # -- recording ------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Put one record into this thread's ring; dropped and counted when the ring is full. Never raises."""
        try:
            ring: Ring = self.local.ring
        except AttributeError:
            ring = self.new_ring()
        items = ring.items
        if len(items) < ring.size:
            items.append(record)
        else:
            ring.lost += 1

    def bus_client(  # noqa: PLR0917  # keyword calls cost a tenth of the record
        self,
        session: bytes,
        worker: str,
        incarnation: int,
        lane: str,
        seq: int,
        attempt: int,
        method: str,
        t_submit: int,
        t_encoded: int,
        t_sent: int,
        t_reply: int,
        t_decoded: int,
        bytes_out: int,
        bytes_in: int,
        outcome: str,
        batch: int = 0,
        attempts: int = 1,
    ) -> None:
        """Record the caller's side of one call, once, when its outcome is known; ask ``rpc`` first.

        Times are ``monotonic_ns``; 0 says that the phase never came (not sent, no reply). ``t_sent`` is of the first
        attempt, ``t_decoded`` is when the outcome was ready. ``session``, ``worker``, ``incarnation``, ``lane``,
        ``seq`` and ``attempt`` must equal those of ``bus_server``: the arrow between the two is a hash of them.
        ``attempt`` is the one that was answered, else the last; ``attempts`` is how many there were, see ``bus_sent``.
        Sizes are in bytes. ``batch`` is the number the caller gave the batch (see ``next_batch``), 0 for none.
        """
        self.append(
            (
                CLIENT,
                session,
                worker,
                incarnation,
                lane,
                seq,
                attempt,
                method,
                t_submit,
                t_encoded,
                t_sent,
                t_reply,
                t_decoded,
                bytes_out,
                bytes_in,
                outcome,
                batch,
                attempts,
            )
        )

    def bus_sent(  # as bus_client
        self, session: bytes, worker: str, incarnation: int, lane: str, seq: int, calls: int, attempt: int
    ) -> None:
        """Record that a request of ``calls`` calls from ``seq`` on left now: later than it was placed, or once more.

        Ask ``rpc`` first. The first attempt of a request that leaves at once is told by ``bus_client`` alone.
        """
        self.append((SENT, session, worker, incarnation, lane, seq, calls, attempt, self.now()))

    def bus_server(  # noqa: PLR0917  # as bus_client
        self,
        session: bytes,
        worker: str,
        incarnation: int,
        lane: str,
        seq: int,
        attempt: int,
        method: str,
        t_arrived: int,
        t_start: int,
        t_decoded: int,
        t_run_end: int,
        t_encoded: int,
        outcome: str,
        t_sent: int = 0,
    ) -> None:
        """Record the worker's side of one call, once, on the thread that ran it; ask ``rpc`` first.

        Times are ``monotonic_ns``: arrival, taken from the queue, arguments decoded, method returned, answer encoded,
        answer handed on; 0 says that the phase never came. See ``bus_client`` for the ids.
        """
        self.append(
            (
                SERVER,
                session,
                worker,
                incarnation,
                lane,
                seq,
                attempt,
                method,
                t_arrived,
                t_start,
                t_decoded,
                t_run_end,
                t_encoded,
                outcome,
                t_sent,
                current_task_name(),
            )
        )

    def next_batch(self) -> int:
        """Return a number for a batch of calls, unique in this tracer, from 1."""
        return next(self._batches)

    def bus_batch(  # noqa: PLR0917  # as bus_client
        self,
        method: str,
        batch: int,
        lane: str,
        members: int,
        calls: int,
        t_submit: int,
        t_done: int,
        t_merged: int,
        outcome: str,
        t_taken: int = 0,
        t_decoded: int = 0,
    ) -> None:
        """Record a whole batch, once, on the thread that took its result; ask ``rpc`` first.

        Args:
            method: Its first endpoint.
            batch: From ``next_batch``; also given to ``bus_client`` for each of its calls.
            lane: Lane it was placed in.
            members: Workers it went to.
            calls: Calls per worker.
            t_submit: When the caller asked (``monotonic_ns``, as all times).
            t_done: When its last outcome came.
            t_merged: When the collected value was ready; 0 if nothing was merged.
            outcome: ``OK``, or the kind of its worst outcome.
            t_taken: When the caller began to take the answer, which may be long after ``t_done``; 0: not known.
            t_decoded: When the members' results were decoded; 0: never, or not known.
        """
        task = current_task_name()
        self.append(
            (BATCH, method, batch, lane, members, calls, t_submit, t_done, t_merged, outcome, t_taken, t_decoded, task)
        )

    # -- gauges ---------------------------------------------------------------------------------------------------

    def add_gauge(self, name: str, read: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
        """Sample ``read`` every gauge period as a counter of that name; return a function that ends it.

        ``read`` is called on the flush thread: quick, no waiting; what it raises is ignored. Queue depth, credit and
        memory are shown this way, at no cost to the calls.
        """
        entry = (name, read)
        self._gauges.append(entry)

        def remove() -> None:
            if entry in self._gauges:
                self._gauges.remove(entry)

        return remove

    def sample_gauges(self) -> None:
        """Record one sample of every gauge. Flush thread only."""
        if not self.rpc:
            return
        for name, read in list(self._gauges):
            try:
                series = dict(read())
            except Exception:  # noqa: BLE001, S112  # a gauge that fails has no value now
                continue
            if series:
                self.append((COUNTER, name, self.now(), series))

    # -- flush side -----------------------------------------------------------------------------------------------

    def rings(self) -> list[Ring]:
        """Return the rings that may hold or bring records. Flush thread only."""
        with self._lock:
            return list(self._rings)

    def forget(self, ring: Ring) -> None:
        """Drop the empty ring of a thread that has ended. Flush thread only."""
        with self._lock:
            self._rings.remove(ring)

    def new_ring(self) -> Ring:
        """Make this thread's ring: its first record of this tracer."""
        ring = Ring(self.ring_size)
        self.local.ring = ring
        with self._lock:
            self._rings.append(ring)
        start = self.on_first_record
        if start is not None:
            try:
                start()
            except Exception:  # noqa: BLE001  # recording never raises; the records stay in the ring and are counted
                self.on_first_record = None
        return ring

    def _after_fork(self) -> None:
        """In a forked child: what was recorded before belongs to the parent, which writes it."""
        self._lock = threading.RLock()
        self._rings = []
        self.local = threading.local()


_all: weakref.WeakSet[Tracer] = weakref.WeakSet()

# What a span looks at first; kept right by _tell_spans.
sole: Tracer | None = None
"""The default tracer, where it is at level ``full`` and no context may have another one."""
any_on = False
"""Whether any tracer may be at level ``full``."""

_scoped = False  # whether any context may have a tracer of its own; never taken back
_telling = threading.RLock()


def _tell_spans() -> None:
    """Bring ``sole`` and ``any_on`` up to date, after a change of a level, of the default or of a context's tracer."""
    global sole, any_on  # noqa: PLW0603  # one look at a module's name is the cheapest there is
    with _telling:
        sole = _default if _default.on and not _scoped else None
        try:
            any_on = any(tracer.on for tracer in _all)
        except RuntimeError:  # another thread makes a tracer: yes is right too, only slower
            any_on = True


def _after_fork_in_child() -> None:
    global _telling  # noqa: PLW0603  # the thread that may hold it is not here
    _telling = threading.RLock()
    for tracer in list(_all):
        tracer._after_fork()  # noqa: SLF001  # same module, one owner


os.register_at_fork(after_in_child=_after_fork_in_child)

_default = Tracer()
_current: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("zbus_tracer", default=None)


def get_tracer() -> Tracer:
    """Return the tracer of this context, else the process's default (which is off until ``configure``)."""
    return (_current.get() or _default) if _scoped else _default


def set_tracer(tracer: Tracer | None) -> None:
    """Make ``tracer`` the current one in this context (thread or task); None goes back to the default."""
    _begin_scopes()
    _current.set(tracer)


def set_default_tracer(tracer: Tracer | None) -> None:
    """Make ``tracer`` the default of the process, for every thread that set none; None: a tracer that is off."""
    global _default  # noqa: PLW0603  # one default per process is the meaning
    _default = tracer or Tracer()
    _tell_spans()


@contextmanager
def use_tracer(tracer: Tracer) -> Iterator[Tracer]:
    """Make ``tracer`` the current one inside the ``with`` block."""
    _begin_scopes()
    token = _current.set(tracer)
    try:
        yield tracer
    finally:
        _current.reset(token)


def _begin_scopes() -> None:
    global _scoped  # noqa: PLW0603  # one flag for all contexts
    if not _scoped:
        _scoped = True
        _tell_spans()


def _no_loop() -> Any:
    """Stand in for asyncio's own function until a program has loaded it."""
    if "asyncio.tasks" in _modules:
        return _find_asyncio()
    return None


def _find_asyncio() -> Any:
    global running_loop  # noqa: PLW0603  # found once: this is on the hot path
    found = getattr(_modules.get("asyncio.events"), "_get_running_loop", None)  # meant for implementers of loops
    if found is None:  # half imported
        return None
    running_loop = found
    return found()


running_loop: Callable[[], Any] = _no_loop
"""Returns the event loop that runs in this thread, or None. Never loads asyncio."""


def current_task_name() -> str | None:
    """Return the name of the running asyncio task, or None outside of one; never loads asyncio."""
    try:
        loop = running_loop()
        if loop is None:
            return None
        task = _modules["asyncio.tasks"].current_task(loop)
        return None if task is None else task.get_name()
    except Exception:  # noqa: BLE001  # half-imported asyncio, or a foreign loop: then the span belongs to the thread
        return None
