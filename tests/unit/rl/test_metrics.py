from __future__ import annotations

import errno
import io
import json
import logging
import math
import os

import pytest

from controller.metrics import ConsoleSink, JsonlSink, Metrics, open_metrics
from zbus.config import TrialDir
from zbus.errors import ConfigError, EngineLoadError


class Kept:
    """A sink of the user's: the two methods and nothing else."""

    def __init__(self):
        self.got = []
        self.closed = 0

    def log(self, step, values):
        self.got.append((step, dict(values)))

    def close(self):
        self.closed += 1


def _lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_every_sink_gets_the_numbers_of_every_step(tmp_path):
    """Two methods are all that a sink needs; arrays of one element are numbers."""
    np = pytest.importorskip("numpy")
    kept = Kept()
    with Metrics([kept, JsonlSink(tmp_path / "m.jsonl")]) as metrics:
        metrics.log(0, {"loss": np.float32(0.5), "tokens": 3})
        metrics.log(5, {"actor/loss": np.array([0.25])})

    assert kept.got == [(0, {"loss": 0.5, "tokens": 3}), (5, {"actor/loss": 0.25})]
    assert kept.closed == 1
    lines = _lines(tmp_path / "m.jsonl")
    assert [line.pop("wall_time") > 1e9 for line in lines] == [True, True]
    assert lines == [{"step": 0, "loss": 0.5, "tokens": 3}, {"step": 5, "actor/loss": 0.25}]


def test_steps_only_rise():
    """A step that was logged is not logged again in one run."""
    metrics = Metrics([])
    metrics.log(3, {})
    with pytest.raises(ValueError, match="step 3 come after those of step 3"):
        metrics.log(3, {})
    assert metrics.last_step == 3


@pytest.mark.parametrize(
    ("values", "complaint"),
    [({"loss": "low"}, "metric 'loss' is no number"), ({"step": 1.0, "wall_time": 2.0}, "named step or wall_time")],
)
def test_what_is_no_metric_is_refused_by_name(values, complaint):
    """A mistake of the program is told to it, and no sink sees a part."""
    kept = Kept()
    with pytest.raises(ValueError, match=complaint):
        Metrics([kept]).log(0, values)
    assert not kept.got


def test_numbers_that_are_not_finite_are_strict_json(tmp_path):
    """B81: NaN and infinities become texts, so any reader of JSON reads the line."""
    with Metrics([JsonlSink(tmp_path / "m.jsonl")]) as metrics:
        metrics.log(0, {"a": math.nan, "b": math.inf, "c": -math.inf})

    (line,) = _lines(tmp_path / "m.jsonl")
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")


def test_a_resumed_run_leaves_one_line_per_step(tmp_path):
    """Lines of steps that are taken again are replaced, a torn one goes, and the steps go on."""
    path = tmp_path / "m.jsonl"
    with Metrics([JsonlSink(path)]) as metrics:
        for step in range(5):
            metrics.log(step, {"run": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 5, "wa')  # killed while it wrote

    with Metrics([JsonlSink(path)]) as metrics:
        metrics.resume(2)
        for step in range(3, 6):
            metrics.log(step, {"run": 2})

    assert [(line["step"], line["run"]) for line in _lines(path)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_steps_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path):
    """Whoever forgets to resume is told; the old lines are as they were."""
    path = tmp_path / "m.jsonl"
    with Metrics([JsonlSink(path)]) as metrics:
        metrics.log(7, {})
    before = path.read_bytes()

    metrics = Metrics([JsonlSink(path)])
    with pytest.raises(ConfigError, match="holds steps of an earlier run") as caught:
        metrics.log(0, {})
    metrics.close()
    assert "Metrics.resume" in caught.value.hint
    assert path.read_bytes() == before


def test_a_failing_sink_is_reported_once_and_harms_nobody(caplog):
    """The run goes on and the other sinks get everything; the sink is tried again."""

    class Down(Kept):
        def log(self, step, values):
            if step < 3:
                raise ConnectionError("server is down")
            super().log(step, values)

    down, kept = Down(), Kept()
    with caplog.at_level(logging.WARNING, "zbus"), Metrics([down, kept]) as metrics:
        for step in range(4):
            metrics.log(step, {"loss": 1.0})

    (record,) = caplog.records
    assert "without Down, which failed: ConnectionError: server is down" in record.getMessage()
    assert [step for step, _ in kept.got] == [0, 1, 2, 3]
    assert [step for step, _ in down.got] == [3]


def test_a_line_that_does_not_fit_the_disk_leaves_no_part(tmp_path, monkeypatch, caplog):
    """A short write is taken back: the next line begins on its own."""
    path = tmp_path / "m.jsonl"
    write = os.write
    with caplog.at_level(logging.WARNING, "zbus"), Metrics([JsonlSink(path)]) as metrics:
        metrics.log(0, {})
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
        metrics.log(1, {})
        monkeypatch.undo()
        metrics.log(2, {})

    assert [line["step"] for line in _lines(path)] == [0, 2]
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_the_console_shows_chosen_keys_of_chosen_steps():
    """One line per step, in the order asked for; foreign text cannot move the cursor."""
    stream = io.StringIO()
    metrics = Metrics([ConsoleSink(["reward", "*/loss"], every=2, stream=stream)])
    for step in range(3):
        metrics.log(step, {"actor/loss": 1 / 3, "lr": 1.0, "reward": step, "\x1b[2J/loss": 2.0})

    assert stream.getvalue() == (
        "step 0 · reward 0 · actor/loss 0.3333 · \\x1b[2J/loss 2\n"
        "step 2 · reward 2 · actor/loss 0.3333 · \\x1b[2J/loss 2\n"
    )


def test_sinks_are_opened_by_the_names_of_a_config(tmp_path, monkeypatch):
    """A config lists our sinks and its own; a name that is nobody's is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_sink.py").write_text(
        "class Mine:\n"
        "    def __init__(self, trial):\n        self.file = trial.path / 'mine'\n"
        "    def log(self, step, values):\n        self.file.write_text(f'{step} {values}')\n"
        "    def close(self):\n        pass\n"
    )
    trial = TrialDir.create(tmp_path / "runs", "demo", "t1")

    with open_metrics(trial, ["jsonl", "my_sink.py:Mine"]) as metrics:
        metrics.log(1, {"loss": 2.0})
    assert (trial.path / "mine").read_text() == "1 {'loss': 2.0}"
    assert _lines(trial.path / "metrics.jsonl")[0]["loss"] == 2.0
    with pytest.raises(ConfigError, match="no metrics sink 'jsnol'"):
        open_metrics(trial, ["jsnol"])
    with pytest.raises(EngineLoadError, match=r"metrics sink 'my_sink\.py:Yours'"):
        open_metrics(trial, ["my_sink.py:Yours"])
    trial.unlock()


@pytest.mark.ci
def test_tensorboard_reads_what_was_logged_and_forgets_what_is_taken_again(tmp_path):
    """TensorBoard's own reader sees each step once after a resume."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from controller.tensorboard import TensorBoardSink

    for first, run in ((0, 1.0), (2, 2.0)):
        with Metrics([TensorBoardSink(tmp_path)]) as metrics:
            if first:
                metrics.resume(first - 1)
            for step in range(first, 4):
                metrics.log(step, {"actor/loss": run})

    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("actor/loss")] == [(0, 1), (1, 1), (2, 2), (3, 2)]
