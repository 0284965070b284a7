from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled, within

pytest.importorskip("torch", reason="the example trains with torch: install zbus-runtime[torch]")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "g2p" / "sft.yaml"
SMALL = ("params.batch=64", "params.heldout_words=100", "params.checkpoint_every=20")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(240))]


def _run(root: Path, *arguments: str, expect: int = 0) -> dict[str, Any]:
    """Run the main job in its own processes and return what ``--json`` prints."""
    result = subprocess.run(
        [
            Path(sys.executable).with_name("zbus-controller"),
            "run",
            "--json",
            "--root",
            str(root),
            str(CONFIG),
            *arguments,
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(200),
    )
    assert result.returncode == expect, f"exit {result.returncode}\n{result.stderr}\n{result.stdout}"
    return json.loads(result.stdout)


def test_two_ranks_train_through_the_bus_and_a_second_run_resumes(tmp_path: Path):
    """The job learns, leaves a summary, checkpoints and traces, and continues from its newest checkpoint."""
    first = _run(tmp_path, "-t", "one", "params.steps=40", *SMALL)
    trial = Path(first["trial_dir"])

    assert first["status"] == "ok"
    assert first["metrics"]["heldout_loss_before"] == pytest.approx(4.4, abs=0.2)
    assert first["metrics"]["heldout_loss"] < 3
    assert json.loads((trial / "summary.json").read_text()) == first
    assert [path.name for path in sorted((trial / "checkpoints").iterdir())] == ["step-000020.npz", "step-000040.npz"]
    assert {path.name for path in (trial / "traces" / "actor").glob("*.jsonl")} >= {"traces_0.jsonl", "traces_1.jsonl"}
    assert Path(first["trace"]).is_file()

    second = _run(tmp_path, "-t", "one", "--resume", "params.steps=60", *SMALL)

    assert second["metrics"]["resumed_from"] == 40
    assert second["metrics"]["heldout_loss"] < first["metrics"]["heldout_loss"]


@pytest.mark.ci
def test_the_number_of_ranks_does_not_change_what_is_learnt(tmp_path: Path):
    """One rank and three ranks, with uneven shares, reach the same loss up to rounding."""
    losses = [
        _run(
            tmp_path,
            f"roles.actor.replicas={ranks}",
            f"roles.actor.mesh.dp={ranks}",
            "params.steps=8",
            *SMALL,
        )["metrics"]["heldout_loss"]
        for ranks in (1, 3)
    ]

    assert math.isclose(*losses, abs_tol=2e-3)


@pytest.mark.ci
def test_the_demo_learns_within_a_minute(tmp_path: Path):
    """The whole main job, repeated on a set-up machine: held-out loss below 1.0 in less than 60 s."""
    begin = time.monotonic()
    summary = _run(tmp_path)
    took = time.monotonic() - begin

    assert summary["metrics"]["heldout_loss"] < 1.0
    assert summary["metrics"]["heldout_exact"] > 0.1
    assert took < within(60)
