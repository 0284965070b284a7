"""A trial whose disk is full or read-only for a while: what runs goes on, what is new fails with the reason (R8)."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from controller import Controller
from disk_kit import ELSEWHERE, external, filled, mount, mounted, needs_root, worker
from launching import probes
from waiting import wait_until
from zbus.config import TrialDir
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records

pytestmark = [pytest.mark.ci, pytest.mark.alone, needs_root]

LEASE_S = 1.0


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Take the right to write to the registry away for a block, as a file server in trouble does."""
    (registry,) = disk.glob("runs/*/*/registry")
    mount("--bind", registry, registry)
    try:
        mount("-o", "remount,ro,bind", registry)
        yield
        mount("-o", "remount,rw,bind", registry)
    finally:
        subprocess.run(["umount", "-l", str(registry)], check=True)


FAULTS = {
    "full": ("size=2m,nr_inodes=2000", filled, "No space left on device"),
    "read-only": ("size=64m", read_only, "Read-only file system"),
}


@contextmanager
def two_hosts(disk: Path, logs: Path) -> Iterator[Controller]:
    """Run a trial on ``disk`` whose workers see the controller as one of another host: by its lease alone."""
    trial = TrialDir.at(disk / "runs", "full", "disk")
    with ExitStack() as stack:
        for name in ("actor", "latecomer"):
            stack.enter_context(worker(trial.path, name, log=logs / name, prefix=ELSEWHERE))
        roles = {"actor": probes(1), "latecomer": probes(1)}
        yield stack.enter_context(external(trial, roles, lease=LEASE_S))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_takes_nothing_ends_no_run(tmp_path, short_dir, monkeypatch, caplog, fault):
    """Rows 40, 41, 43: calls go on beyond every lease, nobody is dead, a newcomer hears why, and all heals."""
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    caplog.set_level(logging.INFO, "zbus")
    options, broken, reason = FAULTS[fault]
    with (
        mounted(tmp_path / "disk", "-t", "tmpfs", "-o", options, "zbus-test") as disk,
        two_hosts(disk, tmp_path) as bus,
    ):
        actor, latecomer = bus.group("actor"), bus.group("latecomer")
        records = Records(FileRegistry(bus.trial.registry, create=False))
        pids = [group[0].whoami()["pid"] for group in (actor, latecomer)]
        before = records.leases()
        with broken(disk):
            until = time.monotonic() + 3 * LEASE_S
            calls = 0
            while time.monotonic() < until:
                assert actor.echo(calls) == calls
                calls += 1
                time.sleep(0.01)  # the fault has a length
            with worker(bus.trial.path, "actor", log=tmp_path / "new") as new:
                assert new.end() == 5
            assert "cannot write registry record leases/actor." in new.said
            assert reason in new.said
            assert "Traceback" not in new.said
            assert records.leases().keys() == before.keys()
            assert not records.junk
            assert calls > 50
        assert [group[0].whoami()["pid"] for group in (actor, latecomer)] == pids
        wait_until(
            lambda: all(lease.counter > before[name].counter for name, lease in records.leases().items()),
            what="every lease to be renewed again",
        )
        assert not records.exits()
        records.close()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "died" not in said
    assert "could not be renewed" in said
    assert "could not be renewed" in (tmp_path / "actor").read_text()
    assert "controller is gone" not in (tmp_path / "actor").read_text()
