from __future__ import annotations

from zbus.protocol.batch import BatchSlots, causes
from zbus.protocol.messages import Outcome, OutcomeKind

OK = Outcome(OutcomeKind.OK)
ERROR = Outcome(OutcomeKind.APP_ERROR)


def unknown(reason: str) -> Outcome:
    """Return an outcome of which nothing is known."""
    return Outcome(OutcomeKind.UNKNOWN, None, reason, "evidence")


def test_a_slot_is_filled_once():
    """The first outcome stands."""
    slots = BatchSlots(2, 1)
    assert slots.fill(0, 0, OK)
    assert not slots.fill(0, 0, ERROR)
    assert slots.outcome(0, 0) is OK
    assert slots.missing(0) == [1]


def test_a_batch_is_settled_when_every_member_has_answered_every_call():
    """Each call settles by itself, the batch by all."""
    slots = BatchSlots(2, 2)
    slots.fill(0, 0, OK)
    slots.fill(1, 0, OK)
    assert (slots.settled(0), slots.settled(1), slots.settled()) == (True, False, False)
    slots.fill(0, 1, OK)
    slots.fill(1, 1, ERROR)
    assert slots.settled()
    assert slots.missing(1) == []


def test_arrivals_are_told_in_order_and_from_a_position_on():
    """Whoever reads as they come misses none and sees none twice."""
    slots = BatchSlots(3, 2)
    for member, call in ((2, 0), (0, 1), (0, 0), (1, 0)):
        slots.fill(member, call, OK)
    assert list(slots.arrivals(0)) == [(0, 2), (2, 0), (3, 1)]
    assert list(slots.arrivals(0, 1)) == [(2, 0), (3, 1)]


def test_failures_come_in_order_of_arrival_of_one_call_or_all():
    """What ended OK is not among them."""
    slots = BatchSlots(2, 2)
    slots.fill(1, 1, ERROR)
    slots.fill(0, 0, OK)
    slots.fill(1, 0, unknown("worker_exit"))
    assert [(failure.member, failure.call, failure.order) for failure in slots.failures()] == [(1, 1, 0), (1, 0, 2)]
    assert [failure.call for failure in slots.failures(0)] == [0]


def test_the_root_comes_before_what_follows_from_it():
    """An own error or death comes first, then echoes, leases, deadlines, successors, cancellations; earlier first."""
    slots = BatchSlots(7, 1)
    told = [
        Outcome(OutcomeKind.CANCELLED, None, "cancelled"),
        Outcome(OutcomeKind.NOT_EXECUTED, None, "predecessor"),
        unknown("deadline"),
        unknown("lease"),
        ERROR,
        unknown("worker_exit"),
        ERROR,
    ]
    for member, outcome in enumerate(told):
        slots.fill(member, 0, outcome)
    failures = slots.failures()
    assert [failure.member for failure in causes(failures)] == [4, 5, 6, 3, 2, 1, 0]
    echo = causes(failures, lambda failure: failure.member == 4)
    assert [failure.member for failure in echo] == [5, 6, 3, 4, 2, 1, 0]


def test_results_that_come_together_fill_their_slots_at_once():
    """They count as outcomes of their own, in order of arrival; a slot that is filled refuses them all."""
    slots = BatchSlots(1, 4)
    assert slots.fill_together(0, 1, [b"b", b"c"], 1)
    assert (slots.settled(0), slots.settled(1), slots.settled(), slots.missing(0)) == (False, True, False, [0])
    assert slots.outcome(0, 2) == Outcome(OutcomeKind.OK, (b"c",))
    assert slots.row[2] == b"c"
    assert type(slots.row[0]) is not bytes
    assert not slots.fill_together(0, 2, [b"c", b"d"], 1)
    assert slots.outcome(0, 3) is None
    assert not slots.fill(0, 1, ERROR)
    slots.fill(0, 3, ERROR)
    slots.fill(0, 0, OK)
    assert slots.settled()
    assert type(slots.row[0]) is not bytes
    assert [(failure.call, failure.order) for failure in slots.failures()] == [(3, 2)]
    assert [list(slots.arrivals(call)) for call in range(4)] == [[(2, 0)], [(0, 0)], [(0, 0)], [(1, 0)]]


def test_results_of_several_members_settle_a_call_when_all_have_come():
    """Those of other attempts are told one by one: they are refused together."""
    slots = BatchSlots(2, 2)
    assert slots.fill_together(0, 0, [b"a", b"b"], 2)
    assert not slots.settled(0)
    assert not slots.fill_together(1, 0, [b"a", b"b"], 1)
    assert slots.missing(1) == [1]
    assert slots.fill_together(1, 0, [b"a", b"b"], 2)
    assert slots.settled(1)
    assert slots.outcome(1, 1) == Outcome(OutcomeKind.OK, (b"b",), attempts=2)
