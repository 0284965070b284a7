from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.recover import Recover
from zbus.config import TrialDir

pytest.importorskip("torch", reason="the example trains with torch: install zbus-runtime[torch]")


def test_scores_outlive_the_run_though_their_step_was_dumped_without_them(tmp_path: Path, words):
    """A run that is resumed after an examination does not examine again: sampled answers would be judged otherwise."""
    from grpo import Job

    trial = TrialDir.create(tmp_path, "demo", "t1")
    rollout = SimpleNamespace(get_version=lambda: 0)
    metrics = SimpleNamespace(last_step=1, resume=lambda step: None)
    sync = SimpleNamespace(update=lambda version: None)

    def begun(*, resume: bool) -> Job:
        job = Job({"seed": 0, "warm_start": 2}, *words, None, rollout, sync, metrics)
        job.recover = Recover(trial, every_steps=1)
        job.begin(resume=resume)
        return job

    first = begun(resume=False)
    first.step = 2
    first.keep()
    first.scores["before"] = 0.25
    first.keep(anew=True)
    again = begun(resume=True)
    assert (again.step, again.scores) == (2, {"before": 0.25})
    trial.unlock()
