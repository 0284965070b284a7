"""Real ranks of which one is slow, one phase is, or one starts late: who is blamed, for what, and for how much."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from controller import Controller, Role
from traceview.problems import Problems
from traceview.stragglers import critical_paths, stragglers
from traceview.survey import survey
from zbus.config import Config

ENGINE = Path(__file__).parents[1] / "faults" / "drivers" / "clock_engines.py"
RANKS, STEPS, SLOW = 4, 20, 2
LATE_S = 0.03

pytestmark = [pytest.mark.ci, pytest.mark.alone]


def trial(root: Path, how: str) -> Path:
    """Run a traced trial with one rank planted slow and return its directory."""
    config = Config()
    config = msgspec.structs.replace(config, trace=msgspec.structs.replace(config.trace, level="full"))
    role = Role(f"{ENGINE}:Working", replicas=RANKS, args=[SLOW, how])
    with Controller.launch("e", {"actor": role}, trial="t", root=root, config=config) as bus:
        actor = bus.group("actor")
        for step in range(STEPS):
            if how == "late":
                others = [actor[rank].train.submit(step) for rank in range(RANKS) if rank != SLOW]
                time.sleep(LATE_S)
                for future in (actor[SLOW].train.submit(step), *others):
                    future.result(60)
            else:
                actor.train(step)
            bus.save_perf_tracer(step)
        return Path(bus.trial.path)


@pytest.mark.parametrize(
    ("how", "why", "lost_ms"),
    [("rank", "slow rank", 22.5), ("phase", "slow phase", 20.0), ("late", "late start", 30.0)],
)
def test_the_planted_rank_is_first_with_the_right_reason(tmp_path, how, why, lost_ms):
    """All ranks work 15 ms a step; the planted one costs the others what was planted, and is blamed for that."""
    found = survey([str(trial(tmp_path, how))], problems := Problems())
    rows = stragglers(found)
    assert (rows[0].rank, rows[0].why, rows[0].where) == (f"actor/{SLOW}", why, "run train")
    assert rows[0].units >= STEPS - 3, "another may be last now and then on a busy machine"
    assert rows[0].lost_s == pytest.approx(STEPS * lost_ms / 1000, rel=0.25)
    assert all(row.lost_s < rows[0].lost_s / 3 for row in rows[1:])
    assert "causality_violations" not in problems.by_kind()
    assert list(found.steps.windows) == list(range(STEPS))
    if how != "late":
        [path] = [path for path in critical_paths(found) if path.method == "train"]
        assert (path.batches, path.last) == (STEPS, f"actor/{SLOW}")
        assert path.last_count >= STEPS - 3
        assert path.parts_us["run"] > 0.8 * path.mean_us
        assert sum(path.parts_us.values()) == pytest.approx(path.mean_us, rel=0.05)
