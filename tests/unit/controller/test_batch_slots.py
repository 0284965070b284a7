from __future__ import annotations

from zbus.protocol.batch import BatchSlots, Failure, causes
from zbus.protocol.messages import Outcome, OutcomeKind

OK = Outcome(OutcomeKind.OK, ())
ERROR = Outcome(OutcomeKind.APP_ERROR, ())


def unknown(reason: str) -> Outcome:
    """Make an outcome that nobody knows."""
    return Outcome(OutcomeKind.UNKNOWN, None, reason)


def test_a_slot_is_filled_once():
    """The first outcome of a call stands; another one is refused."""
    slots = BatchSlots(1, 1)
    assert slots.fill(0, 0, OK)
    assert not slots.fill(0, 0, ERROR)
    assert slots.outcome(0, 0) is OK


def test_a_call_is_settled_when_every_member_has_answered():
    """Each call of a batch settles by itself; the batch when all have."""
    slots = BatchSlots(2, 2)
    slots.fill(0, 0, OK)
    assert slots.missing(0) == [1]
    slots.fill(1, 0, OK)
    assert (slots.settled(0), slots.settled(1), slots.settled()) == (True, False, False)
    slots.fill(1, 1, ERROR)
    slots.fill(0, 1, OK)
    assert slots.settled()
    assert slots.failures() == [Failure(1, 1, ERROR, 2)]
    assert slots.failures(0) == []


def test_arrivals_come_in_order_from_a_position_on():
    """Who asks for what is new gets each arrival once."""
    slots = BatchSlots(3, 1)
    slots.fill(2, 0, OK)
    slots.fill(0, 0, OK)
    assert list(slots.arrivals(0)) == [(0, 2), (1, 0)]
    slots.fill(1, 0, OK)
    assert list(slots.arrivals(0, 2)) == [(2, 1)]


def test_causes_put_own_failures_before_what_follows_from_others():
    """Own error or death, then echoes and leases, then deadlines, then successors, then cancellations."""
    outcomes = [
        Outcome(OutcomeKind.CANCELLED, None, "cancelled"),
        Outcome(OutcomeKind.NOT_EXECUTED, None, "predecessor"),
        unknown("deadline"),
        unknown("lease"),
        ERROR,
        ERROR,
        unknown("worker_exit"),
    ]
    failures = [Failure(member, 0, outcome, member) for member, outcome in enumerate(outcomes)]
    ordered = causes(failures, lambda failure: failure.member == 4)
    assert [failure.member for failure in ordered] == [5, 6, 3, 4, 2, 1, 0]


def test_the_earlier_of_two_equal_causes_is_root():
    """Among equals the order of arrival decides."""
    failures = [Failure(3, 0, ERROR, 1), Failure(1, 0, ERROR, 0)]
    assert causes(failures)[0].member == 1
