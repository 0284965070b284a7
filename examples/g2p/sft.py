"""Supervised training of spelling to phonemes: the loop that ``zbus-controller run sft.yaml`` runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data
from zbus import trace

if TYPE_CHECKING:
    from controller.run import Run

__all__ = ["learning_rate", "main"]

KEEP = 2
"""Checkpoints kept: the newest, and the one before in case someone is reading it."""


def main(run: Run) -> dict[str, float]:
    """Train, keep checkpoints, and judge on held-out words.

    Args:
        run: The trial: its bus, the ``params`` of the config file, whether to resume, its directory, a progress line.

    Returns:
        The metrics of ``summary.json``.
    """
    params = run.config
    steps = int(params["steps"])
    words, heldout = data.load()
    exam = heldout.take(slice(0, int(params["heldout_words"])))
    actor = run.bus.group("actor")
    checkpoints = Path(run.trial_dir.checkpoints)

    newest = _newest(checkpoints) if run.resume else None
    first = actor.load(str(newest)) if newest else 0
    before = _mean_loss(actor.evaluate(exam, decode=False))

    losses: list[float] = []
    begin = time.monotonic()
    with run.progress(steps, "sft") as progress:
        progress.update(min(first, steps))
        for step in range(first, steps):
            batch = words.batch(step, int(params["batch"]), int(params["seed"]))
            shares = actor.train(batch, step, learning_rate(step, steps, params))
            losses.append(_mean_loss(shares))
            progress.update(1, loss=losses[-1])
            if (step + 1) % int(params["checkpoint_every"]) == 0 or step + 1 == steps:
                actor.save(str(checkpoints / f"step-{step + 1:06d}.npz"))
                _prune(checkpoints)
            trace.mark_step(step)
    train_s = time.monotonic() - begin

    scores = actor.evaluate(exam)
    metrics = {
        "heldout_loss": _mean_loss(scores),
        "heldout_loss_before": before,
        "heldout_exact": _total(scores, "exact") / _total(scores, "words"),
        "heldout_words": _total(scores, "words"),
        "steps": steps,
        "resumed_from": first,
        "train_s": round(train_s, 3),
    }
    if losses:  # else the resumed run was complete
        metrics["train_loss"] = losses[-1]
    return metrics


def learning_rate(step: int, steps: int, params: Mapping[str, Any]) -> float:
    """Return the rate of step ``step`` (from 0): linear warm-up, then a half cosine down to a tenth."""
    peak, warmup = float(params["lr"]), int(params["warmup"])
    rise = min(1.0, (step + 1) / max(1, warmup))
    fall = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))
    return peak * rise * fall


def _total(shares: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(share[name] for share in shares)


def _mean_loss(shares: Sequence[Mapping[str, float]]) -> float:
    return _total(shares, "loss_sum") / _total(shares, "tokens")


def _newest(checkpoints: Path) -> Path | None:
    return max(checkpoints.glob("step-*.npz"), default=None)


def _prune(checkpoints: Path) -> None:
    for old in sorted(checkpoints.glob("step-*.npz"))[:-KEEP]:
        old.unlink(missing_ok=True)
