"""Engines of ``weights.py``: a model of so many megabytes, trained and generated with by nobody."""

from __future__ import annotations

from typing import Any

import torch

import zbus
from workers.engines.weights import Publisher, PublishesWeights, Receiver, ReceivesWeights
from zbus.engine import Everywhere, PerRank
from zbus.rl import RolloutEngine, TrainEngine

SIDE = 1024


def tensors_of(megabytes: int, value: float) -> dict[str, torch.Tensor]:
    """Return tensors of 4 MiB each."""
    return {
        f"layer.{number}": torch.full((SIDE, SIDE), value) for number in range(round(megabytes * 1e6 / SIDE**2 / 4))
    }


class Trainer(PublishesWeights, TrainEngine):
    """Has weights to give."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.tensors = tensors_of(megabytes, 1.0)

    def setup(self, ctx: zbus.Context) -> None:
        """Make what publishes them."""
        self.publisher = Publisher(ctx, lambda: self.tensors)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def step(self) -> None:
        """Change all of them."""
        for tensor in self.tensors.values():
            tensor.add_(1.0)


class Generator(ReceivesWeights, RolloutEngine):
    """Has weights to take."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.tensors = tensors_of(megabytes, 0.0)

    def setup(self, ctx: zbus.Context) -> None:
        """Make what takes them."""
        self.receiver = Receiver(lambda: self.tensors)

    def do_pause(self, mode: Any) -> int:
        """Nothing runs."""
        return 0

    def do_resume(self) -> None:
        """Nothing goes on."""

    def do_abort(self) -> int:
        """Nothing ends."""
        return 0
