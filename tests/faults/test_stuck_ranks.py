"""Ranks that do not answer in time: who, in which method, since when, and the line they are at; nobody is killed."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs

import zbus
from controller import Controller, Role
from controller.render import render_error
from controller.stacks import Stacks, ask_agents
from launching import launch
from run_kit import DRIVERS
from waiting import scaled, wait_until, within
from zbus.config import Config, RpcConfig
from zbus.ids import WorkerName
from zbus.registry.records import WorkerRecord

pytestmark = pytest.mark.alone

RANKS = 8
SOURCE = (DRIVERS / "stuck_engines.py").read_text(encoding="utf-8").splitlines()


def line_of(comment: str) -> str:
    """Return ``file:line`` of the source line with this comment."""
    return f"stuck_engines.py:{next(n for n, line in enumerate(SOURCE, 1) if line.endswith('# ' + comment))}"


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """One trial of eight ranks that reports a stuck call after a second."""
    role = Role(f"{DRIVERS}/stuck_engines.py:Stuck", replicas=RANKS)
    config = Config(rpc=RpcConfig(stuck_after=1.0, stuck_factor=3.0))
    with launch(tmp_path_factory.mktemp("runs"), {"actor": role}, config=config, startup_timeout=scaled(60)) as bus:
        yield bus


@pytest.fixture
def settled(bus: Controller) -> Iterator[Controller]:
    """Give the trial, and wait afterwards until every rank answers again: nobody was killed."""
    pids = {name: status["pid"] for name, status in bus.statuses(scaled(10)).items()}
    yield bus
    bus.group("actor").options(deadline=scaled(60)).count()
    assert {name: status["pid"] for name, status in bus.statuses(scaled(10)).items()} == pids


def log_places(caplog: pytest.LogCaptureFixture) -> str:
    """Return what was logged of stuck ranks."""
    return "\n".join(record.getMessage() for record in caplog.records if record.getMessage().startswith("stuck:"))


def test_a_rank_past_the_deadline_is_told_with_its_line(settled: Controller) -> None:
    """CallTimeout names rank, method and the engine's line; the dump of all threads is a file of the trial."""
    with pytest.raises(zbus.CallTimeout) as caught:
        settled.group("actor")[3].options(deadline=0.5).step("sleep", (3,), scaled(5.0))
    error = caught.value
    assert (error.role, error.rank, error.method, error.reason) == ("actor", 3, "step", "deadline")
    assert f"{line_of('sleeps here')} in in_sleep < " in error.facts["at"]
    text = (settled.trial.path / error.facts["stacks"]).read_text()
    assert "in in_sleep" in text
    assert error.facts["stacks"] in render_error(error)


def test_all_late_ranks_are_folded_by_place_within_two_seconds(settled: Controller) -> None:
    """Sleep, a regex that holds the GIL, and a lock, on eight ranks: three places, soon after the deadline."""
    deadline = 1.0
    began = time.monotonic()
    with pytest.raises(zbus.BatchError) as caught:
        settled.group("actor").options(deadline=deadline).mixed(scaled(7.0))
    took = time.monotonic() - began - deadline
    root = caught.value.root
    assert isinstance(root, zbus.CallTimeout)
    assert root.facts["late"] == "actor/0-7 have not answered `mixed`"
    places = root.facts["at"].splitlines()
    assert [re.match(r"actor/([\d, ]+): .*?(\w+\.py:\d+) in (\w+)", place).groups() for place in places] == [  # type: ignore[union-attr]
        ("0, 3, 6", line_of("sleeps here"), "in_sleep"),
        ("1, 4, 7", line_of("holds the GIL here"), "in_regex"),
        ("2, 5", line_of("waits here"), "in_lock"),
    ]
    assert took < within(2.0), f"{took:.2f} s"


def test_the_others_of_a_failed_call_are_told_with_their_stacks(settled: Controller, tmp_path: Path) -> None:
    """One rank raises while others wait: root cause at once, the others named with how far and where they are."""
    with pytest.raises(zbus.BatchError) as caught:
        settled.group("actor").first_fails(scaled(6.0), str(tmp_path))
    took = time.time() - max(asleep.stat().st_mtime for asleep in tmp_path.iterdir())
    assert isinstance(caught.value.root, ValueError)
    assert took < within(2.0), f"{took:.2f} s"
    assert set(caught.value.late) == set(range(1, RANKS))
    assert all(line_of("falls asleep here") in words for words in caught.value.late.values())
    facts = caught.value.root.facts  # type: ignore[attr-defined]
    assert facts["peers"] == "actor/1-7 still running it; nothing was re-run"
    assert facts["peers at"].startswith("actor/1-7: ")
    assert facts["peers at"].count("in first_fails") == 1, "identical stacks are told once"


def test_a_stuck_rank_is_logged_while_its_call_goes_on(settled: Controller, caplog: pytest.LogCaptureFixture) -> None:
    """One of eight runs on: who, method, since when, the line; the call still gets its answer."""
    with caplog.at_level(logging.WARNING, "zbus.members"):
        future = settled.group("actor").step.submit("sleep", (5,), scaled(6.0))
        wait_until(lambda: log_places(caplog), what="the report of the stuck rank")
        assert future.result() == list(range(RANKS))
    words = log_places(caplog)
    assert re.search(r"stuck: actor/5 has not answered `step` for \d+\.\d s; 7 others took at most \d+ s\n", words)
    assert re.search(rf"\n  actor/5 in \S*{re.escape(line_of('sleeps here'))} in in_sleep < ", words)
    assert "; all threads in stacks/actor.5.0.txt" in words


