"""Hosts with different versions of zbus: told at once, with both, before anything is called."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from disk_kit import external, worker
from launching import probes
from waiting import scaled, wait_until, within
from zbus.config import TrialDir
from zbus.errors import StartupError

OTHER = Path(__file__).parent / "drivers" / "other_version.py"


@pytest.mark.ci
def test_a_worker_of_another_version_is_refused_by_name(tmp_path, short_dir, monkeypatch):
    """Row 71: one rank of two runs another zbus: the launch ends within seconds, with both versions and what to do."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    trial = TrialDir.at(tmp_path, "mixed", "versions")
    command = [sys.executable, str(OTHER), "start", "--trial-dir", str(trial.path), "--role", "actor", "--rank", "1"]
    with worker(trial.path, "actor", "--rank", "0", log=tmp_path / "ours") as ours:
        theirs = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            began = time.monotonic()
            with pytest.raises(StartupError, match=r"actor/1 speaks version 2 of the protocol.* version 1") as caught:
                external(trial, {"actor": probes(2)})
            assert time.monotonic() - began < within(10)
            assert "99.0" in caught.value.facts["its zbus"]
            assert caught.value.facts["this zbus"]
            assert "same version of zbus" in (caught.value.hint or "")
        finally:
            theirs.terminate()
            theirs.wait(scaled(20))
        wait_until(lambda: ours.process.poll() is not None, timeout_s=20.0, what="the end of the other agent")
