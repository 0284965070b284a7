"""A job without torch whose every step is written down: what learns and what answers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ledger import Recorded
from zbus.rl import Completion, RolloutEngine, Sampling, TrainEngine, VersionSpan

__all__ = ["Guesser", "Learner"]


class _Plain(TrainEngine):
    """A model of four numbers; each step depends on all steps before it and on the order of its rows."""

    def __init__(self, step_s: float = 0.03) -> None:
        super().__init__()
        self.step_s = step_s
        self.rank = 0
        self.weights = np.zeros(4)

    def setup(self, ctx: Any) -> None:
        self.rank = ctx.rank

    def do_create_process_group(self, backend: str, timeout_s: float) -> dict[str, int]:
        return {"dp": self.rank}

    def do_initialize(self) -> dict[str, Any]:
        self.weights = np.ones(4)
        return {"parameters": 4}

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        threading.Event().wait(self.step_s * random.uniform(0.5, 1.5))  # it works
        for row in batch["input_ids"]:
            self.weights = np.sin(self.weights + np.resize(row, 4))
        return {"loss": float(self.weights.sum())}

    def do_save(self, path: str, kind: str) -> dict[str, Any]:
        Path(path).mkdir(parents=True, exist_ok=True)
        np.save(Path(path) / f"weights.{self.rank}.npy", self.weights)
        return {}

    def do_load(self, path: str, kind: str) -> dict[str, Any]:
        self.weights = np.load(Path(path) / f"weights.{self.rank}.npy")
        return {}


class Learner(Recorded, _Plain):
    """The same, its steps written down."""


class Guesser(RolloutEngine):
    """Answers each prompt after a moment with one token."""

    async def do_generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        version = self.version
        await asyncio.sleep(random.uniform(0, 0.04))  # it works
        ids = np.array([version], np.int64)
        return Completion(ids, np.zeros(1, np.float32), "stop", (VersionSpan(version, 0, 1),))

    def do_version(self, version: int) -> None:
        pass

    def do_state(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0}
