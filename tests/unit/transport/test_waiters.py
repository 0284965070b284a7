"""Who is told of which outcome of a lane."""

from __future__ import annotations

from typing import Any

import pytest

from zbus.protocol.messages import Chunk, Finish, Outcome, OutcomeKind, Results
from zbus.transport.waiters import Waiters

LOST = Outcome(OutcomeKind.UNKNOWN, None, "worker_exit", "it died")


def finish(seq: int) -> Finish:
    """Return the end of a call."""
    return Finish("main", seq, LOST)


def test_each_call_of_each_request_tells_its_own_sink() -> None:
    """Single ones and those of batches, in whatever order they end; then nobody waits."""
    told: list[Any] = []
    waiters = Waiters()
    waiters.singles[0] = (lambda *what: told.append(("one", *what)), 3, 0)
    waiters.add_batch(
        1, 3, 5, lambda *what: told.append(("three", *what)), lambda *what: told.append(("at once", *what))
    )
    waiters.add_batch(4, 2, 6, lambda *what: told.append(("two", *what)), None)
    for effect in (finish(2), finish(0)):
        waiters.finish(effect)
    waiters.results(Results("main", 4, [b"a", b"b"], 2))
    assert waiters
    waiters.results(Results("main", 3, [b"c"], 1))
    waiters.finish(finish(1))
    assert not waiters
    assert told == [
        ("three", 5, 1, LOST),
        ("one", 3, 0, LOST),
        ("two", 6, 0, Outcome(OutcomeKind.OK, (b"a",), attempts=2)),
        ("two", 6, 1, Outcome(OutcomeKind.OK, (b"b",), attempts=2)),
        ("at once", 5, 2, [b"c"], 1),
        ("three", 5, 0, LOST),
    ]


def test_items_of_a_stream_end_with_its_outcome() -> None:
    """One that comes later is nobody's."""
    told: list[Any] = []
    waiters = Waiters()
    waiters.singles[7] = (lambda *what: told.append(what), 0, 0)
    waiters.chunks[7] = (lambda *what: told.append(what), 0)
    waiters.chunk(Chunk("main", 7, 0, (b"a",)))
    waiters.finish(finish(7))
    waiters.chunk(Chunk("main", 7, 1, (b"b",)))
    assert told == [(0, 0, (b"a",)), (0, 0, LOST)]


def test_a_sink_that_raises_keeps_no_result_of_its_message_from_being_told() -> None:
    """The others are told first; then its error leaves."""
    told: list[int] = []

    def sink(_member: int, call: int, _outcome: Outcome) -> None:
        told.append(call)
        if call == 0:
            raise ValueError("its own fault")

    waiters = Waiters()
    waiters.add_batch(4, 3, 0, sink, None)
    with pytest.raises(ValueError, match="its own fault"):
        waiters.results(Results("main", 4, [b"a", b"b", b"c"], 1))
    assert told == [0, 1, 2]
    assert not waiters
