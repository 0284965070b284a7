"""Group relative policy optimisation: answers come in while the last batch is trained on, at most so many versions old.

The method is Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
section 4.1. Episodes begun before an update go on with the new weights; each token's log-probability is that of the
weights that made it, so the ratio of the loss is right whatever the age of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.rollout import Rollout, RolloutController, Workflow
from controller.train import TrainController
from controller.weights import WeightSync
from zbus import trace
from zbus.errors import ConfigError
from zbus.rl.advantages import group_advantages
from zbus.rl.batches import concat

__all__ = ["GRPOStep", "grpo", "grpo_batch"]

Judge = Callable[[Mapping[str, Any]], npt.ArrayLike]
"""Tells what each row of an episode is worth."""


@dataclass(frozen=True, slots=True)
class GRPOStep:
    """One step.

    Attributes:
        number: From 0.
        report: What the ranks that train report of it, merged.
        rows: The batch that it was taken on, advantages and all.
        staleness: Versions between the weights that began the episodes and those that were changed: mean and most.
        waited_s: Seconds in which training waited for answers.
        train_s: Seconds of the optimizer step.
        update_s: Seconds in which the new weights went to the ranks that generate.
    """

    number: int
    report: Mapping[str, float]
    rows: Mapping[str, Any]
    staleness: tuple[float, int]
    waited_s: float
    train_s: float
    update_s: float


def reward_of(rows: Mapping[str, Any]) -> npt.ArrayLike:
    """Return the column ``reward``."""
    worth: npt.ArrayLike = rows["reward"]
    return worth


def grpo_batch(
    episodes: Sequence[Mapping[str, Any]], *, judge: Judge = reward_of, scale: bool = True
) -> dict[str, Any]:
    """Return the rows of all episodes with their ``advantages``, each among the rows of its own episode.

    Args:
        episodes: Batches of columns, one row per answer to the same prompt.
        judge: Tells what each row is worth.
        scale: As in ``group_advantages``.
    """
    worth = [np.asarray(judge(episode), np.float64) for episode in episodes]
    group = np.repeat(np.arange(len(worth)), [len(values) for values in worth])
    rows = concat(episodes)
    rows["advantages"] = group_advantages(np.concatenate(worth), group, scale=scale)
    return rows


def grpo(
    train: TrainController,
    rollout: RolloutController,
    sync: WeightSync,
    prompts: Iterable[Any],
    *,
    workflow: str | Workflow,
    steps: int,
    first: int = 0,
    judge: Judge = reward_of,
    prepare: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    loss: str = "grpo",
) -> Iterator[GRPOStep]:
    """Take steps ``first`` to ``steps`` and yield after each, its weights already with the ranks that generate.

    Each is also a step of the learning-rate schedule.

    Args:
        train: Initialised.
        rollout: Its ``batch_size`` is the number of episodes of a step, its ``max_staleness`` how far generation runs
            ahead: 0 waits for each update.
        sync: Takes the weights from one to the other.
        prompts: One item per episode; iterated anew at its end.
        workflow: Makes a batch of rows of an item: ``input_ids``, ``loss_mask``, ``logprobs`` and what ``judge`` reads.
        steps: Steps in all.
        first: How many of them were taken already.
        judge: Tells what each row is worth.
        prepare: Makes the batch of a step out of its rows, such as with columns that another role computes.
        loss: Name of the loss.

    Raises:
        ConfigError: ``prompts`` came to an end.
    """
    for number in range(first, steps):
        began = time.monotonic()
        with trace.span("wait for rollouts", "sync", step=number):
            rollouts = rollout.prepare_batch(prompts, workflow)
        if not rollouts:
            msg = f"the prompts ended before step {number} of {steps}"
            raise ConfigError(msg, hint="pass what can be iterated anew, such as a list, or fewer steps")
        rows = prepare(grpo_batch([one.value for one in rollouts], judge=judge))
        ready = time.monotonic()
        version = rollout.get_version()
        with trace.span("train", "compute", step=number):
            report = train.train_batch(rows, loss)
            train.lr_scheduler_step()
        trained = time.monotonic()
        with trace.span("update weights", "comm", step=number):
            sync.update()
        updated = time.monotonic()
        trace.mark_step(number)
        yield GRPOStep(
            number, report, rows, _ages(rollouts, version), ready - began, trained - ready, updated - trained
        )


def _ages(rollouts: Sequence[Rollout], version: int) -> tuple[float, int]:
    ages = [version - one.oldest for one in rollouts if one.oldest is not None]
    return (sum(ages) / len(ages), max(ages)) if ages else (0.0, 0)
