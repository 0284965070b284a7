"""The pure machine on a clock that only the tests move."""

import pytest

from zbus.discovery.hints import Hint, HintKind
from zbus.discovery.state import (
    AgentGone,
    AgentSeen,
    DirectoryState,
    EpochSeen,
    HintPath,
    LeaseExpired,
    LeaseLate,
    LeaseRenewed,
    RegistryTrouble,
    Settings,
    Snapshot,
    WorkerExited,
    WorkerGone,
    WorkerHint,
    WorkerReplaced,
    WorkerSeen,
)
from zbus.ids import WorkerName, new_incarnation
from zbus.registry.lease import LeaseState
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Lease, WorkerRecord
from zbus.transport.pubsub import Delivery

S = 1_000_000_000
SETTINGS = Settings()


class Bench:
    """A state with its clock."""

    def __init__(self, settings: Settings = SETTINGS, *, has_hub: bool = True) -> None:
        self.now = 10 * S
        self.state = DirectoryState(settings, has_hub=has_hub, now_ns=self.now)

    def pass_s(self, seconds: float) -> None:
        self.now += int(seconds * S)

    def due(self):
        return self.state.due(self.now)

    def look(self, **areas) -> list:
        """Do one look at everything, as the directory would."""
        return self.state.snapshot(Snapshot(**areas), self.now)

    def hint(self, kind: HintKind, incarnation: int = 1, *, delivery=Delivery.NEXT, text: str = "") -> list:
        return self.state.hint(Hint(kind, "actor", 0, incarnation, text), delivery, self.now)

    def looks_within(self, seconds: float) -> int:
        """Count looks at everything in the next seconds, each finding nothing new."""
        end, count = self.now + int(seconds * S), 0
        while (when := self.state.next_ns()) <= end:
            self.now = max(self.now, when)
            self.state.tick(self.now)
            if self.due().everything:
                count += 1
                self.look()
        self.now = end
        return count


@pytest.fixture
def bench():
    """A fresh state with a hub."""
    return Bench()


def worker(rank: int = 0, start: int = 0, incarnation: int | None = None) -> WorkerRecord:
    """Return the record of an actor."""
    number = incarnation if incarnation is not None else new_incarnation(start)
    return WorkerRecord(role="actor", rank=rank, start=start, incarnation=number)


def ended(record: WorkerRecord) -> ExitRecord:
    """Return the exit of a worker."""
    return ExitRecord(role=record.role, rank=record.rank, start=record.start, incarnation=record.incarnation)


# -- what is there


def test_the_first_look_is_due_at_once_and_shows_who_is_there(bench):
    """A late directory starts from the registry, not from hints."""
    assert bench.due().everything
    records = [worker(0, incarnation=1), worker(1, incarnation=2)]
    assert bench.look(workers=records) == [WorkerSeen(records[0]), WorkerSeen(records[1])]
    assert bench.state.view().ranks("actor") == {0: records[0], 1: records[1]}
    assert bench.state.view().complete


def test_each_incarnation_is_seen_once(bench):
    """The same record in many looks is one event."""
    record = worker()
    assert bench.look(workers=[record]) == [WorkerSeen(record)]
    assert bench.look(workers=[record]) == []


def test_an_end_is_seen_once_and_takes_the_worker_off_the_view(bench):
    """Exit records win over worker records, which stay in the registry for ever."""
    record = worker()
    bench.look(workers=[record])
    assert bench.look(workers=[record], exits=[ended(record)]) == [WorkerExited(ended(record))]
    assert bench.look(workers=[record], exits=[ended(record)]) == []
    assert bench.state.view().workers == {}
    assert bench.state.view().exits == {("actor", 0, record.incarnation): ended(record)}


def test_a_worker_found_with_its_end_is_never_called_alive(bench):
    """Dead before the first look: an end, no beginning."""
    record = worker()
    assert bench.look(workers=[record], exits=[ended(record)]) == [WorkerExited(ended(record))]


