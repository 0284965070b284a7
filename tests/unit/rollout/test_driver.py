from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from controller.rollouts.driver import Driver, Work
from controller.rollouts.ranks import RankLost, Sight
from controller.rollouts.results import Outcome
from controller.rollouts.routing import Presence
from controller.rollouts.staleness import Limits
from controller.rollouts.workflows import call_job
from rollout_engine import until
from waiting import scaled

HERE = Sight(Presence.HERE, 1, "")
AWAY = Sight(Presence.AWAY, 0, "suspect")
GONE = Sight(Presence.GONE, 1, "dead: SIGKILL")


class FakeRanks:
    """Ranks whose calls end when the test says so."""

    def __init__(self, count: int) -> None:
        self.sights = [HERE] * count
        self.calls: list[tuple[int, object, asyncio.Future[object]]] = []

    def __len__(self) -> int:
        return len(self.sights)

    def look(self) -> list[Sight]:
        return list(self.sights)

    async def call(self, rank, method, args, kwargs):
        future = asyncio.get_running_loop().create_future()
        entry = (rank, args[0], future)
        self.calls.append(entry)
        try:
            return await future
        finally:
            self.calls.remove(entry)

    def answer(self, data, value) -> None:
        self._future(data).set_result(value)

    def fail(self, data, error) -> None:
        self._future(data).set_exception(error)

    def _future(self, data):
        return next(future for _, one, future in self.calls if one == data and not future.done())

    def where(self):
        return {data: rank for rank, data, _ in self.calls}


def driver(ranks: FakeRanks, *, attempts=3, **limits) -> Driver:
    """Make a driver under limits."""
    return Driver(ranks, Limits(**limits), attempts=attempts)


def submit(made: Driver, *data, owner="a") -> None:
    """Submit one rollout per item, which asks a rank once."""
    for one in data:
        made.submit(owner, call_job("go"), Work(one))


