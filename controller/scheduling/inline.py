"""``scheduler.type=inline``: every role in the calling process and thread, same API, for pdb and coverage.

``InlineRuntime`` stands where ``transport.Client`` does: groups place calls on it. Arguments and answers go through the
codec, and calls through the worker's own executor, so what works here works on real workers and fails alike. Sync
endpoints run inside ``place``, on the caller's thread, one rank after the other; async endpoints run on an event loop
in a second thread. Engines that join a torch process group of more than one rank need real workers.
"""

from __future__ import annotations

import bdb
import contextlib
import enum
import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from controller.background import shared
from controller.placer import ChunkSink, ResultsSink, Sink, StaticRoster
from controller.role import Role
from zbus import names
from zbus.codec import Ref
from zbus.codec.exceptions import describe_exception, rebuild_exception
from zbus.config import TrialDir
from zbus.data.carriage import Offers
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner
from zbus.data.holds import Tell
from zbus.data.porter import Porter
from zbus.engine import EndpointSpec, Engine, Mesh, endpoints_of, lanes_of, table_to_wire
from zbus.errors import EngineLoadError, TransportError, Unavailable
from zbus.ids import Incarnation, WorkerName, new_incarnation
from zbus.protocol.messages import (
    Buffer,
    Buffers,
    CancelRunning,
    Execute,
    Kind,
    Outcome,
    OutcomeKind,
    Status,
    StreamCredit,
)
from zbus.runtime.context import Context
from zbus.runtime.executor import Executor
from zbus.runtime.loader import digest_of, load_engine
from zbus.runtime.refs import WorkerRefs
from zbus.trace import control
from zbus.trace.config import TraceConfig
from zbus.trace.tracer import Tracer, use_tracer

__all__ = ["InlinePeer", "InlineRuntime", "InlineState"]

_SESSION: Final = b"inline\0\0\0\0\0\0\0\0\0\0"
_NEVER: Final = float("inf")


class InlineState(enum.Enum):
    """State of an inline rank."""

    READY = "ready"
    DEAD = "dead"


