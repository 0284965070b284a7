from __future__ import annotations

import pytest

from protocol_kit import BODY, EPOCH, INCARNATION, MS, PEER, SESSION, ask, callee, said, words
from zbus.protocol.messages import Execute, Header, Kind, SendTo, Status

OTHER = b"another-session!"


def hello(machine, *, session=SESSION, epoch=EPOCH, incarnation=INCARNATION):
    """Say HELLO; return the answer and the words of the effects."""
    status, effects = machine.hello(Header(Kind.HELLO, session, epoch, incarnation, "main"), 0)
    machine.validate()
    return status, words(effects)


# -- admission and order -------------------------------------------------------------------------------------------


def test_requests_start_in_order_one_at_a_time():
    """A lane of concurrency one starts the next request at the end of the last."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    assert ask(machine, Kind.REQ, 1) == []
    assert ask(machine, Kind.REQ, 2) == []
    assert said(machine, 0) == ["RESULT OK 0", "run 1"]
    assert said(machine, 1) == ["RESULT OK 1", "run 2"]


def test_a_lane_runs_as_many_requests_as_its_concurrency():
    """They start in order; what ends frees its turn."""
    machine = callee()
    assert [ask(machine, Kind.REQ, seq, lane="ctl") for seq in range(3)] == [["run 0"], ["run 1"], []]
    assert said(machine, 1, lane="ctl") == ["RESULT OK 1", "run 2"]


def test_a_request_before_its_turn_is_held_until_the_gap_is_filled():
    """The gap is told at once; nothing starts out of order."""
    machine = callee()
    assert ask(machine, Kind.REQ, 2) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 1) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    assert said(machine, 0) == ["RESULT OK 0", "run 1"]
    assert said(machine, 1) == ["RESULT OK 1", "run 2"]


def test_an_execute_says_what_to_run():
    """Body, deadline on the callee's own clock, trace, strictness and arrival are handed on."""
    machine = callee()
    header = Header(
        Kind.REQ, SESSION, EPOCH, INCARNATION, "main", 0, 2, budget_ms=30, status=Status.STRICT, trace=5, attempt=4
    )
    assert machine.receive(header, BODY, PEER, 7 * MS) == [
        Execute(SESSION, "main", 0, 2, BODY, 37 * MS, 5, strict=True, attempt=4, arrived_ns=7 * MS, epoch=EPOCH)
    ]


def test_a_request_too_far_ahead_is_refused():
    """The window bounds what is held."""
    machine = callee(window_calls=4)
    assert ask(machine, Kind.REQ, 3) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 4) == ["NACK WINDOW 4"]


@pytest.mark.parametrize("kind", [Kind.REQ, Kind.SKIP])
def test_no_more_answers_are_kept_than_the_window_whatever_the_callers_window_is(kind):
    """A caller that takes answers but never says so is refused at the window, and goes on once its floor has risen."""
    machine = callee(window_calls=4)
    for seq in range(4):
        assert ask(machine, kind, seq) == ([f"run {seq}"] if kind is Kind.REQ else [f"FAILURE EXPIRED {seq}"])
        machine.finished(SESSION, "main", seq, Kind.RESULT, Status.OK, BODY, MS)
    assert ask(machine, kind, 4) == ["NACK WINDOW 4"]
    assert ask(machine, kind, 5) == ["NACK WINDOW 5"]
    machine.validate()
    assert ask(machine, kind, 4, floor=1) != ["NACK WINDOW 4"]
    assert ask(machine, kind, 5, floor=1) == ["NACK WINDOW 5"]
    machine.validate()


def test_what_a_caller_gives_up_behind_a_call_that_runs_on_does_not_pile_up():
    """Its floor is past it: ended places are forgotten, queued requests are wanted by nobody and do not start."""
    machine = callee(window_calls=8)
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    lane = machine._sessions[SESSION].lanes["main"]
    for seq in range(1, 500):
        ask(machine, Kind.SKIP if seq % 2 else Kind.REQ, seq, floor=seq)
        assert len(lane.runs) <= 2
        assert machine.queued <= 1
    assert said(machine, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.REQ, 500, floor=500) == ["run 500"]
    assert ask(machine, Kind.REQ, 498, floor=500) == [], "it does not come back"
    assert list(lane.runs) == [500]