async def settle(rounds: int = 20) -> None:
    """Let the loop do what is due."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def taken(made: Driver, count: int, owner="a"):
    """Wait for results and take them."""
    async with asyncio.timeout(scaled(20)):
        await made.until(lambda: made.tasks.takeable(owner) >= count, lambda: "", 5.0)
    return [made.rollout(task) for task in made.take(owner, count)]


def test_a_lost_rank_moves_its_rollouts_to_the_others():
    """B55: the rollout is answered by another rank; both attempts are counted, and it is no rejection."""

    async def story() -> None:
        ranks = FakeRanks(2)
        made = driver(ranks)
        submit(made, "x", "y")
        await settle()
        assert ranks.where() == {"x": 0, "y": 1}
        ranks.sights[0] = AWAY
        ranks.fail("x", RankLost("killed", reached=True))
        await settle()
        assert ranks.where() == {"x": 1, "y": 1}
        ranks.answer("x", "good")
        (rollout,) = await taken(made, 1)
        assert (rollout.outcome, rollout.value, rollout.rank, rollout.attempts) == (Outcome.ACCEPTED, "good", 1, 2)
        await made.close()

    asyncio.run(story())


def test_a_rollout_without_a_rank_is_lost_and_not_rejected():
    """B55: LOST when no rank is left, with what became of them."""

    async def story() -> None:
        ranks = FakeRanks(1)
        made = driver(ranks)
        submit(made, "x")
        await settle()
        ranks.sights[0] = GONE
        ranks.fail("x", RankLost("killed", reached=True))
        (rollout,) = await taken(made, 1)
        assert rollout.outcome is Outcome.LOST
        assert "no rank is left: rank 0 is gone (dead: SIGKILL)" in str(rollout.error)
        assert str(rollout.error.__cause__) == "killed"
        await made.close()

    asyncio.run(story())


def test_a_rollout_that_loses_every_rank_it_meets_is_lost():
    """Attempts are bounded, so one poisonous item does not kill every rank for ever."""

    async def story() -> None:
        ranks = FakeRanks(3)
        made = driver(ranks, attempts=2)
        submit(made, "x")
        for _ in range(2):
            await settle()
            ranks.fail("x", RankLost("out of memory", reached=True))
        (rollout,) = await taken(made, 1)
        assert (rollout.outcome, rollout.rank, rollout.attempts) == (Outcome.LOST, 1, 2)
        assert "lost 2 times (ranks 0, 1)" in str(rollout.error)
        await made.close()

    asyncio.run(story())


def test_a_rank_that_returns_takes_the_calls_that_wait():
    """Nobody has to tell: it is looked at while calls wait."""

    async def story() -> None:
        ranks = FakeRanks(1)
        ranks.sights[0] = AWAY
        made = driver(ranks)
        submit(made, "x")
        await settle()
        assert ranks.calls == []
        assert "1 calls wait for a rank: rank 0 is away (suspect)" in made.standing("a")
        ranks.sights[0] = HERE
        async with asyncio.timeout(scaled(20)):
            await until(lambda: bool(ranks.calls))
        ranks.answer("x", 1)
        await taken(made, 1)
        await made.close()

    asyncio.run(story())


def test_a_rollout_that_fails_is_failed_with_its_error():
    """B49: failed and rejected are told apart."""

    async def story() -> None:
        ranks = FakeRanks(1)
        made = driver(ranks)
        submit(made, "x")
        await settle()
        ranks.fail("x", ValueError("bad item"))
        (rollout,) = await taken(made, 1)
        assert rollout.outcome is Outcome.FAILED
        assert isinstance(rollout.error, ValueError)
        await made.close()

    asyncio.run(story())


def test_a_workflow_that_exits_ends_only_its_rollout():
    """SystemExit out of a workflow does not end the loop that all others run on."""

    async def story() -> None:
        ranks = FakeRanks(1)
        made = driver(ranks)

        async def leaves(_driver, _work):
            raise SystemExit(3)

        made.submit("a", leaves, Work("x"))
        submit(made, "y")
        await settle()
        ranks.answer("y", 1)
        assert [one.outcome for one in await taken(made, 2)] == [Outcome.FAILED, Outcome.ACCEPTED]
        await made.close()

    asyncio.run(story())


def test_a_long_wait_is_told_though_something_happens_all_the_time(caplog):
    """Changes that do not end the wait put off no line of the log."""

    async def story() -> None:
        made = driver(FakeRanks(1))
        waiter = asyncio.create_task(made.until(lambda: False, lambda: "a thing", 0.05))
        deadline = time.monotonic() + scaled(20)
        while "a thing" not in caplog.text and time.monotonic() < deadline:
            made.pause(paused=False)
            await asyncio.sleep(0.001)
        waiter.cancel()
        assert "s: a thing" in caplog.text
        await made.close()

    asyncio.run(story())


def test_closing_ends_everything_and_tells_who_waits():
    """Rollouts are cancelled, calls given up, waiters told."""

    async def story() -> None:
        ranks = FakeRanks(1)
        made = driver(ranks, max_concurrent=1)
        submit(made, "x", "y")
        await settle()
        waiter = asyncio.create_task(taken(made, 2))
        await settle()
        await made.close()
        assert ranks.calls == []
        assert [one.outcome for one in await waiter] == [Outcome.CANCELLED] * 2

    asyncio.run(story())


class Story:
    """Random events on a driver and its ranks."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.ranks = FakeRanks(rng.randint(1, 4))
        self.made = driver(
            self.ranks, attempts=rng.randint(1, 4), batch_size=rng.randint(1, 5), max_concurrent=rng.randint(1, 8),
            max_staleness=rng.choice([None, 0, 2]), results=rng.randint(5, 20),
        )  # fmt: skip
        self.submitted = 0
        self.seen: Counter[int] = Counter()

    def open_calls(self) -> list[object]:
        return [data for _, data, future in self.ranks.calls if not future.done()]

    def submit(self) -> None:
        if self.made.tasks.room("a"):
            submit(self.made, self.submitted)
            self.submitted += 1

    def answer(self) -> None:
        if self.open_calls():
            self.ranks.answer(self.rng.choice(self.open_calls()), "value")

    def lose(self) -> None:
        if self.open_calls():
            reached = self.rng.random() < 0.7
            self.ranks.fail(self.rng.choice(self.open_calls()), RankLost("x", reached=reached))

    def sight(self) -> None:
        self.ranks.sights[self.rng.randrange(len(self.ranks))] = self.rng.choice([HERE, HERE, AWAY])
        self.made.look()

    def stale(self) -> None:
        rank = self.rng.randrange(len(self.ranks))
        if self.rng.random() < 0.5:
            self.made.mark_stale(rank, "random")
        else:
            self.made.mark_current(rank, 1)

    def advance(self) -> None:
        self.made.advance(self.made.tasks.staleness.version + 1)

    def take(self) -> None:
        self.seen.update(task.number for task in self.made.take("a", 3))

    def pause(self) -> None:
        self.made.pause(paused=self.rng.random() < 0.3)

    async def end(self) -> None:
        """Let all ranks be fit again and answer until everything is out."""
        self.made.pause(paused=False)
        for rank in range(len(self.ranks)):
            self.ranks.sights[rank] = HERE
            self.made.mark_current(rank, 1)
        for _ in range(self.submitted * 20 + 20):
            for data in self.open_calls():
                self.ranks.answer(data, "value")
            self.advance()
            await settle(3)
            self.seen.update(task.number for task in self.made.take("a", 99))
            if len(self.seen) == self.submitted:
                break


EVENTS = [
    Story.submit, Story.answer, Story.answer, Story.lose, Story.sight, Story.stale, Story.advance, Story.take,
    Story.pause,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_to_ranks_each_rollout_comes_out_once(seed):
    """Random answers, losses, deaths, returns, stale marks, versions and pauses: one outcome each, and none hangs."""

    async def tell() -> None:
        story = Story(seed)
        for _ in range(150):
            story.rng.choice(EVENTS)(story)
            await settle(3)
        await story.end()
        assert story.seen == Counter(range(story.submitted))
        assert [one.load for one in story.made.routes.ranks] == [0] * len(story.ranks)
        assert story.made.routes.waiting == 0
        await story.made.close()

    asyncio.run(tell())
