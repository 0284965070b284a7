"""The training engine on torch, its steps written down."""

from __future__ import annotations

from ledger import Recorded
from workers.engines.train import TorchTrainEngine

__all__ = ["TorchLearner"]


class TorchLearner(Recorded, TorchTrainEngine):
    """As it is, with a ledger."""