def test_a_blocked_event_loop_is_told_as_stuck_and_ends_nobody(
    settled: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 16: an async method that sleeps blocks its loop; ``ctl`` and the main lane are answered, its call ends OK."""
    rank = settled.group("actor")[7]
    with caplog.at_level(logging.WARNING, "zbus.members"):
        future = rank.doze.submit(scaled(6.0))
        wait_until(lambda: future.outcomes()[0].state.startswith("running"), what="the call to run")
        behind = rank.quick.submit()
        assert WorkerName("actor", 7) in settled.statuses(within(1))
        assert rank.options(deadline=within(1)).count() >= 0
        assert not behind.done()
        wait_until(lambda: log_places(caplog), what="the report of the stuck rank")
        assert (future.result(), behind.result()) == (7, 7)
    assert "actor/7 has not answered `doze`" in log_places(caplog)
    assert line_of("blocks the loop here  # noqa: ASYNC251") in log_places(caplog)


def test_a_stopped_rank_is_told_as_stopped_and_not_killed(settled: Controller) -> None:
    """SIGSTOP: no stacks can come; the error says so, and after SIGCONT the rank serves on."""
    pid = settled.statuses(scaled(10))[WorkerName("actor", 2)]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(zbus.CallTimeout) as caught:
            settled.group("actor")[2].options(deadline=0.3).step()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "its process is stopped" in caught.value.facts["at"]


def test_a_dump_leaves_errno_as_it_was(settled: Controller) -> None:
    """Whoever is between a system call and its ``errno`` does not notice; libzmq aborts the process if it does."""
    rank = settled.group("actor")[1]
    before = (settled.trial.path / "stacks" / "actor.1.0.txt").stat().st_size
    assert [rank.errno_after_a_dump(number) for number in (11, 4, 110)] == [11, 4, 110]
    assert (settled.trial.path / "stacks" / "actor.1.0.txt").stat().st_size > before


def test_ranks_of_another_host_are_asked_through_their_agent(settled: Controller) -> None:
    """What does not answer and cannot be signalled from here is dumped by its agent, and read from the trial directory.

    A rank that answers is told by its own word, and its agent is left alone.
    """
    members = settled._session.members
    client = settled._session.client
    assert members is not None
    assert client is not None
    told: list[set[int]] = []

    def ask(ranks: Sequence[WorkerRecord]) -> set[int]:
        told.append(ask_agents(client, members._records, ranks))
        return told[-1]

    record = members.roles["actor"].members[4].record
    assert record is not None
    afar = structs.replace(record, pid_space="another kernel")
    stacks = Stacks(settled.trial, settled._session.threads_of, ask, fresh_s=0.0)
    try:
        waits = settled.group("actor")[4].step.submit("lock", (4,), scaled(4.0))
        wait_until(lambda: waits.outcomes()[0].state.startswith("running"), what="the call to run")
        assert line_of("waits here") in stacks.take([afar])[record.incarnation].place
        assert not told
        assert waits.result() == 4
        holds = settled.group("actor")[4].step.submit("regex", (4,), scaled(6.0))

        def place() -> str:
            found = stacks.take([afar])[record.incarnation].place
            return found if any(told) else ""

        assert line_of("holds the GIL here") in wait_until(place, what="a dump through the agent")
    finally:
        stacks.close()
    assert told[-1] == {record.incarnation}
    assert holds.result() == 4


def test_a_rank_that_answers_is_not_signalled(settled: Controller) -> None:
    """Its own word is enough, of all its threads; a handler that reads frames while they change would end it."""
    members = settled._session.members
    assert members is not None
    records = [member.record for member in members.roles["actor"].members if member.record is not None]
    stacks = Stacks(settled.trial, settled._session.threads_of, fresh_s=0.0)
    before = {record.rank: text_of(settled, record) for record in records}
    try:
        dumps = stacks.take(records)
    finally:
        stacks.close()
    for record in records:
        assert dumps[record.incarnation].path == f"stacks/actor.{record.rank}.0.txt"
        written = text_of(settled, record).removeprefix(before[record.rank])
        assert written.count("Thread 0x") > 3
        assert "Stack (most" not in written, "a signal writes so"


def text_of(bus: Controller, record: WorkerRecord) -> str:
    """Return the dumps of a rank."""
    path = bus.trial.stack_file(record.role, record.rank, record.start)
    return path.read_text() if path.exists() else ""


def test_the_callers_loop_runs_on_while_stacks_are_taken(settled: Controller) -> None:
    """An awaited call that runs out of time says where the rank is, and blocks the caller's loop at no time."""

    async def call() -> tuple[zbus.CallTimeout, float]:
        longest, last, over = 0.0, time.monotonic(), False

        async def tick() -> None:
            nonlocal longest, last
            while not over:
                await asyncio.sleep(0.01)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()

        ticking = asyncio.create_task(tick())
        try:
            await settled.group("actor")[6].options(deadline=0.4).step.aio("sleep", (6,), 1.5)
        except zbus.CallTimeout as error:
            return error, longest
        finally:
            over = True
            await ticking
        raise AssertionError

    os.kill(settled.statuses(scaled(10))[WorkerName("actor", 6)]["pid"], signal.SIGSTOP)  # no stacks: the longest wait
    try:
        error, longest = asyncio.run(call())
        for _ in range(4):  # a loop that is blocked is blocked each time, and a machine stalls now and then
            if longest >= scaled(0.3):
                _, longest = asyncio.run(call())
    finally:
        os.kill(settled._session.members.roles["actor"].members[6].record.pid, signal.SIGCONT)  # type: ignore[union-attr]
    assert "its process is stopped" in error.facts["at"]
    assert longest < scaled(0.3), f"{longest:.2f} s"
