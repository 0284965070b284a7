"""Records that nobody stands behind: a power cut, and a registry that is deleted under a trial that runs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launching import launch, probes
from run_kit import RunKit, run_kit
from waiting import wait_until
from zbus.config import TrialDir
from zbus.registry import FileRegistry, Records
from zbus.registry.records import WorkerRecord

pytestmark = pytest.mark.alone


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a job of two ranks, and check at the end that no process is left."""
    yield from run_kit(tmp_path, short_dir, monkeypatch)


def cut_the_power(kit: RunKit) -> None:
    """End all processes of the trial at one moment, so that none can say how another ended."""
    pids = [int(line.split()[0]) for line in kit.processes()]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
    kit.gone(10.0)
    for running in kit._running:
        running.process.wait()  # its last thread is gone, and with it the lock of the trial


@pytest.mark.ci
def test_a_run_after_a_power_cut_trusts_no_old_address(kit):
    """Row 50: records without an exit, and a stranger on an old port: the next epoch serves, and tells it nothing."""
    running = kit.start("-t", "cut", "scheduler.transport=tcp", "params.how=sleep:60", "params.peers=sleep:60")
    running.wait_err("ready")
    kit.wait_log("step")
    old = kit.records().workers("actor")
    assert len(old) == 2
    cut_the_power(kit)
    assert not kit.exits()
    ports = {int(endpoint.rpartition(":")[2]) for record in old for endpoint in (*record.main, *record.ctl)}
    strangers = [socket.create_server(("127.0.0.1", port)) for port in sorted(ports)]
    try:
        done = kit.run("-t", "cut", "--resume", "scheduler.transport=tcp")
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert "died" not in done.err
        heard = b""
        for stranger in strangers:
            stranger.setblocking(False)  # the socket's own argument
            with suppress(BlockingIOError):
                while True:
                    peer, _ = stranger.accept()
                    with peer:
                        peer.settimeout(0.1)
                        with suppress(OSError):
                            heard += peer.recv(1 << 16)
        assert b"step" not in heard
        assert b"create_engine" not in heard
    finally:
        for stranger in strangers:
            stranger.close()
    records = kit.records()
    assert [one.epoch for one in records.epochs()] == [1, 2]
    newest = {one.rank: one for one in records.workers("actor") if one not in old} or {
        one.rank: one for one in records.exits("actor")
    }
    assert {one.start for one in newest.values()} == {1}


def test_what_a_killed_agent_left_is_no_rank_of_the_next_run(tmp_path):
    """Its ranks' ends stand nowhere; a run that is resumed neither waits for them nor fails by what becomes of them."""
    trial = TrialDir.create(tmp_path, "test", "left")
    records = Records(FileRegistry(trial.registry))
    for rank in range(2):
        # Of another version, so that whoever takes it for a rank of this run says so at once.
        records.publish_worker(WorkerRecord(role="actor", rank=rank, incarnation=1 + rank, protocol=99))
    trial.unlock()
    with launch(tmp_path, {"actor": probes(2)}, trial="left", resume=True) as bus:
        assert [one["rank"] for one in bus.group("actor").whoami()] == [0, 1]


def test_a_registry_deleted_under_a_run_is_made_again(tmp_path, caplog):
    """Row 51: calls go on; one renewal later records and leases are back, with a warning; a rank may die and return."""
    caplog.set_level(logging.INFO, "zbus")
    with launch(tmp_path, {"actor": probes(2, restart="one")}) as bus:
        actor = bus.group("actor")
        before = {one["rank"]: one["pid"] for one in actor.whoami()}
        registry = bus.trial.registry

        def calls_go_on(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                assert actor.echo(1) == 1

        calls_go_on(1.0)  # in which the agent has vouched for its ranks' records
        stands = {path.relative_to(registry) for path in registry.glob("*/*")}
        assert {path.parts[0] for path in stands} >= {"epochs", "jobs", "agents", "leases", "ranks", "workers"}
        shutil.rmtree(registry)
        calls_go_on(1.0)
        assert {one["rank"]: one["pid"] for one in actor.whoami()} == before

        def back() -> bool:
            return stands <= {path.relative_to(registry) for path in registry.glob("*/*")}

        wait_until(back, timeout_s=20.0, what="the records to be put back")
        os.kill(before[0], signal.SIGKILL)
        who = actor[0].whoami.options(retries=5)
        assert wait_until(lambda: who()["start"] == 1, timeout_s=20.0, what="the next start of the rank")
        assert actor.echo(2) == 2
        records = Records(FileRegistry(registry, create=False))
        assert [(one.rank, one.signal) for one in records.exits()] == [(0, signal.SIGKILL)]
        assert not records.junk
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "had been deleted; made it again" in said or "is a new directory; putting" in said
