"""What a callee says of requests it knows: replies and items, sent and kept, and said again when asked.

The lowest part of ``callee.Callee``, where the theory of operation stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from zbus.protocol.callee_state import Kept, Lane, Left, Replies, Run, RunState, SessionState, Shelf
from zbus.protocol.messages import Buffers, Effect, Header, Kind, SendTo, Status, StreamCredit

__all__ = ["CalleeAnswers"]

_PROGRESS: Final = {
    RunState.HELD: Status.HELD,
    RunState.QUEUED: Status.QUEUED,
    RunState.POISED: Status.POISED,
    RunState.RUNNING: Status.RUNNING,
}
_DONE: Final = RunState.DONE
_GOES_ON: Final = (RunState.RUNNING, RunState.POISED)


class CalleeAnswers:
    """State of all sessions of one incarnation, and what is said of their requests.

    Args:
        incarnation: This incarnation.
        lanes: Lane name to concurrency (how many requests of it may run at once; >= 1).
        window_calls: Places ahead of the caller's floor that are accepted, per lane, and so how many answers are kept.
        keep_bytes: How much of large replies is kept in memory until their callers have them, all sessions together.
        large_bytes: From which size a reply is large. Smaller ones are always kept: the window bounds their number.
        shelf: Where large replies go beyond ``keep_bytes``, the oldest first; without one they are not kept.
        guest_lanes: Lanes that a guest (epoch 0) may use; None for all (the shell then checks each call's effect).
    """

    __slots__ = (
        "_ended",
        "_guest_lanes",
        "_incarnation",
        "_keep_bytes",
        "_kept",
        "_kept_bytes",
        "_lane_spec",
        "_large_bytes",
        "_orphans",
        "_sessions",
        "_shelf",
        "draining",
        "dropped",
        "held_off",
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
        keep_bytes: int = 256 << 20,
        large_bytes: int = 64 << 10,
        shelf: Shelf | None = None,
        guest_lanes: Iterable[str] | None = ("ctl",),
    ) -> None:
        self._incarnation = incarnation
        self._lane_spec = dict(lanes)
        self._guest_lanes = None if guest_lanes is None else frozenset(guest_lanes)
        self._sessions: dict[bytes, SessionState] = {}
        self._orphans: dict[tuple[bytes, str, int], Left] = {}  # ended, oldest first, at most _MAX_ORPHANS
        self._ended: dict[bytes, None] = {}  # the last sessions that are over, oldest first
        self._keep_bytes = keep_bytes
        self._large_bytes = large_bytes
        self._shelf = shelf
        self._kept: dict[int, Kept] = {}  # those in memory, oldest first, by id
        self._kept_bytes = 0
        self.window = window_calls
        self.max_epoch = 0
        self.draining = False
        self.held_off = False
        self.may_queue = False  # something was queued since ``expire`` last found nothing
        self.dropped: dict[str, int] = {}

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

    def unanswered(self, session_id: bytes, lane_name: str, seq: int) -> list[int]:
        """Return which calls of a running request have no last word yet, by their number in it."""
        session = self._sessions.get(session_id)
        lane = None if session is None else session.lanes.get(lane_name)
        run = None if lane is None else lane.runs.get(seq)
        if run is None or run.state is not RunState.RUNNING:
            return []
        told = {one for header, _ in run.replies for one in range(header.seq, header.seq + header.calls)}
        return [index for index in range(run.calls) if seq + index not in told]

    def _on_probe(self, header: Header, session: SessionState, lane: Lane, effects: list[Effect]) -> None:
        run = lane.runs.get(header.seq)
        if run is not None:
            self._report(header, session, lane, run, effects)
        elif header.seq >= lane.arrival_next:
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))
        elif header.seq >= lane.floor:
            self._reply_unstarted(header, lane, Status.EVICTED, effects)

    def _on_ack(self, header: Header, lane: Lane, effects: list[Effect]) -> None:
        run = lane.runs.get(header.seq)
        if run is None or header.floor <= run.acked:
            return
        run.acked = header.floor
        while run.chunks and run.chunks[0][0].floor < run.acked:
            run.chunks.popleft()
        effects.append(StreamCredit(header.session, lane.name, run.seq, run.acked))

    def _report(self, header: Header, session: SessionState, lane: Lane, run: Run, effects: list[Effect]) -> None:
        """Say what is known of a run: its cached words again, and where it is if it has not ended."""
        if run.state is RunState.HELD:
            effects.append(self._nack(header, lane.peer, Status.GAP, seq=lane.arrival_next))
            return
        effects.extend(SendTo(chunk, buffers, lane.peer) for chunk, buffers in run.chunks or ())
        if run.large:
            effects.extend(SendTo(*self._word(reply, kept), lane.peer) for reply, kept in run.replies)
        else:
            effects.extend(SendTo(reply, buffers, lane.peer) for reply, buffers in run.replies)  # type: ignore[arg-type]  # none is Kept
        if run.state is not RunState.DONE:
            effects.append(self._progress(header.session, session, lane, run, header.attempt))

    def _progress(self, session_id: bytes, session: SessionState, lane: Lane, run: Run, attempt: int) -> SendTo:
        return SendTo(
            self._reply_header(
                Kind.PROGRESS, session_id, session, lane, run.seq, run.calls, attempt, _PROGRESS[run.state]
            ),
            (),
            lane.peer,
        )

    def _end_unstarted(
        self, session_id: bytes, session: SessionState, lane: Lane, run: Run, status: Status, effects: list[Effect]
    ) -> None:
        run.state = RunState.DONE
        run.open_calls = 0
        run.buffers = ()
        header = self._reply_header(Kind.FAILURE, session_id, session, lane, run.seq, run.calls, run.attempt, status)
        run.replies = ((header, ()),)
        effects.append(SendTo(header, (), lane.peer))

    def _advance_floor(self, lane: Lane, floor: int) -> None:
        lane.floor = floor
        runs = lane.runs
        while runs:  # admission order is seq order
            run = next(iter(runs.values()))
            if run.state is not _DONE or run.seq + run.calls > floor:
                if run.seq < floor:
                    self._forget_below(lane)
                return
            if run.large:
                self._let_go(run.replies)
            del runs[run.seq]

    def _forget_below(self, lane: Lane) -> None:
        """Forget what stands below the floor behind a request that goes on though its caller has its outcome.

        What is queued there is wanted by nobody and does not start; else such callers would pile it up.
        """
        for run in list(lane.runs.values()):
            if run.seq + run.calls > lane.floor or run.state in _GOES_ON:
                continue
            if run.state is RunState.QUEUED:
                lane.queue.remove(run)
            if run.large:
                self._let_go(run.replies)
            del lane.runs[run.seq]

    # -- large replies -------------------------------------------------------------------------------------------

    def _keep(self, buffers: Buffers, nbytes: int) -> Kept:
        """Keep a large reply; the oldest ones make room for it."""
        kept = Kept(buffers, nbytes)
        self._kept[id(kept)] = kept
        self._kept_bytes += nbytes
        while self._kept_bytes > self._keep_bytes:
            oldest = next(iter(self._kept.values()))
            self._leave_memory(oldest)
            oldest.token = None if self._shelf is None else self._shelf.put(oldest.buffers or ())
            oldest.buffers = None
            self._drop("reply_not_kept" if oldest.token is None else "reply_on_shelf")
        return kept

    def _leave_memory(self, kept: Kept) -> None:
        if self._kept.pop(id(kept), None) is not None:
            self._kept_bytes -= kept.nbytes

    def _word(self, header: Header, reply: Buffers | Kept) -> tuple[Header, Buffers]:
        """Return what is said of a call that ended: its reply, or that it was not kept."""
        if type(reply) is not Kept:
            return header, reply  # type: ignore[return-value]  # as just asked
        buffers = reply.buffers
        if buffers is None and reply.token is not None and self._shelf is not None:
            buffers = self._shelf.get(reply.token)
        if buffers is None:
            kind = Kind.END if header.kind == Kind.END else Kind.FAILURE
            return header._replace(kind=kind, status=Status.NOT_KEPT), ()
        return header, buffers

    def _let_go(self, replies: Replies) -> None:
        """Forget the large ones of these replies: their caller has them, or nobody will ask."""
        for _, reply in replies:
            if type(reply) is Kept:
                self._leave_memory(reply)
                if reply.token is not None and self._shelf is not None:
                    self._shelf.drop(reply.token)
                    reply.token = None

    # -- words ---------------------------------------------------------------------------------------------------

    def _run_of(self, lane: Lane, seq: int) -> Run | None:
        run = lane.runs.get(seq)
        if run is not None:
            return run
        for candidate in lane.runs.values():
            if candidate.seq <= seq < candidate.seq + candidate.calls:
                return candidate
        return None

    def _reply_header(  # noqa: PLR0917  # private: the fields of a header
        self, kind: Kind, session_id: bytes, session: SessionState, lane: Lane, seq: int, calls: int, attempt: int,
        status: Status, floor: int = 0,
    ) -> Header:  # fmt: skip
        return Header(
            kind, session_id, session.epoch, self._incarnation, lane.name, seq, calls, attempt, floor, 0, status
        )

    def _reply_unstarted(self, header: Header, lane: Lane, status: Status, effects: list[Effect]) -> None:
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
