"""Spelling to phonemes by reinforcement: a short supervised start, then GRPO with answers made while it trains.

What ``zbus-controller run grpo.yaml`` runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import data
from controller.metrics import Metrics, open_metrics
from controller.recover import Recover, RecoverState
from controller.rollout import RolloutController
from controller.train import TrainController
from controller.trainers import GRPOStep, grpo, sft
from controller.weights import WeightSync

if TYPE_CHECKING:
    from controller.livetable import LiveTable
    from controller.run import Run

__all__ = ["main"]

COLUMNS = ("reward", "exact", "staleness", "tokens/s", "actor waits", "rollout waits", "loss")
"""The waits are shares of a step: of training for answers, and of generation for work that staleness allows."""


class Prompts:
    """The training words in one order drawn for the run: iterating anew repeats it, and a place in it stays one."""

    def __init__(self, words: data.Words, seed: int) -> None:
        self.words = words
        self.order = np.random.default_rng((seed, 1)).permutation(len(words))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go once through all words."""
        return ({"word": self.words.spellings[row], "phonemes": self.words.phonemes(row)} for row in self.order)


def main(run: Run) -> dict[str, float]:
    """Train, and judge by sampled answers to held-out words before and after the reinforcement.

    Returns:
        The metrics of ``summary.json``: ``reward_before``, ``reward_after``, ``reward_gain`` and what it took.
    """
    params = run.config
    words, heldout = data.load()
    train = TrainController(run.bus, "actor")
    train.initialize()
    with (
        RolloutController(
            run.bus, "rollout", batch_size=params["words"], max_staleness=params["max_staleness"]
        ) as rollout,
        open_metrics(run.trial_dir, params["metrics"]) as metrics,
    ):
        sync = WeightSync(train, rollout, path=params["weights"], directory=run.trial_dir.checkpoints / "weights")
        job = Job(params, words, heldout, train, rollout, sync, metrics)
        job.recover = Recover.of(run, engines={"actor": train}, every_steps=params["checkpoint_every"])
        job.begin(resume=run.resume)
        with run.table(["loss"], params["warm_start"], "sft") as table:
            job.warm_start(table)
        with run.table(COLUMNS, params["steps"], "grpo") as table:
            job.reinforce(table)
        return job.verdict()


class Job:
    """The job between two steps: what is written down for ``--resume`` is all that it knows."""

    recover: Recover

    def __init__(
        self,
        params: Mapping[str, Any],
        words: data.Words,
        heldout: data.Words,
        train: TrainController,
        rollout: RolloutController,
        sync: WeightSync,
        metrics: Metrics,
    ) -> None:
        self.params, self.words, self.heldout = params, words, heldout
        self.train, self.rollout, self.sync, self.metrics = train, rollout, sync, metrics
        self.prompts = Prompts(words, int(params["seed"]))
        self.step = 0  # optimizer steps taken, supervised ones included
        self.warm = int(params["warm_start"])
        self.scores: dict[str, float] = {}
        self.resumed = 0
        self.seconds = 0.0

    def begin(self, *, resume: bool) -> None:
        """Start anew, or from the newest dump: weights, data, pending prompts and counts are as they were."""
        state = self.recover.start(resume, RecoverState())
        self.step = self.resumed = state.step
        self.metrics.resume(state.metrics_step)
        self.scores = dict(state.extras.get("scores", {}))
        if self.step > self.warm:
            self.rollout.restore(state.extras["rollout"])
        if self.step >= self.warm:
            self.sync.update(version=state.version)

    def keep(self, *, anew: bool = False) -> None:
        """Dump, if it is due; ``anew``: in any case, also the step that was dumped last: more is known of it now."""
        extras = {"scores": self.scores, "rollout": self.rollout.state() if self.step > self.warm else {}}
        dump = self.recover.dump if anew else self.recover.step
        dump(
            RecoverState(
                step=self.step,
                version=self.rollout.get_version(),
                metrics_step=self.metrics.last_step,
                extras=extras,
            )
        )

    def warm_start(self, table: LiveTable) -> None:
        """Learn from the dictionary until answers are worth judging."""

        def batch(step: int) -> dict[str, Any]:
            return data.supervised(self.words.batch(step, self.params["warm_start_batch"], self.params["seed"]))

        for done in sft(self.train, batch, steps=self.warm, first=self.step):
            self.step = done.number + 1
            self.metrics.log(done.number, {"sft/loss": done.report["loss"], "sft/seconds": done.train_s})
            table.row(done.number, loss=done.report["loss"])
            self.keep()

    def reinforce(self, table: LiveTable) -> None:
        """Learn from the own answers."""
        if "before" not in self.scores:
            self.sync.update()
            self.scores["before"] = self.examine()
            self.keep(anew=True)
        began = last = time.monotonic()
        steps = grpo(
            self.train, self.rollout, self.sync, self.prompts,
            workflow="spelling", judge=worth, first=self.step - self.warm, steps=int(self.params["steps"]),
        )  # fmt: skip
        for done in steps:
            self.step = self.warm + done.number + 1
            figures = {**numbers_of(done), **self.rollout.export_stats()}
            now = time.monotonic()
            lasted, last = now - last, now
            busy = figures.get("generate/prefill_s", 0.0) + figures.get("generate/decode_s", 0.0)
            figures["waits/actor"] = done.waited_s / lasted
            figures["waits/rollout"] = max(0.0, 1 - busy / (lasted * len(self.rollout.group)))
            self.metrics.log(self.step - 1, figures)
            table.row(
                done.number,
                **{
                    "reward": figures["reward"],
                    "exact": figures["exact"],
                    "staleness": figures["staleness/mean"],
                    "tokens/s": figures["tokens"] / lasted,
                    "actor waits": f"{figures['waits/actor']:.0%}",
                    "rollout waits": f"{figures['waits/rollout']:.0%}",
                    "loss": done.report["loss"],
                },
            )
            self.keep()
        self.seconds = time.monotonic() - began
        if "after" not in self.scores:
            self.scores["after"] = self.examine()
            self.keep(anew=True)

    def examine(self) -> float:
        """Return the mean reward of one sampled answer to each held-out word."""
        asked = [
            {"word": self.heldout.spellings[row], "phonemes": self.heldout.phonemes(row), "samples": 1}
            for row in range(int(self.params["heldout_words"]))
        ]
        found = self.rollout.rollout_batch(asked, "spelling")
        return float(np.mean([one.value["reward"][0] for one in found]))

    def verdict(self) -> dict[str, float]:
        """Return what the summary shows."""
        before, after = self.scores["before"], self.scores["after"]
        return {
            "reward_before": before,
            "reward_after": after,
            "reward_gain": after - before,
            "steps": self.step,
            "resumed_from": self.resumed,
            "grpo_s": round(self.seconds, 3),
        }


def worth(rows: Mapping[str, Any]) -> Any:
    """Return what answers are judged by: how near they are, and once more for being right."""
    return rows["reward"] + rows["exact"]


def numbers_of(done: GRPOStep) -> dict[str, float]:
    """Return the figures of one step, by name."""
    return {
        **{f"grpo/{name}": value for name, value in done.report.items()},
        "reward": float(np.mean(done.rows["reward"])),
        "exact": float(np.mean(done.rows["exact"])),
        "staleness/mean": done.staleness[0],
        "staleness/most": done.staleness[1],
        "tokens": float(done.rows["loss_mask"].values.sum()),
        "seconds/waited": done.waited_s,
        "seconds/train": done.train_s,
        "seconds/update": done.update_s,
    }
