from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zbus.errors import ConfigError, RegistryError
from zbus.ids import new_incarnation
from zbus.registry import FileRegistry, JunkRecord, MemoryRegistry, Records
from zbus.registry.base import MAX_VALUE_BYTES, split_key
from zbus.registry.records import (
    AgentRecord,
    EpochRecord,
    ExitRecord,
    JobRecord,
    Lease,
    RankClaim,
    WorkerRecord,
)


@pytest.fixture(params=["memory", "file"])
def records(request, tmp_path):
    """A typed view over each back end."""
    return Records(MemoryRegistry() if request.param == "memory" else FileRegistry(tmp_path / "registry"))


def worker(rank=0, start=0, role="actor", **fields):
    """Return a worker record with a fresh incarnation."""
    return WorkerRecord(role=role, rank=rank, start=start, incarnation=new_incarnation(start), **fields)


def test_every_kind_of_record_is_returned_as_written(records):
    """B27: equal, and of the same types, through the store."""
    job = JobRecord(role="actor", engine="m:C", world_size=4, mesh={"dp": 2, "tp": 2}, env={"A": " b,c=\n"}, cwd="/a b")
    agent = AgentRecord(agent="actor.h.1", role="actor", ctl=["ipc:///tmp/x"], ranks=[0, 1], pid_start=2**40)
    claim = RankClaim(role="actor", rank=0, start=0, agent="actor.h.1", host="h", pid=7)
    ended = ExitRecord(role="actor", rank=0, incarnation=2**64 - 1, signal=9, oom=True, log_tail=["a", "", " é\0"])
    lease = Lease(holder="actor.h.1", counter=3, ttl_s=2.5)
    records.publish_job(job)
    records.publish_agent(agent)
    assert records.claim_rank(claim) == claim
    assert records.publish_exit(ended) == ended
    records.renew_lease(lease)
    assert records.job("actor") == job
    assert records.jobs() == [job]
    assert records.agent("actor.h.1") == agent
    assert records.agents() == records.agents("actor") == [agent]
    assert records.rank_claims() == [claim]
    assert records.exit("actor", 0, 2**64 - 1) == ended
    assert records.exits("actor") == [ended]
    assert records.lease("actor.h.1") == lease
    assert records.leases() == {"actor.h.1": lease}
    assert type(records.leases()["actor.h.1"].ttl_s) is float
    assert records.junk == ()


def test_what_is_not_there_is_none_or_empty(records):
    """Absence is an answer, not an error."""
    assert records.current_epoch() is None
    assert records.job("actor") is None
    assert records.agent("a") is None
    assert records.lease("a") is None
    assert records.worker("actor", 0, 1) is None
    assert records.exit("actor", 0, 1) is None
    assert records.workers() == records.exits() == records.agents() == records.jobs() == records.rank_claims() == []
    assert records.leases() == {}


def test_listings_can_be_of_one_role_and_come_in_order(records):
    """By role, rank (as numbers) and start; a role is not a prefix."""
    made = [worker(rank, role=role) for role in ("actor", "actor2") for rank in (10, 2, 0)]
    made.append(worker(2, start=1))
    for record in made:
        records.publish_worker(record)
    assert [(r.rank, r.start) for r in records.workers("actor")] == [(0, 0), (2, 0), (2, 1), (10, 0)]
    assert len(records.workers()) == 7
    assert [r.rank for r in records.workers("actor2")] == [0, 2, 10]


def test_a_restart_between_two_looks_is_seen(records):
    """B24: delete and re-add under one name is a new incarnation, so no poll can miss it."""
    first, second = worker(), worker(start=1)
    records.publish_worker(first)
    before = {r.incarnation for r in records.workers()}
    assert records.withdraw_worker(first)
    records.publish_worker(second)
    after = {r.incarnation for r in records.workers()}
    assert after - before == {second.incarnation}
    assert before - after == {first.incarnation}


def test_a_leaving_owner_never_removes_its_successors_record(records):
    """B19: withdraw and release remove exactly what the caller wrote."""
    old = AgentRecord(agent="actor.h", role="actor", pid=1)
    new = AgentRecord(agent="actor.h", role="actor", pid=2)
    records.publish_agent(old)
    records.publish_agent(new)
    assert not records.withdraw_agent(old)
    assert records.agents() == [new]
    assert records.withdraw_agent(new)
    records.renew_lease(Lease(holder="h", counter=1, ttl_s=1.0))
    records.renew_lease(Lease(holder="h", counter=2, ttl_s=1.0))
    assert not records.release_lease(Lease(holder="h", counter=1, ttl_s=1.0))
    assert records.release_lease(Lease(holder="h", counter=2, ttl_s=1.0))
    assert records.leases() == {}


def test_the_second_agent_on_a_rank_is_told_who_holds_it(records):
    """Row 48: one wins, the other gets the winner's name, host and pid."""
    first = RankClaim(role="actor", rank=0, start=0, agent="a", host="h1", pid=1)
    second = RankClaim(role="actor", rank=0, start=0, agent="b", host="h2", pid=2)
    assert records.claim_rank(first) == first
    assert records.claim_rank(second) == first
    assert records.claim_rank(first) == first


