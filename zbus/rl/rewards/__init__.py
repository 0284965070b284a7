"""Reward functions in processes of their own: one that hangs or crashes takes nothing along."""

from __future__ import annotations

from zbus.rl.rewards.pool import RewardPool

__all__ = ["RewardPool"]
