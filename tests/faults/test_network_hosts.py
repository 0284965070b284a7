"""Ranks on several hosts, each with its own network, processes and boot id; one of them is cut off, or moves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled

HERE = Path(__file__).parent
TOOLS = ("unshare", "nsenter", "ip", "iptables", "mount", "hostname", "tc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ci,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

Play = Callable[[str], dict[str, Any]]

HEARTBEAT_S = 12.0
"""A vanished host is noticed after a ping every 2 s and 10 s without an answer."""


@pytest.fixture
def play(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that plays a scenario of ``drivers/hosts_driver.py`` and returns what it tells."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))

    def run(scenario: str) -> dict[str, Any]:
        ran = subprocess.run(
            ["unshare", "--net", "--mount", sys.executable, str(HERE / "drivers" / "hosts_driver.py"), scenario,
             str(tmp_path)],
            capture_output=True, text=True, timeout=scaled(110),
        )  # fmt: skip
        logs = "".join(f"\n== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(tmp_path.glob("*.log")))
        assert ran.returncode == 0, ran.stderr[-3000:] + logs
        told: dict[str, Any] = json.loads(ran.stdout)
        told["stderr"] = ran.stderr
        return told

    return run


def test_a_host_cut_off_beyond_its_lease_and_replaced_ends_with_11(play):
    """Rows 5, 25, 30: the call that ran is UNKNOWN, the others go on at the replacement; healed, the old one leaves.

    Nothing runs twice, and the old one starts nothing once its lease is over: what was queued there never runs.
    """
    told = play("replaced")
    assert told["outcomes"] == ["UNKNOWN lease"] * 6
    assert told["declared"] < HEARTBEAT_S + scaled(2.0)
    assert told["start"] == 1
    assert (told["after"], told["more"]) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert told["code"] == 11
    assert "actor/0 was replaced while this agent was taken for dead: start 1 by agent actor.host4" in told["told"]
    assert told["exits"] == [[0, 0, 11, None]]
    assert set(told["effects"].values()) == {1}
    assert not [name for name in told["effects"] if name.startswith("queued")]
    assert sum(told["effects"].values()) == told["at_heal"] + 5
    assert told["stderr"].count("actor/0 died") == 1
    assert "actor/1 died" not in told["stderr"]


def test_a_host_cut_off_beyond_its_lease_that_nobody_replaced_goes_on(play):
    """P9: what was open is UNKNOWN; healed, the same incarnation serves on, and nothing runs twice."""
    told = play("healed")
    assert told["outcomes"] == ["UNKNOWN lease"] * 6
    assert not told["ready_while_cut"]
    assert told["start"] == 0
    assert told["running"]
    assert told["back"] < scaled(5.0)
    assert set(told["effects"].values()) == {1}
    assert "actor/0 is back, and nothing has taken its place" in told["stderr"]
