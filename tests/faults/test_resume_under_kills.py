"""SIGKILL of anything at random moments, then --resume: every optimizer step counts once, no batch lost or doubled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kill_kit import Kill, KilledJob
from run_kit import DRIVERS, RunKit, run_kit

pytestmark = pytest.mark.alone

STEPS, WARM, BATCH = 10, 3, 4
TESTS = DRIVERS.parents[1]
ROUNDS = int(os.environ.get("ZBUS_TEST_KILL_ROUNDS", "5"))
"""More are run once: ``ZBUS_TEST_KILL_ROUNDS=20 ./zb test ci -k random_kills``."""


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a directory with the job, and check at the end that no process is left."""
    monkeypatch.setenv("ZT_LEDGER", "")
    for made in run_kit(tmp_path, short_dir, monkeypatch):
        write_job(made)
        yield made


def write_job(kit: RunKit, *, torch: bool = False) -> None:
    """Write the job; without torch, a rank starts in a moment."""
    role: dict[str, Any] = {"sys_path": [str(TESTS)], "replicas": 2}
    actor = {"engine": f"{DRIVERS}/resumed_engines.py:Learner", "mesh": {"dp": 2}, **role}
    if torch:
        model = f"{TESTS.parent}/examples/g2p/model.py:G2P"
        actor |= {
            "engine": f"{DRIVERS}/resumed_torch.py:TorchLearner",
            "kwargs": {"model": model, "optimizer": {"lr": 1e-3}},
            "preload": ["torch"],
            "env": {"OMP_NUM_THREADS": "1"},
        }
    job = {
        "experiment": "killed",
        "target": f"{DRIVERS}/resumed_driver.py:main",
        "roles": {"actor": actor, "rollout": {"engine": f"{DRIVERS}/resumed_engines.py:Guesser", **role}},
        "recover": {"every_steps": 2},
        "trace": {"merge": False, "level": "off"},
        "params": {"steps": STEPS, "warm": WARM, "batch": BATCH},
    }
    (kit.directory / "killed.yaml").write_text(yaml.safe_dump(job))


def check(job: KilledJob, warm: int = WARM) -> None:
    """Check what made the model."""
    sys.path.insert(0, str(DRIVERS))
    from resumed_driver import PROMPTS, given

    job.check(
        ranks=2,
        steps=STEPS,
        warm=warm,
        given=lambda step: [row[:-1] for row in given(step, BATCH)],
        asked=PROMPTS,
    )
    assert job.steps_logged() == list(range(STEPS)), job.told()


@pytest.mark.parametrize(
    "kills",
    [
        [Kill("actor", 5, 0.0)],
        pytest.param([Kill("controller", 4, 0.02), Kill("rollout", 1, 0.0)], marks=pytest.mark.ci),
    ],
    ids=["actor", "controller then rollout"],
)
def test_a_job_that_is_killed_and_resumed_takes_every_step_once(kit: RunKit, kills: list[Kill]) -> None:
    """The step count is exact, and so are the rows that made the model, given ones and answered ones."""
    job = KilledJob(kit, ["killed.yaml"], 0)
    job.play(kills)
    assert job.told().count("kill ") == len(kills)
    check(job)
    (first, *_) = job.ended
    assert first.code in (-9, 4)
    assert first.code == -9 or "--trial t0 --resume" in first.err, first.err


VICTIMS = ["controller", "actor", "rollout", "agent:actor", "agent:rollout"]


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, ROUNDS + 1))
def test_rounds_of_random_kills(kit: RunKit, seed: int) -> None:
    """Whoever is killed, whenever, also while it starts or resumes: the count is exact, no batch is lost or doubled."""
    job = KilledJob(kit, ["killed.yaml"], seed)
    job.play([job.chosen(VICTIMS, STEPS - 2, starting_s=2.0) for _ in range(3)])
    check(job)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_rounds_of_random_kills_with_torch(kit: RunKit, seed: int) -> None:
    """The same of two ranks that train a transformer together: its own count of steps is exact, too."""
    write_job(kit, torch=True)
    job = KilledJob(kit, ["killed.yaml"], seed, limit_s=120.0)
    job.play([job.chosen(VICTIMS, STEPS - 2, starting_s=6.0) for _ in range(2)])
    check(job)
    head = json.loads((job.newest().engines["actor"] / "trainer.json").read_text())
    assert head["steps"] == STEPS, job.told()


@pytest.mark.ci
def test_a_synchronous_job_ends_with_the_model_of_a_run_that_nobody_killed(kit: RunKit) -> None:
    """Steps on given rows depend on nothing else: the weights are the same, bit by bit."""
    weights = []
    for seed, kills in ((0, []), (1, [Kill("actor", 3, 0.0), Kill("controller", 4, 0.0)])):
        job = KilledJob(kit, ["killed.yaml", f"params.warm={STEPS}"], seed)
        job.play(kills)
        assert job.told().count("kill ") == len(kills)
        saved = job.newest().engines["actor"]
        weights.append([np.load(saved / f"weights.{rank}.npy").tolist() for rank in range(2)])
    assert weights[0] == weights[1]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("forget", "complaint"), [("position", "steps made the model, not 10"), ("pending", "prompts were used more")]
)
def test_a_driver_that_forgets_is_found_out(kit: RunKit, forget: str, complaint: str) -> None:
    """The check can fail: a loop that begins at step 0 with trained weights, or asks the same prompts again."""
    warm = STEPS if forget == "position" else WARM
    job = KilledJob(kit, ["killed.yaml", f"params.forget={forget}", f"params.warm={warm}"], 0)
    job.play([Kill("actor", 7, 0.0)])
    assert job.told().count("kill ") == 1
    with pytest.raises(AssertionError, match=complaint):
        check(job, warm=warm)
