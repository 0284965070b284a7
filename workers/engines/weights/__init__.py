"""The torch side of weight updates: what a training engine publishes, and how a generation engine takes it over.

``Publisher`` and ``PublishesWeights`` are for training engines, ``Receiver`` and ``ReceivesWeights`` for engines that
generate. What travels is described by ``zbus.rl.weights``.
"""

from __future__ import annotations

from workers.engines.weights.publisher import Publisher, PublishesWeights
from workers.engines.weights.receiver import Receiver, ReceivesWeights

__all__ = ["Publisher", "PublishesWeights", "Receiver", "ReceivesWeights"]
