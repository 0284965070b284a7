"""The caller's side of one stream: (session, callee incarnation, lane), from placement to outcome.

Theory of operation
-------------------
A *request* is one message that takes ``calls`` consecutive places (seqs) in the lane. It goes through::

    WAITING --send--> SENT --evidence--> RECEIVED --replies--> DONE
       |                |                   |
       +--expired/cancelled: its place is given up by a SKIP, so that the sequence has no hole
                        +-------------------+--expired/cancelled: CANCEL asks, and asks again; the answer, or the end
                                               of the grace, decides the outcome

Rules, each with its promise in ``docs/explanation/delivery.md``:

- A payload is transmitted again only after a reconnect, or when the callee says it has not seen it (NACK gap). Silence
  is answered by a PROBE, which costs a header (P2: retransmission is never re-execution; the callee deduplicates).
- Every call gets exactly one ``Finish`` (P1). A late answer to a call that has its outcome only frees its place.
- A request that starts together (``protocol.gang``) runs nowhere before ``release``. Until then it is settled here and
  at once, whatever happens: that no GO was sent, and none will be, is the proof. After it, GO is said again until the
  callee has it, before anything else is asked: a member that holds the request must not drop it while others run.
- Requests leave in seq order, at most ``window_calls`` places and ``window_bytes`` bytes ahead of the floor (P7).
- ``NOT_EXECUTED`` is said only when proved: never transmitted, or the callee's own word on that very place. A gap that
  the callee reports proves nothing about a later place: it may hold it, and a copy may still be on its way. So a
  request that nobody wants any more goes out again as SKIP, and the callee's answer to that is the proof.

Pure: the shell hands in the time and executes the returned effects. One mutator at a time (the shell's lock).
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from zbus.protocol.frames import FrameError, split_bodies
from zbus.protocol.journal import Fate, LaneHistory
from zbus.protocol.messages import (
    Buffers,
    Chunk,
    Effect,
    Finish,
    Header,
    Kind,
    Outcome,
    OutcomeKind,
    Poised,
    SendTo,
    Status,
)

__all__ = ["CallerLane", "RequestState", "Timing"]

_NEVER: Final = 1 << 62
_MS: Final = 1_000_000

# The words of a small call as plain names: a look into an enum's class costs as much as ten bytecodes.
_REQ: Final = int(Kind.REQ)
_RESULT: Final = int(Kind.RESULT)
_STRICT: Final = int(Status.STRICT)
_OK: Final = OutcomeKind.OK
_new: Final = tuple.__new__


class Timing:
    """When silence is asked about. All in nanoseconds.

    Attributes:
        probe_first: Silence after a transmission before the first PROBE.
        probe_received: Silence after the callee said it has the request (it may run for hours).
        probe_max: Ceiling of the exponential back-off.
        cancel_grace: How long an expired call waits for the callee's word on whether it started.
        stop_grace: How long, of that, it waits for a running method that was told to stop.
    """

    __slots__ = ("cancel_grace", "probe_first", "probe_max", "probe_received", "stop_grace")

    def __init__(
        self,
        *,
        probe_first: int = 1_000 * _MS,
        probe_received: int = 5_000 * _MS,
        probe_max: int = 30_000 * _MS,
        cancel_grace: int = 1_000 * _MS,
        stop_grace: int = 200 * _MS,
    ) -> None:
        self.probe_first = probe_first
        self.probe_received = probe_received
        self.probe_max = probe_max
        self.cancel_grace = cancel_grace
        self.stop_grace = stop_grace


class RequestState(enum.Enum):
    """Where a request is, as far as the caller knows."""

    WAITING = "waiting for credit or connection"
    SENT = "sent, not confirmed"
    RECEIVED = "arrived"
    DONE = "done"


_WAITING: Final = RequestState.WAITING
_SENT: Final = RequestState.SENT


class _Request:
    """One message's worth of calls, and what is known of it."""

    # Defaults stand in the class: most requests are answered before any of these is set.
    skip = False  # nobody wants it any more: whenever it goes out (again), it goes out as SKIP
    cancelled = False  # the user (not the deadline) asked
    give_up_ns = _NEVER  # end of the grace after an expired deadline
    remote = 0  # last Status word of the callee about it: HELD, QUEUED, RUNNING
    remote_since_ns = 0
    finished: set[int] | None = None  # seqs that have their Finish, for calls > 1
    replied = 0  # calls whose final word from the callee has come
    expected_chunk = 0
    acked = 0  # items of a stream that the user has taken
    gap_until_ns = 0  # a reported gap has been answered; further reports of it are ignored until then
    state = _WAITING
    attempts = 0
    probe_ns = _NEVER
    probe_gap = 0
    told = False  # the callee said that it runs, after it was asked to stop it
    together = 0  # 0: starts when it arrives; else see _HOLDS and _RELEASED

    def __init__(  # private, hot path
        self, seq: int, calls: int, buffers: Buffers, nbytes: int, deadline_ns: int, trace: int, strict: bool  # noqa: FBT001
    ) -> None:  # fmt: skip
        self.seq = seq
        self.calls = calls
        self.buffers = buffers
        self.nbytes = nbytes
        self.deadline_ns = deadline_ns
        self.trace = trace
        self.strict = strict
        self.open_calls = calls  # calls without a Finish


