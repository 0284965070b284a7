"""The short ways of small calls say and book the same as the long ones; results of several calls in one message."""

from __future__ import annotations

import pytest

from protocol_kit import BODY, EPOCH, INCARNATION, MS, SESSION, ask, callee, caller, reply
from zbus.protocol import frames
from zbus.protocol.messages import Finish, Header, Kind, OutcomeKind, Results, SendTo, Status


def state(lane):
    """Return everything a lane keeps, as plain values."""
    kept = {
        name: getattr(lane, name)
        for name in type(lane).__slots__
        if name not in ("timing", "_order", "_requests", "_waiting")
    }
    return kept, [vars(request) for request in lane._order], [vars(request) for request in lane._waiting]


@pytest.mark.parametrize(("calls", "deadline", "strict"), [(1, None, False), (3, 250 * MS, True)])
def test_a_request_booked_after_it_was_sent_is_booked_as_one_that_was_placed(calls, deadline, strict):
    """`next_header` and `sent` leave the lane as `place` does, and say the same header."""
    placed, quick = caller(), caller()
    _, effects = placed.place(BODY, calls, 4, deadline, 100 * MS, trace=7, strict=strict)
    header = quick.next_header(calls, 4, deadline, 100 * MS, trace=7, strict=strict)
    assert effects == [SendTo(header, BODY)]
    quick.sent(header, BODY, 4, deadline, 100 * MS)
    quick.validate()
    assert state(quick) == state(placed)


def test_a_header_is_given_only_while_a_request_may_leave_at_once():
    """Not before a connection, beyond the window or the bytes, or past one that waits; asking changes nothing."""
    assert caller(connected=False).next_header(1, 4, None, 0) is None
    lane = caller(window_calls=1, window_bytes=10)
    assert lane.next_header(1, 4, None, 0) == lane.next_header(1, 4, None, 0)
    lane.place(BODY, 1, 4, None, 0)
    assert lane.next_header(1, 4, None, 0) is None
    lane = caller(window_bytes=10)
    lane.place(BODY, 1, 8, None, 0)
    assert lane.next_header(1, 4, None, 0) is None
    lane.place(BODY, 1, 4, None, 0)
    assert lane.next_header(1, 1, None, 0) is None


def test_several_results_in_one_message_end_each_call_once():
    """One RESULT for calls 0 and 1, said twice, gives two outcomes; the last call's own word ends the request."""
    lane = caller()
    lane.place(BODY, 3, 4, None, 0)
    both = (frames.join_bodies([b"a", b"b"]),)
    effects = lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=2), both, 0)
    assert effects == [Results("main", 0, [b"a", b"b"], 1)]
    assert lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=2), both, 0) == []
    assert lane.receive(reply(Kind.RESULT, 1, Status.OK), (b"b",), 0) == []
    effects = lane.receive(reply(Kind.RESULT, 2, Status.OK), (b"c",), 0)
    assert [type(e) for e in effects] == [Finish]
    assert lane.outstanding == 0
    lane.validate()


def test_of_several_results_only_those_count_that_were_not_told_before():
    """A call that had its own word gets no second one from the message that is about others too."""
    lane = caller()
    lane.place(BODY, 3, 4, None, 0)
    lane.receive(reply(Kind.RESULT, 1, Status.OK), (b"b",), 0)
    effects = lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=3), (frames.join_bodies([b"a", b"b", b"c"]),), 0)
    assert [(e.seq, e.outcome.kind, e.outcome.payload) for e in effects] == [
        (0, OutcomeKind.OK, (b"a",)),
        (2, OutcomeKind.OK, (b"c",)),
    ]
    assert lane.outstanding == 0
    lane.validate()


def test_results_of_calls_that_were_given_up_tell_nobody():
    """They free their places."""
    lane = caller()
    lane.place(BODY, 2, 4, 50 * MS, 0)
    lane.on_timer(50 * MS)
    lane.on_timer(1_000 * MS)
    assert lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=2), (frames.join_bodies([b"a", b"b"]),), 0) == []
    assert lane.outstanding == 0
    lane.validate()


