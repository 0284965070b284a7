from __future__ import annotations

import os
import threading
import time

import pytest

from waiting import scaled
from workers.background import Background
from workers.claims import Claimant, claim_ranks, claim_start
from zbus.errors import RankClaimed, RegistryError
from zbus.registry.identity import pid_space
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import AgentRecord, Lease, Records
from zbus.registry.watch import lease_moves
from zbus.runtime.processes import start_time
from zbus.testing import FakeClock


@pytest.fixture
def records() -> Records:
    """Give an empty registry."""
    return Records(MemoryRegistry())


def _agent(records: Records, name: str, *, alive: bool = True, here: bool = True) -> Claimant:
    pid = os.getpid()
    started = (start_time(pid) or 0) + (0 if alive else 1)
    space = pid_space() if here else "elsewhere"
    records.publish_agent(AgentRecord(agent=name, role="actor", host="h", pid_space=space, pid=pid, pid_start=started))
    return Claimant(name, "actor", "h", pid)


def test_starts_of_a_rank_count_up(records: Records) -> None:
    """Each start of the same agent has the next number."""
    me = _agent(records, "a")
    assert [claim_start(records, me, 0) for _ in range(3)] == [0, 1, 2]
    assert claim_start(records, me, 1) == 0


def test_a_living_holder_keeps_its_rank(records: Records) -> None:
    """The refusal names both agents."""
    claim_start(records, _agent(records, "first"), 0)
    with pytest.raises(RankClaimed) as caught:
        claim_start(records, _agent(records, "second"), 0)
    assert "agent first" in caught.value.facts["held by"]
    assert "agent second" in caught.value.facts["claimed by"]


def test_a_dead_holder_loses_its_rank(records: Records) -> None:
    """A process that is gone, or one that took its record back, binds nobody; numbers go on."""
    claim_start(records, _agent(records, "dead", alive=False), 0)
    assert claim_start(records, _agent(records, "b"), 0) == 1
    claim_start(records, Claimant("never-published", "actor", "h", 1), 5)
    assert claim_start(records, _agent(records, "b"), 5) == 1


def test_a_holder_elsewhere_is_judged_by_its_lease(records: Records) -> None:
    """A counter that moves holds the rank, one that stands still for its time does not."""
    claim_start(records, _agent(records, "far", here=False), 0)
    records.renew_lease(Lease(holder="far", counter=1, ttl_s=0.3))
    me = _agent(records, "me")
    assert claim_start(records, me, 0) == 1
    claim_start(records, _agent(records, "far2", here=False), 1)
    stop = threading.Event()

    def renew() -> None:
        counter = 0
        while not stop.wait(0.02):
            counter += 1
            records.renew_lease(Lease(holder="far2", counter=counter, ttl_s=5.0))

    records.renew_lease(Lease(holder="far2", counter=0, ttl_s=5.0))
    thread = threading.Thread(target=renew)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RankClaimed):
        claim_start(records, me, 1)
    assert time.monotonic() - began < 5
    stop.set()
    thread.join()


def test_free_ranks_are_taken_lowest_first(records: Records) -> None:
    """Without given ranks an agent takes what nobody holds, and says so when too few are left."""
    first, second, third = (_agent(records, name) for name in ("a", "b", "c"))
    assert claim_ranks(records, first, ranks=[1], world_size=4, count=1) == {1: 0}
    assert claim_ranks(records, second, ranks=None, world_size=4, count=2) == {0: 0, 2: 0}
    with pytest.raises(RankClaimed, match="no room for 2 more"):
        claim_ranks(records, third, ranks=None, world_size=4, count=2)


def test_racing_agents_share_no_rank(records: Records) -> None:
    """Many agents at once: each rank has one holder."""
    agents = [_agent(records, f"a{n}") for n in range(8)]
    won: list[int] = []

    def run(me: Claimant) -> None:
        won.extend(claim_ranks(records, me, ranks=None, world_size=8, count=1))

    threads = [threading.Thread(target=run, args=(me,)) for me in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(8))