def _as_rank(tracer: Tracer | None) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which this process records as one of its ranks."""
    return contextlib.nullcontext() if tracer is None else use_tracer(tracer)


class InlinePeer:
    """One rank that lives in this process.

    Attributes:
        name: Role and rank.
        incarnation: As a worker's.
        state: READY until the runtime closes.
        welcome: Host and pid: this process's.
    """

    def __init__(self, name: WorkerName, mesh: Mesh, role: Role, trial_dir: Path) -> None:
        self.name = name
        self.incarnation: Incarnation = new_incarnation(0)
        self.state = InlineState.READY
        self.evidence = ""
        self.reason = ""
        self.welcome: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "start": 0}
        self.mesh = mesh
        self.lanes: dict[str, _Lane] = {}
        self.table: dict[str, EndpointSpec] = {}
        self._role = role
        self._trial_dir = trial_dir
        self._context: Context | None = None
        self.refs: WorkerRefs | None = None  # set by the runtime, as the executor
        self.executor: Executor = None  # type: ignore[assignment]  # set by the runtime, which it answers to
        self.tracer: Tracer | None = None
        self.interrupt: BaseException | None = None  # a Ctrl-C or a quit of pdb: its caller's, and raised there

    def __repr__(self) -> str:
        return f"<InlinePeer {self.name} {self.state.value}>"

    def whereabouts(self, lane: str, seq: int) -> str:
        """Say where a placed call is."""
        found = self.lanes.get(lane)
        return "not placed" if found is None else found.whereabouts(seq)

    def hear(self, error: BaseException) -> None:
        """Keep what an endpoint raised if it is meant for its caller, who sits before this process."""
        if isinstance(error, KeyboardInterrupt | bdb.BdbQuit):
            self.interrupt = error

    # -- the bus's own methods -----------------------------------------------------------------------------------------

    def builtins(self) -> dict[str, Callable[..., Any]]:
        """Return what this rank answers besides its endpoints."""
        return {
            "ctl:zbus.ping": lambda: {"t": time.monotonic_ns(), "pid": os.getpid()},
            "ctl:zbus.status": self._status,
            "ctl:zbus.describe": self._facts,
            "ctl:zbus.stop": lambda **_grace: None,
            "ctl:zbus.stacks": lambda: "",
            "ctl:zbus.config_perf_tracer": self._config_tracer,
            "ctl:zbus.save_perf_tracer": _save_tracer,
            "main:zbus.create_engine": self.create,
            "main:zbus.destroy_engine": self.destroy,
            "main:zbus.barrier": lambda: None,
        }

    def create(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make the engine and set it up; safe to repeat."""
        if self.executor.engine is None:
            given = self._role.engine
            cls = load_engine(self._role.engine_path) if isinstance(given, str) else given
            engine = cls(*args, **(kwargs or {}))
            context = Context(
                role=self.name.role,
                rank=self.name.rank,
                world_size=self.mesh.size,
                mesh=self.mesh,
                local_rank=self.name.rank,
                incarnation=self.incarnation,
                trial_dir=self._trial_dir,
                env={**os.environ, **self._role.env},
                tracer=self.tracer,
                _refs=self.refs,
            )
            with _as_rank(self.tracer):
                engine.setup(context)
            self._context, self.table = context, endpoints_of(cls)
            self.executor.install(engine, self.table)
        return self._facts()

    def destroy(self) -> None:
        """Tear the engine down; safe to repeat."""
        engine = self.executor.remove()
        context, self._context = self._context, None
        if engine is not None:
            with _as_rank(self.tracer):
                engine.teardown()
        if context is not None:
            context.close()

    def _facts(self) -> dict[str, Any]:
        engine = self.executor.engine
        return {
            "endpoints": table_to_wire(self.table),
            "digest": "" if engine is None else digest_of(type(engine), self.table),
            "mesh": dict(self.mesh.axes),
        }

    def _config_tracer(self, config: Mapping[str, Any] | None = None, role: str | None = None) -> None:
        if self.tracer is not None:
            control.config_perf_tracer(config, role or self.name.role, self.name.rank)

    def _status(self) -> dict[str, Any]:
        calls = [call for call in self.executor.current_calls() if call["lane"] != "ctl"]
        return {
            "role": self.name.role,
            "rank": self.name.rank,
            "start": 0,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "host": self.welcome["host"],
            "state": "busy" if calls else "idle",
            "call": calls[0] if calls else None,
            "threads": threading.active_count(),
            **({} if self.refs is None else self.refs.desk.statistics()),
        }


def _save_tracer(step: int | None = None, force: bool = False) -> None:  # noqa: FBT001, FBT002  # wire signature
    control.save_perf_tracer(step, force)


@dataclass
class _Request:
    """One placed request on one rank."""

    peer: InlinePeer
    execute: Execute
    member: int
    sink: Sink
    chunk_sink: ChunkSink | None
    deadline: float
    open_calls: int
    running: bool = False
    finished: set[int] = field(default_factory=set)


