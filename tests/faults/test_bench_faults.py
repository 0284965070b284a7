"""The comparison under faults: what it counts, and what it finds in zbus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMESPACE = ["unshare", "-r", "-n", "-p", "-f", "--kill-child", "--mount-proc", "iptables", "-L", "-n"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch):
    """Give the benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import faults

    return faults


def test_what_ran_is_compared_with_what_was_told(faults) -> None:
    """A second run, an answer nobody computed, a false "did not run", and an error that says nothing each count."""
    verdict = faults.Verdict
    verdicts = {
        1: (verdict("ok", 1), False),
        2: (verdict("ok", 4), True),
        3: (verdict("ok", 8), False),
        4: (verdict("not_executed", None, "NotExecuted: x"), False),
        5: (verdict("error", None, "Died: x"), False),
        6: (verdict("hang"), False),
        7: (verdict("timeout"), False),
    }
    table = faults.count(verdicts, {1: 3, 3: 1, 4: 1, 5: 1, 6: 1})
    assert {key: table[key] for key in ("calls", "ok", "late", "not_executed", "untold", "hangs")} == {
        "calls": 7, "ok": 2, "late": 1, "not_executed": 1, "untold": 2, "hangs": 1,
    }  # fmt: skip
    assert (table["duplicates"], table["lost"], table["wrong"]) == (2, 1, 2)
    assert (table["untold_ran"], table["untold_not"]) == (1, 1)


@pytest.mark.ci
@pytest.mark.alone
def test_zbus_runs_nothing_twice_and_says_what_it_knows() -> None:
    """Cuts, lost replies, kills, stalls: every call is answered, none twice, nothing false, nothing rebuilt by hand."""
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "ss", "iptables"))
    if not tools or subprocess.run(NAMESPACE, check=False, capture_output=True).returncode:
        pytest.skip("needs unshare, ip, ss and iptables in a namespace")
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "--json", "--peers", "zbus,zbus-wait", "--rounds", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=scaled(240))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["fault"] for line in lines] == ["cut", "reply", "kill", "stall", "stall"], lines
    for line in lines:
        bad = {key: line[key] for key in ("hangs", "duplicates", "lost", "wrong", "untold", "rebuilt")}
        assert not any(bad.values()), line
    cut, reply, kill, _, wait = lines
    assert cut["ok"] == cut["calls"]
    assert reply["ok"] == reply["calls"]
    assert (kill["unknown"], kill["not_executed"]) == (2, 4), "one ran in each round, two were proved not to have"
    assert wait["ok"] + wait["late"] == wait["calls"]
