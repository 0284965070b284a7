from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zbus.config import TrialDir, new_trial_name, write_atomically
from zbus.errors import ConfigError, TrialError

HOLD = """
import sys
from zbus.config import TrialDir
trial = TrialDir.create(sys.argv[1], "demo", "t1")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """Another process that holds demo/t1 until the test ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_trial_directory_is_private_and_complete(tmp_path):
    """The directory and all below it are mode 0700, and every fixed part is there."""
    trial = TrialDir.create(tmp_path / "runs", "demo", "t1")
    for path in (trial.path, trial.registry, trial.keys, trial.logs, trial.traces, trial.crash, trial.stacks):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert trial.path == tmp_path / "runs" / "demo" / "t1"
    assert (trial.name, trial.root) == ("demo/t1", tmp_path / "runs")


def test_paths_have_their_fixed_names(tmp_path):
    """The names are a promise to other tools."""
    trial = TrialDir.at(tmp_path, "demo", "t1")
    shown = {
        str(path.relative_to(trial.path))
        for path in (
            trial.config,
            trial.summary,
            trial.report,
            trial.controller_log,
            trial.log("actor", 3, 1),
            trial.agent_log("actor", "h"),
            trial.trace("actor", 3),
            trial.trace("actor", 3, 2),
            trial.crash_file("actor", 3, 0),
            trial.stack_file("actor", 3, 0),
        )
    }
    assert shown == {
        "config.yaml",
        "summary.json",
        "report.html",
        "logs/controller.log",
        "logs/actor/3.1.log",
        "logs/agents/actor.h.log",
        "traces/actor/traces_3.jsonl",
        "traces/actor/traces_3.2.jsonl",
        "crash/actor.3.0.json",
        "stacks/actor.3.0.txt",
    }
    assert trial.relative(trial.crash_file("a", 0)) == "crash/a.0.0.json"
    assert trial.relative("/elsewhere") == "/elsewhere"


def test_a_trial_name_is_new_each_time():
    """Default names sort by time and do not collide."""
    names = {new_trial_name() for _ in range(50)}
    assert len(names) > 45
    assert new_trial_name(0)[:4] in ("1970", "1969")


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65, "a b", "ü"])
def test_no_name_leaves_the_root(tmp_path, name):
    """A name that is not one plain component is refused before anything is made."""
    with pytest.raises(ConfigError, match="not a valid name"):
        TrialDir.create(tmp_path, name, "t1")
    assert not any(tmp_path.iterdir())


def test_an_existing_trial_needs_a_decision(tmp_path):
    """A trial that exists is an error unless it shall be resumed or overwritten; nothing in it is lost."""
    first = TrialDir.create(tmp_path, "demo", "t1")
    (first.checkpoints / "step_1").write_text("weights")
    write_atomically(first.summary, "{}")
    first.unlock()
    with pytest.raises(TrialError, match="demo/t1 is finished") as caught:
        TrialDir.create(tmp_path, "demo", "t1")
    assert "--resume" in caught.value.hint
    assert caught.value.exit_code == 8

    resumed = TrialDir.create(tmp_path, "demo", "t1", resume=True)
    assert (resumed.checkpoints / "step_1").read_text() == "weights"
    resumed.unlock()
    fresh = TrialDir.create(tmp_path, "demo", "t1", overwrite=True)
    assert not (fresh.checkpoints / "step_1").exists()
    assert not fresh.summary.exists()


def test_there_must_be_something_to_resume(tmp_path):
    """Resuming what does not exist is an error and makes nothing."""
    with pytest.raises(TrialError, match="nothing to resume"):
        TrialDir.create(tmp_path, "demo", "t1", resume=True)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_trial_in_use_is_refused_and_its_holder_named(tmp_path, held, options):
    """Whatever the flags, a live controller keeps its trial, and the refusal names its process."""
    with pytest.raises(TrialError, match="in use by a live controller") as caught:
        TrialDir.create(tmp_path, "demo", "t1", **options)
    assert f"pid {held.pid}" in caught.value.facts["holder"]
    assert TrialDir.open(tmp_path / "demo" / "t1").holder()["pid"] == held.pid


def test_a_dead_holder_holds_nothing(tmp_path, held):
    """After kill -9 of the holder the trial can be resumed at once."""
    held.kill()
    held.wait()
    trial = TrialDir.create(tmp_path, "demo", "t1", resume=True)
    assert json.loads(trial.lock_file.read_text())["pid"] == os.getpid()


def test_a_link_in_place_of_a_trial_is_refused(tmp_path):
    """A symbolic link could lead anywhere: it is refused and left alone."""
    (tmp_path / "demo").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "demo" / "t1").symlink_to(target)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(TrialError, match="symbolic link"):
            TrialDir.create(tmp_path, "demo", "t1", **options)
    assert target.is_dir()


def test_a_file_in_place_of_a_trial_is_refused(tmp_path):
    """A file is never replaced by a trial."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "t1").write_text("mine")
    with pytest.raises(TrialError, match="not a directory"):
        TrialDir.create(tmp_path, "demo", "t1", overwrite=True)
    assert (tmp_path / "demo" / "t1").read_text() == "mine"


@pytest.mark.parametrize("root", ["/proc/zbus", "/dev/null/runs"])
def test_a_place_that_cannot_be_written_is_a_config_error(root):
    """The refusal says why and names the way out; no half-made trial stays."""
    with pytest.raises(ConfigError, match="cannot be made: ") as caught:
        TrialDir.create(root, "demo", "t1")
    assert caught.value.exit_code == 2
    assert "--root" in caught.value.hint


def test_what_is_no_trial_is_not_opened(tmp_path):
    """Opening a directory without a registry is an error."""
    with pytest.raises(TrialError, match="not a trial directory"):
        TrialDir.open(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """Writing is whole or not at all, and leaves no temporary file."""
    file = tmp_path / "summary.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    assert [path.name for path in Path(tmp_path).iterdir()] == ["summary.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
