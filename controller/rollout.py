"""``RolloutController``: a stream of rollouts over the ranks of a role, asynchronous and with bounded staleness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from controller.rollouts.aio import AsyncRollouts
from controller.rollouts.operations import CONTROL_S
from controller.rollouts.parts import Parts
from controller.rollouts.ranks import BusRanks, any_one
from controller.rollouts.results import Outcome, Rollout, RolloutTimeout
from controller.rollouts.staleness import Limits
from controller.rollouts.workflows import Accept
from zbus.errors import ConfigError
from zbus.retry import deadline_seconds
from zbus.rl.workflow import Workflow

if TYPE_CHECKING:
    from controller.controller import Controller
    from zbus.rl.rollout_engine import PauseMode

__all__ = ["AsyncRollouts", "Outcome", "Rollout", "RolloutController", "RolloutTimeout", "Workflow"]


class RolloutController:
    """Runs rollouts on the ranks of a role and hands out what came of them. Methods may be called from any thread.

    A rollout is one call of ``endpoint`` with an item of data or, with a ``workflow``, one episode: by name, of a
    workflow that the role declares and that runs at a worker; as an object with ``async def run_episode(engine,
    data)``, here, on one loop in one thread that this controller owns. Each call goes to the least loaded rank that is
    healthy and has current weights; if that rank is lost, a ``pure`` endpoint is asked of another one.

    Methods block. Those of ``aio`` are the same for coroutines: ``await rollout.aio.wait(4)``.

    Args:
        bus: A launched controller.
        role: Name of the rollout role.
        endpoint: What a rollout without a workflow calls.
        batch_size: Rollouts that are used up between two versions of the weights.
        max_concurrent: Most rollouts that run at once; 64, or what staleness allows at once if that is more,
            where not given.
        max_staleness: Most versions between the weights that began a rollout and those it is used to change; 0 is
            on-policy, None sets no limit.
        queue: Most rollouts that wait to be started, of ``submit`` and of ``prepare_batch`` each; more must wait.
        results: Most rollouts, of each, that run or are finished and not taken; beyond, none is started.
        attempts: How many ranks may be lost under one call before its rollout is LOST.
        ordered: Results come strictly in order of submission, whatever ends first.
        tolerate: How many failed or lost rollouts a batch of ``prepare_batch`` passes over before it raises.
        deadline: Of each call to a rank: seconds or text such as ``"2m"``; the endpoint's own where not given.
        rewards: Reward functions that a workflow here calls by ``engine.reward(name, ...)``: a function of a module or
            ``"file.py:function"``, by name. They run in processes of their own.
        reward_processes: How many.

    Attributes:
        bus: As given.
        group: The role.
        limits: What bounds rollouts.
        aio: The same operations to be awaited.

    Raises:
        AttributeError: The role has no such endpoint.
        ConfigError: The endpoint is not ``AnyOne``, or under these limits no rollout could ever run.
    """

    def __init__(
        self,
        bus: Controller,
        role: str = "rollout",
        endpoint: str = "generate",
        *,
        batch_size: int = 1,
        max_concurrent: int | None = None,
        max_staleness: int | None = None,
        queue: int = 1024,
        results: int = 4096,
        attempts: int = 3,
        ordered: bool = False,
        tolerate: int = 0,
        deadline: float | str | None = None,
        rewards: Mapping[str, Any] | None = None,
        reward_processes: int = 1,
    ) -> None:
        self.bus = bus
        self.group = bus.group(role)
        any_one(self.group, endpoint)
        if max_concurrent is None:
            max_concurrent = max(64, (max_staleness or 0) * batch_size + batch_size)
        self.limits = Limits(batch_size, max_concurrent, max_staleness, queue, results)
        seconds = None if deadline is None else deadline_seconds(deadline)
        self._parts = Parts(
            self.group,
            BusRanks(self.group, seconds),
            self.limits,
            endpoint,
            rewards=_pool(self.group.role, rewards, reward_processes),
            attempts=attempts,
            ordered=ordered,
            tolerate=tolerate,
        )
        self._loop, self._driver, self._operations = self._parts.loop, self._parts.driver, self._parts.operations
        self._traces = False
        self.aio = AsyncRollouts(self._parts)

    def __repr__(self) -> str:
        tasks = self._driver.tasks
        stale = len(self._driver.routes.stale())
        version = f"version {tasks.staleness.version}{f', {stale} ranks STALE' if stale else ''}"
        return f"<RolloutController {self.group!r}, {tasks.counts['submitted'] - tasks.taken} open, {version}>"

    # -- one by one ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        data: Any,
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        timeout: float | None = None,
    ) -> int:
        """Queue one rollout and return its number; blocks while the queue is full.

        Args:
            data: Of the rollout.
            workflow: See the class; None calls the endpoint.
            should_accept: Told what the workflow made; what it answers False to is REJECTED. Runs on the controller's
                loop: be quick. May be a coroutine function.
            timeout: Seconds to wait for room.

        Raises:
            RolloutTimeout: There was no room in time; nothing was submitted.
            ConfigError: No such workflow.
        """
        job = self._operations.job(workflow, should_accept)
        return self._loop.run(self._operations.submit(data, job, timeout), self._driver.withdraw)

    def wait(self, count: int, timeout: float | None = None) -> list[Rollout]:
        """Take ``count`` finished rollouts of ``submit``, however they ended, each once, the lowest number first.

        Args:
            count: How many.
            timeout: Seconds; None: until they are there, with a line in the log twice a minute on what is waited for.

        Raises:
            RolloutTimeout: Fewer finished in time; none was taken.
            ValueError: Fewer are open.
            ConfigError: More than the controller keeps.
        """
        taken = self._loop.run(self._operations.wait(count, timeout), self._driver.put_back)
        return self._parts.handed_out(taken)

    def wait_for_task(self, task: int, timeout: float | None = None) -> Rollout:
        """Take the rollout that ``submit`` gave this number, whatever its turn.

        Raises:
            RolloutTimeout: It did not finish in time.
            ConfigError: It was taken already, or never submitted.
        """
        taken = self._loop.run(self._operations.wait_for_task(task, timeout), self._driver.put_back)
        return self._parts.handed_out(taken)[0]

    def cancel(self, task: int | None = None) -> None:
        """Cancel one open rollout, which ends as CANCELLED; or all of them, which are forgotten."""
        self._loop.run(self._operations.cancel(task))

    # -- batches -------------------------------------------------------------------------------------------------------

    def rollout_batch(
        self,
        data: Iterable[Any],
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        *,
        timeout: float | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Rollout]:
        """Run one rollout per item and return them in the order of the items.

        They are waited for here and now, so they are held against concurrency and not against staleness: an evaluation
        disturbs no training.

        Args:
            data: Items; read at once.
            workflow: See the class; None calls the endpoint.
            should_accept: As in ``submit``.
            timeout: Seconds for all of them.
            errors: ``"raise"``: the first that fails or is lost raises, and the others are cancelled. ``"return"``: it
                is handed out with its error.

        Raises:
            RolloutError: One failed or was lost; the others that had finished are in its ``finished``.
            RolloutTimeout: Not all finished in time; what had not is cancelled.
        """
        job = self._operations.job(workflow, should_accept)
        return self._parts.counted(self._loop.run(self._operations.batch(list(data), job, timeout, errors)))

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        *,
        batch_size: int | None = None,
        batched: bool = False,
        timeout: float | None = None,
    ) -> list[Rollout]:
        """Take a batch of accepted rollouts, and keep as many in flight as staleness allows.

        Items are taken from ``dataloader`` as they are needed, on the calling thread; at its end it is iterated anew.
        An iterator cannot be: when it has ended, what is in flight is handed out, in the end fewer than asked for, then
        none. Another dataloader, workflow or filter than in the call before holds for what is submitted from now on;
        what is in flight goes on with what it began with, and is handed out first.

        Args:
            dataloader: One item of data per rollout.
            workflow: See the class; None calls the endpoint.
            should_accept: As in ``submit``. What is rejected, stale or cancelled is replaced and counted.
            batch_size: How many; the controller's own where not given.
            batched: Each element of ``dataloader`` is a list of items.
            timeout: Seconds.

        Raises:
            RolloutError: More rollouts failed or were lost than ``tolerate``; what is good waits for the next call.
            RolloutTimeout: Too few in time; what is good waits for the next call.
            ConfigError: A batch that staleness never lets become full, or a call in another thread is not over.
        """
        parts = self._parts
        size, job, left = (
            parts.batch_size(batch_size),
            parts.operations.job(workflow, should_accept),
            parts.countdown(timeout),
        )
        with parts.only_one():
            feed = parts.feed_of(dataloader, batched=batched)
            while True:
                prepare = self._operations.prepare(feed, job, size, left())
                found = self._loop.run(prepare, self._parts.put_back)
                if not isinstance(found, int):
                    return self._parts.handed_out(found)
                feed.fetch(found)

    # -- submission and generation -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no further rollout; those that run go on, and results are handed out as ever."""
        self._step(partial(self._driver.pause, paused=True))

    def resume(self) -> None:
        """Undo ``pause``."""
        self._step(partial(self._driver.pause, paused=False))

    def pause_generation(self, mode: PauseMode = "keep", timeout: float = CONTROL_S) -> dict[int, int]:
        """Have every rank make no further token, until ``continue_generation``; who does not answer is STALE.

        Args:
            mode: What becomes of running requests; see ``zbus.rl.rollout_engine.PauseMode``.
            timeout: Seconds that ranks have to answer.

        Returns:
            How many requests were running, by rank that answered.
        """
        return self._loop.run(self._operations.control.pause(mode, timeout))

    def continue_generation(self, timeout: float = CONTROL_S) -> dict[int, bool]:
        """Undo ``pause_generation``; a rank that does not answer, or refuses since its weights are torn, is STALE."""
        return self._loop.run(self._operations.control.go_on(timeout))

    @contextmanager
    def generation_paused(self, mode: PauseMode = "keep", timeout: float = CONTROL_S) -> Iterator[dict[int, int]]:
        """Pause generation for a block; it goes on whatever happens in there."""
        try:
            yield self.pause_generation(mode, timeout)
        finally:
            self.continue_generation(timeout)

    # -- versions ------------------------------------------------------------------------------------------------------

    def set_version(self, version: int, timeout: float = CONTROL_S) -> dict[int, str]:
        """Name the weights that the ranks have; the version counts from when they have acknowledged it.

        Args:
            version: Not below the one before.
            timeout: Seconds that ranks have to answer.

        Returns:
            Why a rank was left behind, by rank. Such a rank is STALE: it gets no work until ``mark_current``.

        Raises:
            ConfigError: An older version.
            NotExecuted: No rank acknowledged it, so it does not count.
        """
        return self._loop.run(self._operations.control.set_version(version, timeout))

    def get_version(self) -> int:
        """Return the version that counts."""
        return self._driver.tasks.staleness.version

    def advance(self, version: int) -> None:
        """Let a version count that ranks are known to have: those not marked STALE. Makes no call.

        Raises:
            ConfigError: An older version.
        """
        self._step(partial(self._driver.advance, version))

    def mark_stale(self, rank: int, why: str) -> None:
        """Give a rank no work: it missed an update of the weights. Its running calls go on."""
        self._step(partial(self._driver.mark_stale, rank, why))

    def mark_current(self, rank: int, version: int, incarnation: int = 0) -> None:
        """Give a rank work again: it has the weights of ``version``.

        Args:
            rank: Which.
            version: Of its weights.
            incarnation: The start of the rank that was given them; if it was replaced meanwhile, the rank stays STALE.
        """
        self._step(partial(self._driver.mark_current, rank, version, incarnation))

    def stale(self) -> dict[int, str]:
        """Return why ranks are STALE, by rank. A rank that was restarted since an update is."""
        self._step(self._driver.look)
        return self._driver.routes.stale()

    # -- recovery ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what another run needs to go on from here, as plain data.

        ``version``; ``epoch`` and ``position`` in the data of ``prepare_batch``; ``pending``: its items that were taken
        from the data and whose rollouts were not handed out.
        """
        return self._parts.standing(self._loop.run(self._operations.pending()))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: its version counts, with ``version`` batches used; pending items come first.

        Ranks are told nothing: give them their weights first. Before the first ``prepare_batch``.

        Raises:
            ConfigError: Rollouts were prepared already.
        """
        self._step(self._parts.restore(state))

    # -- the rest ------------------------------------------------------------------------------------------------------

    def export_stats(self, timeout: float = CONTROL_S) -> dict[str, float]:
        """Return statistics since the last time: this controller's own, and those of every rank, merged.

        Own ones are under ``rollout/``: how many ended how, seconds queued and run, staleness when handed out, what is
        open now, and how many ranks did not answer (``ranks_missing``).
        """
        answers = self._loop.run(self._operations.control.stats(timeout))
        return self._parts.counters.export(self._driver, answers)

    def config_perf_tracer(self, config: Mapping[str, Any] | None, role: str | None = None) -> None:
        """Configure tracing of this role's ranks; None switches off what was configured here, else calls nobody.

        Raises:
            ConfigError: No config, and not None.
        """
        given: Any = config
        if config is not None and not isinstance(given, Mapping):
            msg = f"{config!r} configures no tracing"
            raise ConfigError(msg, hint="give a mapping such as {'level': 'full'}, or None to switch it off")
        if config is None and not self._traces:
            return
        self.bus.config_perf_tracer(config, role or self.group.role)
        self._traces = config is not None

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # noqa: FBT001, FBT002  # founding spelling
        """Write traces now if ``step`` is due, or in any case with ``force``."""
        self.bus.save_perf_tracer(step, force)

    def destroy(self) -> None:
        """Cancel every rollout, end the thread and reward processes; who waits is told. Idempotent. The ranks stay.

        A workflow that blocks the loop, such as by ``time.sleep``, is named in the log and left behind.
        """
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _step(self, step: Callable[[], None]) -> None:
        self._loop.run(self._operations.do(step))


def _pool(role: str, rewards: Mapping[str, Any] | None, processes: int) -> Any:
    if not rewards:
        return None
    from zbus.rl.rewards import RewardPool

    return RewardPool(rewards, processes=processes, name=f"rollout controller of {role}")
