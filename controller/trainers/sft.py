"""Supervised training: a batch, a step, a step of the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controller.train import TrainController

__all__ = ["SFTStep", "sft"]


@dataclass(frozen=True, slots=True)
class SFTStep:
    """One step.

    Attributes:
        number: From 0.
        report: What the ranks report of it, merged.
        train_s: Seconds it took.
    """

    number: int
    report: Mapping[str, float]
    train_s: float


def sft(
    train: TrainController,
    batch: Callable[[int], Mapping[str, Any]],
    *,
    steps: int,
    first: int = 0,
    loss: str = "sft",
) -> Iterator[SFTStep]:
    """Take steps ``first`` to ``steps`` and yield after each.

    Args:
        train: Initialised.
        batch: Gives the batch of a step, as ``train_batch`` takes it: a function of the step, so a resumed run repeats.
        steps: Steps in all.
        first: How many of them were taken already.
        loss: Name of the loss.
    """
    for number in range(first, steps):
        began = time.monotonic()
        report = train.train_batch(batch(number), loss)
        train.lr_scheduler_step()
        yield SFTStep(number, report, time.monotonic() - began)
