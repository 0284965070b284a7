"""A registry on a shared file system that lags, loses handles and hangs: readers wait and find, nobody is dead."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from controller import Controller, Role
from disk_kit import ELSEWHERE, external, worker
from launching import HERE
from share_kit import Client, needs_fuse, share
from waiting import wait_until, within
from zbus.config import TrialDir
from zbus.registry import FileRegistry, Records
from zbus.registry.records import EpochRecord, WorkerRecord

pytestmark = [pytest.mark.ci, pytest.mark.alone, needs_fuse]

LEASE_S = 1.5


def seconds_until(look) -> float:
    """Wait until a look finds something; return how long it took."""
    began = time.monotonic()
    wait_until(look, timeout_s=20.0, what="the record to be seen")
    return time.monotonic() - began


def test_a_record_that_lags_is_found_when_it_can_be_seen(tmp_path):
    """Row 45: names that a reader remembers as absent delay it, they are no error, and claims have one winner."""
    lag_s = 2.0
    with share(tmp_path, lag_s) as (here, there):
        ours, theirs = (Records(FileRegistry(client.path / "registry")) for client in (here, there))
        ours.publish_worker(WorkerRecord(role="actor", rank=9, incarnation=9))
        wait_until(theirs.workers, timeout_s=20.0, what="the area")
        assert theirs.worker("actor", 0, 7) is None
        assert theirs.registry.get("claims/c") is None
        record = WorkerRecord(role="actor", rank=0, incarnation=7)
        ours.publish_worker(record)
        assert ours.registry.claim("claims/c", b"ours") == b"ours"
        took = seconds_until(lambda: theirs.worker("actor", 0, 7))
        assert took < lag_s + within(1.0)
        assert theirs.worker("actor", 0, 7) == record
        assert [one.rank for one in theirs.workers()] == [0, 9]
        assert theirs.registry.claim("claims/c", b"theirs") == b"ours"
        claimed = [side.claim_epoch(EpochRecord(session=f"{n:02x}")).epoch for n in range(3) for side in (ours, theirs)]
        assert claimed == [1, 2, 3, 4, 5, 6]
        assert theirs.withdraw_worker(record)
        assert not theirs.junk


@contextmanager
def trial(base: Path, lag_s: float) -> Iterator[tuple[Controller, Client, Client]]:
    """Run a trial whose controller sees one mount and whose workers, strangers to its pids and clock, the other."""
    engine = f"{HERE}/faults/drivers/network_engines.py:Counting"
    role = Role(engine, replicas=2, args=[str(base / "effects")], restart="one")
    with ExitStack() as stack:
        here, there = stack.enter_context(share(base, lag_s))
        theirs = TrialDir.at(there.path / "runs", "lag", "trial").path
        for rank in range(2):
            flags = ("--rank", str(rank))
            log = base / f"worker{rank}"
            stack.enter_context(worker(theirs, "actor", *flags, log=log, prefix=ELSEWHERE, lease=f"{LEASE_S}s"))
        ours = TrialDir.at(here.path / "runs", "lag", "trial")
        bus = stack.enter_context(external(ours, {"actor": role}, lease=LEASE_S))
        yield bus, here, there


def calls_for(bus: Controller, seconds: float) -> float:
    """Make calls for a while; return how long the slowest took."""
    slowest = 0.0
    until = time.monotonic() + seconds
    number = 0
    while number <= 20 or time.monotonic() < until:
        began = time.monotonic()
        bus.group("actor").add(f"c{seconds}.{number}")
        number += 1
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def quiet(caplog: pytest.LogCaptureFixture, base: Path) -> None:
    """See that nobody was called dead."""
    said = " ".join(record.getMessage() for record in caplog.records)
    said += " ".join((base / f"worker{rank}").read_text() for rank in range(2))
    for word in ("died", "controller is gone", "was replaced", "Traceback"):
        assert word not in said


@pytest.fixture(autouse=True)
def _settings(short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    caplog.set_level(logging.INFO, "zbus")


def test_a_trial_over_mounts_that_lag_starts_and_restarts_its_ranks(tmp_path, caplog):
    """Row 45: two hosts that see each other's records seconds late; a rank that dies is told, and comes back."""
    with trial(tmp_path, 2.0) as (bus, _, _):
        actor = bus.group("actor")
        assert calls_for(bus, 3 * LEASE_S) < within(1.0)
        pid = actor[0].who()["pid"]
        os.kill(pid, signal.SIGKILL)
        who = actor[0].who.options(retries=5)
        assert wait_until(lambda: who()["start"] == 1, timeout_s=30.0, what="the next start")
        assert calls_for(bus, 0.5) < within(1.0)
        records = Records(FileRegistry(bus.trial.registry, create=False))
        (ended,) = wait_until(records.exits, what="the exit record, late as all records here")
        assert (ended.rank, ended.start, ended.signal) == (0, 0, signal.SIGKILL)
    assert "controller is gone" not in (tmp_path / "worker0").read_text()


STALE = {name: {"error": "ESTALE", "every": 5, "under": "registry"} for name in ("open", "read", "getattr", "readdir")}


def test_stale_handles_are_no_error_of_the_user(tmp_path, caplog):
    """Row 44: one in five opens, reads and listings of either host reports ESTALE: looked up again, nothing is lost."""
    with trial(tmp_path, 0.0) as (bus, here, there), here.fault(**STALE), there.fault(**STALE):
        assert calls_for(bus, 3 * LEASE_S) < within(1.0)
        records = Records(FileRegistry(bus.trial.registry, create=False))
        for number in range(50):
            records.registry.put("area/x", b"%d" % number)
            assert records.registry.get("area/x") == b"%d" % number
        assert records.registry.claim("area/c", b"mine") == b"mine"
        assert records.registry.delete("area/x", b"49")
    quiet(caplog, tmp_path)


def test_a_disk_that_hangs_holds_up_nothing_but_itself(tmp_path, caplog):
    """Row 46: registry I/O takes longer than every lease; calls and liveness go on, and nobody is dead."""
    with trial(tmp_path, 0.0) as (bus, here, there):
        hang = {name: {"sleep": 2 * LEASE_S, "under": "registry"} for name in ("rename", "open", "readdir")}
        with here.fault(**hang), there.fault(**hang):
            assert calls_for(bus, 4 * LEASE_S) < 2 * LEASE_S, "none waited for the disk"
        records = Records(FileRegistry(bus.trial.registry, create=False))
        before = records.leases()
        wait_until(
            lambda: all(lease.counter > before[name].counter for name, lease in records.leases().items()),
            timeout_s=20.0,
            what="every lease to be renewed again",
        )
        assert threading.active_count() < 50
        assert not records.exits()
    quiet(caplog, tmp_path)
