"""The engine that the code blocks of the documentation call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import zbus
from zbus.rl import Completion, RolloutEngine, Sampling, VersionSpan


class Actor(zbus.Engine):
    """Has every method that a page calls on ``actor``."""

    @zbus.endpoint(effect="once")
    def zero_grad(self) -> None:
        """Do nothing."""

    @zbus.endpoint(zbus.Split("dp"), collect=zbus.PerRank(), effect="once")
    def train(self, batch: list[int], step: int) -> dict[str, float]:
        """Take a moment."""
        time.sleep(0.002)
        with zbus.span("forward", category="compute", step=step):
            return {"items": float(len(batch)), "step": float(step)}


class Generator(RolloutEngine):
    """Generates without a model: the same token again and again."""

    async def do_generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Return the last token of the prompt, as often as asked."""
        count = sampling.max_tokens
        ids = np.full(count, prompt[-1], np.int64)
        return Completion(ids, np.zeros(count, np.float32), "length", (VersionSpan(self.version, 0, count),))

    async def do_episode(self, workflow: str, data: Sequence[int]) -> dict[str, Any]:
        """Answer the prompt that is given as data."""
        return {"ids": (await self.do_generate(data, Sampling(max_tokens=4))).ids}