class _Lane:
    """The queue of one lane of one rank: order and concurrency as on a worker."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.next_seq = 0
        self.running = 0
        self.waiting: deque[_Request] = deque()
        self.open: dict[int, _Request] = {}

    def whereabouts(self, seq: int) -> str:
        for request in list(self.open.values()):
            if request.execute.seq <= seq < request.execute.seq + request.execute.calls:
                return "running" if request.running else "arrived, not started"
        return "answered" if seq < self.next_seq else "not placed"


def _ignore(_member: int, _call: int, _outcome: Outcome) -> None:
    """Take what comes after the end."""


class _Placed:
    """Handle of a placed batch."""

    def __init__(self, members: Sequence[InlinePeer], lane: str, requests: list[_Request]) -> None:
        self.members = members
        self.lane = lane
        self.requests = requests
        self.seqs = [request.execute.seq for request in requests]


class InlineRuntime:
    """Ranks in this process, and a placer for them. Methods may be called from any thread.

    ::

        runtime = InlineRuntime()
        runtime.add("actor", Role(Actor, replicas=2))
        actor = Group(runtime.rosters["actor"], runtime)

    Args:
        trial: The trial, for the engines' context; None: the current directory.
        trace: How each rank traces, in a file of its own; None: what the ranks record is the caller's.

    Attributes:
        rosters: The roles by name.
        link: How the ranks' values are reached.
        desk: What this process keeps apart from the ranks.
    """

    def __init__(self, trial: TrialDir | None = None, trace: TraceConfig | None = None) -> None:
        self.session = _SESSION
        self._trace = trace
        self.rosters: dict[str, StaticRoster] = {}
        self._trial_dir = Path() if trial is None else trial.path
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers: list[InlinePeer] = []
        self._interrupt: BaseException | None = None
        self._timer = _NEVER
        self._closed = False
        self.link = InlineRefs(self._peers)
        self.desk = self.link.desk(Owner("controller", 0, 0), inlines=True)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def add(self, name: str, role: Role) -> StaticRoster:
        """Make the ranks of a role and their engines, in rank order, on the calling thread.

        The role's environment is shown in the context only; this process's stays as it is.

        Raises:
            EngineLoadError: The class cannot be loaded.
            RemoteError: The engine's constructor or ``setup`` raised; also an instance of the builtin class.
        """
        mesh = Mesh.of(role.mesh or None, role.world_size)
        sys.path[:0] = [str(entry) for entry in role.sys_path if str(entry) not in sys.path]
        peers = [self._add_rank(WorkerName(names.check(name, "role"), rank), mesh, role) for rank in range(mesh.size)]
        for peer in peers:
            self._create(peer, role)
        roster = self.rosters[name] = StaticRoster(name, mesh, list(peers), dict(peers[0].table))
        return roster

    def add_role(
        self,
        role: str,
        engine: str | type[Engine],
        *,
        replicas: int | None = None,
        mesh: Mapping[str, int] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        trial_dir: Path | None = None,
    ) -> StaticRoster:
        """As ``add``, with the parts of a role that matter inside one process."""
        if trial_dir is not None:
            self._trial_dir = trial_dir
        return self.add(role, Role(engine, replicas=replicas, mesh=mesh, args=args, kwargs=kwargs or {}))

    def _add_rank(self, name: WorkerName, mesh: Mesh, role: Role) -> InlinePeer:
        peer = InlinePeer(name, mesh, role, self._trial_dir)
        peer.refs = WorkerRefs(self.link.desk(Owner(name.role, name.rank, peer.incarnation)), self.link)
        peer.executor = Executor(
            name=str(name), incarnation=peer.incarnation, answers=_Answers(self, peer), builtins=peer.builtins(),
            refs=peer.refs, within=lambda: _as_rank(peer.tracer), heard=peer.hear,
        )  # fmt: skip
        taken = any((tracer.role, tracer.rank) == (name.role, name.rank) for tracer in control.tracers())
        if self._trace is not None and not taken:  # another trial of this process may have such a rank
            peer.tracer = control.configure(
                self._trace, role=name.role, rank=name.rank, incarnation=peer.incarnation, default=False
            )
        self._peers.append(peer)
        return peer

    def _create(self, peer: InlinePeer, role: Role) -> None:
        try:
            peer.create(role.args, role.kwargs)
        except EngineLoadError:
            raise
        except Exception as error:
            raise rebuild_exception(
                describe_exception(error),
                role=peer.name.role,
                rank=peer.name.rank,
                host=peer.welcome["host"],
                pid=peer.welcome["pid"],
                method="setup",
                attempts=1,
            ) from error

    def close(self) -> None:
        """Tear the engines down in reverse order; open calls end as not executed or unknown. Idempotent.

        Raises:
            Exception: What a ``teardown`` raised, after all were called.
        """
        if self._closed:
            return
        self._closed = True
        for peer in self._peers:
            peer.state, peer.reason, peer.evidence = InlineState.DEAD, "shutdown", "this bus is closed"
        self._expire(lambda _request: True, "shutdown", "this bus was closed")
        errors: list[BaseException] = []
        for peer in reversed(self._peers):
            try:
                peer.destroy()
            except BaseException as error:  # noqa: BLE001  # the other engines must be torn down too
                errors.append(error)
            peer.executor.close()
            if peer.refs is not None:
                peer.refs.close()
            if peer.tracer is not None:
                control.reset(peer.name.role, peer.name.rank)
        if errors:
            raise errors[0]

    # -- the placer ----------------------------------------------------------------------------------------------------

    def keeper(self, members: Sequence[InlinePeer], *, snapshot: bool) -> None:
        """Nothing leaves this process."""

    def place(
        self,
        members: Sequence[InlinePeer],
        lane: str,
        payloads: Sequence[Buffers],
        count: int,
        *,
        deadline_s: float | None,
        sink: Sink,
        results_sink: ResultsSink | None = None,  # nothing comes together here
        chunk_sink: ChunkSink | None = None,
        trace: int = 0,
        strict: bool = False,
        together: bool = False,  # ranks of one process cannot be lost one by one
    ) -> _Placed:
        """Place calls; sync endpoints have run when it returns. See ``controller.placer.Placer``.

        Raises:
            Unavailable: The bus is closed.
            KeyboardInterrupt: It was pressed while a sync endpoint ran.
        """
        now = time.monotonic()
        deadline = _NEVER if deadline_s is None else now + deadline_s
        with self._lock:
            self._check(members)
            requests = []
            for index, peer in enumerate(members):
                found = self._lane(peer, lane)
                arrived = time.monotonic_ns()
                execute = Execute(
                    _SESSION, lane, found.next_seq, count, payloads[index], None, trace, strict, 1, arrived
                )
                request = _Request(peer, execute, index, sink, chunk_sink, deadline, count)
                found.next_seq += count
                found.waiting.append(request)
                found.open[execute.seq] = request
                requests.append(request)
        for peer in members:
            self._pump(peer, self._lane(peer, lane))
        self._set_timer(deadline, requests)
        self._raise_interrupt()
        return _Placed(members, lane, requests)

    def cancel(self, placed: _Placed) -> None:
        """Drop what has not started; tell running async calls."""
        for request in placed.requests:
            with self._lock:
                lane = self._lane(request.peer, placed.lane)
                waiting = request in lane.waiting
                if waiting:
                    lane.waiting.remove(request)
            if waiting:
                self._end_all(request, Outcome(OutcomeKind.CANCELLED, None, "cancelled", "cancelled before start", 0))
            elif request.open_calls:
                execute = request.execute
                request.peer.executor.cancel(CancelRunning(execute.session, execute.lane, execute.seq))

    def consumed(self, placed: _Placed, upto: int) -> None:
        """Give a stream credit."""
        execute = placed.requests[0].execute
        credit = StreamCredit(execute.session, execute.lane, execute.seq, upto)
        placed.members[0].executor.credit(credit)

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block until ``done()`` or the timeout; return ``done()``."""
        with self._changed:
            return self._changed.wait_for(done, timeout_s)

    def wake(self) -> None:
        """Make waiting callers look again."""
        with self._changed:
            self._changed.notify_all()

    # -- running -------------------------------------------------------------------------------------------------------

    def _check(self, members: Sequence[InlinePeer]) -> None:
        if self._closed:
            msg = "this bus is closed"
            raise TransportError(msg)
        late = next((peer for peer in members if peer.state is not InlineState.READY), None)
        if late is not None:
            msg = f"nothing was sent: {late.name} is {late.state.value}"
            raise Unavailable(msg, role=late.name.role, rank=late.name.rank, outcome="NOT_EXECUTED", reason="not_ready")

    def _lane(self, peer: InlinePeer, name: str) -> _Lane:
        with self._lock:
            lane = peer.lanes.get(name)
            if lane is None:
                limit = 16 if name == "ctl" else lanes_of(peer.table).get(name, 1)
                lane = peer.lanes[name] = _Lane(name, limit)
            return lane

    def _pump(self, peer: InlinePeer, lane: _Lane) -> None:
        """Start what may start, in order. Not under the lock: a sync endpoint runs right here."""
        while True:
            with self._lock:
                if not lane.waiting or lane.running >= lane.limit:
                    return
                request = lane.waiting.popleft()
                lane.running += 1
                request.running = True
            self._start(peer, lane, request)

    def _start(self, peer: InlinePeer, lane: _Lane, request: _Request) -> None:
        if any(spec.is_async and spec.lane == lane.name for spec in peer.table.values()):
            peer.executor.dispatch(request.execute)
        elif request.chunk_sink is not None:
            # a generator waits for credit, which only its reader gives: it needs a thread beside the reader's
            threading.Thread(
                target=self._run_here, args=(peer, request), name=f"zbus-stream-{peer.name}", daemon=True
            ).start()
        else:
            self._run_here(peer, request)

    def _run_here(self, peer: InlinePeer, request: _Request) -> None:
        try:
            peer.executor.run_main(request.execute)
        except BaseException as error:  # noqa: BLE001  # an interrupt between the executor's steps
            self._end_all(request, Outcome(OutcomeKind.UNKNOWN, None, "interrupted", f"interrupted by {error!r}"))
            peer.interrupt = error
        interrupt, peer.interrupt = peer.interrupt, None
        self._interrupt = self._interrupt or interrupt

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    # -- ending --------------------------------------------------------------------------------------------------------

    def ended(self, peer: InlinePeer, execute: Execute, index: int, outcome: Outcome) -> None:
        """Take the outcome of one call. On whichever thread ran it."""
        with self._changed:
            lane = self._lane(peer, execute.lane)
            request = lane.open.get(execute.seq)
            if request is None or index in request.finished:
                return  # it was expired or cancelled meanwhile
            request.finished.add(index)
            request.open_calls -= 1
            last = request.open_calls == 0
            sink = request.sink
            if last:
                self._close(lane, request)
                request.sink, request.chunk_sink = _ignore, None  # who placed it holds it: no circle is to be left
            sink(request.member, index, outcome)
            self._changed.notify_all()
        if last:
            self._pump(peer, lane)

    def item(self, execute: Execute, peer: InlinePeer, number: int, buffers: Buffers) -> None:
        """Take one item of a stream."""
        with self._changed:
            request = self._lane(peer, execute.lane).open.get(execute.seq)
            if request is not None and request.chunk_sink is not None:
                request.chunk_sink(request.member, number, buffers)
                self._changed.notify_all()

    def _close(self, lane: _Lane, request: _Request) -> None:
        del lane.open[request.execute.seq]
        if request.running:
            lane.running -= 1

    def _end_all(self, request: _Request, outcome: Outcome) -> None:
        for index in range(request.execute.calls):
            self.ended(request.peer, request.execute, index, outcome)

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def _set_timer(self, deadline: float, requests: Sequence[_Request]) -> None:
        """Look at deadlines when the earliest is due; only what outlived ``place`` needs that."""
        if all(request.open_calls == 0 for request in requests):
            return
        with self._lock:
            if deadline >= self._timer:
                return
            self._timer = deadline
        shared().call(self._on_timer, max(0.0, deadline - time.monotonic()))

    def _on_timer(self) -> None:
        now = time.monotonic()
        self._expire(lambda request: request.deadline <= now, "deadline", "")
        with self._lock:
            lanes = itertools.chain.from_iterable(peer.lanes.values() for peer in self._peers)
            self._timer = min((r.deadline for lane in lanes for r in lane.open.values()), default=_NEVER)
            due = self._timer
        if due < _NEVER:
            shared().call(self._on_timer, max(0.0, due - time.monotonic()))

    def _expire(self, which: Callable[[_Request], bool], reason: str, evidence: str) -> None:
        with self._lock:
            lanes = [lane for peer in self._peers for lane in peer.lanes.values()]
            gone = [request for lane in lanes for request in lane.open.values() if which(request)]
            for request in gone:
                lane = self._lane(request.peer, request.execute.lane)
                if request in lane.waiting:
                    lane.waiting.remove(request)
        for request in gone:
            execute, running = request.execute, request.running
            if running:
                outcome = Outcome(OutcomeKind.UNKNOWN, None, reason, evidence or "it was running")
            else:
                outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, evidence or "it had not started", 0)
            self._end_all(request, outcome)  # first: what the cancelled method says then comes too late
            if running:
                request.peer.executor.cancel(CancelRunning(execute.session, execute.lane, execute.seq))


