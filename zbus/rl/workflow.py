"""What a workflow is, and what it gets to work with: the same at a worker and in the controller's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from zbus.rl.generation import Completion, Sampling
from zbus.rl.seeds import sub_seed

__all__ = ["EpisodeEngine", "Workflow", "answers_of", "samplings_of"]


class EpisodeEngine(Protocol):
    """Handed to ``run_episode``; belongs to that episode, on the event loop that it runs on."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is made with."""
        ...

    async def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Answer a prompt of token ids."""
        ...

    async def samples(self, prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[Completion]:
        """Answer a prompt several times, at once; with a seed each answer has its own that follows from it."""
        ...

    async def reward(self, name: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a reward function of the role, in another process.

        Raises:
            RewardError: It hung, or its process died; the reward and the item are named.
            RemoteError: It raised; also an instance of the class that it raised.
        """
        ...


@runtime_checkable
class Workflow(Protocol):
    """What makes trajectories out of one item of data. One instance runs many episodes at once."""

    async def run_episode(self, engine: EpisodeEngine, data: Any) -> Any:
        """Return a trajectory (a dict of arrays and numbers), a list of them, or None to reject the episode."""
        ...


def samplings_of(count: int, sampling: Sampling | None) -> list[Sampling]:
    """Return how each of several answers to one prompt is sampled; of a seed each has its own that follows from it."""
    one = sampling or Sampling()
    if one.seed is None:
        return [one] * count
    return [replace(one, seed=sub_seed(one.seed, number)) for number in range(count)]


async def answers_of(
    generate: Callable[[Sequence[int], Sampling], Awaitable[Completion]],
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None,
) -> list[Completion]:
    """Answer a prompt several times, at once: what ``EpisodeEngine.samples`` does, wherever it generates.

    The first error is raised as it is, once the other answers are given up.
    """
    import asyncio

    answers = [asyncio.ensure_future(generate(prompt, each)) for each in samplings_of(count, sampling)]
    try:
        return await asyncio.gather(*answers)
    except BaseException:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        raise
