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
  is answered by a PROBE, which costs a header (P2: retransmission is never re-execution; the callee deduplicates). The
  silence allowed follows the round trips measured, doubles from one PROBE to the next, and is jittered.
- Every call gets exactly one ``Finish`` (P1). A late answer to a call that has its outcome only frees its place.
- A request that starts together (``protocol.gang``) runs nowhere before ``release``. Until then it is settled here and
  at once, whatever happens: that no GO was sent, and none will be, is the proof. After it, GO is said again until the
  callee has it, before anything else is asked: a member that holds the request must not drop it while others run.
- Requests of one call each that are placed at once leave in one message (``place_joined``), which says no more than a
  message for each would: no rule above knows of it. Their results may come in one message, too.
- Requests leave in seq order, at most ``window_calls`` places and ``window_bytes`` bytes ahead of the floor (P7).
- ``NOT_EXECUTED`` is said only when proved: never transmitted, or the callee's own word on that very place. A gap that
  the callee reports proves nothing about a later place: it may hold it, and a copy may still be on its way. So a
  request that nobody wants any more goes out again as SKIP, and the callee's answer to that is the proof.

Pure: the shell hands in the time and executes the returned effects. One mutator at a time (the shell's lock).

This module has what the user and the connection say; ``caller_sending`` what leaves the lane and the books of it,
``caller_answers`` what the callee's words bring about, ``caller_state`` one request.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbus.protocol.caller_answers import LaneAnswers
from zbus.protocol.caller_state import HOLDS, NEVER, RELEASED, Request, RequestState, Timing
from zbus.protocol.journal import Fate, LaneHistory
from zbus.protocol.messages import Buffers, Effect, Finish, Kind, Outcome, OutcomeKind, SendTo

__all__ = ["CallerLane", "RequestState", "Timing"]


class CallerLane(LaneAnswers):
    """The caller's machine for one lane. See the module docstring."""

    __slots__ = ()

    # -- what the user asks --------------------------------------------------------------------------------------

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
        header = None if together else self.next_header(calls, nbytes, deadline_ns, now, trace, strict)
        if header is not None:
            self.sent(header, buffers, nbytes, deadline_ns, now)
            return header.seq, [SendTo(header, buffers)]
        seq = self._next_seq
        self._next_seq = seq + calls
        request = Request(seq, calls, buffers, nbytes, NEVER if deadline_ns is None else deadline_ns, trace, strict)
        if together:
            request.together = HOLDS
        self._requests[seq] = request
        self._order.append(request)
        effects: list[Effect] = []
        if self.dead is not None:
            self._finish_all(request, Outcome(OutcomeKind.NOT_EXECUTED, None, *self.dead, 0), effects)
            self._retire(request)
            return seq, effects
        self.due_ns = min(self.due_ns, request.deadline_ns)
        self._waiting.append(request)
        self._pump(now, effects)
        return seq, effects

    def place_joined(
        self, payloads: Sequence[Buffers], deadlines: Sequence[int | None], now: int
    ) -> tuple[int, list[Effect]]:
        """Place several requests of one call each, in this order, and send them in one message if all may leave now.

        Each is a request of its own from then on, as if it had been placed by ``place``.

        Args:
            payloads: The frame of each.
            deadlines: Of each; see ``place``.
            now: Current monotonic time in nanoseconds.

        Returns:
            (seq of the first, effects).
        """
        first = self._next_seq
        joined = self._join(payloads, deadlines, now) if len(payloads) > 1 else None
        if joined is not None:
            return first, [joined]
        effects: list[Effect] = []
        for payload, deadline_ns in zip(payloads, deadlines, strict=True):
            effects += self.place(payload, 1, len(payload[0]), deadline_ns, now)[1]
        return first, effects

    def cancel(self, seq: int, now: int) -> list[Effect]:
        """Ask that the request starting at ``seq`` should not run; it still gets exactly one outcome."""
        effects: list[Effect] = []
        request = self._requests.get(seq)
        if request is None or request.skip or request.cancelled:
            return effects
        request.cancelled = True
        if request.together == HOLDS:
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
        if request is None or request.together != HOLDS or not request.open_calls:
            return []
        request.together = RELEASED
        request.probe_gap = self.patience
        self._set_probe(request, now + request.probe_gap)
        return [SendTo(self._header(Kind.GO, request))]

    def abandon(self, seq: int, outcome: Outcome, now: int) -> list[Effect]:
        """Settle a request that starts together and was not released; the callee is asked to drop it."""
        effects: list[Effect] = []
        request = self._requests.get(seq)
        if request is None or request.together != HOLDS or not request.open_calls:
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
            if request.seq >= callee_next and request.together != RELEASED:
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
            elif request.together == HOLDS:
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

    def give_up(self, reason: str, evidence: str, now: int) -> list[Effect]:
        """Settle every open call, since the callee has been silent for too long; it may be there yet.

        The lane stays: when the connection is back, what was given up is asked not to begin, and new calls follow it.

        Args:
            reason: Machine-readable cause.
            evidence: Who was silent for how long, in words.
            now: Current monotonic time in nanoseconds.
        """
        effects: list[Effect] = []
        if self.dead is not None:
            return effects
        for request in list(self._order):
            if not request.open_calls:
                continue
            if request.attempts == 0:
                outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, evidence, 0)
                self._give_up_place(request, outcome, effects)
            elif request.together == HOLDS:
                words = f"{evidence}; the call was not started: it had not begun on any rank"
                outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, words, request.attempts)
                effects += self.abandon(request.seq, outcome, now)
            else:
                words = f"{evidence}; the call was {self._whereabouts(request)}"
                self._finish_all(request, Outcome(OutcomeKind.UNKNOWN, None, reason, words, request.attempts), effects)
        return effects

    def on_timer(self, now: int) -> list[Effect]:
        """Look at deadlines and silences that are due. Cheap when nothing is."""
        effects: list[Effect] = []
        if now < self.due_ns:
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
        self.due_ns = self._earliest()
        return effects

    def validate(self) -> None:
        """Raise AssertionError when an invariant of this machine is broken; for tests and simulation."""
        order, requests, waiting = self._order, self._requests, iter(self._waiting)
        assert len(order) == len(requests), (len(order), sorted(requests))
        assert not order or self._floor <= order[0].seq, (self._floor, order[0].seq)
        assert self._floor <= self._next_seq, (self._floor, self._next_seq)
        last, out, limit = -1, 0, self._floor + self.window_calls
        for request in order:
            seq = request.seq
            assert seq > last, (seq, last)
            assert requests.get(seq) is request, seq
            last = seq
            if request.state is RequestState.WAITING:
                assert next(waiting, None) is request, seq
            else:
                assert request.state is not RequestState.DONE, seq
                assert seq < limit, (self._floor, seq)
                out += request.nbytes
        assert next(waiting, None) is None
        assert self._bytes_out == out, (self._bytes_out, out)

    # -- inside --------------------------------------------------------------------------------------------------

    def _expire(self, request: Request, now: int, effects: list[Effect]) -> None:
        request.deadline_ns = NEVER
        if request.together == HOLDS:
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
        self.due_ns = min(self.due_ns, request.give_up_ns)
        if self.connected:
            request.probe_gap = 0
            self._probe(request, now, effects)

    def _give_up_place(self, request: Request, outcome: Outcome, effects: list[Effect]) -> None:
        """Settle a request that was never transmitted; its place still goes out, as SKIP."""
        self._finish_all(request, outcome, effects)
        request.nbytes = 0

    def _settle_by(
        self, history: LaneHistory, request: Request, reason: str, evidence: str, effects: list[Effect]
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
