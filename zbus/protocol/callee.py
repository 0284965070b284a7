"""The callee's side: every session that calls this incarnation, its lanes, and each request from arrival to reply.

Theory of operation
-------------------
A request, named by (session, lane, first seq), goes through::

    HELD (a gap before it) --> QUEUED --> RUNNING --> DONE (replies cached) --> forgotten (below the caller's floor)
                                  +-> POISED -+   a request that starts together with other workers

- Admission is in seq order without holes; at most ``concurrency`` requests of a lane run at once, and they start in
  seq order (P4). A request is handed out as ``Execute`` once, ever (P2).
- Whatever arrives about a known request is answered from its state: DONE resends the cached replies, anything else is
  PROGRESS. Nothing known is ever run again.
- The reply cache is bounded by the caller's floor and window, never by time.
- A deadline is remaining milliseconds from arrival; a request that expires in the queue is never started.
- Only the highest epoch that ever said HELLO may start work. A lower one is NACKed; when a higher one arrives, what
  the old session had queued ends as not executed, what runs may end, and nothing of it starts any more (P8).
- A session that is over (replaced, or it said BYE) is remembered by its id, without its replies: a late copy of its
  HELLO and requests must not open it again and run them a second time.
- A request that starts together takes its turn like any other, then says POISED and waits for GO with its slot kept;
  nothing behind it starts before it (P4). While POISED it does not expire here: the caller has GO or CANCEL on its way
  to all members, and this one must not decide for itself (the caller gives no GO after the deadline).
- A place that will not run (expired, cancelled, draining, no such lane) is admitted in order like any other and its
  answer is cached like any other, so that a lost answer is said again and the sequence has no hole.
  Epoch 0 is a guest: it has its own session and may use only the lanes in ``guest_lanes``.

Pure: one mutator at a time (the shell's lock); time is handed in.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from zbus.protocol.frames import join_bodies
from zbus.protocol.messages import (
    Buffers,
    CancelRunning,
    Effect,
    Execute,
    Header,
    Kind,
    SendTo,
    Status,
    StreamCredit,
)

__all__ = ["Callee", "Orphan", "RunState"]

_MS: Final = 1_000_000

# The words of a small call as plain names: a look into an enum's class costs as much as ten bytecodes.
_REQ: Final = int(Kind.REQ)
_STRICT: Final = int(Status.STRICT)
_new: Final = tuple.__new__
_NEVER: Final = 1 << 62
_MAX_LANES: Final = 256
"""Lanes of one session beyond which undeclared ones are refused without being remembered."""
_MAX_ORPHANS: Final = 256
"""Ended requests of superseded controllers kept for the successor; beyond it the oldest go, counted."""

_MAX_ENDED: Final = 4096
"""Sessions that are over and still remembered: a copy of a message outlives its session by seconds, not by these."""


class RunState(enum.Enum):
    """Where a request is on the callee's side."""

    HELD = "held"
    QUEUED = "queued"
    POISED = "poised"
    RUNNING = "running"
    DONE = "done"


_PROGRESS: Final = {
    RunState.HELD: Status.HELD,
    RunState.QUEUED: Status.QUEUED,
    RunState.POISED: Status.POISED,
    RunState.RUNNING: Status.RUNNING,
}


_RUNNING: Final = RunState.RUNNING
_DONE: Final = RunState.DONE


class _Run:
    """One request as the callee knows it."""

    # Defaults stand in the class: most requests start, end with one reply, and need none of these.
    replies: tuple[tuple[Header, Buffers], ...] | list[tuple[Header, Buffers]] = ()
    chunks: deque[tuple[Header, Buffers]] | None = None  # sent, not yet acknowledged by the caller: oldest first
    acked = 0
    state = RunState.HELD
    strict = False  # a failed call makes its successors NOT_EXECUTED
    together = False

    def __init__(self, header: Header, buffers: Buffers, now: int) -> None:
        _, _, _, _, _, self.seq, calls, self.attempt, _, budget_ms, status, self.trace = header
        self.calls = calls
        self.buffers = buffers
        self.deadline_ns = now + budget_ms * _MS if budget_ms else _NEVER
        if status:
            self.strict = status in (Status.STRICT, Status.TOGETHER_STRICT)
            self.together = status in (Status.TOGETHER, Status.TOGETHER_STRICT)
        self.arrived_ns = now
        self.open_calls = calls