def test_a_restart_between_two_looks_is_seen_as_end_and_beginning(bench):
    """B24: nothing that happened between looks is lost, because every start has its own record."""
    first, second = worker(start=0), worker(start=1)
    bench.look(workers=[first])
    events = bench.look(workers=[first, second], exits=[ended(first)])
    assert events == [WorkerExited(ended(first)), WorkerSeen(second)]
    assert bench.state.view().workers == {WorkerName("actor", 0): second}


def test_a_newer_start_replaces_one_whose_end_nobody_saw(bench):
    """The older one is named, so that calls in flight to it can be judged."""
    first, second = worker(start=0), worker(start=1)
    bench.look(workers=[first])
    assert bench.look(workers=[first, second]) == [WorkerReplaced(first, second), WorkerSeen(second)]


def test_an_older_start_seen_late_does_not_come_back(bench):
    """Incarnations order by start."""
    first, second = worker(start=0), worker(start=1)
    bench.look(workers=[second])
    assert bench.look(workers=[first, second]) == []
    assert bench.state.view().workers == {WorkerName("actor", 0): second}


def test_a_record_missing_from_one_look_is_not_gone_yet(bench):
    """R6: one listing may lag; two running mean it was withdrawn, and it may come back."""
    record = worker()
    bench.look(workers=[record])
    assert bench.look() == []
    assert bench.look(workers=[record]) == []
    assert bench.look() == []
    assert bench.look() == [WorkerGone(record)]
    assert bench.look(workers=[record]) == [WorkerSeen(record)]


def test_agents_come_change_and_go(bench):
    """An agent is seen again when its record changes; gone after two looks without it."""
    one = AgentRecord(agent="a1", role="actor", ranks=[0])
    two = AgentRecord(agent="a1", role="actor", ranks=[0, 1])
    assert bench.look(agents=[one]) == [AgentSeen(one)]
    assert bench.look(agents=[two]) == [AgentSeen(two)]
    assert bench.look() == []
    assert bench.look() == [AgentGone(two)]


def test_only_a_higher_epoch_is_news(bench):
    """Epochs rise."""
    records = [EpochRecord(epoch=number, session=str(number)) for number in (1, 2)]
    assert bench.look(epoch=records[1]) == [EpochSeen(records[1])]
    assert bench.look(epoch=records[0]) == []
    assert bench.state.view().epoch == records[1]


# -- hints


def test_a_hint_leads_to_one_small_look_at_once(bench):
    """A join is read by its key, not by listing everything."""
    bench.due()
    bench.look()
    record = worker(incarnation=5)
    bench.hint(HintKind.JOIN, 5)
    assert bench.state.next_ns() <= bench.now
    due = bench.due()
    assert not due.everything
    assert [hint.incarnation for hint in due.looks] == [5]
    assert bench.state.found(due.looks[0], record) == [WorkerSeen(record)]
    bench.pass_s(1)
    assert bench.due().looks == ()


def test_a_hint_about_what_is_known_costs_nothing(bench):
    """Second announcements are free."""
    record = worker(incarnation=5)
    bench.due()
    bench.look(workers=[record])
    bench.hint(HintKind.JOIN, 5)
    assert bench.due().looks == ()


def test_a_record_that_is_not_visible_yet_is_looked_for_again_and_then_left_to_reconcile(bench):
    """No endless polling for a record that a stranger invented."""
    bench.due()
    bench.look()
    bench.hint(HintKind.JOIN, 5)
    tries = 0
    for _ in range(1_000):
        due = bench.due()
        tries += len(due.looks)
        for hint in due.looks:
            assert bench.state.found(hint, None) == []
        bench.pass_s(0.001)
    assert tries == 4


@pytest.mark.parametrize("kind", [HintKind.EXIT, HintKind.AGENT, HintKind.EPOCH])
def test_every_kind_of_record_is_found_by_its_hint(bench, kind):
    """Exits, agents and epochs too."""
    records = {
        HintKind.EXIT: (ended(worker(incarnation=5)), WorkerExited),
        HintKind.AGENT: (AgentRecord(agent="a1", role="actor"), AgentSeen),
        HintKind.EPOCH: (EpochRecord(epoch=5, session="s"), EpochSeen),
    }
    bench.due()
    bench.look()
    bench.hint(kind, 5, text="a1")
    record, event = records[kind]
    assert bench.state.found(bench.due().looks[0], record) == [event(record)]
    assert bench.due().looks == ()


