"""The awaited face of a rollout controller: the same operations for coroutines of any loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from controller.rollouts.operations import CONTROL_S
from controller.rollouts.parts import Parts
from controller.rollouts.results import Rollout
from controller.rollouts.workflows import Accept
from zbus.rl.workflow import Workflow

if TYPE_CHECKING:
    from zbus.rl.rollout_engine import PauseMode

__all__ = ["AsyncRollouts"]


class AsyncRollouts:
    """``RolloutController.aio``: each method as the blocking one of the same name, to be awaited on any running loop.

    Cancelling an await ends the wait and nothing else: what it would have taken stays for the next one. Only
    ``rollout_batch`` cancels its rollouts and ``submit`` withdraws the one it had queued, since nobody else could take
    them.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def submit(
        self,
        data: Any,
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the blocking twin's parameter
    ) -> int:
        """As ``RolloutController.submit``; a cancelled await submits nothing."""
        parts = self._parts
        job = parts.operations.job(workflow, should_accept)
        return await parts.loop.aio(parts.operations.submit(data, job, timeout), parts.driver.withdraw)

    async def wait(self, count: int, timeout: float | None = None) -> list[Rollout]:  # noqa: ASYNC109  # as above
        """As ``RolloutController.wait``."""
        parts = self._parts
        return parts.handed_out(await parts.loop.aio(parts.operations.wait(count, timeout), parts.driver.put_back))

    async def wait_for_task(self, task: int, timeout: float | None = None) -> Rollout:  # noqa: ASYNC109  # as above
        """As ``RolloutController.wait_for_task``."""
        parts = self._parts
        taken = await parts.loop.aio(parts.operations.wait_for_task(task, timeout), parts.driver.put_back)
        return parts.handed_out(taken)[0]

    async def cancel(self, task: int | None = None) -> None:
        """As ``RolloutController.cancel``."""
        await self._parts.loop.aio(self._parts.operations.cancel(task))

    async def rollout_batch(
        self,
        data: Iterable[Any],
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # as above
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Rollout]:
        """As ``RolloutController.rollout_batch``."""
        parts = self._parts
        job = parts.operations.job(workflow, should_accept)
        return parts.counted(await parts.loop.aio(parts.operations.batch(list(data), job, timeout, errors)))

    async def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: str | Workflow | None = None,
        should_accept: Accept | None = None,
        *,
        batch_size: int | None = None,
        batched: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109  # as above
    ) -> list[Rollout]:
        """As ``RolloutController.prepare_batch``; items are taken from ``dataloader`` on the running loop."""
        parts = self._parts
        size, job = parts.batch_size(batch_size), parts.operations.job(workflow, should_accept)
        left = parts.countdown(timeout)
        with parts.only_one():
            feed = parts.feed_of(dataloader, batched=batched)
            while True:
                found = await parts.loop.aio(parts.operations.prepare(feed, job, size, left()), parts.put_back)
                if not isinstance(found, int):
                    return parts.handed_out(found)
                feed.fetch(found)

    async def pause(self) -> None:
        """As ``RolloutController.pause``."""
        await self._parts.loop.aio(self._parts.operations.do(partial(self._parts.driver.pause, paused=True)))

    async def resume(self) -> None:
        """As ``RolloutController.resume``."""
        await self._parts.loop.aio(self._parts.operations.do(partial(self._parts.driver.pause, paused=False)))

    async def pause_generation(
        self,
        mode: PauseMode = "keep",
        timeout: float = CONTROL_S,  # noqa: ASYNC109  # as above
    ) -> dict[int, int]:
        """As ``RolloutController.pause_generation``."""
        return await self._parts.loop.aio(self._parts.operations.control.pause(mode, timeout))

    async def continue_generation(self, timeout: float = CONTROL_S) -> dict[int, bool]:  # noqa: ASYNC109  # as above
        """As ``RolloutController.continue_generation``."""
        return await self._parts.loop.aio(self._parts.operations.control.go_on(timeout))

    @asynccontextmanager
    async def generation_paused(
        self,
        mode: PauseMode = "keep",
        timeout: float = CONTROL_S,  # noqa: ASYNC109  # as above
    ) -> AsyncIterator[dict[int, int]]:
        """As ``RolloutController.generation_paused``."""
        try:
            yield await self.pause_generation(mode, timeout)
        finally:
            await self.continue_generation(timeout)

    async def set_version(self, version: int, timeout: float = CONTROL_S) -> dict[int, str]:  # noqa: ASYNC109  # as above
        """As ``RolloutController.set_version``."""
        return await self._parts.loop.aio(self._parts.operations.control.set_version(version, timeout))

    async def export_stats(self, timeout: float = CONTROL_S) -> dict[str, float]:  # noqa: ASYNC109  # as above
        """As ``RolloutController.export_stats``."""
        answers = await self._parts.loop.aio(self._parts.operations.control.stats(timeout))
        return self._parts.counters.export(self._parts.driver, answers)
