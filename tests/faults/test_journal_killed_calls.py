from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controller import Controller, Role
from journal_engine import Truth
from launching import HERE, launch
from waiting import wait_until
from zbus.errors import CallError

RANKS = 4

pytestmark = pytest.mark.alone


def _role(folder: Path, **fields: Any) -> Role:
    return Role(
        "journal_engine:Diary",
        args=(str(folder),),
        sys_path=[str(HERE)],
        restart="one",
        max_restarts=10_000,
        restart_window_s=0.001,  # deaths that are meant to be: no backoff grows
        **fields,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give where the diaries lie."""
    return tmp_path_factory.mktemp("diaries")


@pytest.fixture(scope="module")
def bus(folder: Path) -> Iterator[Controller]:
    """Give four ranks that come back whenever they are killed."""
    with launch(folder / "root", {"diary": _role(folder, replicas=RANKS)}) as launched:
        yield launched


class Round:
    """Calls to one rank that is going to die, and what became of each."""

    def __init__(self, bus: Controller, folder: Path, rank: int) -> None:
        self.one = bus.group("diary")[rank]
        self.folder = folder
        self.rank = rank
        self.pid, self.start = self.one.who()
        self.names: list[str] = []
        self.futures: list[Any] = []

    def name(self) -> str:
        name = f"{self.start}.{len(self.names)}"
        self.names.append(name)
        return name

    def some_calls(self, points: str = "") -> None:
        """Send five calls, of which the fifth raises, and a batch of four: nine places of lane main.

        All are on their way to this very start before the first begins.
        """
        released = self.folder / f"released.{self.rank}.{self.start}"
        self.one.hold.submit(str(released))
        if points:
            self.one.arm.submit(points)
        for method in (*[self.one.write] * 4, self.one.fail):
            self.futures.append(method.submit(self.name()))
        batch = self.one.batch()
        for _ in range(4):
            batch.write(self.name())
        self.futures += batch.submit()
        released.touch()

    def told(self) -> list[str]:
        """Wait for all outcomes; return each in a word, checked against the diary."""
        words = []
        for future in self.futures:
            future.exception(30)
            (entry,) = future.outcomes()
            words.append(_word(entry.outcome, entry.state))
        truth = Truth(self.folder, "diary", self.rank)
        for name, word in zip(self.names, words, strict=True):
            ran = truth.ran(name)
            assert ran in {"OK": "yes", "executed": "yes", "never": "no", "began": "no began yes"}[word].split(), (
                name, word, ran
            )  # fmt: skip
        return words

    def back(self) -> None:
        """Wait for the next start of the rank."""

        def again() -> bool:
            try:
                _, start = self.one.who()
            except CallError:
                return False
            return bool(start > self.start)

        wait_until(again, 30, f"start {self.start + 1} of rank {self.rank}")


def _word(outcome: str | None, state: str) -> str:
    if outcome in ("OK", "APP_ERROR"):
        return "OK"
    assert outcome in ("UNKNOWN", "NOT_EXECUTED"), (outcome, state)
    if outcome == "NOT_EXECUTED":
        assert "not started" in state, state
        return "never"
    if "executed, reply lost" in state:
        return "executed"
    assert "began, no end" in state, state
    return "began"


AT_THE_POINT = {
    "before_exec": {"never"},
    "after_start": {"began"},
    "before_end": {"began"},
    "after_exec": {"executed"},
    "before_reply": {"executed"},
    "after_reply": {"executed", "OK"},
}


def _killed_at(bus: Controller, folder: Path, point: str, dice: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        victims = []
        for rank in range(RANKS):
            victim = Round(bus, folder, rank)
            at = dice.randint(1, 9)
            if point == "before_end" and at == 5:
                at = 6  # the fifth call raises: it has no result to hold back
            if point == "after_exec" and at == 5:
                at = 4
            passes = at
            if point.endswith("reply"):
                passes += 1  # the answer to `arm` itself comes first
            elif point in ("before_end", "after_exec") and at > 5:
                passes -= 1
            victim.some_calls(f"{point}=kill@{passes}")
            victims.append((victim, at))
        for victim, at in victims:
            words = victim.told()
            assert set(words[: at - 1]) <= {"OK", "executed"}, (at, words)
            assert words[at - 1] in AT_THE_POINT[point], (at, words)
            assert set(words[at:]) <= {"never"}, (at, words)
        for victim, _ in victims:
            victim.back()


@pytest.mark.parametrize("point", AT_THE_POINT)
def test_a_kill_at_a_fail_point_is_told_as_it_was(bus: Controller, folder: Path, point: str) -> None:
    """20 kills around a ``once`` call: it, those before and those after end as the side effects say (rows 2 and 3)."""
    _killed_at(bus, folder, point, random.Random(point), rounds=5)


@pytest.mark.ci
@pytest.mark.parametrize("point", AT_THE_POINT)
def test_many_kills_at_a_fail_point(bus: Controller, folder: Path, point: str) -> None:
    """The same 160 times."""
    _killed_at(bus, folder, point, random.Random(point + "ci"), rounds=40)


def _began(words: Sequence[str]) -> int:
    return sum(word == "began" for word in words)


@pytest.mark.parametrize("lane", ["write_async", "write_in_thread"])
@pytest.mark.parametrize("point", ["before_exec", "after_start", "before_end", "after_exec"])
def test_calls_that_run_at_once_are_told_apart(bus: Controller, folder: Path, lane: str, point: str) -> None:
    """On a lane with concurrency 4 a kill leaves at most 4 calls "began, no end"; the others are proved."""
    dice = random.Random(lane + point)
    for _ in range(5):
        victims = []
        for rank in range(RANKS):
            victim = Round(bus, folder, rank)
            victim.one.arm(f"{point}=kill@{dice.randint(1, 14)}")
            method = getattr(victim.one, lane)
            victim.futures += [method.submit(victim.name(), dice.choice([0, 0.001, 0.004])) for _ in range(14)]
            victims.append(victim)
        for victim in victims:
            words = victim.told()
            assert _began(words) <= 4, words
        for victim in victims:
            victim.back()


def test_a_kill_at_any_moment_is_told_as_it_was(bus: Controller, folder: Path) -> None:
    """SIGKILL from outside in a storm of calls: at most one call of lane main "began, no end"."""
    dice = random.Random(1)
    seen: set[str] = set()
    for _ in range(6):
        victims = []
        for rank in range(RANKS):
            victim = Round(bus, folder, rank)
            for _ in range(100):
                victim.futures.append(victim.one.write.submit(victim.name()))
            time.sleep(dice.uniform(0, 0.004))  # the moment of the kill is the point, not a wait
            os.kill(victim.pid, signal.SIGKILL)
            victims.append(victim)
        for victim in victims:
            words = victim.told()
            assert _began(words) <= 1, words
            seen.update(words)
            victim.back()
    assert seen >= {"OK", "never"}


@pytest.mark.parametrize("how", ["segfault", "exit"])
def test_other_ends_are_told_like_a_kill(bus: Controller, folder: Path, how: str) -> None:
    """A segmentation fault and ``os._exit`` in a method leave it "began, no end", and the rest proved (row 11)."""
    victim = Round(bus, folder, 0)
    for index in range(6):
        victim.futures.append(victim.one.write.submit(victim.name(), 0.02, how if index == 3 else ""))
    words = victim.told()
    assert set(words[:3]) <= {"OK", "executed"}
    assert words[3:] == ["began", "never", "never"]


_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.ci
def test_an_out_of_memory_kill_is_told_like_a_kill(bus: Controller, folder: Path) -> None:
    """The kernel's kill for memory leaves the hungry call "began, no end", and the rest proved (row 12)."""
    group = _MEMORY / f"zbus-journal-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no writable v1 memory cgroup: {error}")
    try:
        victim = Round(bus, folder, 0)
        victim.one.join(str(group))
        for index in range(4):
            victim.futures.append(victim.one.write.submit(victim.name(), 0.02, "oom" if index == 1 else ""))
        words = victim.told()
        assert words[0] in ("OK", "executed")
        assert words[1:] == ["began", "never", "never"]
        victim.back()
    finally:
        wait_until(lambda: (group / "cgroup.procs").read_text() == "", what="the cgroup empty")
        group.rmdir()