@pytest.mark.parametrize(
    ("seq", "calls", "body"),
    [
        (0, 4, frames.join_bodies([b"a"] * 4)),
        (2, 2, frames.join_bodies([b"a"] * 2)),
        (0, 2, frames.join_bodies([b"a"] * 3)),
        (0, 2, b"\x92\x01\x02"),
        (0, 2, b""),
        (7, 2, frames.join_bodies([b"a"] * 2)),
    ],
)
def test_results_that_do_not_fit_their_request_are_no_word(seq, calls, body):
    """More calls than the request has, another number of bodies, or no bodies at all: nothing ends."""
    lane = caller()
    lane.place(BODY, 3, 4, None, 0)
    assert lane.receive(reply(Kind.RESULT, seq, Status.OK, calls=calls), (body,), 0) == []
    assert lane.outstanding == 1
    lane.validate()


def test_results_that_left_together_are_said_again_together():
    """The reply cache holds the words as they left."""
    machine = callee()
    ask(machine, Kind.REQ, 0, calls=3)
    effects = machine.finished_together(SESSION, "main", 0, [b"a", b"b"], 0)
    machine.validate()
    assert [(e.header.kind, e.header.seq, e.header.calls, e.buffers) for e in effects] == [
        (Kind.RESULT, 0, 2, (frames.join_bodies([b"a", b"b"]),))
    ]
    effects = machine.finished_together(SESSION, "main", 2, [b"c"], 0)
    machine.validate()
    assert [(e.header.seq, e.header.calls, e.buffers) for e in effects] == [(2, 1, [b"c"])]
    assert ask(machine, Kind.PROBE, 0, calls=3) == ["RESULT OK 0+2", "RESULT OK 2"]


def test_an_orphan_has_the_word_of_every_call():
    """Whatever message they left in; it runs until the last one has ended."""
    machine = callee()
    ask(machine, Kind.REQ, 0, calls=3)
    machine.finished_together(SESSION, "main", 0, [b"a", b"b"], 0)
    machine.hello(Header(Kind.HELLO, bytes(16), EPOCH + 1, INCARNATION, "main"), 0)
    (orphan,) = machine.orphans()
    assert orphan.running
    machine.finished_together(SESSION, "main", 2, [b"c"], 0)
    orphan = machine.adopt(SESSION, "main", 0)
    assert not orphan.running
    assert [(header.seq, header.calls, bytes(frames[0])) for header, frames in orphan.replies] == [
        (0, 1, b"a"),
        (1, 1, b"b"),
        (2, 1, b"c"),
    ]


def test_results_of_a_session_that_is_over_are_dropped():
    """What no caller waits for is counted, not sent."""
    machine = callee()
    assert machine.finished_together(bytes(16), "main", 0, [b"a", b"b"], 0) == []
    assert machine.dropped == {"finished_unknown": 1}


def test_a_request_in_its_turn_starts_in_one_step_like_any_other():
    """A free lane runs what it waits for at once; the floor that came with it is obeyed."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    machine.finished(SESSION, "main", 0, Kind.RESULT, Status.OK, BODY, 0)
    assert ask(machine, Kind.REQ, 1, floor=1) == ["run 1"]
    machine.validate()
    assert ask(machine, Kind.REQ, 0, floor=1) == []  # below the floor: forgotten, and not run again


def test_bodies_come_apart_as_they_were_joined():
    """Also empty ones; anything else is refused."""
    bodies = [b"", b"a", bytes(1000)]
    assert frames.split_bodies((frames.join_bodies(bodies),)) == bodies
    for wrong in ((), (b"",), (b"\x91\x01",), (frames.join_bodies(bodies), b"")):
        with pytest.raises(frames.FrameError, match="bodies"):
            frames.split_bodies(wrong)


def test_words_of_joined_results_are_a_valid_message():
    """A RESULT of several calls comes out of the wire as it went in."""
    header = Header(Kind.RESULT, SESSION, 1, 2, "main", 5, 2, status=Status.OK)
    body = frames.join_bodies([b"a", b"b"])
    assert frames.decode(frames.encode(header, (body,))) == (header, (body,))
