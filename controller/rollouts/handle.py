"""What a workflow that runs at the controller is given; see ``zbus.rl.EpisodeEngine``, which it fills."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from controller.group import Group
from controller.rollouts.driver import Driver, Work
from controller.rollouts.ranks import any_one
from zbus.errors import ConfigError
from zbus.rl.generation import Completion, Episode, Sampling
from zbus.rl.workflow import answers_of
from zbus.trace import trace_session_phase

if TYPE_CHECKING:
    from zbus.rl.rewards import RewardPool

__all__ = ["EngineHandle", "ask"]


class EngineHandle:
    """The endpoints of the role that any rank may answer, each as a coroutine function, and the rewards.

    A call goes to the least loaded rank with current weights, and to another one if that is lost before it answers.

    Args:
        driver: Makes the calls.
        group: The role.
        rewards: What ``reward`` calls; None: there are none.
        work: Whose calls they are.
    """

    def __init__(self, driver: Driver, group: Group, rewards: RewardPool | None, work: Work) -> None:
        self._driver = driver
        self._group = group
        self._rewards = rewards
        self._work = work

    @property
    def version(self) -> int:
        """Version of the weights that counts now."""
        return self._driver.tasks.staleness.version

    async def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Answer a prompt of token ids."""
        with trace_session_phase("generate"):
            return await self._generated(prompt, sampling or Sampling())

    async def samples(self, prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[Completion]:
        """Answer a prompt several times, at once; with a seed each answer has its own that follows from it."""
        with trace_session_phase("generate"):
            return await answers_of(self._generated, prompt, count, sampling)

    async def reward(self, name: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a reward function that was given to the controller, in another process.

        Raises:
            ConfigError: There is none of this name.
            RewardError: It hung, or its process died; the reward and the item are named.
            RemoteError: It raised; also an instance of the class that it raised.
        """
        if self._rewards is None:
            msg = f"there is no reward {name!r}: this controller was given none"
            raise ConfigError(msg, hint=f'RolloutController(..., rewards={{"{name}": "file.py:function"}})')
        with trace_session_phase("reward"):
            return await self._rewards.acall(name, *args, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return another endpoint as a coroutine function.

        Raises:
            AttributeError: The role has no such endpoint; the nearest name is suggested.
            ConfigError: It is one that all ranks answer.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        any_one(self._group, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            with trace_session_phase(name):
                return await ask(self._driver, self._work, name, args, kwargs)

        return call

    async def _generated(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        answer: Completion = await ask(self._driver, self._work, "generate", (prompt, sampling), {})
        return answer


async def ask(driver: Driver, work: Work, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make one call for a rollout and note which weights answered."""
    answer = await driver.call(work, endpoint, args, kwargs)
    value = answer.value
    if isinstance(value, Episode):
        work.saw(value.oldest, value.newest)
        return value.value
    if isinstance(value, Completion):
        versions = [span.version for span in value.versions] or [answer.version]
        work.saw(min(versions), max(versions))
    else:
        work.saw(answer.version, answer.version)
    return value
