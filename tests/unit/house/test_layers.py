from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

pytest.importorskip("importlinter", reason="lint tools are not installed")

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("zbus", "workers", "controller", "traceview")

PLANTED = [
    ("zbus/errors.py", "import zbus.ids", "zbus.errors is not allowed to import zbus.ids"),
    ("zbus/trace/args.py", "import zbus.trace.writer", "zbus.trace.args is not allowed to import zbus.trace.writer"),
    ("zbus/codec/limits.py", "import zbus.registry", "zbus.codec is not allowed to import zbus.registry"),
    ("zbus/transport/endpoints.py", "import controller.dispatch", "zbus.transport is not allowed to import controller"),
    ("workers/spec.py", "import controller.role", "workers is not allowed to import controller"),
    ("controller/role.py", "import zbus.testing", "controller is not allowed to import zbus.testing"),
    ("zbus/discovery/state.py", "import zmq", "zbus.discovery.state -> zmq"),
    ("zbus/protocol/caller.py", "def late():\n    import time", "zbus.protocol.caller -> time"),
    ("controller/dispatch.py", "import threading", "controller.dispatch -> threading"),
]


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [command, "--no-logo", "--no-cache"], cwd=tree, capture_output=True, text=True, timeout=scaled(100)
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a copy of the packages and of the contracts."""
    copy = tmp_path_factory.mktemp("layers")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_every_planted_violation_is_caught(tree: Path):
    """One forbidden import of each kind, all at once: each is named; without them the contracts are kept."""
    clean = _lint(tree)
    for file, line, _ in PLANTED:
        with (tree / file).open("a") as source:
            source.write(f"\n{line}\n")
    planted = _lint(tree)

    assert clean.returncode == 0, clean.stdout
    assert planted.returncode == 1
    said = " ".join(planted.stdout.split())
    missing = [expected for _, _, expected in PLANTED if expected not in said]
    assert missing == [], planted.stdout
