from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller import Role
from controller.rollout import RolloutController, RolloutTimeout
from controller.rollouts.ranks import RankLost
from controller.rollouts.results import Outcome
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus.config import Config, TraceConfig
from zbus.errors import NotExecuted
from zbus.rl import Sampling

pytestmark = pytest.mark.alone


@contextmanager
def rollouts(root: Path, replicas: int = 2, *, restart: str = "never", config: Config | None = None, **options):
    """Launch a rollout role and give a controller of it."""
    role = Role("rollout_engine:Speller", replicas=replicas, restart=restart, sys_path=[str(HERE)])
    with launch(root, {"rollout": role}, config=config) as bus, RolloutController(bus, **options) as rollout:
        yield bus, rollout


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One trial for the tests that leave its ranks as they are."""
    role = Role("rollout_engine:Speller", replicas=2, sys_path=[str(HERE)])
    with launch(tmp_path_factory.mktemp("shared"), {"rollout": role}) as bus:
        yield bus


def began(path: Path) -> list[tuple[int, int]]:
    """Return rank and pid of each beginning that an engine wrote down."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(rank), int(pid)) for rank, pid in map(str.split, lines)]


def kill(pid: int) -> None:
    """SIGKILL a rank."""
    os.kill(pid, signal.SIGKILL)


def test_episodes_of_a_killed_rank_are_run_by_another(tmp_path):
    """SIGKILL in the middle of episodes: they run again elsewhere; each comes out once, none is lost or rejected."""
    notes, gate = tmp_path / "began", tmp_path / "go"
    data = [{"item": item, "began": str(notes), "until": str(gate)} for item in range(8)]
    with rollouts(tmp_path, batch_size=8) as (_, rollout):
        numbers = [rollout.submit(one, "spell") for one in data]
        wait_until(lambda: len(began(notes)) == 8, what="the start of all episodes")
        victims = [pid for rank, pid in began(notes) if rank == 1]
        assert len(victims) == 4
        kill(victims[0])
        wait_until(lambda: len(began(notes)) == 12, what="the second start of four episodes")
        gate.touch()
        results = rollout.wait(8, timeout=scaled(20))
        assert [one.task for one in results] == numbers
        assert Counter(one.data["item"] for one in results) == Counter(range(8))
        assert {(one.outcome, one.value["rank"]) for one in results} == {(Outcome.ACCEPTED, 0)}
        assert sorted(one.attempts for one in results) == [1] * 4 + [2] * 4
        rollout.submit({"until": "/nowhere"}, "spell")
        with pytest.raises(RolloutTimeout):
            rollout.wait(1, timeout=0.05)


def test_generations_of_a_workflow_here_move_too(tmp_path):
    """A workflow at the controller does not notice that a rank was killed under one of its generations."""

    class Acts:
        async def run_episode(self, engine, data):
            rank = await engine.once({"item": data}) if data == "once" else None
            done = await engine.generate([1], Sampling(max_tokens=2000))
            return len(done.ids), rank

    with rollouts(tmp_path, replicas=2) as (bus, rollout):
        pids = bus.group("rollout").be_sick(sick=False)
        for item in range(6):
            rollout.submit(item, Acts())
        wait_until(lambda: bus.group("rollout").state() and True, what="the ranks")
        kill(pids[1])
        results = rollout.wait(6, timeout=scaled(30))
        assert [one.value for one in results] == [(2000, None)] * 6


def test_a_call_that_may_run_once_only_is_not_run_again(tmp_path):
    """An endpoint that is not pure: its rank's death is the outcome, and the other rank never runs it."""
    notes = tmp_path / "began"

    class Once:
        async def run_episode(self, engine, data):
            return await engine.once({"began": str(notes), "until": str(tmp_path / "never")})

    with rollouts(tmp_path, replicas=2) as (_, rollout):
        rollout.submit(1, Once())
        ((_, pid),) = wait_until(lambda: began(notes), what="the start")
        kill(pid)
        (one,) = rollout.wait(1, timeout=scaled(20))
        assert (one.outcome, type(one.error).__name__) == (Outcome.FAILED, "WorkerLost")
        assert len(began(notes)) == 1


def test_when_no_rank_is_left_rollouts_are_lost(tmp_path):
    """The last rank is killed: LOST, with how it ended; nothing hangs."""
    notes = tmp_path / "began"
    with rollouts(tmp_path, replicas=1) as (_, rollout):
        for _ in range(2):
            rollout.submit({"began": str(notes), "until": str(tmp_path / "never")}, "spell")
        (_, pid), _ = wait_until(lambda: len(began(notes)) == 2 and began(notes), what="both starts")
        kill(pid)
        for one in rollout.wait(2, timeout=scaled(20)):
            assert one.outcome is Outcome.LOST
            assert "no rank is left: rank 0 is gone" in str(one.error)
            assert "SIGKILL" in f"{one.error}{one.error.__cause__}"


def test_a_restarted_rank_gets_no_work_until_it_is_refreshed(tmp_path):
    """It comes back by policy without the weights of the others: STALE, until somebody gives them to it."""
    with rollouts(tmp_path, replicas=2, restart="one") as (bus, rollout):
        group = bus.group("rollout")
        assert rollout.set_version(3) == {}
        kill(group.be_sick(sick=False)[1])
        wait_until(rollout.stale, timeout_s=30, what="the restart of rank 1")
        wait_until(lambda: group.ready, timeout_s=30, what="rank 1")
        assert rollout.stale() == {1: "it was restarted and has no weights since"}
        results = rollout.rollout_batch(range(10), "spell", timeout=scaled(20))
        assert {(one.value["rank"], one.oldest) for one in results} == {(0, 3)}
        assert rollout.set_version(4) == {1: "rank 1 is STALE: it was restarted and has no weights since"}
        group[1].set_version(4)
        rollout.mark_current(1, 4, bus.group("rollout").roster.peers()[1].incarnation)
        results = rollout.rollout_batch(range(10), "spell", timeout=scaled(20))
        assert {(one.value["rank"], one.oldest) for one in results} == {(0, 4), (1, 4)}


