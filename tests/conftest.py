"""What every test gets: a clean ZBUS_* environment, short runtime directories, and a check for leftovers."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from waiting import wait_until

settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("wide", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("ZBUS_TEST_PROFILE", "default"))


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so, and everything that tests start would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the developer's own settings, so that a test sees only what it sets."""
    for name in list(os.environ):
        if name.startswith(("ZBUS_", "SLURM_")) and not name.startswith("ZBUS_TEST_"):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Give a private directory with a path short enough for ipc sockets (107 bytes), removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="zt", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of real processes that leaves one behind."""
    if not {"integration", "faults"} & set(request.path.parts):
        yield
        return
    before = _children()
    yield
    wait_until(lambda: not _children() - before, what="the end of every process that this test started")


def _children() -> set[str]:
    """Return the living child processes of this one as ``pid command``; zombies are gone."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread ended, or the kernel has no such file
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command:  # a zombie has none
                found.add(f"{pid} {command.strip()}")
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests marked ``alone`` on one xdist worker, so that they do not disturb each other."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
