"""Pytest fixtures for testing trainers on the bus, loaded by pytest by itself where zbus is installed.

``zbus_trial`` launches trials that are closed at the end of the test; ``zbus_fault_proxy`` stands between their
controllers and workers. See ``docs/how-to/test-with-faults.md``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from controller import Controller, Role
    from zbus.config import TrialDir
    from zbus.testing.proxy import FaultProxy

__all__ = ["TrialLauncher", "zbus_fault_proxy", "zbus_trial"]


class TrialLauncher:
    """Launches trials below one directory; each is closed, the last first, when the test ends.

    Args:
        root: Directory of the trials.

    Attributes:
        root: Where trials are made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open = contextlib.ExitStack()

    def __call__(self, roles: Mapping[str, Role], experiment: str = "test", **options: Any) -> Controller:
        """Launch a trial and return its controller when every rank is ready.

        Args:
            roles: Roles by name, as for ``Controller.launch``.
            experiment: Name of the experiment.
            options: Further arguments of ``Controller.launch``.

        Raises:
            ZbusError: As ``Controller.launch``.
        """
        from controller import Controller

        options.setdefault("root", self.root)
        options.setdefault("startup_timeout", 60.0)
        return self._open.enter_context(Controller.launch(experiment, roles, **options))

    def pid(self, bus: Controller, role: str, rank: int) -> int:
        """Return the process id of the current start of a rank.

        Raises:
            LookupError: No start of it is known.
        """
        return _pid(bus.trial, role, rank)

    def kill(self, bus: Controller, role: str, rank: int, signum: int = signal.SIGKILL) -> int:
        """Send a signal, SIGKILL by default, to the current start of a rank; return its process id."""
        pid = self.pid(bus, role, rank)
        os.kill(pid, signum)
        return pid

    def close(self) -> None:
        """Close every trial that is open."""
        self._open.close()


def _pid(trial: TrialDir, role: str, rank: int) -> int:
    from zbus.registry.file import FileRegistry
    from zbus.registry.records import Records

    records = Records(FileRegistry(trial.registry, create=False))
    try:
        starts = [record for record in records.workers(role) if record.rank == rank]
    finally:
        records.close()
    if not starts:
        msg = f"no start of {role}/{rank} is known"
        raise LookupError(msg)
    return max(starts, key=lambda record: record.start).pid


@pytest.fixture
def zbus_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialLauncher]:
    """Give a launcher; what it launches ends with the test."""
    with tempfile.TemporaryDirectory(prefix="zbus-", dir="/tmp") as short:  # socket paths must be short
        monkeypatch.setenv("ZBUS_RUNTIME_DIR", short)
        launcher = TrialLauncher(tmp_path)
        try:
            yield launcher
        finally:
            launcher.close()


@pytest.fixture
def zbus_fault_proxy() -> Iterator[FaultProxy]:
    """Lead every controller that the test launches through a fault proxy, and give that proxy.

    Silence is asked about after 20 ms, so that lost messages cost a test no seconds.
    """
    from zbus.testing.proxy import FaultProxy, between, quick

    with FaultProxy() as proxy, between(proxy, timing=quick()):
        yield proxy
