"""Faults of shared memory under real runs: too little of it, results nobody takes, ranks killed at random, two jobs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import zbus
from array_engine import digest
from controller import Role
from controller.collect import equal
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus.config import Config
from zbus.config.schema import DataConfig
from zbus.data.presence import VARIABLE

MIB = 1 << 20


@pytest.fixture(autouse=True)
def memory(short_dir, monkeypatch):
    """Give these processes a place of their own, so that what they leave is seen."""
    monkeypatch.setenv(VARIABLE, str(short_dir))
    return short_dir / f"zbus-{os.getuid()}"


def arrays(replicas=2, **fields):
    """Return a role of engines that handle arrays."""
    return {"actor": Role("array_engine:Arrays", replicas=replicas, sys_path=[str(HERE)], **fields)}


def limited(nbytes):
    """Return a config that gives each process so much shared memory."""
    return Config(data=DataConfig(shared_memory=nbytes))


def left(memory: Path) -> list[str]:
    """Return the names of processes that hold memory."""
    return sorted(entry.name for entry in memory.iterdir()) if memory.exists() else []


def held(memory: Path) -> dict[str, int]:
    """Return the bytes of the slots of each process."""
    sizes: dict[str, int] = {}
    for path in memory.glob("*/*.*"):
        if path.name[0].isdigit():
            with contextlib.suppress(FileNotFoundError):
                sizes[path.parent.name] = sizes.get(path.parent.name, 0) + path.stat().st_size
    return sizes


def made(rank: int, seed: int, nbytes: int) -> str:
    """Return the hash of what ``make`` answers."""
    return digest(np.random.default_rng(seed + rank).integers(0, 256, nbytes, np.uint8))


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


# -- too little --------------------------------------------------------------------------------------------------------


def test_results_that_are_kept_beyond_what_is_lent_at_most_come_in_messages(tmp_path, memory):
    """Row 62: 4 ranks answer 5 times with 12 MiB, all kept, where each may lend 32 MiB: all whole, no limit passed."""
    with launch(tmp_path, arrays(4), config=limited(32 * MIB)) as bus:
        kept = []
        for seed in range(5):
            kept.append(bus.group("actor").make(12 * MIB, seed))
            assert max(held(memory).values()) <= 32 * MIB
        for seed, answers in enumerate(kept):
            assert [digest(one) for one in answers] == [made(rank, seed, 12 * MIB) for rank in range(4)]
        del kept, answers
        assert bus.group("actor").digest(np.zeros(MIB, np.uint8)) == [digest(np.zeros(MIB, np.uint8))] * 4
    assert left(memory) == []


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_2_gib_of_replies_through_64_mib_of_shared_memory(tmp_path, short_dir, monkeypatch):
    """Rows 54, 62: as small as a container's: 8 ranks answer with 2 GiB in all; no SIGBUS, a tenth of it stays free."""
    mount = short_dir / "m"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(mount)], check=True)
    try:
        monkeypatch.setenv(VARIABLE, str(mount))
        least = [1.0]
        with launch(tmp_path, arrays(8)) as bus:
            actor = bus.group("actor")
            for seed in range(16):
                answers = actor.options(deadline=scaled(60)).make(16 * MIB, seed)
                facts = os.statvfs(mount)
                least.append(facts.f_bavail / facts.f_blocks)
                assert [digest(one) for one in answers] == [made(rank, seed, 16 * MIB) for rank in range(8)]
            del answers
            pids = [status["pid"] for status in bus.statuses().values()]
            assert len(pids) == 8
        assert min(least) >= 0.09
        assert left(mount / f"zbus-{os.getuid()}") == []
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


# -- nobody takes what comes -------------------------------------------------------------------------------------------


def test_results_that_nobody_collects_hold_no_more_than_is_lent_at_most(tmp_path, memory):
    """Row 64: 120 answers of 1 MiB wait for their caller; what is lent stays below its limit, and all come whole."""
    with launch(tmp_path, arrays(1), config=limited(16 * MIB)) as bus:
        actor = bus.group("actor")
        futures = [actor.make.submit(MIB, seed) for seed in range(120)]
        wait_until(lambda: all(future.done() for future in futures), what="all to be answered")
        assert max(held(memory).values()) <= 16 * MIB
        for seed, future in enumerate(futures):
            assert [digest(one) for one in future.result()] == [made(0, seed, MIB)]
        futures.clear()
        del future
        actor.make(MIB, 0)
        wait_until(lambda: lent(bus) == 0, what="the rank to have everything back")


def test_arguments_that_wait_for_their_turn_hold_no_more_than_is_lent_at_most(tmp_path, memory):
    """B17: a caller that submits without end is bounded: by its limit in shared memory, by the window in messages."""
    with launch(tmp_path, arrays(1), config=limited(16 * MIB)) as bus:
        actor = bus.group("actor")
        data = [np.full(MIB, number, np.uint8) for number in range(4)]
        futures = []
        for number in range(150):
            futures.append(actor.digest.submit(data[number % 4]))
            assert bus.report()["shared_lent_bytes"] <= 16 * MIB
        expected = [digest(one) for one in data]
        assert [future.result() for future in futures] == [[expected[number % 4]] for number in range(150)]
        del futures
        wait_until(lambda: bus.report()["shared_lent_bytes"] == 0, what="all arguments to be given back")


