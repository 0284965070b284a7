"""The main job under SIGKILL of anything at random moments: with --resume every step counts once, no word is lost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kill_kit import KilledJob
from ledger import prompts_of
from run_kit import DRIVERS, RunKit, run_kit

pytestmark = [pytest.mark.alone, pytest.mark.ci, pytest.mark.timeout(900)]

TESTS = DRIVERS.parents[1]
G2P = TESTS.parent / "examples" / "g2p"
ROUNDS = int(os.environ.get("ZBUS_TEST_KILL_ROUNDS", "5"))
"""More are run once: ``ZBUS_TEST_KILL_ROUNDS=20 ./zb test ci -k grpo_under_kills``."""
WARM, STEPS, WORDS, BATCH, SEED = 4, 10, 8, 32, 0
VICTIMS = ["controller", "actor", "rollout", "actor", "rollout", "agent:actor", "agent:rollout"]


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a directory, and check at the end that no process is left."""
    monkeypatch.setenv("ZT_LEDGER", "")
    monkeypatch.syspath_prepend(str(G2P))
    yield from run_kit(tmp_path, short_dir, monkeypatch)
    for name in ("data", "grpo", "rewards"):  # common names, which are the example's only here
        sys.modules.pop(name, None)


def command() -> list[str]:
    """Return the main job with ten steps and a ledger."""
    params = {
        "warm_start": WARM,
        "warm_start_batch": BATCH,
        "steps": STEPS - WARM,
        "words": WORDS,
        "heldout_words": 20,
        "checkpoint_every": 2,
        "seed": SEED,
    }
    return [
        str(G2P / "grpo.yaml"),
        f"roles.actor.engine={DRIVERS}/resumed_torch.py:TorchLearner",
        f"roles.actor.sys_path=[{TESTS}]",
        "trace.merge=false",
        *(f"params.{key}={value}" for key, value in params.items()),
    ]


def check(job: KilledJob) -> None:
    """Check what made the model: which words in which step, and how many steps the optimizer itself counts."""
    import data
    from grpo import Prompts

    words, _ = data.load()

    def given(step: int) -> Sequence[Sequence[int]]:
        return prompts_of(data.supervised(words.batch(step, BATCH, SEED)))

    def prompt_of(item: dict[str, Any]) -> Sequence[int]:
        return data.prompt(item["word"])

    asked = [prompt_of(item) for item in Prompts(words, SEED)]
    job.check(ranks=2, steps=STEPS, warm=WARM, given=given, asked=asked, per_prompt=8, prompt_of=prompt_of)
    assert job.steps_logged() == list(range(STEPS)), job.told()
    head = json.loads((job.newest().engines["actor"] / "trainer.json").read_text())
    assert head["steps"] == STEPS, job.told()


@pytest.mark.parametrize("seed", range(1, ROUNDS + 1))
def test_grpo_under_kills(kit: RunKit, seed: int) -> None:
    """Whoever is killed, whenever: the step count is exact, and each word that was asked made the model once."""
    job = KilledJob(kit, command(), seed, limit_s=120.0)
    job.play([job.chosen(VICTIMS, STEPS - 2, starting_s=6.0) for _ in range(2)])
    print(job.told())
    assert "kill " in job.told()
    check(job)