class InlineRefs:
    """Reaches what the ranks of this process keep; see ``controller.refs.Link`` and ``zbus.data.desk.Carriage``."""

    def __init__(self, peers: Sequence[InlinePeer]) -> None:
        self._peers = peers

    def desk(self, owner: Owner, *, inlines: bool = False) -> Desk:
        """Return where a rank, or this controller, keeps values: in memory of its own."""
        return Desk(owner, Porter(Courier(None, 0), None), carriage=self, inlines=inlines)

    def ask(self, ref: Ref, questions: Sequence[Sequence[Any]], _deadline_ns: int) -> Sequence[Mapping[str, Any]]:
        """Ask the rank that keeps a value."""
        for peer in self._peers:
            if peer.refs is not None and peer.refs.desk.is_mine(ref):
                return peer.refs.desk.answers(questions)
        return [{"gone": "its process is gone"}] * len(questions)

    def tell(self, tell: Tell, done: Callable[[bool | None], None]) -> None:
        """Tell a rank what is let go."""
        for peer in self._peers:
            if peer.refs is not None and (peer.name.role, peer.name.rank, peer.incarnation) == tell.owner:
                peer.refs.desk.release(_SESSION, tell.claims, tell.numbers)
                done(True)  # noqa: FBT003  # a callback of one argument
                return
        done(None)

    def offer(self, _offers: Offers, _whole: Sequence[Buffer], parts: Sequence[Buffer]) -> Any:
        """Hand over the buffers themselves."""
        return parts

    def tick(self) -> None:
        """Nothing is copied here."""

    def fetch(self, _ref: Ref, _sizes: Sequence[int], offered: Any, _deadline_ns: int) -> Buffers:
        """Take what was handed over."""
        taken: Buffers = offered
        return taken


