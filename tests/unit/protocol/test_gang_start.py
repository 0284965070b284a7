"""A call that starts together: it begins on no worker until all of them hold it."""

from __future__ import annotations

import pytest

from protocol_kit import BODY, INCARNATION, MS, SESSION, TIMING, ask, callee, reply, said, words
from zbus.protocol.caller import CallerLane
from zbus.protocol.gang import Gang
from zbus.protocol.messages import Kind, Outcome, Poised, SendTo, Status

DEADLINE = 1_000 * MS


class Members:
    """Caller lanes and the gang of the request just placed in each; ``said`` collects their effects in words."""

    def __init__(self, count: int = 3, *, deadline: int | None = DEADLINE, calls: int = 1) -> None:
        self.lanes = [CallerLane(SESSION, 3, INCARNATION, "main", timing=TIMING) for _ in range(count)]
        self.gang = Gang(self.lanes, [0] * count, [f"actor/{n}" for n in range(count)], deadline)
        self.said: list[list[str]] = [[] for _ in range(count)]
        self.outcomes: list[list[Outcome]] = [[] for _ in range(count)]
        for member, lane in enumerate(self.lanes):
            lane.on_connected(0, 0)
            self.take(member, lane.place(BODY, calls, 4, deadline, 0, together=True)[1], 0)

    def take(self, member, effects, now):
        self.said[member] += words(e for e in effects if not isinstance(e, Poised))
        for effect in effects:
            steps = []
            if isinstance(effect, Poised):
                steps = self.gang.poised(member, now)
            elif not isinstance(effect, SendTo):
                self.outcomes[member].append(effect.outcome)
                steps = [] if self.gang.released else self.gang.ended(member, effect.outcome, now)
            for step in steps:
                self.take(step.member, step.effects, now)
        self.lanes[member].validate()

    def hear(self, member, kind, status=Status.NONE, *, now=0, calls=1):
        self.take(member, self.lanes[member].receive(reply(kind, 0, status, calls=calls), (), now), now)

    def kinds(self):
        return [[(o.kind.value, o.reason) for o in outcomes] for outcomes in self.outcomes]


def test_nothing_goes_before_the_last_member_holds_the_call():
    """GO is said to all members at once, when the last of them is ready, and only once."""
    members = Members()
    assert members.said == [["REQ TOGETHER 0"]] * 3
    members.hear(0, Kind.PROGRESS, Status.POISED)
    members.hear(2, Kind.PROGRESS, Status.POISED)
    members.hear(2, Kind.PROGRESS, Status.POISED)
    assert all(words == ["REQ TOGETHER 0"] for words in members.said)
    members.hear(1, Kind.PROGRESS, Status.POISED)
    assert members.said == [["REQ TOGETHER 0", "GO 0"]] * 3
    members.hear(1, Kind.PROGRESS, Status.POISED)
    assert members.said == [["REQ TOGETHER 0", "GO 0"]] * 3


def test_a_member_lost_before_the_start_ends_all_as_not_executed():
    """It is proved without the dead one's journal: no GO was sent. The others are asked to drop the call."""
    members = Members()
    members.hear(0, Kind.PROGRESS, Status.POISED)
    members.take(1, members.lanes[1].on_dead("worker_exit", "killed by SIGKILL"), 0)
    assert members.kinds() == [
        [("NOT_EXECUTED", "gang")],
        [("NOT_EXECUTED", "worker_exit")],
        [("NOT_EXECUTED", "gang")],
    ]
    assert "actor/1" in members.outcomes[0][0].evidence
    assert members.said[0][-1] == "CANCEL 0"
    members.hear(2, Kind.PROGRESS, Status.POISED)
    members.hear(0, Kind.FAILURE, Status.CANCELLED)
    assert not members.gang.released
    assert members.lanes[0].outstanding == 0


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda members: members.take(0, members.lanes[0].on_timer(DEADLINE), DEADLINE), ("NOT_EXECUTED", "deadline")),
        (lambda members: members.take(0, members.lanes[0].cancel(0, 5), 5), ("CANCELLED", "cancelled")),
    ],
)
def test_a_deadline_or_cancel_before_the_start_is_every_members_end_at_once(end, told):
    """No grace, no question: what was not released did not run."""
    members = Members()
    for member in (0, 1):
        members.hear(member, Kind.PROGRESS, Status.POISED)
    end(members)
    assert members.kinds() == [[told]] * 3


def test_a_refusal_of_one_member_ends_all():
    """A worker that drains starts nothing, so nobody starts."""
    members = Members()
    members.hear(1, Kind.FAILURE, Status.SHUTDOWN)
    assert members.kinds() == [[("NOT_EXECUTED", "gang")], [("NOT_EXECUTED", "shutdown")], [("NOT_EXECUTED", "gang")]]


def test_no_go_while_a_member_is_disconnected():
    """It could not be told; when it is back, it is asked, and says again that it is ready."""
    members = Members(2)
    members.hear(0, Kind.PROGRESS, Status.POISED)
    members.lanes[0].on_disconnected()
    members.hear(1, Kind.PROGRESS, Status.POISED)
    assert not members.gang.released
    members.take(0, members.lanes[0].on_connected(1, 5), 5)
    assert members.said[0][-1] == "PROBE 0"
    members.hear(0, Kind.PROGRESS, Status.POISED)
    assert members.gang.released


