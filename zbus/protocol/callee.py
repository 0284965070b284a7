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
- The reply cache is bounded by the caller's floor and window, never by time; large replies by bytes too: beyond those
  the oldest go to the shelf, and where that has no room the call reads "executed, reply not kept" if it is asked for
  again. It is never run again.
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

This module has what runs, and when; ``callee_answers`` what is said of it, ``callee_sessions`` for whom,
``callee_state`` what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zbus.protocol.callee_sessions import CalleeSessions
from zbus.protocol.callee_state import NEVER, Kept, Lane, Orphan, Run, RunState, SessionState
from zbus.protocol.frames import FrameError, join_bodies, split_requests
from zbus.protocol.messages import Buffer, Buffers, CancelRunning, Effect, Execute, Header, Kind, SendTo, Status

__all__ = ["Callee", "Orphan", "RunState"]

# The words of a small call as plain names: a look into an enum's class costs as much as ten bytecodes.
_REQ: Final = int(Kind.REQ)
_STRICT: Final = int(Status.STRICT)
_JOINED: Final = int(Status.JOINED)
_new: Final = tuple.__new__
_RUNNING: Final = RunState.RUNNING
_DONE: Final = RunState.DONE
_MAX_LANES: Final = 256
"""Lanes of one session beyond which undeclared ones are refused without being remembered."""