class _Lane:
    """One lane of one session."""

    __slots__ = ("arrival_next", "concurrency", "floor", "name", "peer", "poised", "queue", "running", "runs")

    #: every seq below was admitted or skipped; contiguous
    arrival_next: int
    #: the caller's floor: runs wholly below it are forgotten once done
    floor: int
    #: all runs known, by first seq: HELD, QUEUED, RUNNING, DONE
    runs: dict[int, _Run]
    #: QUEUED runs in seq order
    queue: deque[_Run]
    #: number of RUNNING and POISED runs, at most ``concurrency``
    running: int
    #: the POISED run, if there is one; the queue waits behind it
    poised: _Run | None

    def __init__(self, name: str, concurrency: int, peer: bytes) -> None:
        self.name = name
        self.concurrency = concurrency
        self.peer = peer
        self.arrival_next = 0
        self.floor = 0
        self.runs = {}
        self.queue = deque()
        self.running = 0
        self.poised = None


class _SessionState:
    """One caller's session."""

    __slots__ = ("epoch", "lanes", "retired", "superseded")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.lanes: dict[str, _Lane] = {}
        self.retired = False  # superseded by a higher epoch, or said BYE: starts nothing any more
        self.superseded = False  # by a higher epoch: what it ran is kept for the successor


class Orphan(NamedTuple):
    """What is left of a request whose controller was superseded: a successor may list and adopt it.

    Attributes:
        session, epoch: Whose it was.
        lane, seq: Which request.
        calls: Calls in it.
        replies: The words that would have gone to the caller, in call order; fewer than ``calls`` while it runs.
    """

    session: bytes
    epoch: int
    lane: str
    seq: int
    calls: int
    replies: tuple[tuple[Header, Buffers], ...]

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return len(self.replies) < self.calls