def test_what_is_held_counts_for_the_window_too():
    """A place is within the window of the floor, however far the sequence has come."""
    machine = callee(window_calls=4)
    assert ask(machine, Kind.SKIP, 0) == ["FAILURE EXPIRED 0"]
    assert ask(machine, Kind.REQ, 3) == ["NACK GAP 1"]
    assert ask(machine, Kind.REQ, 4) == ["NACK WINDOW 4"]
    assert ask(machine, Kind.REQ, 4, floor=1) == ["NACK GAP 1"]


def test_a_skip_takes_its_place_and_runs_nothing():
    """The sequence goes on; the answer says it was not run, again if asked."""
    machine = callee()
    assert ask(machine, Kind.SKIP, 0, calls=2) == ["FAILURE EXPIRED 0+2"]
    assert ask(machine, Kind.SKIP, 0, calls=2) == ["FAILURE EXPIRED 0+2"]
    assert ask(machine, Kind.REQ, 2) == ["run 2"]


def test_a_skip_before_its_turn_is_held_like_a_request():
    """Its place is taken when the gap is filled."""
    machine = callee()
    assert ask(machine, Kind.SKIP, 1) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 2) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 0) == ["FAILURE EXPIRED 1", "run 0"]
    assert said(machine, 0) == ["RESULT OK 0", "run 2"]


def test_a_skip_of_a_held_request_takes_its_run_away():
    """A caller that no longer wants a request which is held is obeyed."""
    machine = callee()
    ask(machine, Kind.REQ, 1)
    assert ask(machine, Kind.SKIP, 1) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 0) == ["FAILURE EXPIRED 1", "run 0"]
    assert said(machine, 0) == ["RESULT OK 0"]


def test_a_skip_of_a_request_that_has_come_cancels_it():
    """Queued: not run. Running: asked to stop. Done: its answer stands."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1)
    assert ask(machine, Kind.SKIP, 1) == ["FAILURE CANCELLED 1"]
    assert ask(machine, Kind.SKIP, 0) == ["stop 0", "PROGRESS RUNNING 0"]
    assert said(machine, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.SKIP, 0) == ["RESULT OK 0"]


# -- no duplicate --------------------------------------------------------------------------------------------------


def test_a_request_that_was_lost_runs_once_when_it_comes_again():
    """Request lost: the second transmission is the first arrival."""
    machine = callee()
    assert ask(machine, Kind.PROBE, 0) == ["NACK GAP 0"]
    assert ask(machine, Kind.REQ, 0, attempt=2) == ["run 0"]


def test_a_request_whose_reply_was_lost_is_answered_from_the_cache():
    """Reply lost: the same reply, no second run."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    said(machine, 0)
    assert ask(machine, Kind.REQ, 0, attempt=2) == ["RESULT OK 0"]
    assert ask(machine, Kind.PROBE, 0) == ["RESULT OK 0"]


def test_a_request_that_comes_again_while_it_runs_or_waits_gets_progress():
    """Retry while running: PROGRESS, no second run."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1)
    assert ask(machine, Kind.REQ, 0, attempt=2) == ["PROGRESS RUNNING 0"]
    assert ask(machine, Kind.REQ, 1, attempt=2) == ["PROGRESS QUEUED 1"]
    assert ask(machine, Kind.PROBE, 0) == ["PROGRESS RUNNING 0"]


def test_a_failure_is_cached_as_a_result_is():
    """A duplicate of a failed call is told the failure, not 'acknowledged'."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    assert said(machine, 0, Kind.FAILURE, Status.APP_ERROR) == ["FAILURE APP_ERROR 0"]
    assert ask(machine, Kind.REQ, 0) == ["FAILURE APP_ERROR 0"]


