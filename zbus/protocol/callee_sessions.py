"""Which sessions a callee serves: epochs, guests, farewells, and what superseded controllers leave behind.

Part of ``callee.Callee``, where the theory of operation stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from zbus.protocol.callee_answers import CalleeAnswers
from zbus.protocol.callee_state import Lane, Left, Orphan, Run, RunState, SessionState
from zbus.protocol.frames import split_bodies
from zbus.protocol.messages import Buffers, Effect, Header, Kind, Status

__all__ = ["CalleeSessions"]

_MAX_ORPHANS: Final = 256
"""Ended requests of superseded controllers kept for the successor; beyond it the oldest go, counted."""

_MAX_ENDED: Final = 4096
"""Sessions that are over and still remembered: a copy of a message outlives its session by seconds, not by these."""


class CalleeSessions(CalleeAnswers):
    """Admits and ends sessions."""

    __slots__ = ()

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
        ended = [self._orphan(*key, left) for key, left in self._orphans.items()]
        running = [
            self._orphan(session_id, lane.name, run.seq, Left(session.epoch, run.calls, run.replies))
            for session_id, session in self._sessions.items()
            if session.superseded
            for lane in session.lanes.values()
            if lane.name != "ctl"
            for run in lane.runs.values()
            if run.state is RunState.RUNNING
        ]
        return [*ended, *running]

    def adopt(self, session: bytes, lane: str, seq: int) -> Orphan | None:
        """Hand over one ended orphan and forget it; None where there is none (any more, or yet)."""
        left = self._orphans.pop((session, lane, seq), None)
        if left is None:
            return None
        orphan = self._orphan(session, lane, seq, left)
        self._let_go(left.replies)
        return orphan

    def _orphan(self, session: bytes, lane: str, seq: int, left: Left) -> Orphan:
        words = itertools.chain.from_iterable(_one_by_one(*self._word(header, reply)) for header, reply in left.replies)
        return Orphan(session, left.epoch, lane, seq, left.calls, tuple(words))

    def knows(self, session: bytes) -> bool:
        """Return whether something of a session runs or may still come."""
        return session in self._sessions

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
            self._sessions[header.session] = SessionState(header.epoch)
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

    def _refusal(self, header: Header, session: SessionState | None) -> Status | None:
        if header.incarnation != self._incarnation:
            return Status.FENCED_INCARNATION
        if header.epoch and header.epoch < self.max_epoch:
            return Status.FENCED_EPOCH
        if session is None and header.session not in self._ended:
            return Status.NO_SESSION
        return None

    def _may_use(self, session: SessionState, lane: str) -> bool:
        return session.epoch > 0 or self._guest_lanes is None or lane in self._guest_lanes

    def _retire(self, session_id: bytes, session: SessionState, effects: list[Effect]) -> None:
        """End a session: nothing of it starts any more, and only what runs is kept."""
        session.retired = True
        self._flush_queues(session_id, session, Status.SHUTDOWN, effects)
        for lane in session.lanes.values():
            for run in lane.runs.values():
                if run.large and (session_id, lane.name, run.seq) not in self._orphans and run.state is RunState.DONE:
                    self._let_go(run.replies)
            lane.runs = {seq: run for seq, run in lane.runs.items() if run.state is RunState.RUNNING}

    def _keep_orphans(self, session_id: bytes, session: SessionState) -> None:
        for lane in session.lanes.values():
            if lane.name == "ctl":
                continue
            for run in lane.runs.values():
                if run.state is RunState.DONE and any(_ran(header) for header, _ in run.replies):
                    self._add_orphan(session_id, session, lane, run)

    def _add_orphan(self, session_id: bytes, session: SessionState, lane: Lane, run: Run) -> None:
        self._orphans[session_id, lane.name, run.seq] = Left(session.epoch, run.calls, run.replies)
        if len(self._orphans) > _MAX_ORPHANS:
            self._let_go(self._orphans.pop(next(iter(self._orphans))).replies)
            self._drop("orphan_evicted")

    def _forget_if_idle(self, session_id: bytes, session: SessionState) -> None:
        if not any(lane.running for lane in session.lanes.values()):
            del self._sessions[session_id]
            self._remember_end(session_id)

    def _remember_end(self, session_id: bytes) -> None:
        self._ended[session_id] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _flush_queues(self, session_id: bytes, session: SessionState, status: Status, effects: list[Effect]) -> None:
        for lane in session.lanes.values():
            if lane.poised is not None:
                lane.queue.appendleft(lane.poised)
                lane.poised = None
                lane.running -= 1
            while lane.queue:
                self._end_unstarted(session_id, session, lane, lane.queue.popleft(), status, effects)


def _one_by_one(header: Header, buffers: Buffers) -> Iterator[tuple[Header, Buffers]]:
    """Yield the word of each call that a reply is about."""
    if header.kind == Kind.RESULT and header.calls > 1:
        for seq, body in enumerate(split_bodies(buffers), header.seq):
            yield header._replace(seq=seq, calls=1), (body,)
    else:
        yield header, buffers


def _ran(header: Header) -> bool:
    """Tell whether a reply says that its call ran."""
    return header.kind in (Kind.RESULT, Kind.END) or header.status in (Status.APP_ERROR, Status.STOPPED)
