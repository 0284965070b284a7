from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbus.testing.chaos.traces import check_traces
from zbus.testing.chaos.truth import Run


def rank_file(trial: Path, *, runs: int, end: dict | None, rank: int = 0) -> None:
    """Write the trace of one rank of role ``subject``: executions, and its end."""
    facts = {"format": 1, "run": "soak/run", "role": "subject", "rank": rank, "start": 0, "source": f"{rank:016x}"}
    events = [{"name": "zbus_meta", "ph": "M", "ts": 0, "pid": 5, "tid": 0, "args": facts}]
    events += [{"name": "run once", "ph": "X", "ts": 10 * n, "dur": 5, "pid": 5, "tid": 5} for n in range(runs)]
    if end is not None:
        args = {"recorded": runs, "written": runs, "pending": 0, "lost": {}, "by": "process", **end}
        events.append({"name": "zbus_end", "ph": "M", "ts": 9999, "pid": 5, "tid": 0, "args": args})
    path = trial / "traces" / "subject" / f"traces_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def truth(runs: int, rank: int = 0) -> dict[str, list[Run]]:
    """Return a ground truth of that many executions of a rank."""
    return {f"t0.{n}": [Run(f"t0.{n}", rank, 0, n, ended=True, raised=False)] for n in range(runs)}


def test_traces_that_agree_with_the_truth_pass(tmp_path):
    """A span for each execution, an end that adds up; what a killed rank lacks is no matter."""
    rank_file(tmp_path, runs=10, end={})
    rank_file(tmp_path, runs=3, end=None, rank=1)
    found = check_traces(tmp_path, {**truth(10), **{f"x{k}": v for k, v in truth(5, 1).items()}}, "subject")
    assert found.broken == []
    assert (found.sources, found.ended, found.recorded, found.spans) == (2, 1, 10, 13)
    assert found.merged == 13


def test_a_loss_that_was_counted_is_no_missing_span(tmp_path):
    """Recorded = written + lost by reason."""
    rank_file(tmp_path, runs=10, end={"recorded": 12, "lost": {"ring_full": 2}})
    found = check_traces(tmp_path, truth(12), "subject")
    assert found.broken == []
    assert found.lost == {"ring_full": 2}


@pytest.mark.parametrize(
    ("runs", "end", "ran", "word"),
    [
        (9, {}, 10, "10 executions, 9 spans"),
        (10, {"recorded": 11}, 10, "ends with"),
        (10, {"recorded": 11, "pending": 1}, 10, "ends with"),
        (9, {"recorded": 10, "lost": {"ring_full": 1}}, 11, "11 executions"),
    ],
)
def test_what_nobody_counted_is_found(tmp_path, runs, end, ran, word):
    """A missing span of a rank that ended, and an end that does not add up."""
    rank_file(tmp_path, runs=runs, end=end)
    found = check_traces(tmp_path, truth(ran), "subject")
    assert len(found.broken) == 1
    assert word in found.broken[0]


def test_no_traces_at_all_are_found(tmp_path):
    """A traced run without a trace is broken."""
    assert "cannot be merged" in check_traces(tmp_path, {}, "subject").broken[0]
