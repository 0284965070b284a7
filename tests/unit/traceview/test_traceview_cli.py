from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceview.cli import main

GOOD = (
    '{"name":"zbus_meta","ph":"M","ts":0,"pid":1,"args":{"format":1,"run":"r","role":"actor","rank":0,"boot_id":"b",'
    '"mono_ns":1,"wall_ns":2,"epoch_mono_ns":0}}\n'
    '{"name":"work","ph":"X","ts":1,"dur":2000,"pid":1,"tid":1}\n'
    '{"name":"zbus_end","ph":"M","ts":3,"pid":1,"args":{"recorded":1,"written":1,"lost":{}}}\n'
)


@pytest.fixture
def trial(tmp_path):
    """Give a trial directory with the trace of one rank."""
    path = tmp_path / "traces" / "actor" / "traces_0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(GOOD)
    return tmp_path


def damage(trial: Path) -> None:
    """Append a torn line."""
    with (trial / "traces" / "actor" / "traces_0.jsonl").open("a") as file:
        file.write('{"name":"b","ph":"X","ts')


def call(*args) -> tuple[int, str, str]:
    """Run the command: exit code, stdout, stderr."""
    result = CliRunner().invoke(main, [str(a) for a in args])
    return result.exit_code, result.stdout, result.stderr


def test_merge_prints_its_output_and_what_next(trial):
    """The path of the output is the result; counts and the next command go to stderr."""
    code, out, err = call("merge", trial)
    assert (code, out.strip()) == (0, str(trial / "traces" / "merged.json.gz"))
    assert "1 processes · 1 events" in err
    assert "next:" in err


def test_merge_reports_as_json_alone_on_stdout(trial):
    """--json prints one object with its schema, before or after the command's name."""
    for args in (("merge", trial, "--json"), ("--json", "merge", trial)):
        code, out, _ = call(*args)
        report = json.loads(out)
        assert (code, report["schema"], report["events"]) == (0, "zbus.traceview.merge/1", 1)
        assert report["processes"][0]["role"] == "actor"


def test_damage_is_a_warning_with_file_and_line(trial):
    """A cut line is named by path and line with its code, and the exit code stays 0."""
    damage(trial)
    code, _, err = call("merge", trial)
    assert code == 0
    assert "warning[ZT0107]: traces/actor/traces_0.jsonl:4 cut off (24 bytes ignored)" in err
    assert "warning" not in call("-q", "merge", trial)[2]


def test_strict_refuses_incomplete_data_with_7(trial):
    """--strict exits 7 on damage, having written the output, and 0 on whole data."""
    assert call("merge", trial, "--strict")[0] == 0
    damage(trial)
    code, _, err = call("merge", trial, "--strict")
    assert code == 7
    assert "error[ZT0115]: trace data is incomplete: truncated_tail 1" in err
    assert (trial / "traces" / "merged.json.gz").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["merge"], 2),
        (["merge", "/no/such"], 2),
        (["merge", "TRIAL", "--ranks", "x"], 2),
        (["merge", "TRIAL", "--roles", "nobody"], 2),
        (["merge", "TRIAL", "-o", "/proc/no/out.json"], 5),
        (["merge", "TRIAL", "--format", "other"], 2),
        (["stats", "/no/such"], 2),
        (["mergee"], 2),
    ],
)
def test_errors_have_the_documented_exit_codes(trial, args, code):
    """Usage and input errors exit 2, output errors 5, each with one message and no traceback."""
    result = CliRunner().invoke(main, [str(trial) if a == "TRIAL" else a for a in args])
    assert result.exit_code == code
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_error_is_json_too(trial):
    """With --json an error is an object on stdout, with its code."""
    code, out, _ = call("merge", "/no/such", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "ZT0101")


