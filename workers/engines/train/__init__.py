"""The torch training engine: DDP, FSDP2 and tensor parallelism behind ``zbus.rl.TrainEngine``. See ``engine``."""

from __future__ import annotations

from workers.engines.train.engine import TorchTrainEngine

__all__ = ["TorchTrainEngine"]
