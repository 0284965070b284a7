from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from controller import livetable as livetable_module
from controller import progress as progress_module
from controller.console import Console
from controller.livetable import open_table
from controller.progress import open_progress
from controller.report import MergeResult, Summary, merge_traces, plain_data
from zbus.config import TrialDir


@pytest.fixture
def console():
    """A console whose streams can be read."""
    return Console(_stdout=io.StringIO(), _stderr=io.StringIO())


def test_plain_progress_is_a_line_at_intervals_and_at_the_end(console, monkeypatch):
    """Without a terminal a run does not fill the log: one line per ten seconds, and the last state."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with open_progress(console, "auto", 20, "train") as bar:
        for step in range(20):
            now[0] += 1
            bar.update(1, loss=1 / (step + 1), name="a\x1b[31m")
    lines = console.stderr.getvalue().splitlines()
    assert [line.split("  ")[1:3] for line in lines] == [["10/20", "50%"], ["20/20", "100%"]]
    assert "loss 0.05" in lines[1]
    assert "\x1b" not in lines[1]
    assert console.stdout.getvalue() == ""


def test_json_progress_is_lines_of_json_on_stderr(console):
    """--progress json writes objects, also with -q, and never on stdout."""
    console.verbosity = -1
    with open_progress(console, "json", None, "train") as bar:
        bar.update(2, loss=np.float32(0.5), bad=math.nan, what=object)
    lines = [json.loads(line) for line in console.stderr.getvalue().splitlines()]
    assert lines[-1]["schema"] == "zbus.progress/1"
    assert (lines[-1]["done"], lines[-1]["total"]) == (2, None)
    assert (lines[-1]["fields"]["loss"], lines[-1]["fields"]["bad"]) == (0.5, "nan")


@pytest.mark.parametrize("mode", ["bar", "plain", "json", "none"])
def test_progress_never_breaks_a_run(console, mode):
    """Numbers that refuse to be numbers, overshooting and no total at all are shown somehow."""

    class Odd:
        def __float__(self):
            raise RuntimeError

        def __str__(self):
            return "odd"

    with open_progress(console, mode, 1, "[red]train\x1b") as bar:
        bar.update(5, odd=Odd(), text="[bold]x", flag=True)
        bar.update()
    assert "\x1b[2J" not in console.stderr.getvalue()


def test_quiet_shows_no_progress(console):
    """-q and the automatic choice show nothing."""
    console.verbosity = -1
    with open_progress(console, "auto", 5, "train") as bar:
        bar.update(5)
    assert console.stderr.getvalue() == ""


def test_a_table_without_a_terminal_is_a_row_at_intervals_and_the_last_one(console, monkeypatch):
    """The heads stand once; a row comes per ten seconds; the last step is always shown, in its columns."""
    now = [100.0]
    monkeypatch.setattr(livetable_module.time, "monotonic", lambda: now[0])
    with open_table(console, "auto", ["reward", "who waits"], 25, "grpo") as table:
        for step in range(25):
            table.row(step, reward=step / 7, other=1, **{"who waits": "train\x1b[2J 3%"})
            now[0] += 1
    lines = [line.split() for line in console.stderr.getvalue().splitlines()]
    assert lines[0] == ["grpo", "reward", "who", "waits"]
    assert [line[0] for line in lines[1:]] == ["1/25", "11/25", "21/25", "25/25"]
    assert lines[-1][1] == "3.429"
    assert "\x1b" not in console.stderr.getvalue()
    assert "other" not in console.stderr.getvalue()


def test_a_table_on_a_terminal_keeps_its_newest_rows(console):
    """Redrawn in place: of 20 rows the last eight are in the final picture, markup is text."""
    with open_table(console, "bar", ["[red]loss"], None, "sft") as table:
        for step in range(20):
            table.row(step, **{"[red]loss": step})
    picture = console.stderr.getvalue().split("sft")[-1]
    assert [line.split() for line in picture.splitlines() if line.strip()[:1].isdigit()] == [
        [str(step + 1), str(step)] for step in range(12, 20)
    ]
    assert "[red]loss" in picture


def test_a_table_as_json_is_progress(console):
    """--progress json tells each step's values as progress lines, and quiet shows none."""
    with open_table(console, "json", ["loss"], 4, "sft") as table:
        table.row(0, loss=2.0)
        table.row(3, loss=0.5)
    last = json.loads(console.stderr.getvalue().splitlines()[-1])
    assert (last["done"], last["total"], last["fields"]) == (4, 4, {"loss": 0.5})
    quiet = Console(verbosity=-1, _stdout=io.StringIO(), _stderr=io.StringIO())
    with open_table(quiet, "auto", ["loss"], 4, "sft") as table:
        table.row(0, loss=2.0)
    assert quiet.stderr.getvalue() == ""


def test_metrics_of_any_kind_become_json():
    """Arrays, numpy scalars, paths, NaN, sets, deep nests and broken objects never break the summary."""

    class Broken:
        def __str__(self):
            raise ValueError

    deep: list = []
    deep.append(deep)
    data = plain_data(
        {
            "a": np.arange(3),
            "b": np.float32(0.5),
            "c": Path("/x"),
            "d": math.nan,
            "e": {1},
            "f": Broken(),
            2: (1, math.inf),
            "g": deep,
        }
    )
    assert data["a"] == [0, 1, 2]
    assert (data["b"], data["c"], data["d"], data["e"], data["2"]) == (0.5, "/x", "nan", [1], [1, "inf"])
    json.dumps(data, allow_nan=False)


def test_the_summary_on_disk_is_the_object_of_json(tmp_path):
    """summary.json carries schema, status, exit code, wall time, directory, trace and metrics."""
    trial = TrialDir.create(tmp_path, "demo", "t1")
    summary = Summary(wall_s=7.23456, metrics={"heldout_loss": 0.5, "steps": 1200}, bus={"calls": 160, "retries": 0})
    summary.write(trial)
    data = json.loads(trial.summary.read_text())
    assert data == summary.to_dict()
    assert (data["schema"], data["status"], data["wall_s"]) == ("zbus.run/1", "ok", 7.235)
    assert summary.text() == "done in 7.2 s · 160 calls · 0 retries\nheldout_loss 0.5 · steps 1,200"
    trial.unlock()


def test_nothing_to_merge_is_no_problem(tmp_path):
    """A run without traces ends without a warning."""
    trial = TrialDir.create(tmp_path, "demo", "t1")
    assert merge_traces(trial) == MergeResult(None)
    trial.unlock()


def test_a_run_with_traces_leaves_a_timeline_and_a_report(tmp_path):
    """What was recorded is merged and explained; both files are where the trial directory says."""
    trial = TrialDir.create(tmp_path, "demo", "t1")
    trial.trace("a", 0).parent.mkdir()
    span = {"name": "step", "cat": "compute", "ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"rank": 0}}
    trial.trace("a", 0).write_text(json.dumps(span) + "\n")
    merged = merge_traces(trial)
    assert (merged.path is not None, merged.report, merged.problem) == (True, trial.report, "")
    assert "step" in trial.report.read_text()
    trial.unlock()


def test_a_failed_merge_is_a_warning(tmp_path, monkeypatch):
    """Whatever happens to the merge, the run's own outcome stands and the cause is told."""
    trial = TrialDir.create(tmp_path, "demo", "t1")
    trial.trace("a", 0).parent.mkdir()
    trial.trace("a", 0).write_text("{}\n")
    monkeypatch.setattr("controller.report.sys.executable", "/nonexistent/python")
    assert "traces were not merged" in merge_traces(trial).problem
    trial.unlock()