def test_answers_of_ranks_that_are_not_joined_are_freed_too(tmp_path, memory):
    """B16: of four ranks two repeat another's share, and nobody sees their answers: 60 steps leave nothing."""
    with launch(tmp_path, arrays(4, mesh={"dp": 2, "tp": 2})) as bus:
        actor = bus.group("actor")
        data = np.random.default_rng(0).integers(0, 100, (8, MIB // 8), np.uint8)
        sizes = []
        for _ in range(60):
            assert np.array_equal(actor.double(data), data * 2)
            sizes.append(sum(held(memory).values()))
        assert max(sizes[10:]) <= max(sizes[:10]), "no step adds to what the first ones took"
        wait_until(lambda: lent(bus) == 0, what="every rank to have back what it lent")


def lent(bus) -> int:
    """Return the bytes that the ranks lend now."""
    return sum(status.get("shared_lent_bytes", 0) for status in bus.statuses().values())


# -- kills -------------------------------------------------------------------------------------------------------------


def kill(bus, chance: random.Random) -> None:
    """Kill one rank."""
    pids = [status["pid"] for status in bus.statuses(timeout=1.0).values()]
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)


def batches_under_kills(tmp_path: Path, memory: Path, count: int, between: int) -> dict[str, int]:
    """Send batches while ranks are killed at random; return what was seen. Every answer that comes is compared."""
    chance = random.Random(count)
    rng = np.random.default_rng(count)
    seen = {"batches": 0, "failed": 0, "kills": 0, "descriptors": 0, "bytes": 0}
    with launch(tmp_path, arrays(3, restart="one", max_restarts=100_000, restart_window_s=1.0)) as bus:
        actor = bus.group("actor")
        batch = {"x": rng.random((48, 3000)), "ids": rng.integers(0, 9, (48, 7000), np.int32)}
        assert equal(actor.same(batch), batch)
        before = descriptors()
        once = actor.same.options(retries=0)
        for number in range(count):
            batch["x"][number % 48] = number
            killer = threading.Timer(chance.uniform(0, 0.03), kill, [bus, chance]) if number % between == 0 else None
            if killer is not None:
                killer.start()
                seen["kills"] += 1
            try:
                assert equal((once if number % 2 else actor.same)(batch), batch), number
            except (zbus.BatchError, zbus.CallError):
                seen["failed"] += 1
            if killer is not None:
                killer.join()
                seen["bytes"] = max(seen["bytes"], sum(held(memory).values()))
            wait_until(lambda: actor.ready, what="the killed rank to be back")
            seen["batches"] += 1
        wait_until(lambda: actor.ready, what="all ranks to be there")
        assert equal(actor.same(batch), batch)
        wait_until(
            lambda: bus.report()["shared_lent_bytes"] == 0, what="the dead, and calls that failed, to hold nothing"
        )
        wait_until(lambda: len(left(memory)) == 4, what="what dead ranks left to be removed")
        wait_until(lambda: descriptors() <= before + 8, what="descriptors of dead ranks to be closed")
        seen["descriptors"] = descriptors() - before
    assert left(memory) == []
    return seen


def test_batches_with_ranks_killed_at_random_leave_nothing(tmp_path, memory):
    """Whatever dies in the middle: what is answered is whole, and in the end no segment and no descriptor is left."""
    seen = batches_under_kills(tmp_path, memory, 150, 20)
    assert seen["kills"] >= 1
    assert seen["bytes"] < 64 * MIB


@pytest.mark.ci
@pytest.mark.alone
def test_many_batches_with_ranks_killed_at_random_leave_nothing(tmp_path, memory):
    """The same for as many batches as ZBUS_TEST_BATCHES says, by default 1,500."""
    seen = batches_under_kills(tmp_path, memory, int(os.environ.get("ZBUS_TEST_BATCHES", "1500")), 60)
    print(seen)
    assert seen["kills"] >= 5
    assert seen["bytes"] < 64 * MIB


# -- two jobs ----------------------------------------------------------------------------------------------------------


def test_two_jobs_share_a_host_without_meeting(tmp_path, memory):
    """Each reads its own, a killed rank and the end of one job cost the other nothing, and nothing is left."""
    data = {name: np.random.default_rng(seed).integers(0, 256, 2 * MIB, np.uint8) for seed, name in enumerate("ab")}
    with launch(tmp_path / "b", arrays(2)) as two:
        with launch(tmp_path / "a", arrays(2)) as one:
            assert len(left(memory)) == 6
            for _ in range(10):
                answers = [bus.group("actor").digest.submit(data[name]) for name, bus in (("a", one), ("b", two))]
                assert [answer.result() for answer in answers] == [[digest(data["a"])] * 2, [digest(data["b"])] * 2]
            kept = two.group("actor").make(2 * MIB, 1)
            os.kill(next(iter(one.statuses().values()))["pid"], signal.SIGKILL)
            wait_until(lambda: len(left(memory)) == 5, what="the killed rank's memory to be removed")
            assert two.group("actor").digest(data["b"]) == [digest(data["b"])] * 2
        wait_until(lambda: len(left(memory)) == 3, what="the first job's memory to be removed")
        assert [digest(one) for one in kept] == [made(rank, 1, 2 * MIB) for rank in range(2)]
        assert two.group("actor").digest(data["b"]) == [digest(data["b"])] * 2
        del kept
    assert left(memory) == []
