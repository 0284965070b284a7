"""Who waits for which call of one lane, and what they are told. Everything runs under the client's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zbus.protocol.messages import Buffers, Chunk, Finish, Outcome, OutcomeKind, Results

if TYPE_CHECKING:
    from zbus.transport.soon import Awaited

__all__ = ["ChunkSink", "ResultsSink", "Sink", "Waiters"]

Sink = Callable[[int, int, Outcome], None]
"""``sink(member index, call index, outcome)``: once per call, under the client's lock, on whichever thread drives."""

ResultsSink = Callable[[int, int, Sequence[bytes], int], None]
"""``sink(member index, first call index, bodies, attempts)``: OK for consecutive calls, in place of a ``Sink``."""

ChunkSink = Callable[[int, int, Buffers], None]
"""``sink(member index, chunk number, buffers)``: each item of a stream, in order."""


class _Batch:
    """Who waits for the calls of a request of several."""

    __slots__ = ("calls", "first", "left", "member", "sink", "together")

    def __init__(self, first: int, calls: int, member: int, sink: Sink, together: ResultsSink | None) -> None:
        self.first = first
        self.calls = self.left = calls
        self.member = member
        self.sink = sink
        self.together = together


class Waiters:
    """The sinks of one lane. Every call placed gets exactly one outcome, and is forgotten with it."""

    __slots__ = ("batches", "chunks", "singles", "soon")

    def __init__(self) -> None:
        self.singles: dict[int, tuple[Sink, int, int]] = {}
        self.batches: dict[int, _Batch] = {}  # by first seq, which rises
        self.chunks: dict[int, tuple[ChunkSink, int]] = {}
        self.soon: dict[int, Awaited] = {}

    def __bool__(self) -> bool:
        return bool(self.singles or self.batches or self.soon)

    def add_batch(self, first: int, calls: int, member: int, sink: Sink, together: ResultsSink | None) -> None:
        """Have ``sink`` told of each of ``calls`` calls; ``together``, if given, of several that came well at once."""
        self.batches[first] = _Batch(first, calls, member, sink, together)

    def finish(self, effect: Finish) -> None:
        """Tell of one outcome."""
        seq = effect.seq
        if self.chunks:
            self.chunks.pop(seq, None)
        waits = self.singles.pop(seq, None)
        if waits is not None:
            sink, member, call = waits
            sink(member, call, effect.outcome)
        elif seq in self.soon:
            _tell(self.soon.pop(seq), effect.outcome)
        else:
            batch = self._take(seq, 1)
            batch.sink(batch.member, seq - batch.first, effect.outcome)

    def results(self, effect: Results) -> None:
        """Tell of several results. What a sink raises leaves once all are told."""
        _, seq, bodies, attempts = effect
        if seq in self.soon:
            self._results_of_several(seq, bodies, attempts)
            return
        batch = self._take(seq, len(bodies))
        call = seq - batch.first
        if batch.together is not None:
            batch.together(batch.member, call, bodies, attempts)
            return
        raised: Exception | None = None
        for body in bodies:
            try:
                batch.sink(batch.member, call, Outcome(OutcomeKind.OK, (body,), attempts=attempts))
            except Exception as error:  # noqa: BLE001  # it leaves from here once all are told
                raised = raised or error
            call += 1
        if raised is not None:
            raise raised

    def _results_of_several(self, seq: int, bodies: Sequence[bytes], attempts: int) -> None:
        """Tell of the results of calls that left together, each for itself."""
        soon, raised = self.soon, None
        for one, body in enumerate(bodies, seq):
            try:
                soon.pop(one).came(body, attempts)
            except Exception as error:  # noqa: BLE001  # as in ``results``
                raised = raised or error
        if raised is not None:
            raise raised

    def chunk(self, effect: Chunk) -> None:
        """Hand on an item of a stream, if somebody waits for it yet."""
        waiting = self.chunks.get(effect.seq)
        if waiting is not None:
            waiting[0](waiting[1], effect.number, effect.buffers)

    def _take(self, seq: int, calls: int) -> _Batch:
        batch = self.batches.get(seq)
        if batch is None:  # inside one; the oldest come first, and are the likeliest
            batch = next(one for one in self.batches.values() if one.first <= seq < one.first + one.calls)
        batch.left -= calls
        if not batch.left:
            del self.batches[batch.first]
        return batch


def _tell(awaited: Awaited, outcome: Outcome) -> None:
    payload = outcome.payload or ()
    if outcome.kind is OutcomeKind.OK and len(payload) == 1 and type(payload[0]) is bytes:
        awaited.came(payload[0], outcome.attempts)
    else:
        awaited.ended(outcome)
