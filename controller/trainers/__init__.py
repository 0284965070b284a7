"""Training loops as short as the method they are named after: read them, use them, or copy and change them.

Each is a generator that takes one optimizer step and yields what came of it, so that the loop around it (metrics,
checkpoints, when to stop) stays the user's own.
"""

from __future__ import annotations

from controller.trainers.grpo import GRPOStep, grpo, grpo_batch
from controller.trainers.sft import SFTStep, sft

__all__ = ["GRPOStep", "SFTStep", "grpo", "grpo_batch", "sft"]
