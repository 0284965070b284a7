"""A trial over tcp in a network namespace of its own, whose packets are lost, refused and slowed by the kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

HERE = Path(__file__).parent
TOOLS = ("unshare", "ip", "iptables", "tc")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ci,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.mark.parametrize("fault", ["drop", "drop_requests", "drop_replies", "reset", "loss", "link_down", "slow"])
def test_a_broken_network_that_heals_costs_only_time(tmp_path, short_dir, monkeypatch, fault):
    """4 s of a bad network to one worker: all calls are OK, each ran once, and nobody was called dead."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    driver = HERE / "drivers" / "network_driver.py"
    ran = subprocess.run(
        ["unshare", "--net", sys.executable, str(driver), fault, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=scaled(110),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout)
    assert told["outcomes"] == {"OK": told["calls"]}, ran.stderr[-2000:]
    assert told["starts"] == [0, 0]
    assert told["effects"] == {}
    assert told["names"] == told["calls"]
    assert "died" not in ran.stderr
    hit = {"reset": 20, "loss": 0, "slow": 1}.get(fault, 20)
    assert told["open_at_heal"] >= hit, "the fault harmed nothing"
    assert told["peer_answered"] or fault in {"link_down", "slow"}
