"""Runs rollouts: what the machines of tasks and routes say is done here, on one event loop.

Everything is called on that loop, so nothing needs a lock, and no call to a rank is made under one.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from controller.rollouts.ranks import RankLost, Ranks
from controller.rollouts.results import Outcome, Rollout
from controller.rollouts.routing import Call, Fail, Go, Presence, Routes
from controller.rollouts.staleness import Limits
from controller.rollouts.tasks import State, Task, Tasks
from zbus.errors import CallCancelled, ConfigError

__all__ = ["Answer", "Driver", "Job", "Lost", "Work"]

log = logging.getLogger("zbus.rollout")

_LOOK_S: Final = 0.05
"""How often ranks are looked at while calls wait for one."""

_GRACE_S: Final = 5.0
"""How long workflows have to end when the controller is destroyed."""

_FRESH_S: Final = 0.01
"""How long a look at the ranks serves the calls that follow."""


class Lost(Exception):
    """A call found no rank, or lost too many; a rollout that meets it is LOST."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank answered.

    Attributes:
        value: The answer.
        version: The version that the rank was known to hold when it was asked.
    """

    value: Any
    version: int


@dataclass(eq=False)
class Work:
    """What one rollout does, and what is learnt of it while it runs.

    Attributes:
        data: What was submitted.
        value: What came of it.
        oldest, newest: Versions that may have made a part of it.
        rank: Who was asked last.
        attempts: How many times calls of it went to a rank.
        trace: Number of its task in the trace, or None.
    """

    data: Any
    value: Any = None
    oldest: int | None = None
    newest: int | None = None
    rank: int | None = None
    attempts: int = 0
    trace: int | None = None

    def saw(self, oldest: int | None, newest: int | None) -> None:
        """Note that a part of it was made by these versions."""
        if oldest is not None:
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
        if newest is not None:
            self.newest = newest if self.newest is None else max(self.newest, newest)


Job = Callable[["Driver", Work], Any]
"""A coroutine function that makes a rollout: sets ``work.value`` and returns whether it is accepted."""


@dataclass(eq=False)
class _Payload:
    job: Job
    work: Work
    context: contextvars.Context
    running: asyncio.Task[None] | None = None
    error: BaseException | None = None


class Driver:
    """Runs tasks on ranks. All methods on its loop, unless they say otherwise.

    Args:
        ranks: Who answers calls.
        limits: What bounds rollouts.
        attempts: How many ranks may be lost under one call before it is LOST.
        ordered: Results are taken strictly in order of submission.
        ended: Told of each rollout that has ended.
    """

    def __init__(
        self,
        ranks: Ranks,
        limits: Limits,
        *,
        attempts: int = 3,
        ordered: bool = False,
        ended: Callable[[Work, Outcome, BaseException | None], None] = lambda _work, _outcome, _error: None,
    ) -> None:
        self.tasks = Tasks(limits, ordered=ordered)
        self.routes = Routes(len(ranks), attempts=attempts)
        self._ranks = ranks
        self._ended = ended
        self._asked: dict[Call, asyncio.Future[int]] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._looked_s = -1.0
        self._watching: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def submit(self, owner: Hashable, job: Job, work: Work, *, counts: bool = True) -> Task:
        """Queue a rollout; ask for room first."""
        self._check_open()
        task = self.tasks.submit(
            owner, _Payload(job, work, contextvars.copy_context()), time.monotonic(), counts=counts
        )
        self._changed()
        return task

    def take(self, owner: Hashable, count: int) -> list[Task]:
        """Take results that are ready, the lowest number first."""
        taken = self.tasks.take(owner, count)
        if taken:
            self._changed()
        return taken

    def take_these(self, tasks: Sequence[Task]) -> None:
        """Take results out of their turn; all must be ready."""
        self.tasks.take_these(tasks)
        if tasks:
            self._changed()

    def put_back(self, tasks: Iterable[Task]) -> None:
        """Undo a take that nobody received."""
        self.tasks.put_back(tasks)
        self._changed()

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Cancel tasks: those that wait end at once, those that run as soon as they can."""
        ended, running = self.tasks.cancel(tasks, time.monotonic())
        for task in ended:
            self._ended(task.payload.work, Outcome.CANCELLED, None)
        for task in running:
            if task.payload.running is not None:
                task.payload.running.cancel()
        self._changed()

    def abandon(self, owner: Hashable) -> None:
        """Cancel all tasks of an owner, and forget them as they end."""
        tasks = self.tasks.open(owner)
        self.tasks.abandon(owner)
        self.cancel(tasks)

    def withdraw(self, number: int) -> None:
        """Undo a submission whose number nobody got."""
        for task in [one for one in self.tasks.open() if one.number == number]:
            self.tasks.disown(task)
            self.cancel([task])

    def pause(self, *, paused: bool) -> None:
        """Start nothing more, or go on."""
        self.tasks.paused = paused
        self._changed()

    def advance(self, version: int) -> None:
        """A new version counts from now on.

        Raises:
            ConfigError: It is older than the one that counts.
        """
        self.tasks.advance(version)
        self.routes.all_current(version)
        self._changed()

    def recovered(self, version: int) -> None:
        """A run goes on at ``version``."""
        self.tasks.recovered(version)
        self.routes.all_current(version)
        self._changed()

    @staticmethod
    def rollout(task: Task) -> Rollout:
        """Return what a finished task came to."""
        payload: _Payload = task.payload
        work = payload.work
        return Rollout(
            task=task.number,
            outcome=task.outcome or Outcome.CANCELLED,
            data=work.data,
            value=work.value,
            error=payload.error,
            oldest=work.oldest,
            newest=work.newest,
            rank=work.rank,
            attempts=work.attempts,
            queued_s=task.started_s - task.submitted_s,
            ran_s=task.ended_s - task.started_s,
        )

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def until(self, done: Callable[[], bool], report: Callable[[], str], every_s: float) -> None:
        """Wait until ``done()``, looking after each change; log what is waited for every so often.

        Raises:
            ConfigError: The controller was destroyed.
        """
        began = told = time.monotonic()
        while not done():
            self._check_open()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(
                    told + every_s - time.monotonic()
                ):  # changes that do not help put off no line
                    await waiter
            except TimeoutError:
                told = time.monotonic()
                log.warning("waiting for %.0f s: %s", told - began, report())
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def standing(self, owner: Hashable) -> str:
        """Say what an owner's tasks wait for."""
        queued, running, ready = self.tasks.tally(owner)
        words = f"{queued} queued, {running} running, {ready} ready"
        reasons = [self.tasks.holds_up(owner)]
        if self.routes.waiting:
            reasons.append(f"{self.routes.waiting} calls wait for a rank: {self.routes.unfit() or 'all are fit'}")
        told = "; ".join(filter(None, reasons))
        return f"{words}{f' ({told})' if told else ''}"

    # -- ranks ---------------------------------------------------------------------------------------------------------

    async def call(self, work: Work, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call an endpoint of the least loaded fit rank; of another one each time that a rank is lost.

        Args:
            work: Whose call it is: it learns which ranks were asked.
            method: Name of the endpoint.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            Lost: As often as it may be tried, or no rank is left.
        """
        call = Call()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[call] = future
        cause: BaseException | None = None
        try:
            self._look()
            self._route(self.routes.ask(call))
            while True:
                rank = await self._routed(call, cause)
                version = self.routes.ranks[rank].version
                work.rank, work.attempts = rank, work.attempts + 1
                try:
                    value = await self._ranks.call(rank, method, args, kwargs)
                except RankLost as lost:
                    cause = lost.__cause__ or lost
                    work.attempts -= not lost.reached
                    log.info("rank %d lost `%s`: %s", rank, method, lost)
                    self._asked[call] = asyncio.get_running_loop().create_future()
                    self._route(self.routes.observe(rank, Presence.AWAY, why=str(lost)))  # until it is looked at anew
                    self._route(self.routes.lost(call, counts=lost.reached))
                    continue
                return Answer(value, version)
        finally:
            asked = self._asked.pop(call)
            if asked.done() and not asked.cancelled():
                asked.exception()  # nobody else asks
            self.routes.ended(call)

    async def _routed(self, call: Call, cause: BaseException | None) -> int:
        try:
            return await self._asked[call]
        except Lost as lost:
            raise lost from cause

    def mark_stale(self, rank: int, why: str) -> None:
        """Give a rank no work until ``mark_current``."""
        self._route(self.routes.mark_stale(rank, why))

    def mark_current(self, rank: int, version: int, incarnation: int = 0) -> None:
        """A rank has the weights of ``version``."""
        self._look(force=True)
        self._route(self.routes.mark_current(rank, version, incarnation))

    def look(self) -> None:
        """Look at all ranks now."""
        self._look(force=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel everything; who waits is told."""
        self._closed = True
        self.cancel(self.tasks.open())
        if self._watching is not None:
            self._watching.cancel()
        if self._running:
            _, stuck = await asyncio.wait(self._running, timeout=_GRACE_S)
            if stuck:
                log.warning("%d workflows go on though they were cancelled; they are left behind", len(stuck))
        self._wake()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            msg = "the rollout controller was destroyed"
            raise ConfigError(msg, hint="make a new one")

    def _changed(self) -> None:
        """After every event: start what may start, and let those who wait look again."""
        if not self._closed:
            for task in self.tasks.startable(time.monotonic()):
                payload: _Payload = task.payload
                payload.running = asyncio.get_running_loop().create_task(
                    self._run(task, payload), context=payload.context
                )
                self._running.add(payload.running)
                payload.running.add_done_callback(self._running.discard)
                payload.running.add_done_callback(partial(self._settle_unstarted, task))
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _run(self, task: Task, payload: _Payload) -> None:
        error: BaseException | None = None
        try:
            accepted = await payload.job(self, payload.work)
            outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
        except CallCancelled as cancelled:
            outcome, error = Outcome.CANCELLED, cancelled
        except Lost as lost:
            outcome, error = Outcome.LOST, lost
        except BaseException as failed:  # noqa: BLE001  # whatever a workflow raises is its outcome, SystemExit too
            outcome, error = Outcome.FAILED, failed
        self._settle(task, outcome, error)

    def _settle_unstarted(self, task: Task, _ended: asyncio.Task[None]) -> None:
        """A task that was cancelled before its first step never ran ``_run``."""
        if task.state is State.RUNNING:
            self._settle(task, Outcome.CANCELLED, None)

    def _settle(self, task: Task, outcome: Outcome, error: BaseException | None) -> None:
        payload: _Payload = task.payload
        payload.error, payload.running = error, None
        self.tasks.finish(task, outcome, time.monotonic(), payload.work.oldest)
        self._ended(payload.work, task.outcome or outcome, error)
        self._changed()

    def _route(self, effects: Iterable[Go | Fail]) -> None:
        for effect in effects:
            future = self._asked.get(effect.call)
            if future is None or future.done():
                continue
            if isinstance(effect, Go):
                future.set_result(effect.rank)
            else:
                future.set_exception(Lost(effect.why))
        if self.routes.waiting and self._watching is None and not self._closed:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Look at the ranks again and again while calls wait for one."""
        try:
            while self.routes.waiting:
                await asyncio.sleep(_LOOK_S)
                self._look(force=True)
        finally:
            self._watching = None

    def _look(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._looked_s < _FRESH_S:
            return
        self._looked_s = now
        for rank, sight in enumerate(self._ranks.look()):
            self._route(self.routes.observe(rank, sight.presence, sight.incarnation, sight.why))