def test_background_jobs_run_in_order_and_all_before_the_end() -> None:
    """Jobs run one by one as submitted; stop waits for what was submitted before it."""
    crashes: list[BaseException] = []
    background = Background(crashes.append)
    seen: list[int] = []
    for number in range(100):
        background.submit(lambda number=number: seen.append(number))
    background.start()
    assert background.stop(5)
    assert seen == list(range(100))
    assert crashes == []


def test_a_background_job_that_meets_a_full_disk_is_tried_again(monkeypatch) -> None:
    """A registry error is retried and reported once; anything else is handed to the agent."""
    monkeypatch.setattr("workers.background._RETRY_S", 0.01)
    crashes: list[BaseException] = []
    background = Background(crashes.append)
    background.start()
    tries: list[int] = []
    done = threading.Event()

    def write() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise RegistryError("disk full")
        done.set()

    background.submit(write)
    assert done.wait(scaled(5))
    background.submit(lambda: 1 / 0)
    assert background.stop(5)
    assert [type(error) for error in crashes] == [ZeroDivisionError]


def test_a_repeated_background_job_ends_when_it_says_so() -> None:
    """`every` calls again after the returned pause, and not after None."""
    background = Background(lambda _error: None)
    background.start()
    calls: list[int] = []
    over = threading.Event()

    def job() -> float | None:
        calls.append(1)
        if len(calls) == 3:
            over.set()
            return None
        return 0.001

    background.every(job)
    assert over.wait(scaled(5))
    assert background.stop(5)
    assert len(calls) == 3


def test_a_holder_is_not_judged_by_time_in_which_nobody_looked(records: Records) -> None:
    """Row 58: both processes were suspended for ten minutes; the holder goes on renewing, and keeps its rank."""
    claim_start(records, _agent(records, "far", here=False), 0)
    records.renew_lease(Lease(holder="far", counter=1, ttl_s=5.0))
    clock = FakeClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(600.0 if len(slept) == 1 else seconds)
        if len(slept) == 3:
            records.renew_lease(Lease(holder="far", counter=2, ttl_s=5.0))

    assert lease_moves(records, "far", clock=clock, sleep=sleep)
    assert len(slept) == 3


def test_a_holder_whose_lease_goes_away_has_left(records: Records) -> None:
    """No lease, or one that is taken back while it is watched, binds nobody."""
    assert not lease_moves(records, "nobody")
    lease = Lease(holder="far", counter=1, ttl_s=5.0)
    records.renew_lease(lease)

    def take_back(_seconds: float) -> None:
        assert records.release_lease(lease)

    assert not lease_moves(records, "far", sleep=take_back)


def test_all_ranks_of_an_agent_are_claimed_by_one_look(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims that stand are read once, however many ranks there are; a restart reads none of other ranks."""
    me, other = _agent(records, "me"), _agent(records, "dead", alive=False)
    claim_start(records, other, 3)
    looks: list[object] = []
    listed = records.rank_claims
    monkeypatch.setattr(records, "rank_claims", lambda role=None: looks.append(role) or listed(role))
    found = claim_ranks(records, me, ranks=range(40), world_size=40, count=40)
    assert found == {rank: int(rank == 3) for rank in range(40)}
    assert looks == ["actor"]
    assert claim_start(records, me, 3, after=1) == 2
    assert looks == ["actor"]


def test_a_restart_meets_whoever_has_claimed_the_rank_meanwhile(records: Records) -> None:
    """What an agent knows of its rank may be old: a living successor is not run over, a dead one is passed."""
    me = _agent(records, "me")
    assert claim_start(records, me, 0) == 0
    claim_start(records, _agent(records, "dead", alive=False), 0, after=0)
    assert claim_start(records, me, 0, after=0) == 2
    claim_start(records, _agent(records, "living"), 0, after=2)
    with pytest.raises(RankClaimed, match="already run by another agent"):
        claim_start(records, me, 0, after=2)
