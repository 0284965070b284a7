"""What callers ask of a rollout controller, as coroutines on its loop; ``controller.rollout`` is their face."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from controller.group import Group
from controller.rollouts.control import Control
from controller.rollouts.driver import Driver, Job, Work
from controller.rollouts.feed import Feed
from controller.rollouts.results import Outcome, Rollout, RolloutTimeout, error_of
from controller.rollouts.tasks import State, Task
from controller.rollouts.workflows import Accept, call_job, job_of
from zbus.errors import ConfigError
from zbus.trace import register_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from zbus.rl.rewards import RewardPool

__all__ = ["CONTROL_S", "PREPARED", "REPORT_S", "SUBMITTED", "Operations"]

SUBMITTED: Final = "submit"
"""Owner of what ``submit`` starts and ``wait`` takes."""

PREPARED: Final = "prepare_batch"
"""Owner of what ``prepare_batch`` keeps in flight."""

CONTROL_S: Final = 60.0
"""How long ranks have to answer a control call."""

REPORT_S: Final = 30.0
"""How often a wait that goes on logs what it waits for."""

_BAD: Final = (Outcome.FAILED, Outcome.LOST)


class Operations:
    """Operations of one controller. All methods on the driver's loop.

    Args:
        driver: Runs the rollouts.
        group: The role.
        endpoint: What a rollout without a workflow calls.
        tolerate: How many failed or lost rollouts a batch of ``prepare`` passes over.
        rewards: What workflows here may call; None: nothing.
    """

    def __init__(
        self, driver: Driver, group: Group, endpoint: str, tolerate: int, rewards: RewardPool | None = None
    ) -> None:
        self.driver = driver
        self.control = Control(group, driver)
        self.rewards = rewards
        self._group = group
        self._endpoint = endpoint
        self._tolerate = tolerate
        self._batches = itertools.count()
        self._failed = 0

    def job(self, workflow: Any, accept: Accept | None) -> Job:
        """Return the job of a workflow, or of the plain endpoint. Any thread."""
        return (
            call_job(self._endpoint, accept)
            if workflow is None
            else job_of(workflow, self._group, self.rewards, accept)
        )

    # -- one by one ----------------------------------------------------------------------------------------------------

    async def submit(self, data: Any, job: Job, timeout_s: float | None) -> int:
        """Queue one rollout once there is room."""
        tasks = self.driver.tasks
        async with self._limited(timeout_s, SUBMITTED, lambda: "there was no room for a further rollout"):
            await self._until(lambda: tasks.room(SUBMITTED) > 0, SUBMITTED)
        return self._queue(SUBMITTED, job, data).number

    async def wait(self, count: int, timeout_s: float | None) -> list[Task]:
        """Take ``count`` finished rollouts once there are so many."""
        tasks = self.driver.tasks
        most = tasks.limits.results
        if count > most:
            msg = f"{count} rollouts asked for, and no more than results={most} are kept"
            raise ConfigError(msg, hint=f"wait for fewer at once, or set results={count}")

        def enough() -> bool:
            open_ = sum(tasks.tally(SUBMITTED))
            if open_ < count:
                msg = f"{count} rollouts asked for, {open_} are open"
                raise ValueError(msg)
            return tasks.takeable(SUBMITTED) >= count

        def told() -> str:
            return f"{tasks.takeable(SUBMITTED)} of {count} rollouts finished"

        async with self._limited(timeout_s, SUBMITTED, told):
            await self._until(enough, SUBMITTED)
        return self.driver.take(SUBMITTED, count)

    async def wait_for_task(self, number: int, timeout_s: float | None) -> list[Task]:
        """Take one rollout, whatever its turn."""
        task = next((one for one in self.driver.tasks.open(SUBMITTED) if one.number == number), None)
        if task is None:
            msg = f"rollout {number} is not open: it was taken, or never submitted here"
            raise ConfigError(msg, hint="each result is handed out once")
        async with self._limited(timeout_s, SUBMITTED, lambda: f"rollout {number} did not finish"):
            await self._until(lambda: task.state in {State.READY, State.TAKEN}, SUBMITTED)
        if task.state is State.TAKEN:
            msg = f"rollout {number} was taken by another caller"
            raise ConfigError(msg, hint="each result is handed out once")
        self.driver.take_these([task])
        return [task]

    async def cancel(self, number: int | None) -> None:
        """Cancel one open rollout, or forget all."""
        if number is None:
            self.driver.abandon(SUBMITTED)
            self.driver.abandon(PREPARED)
            return
        self.driver.cancel(one for one in self.driver.tasks.open() if one.number == number)

    # -- batches -------------------------------------------------------------------------------------------------------

    async def batch(
        self, items: Sequence[Any], job: Job, timeout_s: float | None, errors: Literal["raise", "return"]
    ) -> list[Rollout]:
        """Run one rollout per item and return them in the order of the items."""
        driver, owner = self.driver, ("rollout_batch", next(self._batches))
        pending, done = deque(items), list[Rollout]()

        def told() -> str:
            return f"{len(done)} of {len(items)} rollouts finished"

        try:
            async with self._limited(timeout_s, owner, told):
                while len(done) < len(items):
                    while pending and driver.tasks.room(owner) > 0:
                        self._queue(owner, job, pending.popleft(), counts=False)
                    await self._until(lambda: self._moves(owner, more=bool(pending)), owner)
                    done += map(driver.rollout, driver.take(owner, len(items)))
                    if errors == "raise":
                        self._raise_failed(done)
        finally:
            driver.abandon(owner)
        return sorted(done, key=lambda one: one.task)

    async def prepare(self, feed: Feed, job: Job, count: int, timeout_s: float | None) -> list[Task] | int:
        """Take ``count`` accepted rollouts of those that are kept in flight; or say how many items are wanted first.

        Raises:
            RolloutError: More failed than is tolerated.
        """
        tasks = self.driver.tasks
        while feed.fetched and tasks.room(PREPARED) > 0:
            self._queue(PREPARED, job, feed.fetched.popleft())

        def told() -> str:
            return f"{len(self._accepted())} of {count} rollouts were accepted"

        def moves() -> bool:
            return len(self._accepted()) >= count or (self._wanted(count) > 0 and not feed.ended) or self._dry()

        async with self._limited(timeout_s, PREPARED, told):
            await self._until(moves, PREPARED)
        found = self._accepted()
        wanted = 0 if feed.ended else self._wanted(count)
        # Items first, also where a batch is ready: they are what is begun while the caller trains on it.
        if wanted or not (len(found) >= count or (feed.ended and self._dry())):
            return wanted
        self._failed = 0
        self.driver.take_these(found[:count])
        return found[:count]

    def _accepted(self) -> list[Task]:
        """Return what may go into a batch; what may not is taken out and counted.

        Raises:
            RolloutError: More failed than is tolerated.
        """
        good: list[Task] = []
        for task in self.driver.tasks.peek(PREPARED):
            if task.outcome is Outcome.ACCEPTED:
                good.append(task)
                continue
            self.driver.tasks.take_these([task])
            if task.outcome in _BAD:
                self._failed += 1
                if self._failed > self._tolerate:
                    self._failed = 0
                    rollout = self.driver.rollout(task)
                    raise error_of(rollout, hint=_HINT) from rollout.error
        return good

    def _wanted(self, count: int) -> int:
        """Return how many items should be submitted, so that there is work while the caller trains."""
        tasks = self.driver.tasks
        queued, running, ready = tasks.tally(PREPARED)
        ahead = 1 if tasks.limits.max_staleness is None else tasks.limits.max_staleness
        most = (ahead + 2) * max(count, tasks.limits.batch_size)
        return max(0, min(count - queued, most - queued - running - ready, tasks.room(PREPARED)))

    def _dry(self) -> bool:
        """Tell whether nothing is under way any more."""
        queued, running, _ = self.driver.tasks.tally(PREPARED)
        return not queued and not running

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def pending(self) -> list[Any]:
        """Return the data of what ``prepare_batch`` has in flight and has not handed out, in order of submission."""
        return [task.payload.work.data for task in self.driver.tasks.open(PREPARED)]

    async def do(self, step: Callable[[], None]) -> None:
        """Run a short step on the loop."""
        step()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _queue(self, owner: Hashable, job: Job, data: Any, *, counts: bool = True) -> Task:
        work = Work(data)
        work.trace = register_task(role=self._group.role)
        return self.driver.submit(owner, job, work, counts=counts)

    async def _until(self, done: Callable[[], bool], owner: Hashable) -> None:
        await self.driver.until(done, lambda: f"{owner}: {self.driver.standing(owner)}", REPORT_S)

    def _moves(self, owner: Hashable, *, more: bool) -> bool:
        tasks = self.driver.tasks
        return tasks.takeable(owner) > 0 or (more and tasks.room(owner) > 0)

    @staticmethod
    def _raise_failed(done: list[Rollout]) -> None:
        failed = next((one for one in done if one.outcome in _BAD), None)
        if failed is not None:
            error = error_of(failed, hint="errors='return' hands out all of them as they ended")
            error.finished = sorted(done, key=lambda one: one.task)
            raise error from failed.error

    @asynccontextmanager
    async def _limited(self, timeout_s: float | None, owner: Hashable, told: Callable[[], str]) -> AsyncIterator[None]:
        """Turn the end of a timeout into an error that says what was waited for."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            msg = f"{told()} within {timeout_s:g} s: {self.driver.standing(owner)}"
            raise RolloutTimeout(
                msg,
                role=self._group.role,
                outcome="UNKNOWN",
                reason="wait",
                hint="they go on, and what is finished waits for the next call",
            ) from None


_HINT: Final = "repair it, or let batches pass over some with RolloutController(tolerate=...)"
