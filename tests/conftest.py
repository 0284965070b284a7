"""What every test gets: a clean ZBUS_* environment, short runtime directories, and a check for leftovers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("wide", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("ZBUS_TEST_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
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
