"""More data on its way than the receiver has memory for: credit stops the senders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled, wait_until

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_MIB = 1024

pytestmark = [
    pytest.mark.ci,
    pytest.mark.alone,
    pytest.mark.skipif(
        not os.access(MEMORY_GROUPS / "cgroup.procs", os.W_OK), reason="needs root and a v1 memory cgroup"
    ),
]


def test_eight_ranks_that_send_more_than_fits_are_held_back(tmp_path, short_dir, monkeypatch):
    """Row 62: 2.5 GiB in 8 streams into a controller that may have 1 GiB: all arrives, and memory stays below it."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    group = MEMORY_GROUPS / f"zbus-test-{os.getpid()}"
    group.mkdir()
    try:
        driver = Path(__file__).parent / "drivers" / "memory_driver.py"
        done = subprocess.run(
            [sys.executable, str(driver), str(tmp_path), str(group), str(LIMIT_MIB << 20)],
            capture_output=True,
            text=True,
            timeout=scaled(100),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout)
        assert told["got_mib"] == 8 * 10 * 32
        assert max(told["ahead"]) <= 2 + 2, "items made while nobody read: a window, one taken, one at its yield"
        assert told["peak_mib"] < LIMIT_MIB
        assert told["answers"] == list(range(8))
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the group to be empty")
        group.rmdir()
