"""A generation engine without a model: it makes tokens that say where and by which version they were made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zbus
from zbus import AnyOne, PerRank
from zbus.engine import Everywhere
from zbus.rl import Completion, RolloutEngine, Sampling, VersionSpan


async def until(done: Callable[[], bool]) -> None:
    """Look again and again until ``done()``; the deadline is that of whoever waits for it."""
    while True:
        if done():
            return
        await asyncio.sleep(0.001)


class Speller(RolloutEngine):
    """Each token is the version that made it. Episodes do what their data says."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.sick = False
        self.running = 0
        self.counted = 0

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def be_sick(self, sick: bool = True) -> int:
        """Fail whatever control call comes from now on; return the pid."""
        self.sick = sick
        return os.getpid()

    @zbus.endpoint(AnyOne(), effect="once", lane="once", concurrency=8)
    async def once(self, data: Any) -> int:
        """Write down that it ran; it may not run twice."""
        return await self._act(data)

    async def do_generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        self.running += 1
        try:
            made: list[int] = []
            while len(made) < sampling.max_tokens:
                await until(lambda: not self._paused)
                made.append(self.version)
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        spans, start = [], 0
        for end in range(1, len(made) + 1):
            if end == len(made) or made[end] != made[start]:
                spans.append(VersionSpan(made[start], start, end))
                start = end
        ids = np.array(made, np.int64)
        return Completion(ids, np.zeros(len(made), np.float32), "length", tuple(spans))

    async def do_episode(self, workflow: str, data: Any) -> Any:
        if workflow == "reject":
            return None
        if workflow == "fail":
            raise ValueError(f"no episode of {data!r}")
        return {"data": data, "rank": await self._act(data), "version": self.version}

    async def _act(self, data: Any) -> int:
        """Note the beginning in a file, wait for another file, where the data says so."""
        steps = data if isinstance(data, dict) else {}
        if "began" in steps:
            self._note(steps["began"])
        if "until" in steps:
            await until(Path(steps["until"]).exists)
        self.counted += 1
        return self.ctx.rank

    def _note(self, path: str) -> None:
        with Path(path).open("a") as file:
            file.write(f"{self.ctx.rank} {os.getpid()}\n")

    def do_pause(self, mode: str) -> int:
        self._check()
        return self.running

    def do_resume(self) -> None:
        self._check()

    def do_version(self, version: int) -> None:
        self._check()

    def do_stats(self) -> dict[str, Any]:
        from zbus.rl.stats import Stats

        counted, self.counted = self.counted, 0
        stats = Stats()
        stats.scalar(episodes=counted, reduce="sum")
        return stats.export()

    def _check(self) -> None:
        if self.sick:
            raise RuntimeError("this rank is sick")
