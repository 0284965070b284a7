"""The loss of ``grpo.yaml``: the usual one, with a price on leaving the reference."""

from __future__ import annotations

from workers.engines.losses import GRPO

__all__ = ["grpo"]

grpo = GRPO(clip=0.2, clip_high=0.28, kl=0.02)