class Callee:
    """All sessions of one incarnation. See the module docstring.

    Args:
        incarnation: This incarnation.
        lanes: Lane name to concurrency (how many requests of it may run at once; >= 1).
        window_calls: Arrivals accepted ahead of the next expected seq, per lane.
        guest_lanes: Lanes that a guest (epoch 0) may use; None for all (the shell then checks each call's effect).
    """

    __slots__ = (
        "_ended",
        "_guest_lanes",
        "_incarnation",
        "_lane_spec",
        "_orphans",
        "_sessions",
        "draining",
        "dropped",
        "max_epoch",
        "may_queue",
        "window",
    )

    def __init__(
        self,
        incarnation: int,
        lanes: dict[str, int],
        *,
        window_calls: int = 1024,
        guest_lanes: Iterable[str] | None = ("ctl",),
    ) -> None:
        self._incarnation = incarnation
        self._lane_spec = dict(lanes)
        self._guest_lanes = None if guest_lanes is None else frozenset(guest_lanes)
        self._sessions: dict[bytes, _SessionState] = {}
        self._orphans: dict[tuple[bytes, str, int], Orphan] = {}  # ended, oldest first, at most _MAX_ORPHANS
        self._ended: dict[bytes, None] = {}  # the last sessions that are over, oldest first
        self.window = window_calls
        self.max_epoch = 0
        self.draining = False
        self.may_queue = False  # something was queued since ``expire`` last found nothing
        self.dropped: dict[str, int] = {}

    # -- what the shell says -------------------------------------------------------------------------------------

    def open_lane(self, name: str, concurrency: int) -> None:
        """Declare a lane; callers may use it from now on."""
        self._lane_spec[name] = concurrency
        for session in self._sessions.values():
            lane = session.lanes.get(name)
            if lane is not None and self._may_use(session, name):
                lane.concurrency = concurrency

    def lane_cursors(self, session: bytes) -> dict[str, int]:
        """Return, for WELCOME, the next expected seq of each lane this session has used."""
        state = self._sessions.get(session)
        return {} if state is None else {name: lane.arrival_next for name, lane in state.lanes.items()}

    def orphans(self) -> list[Orphan]:
        """Return what superseded controllers left: requests that ran (or run) and whose outcome they may not have."""
        running = [
            Orphan(session_id, session.epoch, lane.name, run.seq, run.calls, tuple(run.replies))
            for session_id, session in self._sessions.items()
            if session.superseded
            for lane in session.lanes.values()
            if lane.name != "ctl"
            for run in lane.runs.values()
            if run.state is RunState.RUNNING
        ]
        return [*self._orphans.values(), *running]

    def adopt(self, session: bytes, lane: str, seq: int) -> Orphan | None:
        """Hand over one ended orphan and forget it; None where there is none (any more, or yet)."""
        return self._orphans.pop((session, lane, seq), None)

    def knows(self, session: bytes) -> bool:
        """Return whether something of a session runs or may still come."""
        return session in self._sessions

    def drain(self) -> list[Effect]:
        """Start nothing more: what is queued ends as SHUTDOWN (not executed), what runs may end."""
        self.draining = True
        effects: list[Effect] = []
        for session_id, session in self._sessions.items():
            self._flush_queues(session_id, session, Status.SHUTDOWN, effects)
        return effects

    @property
    def running(self) -> int:
        """Number of requests running now, all sessions and lanes."""
        return sum(lane.running for session in self._sessions.values() for lane in session.lanes.values())

    @property
    def queued(self) -> int:
        """Number of requests admitted and not started."""
        return sum(len(lane.queue) for session in self._sessions.values() for lane in session.lanes.values())

    def announce(self, name: str) -> list[Effect]:
        """Tell the callers of what runs in lane ``name`` so, unasked: said once of a call that turns out to be long."""
        effects: list[Effect] = []
        for session_id, session in self._sessions.items():
            lane = session.lanes.get(name)
            for run in () if lane is None else lane.runs.values():
                if lane is not None and run.state is RunState.RUNNING:
                    header = self._reply_header(
                        Kind.PROGRESS, session_id, session, lane, run.seq, run.calls, run.attempt, Status.RUNNING
                    )
                    effects.append(SendTo(header, (), lane.peer))
        return effects

    def finished(
        self, session_id: bytes, lane_name: str, seq: int, kind: Kind, status: Status, buffers: Buffers, now: int,
        *, chunks: int = 0,
    ) -> list[Effect]:  # fmt: skip
        """Record how one call ended and reply. ``seq`` is the call's own seq, not its request's.

        Args:
            session_id: Session of the request.
            lane_name: Its lane.
            seq: The call.
            kind: RESULT, FAILURE or END (of a stream).
            status: How it ended.
            buffers: Encoded result or exception.
            now: Monotonic time.
            chunks: For END, how many chunks the stream had.
        """
        effects: list[Effect] = []
        session = self._sessions.get(session_id)
        lane = None if session is None else session.lanes.get(lane_name)
        run = None if lane is None else lane.runs.get(seq) or self._run_of(lane, seq)
        if session is None or lane is None or run is None or run.state is not _RUNNING:
            self._drop("finished_unknown")
            return effects
        header = _new(
            Header,
            (
                kind, session_id, session.epoch, self._incarnation, lane_name, seq, 1, run.attempt, chunks, 0,
                status, 0,
            ),
        )  # fmt: skip
        if run.calls == 1:
            run.replies = ((header, buffers),)
        else:
            if type(run.replies) is not list:
                run.replies = []
            run.replies.append((header, buffers))
        run.open_calls -= 1
        effects.append(_new(SendTo, (header, buffers, lane.peer)))
        if run.open_calls == 0:
            self._end(session_id, session, lane, run, now, effects)
        return effects

    def finished_together(
        self, session_id: bytes, lane_name: str, seq: int, bodies: Sequence[bytes], now: int
    ) -> list[Effect]:
        """Record that consecutive calls of one request returned, and reply to all of them in one message.

        The replies are kept one by one: said again, each is a message of its own.

        Args:
            session_id: Session of the request.
            lane_name: Its lane.
            seq: The first of the calls.
            bodies: The encoded value of each, one frame without buffers.
            now: Monotonic time.
        """
        if len(bodies) == 1:
            return self.finished(session_id, lane_name, seq, Kind.RESULT, Status.OK, bodies, now)
        session = self._sessions.get(session_id)
        lane = None if session is None else session.lanes.get(lane_name)
        run = None if lane is None else self._run_of(lane, seq)
        if session is None or lane is None or run is None or run.state is not _RUNNING:
            self._drop("finished_unknown")
            return []
        first = self._reply_header(Kind.RESULT, session_id, session, lane, seq, 1, run.attempt, Status.OK)
        if type(run.replies) is not list:
            run.replies = []
        *head, _, calls, attempt, floor, budget_ms, status, trace = first
        tail = (calls, attempt, floor, budget_ms, status, trace)
        run.replies += [(_new(Header, (*head, each, *tail)), (body,)) for each, body in enumerate(bodies, seq)]
        run.open_calls -= len(bodies)
        effects: list[Effect] = [SendTo(first._replace(calls=len(bodies)), (join_bodies(bodies),), lane.peer)]
        if run.open_calls == 0:
            self._end(session_id, session, lane, run, now, effects)
        return effects

    def _end(
        self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run, now: int, effects: list[Effect]
    ) -> None:
        """A run has its last reply: its slot is free."""
        run.state = _DONE
        run.buffers = ()
        lane.running -= 1
        if session.retired:
            if session.superseded and lane.name != "ctl":
                self._add_orphan(session_id, session, lane, run)
            del lane.runs[run.seq]
            self._forget_if_idle(session_id, session)
        elif run.seq + run.calls <= lane.floor:
            del lane.runs[run.seq]
        if lane.queue:
            self._start(session_id, session, lane, now, effects)

    def chunk(self, session_id: bytes, lane_name: str, seq: int, number: int, buffers: Buffers) -> list[Effect]:
        """Send one item of a running stream; it is kept until the caller acknowledges it."""
        session = self._sessions.get(session_id)
        lane = None if session is None else session.lanes.get(lane_name)
        run = None if lane is None else lane.runs.get(seq)
        if session is None or lane is None or run is None or run.state is not RunState.RUNNING:
            self._drop("chunk_unknown")
            return []
        header = self._reply_header(
            Kind.CHUNK, session_id, session, lane, seq, 1, run.attempt, Status.NONE, floor=number
        )
        if run.chunks is None:
            run.chunks = deque()
        run.chunks.append((header, buffers))
        return [SendTo(header, buffers, lane.peer)]

    def expire(self, now: int) -> list[Effect]:
        """End queued requests whose deadline has passed. Call from time to time while anything is queued."""
        effects: list[Effect] = []
        for session_id, session in self._sessions.items():
            for lane in session.lanes.values():
                for run in [run for run in lane.queue if run.deadline_ns <= now]:
                    lane.queue.remove(run)
                    self._end_unstarted(session_id, session, lane, run, Status.EXPIRED, effects)
        self.may_queue = self.queued > 0
        return effects

    # -- what the network says -----------------------------------------------------------------------------------

    def hello(self, header: Header, now: int) -> tuple[Status, list[Effect]]:
        """Admit a session. Returns NONE and effects if welcome, else the NACK status.

        The shell builds the WELCOME (it carries records the core does not know) with ``lane_cursors``.
        """
        if header.incarnation not in (0, self._incarnation):
            return Status.FENCED_INCARNATION, []
        if header.epoch and header.epoch < self.max_epoch:
            return Status.FENCED_EPOCH, []
        known = self._sessions.get(header.session)
        if header.session in self._ended or (known is not None and known.retired):
            return Status.DRAINING, []
        effects: list[Effect] = []
        if header.epoch > self.max_epoch:
            self.max_epoch = header.epoch
            for session_id, session in self._sessions.items():
                if session.epoch and session.epoch < header.epoch and not session.retired:
                    session.superseded = True
                    self._keep_orphans(session_id, session)
                    self._retire(session_id, session, effects)
            for session_id, session in list(self._sessions.items()):
                if session.retired:
                    self._forget_if_idle(session_id, session)
        if header.session not in self._sessions:
            self._sessions[header.session] = _SessionState(header.epoch)
        return Status.NONE, effects

    def bye(self, session_id: bytes) -> list[Effect]:
        """A caller leaves: what it had queued will not start; what runs may end; its cache is freed when idle."""
        session = self._sessions.get(session_id)
        effects: list[Effect] = []
        if session is not None:
            self._retire(session_id, session, effects)
            self._forget_if_idle(session_id, session)
        else:
            self._remember_end(session_id)  # its HELLO may still come, on another connection
        return effects

    def receive(self, header: Header, buffers: Buffers, peer: bytes, now: int) -> list[Effect]:
        """Take one message of a caller (any kind but HELLO, PING and BYE) and answer it."""
        session = self._sessions.get(header.session)
        if session is not None and header.kind == _REQ:
            execute = self._start_at_once(header, buffers, session, peer, now)
            if execute is not None:
                return [execute]
        refused = self._refusal(header, session)
        if refused is not None:
            return [self._nack(header, peer, refused)]
        if session is None or session.retired:
            self._drop("session_over")
            return []
        lane = session.lanes.get(header.lane)
        if lane is None:
            concurrency = self._lane_spec.get(header.lane, 0) if self._may_use(session, header.lane) else 0
            if not concurrency and len(session.lanes) >= _MAX_LANES:
                return [self._nack(header, peer, Status.UNKNOWN_LANE)]
            lane = session.lanes[header.lane] = _Lane(header.lane, concurrency, peer)
        lane.peer = peer
        if header.floor > lane.floor and header.kind != Kind.ACK:  # an ACK's floor counts chunks of its stream
            self._advance_floor(lane, header.floor)
        return self._answer(header, buffers, session, lane, now)

    def _answer(self, header: Header, buffers: Buffers, session: _SessionState, lane: _Lane, now: int) -> list[Effect]:
        effects: list[Effect] = []
        kind = header.kind
        if kind in (Kind.REQ, Kind.SKIP):
            self._on_request(header, buffers, session, lane, now, effects)
        elif kind == Kind.PROBE:
            self._on_probe(header, session, lane, effects)
        elif kind == Kind.CANCEL:
            self._on_cancel(header, session, lane, now, effects)
        elif kind == Kind.GO:
            self._on_go(header, session, lane, now, effects)
        elif kind == Kind.ACK:
            self._on_ack(header, lane, effects)
        else:
            self._drop("kind")
        return effects

    def validate(self) -> None:
        """Raise AssertionError when an invariant of this machine is broken; for tests and simulation."""
        for session in self._sessions.values():
            for lane in session.lanes.values():
                states = [run.state for run in lane.runs.values()]
                poised = states.count(RunState.POISED)
                assert poised == (lane.poised is not None), lane.name
                assert lane.running == states.count(RunState.RUNNING) + poised, lane.name
                assert lane.running <= lane.concurrency, lane.name
                assert len(lane.queue) == states.count(RunState.QUEUED), lane.name
                assert len(lane.runs) <= 2 * self.window + lane.concurrency, lane.name
                for run in lane.runs.values():
                    if run.state is RunState.HELD:
                        assert run.seq > lane.arrival_next, (run.seq, lane.arrival_next)
                    else:
                        assert run.seq < lane.arrival_next, (run.seq, lane.arrival_next)

    # -- inside --------------------------------------------------------------------------------------------------

    def _refusal(self, header: Header, session: _SessionState | None) -> Status | None:
        if header.incarnation != self._incarnation:
            return Status.FENCED_INCARNATION
        if header.epoch and header.epoch < self.max_epoch:
            return Status.FENCED_EPOCH
        if session is None and header.session not in self._ended:
            return Status.NO_SESSION
        return None

    def _may_use(self, session: _SessionState, lane: str) -> bool:
        return session.epoch > 0 or self._guest_lanes is None or lane in self._guest_lanes

    def _start_at_once(  # private, hot path
        self, header: Header, buffers: Buffers, session: _SessionState, peer: bytes, now: int
    ) -> Execute | None:
        """Admit and start the request that the lane is waiting for with a free slot: the common case in one step.

        None, and nothing done, where anything else is to be said or done about it.
        """
        _, session_id, epoch, incarnation, name, seq, calls, attempt, floor, budget_ms, status, trace = header
        lane = session.lanes.get(name)
        if lane is None or lane.running or lane.queue or not lane.concurrency:
            return None
        following = seq + calls
        runs = lane.runs
        if (
            session.retired
            or self.draining
            or seq != lane.arrival_next
            or seq < lane.floor
            or seq < floor
            or incarnation != self._incarnation
            or (epoch and epoch < self.max_epoch)
            or following in runs
            or status > _STRICT  # it starts together with others
        ):
            return None
        lane.peer = peer
        if floor > lane.floor:
            self._advance_floor(lane, floor)
        lane.arrival_next = following
        runs[seq] = run = _Run(header, (), now)
        run.state = _RUNNING
        lane.running += 1
        deadline_ns = run.deadline_ns if budget_ms else None
        return _new(
            Execute,
            (
                session_id, name, seq, calls, buffers, deadline_ns, trace, run.strict, attempt, now, session.epoch,
            ),
        )  # fmt: skip

    def _on_request(
        self, header: Header, buffers: Buffers, session: _SessionState, lane: _Lane, now: int, effects: list[Effect]
    ) -> None:
        seq = header.seq
        if seq == lane.arrival_next and seq >= lane.floor:
            self._admit(header.session, session, lane, _Run(header, buffers, now), effects, header.kind)
            while lane.arrival_next in lane.runs:
                held = lane.runs.pop(lane.arrival_next)
                self._admit(header.session, session, lane, held, effects, Kind.REQ if held.open_calls else Kind.SKIP)
            if lane.queue and lane.running < lane.concurrency:
                self._start(header.session, session, lane, now, effects)
            return
        known = lane.runs.get(seq)
        if known is not None:
            if known.calls != header.calls:
                effects.append(self._nack(header, lane.peer, Status.MISMATCH))
            elif header.kind == Kind.SKIP:  # it came as REQ before, and nobody wants it any more
                self._on_cancel(header, session, lane, now, effects)
            else:
                self._report(header, session, lane, known, effects)
        elif seq < lane.floor:
            self._drop("below_floor")
        elif seq < lane.arrival_next:
            self._reply_unstarted(header, lane, Status.EVICTED, effects)
        elif seq >= lane.arrival_next + self.window:
            effects.append(self._nack(header, lane.peer, Status.WINDOW))
        else:
            run = _Run(header, buffers, now)
            if header.kind == Kind.SKIP:
                run.open_calls = 0  # a held place that will not run
            lane.runs[seq] = run
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))

    def _admit(
        self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run, effects: list[Effect], kind: int
    ) -> None:
        lane.arrival_next = run.seq + run.calls
        lane.runs[run.seq] = run
        if kind == Kind.SKIP:
            self._end_unstarted(session_id, session, lane, run, Status.EXPIRED, effects)
            return
        if self.draining or not lane.concurrency:
            why = Status.SHUTDOWN if self.draining else Status.UNKNOWN_LANE
            self._end_unstarted(session_id, session, lane, run, why, effects)
            return
        run.state = RunState.QUEUED
        lane.queue.append(run)
        self.may_queue = True

    def _start(self, session_id: bytes, session: _SessionState, lane: _Lane, now: int, effects: list[Effect]) -> None:
        if lane.poised is not None:
            return
        while lane.queue and lane.running < lane.concurrency and not session.retired and not self.draining:
            run = lane.queue.popleft()
            if run.deadline_ns <= now:
                self._end_unstarted(session_id, session, lane, run, Status.EXPIRED, effects)
                continue
            lane.running += 1
            if run.together:
                run.state = RunState.POISED
                lane.poised = run
                effects.append(self._progress(session_id, session, lane, run, run.attempt))
                return
            self._execute(session_id, session, lane, run, effects)

    def _execute(
        self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run, effects: list[Effect]
    ) -> None:
        run.state = RunState.RUNNING
        effects.append(
            Execute(
                session_id, lane.name, run.seq, run.calls, run.buffers,
                None if run.deadline_ns == _NEVER or run.together else run.deadline_ns,  # GO was in time
                run.trace, run.strict, run.attempt, run.arrived_ns, session.epoch,
            )
        )  # fmt: skip
        run.buffers = ()

    def _on_go(self, header: Header, session: _SessionState, lane: _Lane, now: int, effects: list[Effect]) -> None:
        run = lane.poised
        if run is None or run.seq != header.seq:
            self._on_probe(header, session, lane, effects)  # it came before, and its caller has not heard of it
            return
        lane.poised = None
        self._execute(header.session, session, lane, run, effects)
        self._start(header.session, session, lane, now, effects)

    def _on_probe(self, header: Header, session: _SessionState, lane: _Lane, effects: list[Effect]) -> None:
        run = lane.runs.get(header.seq)
        if run is not None:
            self._report(header, session, lane, run, effects)
        elif header.seq >= lane.arrival_next:
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))
        elif header.seq >= lane.floor:
            self._reply_unstarted(header, lane, Status.EVICTED, effects)

    def _on_cancel(self, header: Header, session: _SessionState, lane: _Lane, now: int, effects: list[Effect]) -> None:
        run = lane.runs.get(header.seq)
        if run is None:
            self._on_probe(header, session, lane, effects)
        elif run.state is RunState.QUEUED:
            lane.queue.remove(run)
            self._end_unstarted(header.session, session, lane, run, Status.CANCELLED, effects)
        elif run.state is RunState.POISED:
            lane.poised = None
            lane.running -= 1
            self._end_unstarted(header.session, session, lane, run, Status.CANCELLED, effects)
            self._start(header.session, session, lane, now, effects)
        elif run.state is RunState.RUNNING:
            effects.append(CancelRunning(header.session, lane.name, run.seq))
            self._report(header, session, lane, run, effects)
        else:
            if run.state is RunState.HELD:
                run.open_calls = 0  # when its turn comes, its place is taken and it does not run
                run.buffers = ()
            self._report(header, session, lane, run, effects)

    def _on_ack(self, header: Header, lane: _Lane, effects: list[Effect]) -> None:
        run = lane.runs.get(header.seq)
        if run is None or header.floor <= run.acked:
            return
        run.acked = header.floor
        while run.chunks and run.chunks[0][0].floor < run.acked:
            run.chunks.popleft()
        effects.append(StreamCredit(header.session, lane.name, run.seq, run.acked))

    def _report(self, header: Header, session: _SessionState, lane: _Lane, run: _Run, effects: list[Effect]) -> None:
        """Say what is known of a run: its cached words again, and where it is if it has not ended."""
        if run.state is RunState.HELD:
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))
            return
        effects.extend(SendTo(chunk, buffers, lane.peer) for chunk, buffers in run.chunks or ())
        effects.extend(SendTo(reply, buffers, lane.peer) for reply, buffers in run.replies)
        if run.state is not RunState.DONE:
            effects.append(self._progress(header.session, session, lane, run, header.attempt))

    def _progress(self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run, attempt: int) -> SendTo:
        return SendTo(
            self._reply_header(
                Kind.PROGRESS, session_id, session, lane, run.seq, run.calls, attempt, _PROGRESS[run.state]
            ),
            (),
            lane.peer,
        )

    def _end_unstarted(
        self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run, status: Status, effects: list[Effect]
    ) -> None:
        run.state = RunState.DONE
        run.open_calls = 0
        run.buffers = ()
        header = self._reply_header(Kind.FAILURE, session_id, session, lane, run.seq, run.calls, run.attempt, status)
        run.replies = ((header, ()),)
        effects.append(SendTo(header, (), lane.peer))

    def _retire(self, session_id: bytes, session: _SessionState, effects: list[Effect]) -> None:
        """End a session: nothing of it starts any more, and only what runs is kept."""
        session.retired = True
        self._flush_queues(session_id, session, Status.SHUTDOWN, effects)
        for lane in session.lanes.values():
            lane.runs = {seq: run for seq, run in lane.runs.items() if run.state is RunState.RUNNING}

    def _keep_orphans(self, session_id: bytes, session: _SessionState) -> None:
        for lane in session.lanes.values():
            if lane.name == "ctl":
                continue
            for run in lane.runs.values():
                if run.state is RunState.DONE and any(_ran(header) for header, _ in run.replies):
                    self._add_orphan(session_id, session, lane, run)

    def _add_orphan(self, session_id: bytes, session: _SessionState, lane: _Lane, run: _Run) -> None:
        self._orphans[session_id, lane.name, run.seq] = Orphan(
            session_id, session.epoch, lane.name, run.seq, run.calls, tuple(run.replies)
        )
        if len(self._orphans) > _MAX_ORPHANS:
            del self._orphans[next(iter(self._orphans))]
            self._drop("orphan_evicted")

    def _forget_if_idle(self, session_id: bytes, session: _SessionState) -> None:
        if not any(lane.running for lane in session.lanes.values()):
            del self._sessions[session_id]
            self._remember_end(session_id)

    def _remember_end(self, session_id: bytes) -> None:
        self._ended[session_id] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _flush_queues(self, session_id: bytes, session: _SessionState, status: Status, effects: list[Effect]) -> None:
        for lane in session.lanes.values():
            if lane.poised is not None:
                lane.queue.appendleft(lane.poised)
                lane.poised = None
                lane.running -= 1
            while lane.queue:
                self._end_unstarted(session_id, session, lane, lane.queue.popleft(), status, effects)

    def _advance_floor(self, lane: _Lane, floor: int) -> None:
        lane.floor = floor
        runs = lane.runs
        while runs:  # admission order is seq order; a run still going only delays the forgetting of those behind it
            run = next(iter(runs.values()))
            if run.state is not _DONE or run.seq + run.calls > floor:
                return
            del runs[run.seq]

    def _run_of(self, lane: _Lane, seq: int) -> _Run | None:
        run = lane.runs.get(seq)
        if run is not None:
            return run
        for candidate in lane.runs.values():
            if candidate.seq <= seq < candidate.seq + candidate.calls:
                return candidate
        return None

    def _reply_header(  # noqa: PLR0917  # private: the fields of a header
        self, kind: Kind, session_id: bytes, session: _SessionState, lane: _Lane, seq: int, calls: int, attempt: int,
        status: Status, floor: int = 0,
    ) -> Header:  # fmt: skip
        return Header(
            kind, session_id, session.epoch, self._incarnation, lane.name, seq, calls, attempt, floor, 0, status
        )

    def _reply_unstarted(self, header: Header, lane: _Lane, status: Status, effects: list[Effect]) -> None:
        reply = header._replace(kind=Kind.FAILURE, status=status, floor=0, trace=0)
        effects.append(SendTo(reply, (), lane.peer))

    def _nack(self, header: Header, peer: bytes, status: Status, seq: int | None = None) -> SendTo:
        return SendTo(
            header._replace(
                kind=Kind.NACK, status=status, seq=header.seq if seq is None else seq, floor=self.max_epoch, trace=0
            ),
            (),
            peer,
        )

    def _drop(self, why: str) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + 1


def _ran(header: Header) -> bool:
    """Tell whether a reply says that its call ran."""
    return header.kind in (Kind.RESULT, Kind.END) or header.status in (Status.APP_ERROR, Status.STOPPED)
