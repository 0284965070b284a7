"""The engine that the ranks of ``actor`` host."""

from __future__ import annotations

from pathlib import Path

import zbus
from data import Batch
from zbus import Everywhere, RankZero, Same, Split

__all__ = ["SFT"]


class SFT(zbus.Engine):
    """Supervised training of the model, data-parallel over the mesh axis ``dp``.

    Args:
        seed: Of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def setup(self, ctx: zbus.Context) -> None:
        """Join the process group and build the model."""
        ctx.init_torch("gloo")
        from training import (
            Trainer,
        )  # after the group exists, and so that the driver can import this file without torch

        self.trainer = Trainer(seed=self.seed)

    @zbus.endpoint(Split("dp", by="tokens"), effect="once")
    def train(self, batch: Batch, step: int, lr: float) -> dict[str, float]:
        """Take one optimizer step; each rank reports ``loss_sum`` and ``tokens`` of its share."""
        return self.trainer.train(batch, step, lr)

    @zbus.endpoint(Split("dp", by="tokens"), effect="pure")
    def evaluate(self, batch: Batch, decode: bool = True) -> dict[str, float]:  # noqa: FBT001, FBT002  # as it is called
        """Score a share of held-out words: ``loss_sum``, ``tokens``, ``words`` and, decoded greedily, ``exact``."""
        return self.trainer.evaluate(batch, decode=decode)

    @zbus.endpoint(RankZero(), effect="idempotent")
    def save(self, path: str) -> int:
        """Write a checkpoint, whole or not at all, and return its step."""
        self.trainer.save(Path(path))
        return self.trainer.step

    @zbus.endpoint(Everywhere(), collect=Same(), effect="idempotent")
    def load(self, path: str) -> int:
        """Take over a checkpoint on every rank and return its step."""
        return self.trainer.load(Path(path))
