"""What a caller's lane makes of each word of its callee. Part of ``caller.CallerLane``, where the theory stands."""

from __future__ import annotations

from typing import Final

from zbus.protocol.caller_sending import LaneSending
from zbus.protocol.caller_state import HOLDS, NEVER, RELEASED, Request, RequestState
from zbus.protocol.frames import FrameError, split_bodies
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
    Results,
    Status,
)

__all__ = ["LaneAnswers"]

# As in ``caller_sending``: plain names for the words of a small call.
_MOST_WORDS: Final = 1_000
_RESULT: Final = int(Kind.RESULT)
_OK: Final = OutcomeKind.OK
_new: Final = tuple.__new__


class LaneAnswers(LaneSending):
    """Takes the callee's messages."""

    __slots__ = ()

    def receive(self, header: Header, buffers: Buffers, now: int) -> list[Effect]:
        """Take one message of the callee about this lane."""
        effects: list[Effect] = []
        kind = header.kind
        if kind == _RESULT:
            seq = header.seq
            request = self._requests.get(seq)
            if request is not None and request.calls == header.calls == 1 and request.open_calls and request.attempts:
                request.open_calls = 0
                self._retire(request)
                outcome = _new(Outcome, (_OK, buffers, "", "", request.attempts))
                effects.append(_new(Finish, (self.lane, seq, outcome)))
                if len(buffers) > 1:
                    self._acknowledge(request, effects)
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
        else:  # a word that only callers say
            self.strays += 1
        return effects

    def _on_reply(
        self, header: Header, kind: OutcomeKind, payload: Buffers, reason: str, evidence: str, now: int,
        effects: list[Effect],
    ) -> None:  # fmt: skip
        seq = header.seq
        request = self._find(seq)
        if request is None or request.attempts == 0 or header.calls > request.calls:
            self.strays += 1  # late, doubled, or foreign: its call has its outcome
            return
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
        """Take one message with the values of several consecutive calls: of one request, or of as many requests."""
        try:
            bodies = split_bodies(buffers)
        except FrameError:
            bodies = []
        if len(bodies) != header.calls:  # not a word that has a meaning: the probe will ask again
            self.strays += 1
            return
        request = self._requests.get(header.seq) or self._find(header.seq)
        if request is None or request.calls == 1:
            self._take_results_of_several(header, bodies, now, effects)
        elif request.attempts == 0 or header.seq + header.calls > request.seq + request.calls:
            self.strays += 1
            return
        else:
            self._take_results_of_one(request, header, bodies, now, effects)
        if self._waiting:
            self._pump(now, effects)

    def _take_results_of_one(
        self, request: Request, header: Header, bodies: list[bytes], now: int, effects: list[Effect]
    ) -> None:
        finished = request.finished
        if finished is None:
            finished = request.finished = set()
        lane, attempts, wanted = self.lane, request.attempts, request.open_calls
        seqs = range(header.seq, header.seq + header.calls)
        if finished.isdisjoint(seqs):
            fresh = header.calls
            finished.update(seqs)
            if wanted:
                effects.append(_new(Results, (lane, header.seq, bodies, attempts)))
        else:  # some of them were told before, in another message
            fresh = 0
            for seq, body in zip(seqs, bodies, strict=True):
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

    def _take_results_of_several(self, header: Header, bodies: list[bytes], now: int, effects: list[Effect]) -> None:
        first, requests = header.seq, self._requests
        found = [requests.get(seq) for seq in range(first, first + header.calls)]
        attempts = 0 if found[0] is None else found[0].attempts
        for request in found:
            if request is None or request.group < 0 or request.attempts != attempts or not request.open_calls:
                attempts = 0  # one has its last word, or was not placed with others
                break
        if not attempts:
            for seq, body in enumerate(bodies, first):
                self._on_reply(header._replace(seq=seq, calls=1), _OK, (body,), "", "", now, effects)
            return
        for request in found:
            request.open_calls = 0  # type: ignore[union-attr]  # none is None
            self._retire(request)  # type: ignore[arg-type]  # as above
        effects.append(_new(Results, (self.lane, first, bodies, attempts)))

    def _replied(self, request: Request, now: int) -> None:
        """Some calls of a request have their last word: it is over, or has shown that it is there."""
        if request.replied == request.calls:
            self._retire(request)
        else:
            request.state = RequestState.RECEIVED
            request.probe_gap = self.timing.probe_received
            self._set_probe(request, now + request.probe_gap)

    _FAILURES: Final[dict[int, tuple[OutcomeKind, str, str]]] = {
        Status.APP_ERROR: (OutcomeKind.APP_ERROR, "", ""),
        Status.NOT_STARTED: (OutcomeKind.NOT_EXECUTED, "refused", "the worker could not start it"),
        Status.CANCELLED: (OutcomeKind.CANCELLED, "cancelled", ""),
        Status.EXPIRED: (OutcomeKind.NOT_EXECUTED, "deadline", "expired before it started"),
        Status.PREDECESSOR: (OutcomeKind.NOT_EXECUTED, "predecessor", "a call before it in its batch failed"),
        Status.STOPPED: (OutcomeKind.APP_ERROR, "cancelled", "it had started and was stopped at a checkpoint"),
        Status.EVICTED: (OutcomeKind.UNKNOWN, "evicted", "the worker no longer has its answer"),
        Status.NOT_KEPT: (
            OutcomeKind.UNKNOWN,
            "evicted",
            "executed, reply evicted: it was lost and too large to keep",
        ),
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
            if buffers:  # what it waited for, in words
                evidence = f"{evidence or 'not started'}: {bytes(buffers[0][:_MOST_WORDS]).decode('utf-8', 'replace')}"
                buffers = ()
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
        if request.asked_ns > 0:
            self.round_trip(now - request.asked_ns)
        request.asked_ns = 0
        request.probe_gap = self.timing.probe_received
        self._set_probe(request, now + request.probe_gap)
        if request.together and header.status == Status.POISED:
            if request.together == HOLDS and request.open_calls:
                effects.append(Poised(self.lane, request.seq))
            elif request.together == RELEASED:
                self._set_probe(request, now + self.patience)  # said before GO came; or GO was lost
        if request.give_up_ns != NEVER and header.status == Status.RUNNING and request.open_calls:
            # It was told; a method that asks will end in a moment, and its word is better than ours.
            request.told = True
            request.give_up_ns = min(request.give_up_ns, now + self.timing.stop_grace)
            self.due_ns = min(self.due_ns, request.give_up_ns)

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
            request.gap_until_ns = now + self.patience
            self._transmit(request, now, effects)

    def _retry_later(self, seq: int, now: int) -> None:
        request = self._find(seq)
        if request is not None:
            self._set_probe(request, now + self.patience)

    def _on_chunk(self, header: Header, buffers: Buffers, now: int, effects: list[Effect]) -> None:
        request = self._find(header.seq)
        if request is None or request.attempts == 0 or request.calls > 1:  # a stream is alone in its request
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
        if request is None or request.attempts == 0 or request.calls > 1:
            return
        if header.floor != request.expected_chunk and request.open_calls:
            self._ask_for_chunks(request, now, effects)  # before the end counts
            return
        if header.status == Status.OK:
            self._on_reply(header, OutcomeKind.OK, buffers, "", "", now, effects)
        else:
            self._on_failure(header, buffers, now, effects)

    def _ask_for_chunks(self, request: Request, now: int, effects: list[Effect]) -> None:
        """Items are missing: ask for them, once, though every later item shows it."""
        if now >= request.gap_until_ns:
            request.gap_until_ns = now + self.patience
            request.probe_gap = 0
            self._probe(request, now, effects)
