"""The engines of ``rl.py``: those of the product, which also tell what of their main thread was training."""

from __future__ import annotations

import os
import time
from typing import Any

import zbus
from workers.engines.generate import TorchRolloutEngine
from workers.engines.train import TorchTrainEngine
from zbus.engine import Everywhere, PerRank

__all__ = ["Rollout", "Train"]


class Train(TorchTrainEngine):
    """Notes the CPU time of its steps."""

    def __init__(self, model: Any = None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.trained = 0.0

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Train."""
        began = time.thread_time()
        try:
            return super().do_train_batch(batch, loss, options)
        finally:
            self.trained += time.thread_time() - began

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def cpu(self) -> tuple[int, float]:
        """Return this process's pid and the CPU seconds of training on its main thread."""
        return os.getpid(), self.trained


class Rollout(TorchRolloutEngine):
    """Does not use its main thread to compute."""

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def cpu(self) -> tuple[int, float]:
        """Return this process's pid and 0."""
        return os.getpid(), 0.0