class Callee(CalleeSessions):
    """All sessions of one incarnation. See the module docstring and, for arguments, ``CalleeAnswers``."""

    __slots__ = ()

    # -- what the shell says -------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of requests running now, all sessions and lanes."""
        return sum(lane.running for session in self._sessions.values() for lane in session.lanes.values())

    @property
    def queued(self) -> int:
        """Number of requests admitted and not started."""
        return sum(len(lane.queue) for session in self._sessions.values() for lane in session.lanes.values())

    def drain(self) -> list[Effect]:
        """Start nothing more: what is queued ends as SHUTDOWN (not executed), what runs may end."""
        self.draining = True
        effects: list[Effect] = []
        for session_id, session in self._sessions.items():
            self._flush_queues(session_id, session, Status.SHUTDOWN, effects)
        return effects

    def hold_off(self) -> list[Effect]:
        """Start nothing until ``resume``: somebody else may have this worker's place by now. Ask the callers who knows.

        What runs may end, what arrives is queued. One caller that answers is proof enough for ``resume``.
        """
        if self.held_off:
            return []
        self.held_off = True
        return self.ask_callers()

    def ask_callers(self) -> list[Effect]:
        """Send a PING to each lane of the sessions that may start work."""
        return [
            SendTo(Header(Kind.PING, session_id, session.epoch, self._incarnation, lane.name), (), lane.peer)
            for session_id, session in self._sessions.items()
            if session.epoch and not session.retired
            for lane in session.lanes.values()
        ]

    def resume(self, now: int) -> list[Effect]:
        """Undo ``hold_off``."""
        effects: list[Effect] = []
        if self.held_off:
            self.held_off = False
            for session_id, session in list(self._sessions.items()):
                for lane in session.lanes.values():
                    self._start(session_id, session, lane, now, effects)
        return effects

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
        kept: Buffers | Kept = buffers
        if len(buffers) > 1 or (buffers and len(buffers[0]) > self._large_bytes):
            nbytes = sum(map(_nbytes, buffers))
            if nbytes > self._large_bytes:
                kept = self._keep(buffers, nbytes)
                run.large = True
        if run.calls == 1:
            run.replies = ((header, kept),)
        else:
            if type(run.replies) is not list:
                run.replies = []
            run.replies.append((header, kept))
        run.open_calls -= 1
        effects.append(_new(SendTo, (header, buffers, lane.peer)))
        if run.open_calls == 0:
            self._end(session_id, session, lane, run, now, effects)
        return effects

    def finished_together(
        self, session_id: bytes, lane_name: str, seq: int, bodies: Sequence[bytes], now: int
    ) -> list[Effect]:
        """Record that consecutive calls of one request returned, and reply to all of them in one message.

        They are kept as they left: said again, they are one message again.

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
        header = self._reply_header(Kind.RESULT, session_id, session, lane, seq, len(bodies), run.attempt, Status.OK)
        joined = (join_bodies(bodies),)
        if type(run.replies) is not list:
            run.replies = []
        run.replies.append((header, joined))
        run.open_calls -= len(bodies)
        effects: list[Effect] = [SendTo(header, joined, lane.peer)]
        if run.open_calls == 0:
            self._end(session_id, session, lane, run, now, effects)
        return effects

    def joins(self, session_id: bytes, lane_name: str) -> bool:
        """Tell whether the caller of a lane takes the results of several requests in one message."""
        session = self._sessions.get(session_id)
        lane = None if session is None else session.lanes.get(lane_name)
        return lane is not None and lane.joins

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
            lane = session.lanes[header.lane] = Lane(header.lane, concurrency, peer)
        lane.peer = peer
        if header.floor > lane.floor and header.kind != Kind.ACK:  # an ACK's floor counts chunks of its stream
            self._advance_floor(lane, header.floor)
        return self._answer(header, buffers, session, lane, now)

    def _answer(self, header: Header, buffers: Buffers, session: SessionState, lane: Lane, now: int) -> list[Effect]:
        effects: list[Effect] = []
        kind = header.kind
        if kind == _REQ and header.status == _JOINED:
            self._on_joined(header, buffers, session, lane, now, effects)
        elif kind in (Kind.REQ, Kind.SKIP):
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
        assert self._kept_bytes == sum([kept.nbytes for kept in self._kept.values()]), self._kept_bytes
        assert self._kept_bytes <= self._keep_bytes, self._kept_bytes
        for session in self._sessions.values():
            for lane in session.lanes.values():
                poised = running = queued = 0
                following = lane.arrival_next
                for run in lane.runs.values():
                    state = run.state
                    if state is RunState.HELD:
                        assert run.seq > following, (run.seq, following)
                        continue
                    assert run.seq < following, (run.seq, following)
                    if state is _RUNNING:
                        running += 1
                    elif state is RunState.QUEUED:
                        queued += 1
                    elif state is RunState.POISED:
                        poised += 1
                assert poised == (lane.poised is not None), lane.name
                assert lane.running == running + poised, lane.name
                assert lane.running <= lane.concurrency, lane.name
                assert len(lane.queue) == queued, lane.name
                assert len(lane.runs) <= 2 * self.window + lane.concurrency, lane.name
                assert all(run.seq < lane.floor + self.window for run in lane.runs.values()), lane.name

    # -- inside --------------------------------------------------------------------------------------------------

    def _start_at_once(  # private, hot path
        self, header: Header, buffers: Buffers, session: SessionState, peer: bytes, now: int
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
            or self.held_off
            or seq != lane.arrival_next
            or seq < lane.floor
            or seq < floor
            or seq >= floor + self.window
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
        runs[seq] = run = Run(header, (), now)
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
        self, header: Header, buffers: Buffers, session: SessionState, lane: Lane, now: int, effects: list[Effect]
    ) -> None:
        seq = header.seq
        if seq == lane.arrival_next and lane.floor <= seq < lane.floor + self.window:
            self._admit(header.session, session, lane, Run(header, buffers, now), effects, header.kind)
            while lane.arrival_next in lane.runs:  # held: within the window of the floor, as what came now
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
        elif seq >= lane.floor + self.window:  # it keeps no more answers than that, whatever its caller's window is
            effects.append(self._nack(header, lane.peer, Status.WINDOW))
        else:
            run = Run(header, buffers, now)
            if header.kind == Kind.SKIP:
                run.open_calls = 0  # a held place that will not run
            lane.runs[seq] = run
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))

    def _on_joined(
        self, header: Header, buffers: Buffers, session: SessionState, lane: Lane, now: int, effects: list[Effect]
    ) -> None:
        """Take a message of several requests of one call each, as if each had come in a message of its own."""
        try:
            requests = split_requests(buffers)
        except FrameError:
            requests = []
        if len(requests) != header.calls:
            self._drop("joined")
            return
        lane.joins = True
        _, session_id, epoch, incarnation, name, first, _, attempt, floor, _, _, trace = header
        for seq, (budget_ms, body) in enumerate(requests, first):
            one = _new(
                Header,
                (_REQ, session_id, epoch, incarnation, name, seq, 1, attempt, floor, budget_ms, 0, trace),
            )  # fmt: skip
            self._on_request(one, (body,), session, lane, now, effects)

    def _admit(
        self, session_id: bytes, session: SessionState, lane: Lane, run: Run, effects: list[Effect], kind: int
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

    def _start(self, session_id: bytes, session: SessionState, lane: Lane, now: int, effects: list[Effect]) -> None:
        if lane.poised is not None or self.held_off:
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

    def _execute(self, session_id: bytes, session: SessionState, lane: Lane, run: Run, effects: list[Effect]) -> None:
        run.state = RunState.RUNNING
        effects.append(
            Execute(
                session_id, lane.name, run.seq, run.calls, run.buffers,
                None if run.deadline_ns == NEVER or run.together else run.deadline_ns,  # GO was in time
                run.trace, run.strict, run.attempt, run.arrived_ns, session.epoch,
            )
        )  # fmt: skip
        run.buffers = ()

    def _on_go(self, header: Header, session: SessionState, lane: Lane, now: int, effects: list[Effect]) -> None:
        run = lane.poised
        if run is None or run.seq != header.seq or self.held_off:
            # It came before, and its caller has not heard of it; or it is not to start now, and GO will be said again.
            self._on_probe(header, session, lane, effects)
            return
        lane.poised = None
        self._execute(header.session, session, lane, run, effects)
        self._start(header.session, session, lane, now, effects)

    def _on_cancel(self, header: Header, session: SessionState, lane: Lane, now: int, effects: list[Effect]) -> None:
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

    def _end(
        self, session_id: bytes, session: SessionState, lane: Lane, run: Run, now: int, effects: list[Effect]
    ) -> None:
        """A run has its last reply: its slot is free."""
        run.state = _DONE
        run.buffers = ()
        lane.running -= 1
        if session.retired:
            if session.superseded and lane.name != "ctl":
                self._add_orphan(session_id, session, lane, run)
            elif run.large:
                self._let_go(run.replies)
            del lane.runs[run.seq]
            self._forget_if_idle(session_id, session)
        elif run.seq + run.calls <= lane.floor:
            if run.large:
                self._let_go(run.replies)
            del lane.runs[run.seq]
        if lane.queue:
            self._start(session_id, session, lane, now, effects)


def _nbytes(buffer: Buffer) -> int:
    """Return the bytes that keeping a frame takes here: of one that names an array elsewhere, only its own."""
    return buffer.nbytes if type(buffer) is memoryview else len(buffer)