def test_a_running_batch_tells_what_it_has():
    """Replies so far, and that it runs."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0, calls=3) == ["run 0+3"]
    assert said(machine, 0) == ["RESULT OK 0"]
    assert said(machine, 1) == ["RESULT OK 1"]
    assert ask(machine, Kind.PROBE, 0, calls=3) == ["RESULT OK 0", "RESULT OK 1", "PROGRESS RUNNING 0+3"]
    assert said(machine, 2) == ["RESULT OK 2"]
    assert ask(machine, Kind.REQ, 0, calls=3) == ["RESULT OK 0", "RESULT OK 1", "RESULT OK 2"]


def test_the_reply_cache_is_bounded_by_the_floor_and_by_nothing_else():
    """What the caller has taken is forgotten; what it has not is kept, however long."""
    machine = callee()
    for seq in range(3):
        ask(machine, Kind.REQ, seq)
        said(machine, seq)
    assert machine.expire(1 << 60) == []
    assert ask(machine, Kind.PROBE, 2, floor=2) == ["RESULT OK 2"]
    assert ask(machine, Kind.REQ, 1) == []
    assert machine.dropped == {"below_floor": 1}
    assert ask(machine, Kind.REQ, 2) == ["RESULT OK 2"]
    assert len(machine._sessions[SESSION].lanes["main"].runs) == 1


def test_a_hundred_calls_leave_one_reply_in_the_cache():
    """A caller that takes its answers costs no memory."""
    machine = callee()
    for seq in range(100):
        assert ask(machine, Kind.REQ, seq, floor=seq) == [f"run {seq}"]
        said(machine, seq)
    assert len(machine._sessions[SESSION].lanes["main"].runs) == 1


def test_another_request_of_a_known_number_is_a_mismatch():
    """It is refused, and the known one stands."""
    machine = callee()
    ask(machine, Kind.REQ, 0, calls=2)
    assert ask(machine, Kind.REQ, 0, calls=3) == ["NACK MISMATCH 0+3"]
    assert ask(machine, Kind.REQ, 0, calls=2) == ["PROGRESS RUNNING 0+2"]


def test_an_end_of_what_does_not_run_is_counted_and_ignored():
    """A shell's error does not reach the wire."""
    machine = callee()
    assert said(machine, 0) == []
    ask(machine, Kind.REQ, 0)
    said(machine, 0)
    assert said(machine, 0) == []
    assert machine.dropped == {"finished_unknown": 2}


# -- deadlines and cancel ------------------------------------------------------------------------------------------


def test_a_request_that_expires_in_the_queue_is_never_started():
    """Its end is said when the time is up."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1, budget_ms=20)
    ask(machine, Kind.REQ, 2)
    assert machine.expire(19 * MS) == []
    assert words(machine.expire(20 * MS)) == ["FAILURE EXPIRED 1"]
    assert said(machine, 0) == ["RESULT OK 0", "run 2"]


def test_a_request_that_has_expired_when_its_turn_comes_is_not_started():
    """Also when nobody looked in between; the next one starts."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1, budget_ms=20)
    ask(machine, Kind.REQ, 2)
    assert said(machine, 0, now=20 * MS) == ["RESULT OK 0", "FAILURE EXPIRED 1", "run 2"]


def test_a_running_request_is_not_ended_by_its_deadline():
    """Only its caller decides what that means."""
    machine = callee()
    ask(machine, Kind.REQ, 0, budget_ms=1)
    assert machine.expire(1 << 60) == []
    assert said(machine, 0, now=1 << 60) == ["RESULT OK 0"]


def test_cancel_at_each_state():
    """Not arrived: the gap. Held and queued: never run. Running: asked to stop. Done: the answer. Always an answer."""
    machine = callee()
    assert ask(machine, Kind.CANCEL, 0) == ["NACK GAP 0"]
    ask(machine, Kind.REQ, 3)
    assert ask(machine, Kind.CANCEL, 3) == ["NACK GAP 0"]
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1)
    assert ask(machine, Kind.CANCEL, 1) == ["FAILURE CANCELLED 1"]
    assert ask(machine, Kind.CANCEL, 1) == ["FAILURE CANCELLED 1"]
    assert ask(machine, Kind.CANCEL, 0) == ["stop 0", "PROGRESS RUNNING 0"]
    assert said(machine, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.CANCEL, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.REQ, 2) == ["FAILURE EXPIRED 3", "run 2"]


