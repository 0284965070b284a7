"""Short soaks: random faults against a real trial, every answer compared with what really ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

pytestmark = pytest.mark.alone

ZEROS = ("duplicates", "lost", "hangs", "orphans", "leaks", "untrue", "disorder")


def soak(directory: Path, seconds: int, seed: int, *options: str) -> dict:
    """Run a soak in a process of its own and return its figures."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "zbus.testing.chaos", "--json"),
            *("--seconds", str(seconds), "--seed", str(seed), "--directory", str(directory / "soak")),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=scaled(seconds + 90),
    )
    assert ran.stdout, ran.stderr
    figures = json.loads(ran.stdout)
    assert figures["failures"] == [], (seed, figures["failures"], ran.stderr[-2000:])
    assert ran.returncode == 0
    return figures


def test_a_few_seconds_of_chaos_break_no_promise(tmp_path, short_dir, monkeypatch):
    """All planned faults are injected; nothing runs twice, is lost, hangs or is left behind."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    figures = soak(tmp_path, 8, seed=1)
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert figures["faults"] == figures["planned"] >= 8
    assert figures["calls"] > 200


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_chaos_among_hosts_that_share_no_memory_breaks_no_promise(tmp_path, short_dir, monkeypatch):
    """Large arrays and kept values are pulled over tcp while ranks die, stop and are cut off: every sum is right."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    figures = soak(tmp_path, 30, 5, "--far")
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert figures["faults"] == figures["planned"] >= 30
    assert figures["kills"] >= 1
    assert figures["calls"] > 1000


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_minute_of_chaos_breaks_no_promise(tmp_path, short_dir, monkeypatch):
    """At least a fault each second for a minute: all zeros, every UNKNOWN has a cause, memory stays flat.

    The run is traced, and its sidecar is killed and stopped too: every record of a process that ended is accounted for,
    each of its executions has its span, and all of it merges.
    """
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    figures = soak(tmp_path, 60, seed=2)
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert figures["faults"] == figures["planned"] >= 60
    assert figures["kills"] >= 3
    assert figures["restarts"] >= figures["kills"]
    assert figures["calls"] > 2000
    faults = {"kill", "stop", "drop_request", "drop_reply", "cut", "freeze", "sidecar_kill", "sidecar_stop"}
    assert set(figures["injected"]) >= faults
    trace = figures["trace"]
    assert trace["recorded"] == trace["written"] + sum(trace["lost"].values())
    assert trace["missing_spans"] == 0
    assert trace["ended"] >= 5  # controller and four ranks
    assert trace["spans"] > 1000
    early, late = figures["rss_mb"]
    assert late - early < 15, figures["rss_mb"]
