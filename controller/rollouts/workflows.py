"""What a rollout does: one call of an endpoint, an episode of a workflow at a worker, or one of a workflow here."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from controller.group import Group
from controller.rollouts.driver import Driver, Job, Work
from controller.rollouts.handle import EngineHandle, ask
from controller.rollouts.ranks import any_one
from zbus.errors import ConfigError
from zbus.rl.workflow import Workflow
from zbus.trace import register_session, set_session_id, set_task_id, trace_session_phase

if TYPE_CHECKING:
    from zbus.rl.rewards import RewardPool

__all__ = ["Accept", "call_job", "job_of"]

Accept = Callable[[Any], bool | Awaitable[bool]]
"""Looks at what a workflow made and tells whether it is wanted. Runs on the controller's own loop: be quick."""

EPISODE: Final = "run_episode"
"""The endpoint that runs a workflow at a worker."""


def call_job(endpoint: str, accept: Accept | None = None) -> Job:
    """Return the job of one call of an endpoint with the data as its argument."""

    async def run(driver: Driver, work: Work) -> bool:
        with _Session(work), trace_session_phase(endpoint):
            work.value = await ask(driver, work, endpoint, (work.data,), {})
        return True if accept is None else await _wanted(accept, work.value)

    return run


def job_of(workflow: Any, group: Group, rewards: RewardPool | None, accept: Accept | None = None) -> Job:
    """Return the job of one episode.

    Args:
        workflow: Name of a workflow that the role declares, which runs at a worker; or an object, which runs here.
        group: The role.
        rewards: What a workflow here may call by ``engine.reward``.
        accept: Filters what it makes.

    Raises:
        ConfigError: It is neither, or the role's engine runs no workflows.
    """
    if isinstance(workflow, str):
        if EPISODE not in group.endpoints:
            msg = f"the engine of role {group.role!r} has no `{EPISODE}`, so it runs no workflow {workflow!r}"
            raise ConfigError(msg, hint="subclass zbus.rl.RolloutEngine, or give the workflow as an object")
        any_one(group, EPISODE)
        return _episode_there(workflow, accept)
    if isinstance(workflow, type) or not inspect.iscoroutinefunction(getattr(workflow, EPISODE, None)):
        kind = f"class {workflow.__name__}" if isinstance(workflow, type) else repr(workflow)
        msg = f"{kind} is no workflow"
        raise ConfigError(msg, hint=f"give an object with `async def {EPISODE}(self, engine, data)`, or a name")
    return _episode_here(workflow, group, rewards, accept)


def _episode_there(workflow: str, accept: Accept | None) -> Job:
    async def run(driver: Driver, work: Work) -> bool:
        with _Session(work), trace_session_phase("episode"):
            work.value = await ask(driver, work, EPISODE, (workflow, work.data), {})
        return await _judged(work, accept)

    return run


def _episode_here(workflow: Workflow, group: Group, rewards: RewardPool | None, accept: Accept | None) -> Job:
    async def run(driver: Driver, work: Work) -> bool:
        with _Session(work):
            work.value = await workflow.run_episode(EngineHandle(driver, group, rewards, work), work.data)
        return await _judged(work, accept)

    return run


async def _judged(work: Work, accept: Accept | None) -> bool:
    if work.value is None:
        return False
    return True if accept is None else await _wanted(accept, work.value)


async def _wanted(accept: Accept, value: Any) -> bool:
    answer = accept(value)
    return bool(await answer if inspect.isawaitable(answer) else answer)


class _Session:
    """Make a rollout's task in the trace the current one, with a session of its own."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        set_task_id(self._work.trace)
        set_session_id(None if self._work.trace is None else register_session(self._work.trace))

    def __exit__(self, *_: object) -> None:
        pass  # it is finished with its task, whose outcome is not known yet; the context ends with the coroutine
