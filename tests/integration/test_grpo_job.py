from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled

pytest.importorskip("torch", reason="the example trains with torch: install zbus-runtime[torch]")

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "g2p" / "grpo.yaml"
SMALL = (
    *("params.warm_start=4", "params.warm_start_batch=16", "params.words=4", "params.heldout_words=20"),
    *("roles.actor.mesh={dp: 1}", "roles.rollout.replicas=1"),
)

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(400))]


def run(root: Path, *arguments: str) -> dict[str, Any]:
    """Run the main job in its own processes and return what ``--json`` prints."""
    command = Path(sys.executable).with_name("zbus-controller")
    result = subprocess.run(
        [command, "run", "--json", "--root", str(root), str(CONFIG), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(390),
    )
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stderr}\n{result.stdout}"
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def spans(trial: Path, role: str, name: str) -> list[tuple[float, float]]:
    """Return (begin, end) of all spans of a name in the traces of a role, in µs."""
    found = []
    for path in (trial / "traces" / role).glob("traces_*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("ph") == "X" and event["name"] == name:
                found.append((event["ts"], event["ts"] + event["dur"]))
    return sorted(found)


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the time of ``one`` during which something of ``other`` goes on."""
    total = 0.0
    for begin, end in one:
        inside = sorted((max(begin, a), min(end, b)) for a, b in other if a < end and b > begin)
        reached = begin
        for a, b in inside:
            total += max(0.0, b - max(a, reached))
            reached = max(reached, b)
    return total


def test_the_job_learns_from_the_dictionary_then_from_its_own_answers_and_resumes(tmp_path: Path):
    """Each step is logged once, also over a run that goes on from the dump of another; the report draws them.

    The learning rate goes on in its schedule from step to step, and weights go by files as well.
    """
    first = run(tmp_path, "-t", "one", "params.steps=2", "params.weights=disk", *SMALL)
    assert first["status"] == "ok"
    assert first["metrics"]["steps"] == 6
    trial = Path(first["trial_dir"])
    second = run(tmp_path, "-t", "one", "--resume", "params.steps=5", *SMALL)
    assert (second["metrics"]["steps"], second["metrics"]["resumed_from"]) == (9, 6)
    assert second["metrics"]["reward_before"] == first["metrics"]["reward_before"]
    rows = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(9))
    rates = [row["grpo/lr"] for row in rows if "grpo/lr" in row]
    assert rates == pytest.approx([0.003 * (step + 1) / 21 for step in range(4, 9)])  # the warm-up of the schedule
    assert second["metrics"]["reward_gain"] == pytest.approx(
        second["metrics"]["reward_after"] - second["metrics"]["reward_before"]
    )
    assert "<h2>Metrics</h2>" in (trial / "report.html").read_text()
    assert Path(second["trace"]).is_file()


@pytest.mark.ci
def test_the_whole_job_raises_the_reward_while_generation_overlaps_training(tmp_path: Path):
    """The reward rises by 0.10 in 120 steps, on answers at most two versions old, made while training goes on."""
    found = run(tmp_path)
    metrics, trial = found["metrics"], Path(found["trial_dir"])
    assert metrics["reward_gain"] >= 0.10
    assert metrics["steps"] == 210
    rows = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    ages = Counter(row["staleness/most"] for row in rows if "staleness/most" in row)
    assert sum(ages.values()) == 120
    assert max(ages) <= 2
    training = spans(trial, "actor", "run train_batch")
    generating = spans(trial, "rollout", "run run_episode")
    lasted = sum(end - begin for begin, end in training[-200:])
    assert overlap(training[-200:], generating) > 0.1 * lasted  # taking turns would be 0