_HOLDS: Final = 1
"""``_Request.together``: the callee may not start it."""

_RELEASED: Final = 2
"""``_Request.together``: GO was said."""


class CallerLane:
    """The caller's machine for one lane. See the module docstring."""

    __slots__ = (
        "_bytes_out",
        "_epoch",
        "_floor",
        "_incarnation",
        "_next_due",
        "_next_seq",
        "_order",
        "_requests",
        "_session",
        "_waiting",
        "connected",
        "dead",
        "lane",
        "probes",
        "retransmissions",
        "timing",
        "window_bytes",
        "window_calls",
    )

    #: seq of the next call to be placed; all smaller seqs were placed exactly once
    _next_seq: int
    #: lowest seq whose request is not DONE; rises only
    _floor: int
    #: every request not DONE, by first seq, also in ``_order`` (by seq) and, until sent, in ``_waiting``
    _requests: dict[int, _Request]

    def __init__(
        self,
        session: bytes,
        epoch: int,
        incarnation: int,
        lane: str,
        *,
        window_calls: int = 1024,
        window_bytes: int = 1 << 30,
        timing: Timing | None = None,
    ) -> None:
        self._session = session
        self._epoch = epoch
        self._incarnation = incarnation
        self.lane = lane
        self.window_calls = window_calls
        self.window_bytes = window_bytes
        self.timing = timing or Timing()
        self.connected = False
        self.dead: tuple[str, str] | None = None
        self._next_seq = 0
        self._floor = 0
        self._requests = {}
        self._order: deque[_Request] = deque()
        self._waiting: deque[_Request] = deque()
        self._bytes_out = 0
        self._next_due = _NEVER
        self.retransmissions = 0
        self.probes = 0

    # -- what the user asks --------------------------------------------------------------------------------------

    @property
    def next_seq(self) -> int:
        """Seq that the next placed call will take."""
        return self._next_seq

    @property
    def outstanding(self) -> int:
        """Number of requests not yet done."""
        return len(self._requests)

    def place(
        self, buffers: Buffers, calls: int, nbytes: int, deadline_ns: int | None, now: int, *,
        trace: int = 0, strict: bool = False, together: bool = False,
    ) -> tuple[int, list[Effect]]:  # fmt: skip
        """Take the next ``calls`` places and send when credit allows.

        Args:
            buffers: The request's frames.
            calls: Number of calls in it (>= 1).
            nbytes: Size of the frames in bytes.
            deadline_ns: Absolute deadline on the caller's monotonic clock, or None.
            now: Current monotonic time in nanoseconds.
            trace: Caller's span id.
            strict: A failed call makes its successors in this request NOT_EXECUTED.
            together: It starts only when ``release`` is called, after ``Poised``.

        Returns:
            (first seq, effects).
        """
        header = None if together else self.next_header(calls, nbytes, deadline_ns, now, trace=trace, strict=strict)
        if header is not None:
            self.sent(header, buffers, nbytes, deadline_ns, now)
            return header.seq, [SendTo(header, buffers)]
        seq = self._next_seq
        self._next_seq = seq + calls
        request = _Request(seq, calls, buffers, nbytes, _NEVER if deadline_ns is None else deadline_ns, trace, strict)
        if together:
            request.together = _HOLDS
        self._requests[seq] = request
        self._order.append(request)
        effects: list[Effect] = []
        if self.dead is not None:
            self._finish_all(request, Outcome(OutcomeKind.NOT_EXECUTED, None, *self.dead, 0), effects)
            self._retire(request)
            return seq, effects
        self._next_due = min(self._next_due, request.deadline_ns)
        self._waiting.append(request)
        self._pump(now, effects)
        return seq, effects

    def next_header(
        self, calls: int, nbytes: int, deadline_ns: int | None, now: int, *, trace: int = 0, strict: bool = False
    ) -> Header | None:
        """Return the header under which the next ``calls`` may leave at once, or None: then only ``place`` will do.

        Nothing changes. The shell that has sent them under this header says so with ``sent``, before anything else
        happens in this lane. Between the two it has a message on its way and the books still to keep, which is what
        ``place`` would have kept first.
        """
        seq = self._next_seq
        if not self.connected or self._waiting or seq >= self._floor + self.window_calls:
            return None
        if self._bytes_out and self._bytes_out + nbytes > self.window_bytes:
            return None
        budget = 0 if deadline_ns is None else max(1, (deadline_ns - now) // _MS)
        status = _STRICT if strict else 0
        return _new(
            Header,
            (
                _REQ, self._session, self._epoch, self._incarnation, self.lane, seq, calls, 1, self._floor, budget,
                status, trace,
            ),
        )  # fmt: skip

    def sent(self, header: Header, buffers: Buffers, nbytes: int, deadline_ns: int | None, now: int) -> None:
        """Keep the books of a request that was sent under the header that ``next_header`` gave."""
        seq, calls = header.seq, header.calls
        due = _NEVER if deadline_ns is None else deadline_ns
        request = _Request(seq, calls, buffers, nbytes, due, header.trace, header.status == _STRICT)
        request.state = _SENT
        request.attempts = 1
        request.probe_gap = gap = self.timing.probe_first
        request.probe_ns = now + gap
        self._next_seq = seq + calls
        self._bytes_out += nbytes
        self._requests[seq] = request
        self._order.append(request)
        self._next_due = min(due, now + gap, self._next_due)

    def cancel(self, seq: int, now: int) -> list[Effect]:
        """Ask that the request starting at ``seq`` should not run; it still gets exactly one outcome."""
        effects: list[Effect] = []
        request = self._requests.get(seq)
        if request is None or request.skip or request.cancelled:
            return effects
        request.cancelled = True
        if request.together == _HOLDS:
            words = "cancelled before it began on any rank"
            return self.abandon(seq, Outcome(OutcomeKind.CANCELLED, None, "cancelled", words, request.attempts), now)
        if request.state is RequestState.WAITING and request.attempts == 0:
            self._give_up_place(
                request, Outcome(OutcomeKind.CANCELLED, None, "cancelled", "cancelled before it was sent", 0), effects
            )
            self._pump(now, effects)
        elif self.connected:
            request.probe_gap = 0
            self._probe(request, now, effects)
        return effects

    def release(self, seq: int, now: int) -> list[Effect]:
        """Let a request start that starts together; all members hold it. From now on it may have run."""
        request = self._requests.get(seq)
        if request is None or request.together != _HOLDS or not request.open_calls:
            return []
        request.together = _RELEASED
        request.probe_gap = self.timing.probe_first
        self._set_probe(request, now + request.probe_gap)
        return [SendTo(self._header(Kind.GO, request))]

    def abandon(self, seq: int, outcome: Outcome, now: int) -> list[Effect]:
        """Settle a request that starts together and was not released; the callee is asked to drop it."""
        effects: list[Effect] = []
        request = self._requests.get(seq)
        if request is None or request.together != _HOLDS or not request.open_calls:
            return effects
        self._finish_all(request, outcome._replace(attempts=request.attempts), effects)
        if request.attempts == 0:
            request.nbytes = 0  # its place still goes out, as SKIP
            self._pump(now, effects)
        elif self.connected:
            request.probe_gap = 0
            self._probe(request, now, effects)
        return effects

    def consumed(self, seq: int, upto: int) -> list[Effect]:
        """Tell the callee that the user took all chunks below ``upto`` (credit of a stream)."""
        request = self._requests.get(seq)
        if request is None:
            return []
        request.acked = max(request.acked, upto)  # said again with every probe: a lost one must not stop the stream
        return [self._ack(request)] if self.connected else []

    # -- what the network says -----------------------------------------------------------------------------------

    def on_connected(self, callee_next: int, now: int) -> list[Effect]:
        """A handshake succeeded; the callee has seen every seq below ``callee_next``.

        Whatever it has not seen is sent again in order; whatever it has is asked about.
        """
        effects: list[Effect] = []
        if self.dead is not None:
            return effects
        self.connected = True
        for request in self._order:
            if request.state is RequestState.WAITING or request.state is RequestState.DONE:
                continue
            request.gap_until_ns = 0
            request.probe_gap = 0
            # A released request was POISED there, so a cursor below it is stale: sent again, as SKIP once it is
            # unwanted, it would stay behind on this rank while the others run.
            if request.seq >= callee_next and request.together != _RELEASED:
                self._transmit(request, now, effects)
            else:
                self._probe(request, now, effects)
        self._pump(now, effects)
        return effects

    def on_disconnected(self) -> None:
        """The connection is gone: what is in flight may be lost or may arrive; nothing is sent until the next one."""
        self.connected = False

    def on_dead(self, reason: str, evidence: str, history: LaneHistory | None = None) -> list[Effect]:
        """The callee's incarnation is over: settle every call and refuse new ones.

        Args:
            reason: Machine-readable cause.
            evidence: How the end was seen, in words.
            history: What the callee's crash journal tells of this lane; without it, whatever was sent is UNKNOWN.
        """
        effects: list[Effect] = []
        if self.dead is not None:
            return effects
        self.dead = (reason, evidence)
        self.connected = False
        for request in list(self._order):
            if request.attempts == 0:
                outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, evidence, 0)
            elif request.together == _HOLDS:
                words = f"{evidence}; the call was not started: it had not begun on any rank"
                outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, words, request.attempts)
            elif history is not None:
                self._settle_by(history, request, reason, evidence, effects)
                self._retire(request)
                continue
            else:
                outcome = Outcome(
                    OutcomeKind.UNKNOWN, None, reason, f"{evidence}; the call was {self._whereabouts(request)}",
                    request.attempts,
                )  # fmt: skip
            self._finish_all(request, outcome, effects)
            self._retire(request)
        self._waiting.clear()
        return effects

    def receive(self, header: Header, buffers: Buffers, now: int) -> list[Effect]:
        """Take one message of the callee about this lane."""
        effects: list[Effect] = []
        kind = header.kind
        if kind == _RESULT:
            seq = header.seq
            request = self._requests.get(seq)
            if request is not None and request.calls == 1 and request.open_calls and request.attempts:
                request.open_calls = 0
                self._retire(request)
                outcome = _new(Outcome, (_OK, buffers, "", "", request.attempts))
                effects.append(_new(Finish, (self.lane, seq, outcome)))
                if self._waiting:
                    self._pump(now, effects)
                return effects
            if header.calls > 1:
                self._on_results(header, buffers, now, effects)
                return effects
            self._on_reply(header, OutcomeKind.OK, buffers, "", "", now, effects)
        elif kind == Kind.FAILURE:
            self._on_failure(header, buffers, now, effects)
        elif kind == Kind.PROGRESS:
            self._on_progress(header, now, effects)
        elif kind == Kind.NACK:
            self._on_nack(header, now, effects)
        elif kind == Kind.CHUNK:
            self._on_chunk(header, buffers, now, effects)
        elif kind == Kind.END:
            self._on_end(header, buffers, now, effects)
        return effects

    def on_timer(self, now: int) -> list[Effect]:
        """Look at deadlines and silences that are due. Cheap when nothing is."""
        effects: list[Effect] = []
        if now < self._next_due:
            return effects
        for request in list(self._order):
            if request.state is RequestState.DONE:
                continue
            if request.deadline_ns <= now and request.open_calls:
                self._expire(request, now, effects)
            if request.give_up_ns <= now and request.open_calls:
                words = f"no word from the worker; {self._whereabouts(request)}"
                if request.told:
                    words = "started, still running at its deadline"
                self._finish_all(
                    request, Outcome(OutcomeKind.UNKNOWN, None, "deadline", words, request.attempts), effects
                )
            if request.probe_ns <= now and self.connected:
                self._probe(request, now, effects)
        self._pump(now, effects)
        self._next_due = self._earliest()
        return effects

    def next_timer(self) -> int:
        """Return the monotonic time of the next needed ``on_timer``; a far future when none is."""
        return self._next_due

    def whereabouts(self, seq: int, now: int) -> str:
        """Say in words how far the call at ``seq`` is, as far as is known here."""
        for request in self._order:
            if request.seq <= seq < request.seq + request.calls:
                words = self._whereabouts(request)
                if not request.remote_since_ns:
                    return words
                return f"{words} since {(now - request.remote_since_ns) / 1e9:.1f} s"
        return "answered" if seq < self._next_seq else "not placed"

    def validate(self) -> None:
        """Raise AssertionError when an invariant of this machine is broken; for tests and simulation."""
        seqs = [request.seq for request in self._order]
        assert seqs == sorted(seqs), seqs
        assert set(seqs) == set(self._requests), (seqs, sorted(self._requests))
        assert not seqs or self._floor <= seqs[0], (self._floor, seqs)
        assert self._floor <= self._next_seq, (self._floor, self._next_seq)
        waiting = [request.seq for request in self._waiting]
        assert waiting == [r.seq for r in self._order if r.state is RequestState.WAITING], waiting
        out = [r for r in self._order if r.state in (RequestState.SENT, RequestState.RECEIVED)]
        assert all(r.seq < self._floor + self.window_calls for r in out), (self._floor, [r.seq for r in out])
        assert self._bytes_out == sum(r.nbytes for r in out), self._bytes_out

    # -- inside --------------------------------------------------------------------------------------------------

    def _header(self, kind: Kind, request: _Request, budget_ms: int = 0, status: int = 0) -> Header:
        return Header(
            kind, self._session, self._epoch, self._incarnation, self.lane, request.seq, request.calls,
            request.attempts, self._floor, budget_ms, status, request.trace,
        )  # fmt: skip

    def _has_credit(self, request: _Request) -> bool:
        if request.seq >= self._floor + self.window_calls:
            return False
        # a single request larger than the whole byte window may travel alone; else it could never go
        return self._bytes_out == 0 or self._bytes_out + request.nbytes <= self.window_bytes

    def _transmit(self, request: _Request, now: int, effects: list[Effect]) -> None:
        if request.attempts:
            self.retransmissions += 1
        request.attempts += 1
        if request.state is RequestState.WAITING:
            self._bytes_out += request.nbytes
        request.state = RequestState.SENT
        request.remote = 0
        request.probe_gap = self.timing.probe_first
        self._set_probe(request, now + request.probe_gap)
        if request.cancelled or request.give_up_ns != _NEVER:
            request.skip = True
            request.buffers = ()
        if request.skip:
            effects.append(SendTo(self._header(Kind.SKIP, request)))
            return
        budget = 0 if request.deadline_ns == _NEVER else max(1, (request.deadline_ns - now) // _MS)
        status = Status.STRICT if request.strict else 0
        if request.together:
            status = Status.TOGETHER_STRICT if request.strict else Status.TOGETHER
        effects.append(SendTo(self._header(Kind.REQ, request, budget, status), request.buffers))

    def _pump(self, now: int, effects: list[Effect]) -> None:
        waiting = self._waiting
        while waiting and self.connected and self._has_credit(waiting[0]):
            self._transmit(waiting.popleft(), now, effects)

    def _probe(self, request: _Request, now: int, effects: list[Effect]) -> None:
        """Ask how far it is; of a request that nobody wants, ask that it should not run (the answers are the same)."""
        self.probes += 1
        unwanted = request.skip or request.cancelled or request.give_up_ns != _NEVER
        kind = Kind.CANCEL if unwanted else Kind.PROBE
        if request.together == _RELEASED and request.remote != Status.RUNNING:
            kind = Kind.GO  # it may not have come, and the other members run
        effects.append(SendTo(self._header(kind, request)))
        if request.acked:
            effects.append(self._ack(request))
        request.probe_gap = min(max(request.probe_gap * 2, self.timing.probe_first), self.timing.probe_max)
        self._set_probe(request, now + request.probe_gap)

    def _ack(self, request: _Request) -> SendTo:
        return SendTo(self._header(Kind.ACK, request)._replace(floor=request.acked))

    def _set_probe(self, request: _Request, due: int) -> None:
        request.probe_ns = due
        self._next_due = min(self._next_due, due)

    def _find(self, seq: int) -> _Request | None:
        request = self._requests.get(seq)
        if request is not None:
            return request
        for candidate in self._order:  # inside a batch, or unknown; short: bounded by the window
            if candidate.seq <= seq < candidate.seq + candidate.calls:
                return candidate
            if candidate.seq > seq:
                break
        return None

    def _on_reply(
        self, header: Header, kind: OutcomeKind, payload: Buffers, reason: str, evidence: str, now: int,
        effects: list[Effect],
    ) -> None:  # fmt: skip
        seq = header.seq
        request = self._find(seq)
        if request is None or request.attempts == 0:
            return  # late, doubled, or foreign: its call has its outcome
        if request.calls == 1:
            if request.open_calls:
                request.open_calls = 0
                effects.append(Finish(self.lane, seq, Outcome(kind, payload, reason, evidence, request.attempts)))
            self._retire(request)
        elif header.calls == request.calls:  # one word about the whole request: it never started
            self._finish_all(request, Outcome(kind, payload, reason, evidence, request.attempts), effects)
            self._retire(request)
        else:
            finished = request.finished
            if finished is None:
                finished = request.finished = set()
            if seq not in finished:
                finished.add(seq)
                request.replied += 1
                if request.open_calls:
                    request.open_calls -= 1
                    effects.append(Finish(self.lane, seq, Outcome(kind, payload, reason, evidence, request.attempts)))
            self._replied(request, now)
        if self._waiting:
            self._pump(now, effects)

    def _on_results(self, header: Header, buffers: Buffers, now: int, effects: list[Effect]) -> None:
        """Take one message with the values of several consecutive calls of one request."""
        request = self._find(header.seq)
        if request is None or request.attempts == 0 or header.seq + header.calls > request.seq + request.calls:
            return
        try:
            bodies = split_bodies(buffers)
        except FrameError:
            return  # not a word that has a meaning: the probe will ask again
        if len(bodies) != header.calls:
            return
        finished = request.finished
        if finished is None:
            finished = request.finished = set()
        lane, attempts, wanted = self.lane, request.attempts, request.open_calls
        fresh = 0
        for seq, body in enumerate(bodies, header.seq):
            if seq not in finished:
                finished.add(seq)
                fresh += 1
                if wanted:
                    outcome = _new(Outcome, (_OK, (body,), "", "", attempts))
                    effects.append(_new(Finish, (lane, seq, outcome)))
        request.replied += fresh
        if wanted:
            request.open_calls -= fresh
        self._replied(request, now)
        if self._waiting:
            self._pump(now, effects)

    def _replied(self, request: _Request, now: int) -> None:
        """Some calls of a request have their last word: it is over, or has shown that it is there."""
        if request.replied == request.calls:
            self._retire(request)
        else:
            request.state = RequestState.RECEIVED
            request.probe_gap = self.timing.probe_received
            self._set_probe(request, now + request.probe_gap)

    _FAILURES: Final[dict[int, tuple[OutcomeKind, str, str]]] = {
        Status.APP_ERROR: (OutcomeKind.APP_ERROR, "", ""),
        Status.CANCELLED: (OutcomeKind.CANCELLED, "cancelled", ""),
        Status.EXPIRED: (OutcomeKind.NOT_EXECUTED, "deadline", "expired before it started"),
        Status.PREDECESSOR: (OutcomeKind.NOT_EXECUTED, "predecessor", "a call before it in its batch failed"),
        Status.STOPPED: (OutcomeKind.APP_ERROR, "cancelled", "it had started and was stopped at a checkpoint"),
        Status.EVICTED: (OutcomeKind.UNKNOWN, "evicted", "the worker no longer has its answer"),
        Status.SHUTDOWN: (OutcomeKind.NOT_EXECUTED, "shutdown", "the worker starts nothing more"),
        Status.UNKNOWN_LANE: (OutcomeKind.NOT_EXECUTED, "protocol", "the worker has no such lane"),
    }

    def _on_failure(self, header: Header, buffers: Buffers, now: int, effects: list[Effect]) -> None:
        kind, reason, evidence = self._FAILURES.get(
            header.status,
            (OutcomeKind.UNKNOWN, "protocol", f"the worker said {header.status}, which has no meaning here"),
        )
        if header.status in (Status.CANCELLED, Status.EXPIRED):  # not started, either way: say what the user knows of
            request = self._find(header.seq)
            if request is not None and request.cancelled:
                kind, reason = OutcomeKind.CANCELLED, "cancelled"
            else:
                kind, reason = OutcomeKind.NOT_EXECUTED, "deadline"
        elif header.status == Status.STOPPED:
            request = self._find(header.seq)
            if request is not None and not request.cancelled:
                reason = "deadline"
        self._on_reply(header, kind, buffers, reason, evidence, now, effects)

    def _on_progress(self, header: Header, now: int, effects: list[Effect]) -> None:
        request = self._find(header.seq)
        if request is None or request.state is RequestState.WAITING:
            return
        request.state = RequestState.RECEIVED
        if request.remote != header.status:
            request.remote = header.status
            request.remote_since_ns = now
        request.probe_gap = self.timing.probe_received
        self._set_probe(request, now + request.probe_gap)
        if request.together and header.status == Status.POISED:
            if request.together == _HOLDS and request.open_calls:
                effects.append(Poised(self.lane, request.seq))
            elif request.together == _RELEASED:
                self._set_probe(request, now + self.timing.probe_first)  # said before GO came; or GO was lost
        if request.give_up_ns != _NEVER and header.status == Status.RUNNING and request.open_calls:
            # It was told; a method that asks will end in a moment, and its word is better than ours.
            request.told = True
            request.give_up_ns = min(request.give_up_ns, now + self.timing.stop_grace)
            self._next_due = min(self._next_due, request.give_up_ns)

    def _on_nack(self, header: Header, now: int, effects: list[Effect]) -> None:
        if header.status == Status.GAP:
            self._on_gap(header.seq, now, effects)
        elif header.status == Status.WINDOW:
            self._retry_later(header.seq, now)
        elif header.status == Status.UNKNOWN_LANE:
            self._on_failure(header, (), now, effects)
        elif header.status == Status.MISMATCH:
            request = self._find(header.seq)
            if request is not None and request.attempts:
                evidence = "the worker knows another request of this number"
                self._finish_all(
                    request, Outcome(OutcomeKind.UNKNOWN, None, "protocol", evidence, request.attempts), effects
                )
                self._retire(request)

    def _on_gap(self, callee_next: int, now: int, effects: list[Effect]) -> None:
        """Send again what the callee has not admitted; once, though every message behind a gap reports it."""
        for request in self._order:
            if request.seq < callee_next or request.state is not RequestState.SENT or now < request.gap_until_ns:
                continue
            request.gap_until_ns = now + self.timing.probe_first
            self._transmit(request, now, effects)

    def _retry_later(self, seq: int, now: int) -> None:
        request = self._find(seq)
        if request is not None:
            self._set_probe(request, now + self.timing.probe_first)

    def _on_chunk(self, header: Header, buffers: Buffers, now: int, effects: list[Effect]) -> None:
        request = self._find(header.seq)
        if request is None or request.attempts == 0:
            return
        request.state = RequestState.RECEIVED
        if header.floor == request.expected_chunk:
            request.expected_chunk += 1
            request.gap_until_ns = 0
            if request.open_calls:
                effects.append(Chunk(self.lane, header.seq, header.floor, buffers))
        elif header.floor > request.expected_chunk:
            self._ask_for_chunks(request, now, effects)
            return
        request.probe_gap = self.timing.probe_received
        self._set_probe(request, now + request.probe_gap)

    def _on_end(self, header: Header, buffers: Buffers, now: int, effects: list[Effect]) -> None:
        request = self._find(header.seq)
        if request is None or request.attempts == 0:
            return
        if header.floor != request.expected_chunk and request.open_calls:
            self._ask_for_chunks(request, now, effects)  # before the end counts
            return
        if header.status == Status.OK:
            self._on_reply(header, OutcomeKind.OK, buffers, "", "", now, effects)
        else:
            self._on_failure(header, buffers, now, effects)

    def _ask_for_chunks(self, request: _Request, now: int, effects: list[Effect]) -> None:
        """Items are missing: ask for them, once, though every later item shows it."""
        if now >= request.gap_until_ns:
            request.gap_until_ns = now + self.timing.probe_first
            request.probe_gap = 0
            self._probe(request, now, effects)

    def _expire(self, request: _Request, now: int, effects: list[Effect]) -> None:
        request.deadline_ns = _NEVER
        if request.together == _HOLDS:
            words = "expired before it began on any rank"
            effects += self.abandon(
                request.seq, Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", words, request.attempts), now
            )
            return
        if request.attempts == 0:
            self._give_up_place(
                request,
                Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", "expired before it was sent", 0),
                effects,
            )
            return
        request.give_up_ns = now + self.timing.cancel_grace
        self._next_due = min(self._next_due, request.give_up_ns)
        if self.connected:
            request.probe_gap = 0
            self._probe(request, now, effects)

    def _give_up_place(self, request: _Request, outcome: Outcome, effects: list[Effect]) -> None:
        """Settle a request that was never transmitted; its place still goes out, as SKIP."""
        self._finish_all(request, outcome, effects)
        request.nbytes = 0

    def _finish_all(self, request: _Request, outcome: Outcome, effects: list[Effect]) -> None:
        if not request.open_calls:
            return
        finished = request.finished or ()
        request.open_calls = 0
        request.skip = True
        request.buffers = ()
        request.deadline_ns = request.give_up_ns = _NEVER
        effects.extend(
            Finish(self.lane, seq, outcome)
            for seq in range(request.seq, request.seq + request.calls)
            if seq not in finished
        )

    def _settle_by(
        self, history: LaneHistory, request: _Request, reason: str, evidence: str, effects: list[Effect]
    ) -> None:
        """Settle each call of a request by what the callee's crash journal tells of it."""
        if not request.open_calls:
            return
        items = f" after {request.expected_chunk} items" if request.expected_chunk else ""
        finished = request.finished or ()
        request.open_calls = 0
        for seq in range(request.seq, request.seq + request.calls):
            if seq in finished:
                continue
            fate = history.fate(seq)
            kind, why = OutcomeKind.UNKNOWN, reason
            if fate is Fate.NEVER_STARTED:
                kind = OutcomeKind.CANCELLED if request.cancelled else OutcomeKind.NOT_EXECUTED
                why = "cancelled" if request.cancelled else reason
                words = "not started: the worker died before"
            elif fate is Fate.BEGAN:
                words = f"running: began, no end{items}"
            elif fate is Fate.UNTOLD:
                words = f"{self._whereabouts(request)}, and its place in the crash journal was used again"
            else:
                words = f"executed, reply lost{items}{' (it raised)' if fate is Fate.RAISED else ''}"
            outcome = Outcome(kind, None, why, f"{evidence}; the call was {words}", request.attempts)
            effects.append(Finish(self.lane, seq, outcome))

    def _retire(self, request: _Request) -> None:
        if request.state is not _WAITING:  # nor DONE: it is retired once
            self._bytes_out -= request.nbytes
        request.state = RequestState.DONE
        request.buffers = ()
        del self._requests[request.seq]
        order = self._order
        if order[0] is request:
            order.popleft()
        else:
            order.remove(request)
        self._floor = order[0].seq if order else self._next_seq

    def _earliest(self) -> int:
        due = _NEVER
        for request in self._order:
            due = min(due, request.deadline_ns, request.give_up_ns)
            if self.connected and request.probe_ns < due:
                due = request.probe_ns
        return due

    def _whereabouts(self, request: _Request) -> str:
        if request.remote == Status.RUNNING:
            return "running"
        if request.remote in (Status.QUEUED, Status.HELD):
            return "arrived, not started"
        if request.remote == Status.POISED:
            return "arrived, told to start" if request.together == _RELEASED else "ready, waiting for the other ranks"
        if request.attempts == 0:
            return "not sent"
        return "sent, not confirmed" if request.state is RequestState.SENT else "arrived"