def test_a_gap_leads_to_one_look_at_everything_at_once(bench):
    """Whatever was missed is in the registry; several gaps are one look."""
    bench.due()
    bench.look()
    bench.pass_s(0.5)
    for _ in range(5):
        bench.hint(HintKind.STATE, delivery=Delivery.GAP)
    assert bench.due().everything
    bench.look()
    assert not bench.due().everything
    assert bench.state.gaps == 5


def test_a_flood_of_gaps_does_not_become_a_flood_of_looks(bench):
    """Looks are spaced, and the more they cost the wider."""
    bench.due()
    bench.state.snapshot(Snapshot(), bench.now, cost_ns=S // 10)
    looks = 0
    for _ in range(1_000):
        bench.state.missed(bench.now)
        if bench.due().everything:
            looks += 1
            bench.state.snapshot(Snapshot(), bench.now, cost_ns=S // 10)
        bench.pass_s(0.001)
    assert looks <= 2


def test_a_second_copy_of_a_hint_is_ignored(bench):
    """Two connections to one hub do no harm."""
    assert bench.hint(HintKind.STATE, delivery=Delivery.OLD, text="x") == []
    assert bench.state.duplicates == 1


@pytest.mark.parametrize("kind", [HintKind.STATE, HintKind.LEAVE])
def test_what_stands_in_no_record_is_passed_on_unproved(bench, kind):
    """State and goodbye are hints about the worker itself."""
    assert bench.hint(kind, text="busy") == [WorkerHint(Hint(kind, "actor", 0, 1, "busy"))]


def test_hints_about_a_known_agent_lead_to_a_fresh_look(bench):
    """Withdrawn or changed: only the listing tells."""
    bench.due()
    bench.look(agents=[AgentRecord(agent="a1", role="actor")])
    bench.pass_s(1)
    bench.hint(HintKind.AGENT, text="a1")
    assert bench.due().everything


# -- the hint path


def test_the_echo_proves_the_path_and_leads_to_one_look(bench):
    """What was announced before the subscription worked is in the registry."""
    assert bench.due().probe
    bench.look()
    bench.pass_s(0.3)
    assert bench.state.echo(bench.now) == [HintPath(up=True)]
    assert bench.due().everything
    assert bench.state.view().hints_up is True
    assert bench.state.echo(bench.now) == []


def test_without_an_echo_for_two_seconds_the_path_is_down_and_files_are_read_faster(bench):
    """Never an error: slower knowledge, and said so."""
    bench.pass_s(1.9)
    assert bench.state.tick(bench.now) == []
    bench.pass_s(0.2)
    assert bench.state.tick(bench.now) == [HintPath(up=False)]
    assert bench.state.tick(bench.now) == []
    assert bench.looks_within(10) >= 15
    assert bench.state.echo(bench.now) == [HintPath(up=True)]
    assert bench.looks_within(6) <= 5


def test_probes_repeat_until_heard_and_then_rest(bench):
    """Ten a second until proved, one in five seconds afterwards, one a second while down."""

    def probes(seconds: float) -> int:
        count = 0
        for _ in range(int(seconds * 100)):
            count += bench.due().probe
            bench.pass_s(0.01)
        return count

    assert 8 <= probes(1) <= 11
    bench.state.echo(bench.now)
    assert probes(4.9) == 0
    assert probes(0.2) >= 1
    bench.pass_s(10)
    bench.state.tick(bench.now)
    assert probes(10) <= 12


def test_another_hub_has_to_prove_itself_again(bench):
    """After a takeover nothing is taken over."""
    bench.state.echo(bench.now)
    bench.state.moved(has_hub=True, now_ns=bench.now)
    assert bench.state.view().hints_up is None
    assert bench.due().probe


def test_without_a_hub_there_is_no_probe_and_no_complaint():
    """Polling only."""
    bench = Bench(has_hub=False)
    assert not bench.due().probe
    bench.pass_s(100)
    assert bench.state.tick(bench.now) == []
    assert bench.state.view().hints_up is None


# -- periods and trouble


def test_in_peace_the_registry_is_read_every_two_seconds(bench):
    """The reconcile finds what hints did not tell."""
    bench.state.echo(bench.now)
    bench.due()
    bench.look()
    bench.state.echo(bench.now)
    assert 3 <= bench.looks_within(6.5) <= 5


def test_during_a_launch_it_is_read_more_often(bench):
    """Ten times a second, until told that all are there."""
    bench.due()
    bench.look()
    bench.state.launching(active=True, now_ns=bench.now)
    assert bench.looks_within(2) >= 15
    bench.state.launching(active=False, now_ns=bench.now)
    assert bench.looks_within(2) <= 6


def test_a_registry_that_cannot_be_read_is_said_once_and_forgets_nobody(bench):
    """R8: trouble is a state with a reason, retried on time; recovery is said too."""
    record = worker()
    bench.due()
    bench.look(workers=[record])
    assert bench.state.failed("disk full") == [RegistryTrouble("disk full")]
    assert bench.state.failed("still") == []
    assert bench.state.view().trouble == "still"
    assert bench.state.view().workers == {WorkerName("actor", 0): record}
    bench.pass_s(3)
    assert bench.due().everything
    assert bench.look(workers=[record]) == [RegistryTrouble("")]


# -- leases


def lease(counter: int, holder: str = "a1", ttl_s: float = 3.0) -> dict[str, Lease]:
    """Return a look at one lease."""
    return {holder: Lease(holder=holder, counter=counter, ttl_s=ttl_s)}


def test_a_lease_is_late_then_expired_by_the_observers_clock(bench):
    """R4: only this clock, only while looking."""
    bench.look(leases=lease(1))
    events = []
    for _ in range(40):
        bench.pass_s(0.1)
        events += bench.state.leases(lease(1), bench.now)
    assert [type(event) for event in events] == [LeaseLate, LeaseExpired]
    assert 2.9 < events[1].silence_s < 3.2
    assert bench.state.view().leases == {"a1": LeaseState.EXPIRED}
    assert bench.state.leases(lease(2), bench.now) == [LeaseRenewed("a1")]


def test_a_renewed_lease_is_no_news(bench):
    """Counters that move keep a holder live without events."""
    for counter in range(50):
        bench.pass_s(1)
        assert bench.state.leases(lease(counter), bench.now) == []


def test_time_in_which_nobody_looked_expires_no_lease(bench):
    """A stopped observer looks again before it judges."""
    bench.look(leases=lease(1))
    bench.pass_s(3_600)
    assert not any(isinstance(event, LeaseExpired) for event in bench.state.leases(lease(1), bench.now))


def test_short_leases_are_looked_at_three_times_per_time_to_live(bench):
    """Leases are listed alone between looks at everything."""
    bench.due()
    bench.look(leases=lease(1, ttl_s=0.6))
    alone = 0
    for _ in range(100):
        bench.pass_s(0.01)
        due = bench.due()
        if due.leases:
            alone += 1
            bench.state.leases(lease(1, ttl_s=0.6), bench.now)
    assert 4 <= alone <= 5


def test_an_agent_that_left_in_good_order_leaves_no_expired_lease(bench):
    """Withdrawn records end the watch."""
    agent = AgentRecord(agent="a1", role="actor")
    bench.look(agents=[agent], leases=lease(1))
    bench.pass_s(0.5)
    bench.look()
    events = bench.look()
    assert AgentGone(agent) in events
    for _ in range(20):
        bench.pass_s(1)
        assert bench.state.leases({}, bench.now) == []


def test_no_duty_is_left_without_a_time(bench):
    """Lesson 11: in a quiet world everything comes due again within two periods, whatever happened before."""
    bench.due()
    bench.state.failed("x")
    bench.hint(HintKind.JOIN, 9)
    bench.state.echo(bench.now)
    assert bench.state.next_ns() <= bench.now + 2 * S