def test_an_exit_is_written_once(records):
    """The first word on how an incarnation ended stands."""
    seen = ExitRecord(role="actor", rank=0, incarnation=1, exit_code=7)
    guess = ExitRecord(role="actor", rank=0, incarnation=1, reason="lease expired")
    assert records.publish_exit(seen) == seen
    assert records.publish_exit(guess) == seen


def test_a_long_log_tail_is_cut_from_its_old_end(records):
    """An exit is always recorded: the newest lines matter most."""
    lines = [f"{number} " + "x" * 1000 for number in range(500)]
    stands = records.publish_exit(ExitRecord(role="actor", rank=0, incarnation=1, log_tail=lines))
    assert 30 < len(stands.log_tail) < 70
    assert stands.log_tail == lines[-len(stands.log_tail) :]
    one = ExitRecord(role="actor", rank=1, incarnation=1, exit_code=7, log_tail=["y" * (MAX_VALUE_BYTES + 1)])
    assert records.publish_exit(one).exit_code == 7


def test_epochs_rise_and_the_highest_is_current(records):
    """R3: by number, not by text; the session says whose it is."""
    for number in range(1, 12):
        claimed = records.claim_epoch(EpochRecord(session=f"{number:032x}", epoch=99))
        assert claimed.epoch == number
        assert records.current_epoch() == claimed
    assert [record.epoch for record in records.epochs()] == list(range(1, 12))


def test_a_number_taken_by_junk_is_passed_over(tmp_path):
    """R3, R7: whatever lies at the next number, the epoch after it is higher."""
    records = Records(FileRegistry(tmp_path / "registry"))
    records.claim_epoch(EpochRecord(session="a"))
    (tmp_path / "registry" / "epochs" / "epoch.2").write_text("junk")
    (tmp_path / "registry" / "epochs" / "epoch.x").write_text("junk")
    assert records.claim_epoch(EpochRecord(session="b")).epoch == 3
    assert records.current_epoch().session == "b"
    assert any("epoch.2" in line for line in records.junk)


def test_undecodable_and_misplaced_records_are_named_not_raised(records):
    """R7: one bad record never hides the others; a single read of it says what is wrong."""
    good = worker()
    records.publish_worker(good)
    registry = records.registry
    registry.put("workers/not-json", b"\xff")
    registry.put("workers/wrong-type", msgspec.json.encode({"role": "actor", "rank": "0", "incarnation": 1}))
    registry.put("workers/actor.5.5", b"{}")
    registry.put("workers/copy-of-a-record", msgspec.json.encode(good))
    registry.put("workers/bad-role", msgspec.json.encode({"role": "../x", "rank": 0, "incarnation": 1}))
    assert records.workers() == [good]
    named = {line.partition(":")[0] for line in records.junk}
    assert named == {
        "workers/not-json",
        "workers/wrong-type",
        "workers/actor.5.5",
        "workers/copy-of-a-record",
        "workers/bad-role",
    }
    with pytest.raises(JunkRecord, match=r"workers/actor\.5\.5 is not a valid WorkerRecord"):
        records.worker("actor", 5, 5)


def test_fields_of_a_later_version_are_ignored(records):
    """A newer writer may add fields."""
    record = worker()
    value = msgspec.json.decode(msgspec.json.encode(record))
    value["added_later"] = {"x": [1]}
    records.registry.put(f"workers/actor.0.{record.incarnation}", msgspec.json.encode(value))
    assert records.workers() == [record]


def test_a_role_that_is_no_name_is_refused_at_the_door(records):
    """B22: the typed view builds keys from validated names only."""
    with pytest.raises(ConfigError):
        records.publish_worker(worker(role="../../x"))
    with pytest.raises(ConfigError):
        records.job("a/b")


def test_a_closed_view_refuses(records):
    """Closing the view closes the registry below."""
    records.close()
    with pytest.raises(RegistryError, match="closed"):
        records.workers()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        ExitRecord,
        role=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
        rank=st.integers(0, 2**31),
        incarnation=st.integers(0, 2**64 - 1),
        exit_code=st.none() | st.integers(-255, 255),
        reason=st.text(),
        log_tail=st.lists(st.text(), max_size=5),
        started_wall_ns=st.integers(-(2**63), 2**63 - 1),
    )
)
def test_any_record_round_trips_exactly(record):
    """B27: whatever text and numbers a record holds."""
    records = Records(MemoryRegistry())
    assert records.publish_exit(record) == record
    assert records.exits() == [record]


@pytest.mark.parametrize("key", ["workers/a", "a/b.c_d-e", "meta/root-id"])
def test_a_key_is_an_area_and_a_name(key):
    """Exactly one slash."""
    assert "/".join(split_key(key)) == key