_KINDS: Final = {
    Status.OK: (OutcomeKind.OK, "", ""),
    Status.APP_ERROR: (OutcomeKind.APP_ERROR, "", ""),
    Status.NOT_STARTED: (OutcomeKind.NOT_EXECUTED, "refused", "the worker could not start it"),
    Status.STOPPED: (OutcomeKind.APP_ERROR, "cancelled", "it had started and was stopped at a checkpoint"),
    Status.CANCELLED: (OutcomeKind.CANCELLED, "cancelled", "it had not begun"),
    Status.EXPIRED: (OutcomeKind.NOT_EXECUTED, "deadline", "expired before it started"),
    Status.PREDECESSOR: (OutcomeKind.NOT_EXECUTED, "predecessor", "an earlier call of the same batch failed"),
}


class _Answers:
    """Where the executor of one rank puts its answers; see ``zbus.runtime.answering.Answers``."""

    def __init__(self, runtime: InlineRuntime, peer: InlinePeer) -> None:
        self._runtime = runtime
        self._peer = peer

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        """Take the end of one call."""
        what, reason, evidence = _KINDS[status]
        payload = buffers or None
        self._runtime.ended(self._peer, request, index, Outcome(what, payload, reason, evidence))

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        """Take one item of a stream."""
        self._runtime.item(request, self._peer, number, buffers)
