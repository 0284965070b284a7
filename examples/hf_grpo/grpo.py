"""GRPO of a Hugging Face model with a reference: what ``zbus-controller run grpo.yaml`` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.metrics import open_metrics
from controller.recover import Recover, RecoverState
from controller.rollout import RolloutController
from controller.train import TrainController
from controller.trainers import grpo
from controller.weights import WeightSync

if TYPE_CHECKING:
    from controller.run import Run

__all__ = ["main"]


def main(run: Run) -> dict[str, float]:
    """Train for ``params.steps`` steps.

    Returns:
        Mean reward of the first and of the last ten steps.
    """
    params = run.config
    lines = Path(params["questions"]).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines if line.strip()]
    actor, ref = TrainController(run.bus, "actor"), TrainController(run.bus, "ref")
    actor.initialize()
    ref.initialize()
    with (
        RolloutController(
            run.bus, "rollout", batch_size=params["batch"], max_staleness=params["max_staleness"]
        ) as rollout,
        open_metrics(run.trial_dir, ["jsonl"]) as metrics,
        run.table(["reward", "kl", "staleness", "loss"], params["steps"], "grpo") as table,
    ):
        for controller in (actor, ref, rollout):
            controller.config_perf_tracer(params["perf_tracer"])
        sync = WeightSync(actor, rollout, path=params["weights"], directory=run.trial_dir.checkpoints / "weights")
        recover = Recover.of(run, engines={"actor": actor}, every_steps=params["checkpoint_every"])
        state = recover.start(run.resume, RecoverState())
        metrics.resume(state.metrics_step)
        if state.step:
            rollout.restore(state.extras["rollout"])
        sync.update(version=state.version)

        def refer(rows: dict[str, Any]) -> dict[str, Any]:
            """Add what the reference says of each token."""
            return {**rows, "ref_logprobs": ref.forward_batch({"input_ids": rows["input_ids"]}, "logprobs")}

        rewards = []
        steps = grpo(
            actor, rollout, sync, questions, workflow="question", prepare=refer, first=state.step, steps=params["steps"]
        )
        for done in steps:
            figures = {
                "reward": float(np.mean(done.rows["reward"])),
                "kl": done.report["kl"],
                "staleness": done.staleness[0],
                "loss": done.report["loss"],
            }
            rewards.append(figures["reward"])
            metrics.log(done.number, {**figures, **rollout.export_stats()})
            table.row(done.number, **figures)
            actor.save_perf_tracer(done.number)  # of all roles
            recover.step(
                RecoverState(
                    step=done.number + 1,
                    version=rollout.get_version(),
                    metrics_step=metrics.last_step,
                    extras={"rollout": rollout.state()},
                )
            )
    return (
        {"reward_first": float(np.mean(rewards[:10])), "reward_last": float(np.mean(rewards[-10:]))} if rewards else {}
    )