def test_a_rank_killed_during_set_version_is_left_behind(tmp_path):
    """The version counts for the others; the dead one is named and STALE."""
    with rollouts(tmp_path, replicas=3) as (bus, rollout):
        pids = bus.group("rollout").be_sick(sick=False)
        os.kill(pids[2], signal.SIGSTOP)
        try:
            behind = rollout.set_version(1, timeout=0.5)
        finally:
            kill(pids[2])
        assert list(behind) == [2]
        assert "CallTimeout" in behind[2]
        assert rollout.get_version() == 1
        results = rollout.rollout_batch(range(9), "spell", timeout=scaled(20))
        assert {(one.value["rank"], one.oldest) for one in results} == {(0, 1), (1, 1)}


def test_asynchronous_batches_stay_within_staleness(shared):
    """A loop of prepare_batch and set_version: every batch full, every item once, no result older than allowed."""
    with RolloutController(shared, batch_size=4, max_staleness=2, max_concurrent=8) as rollout:
        data, seen = list(range(1000)), []
        for version in range(20):
            batch = rollout.prepare_batch(data, "spell", timeout=scaled(20))
            assert all(0 <= version - one.oldest <= 2 for one in batch)
            seen += [one.data for one in batch]
            assert rollout.set_version(version + 1) == {}
        stats = rollout.export_stats()
        assert stats["rollout/stale"] == stats["rollout/failed"] == 0
        assert len(set(seen)) == len(seen) == 80
        assert max(seen) < 80 + (2 + 2) * 4
        assert stats["episodes"] >= 80
        assert stats["rollout/accepted"] >= 80, "counted a moment after the ranks were asked: may be more than episodes"


def test_a_pause_of_generation_freezes_answers_between_two_tokens(shared):
    """Requests that run are kept, given a new version, and go on: both versions are in one answer."""

    class Slow:
        async def run_episode(self, engine, data):
            return await engine.generate([1], Sampling(max_tokens=20_000))

    with RolloutController(shared) as rollout:
        rollout.set_version(100)
        for item in range(4):
            rollout.submit(item, Slow())
        wait_until(lambda: "4 running" in rollout._driver.standing("submit"), what="the start")
        with rollout.generation_paused() as running:
            assert sum(running.values()) <= 4
            rollout.set_version(101)
        results = rollout.wait(4, timeout=scaled(60))
        assert {(len(one.value.ids), one.newest) for one in results} == {(20_000, 101)}
        assert all(one.oldest in {100, 101} for one in results)


def test_a_guest_loop_and_threads_share_one_controller(shared):
    """Coroutines of another loop and blocking threads submit and wait at once; nothing is handed out twice."""
    with RolloutController(shared, max_concurrent=8) as rollout:

        async def story() -> list[int]:
            await asyncio.gather(*(rollout.aio.submit(item, "spell") for item in range(40)))
            waits = [rollout.aio.wait(4) for _ in range(5)]
            waits += [asyncio.to_thread(rollout.wait, 4, scaled(30)) for _ in range(5)]
            return [one.data for part in await asyncio.gather(*waits) for one in part]

        assert sorted(asyncio.run(story())) == list(range(40))


def test_rollouts_are_tasks_of_the_trace(tmp_path):
    """Each is a task with a session, its phases and how it ended."""

    class Phases:
        async def run_episode(self, engine, data):
            await engine.generate([1], Sampling(max_tokens=2))
            await engine.generate([1], Sampling(max_tokens=2))
            return None if data else 1

    config = Config(trace=TraceConfig(level="full"))
    with rollouts(tmp_path, replicas=1, config=config) as (bus, rollout):
        rollout.rollout_batch([0, 1], Phases())
        rollout.rollout_batch([2], "fail", errors="return")
        rollout.save_perf_tracer(force=True)
        root = bus.trial.traces
    files = [path for path in root.rglob("sessions_*.jsonl") if path.parent.name == "controller"]
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    sessions = [one for one in records if "status" in one]
    assert [one["status"] for one in sessions] == ["accepted", "rejected", "failed"]
    assert [len(one["phases"]["generate"]) for one in sessions[:2]] == [2, 2]
    assert "ValueError" in sessions[2]["reason"]
    assert len({one["task_id"] for one in sessions}) == 3


def test_a_closed_trial_ends_every_rollout(tmp_path):
    """The trial is closed before its rollouts have ended: none is accepted, who waits is told, nothing hangs."""
    with rollouts(tmp_path, replicas=1, max_concurrent=2) as (bus, rollout):
        for _ in range(4):
            rollout.submit({"until": "/nowhere"}, "spell")
        wait_until(lambda: "2 running" in rollout._driver.standing("submit"), what="the start")
        bus.close()
        ended = rollout.wait(4, timeout=scaled(20))
        # An episode that its rank ends with itself may be answered as failed there, just before the rank is lost.
        assert Outcome.LOST in {one.outcome for one in ended} <= {Outcome.LOST, Outcome.FAILED}, ended
        with pytest.raises(RankLost, match="closed"):  # a rollout that had chosen its rank just before
            asyncio.run(rollout._driver._ranks.call(0, "once", ("x",), {}))
        with pytest.raises(NotExecuted, match="no rank of rollout acknowledged version 1"):
            rollout.set_version(1, timeout=1.0)
