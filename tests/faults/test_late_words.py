"""News of those who are gone, or never were: it neither brings anybody back nor breaks anything."""

from __future__ import annotations

import os
import random
import signal

import pytest
from msgspec.structs import replace

import zbus
from controller import Controller, Role
from launching import launch
from run_kit import DRIVERS
from waiting import scaled, wait_until
from zbus.discovery.state import (
    DirectoryState,
    Event,
    LeaseExpired,
    LeaseRenewed,
    Settings,
    Snapshot,
    WorkerExited,
    WorkerReplaced,
    WorkerSeen,
)
from zbus.ids import WorkerName, new_incarnation
from zbus.registry.records import AgentRecord, ExitRecord, Lease, WorkerRecord
from zbus.transport.client import PeerState

pytestmark = pytest.mark.alone


def stand(bus: Controller) -> list[tuple[str, int, str]]:
    """Return who is there: name, incarnation and state of each rank."""
    return [(str(peer.name), peer.incarnation, peer.state.name) for peer in bus._session.rosters["actor"].peers()]


def news(record: WorkerRecord, gone: WorkerRecord, ended: ExitRecord) -> list[Event]:
    """Return every kind of event about a rank that ended, a rank that is not of this trial, and a foreign agent."""
    stranger = replace(record, rank=99, incarnation=new_incarnation(0))
    other_role = replace(record, role="critic", incarnation=new_incarnation(0))
    ancient = replace(record, incarnation=1)
    return [
        WorkerSeen(gone), WorkerSeen(stranger), WorkerSeen(other_role), WorkerSeen(ancient),
        WorkerReplaced(gone, ancient), WorkerReplaced(stranger, ancient), WorkerReplaced(ancient, gone),
        WorkerExited(ended), WorkerExited(replace(ended, rank=99)), WorkerExited(replace(ended, role="critic")),
        WorkerExited(replace(ended, incarnation=1)),
        LeaseExpired("actor.gone.0000", 9.0), LeaseRenewed("actor.gone.0000"), LeaseExpired("controller.1", 9.0),
        LeaseRenewed("actor.never.0000"), LeaseExpired(record.agent, 9.0), LeaseRenewed(record.agent),
    ]  # fmt: skip


def test_late_news_of_the_gone_makes_no_ghost(tmp_path):
    """Report 16: a heartbeat after the farewell made a ghost, and later a crash. Here the restarted rank stays."""
    role = Role(f"{DRIVERS}/network_engines.py:Counting", args=[str(tmp_path / "effects")], replicas=2, restart="one")
    with launch(tmp_path, {"actor": role}) as bus:
        actor = bus.group("actor")
        members = bus._session.members
        assert members is not None
        gone = members.roles["actor"].members[0].record
        old_peer = members.roles["actor"].members[0].peer
        assert gone is not None
        assert old_peer is not None
        os.kill(gone.pid, signal.SIGKILL)
        assert actor[0].who.options(retries=5, deadline=scaled(30))()["start"] == 1
        record = members.roles["actor"].members[0].record
        ended = members._exits[gone.incarnation]
        assert record is not None
        before = stand(bus)
        assert {state for _, _, state in before} == {"READY"}
        for seed in range(20):
            told = news(record, gone, ended)
            random.Random(seed).shuffle(told)
            for event in told:
                members.on_event(event)
            for state in PeerState:
                members.on_state(old_peer, state)
            assert actor.add(f"round{seed}") == [seed + 1, seed + 1]
        wait_until(members._inbox.empty, what="all news to be taken")
        assert stand(bus) == before
        assert actor.who()[0]["start"] == 1
        assert set(bus.statuses(scaled(5))) == {WorkerName("actor", 0), WorkerName("actor", 1)}


def test_an_agent_that_never_beats_is_judged_like_any_other():
    """One that wrote its lease once, or never, is silent from the first look on: its ranks are given up in time."""
    agent = AgentRecord(agent="actor.mute.0", role="actor", host="elsewhere", pid=7, pid_start=1)
    for leases in ({"actor.mute.0": Lease(holder="actor.mute.0", counter=1, ttl_s=2.0)}, {}):
        state = DirectoryState(Settings(), has_hub=False, now_ns=0)
        events: list[Event] = []
        now = 0
        while not any(isinstance(event, LeaseExpired) for event in events) and now < 60_000_000_000:
            now += 500_000_000
            events += state.snapshot(Snapshot(agents=[agent], leases=leases), now)
        expired = [event for event in events if isinstance(event, LeaseExpired)]
        assert [event.holder for event in expired] == ["actor.mute.0"]
        assert now <= 12_000_000_000


def test_calls_to_a_rank_that_was_lost_say_so_at_once(tmp_path):
    """After the verdict nothing waits for the silent: a call is refused with the evidence."""
    role = Role(f"{DRIVERS}/network_engines.py:Counting", args=[str(tmp_path / "effects")])
    with launch(tmp_path, {"actor": role}) as bus:
        members, client = bus._session.members, bus._session.client
        assert members is not None
        assert client is not None
        member = members.roles["actor"].members[0]
        assert member.record is not None
        assert member.peer is not None
        client.declare_dead(member.peer, reason="lease", evidence="its agent was silent for 9.0 s")
        with pytest.raises(zbus.Unavailable) as caught:
            bus.group("actor")[0].who()
        assert caught.value.outcome == "NOT_EXECUTED"
        assert "its agent was silent for 9.0 s" in str(caught.value.facts)