# -- epochs, incarnations, sessions --------------------------------------------------------------------------------


def test_another_incarnation_is_refused_and_changes_nothing():
    """A request meant for a former start of the rank is never run."""
    machine = callee()
    assert hello(machine, incarnation=5)[0] is Status.FENCED_INCARNATION
    assert ask(machine, Kind.REQ, 0, incarnation=5) == ["NACK FENCED_INCARNATION 0"]
    assert ask(machine, Kind.REQ, 0) == ["run 0"]


def test_a_hello_that_knows_no_incarnation_is_welcome():
    """Incarnation 0 asks who is there."""
    assert hello(callee(welcomed=False), incarnation=0) == (Status.NONE, [])


def test_a_lower_epoch_is_refused_in_every_kind():
    """The highest epoch that ever said HELLO stands, and its number is told."""
    machine = callee()
    hello(machine, session=OTHER, epoch=EPOCH + 1)
    for kind in (Kind.REQ, Kind.SKIP, Kind.PROBE, Kind.CANCEL, Kind.ACK):
        effects = machine.receive(Header(kind, SESSION, EPOCH, INCARNATION, "main"), BODY, PEER, 0)
        assert words(effects) == ["NACK FENCED_EPOCH 0"]
        assert effects[0].header.floor == EPOCH + 1
    assert hello(machine)[0] is Status.FENCED_EPOCH


def test_a_higher_epoch_ends_what_was_queued_and_lets_what_runs_end():
    """Nothing of the old controller starts any more; its queued requests are told so."""
    machine = callee()
    for seq in range(3):
        ask(machine, Kind.REQ, seq)
    ask(machine, Kind.REQ, 5)
    assert hello(machine, session=OTHER, epoch=EPOCH + 1) == (Status.NONE, ["FAILURE SHUTDOWN 1", "FAILURE SHUTDOWN 2"])
    assert said(machine, 0) == ["RESULT OK 0"]
    assert machine.running == machine.queued == 0
    assert ask(machine, Kind.REQ, 0, session=OTHER, epoch=EPOCH + 1) == ["run 0"]


def test_replies_of_a_replaced_controller_are_not_kept():
    """Nobody can ask for them any more."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    said(machine, 0)
    hello(machine, session=OTHER, epoch=EPOCH + 1)
    assert SESSION not in machine._sessions


def test_an_unknown_session_is_told_to_say_hello():
    """After a HELLO it may call."""
    machine = callee(welcomed=False)
    assert ask(machine, Kind.REQ, 0) == ["NACK NO_SESSION 0"]
    hello(machine)
    assert ask(machine, Kind.REQ, 0) == ["run 0"]


def test_a_hello_said_again_keeps_the_session():
    """After a reconnect the cursors tell what has come, and known requests stay known."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1)
    ask(machine, Kind.REQ, 7)
    ask(machine, Kind.REQ, 0, lane="ctl")
    assert hello(machine) == (Status.NONE, [])
    assert machine.lane_cursors(SESSION) == {"main": 2, "ctl": 1}
    assert machine.lane_cursors(OTHER) == {}
    assert ask(machine, Kind.REQ, 1) == ["PROGRESS QUEUED 1"]


def test_two_sessions_have_lanes_of_their_own():
    """Each counts from 0."""
    machine = callee()
    hello(machine, session=OTHER)
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    assert ask(machine, Kind.REQ, 0, session=OTHER) == ["run 0"]