def test_several_inputs_without_o_never_overwrite_one(trial):
    """An unquoted glob of two files merges both into a third file (row B73)."""
    second = trial / "traces" / "actor" / "traces_1.jsonl"
    second.write_text(GOOD)
    code, out, _ = call("merge", trial / "traces" / "actor" / "traces_0.jsonl", second)
    assert (code, out.strip()) == (0, str(trial / "traces" / "actor" / "merged.json.gz"))
    assert second.read_text() == GOOD


def test_names_from_traces_are_harmless_on_a_terminal(trial):
    """Control characters in names are shown as escapes."""
    path = trial / "traces" / "actor" / "traces_0.jsonl"
    path.write_text(GOOD.replace('"work"', '"\\u001b[31mred"'))
    code, out, _ = call("stats", trial)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out


def test_stats_are_a_table_or_json(trial):
    """Each role and span name has count and percentiles; a merged file gives the same rows."""
    code, out, _ = call("stats", trial)
    assert code == 0
    assert out.splitlines()[1].split() == ["actor", "work", "1", "2.0", "ms", "2.0", "ms", "2.0", "ms", "2.0", "ms"]
    rows = json.loads(call("stats", trial, "--json")[1])["rows"]
    assert (rows[0]["count"], rows[0]["max_us"]) == (1, 2000.0)
    call("merge", trial)
    merged = json.loads(call("stats", trial / "traces" / "merged.json.gz", "--json")[1])["rows"]
    assert merged == rows


def test_validate_says_good_or_exits_10(trial):
    """A whole trace is good; damage or a missing end exits 10 and is named."""
    assert call("validate", trial)[0] == 0
    damage(trial)
    code, out, _ = call("validate", trial, "--json")
    report = json.loads(out)
    assert (code, report["good"], report["problems"]) == (10, False, {"truncated_tail": 1})
    (trial / "traces" / "actor" / "traces_0.jsonl").write_text("\n".join(GOOD.splitlines()[:2]))
    assert "no_end 1" in call("validate", trial)[1]


@pytest.mark.parametrize("args", [["-h"], ["--help"], ["merge", "-h"], ["stats", "-h"], ["validate", "-h"]])
def test_help_is_everywhere(args):
    """Every command answers -h and --help."""
    code, out, _ = call(*args)
    assert code == 0
    assert out.startswith("Usage:")


def test_version_is_text_or_json():
    """--version prints the version; with --json also the trace format."""
    assert call("--version")[1].startswith("traceview ")
    for args in (("--version", "--json"), ("--json", "--version")):
        assert json.loads(call(*args)[1])["trace_format"] == 1


def test_help_loads_only_what_it_needs():
    """``python -m traceview --help`` loads neither msgspec, numpy, zmq nor torch."""
    code = (
        "import sys, runpy; sys.argv = ['traceview', '--help']\n"
        "try: runpy.run_module('traceview', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('msgspec', 'numpy', 'zmq', 'torch', 'rich', 'asyncio') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_last_is_the_newest_trial_of_a_directory(trial, tmp_path):
    """``DIR/last`` names the trial whose traces changed last; a directory of that name is meant itself."""
    import os
    import shutil

    root = tmp_path / "runs"
    for age, name in ((200, "a"), (100, "b"), (300, "c")):
        shutil.copytree(trial / "traces", root / name / "traces")
        at = (root / name / "traces").stat().st_mtime - age
        os.utime(root / name / "traces", (at, at))
    (root / "no-trial").mkdir()
    assert call("merge", root / "last")[1].strip() == str(root / "b" / "traces" / "merged.json.gz")
    shutil.copytree(root / "c", root / "last")
    assert call("merge", root / "last")[1].strip() == str(root / "last" / "traces" / "merged.json.gz")
    assert call("stats", tmp_path / "nothing" / "last")[0] == 2


def test_ctrl_c_ends_with_130(trial, monkeypatch):
    """An interrupted command says nothing and exits 130."""

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("traceview.survey.survey", interrupted)
    code, out, err = call("stats", trial)
    assert (code, out, err) == (130, "", "")
