"""A job in two parts, as reinforcement is trained: steps on given rows, then on rows that were answered meanwhile.

``params``: ``steps`` in all, ``warm`` of them on given rows, ``batch`` rows each; ``forget`` is a planted fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zbus
from controller.metrics import open_metrics
from controller.recover import Recover, RecoverState
from controller.rollout import RolloutController
from controller.train import TrainController

if TYPE_CHECKING:
    from controller.run import Run

__all__ = ["PROMPTS", "given", "main"]


def written(number: int) -> list[int]:
    """Return four tokens of a small vocabulary for a number, for each another four."""
    return [4 + number // 60**place % 60 for place in range(4)]


PROMPTS = [written(100_000 + number) for number in range(500)]
"""Asked in this order; more than any test uses up."""


def given(step: int, batch: int) -> list[list[int]]:
    """Return the rows of a step on given rows: what is asked, and one token of an answer."""
    return [[*written(step * 1000 + row), 7] for row in range(batch)]


def main(run: Run) -> dict[str, Any]:
    """Take the steps that are left."""
    params = run.config
    steps, warm, batch = int(params["steps"]), int(params["warm"]), int(params["batch"])
    forget = params.get("forget", "")
    actor = TrainController(run.bus, "actor")
    actor.initialize()
    with (
        open_metrics(run.trial_dir, ["jsonl"]) as metrics,
        RolloutController(run.bus, "rollout", batch_size=batch, max_staleness=2) as rollout,
    ):
        recover = Recover.of(run, engines={"actor": actor})
        state = recover.start(run.resume)
        metrics.resume(state.metrics_step)
        if state.step > warm and forget != "pending":
            rollout.restore(state.extras["rollout"])
        first = 0 if forget == "position" and state.step else state.step
        rollout.set_version(state.version)
        for step in range(first, steps):
            rows = given(step, batch) if step < warm else answered(rollout)
            masks = [[0] * (len(row) - 1) + [1] for row in rows]
            columns = {"input_ids": zbus.Ragged.of(rows), "loss_mask": zbus.Ragged.of(masks)}
            report = actor.train_batch(columns, "sft")
            if step >= warm:
                rollout.set_version(step - warm + 1)
            if forget != "position":
                metrics.log(step, {"loss": report["loss"]})
            now = RecoverState(
                step=step + 1,
                version=rollout.get_version(),
                metrics_step=metrics.last_step,
                extras={"rollout": rollout.state()},
            )
            recover.step(now, now=step + 1 == steps)
    return {"steps": steps, "resumed_from": state.step}


def answered(rollout: RolloutController) -> list[list[int]]:
    """Return a batch of prompts with their answers."""
    return [[*one.data, *one.value.ids.tolist()] for one in rollout.prepare_batch(PROMPTS)]