def test_after_bye_nothing_of_the_session_starts():
    """What was queued is told so; copies of its HELLO and requests that come late do not open it again."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    ask(machine, Kind.REQ, 1)
    assert words(machine.bye(SESSION)) == ["FAILURE SHUTDOWN 1"]
    assert hello(machine)[0] is Status.DRAINING
    assert ask(machine, Kind.REQ, 2) == []
    assert said(machine, 0) == ["RESULT OK 0"]
    assert hello(machine)[0] is Status.DRAINING
    assert ask(machine, Kind.REQ, 0) == []
    assert machine.dropped == {"session_over": 2}


def test_a_hello_that_comes_after_its_bye_is_refused():
    """They may take two connections."""
    machine = callee(welcomed=False)
    machine.bye(SESSION)
    assert hello(machine)[0] is Status.DRAINING


def test_ended_sessions_cost_little():
    """Ten thousand guests that came and went are remembered by some thousands of ids, nothing more."""
    machine = callee()
    for number in range(10_000):
        session = number.to_bytes(16, "big")
        hello(machine, session=session, epoch=0)
        ask(machine, Kind.REQ, 0, session=session, epoch=0, lane="ctl")
        said_words = words(machine.finished(session, "ctl", 0, Kind.RESULT, Status.OK, BODY, 0))
        assert said_words == ["RESULT OK 0"]
        machine.bye(session)
    assert len(machine._sessions) == 1
    assert len(machine._ended) <= 4096


# -- lanes and guests ----------------------------------------------------------------------------------------------


def test_a_guest_may_use_only_the_lanes_of_guests():
    """Epoch 0 is answered on ``ctl`` and never run on ``main``; it does not disturb the controller."""
    machine = callee()
    assert hello(machine, session=OTHER, epoch=0) == (Status.NONE, [])
    guest = {"session": OTHER, "epoch": 0}
    assert ask(machine, Kind.REQ, 0, lane="ctl", **guest) == ["run 0"]
    assert ask(machine, Kind.REQ, 0, lane="main", **guest) == ["FAILURE UNKNOWN_LANE 0"]
    machine.open_lane("main", 3)
    assert ask(machine, Kind.REQ, 1, lane="main", **guest) == ["FAILURE UNKNOWN_LANE 1"]
    assert ask(machine, Kind.REQ, 0) == ["run 0"]


def test_a_lane_that_does_not_exist_answers_in_order_and_may_be_opened_later():
    """A refused place is a place: answered again if asked, and no hole for what comes after."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0, lane="late", calls=2) == ["FAILURE UNKNOWN_LANE 0+2"]
    assert ask(machine, Kind.REQ, 0, lane="late", calls=2) == ["FAILURE UNKNOWN_LANE 0+2"]
    machine.open_lane("late", 1)
    assert ask(machine, Kind.REQ, 0, lane="late", calls=2) == ["FAILURE UNKNOWN_LANE 0+2"]
    assert ask(machine, Kind.REQ, 2, lane="late") == ["run 2"]


def test_undeclared_lanes_are_bounded():
    """A caller cannot fill the memory with names."""
    machine = callee()
    for number in range(256):
        ask(machine, Kind.REQ, 0, lane=f"x{number}")
    assert ask(machine, Kind.REQ, 0, lane="y") == ["NACK UNKNOWN_LANE 0"]
    machine.open_lane("y", 1)
    assert ask(machine, Kind.REQ, 0, lane="y") == ["run 0"]


# -- drain ---------------------------------------------------------------------------------------------------------


def test_a_draining_worker_starts_nothing_and_says_so():
    """What runs may end; queued, held and new requests are not executed, and that is said again if asked."""
    machine = callee()
    for seq in (0, 1, 4):
        ask(machine, Kind.REQ, seq)
    assert words(machine.drain()) == ["FAILURE SHUTDOWN 1"]
    assert said(machine, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.REQ, 2) == ["FAILURE SHUTDOWN 2"]
    assert ask(machine, Kind.REQ, 2) == ["FAILURE SHUTDOWN 2"]
    assert ask(machine, Kind.REQ, 3) == ["FAILURE SHUTDOWN 3", "FAILURE SHUTDOWN 4"]


# -- streams -------------------------------------------------------------------------------------------------------


