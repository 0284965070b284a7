"""Requests of one call each that travel in one message: each is a request of its own on both sides."""

from __future__ import annotations

import pytest

from protocol_kit import EPOCH, INCARNATION, MS, PEER, SESSION, ask, callee, caller, reply, said, words
from zbus.protocol.frames import FrameError, decode, encode, join_bodies, join_requests, split_requests
from zbus.protocol.joining import JoinedResults
from zbus.protocol.messages import Execute, Header, Kind, OutcomeKind, Results, SendTo, Status


def joined(lane, count=3, deadlines=None, now=0):
    """Place requests together; return the effects."""
    payloads = [(b"body %d" % number,) for number in range(count)]
    _, effects = lane.place_joined(payloads, deadlines or [None] * count, now)
    lane.validate()
    return effects


def arrive(machine, first=0, count=3, *, budgets=None, attempt=1, now=0):
    """Hand a joined message to a callee; return the words of its effects."""
    body = join_requests([(budget, b"body") for budget in budgets or [0] * count])
    header = Header(Kind.REQ, SESSION, EPOCH, INCARNATION, "main", first, count, attempt=attempt, status=Status.JOINED)
    effects = machine.receive(header, (body,), PEER, now)
    machine.validate()
    return words(effects)


# -- the caller ----------------------------------------------------------------------------------------------------


def test_what_is_placed_together_leaves_in_one_message_that_says_all_of_each():
    """One REQ carries the body and the remaining time of each call, through its bytes too."""
    (send,) = joined(caller(), deadlines=[None, 250 * MS, 1], now=0)
    header, buffers = decode(encode(send.header, send.buffers))
    assert (header.kind, header.status, header.seq, header.calls) == (Kind.REQ, Status.JOINED, 0, 3)
    assert split_requests(buffers) == [(0, b"body 0"), (250, b"body 1"), (1, b"body 2")]


@pytest.mark.parametrize(
    "lane", [caller(window_calls=2), caller(window_bytes=10), caller(connected=False)], ids=["calls", "bytes", "link"]
)
def test_where_not_all_may_leave_each_goes_by_itself(lane):
    """A full window, or no connection, makes of them what they would have been anyway."""
    assert all(effect.header.calls == 1 for effect in joined(lane))
    assert lane.next_seq == 3
    assert lane.outstanding == 3


def test_what_is_lost_is_sent_again_one_by_one():
    """After a reconnect those that the callee has not seen leave again, each by itself; the others are asked about."""
    lane = caller()
    joined(lane)
    lane.on_disconnected()
    assert words(lane.on_connected(1, 0)) == ["PROBE 0", "REQ 1", "REQ 2"]


def test_a_deadline_ends_its_own_call_alone():
    """The caller asks that the expired one should not run, and settles it after the grace; the others wait on."""
    lane = caller()
    joined(lane, deadlines=[None, 10 * MS, None])
    assert words(lane.on_timer(10 * MS)) == ["CANCEL 1"]
    assert "finish 1 UNKNOWN deadline" in words(lane.on_timer(111 * MS))
    assert lane.outstanding == 3


def test_results_that_come_together_are_told_together_and_free_their_places():
    """One message answers several calls, of two messages too; the floor rises behind them."""
    lane = caller()
    joined(lane)
    joined(lane)
    (told,) = lane.receive(reply(Kind.RESULT, 1, Status.OK, calls=4), (join_bodies([b"b", b"c", b"d", b"e"]),), 0)
    assert told == Results("main", 1, [b"b", b"c", b"d", b"e"], 1)
    assert lane.outstanding == 2
    lane.validate()


def test_a_call_that_has_its_outcome_is_not_told_again_by_results_of_several():
    """What came before, alone, stands; the rest of the message counts."""
    lane = caller()
    joined(lane)
    lane.receive(reply(Kind.FAILURE, 1, Status.APP_ERROR), (b"error",), 0)
    effects = lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=3), (join_bodies([b"a", b"b", b"c"]),), 0)
    assert words(effects) == ["finish 0 OK", "finish 2 OK"]
    assert not lane.outstanding
    assert lane.strays == 1


def test_results_that_are_none_are_counted():
    """A body that does not hold as many results as the header says has no meaning."""
    lane = caller()
    joined(lane)
    assert lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=3), (join_bodies([b"a"]),), 0) == []
    assert lane.receive(reply(Kind.RESULT, 0, Status.OK, calls=3), (b"\xc1",), 0) == []
    assert (lane.strays, lane.outstanding) == (2, 3)


# -- the callee ----------------------------------------------------------------------------------------------------


