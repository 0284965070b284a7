from __future__ import annotations

import gc
import os
import resource
import sys
from pathlib import Path

import pytest

from controller import Controller, Role
from waiting import scaled, wait_until
from zbus.config import load_config
from zbus.transport.profile import descriptors_needed, sockets_needed

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIG = {"trace": {"level": "off", "merge": False}}


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch):
    """Give the benchmark's simulated workers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from crowd import crowd

    yield crowd
    for name in ("crowd", "plain_engine", "rounds"):
        sys.modules.pop(name, None)


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("workers", [64, pytest.param(300, marks=pytest.mark.ci)])
def test_many_workers_join_one_controller_and_answer_in_order(crowd, short_dir, workers):
    """They join by registry and hints, all answer a broadcast in rank order, within what is granted for each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < descriptors_needed(workers):
        pytest.skip(f"the hard descriptor limit is {hard}")
    before = descriptors()
    roles = {"w": Role("plain_engine:Plain", replicas=workers)}
    config = load_config(data=CONFIG).config
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    with crowd(short_dir / "scale" / "t", "w", workers, str(short_dir), env):
        options = {"trial": "t", "root": short_dir, "scheduler": "external", "startup_timeout": scaled(120)}
        with Controller.launch("scale", roles, config=config, **options) as bus:
            group = bus.group("w")
            assert [rank.echo(rank_number) for rank_number, rank in enumerate(group)] == list(range(workers))
            for value in range(3):
                assert group.echo(value) == [value] * workers
            assert descriptors() - before <= descriptors_needed(workers)
            sockets = bus._session.client.factory.open_sockets
            assert sum(sockets.values()) + sockets["monitor"] <= sockets_needed(workers)
    gc.collect()
    wait_until(lambda: descriptors() <= before + 4, what="the descriptors of all connections to be freed")


def test_a_burst_of_ranks_moves_only_its_own_places(monkeypatch):
    """Each event of a rank touches its place in the roster, not every place: a thousand that join cost no million."""
    from controller import members
    from zbus.registry.records import JobRecord

    job = JobRecord(role="w", engine="plain_engine:Plain", world_size=500, epoch=1)
    role = members.RoleMembers(job, ((), {}), {}.get)
    looked: list[int] = []
    current = role._current
    monkeypatch.setattr(role, "_current", lambda member: looked.append(member.name.rank) or current(member))
    whole = role.peers()
    for rank in (3, 499, 3):
        role.members[rank].to(members.Phase.CREATING)
        role.refresh()
    assert looked == [3, 499, 3]
    assert role.peers() is not whole, "who holds a list keeps it as it was"
    assert [peer.name.rank for peer in role.peers()] == list(range(500))
    role.members[7].to(members.Phase.READY)
    role.members[8].error = ValueError("no")
    role.members[8].to(members.Phase.FAILED)
    role.refresh()
    assert (role.ready, role.failed) == (1, [role.members[8]])
    assert role.differing(role.members[7], "a") is None
    assert role.differing(role.members[9], "b") is role.members[7]
    assert role.differing(role.members[9], "a") is None