def test_items_are_kept_until_the_caller_has_taken_them():
    """A probe has the kept ones sent again; credit frees them."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    for number in range(3):
        assert words(machine.chunk(SESSION, "main", 0, number, BODY)) == [f"CHUNK 0 #{number}"]
    assert ask(machine, Kind.ACK, 0, floor=2) == ["credit 0 #2"]
    assert ask(machine, Kind.ACK, 0, floor=1) == []
    assert ask(machine, Kind.PROBE, 0) == ["CHUNK 0 #2", "PROGRESS RUNNING 0"]
    effects = machine.finished(SESSION, "main", 0, Kind.END, Status.OK, (), 0, chunks=3)
    assert isinstance(effects[0], SendTo)
    assert (words(effects), effects[0].header.floor) == (["END OK 0"], 3)
    assert ask(machine, Kind.PROBE, 0) == ["CHUNK 0 #2", "END OK 0"]


def test_credit_does_not_move_the_floor_of_the_lane():
    """An ACK counts items, not calls."""
    machine = callee()
    ask(machine, Kind.REQ, 0)
    said(machine, 0)
    ask(machine, Kind.REQ, 1)
    ask(machine, Kind.ACK, 1, floor=9)
    assert ask(machine, Kind.PROBE, 0) == ["RESULT OK 0"]


def test_items_of_what_does_not_run_are_counted_and_ignored():
    """A generator that outlives its call says nothing."""
    machine = callee()
    assert machine.chunk(SESSION, "main", 0, 0, BODY) == []
    assert machine.dropped == {"chunk_unknown": 1}


# -- replies find their way ----------------------------------------------------------------------------------------


def test_a_reply_goes_to_the_connection_that_spoke_last():
    """After a reconnect the answer of a long call takes the new way."""
    machine = callee()
    ask(machine, Kind.REQ, 0, peer=b"first")
    ask(machine, Kind.PROBE, 0, peer=b"other")
    effects = machine.finished(SESSION, "main", 0, Kind.RESULT, Status.OK, BODY, 0)
    assert effects[0].peer == b"other"


def test_a_long_call_is_announced():
    """Whoever waits for it learns that it runs, unasked."""
    machine = callee()
    ask(machine, Kind.REQ, 0, calls=2)
    ask(machine, Kind.REQ, 2)
    assert words(machine.announce("main")) == ["PROGRESS RUNNING 0+2"]
    assert machine.announce("ctl") == []


@pytest.mark.parametrize("kind", [Kind.RESULT, Kind.WELCOME, Kind.PROGRESS, Kind.CHUNK, Kind.NACK])
def test_what_only_a_callee_says_is_not_answered(kind):
    """Two callees wired to each other do not talk for ever."""
    assert ask(callee(), kind, 0) == []


def test_a_callee_that_holds_off_ends_what_runs_and_starts_nothing():
    """It may have been replaced: it asks its callers, queues what comes, and goes on in order when told to."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    ask(machine, Kind.REQ, 1)
    assert words(machine.hold_off()) == ["PING 0"]
    assert machine.hold_off() == [], "asked once"
    assert said(machine, 0) == ["RESULT OK 0"]
    assert ask(machine, Kind.REQ, 2) == []
    assert words(machine.ask_callers()) == ["PING 0"]
    assert words(machine.resume(5)) == ["run 1"]
    assert machine.resume(6) == []
    assert said(machine, 1) == ["RESULT OK 1", "run 2"]


def test_a_callee_that_holds_off_asks_only_callers_that_may_start_work():
    """A guest knows nothing of it, and a fenced controller must not be believed."""
    machine = callee(guest_lanes=None)
    guest, later = b"guest-of-16-byte", b"epoch-after-that"
    machine.hello(Header(Kind.HELLO, guest, 0, INCARNATION, "main"), 0)
    ask(machine, Kind.REQ, 0, session=guest, epoch=0)
    machine.hello(Header(Kind.HELLO, later, EPOCH + 1, INCARNATION, "main"), 0)
    ask(machine, Kind.REQ, 0, session=later, epoch=EPOCH + 1)
    asked = [effect.header.session for effect in machine.hold_off()]
    assert asked == [later]