def test_a_callee_runs_them_one_after_another_each_with_its_own_deadline():
    """They are admitted in order and start as their turn comes; one whose time is over meanwhile does not."""
    machine = callee()
    body = join_requests([(0, b"a"), (20, b"b"), (50, b"c")])
    header = Header(Kind.REQ, SESSION, EPOCH, INCARNATION, "main", 0, 3, status=Status.JOINED)
    (run,) = machine.receive(header, (body,), PEER, 0)
    assert isinstance(run, Execute)
    assert (run.seq, run.calls, run.buffers, run.deadline_ns) == (0, 1, (b"a",), None)
    assert words(machine.expire(30 * MS)) == ["FAILURE EXPIRED 1"]
    _, run = machine.finished(SESSION, "main", 0, Kind.RESULT, Status.OK, (b"x",), 30 * MS)
    assert isinstance(run, Execute)
    assert (run.seq, run.buffers, run.deadline_ns) == (2, (b"c",), 50 * MS)
    machine.validate()


def test_a_cancel_of_one_leaves_its_neighbours():
    """It ends at once if its turn has not come."""
    machine = callee()
    arrive(machine)
    assert ask(machine, Kind.CANCEL, 1) == ["FAILURE CANCELLED 1"]
    assert said(machine, 0) == ["RESULT OK 0", "run 2"]


def test_a_message_that_comes_again_runs_nothing_again():
    """Each of its calls is answered from its state, also where some came by themselves in between."""
    machine = callee()
    arrive(machine)
    said(machine, 0)
    again = arrive(machine, attempt=2)
    assert again == ["RESULT OK 0", "PROGRESS RUNNING 1", "PROGRESS QUEUED 2"]
    assert ask(machine, Kind.REQ, 2) == ["PROGRESS QUEUED 2"]


def test_one_behind_a_gap_is_held_until_the_gap_is_filled():
    """Nothing starts out of order."""
    machine = callee()
    assert arrive(machine, 1, 2) == ["NACK GAP 0", "NACK GAP 0"]
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    assert said(machine, 0) == ["RESULT OK 0", "run 1"]


def test_a_joined_message_that_is_none_is_counted():
    """A body that does not hold as many requests as the header says is dropped whole."""
    machine = callee()
    header = Header(Kind.REQ, SESSION, EPOCH, INCARNATION, "main", 0, 3, status=Status.JOINED)
    assert machine.receive(header, (join_requests([(0, b"a")]),), PEER, 0) == []
    assert machine.receive(header, (b"\xc1",), PEER, 0) == []
    assert machine.dropped == {"joined": 2}
    with pytest.raises(FrameError):
        split_requests((b"a", b"b"))


def test_only_a_caller_that_joins_its_requests_gets_joined_results():
    """Whoever has never sent such a message may not know them."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    assert not machine.joins(SESSION, "main")
    arrive(machine, 1)
    assert machine.joins(SESSION, "main")


# -- results that wait for each other ------------------------------------------------------------------------------


def result(seq, body=b"x", **fields):
    """Return a result to be sent."""
    return SendTo(reply(Kind.RESULT, seq, Status.OK, **fields), (body,), PEER)


def test_short_results_of_consecutive_calls_become_one():
    """The first says whose they are; one alone stays what it was."""
    held = JoinedResults()
    assert held.add(result(4))
    assert held.take() == result(4)
    assert all(held.add(result(seq, b"%d" % seq)) for seq in (5, 6, 7))
    send = held.take()
    assert (send.header.seq, send.header.calls, send.peer) == (5, 3, PEER)
    assert send.buffers == (join_bodies([b"5", b"6", b"7"]),)
    assert held.take() is None


@pytest.mark.parametrize(
    "other",
    [
        result(6),
        result(5, attempt=2),
        result(5, lane="side"),
        result(5, session=b"another-session!"),
        result(5, b"x" * 2_000),
        result(5)._replace(peer=b"other"),
        result(5)._replace(buffers=(b"x", b"array")),
        SendTo(reply(Kind.FAILURE, 5, Status.APP_ERROR), (b"x",), PEER),
        SendTo(reply(Kind.RESULT, 5, Status.OK, calls=2), (b"x",), PEER),
    ],
    ids=["gap", "attempt", "lane", "session", "large", "peer", "arrays", "failure", "several"],
)
def test_what_cannot_go_with_them_is_left_out(other):
    """It leaves by itself, behind them."""
    held = JoinedResults()
    assert held.add(result(4))
    assert not held.add(other)
    assert len(held) == 1


def test_outcomes_of_a_dead_callee_are_those_of_each_call():
    """Without a journal what was sent is UNKNOWN, each call by itself."""
    lane = caller()
    joined(lane)
    effects = lane.on_dead("worker_exit", "it was killed")
    assert [effect.outcome.kind for effect in effects] == [OutcomeKind.UNKNOWN] * 3
