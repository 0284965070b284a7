from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from traceview.cli import main
from traceview.curves import chart, charts, read_metrics
from traceview.problems import Problems


def lines(path: Path, *rows: object) -> Path:
    """Write a metrics file; texts stand as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_each_number_becomes_a_curve_over_the_steps(tmp_path):
    """Numbers are taken by name, text and flags are not, and a step written again counts with its last value."""
    path = lines(
        tmp_path / "metrics.jsonl",
        {"step": 0, "reward": 0.1, "note": "warm", "ok": True},
        {"step": 1, "reward": 0.2, "loss": 3},
        {"step": 1, "reward": 0.25},
        {"step": 2, "reward": "NaN", "loss": 2},
    )
    problems = Problems()
    assert read_metrics(path, problems) == {"reward": [(0, 0.1), (1, 0.25)], "loss": [(1, 3), (2, 2)]}
    assert not problems.counts


def test_damaged_lines_cost_only_themselves(tmp_path):
    """A cut line, another sort of value, a number beyond floats: skipped and counted, the rest is read."""
    deep = '{"step":' + "[" * 5000
    path = lines(
        tmp_path / "metrics.jsonl", {"step": 0, "x": 1}, '{"step": 1, "x"', [1], "", deep, {"x": 2}, {"step": 3, "x": 4}
    )
    problems = Problems()
    assert read_metrics(path, problems) == {"x": [(0, 1), (3, 4)]}
    assert problems.by_kind() == {"bad_metrics_line": 5}
    assert problems.first[0].text == "metrics.jsonl:2 is not an object with a step"
    assert read_metrics(tmp_path / "none.jsonl", problems) == {}


def test_long_curves_keep_their_shape_in_few_points():
    """100,000 points are drawn as at most 400 that span the same steps, and one that is level still shows a line."""
    drawn = chart("x", [(n, float(n % 7)) for n in range(100_000)])
    points = drawn.split('points="')[1].split('"')[0].split()
    assert 300 < len(points) <= 400
    assert float(points[0].split(",")[0]) == 40
    assert float(points[-1].split(",")[0]) == 392
    level = chart("y", [(0, 2.0), (1, 2.0)]).split('points="')[1].split('"')[0]
    assert level == "40.0,66.0 392.0,66.0"


def test_names_are_text_and_single_points_are_no_curve():
    """A name with markup is shown, never obeyed; nothing to draw is no section."""
    assert "<b>" not in charts({"<b>": [(0, 1.0), (1, 2.0)]})
    assert "&lt;b&gt;" in charts({"<b>": [(0, 1.0), (1, 2.0)]})
    assert charts({"once": [(0, 1.0)]}) == ""


def test_the_report_shows_the_metrics_of_its_trial(tmp_path):
    """The page of a trial directory has a chart per metric."""
    head = {"format": 1, "run": "e/t", "role": "actor", "rank": 0, "boot_id": "b", "time_ns": 1, "pid": 7}
    head |= {"mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0}
    traces = tmp_path / "traces" / "actor"
    traces.mkdir(parents=True)
    lines(
        traces / "traces_0.jsonl",
        {"name": "zbus_meta", "ph": "M", "ts": 0.0, "pid": 7, "args": head},
        {"name": "work", "ph": "X", "ts": 1.0, "dur": 5.0, "pid": 7, "tid": 7, "args": {}},
    )
    lines(tmp_path / "metrics.jsonl", {"step": 0, "reward/mean": 0.5}, {"step": 1, "reward/mean": 0.75})
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Metrics</h2>" in page
    assert "reward/mean: 0.75 at step 1" in page