def test_no_go_after_the_deadline():
    """A member that is ready too late starts nothing; the timer says so."""
    members = Members(2)
    members.hear(0, Kind.PROGRESS, Status.POISED)
    members.hear(1, Kind.PROGRESS, Status.POISED, now=DEADLINE)
    assert not members.gang.released
    members.take(1, members.lanes[1].on_timer(DEADLINE), DEADLINE)
    assert members.kinds() == [[("NOT_EXECUTED", "deadline")]] * 2


def test_a_lost_go_is_said_again_and_is_not_overtaken_by_a_cancel():
    """After the release the others run, so whatever is asked of a member that may not know, it is told to start."""
    members = Members(2)
    for member in (0, 1):
        members.hear(member, Kind.PROGRESS, Status.POISED)
    lane = members.lanes[0]
    assert words(lane.on_timer(TIMING.probe_first)) == ["GO 0"]
    assert words(lane.cancel(0, TIMING.probe_first)) == ["GO 0"]
    members.hear(0, Kind.PROGRESS, Status.RUNNING, now=TIMING.probe_first)
    later = TIMING.probe_first + TIMING.probe_received
    assert [word for word in words(lane.on_timer(later)) if not word.startswith("finish")] == ["CANCEL 0"]


def test_a_batch_starts_together_as_one():
    """One hold and one GO for all its calls."""
    members = Members(2, calls=3)
    members.hear(0, Kind.PROGRESS, Status.POISED, calls=3)
    members.take(1, members.lanes[1].on_dead("lease", "its lease ran out"), 0)
    assert members.kinds() == [[("NOT_EXECUTED", "gang")] * 3, [("NOT_EXECUTED", "lease")] * 3]


def test_a_callee_holds_its_turn_until_go():
    """The slot is kept, what stands behind waits, and GO starts it once."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0, status=Status.TOGETHER) == ["PROGRESS POISED 0"]
    assert ask(machine, Kind.REQ, 1) == []
    assert ask(machine, Kind.PROBE, 0) == ["PROGRESS POISED 0"]
    assert ask(machine, Kind.GO, 0) == ["run 0"]
    assert ask(machine, Kind.GO, 0) == ["PROGRESS RUNNING 0"]
    assert said(machine, 0) == ["RESULT OK 0", "run 1"]
    assert ask(machine, Kind.GO, 0) == ["RESULT OK 0"]


def test_nothing_overtakes_a_poised_request():
    """Calls start in the order of their places, also where the lane has room for several at once."""
    machine = callee(lanes={"main": 4})
    ask(machine, Kind.REQ, 0, status=Status.TOGETHER)
    assert ask(machine, Kind.REQ, 1) == []
    assert ask(machine, Kind.REQ, 2, status=Status.TOGETHER) == []
    assert ask(machine, Kind.GO, 0) == ["run 0", "run 1", "PROGRESS POISED 2"]


def test_a_callee_becomes_ready_only_when_its_turn_comes():
    """A rank that is still busy does not hold the call yet, so its death there costs the others nothing."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0) == ["run 0"]
    assert ask(machine, Kind.REQ, 1, status=Status.TOGETHER) == []
    assert ask(machine, Kind.PROBE, 1) == ["PROGRESS QUEUED 1"]
    assert said(machine, 0) == ["RESULT OK 0", "PROGRESS POISED 1"]


def test_a_poised_request_that_is_dropped_gives_its_slot_on():
    """CANCEL and a late SKIP end it unstarted; GO after that starts nothing."""
    for kind in (Kind.CANCEL, Kind.SKIP):
        machine = callee()
        ask(machine, Kind.REQ, 0, status=Status.TOGETHER)
        ask(machine, Kind.REQ, 1)
        assert ask(machine, kind, 0) == ["FAILURE CANCELLED 0", "run 1"]
        assert ask(machine, Kind.GO, 0) == ["FAILURE CANCELLED 0"]


def test_a_poised_request_does_not_expire_by_itself():
    """Its caller may have said GO before the deadline: one member must not decide alone."""
    machine = callee()
    ask(machine, Kind.REQ, 0, status=Status.TOGETHER, budget_ms=10)
    assert words(machine.expire(20 * MS)) == []
    assert ask(machine, Kind.GO, 0, now=20 * MS) == ["run 0"]


def test_a_poised_request_ends_with_the_drain_and_with_its_session():
    """Nothing starts after either, also if GO is on its way."""
    machine = callee()
    ask(machine, Kind.REQ, 0, status=Status.TOGETHER)
    assert words(machine.drain()) == ["FAILURE SHUTDOWN 0"]
    assert ask(machine, Kind.GO, 0) == ["FAILURE SHUTDOWN 0"]
    machine.validate()
    machine = callee()
    ask(machine, Kind.REQ, 0, status=Status.TOGETHER_STRICT)
    assert words(machine.bye(SESSION)) == ["FAILURE SHUTDOWN 0"]
    assert machine.running == 0
    assert ask(machine, Kind.GO, 0) == []


def test_go_starts_nothing_on_a_worker_that_holds_off():
    """It may have been long on its way; the caller says it again once the worker says that it is still waiting."""
    machine = callee()
    assert ask(machine, Kind.REQ, 0, status=Status.TOGETHER) == ["PROGRESS POISED 0"]
    machine.hold_off()
    assert ask(machine, Kind.GO, 0) == ["PROGRESS POISED 0"]
    assert words(machine.resume(1)) == []
    assert ask(machine, Kind.GO, 0) == ["run 0"]
