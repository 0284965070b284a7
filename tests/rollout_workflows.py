"""Workflows for the tests of episodes at a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from zbus.rl import EpisodeEngine, Sampling


class Distance:
    """Answers a prompt several times and scores each answer in a reward process."""

    def __init__(self, samples: int = 2) -> None:
        self.samples = samples

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one trajectory per answer."""
        sampling = Sampling(max_tokens=6, seed=data.get("seed"))
        answers = await engine.samples(data["prompt"], self.samples, sampling)
        scores = await asyncio.gather(*(engine.reward("distance", answer.ids, data["truth"]) for answer in answers))
        return [
            {"ids": answer.ids, "logprobs": answer.logprobs, "reward": np.float32(-score), "version": engine.version}
            for answer, score in zip(answers, scores, strict=True)
        ]


async def one(engine: EpisodeEngine, data: Any) -> dict[str, Any]:
    """Be a function."""
    answer = await engine.generate(data, Sampling(max_tokens=4, temperature=0))
    return {"ids": answer.ids}


async def rejecting(engine: EpisodeEngine, data: Any) -> None:
    """Find nothing to learn."""
    await engine.generate([1])


async def raising(engine: EpisodeEngine, data: Any) -> None:
    """Have a fault."""
    raise KeyError(data)


async def too_long(engine: EpisodeEngine, data: Any) -> None:
    """Ask for what there is no room for."""
    await engine.samples([1] * 64, 3)


async def hanging_reward(engine: EpisodeEngine, data: Any) -> dict[str, Any]:
    """Use a reward that never returns."""
    return {"reward": await engine.reward("hang", timeout_s=data)}


async def forgetful(engine: EpisodeEngine, data: Any) -> Any:
    """Return what is no trajectory."""
    return data


def sync(engine: EpisodeEngine, data: Any) -> None:
    """Be no coroutine."""


made = Distance(samples=3)
