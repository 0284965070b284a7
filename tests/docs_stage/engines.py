"""The engine that the code blocks of the documentation call."""

from __future__ import annotations

import time

import zbus


class Actor(zbus.Engine):
    """Has every method that a page calls on ``actor``."""

    @zbus.endpoint(effect="once")
    def zero_grad(self) -> None:
        """Do nothing."""

    @zbus.endpoint(zbus.Split("dp"), collect=zbus.PerRank(), effect="once")
    def train(self, batch: list[int], step: int) -> dict[str, float]:
        """Take a moment."""
        time.sleep(0.002)
        with zbus.span("forward", category="compute", step=step):
            return {"items": float(len(batch)), "step": float(step)}
