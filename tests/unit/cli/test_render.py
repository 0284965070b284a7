from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.console import Style, clean, clip, wants_color
from controller.render import error_json, exit_code_of, render_error
from controller.rollouts.results import Outcome, Rollout, error_of
from zbus.errors import (
    BatchError,
    CallTimeout,
    ConfigError,
    EngineLoadError,
    NotExecuted,
    RemoteError,
    RolloutError,
    StartupError,
    TrialError,
    Unavailable,
    WorkerLost,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "errors"
ZBUS = Path(__file__).resolve().parents[3]

TRACEBACK = f"""Traceback (most recent call last):
  File "{ZBUS}/zbus/runtime/executor.py", line 200, in run
    result = method(*args)
  File "/home/me/engines.py", line 12, in train
    return self.step(batch)
           ^^^^^^^^^^^^^^^^
  File "/home/me/engines.py", line 30, in step
    raise ValueError("loss is nan")
ValueError: loss is nan
"""


def worker_lost(**more) -> WorkerLost:
    """Return the sample of the specification."""
    return WorkerLost(
        "actor/3 died during `train_batch` (batch 118)",
        **{
            "role": "actor",
            "rank": 3,
            "host": "b",
            "pid": 24117,
            "method": "train_batch",
            "batch": 118,
            "outcome": "UNKNOWN",
            "reason": "worker_exit",
            "signal_of_worker": 9,
            "log_tail": ["step 42 micro 6/8 tokens 31744\n", "allocating logits 8.1 GiB"],
            "crash_file": "crash/actor.3.0.json",
            "hint": "raise roles.actor.mem or lower the micro batch",
            "facts": {"peers": "actor/0-2, 4-7 finished this batch; nothing was re-run", "log": "logs/actor/3.0.log"},
            **more,
        },
    )


def remote_error() -> RemoteError:
    """Return an engine's exception with its traceback."""
    return RemoteError(
        "actor/1 raised ValueError in `train`: loss is nan",
        role="actor",
        rank=1,
        host="a",
        pid=7,
        method="train",
        outcome="APP_ERROR",
        remote_traceback=TRACEBACK,
    )


def rollout_error(outcome: str) -> RolloutError:
    """Return the error of a rollout that ended so."""
    return error_of(Rollout(task=3, outcome=Outcome(outcome), data=None, value=None, error=None, rank=1))


def batch_error() -> BatchError:
    """Return a root with three failures that it caused."""
    others = [
        NotExecuted(f"`save` did not run on actor/{rank}", role="actor", rank=rank, method="save", reason="predecessor")
        for rank in (0, 1, 2)
    ]
    return BatchError("4 of 4 ranks failed", [worker_lost(), *others], {})


CASES = {
    "worker_lost": worker_lost,
    "worker_lost_exit_code": lambda: worker_lost(signal_of_worker=None, exit_code_of_worker=7, log_tail=["bye"]),
    "worker_lost_no_log": lambda: worker_lost(log_tail=[], crash_file=None, hint=None),
    "remote_error": remote_error,
    "batch_error": batch_error,
    "unknown_key": lambda: ConfigError(
        "unknown config key `scheduler.startup_timout`",
        facts={"from": "command line, argument 2"},
        hint="did you mean `scheduler.startup_timeout`?",
    ),
    "startup": lambda: StartupError(
        "2 of 4 ranks of actor were not ready within 60 s",
        facts={"actor/2": "its engine is being set up since 58 s", "actor/3": "no agent has claimed it"},
        hint="zbus-controller run train.py scheduler.startup_timeout=5m",
    ),
    "engine_load": lambda: EngineLoadError(
        "engine `enginez:Actor` of role actor cannot be imported: No module named 'enginez'",
        facts={"looked in": "/home/me"},
        hint="python -c 'import enginez'",
    ),
    "timeout": lambda: CallTimeout(
        "`train` did not end within 30 s on actor/0, actor/2",
        role="actor",
        rank=0,
        method="train",
        outcome="UNKNOWN",
        reason="deadline",
        facts={"late": "actor/0 running since 29.8 s; actor/2 arrived, waiting"},
    ),
    "unavailable": lambda: Unavailable("nothing was sent: actor/1 is dead", role="actor", rank=1),
    "trial_in_use": lambda: TrialError(
        "trial demo/t1 is in use by a live controller",
        facts={"holder": "pid 4711 on host a", "directory": "/runs/demo/t1"},
        hint="stop it with: zbus-controller stop /runs/demo/t1",
    ),
    "hostile_text": lambda: worker_lost(
        log_tail=["\x1b]0;owned\x07\x1b[2J", "tab\there, rtl \u202e txt", "x" * 5000],
        facts={"\x1b[31mkey": "two\nlines"},
    ),
}


def check_golden(name: str, text: str) -> None:
    """Compare with the golden file; with ZBUS_TEST_GOLDEN=write make it."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text + "\n"


@pytest.mark.parametrize("name", CASES)
def test_each_block_reads_as_agreed(name):
    """The text of each kind of error is fixed at 100 columns, without colour."""
    check_golden(name, render_error(CASES[name](), width=100))


def test_verbose_shows_every_failure_and_all_frames():
    """With -v the folded failures follow, each as a block, and no frame is hidden."""
    check_golden("batch_error_verbose", render_error(batch_error(), verbose=True))
    assert "executor.py" in render_error(remote_error(), verbose=True)


def test_own_frames_are_hidden_from_users():
    """A remote traceback shows the user's frames; zbus's own need -v."""
    text = render_error(remote_error())
    assert "executor.py" not in text
    assert "/home/me/engines.py:30 in step" in text
    assert '  raise ValueError("loss is nan")' in text


def test_the_users_own_failure_shows_the_users_frames():
    """An exception of the driver names the target, the place and the line."""
    try:
        {}["missing"]
    except KeyError as error:
        text = render_error(error, target="train.py")
    assert text.startswith("error: train.py raised KeyError: 'missing'\n")
    assert "test_render.py" in text
    assert '{}["missing"]' in text


def test_a_cause_is_named():
    """`raise … from` keeps the first cause in sight."""
    error = RuntimeError("no checkpoint")
    error.__cause__ = OSError("disk is full")
    assert "because  OSError: disk is full" in render_error(error)


def test_an_exception_whose_text_raises_is_still_shown():
    """A broken __str__ does not hide the failure."""

    class Broken(Exception):
        def __str__(self):
            raise TypeError

    assert "Broken: <its text raised TypeError>" in render_error(Broken())


def test_a_syntax_error_names_its_line():
    """A driver that does not parse is shown with file and line."""
    with pytest.raises(SyntaxError) as caught:
        compile("a =\n", "train.py", "exec")
    assert "train.py:1" in render_error(caught.value, target="train.py")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (StartupError("x"), 3),
        (worker_lost(), 4),
        (batch_error(), 4),
        (rollout_error("lost"), 4),
        (rollout_error("failed"), 1),
        (remote_error(), 1),
        (TrialError("x"), 8),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ExceptionGroup("g", [worker_lost()]), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_the_root_cause_decides_the_exit_code(error, code):
    """The exit code is that of the root cause, whatever it is wrapped in."""
    assert exit_code_of(error) == code


def test_the_json_form_has_the_same_facts():
    """An error as data keeps who, what and how it ended, and names the folded ones."""
    data = error_json(batch_error())
    assert (data["code"], data["role"], data["rank"], data["worker_signal"]) == ("ZB0301", "actor", 3, 9)
    assert data["crash_file"] == "crash/actor.3.0.json"
    assert [other["who"] for other in data["also"]] == ["actor/0", "actor/1", "actor/2"]
    assert error_json(ValueError("x"))["code"] is None


def test_colour_is_only_in_the_labels():
    """Colour never changes the text."""
    plain = render_error(worker_lost())
    colored = render_error(worker_lost(), style=Style(color=True))
    assert "\x1b[" in colored
    for code in ("1", "2", "31;1", "36", "32;1", "0"):
        colored = colored.replace(f"\x1b[{code}m", "")
    assert colored == plain


@pytest.mark.parametrize(
    ("choice", "env", "tty", "wanted"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_follows_the_users_wishes(choice, env, tty, wanted):
    """--color counts first, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""

    class Stream:
        def isatty(self):
            return tty

    assert wants_color(choice, Stream(), env) is wanted


def test_foreign_text_cannot_reach_the_terminal():
    """Escapes, controls and bidi marks become visible; letters of any language stay."""
    assert clean("a\x1b[31mb\r\n\x00\u202e\x9b") == "a\\x1b[31mb\\x0d\\x0a\\x00\\u202e\\x9b"
    assert clean("höher 漢字 →") == "höher 漢字 →"
    assert clip("x" * 10_000, 100).count("x") < 100
