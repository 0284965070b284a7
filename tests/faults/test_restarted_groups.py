"""Groups that are given fresh processes: by policy across agents, and by the driver when ranks are stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import zbus
from controller import Controller, Role
from launching import launch
from run_kit import DRIVERS
from waiting import scaled, wait_until
from zbus.config import Config

pytestmark = pytest.mark.alone

ENGINE = f"{DRIVERS}/network_engines.py:Counting"


def agent(trial: Path, rank: int, log: Path) -> subprocess.Popen[bytes]:
    """Start an agent of one rank by hand."""
    with log.open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "workers", "start", "--trial-dir", str(trial), "--role", "actor", "--rank",
             str(rank)],
            stdin=subprocess.DEVNULL, stdout=err, stderr=err,
        )  # fmt: skip


def test_a_death_under_one_agent_restarts_the_ranks_of_the_others(tmp_path):
    """restart=all with an agent per host: the rank that did not fail gets a fresh start too, once."""
    agents: list[subprocess.Popen[bytes]] = []
    trial = tmp_path / "test" / "t"

    def start() -> None:
        wait_until((trial / "registry").is_dir, what="the registry")
        agents.extend(agent(trial, rank, tmp_path / f"agent{rank}.log") for rank in range(2))

    starter = threading.Thread(target=start)
    starter.start()
    config = Config()
    config = replace(config, scheduler=replace(config.scheduler, type="external"))
    role = Role(ENGINE, replicas=2, args=[str(tmp_path / "effects")], restart="all")
    try:
        with launch(tmp_path, {"actor": role}, trial="t", config=config, startup_timeout=scaled(60)) as bus:
            actor = bus.group("actor")
            before = actor.who()
            os.kill(before[0]["pid"], signal.SIGKILL)
            wait_until(
                lambda: [one["start"] for one in actor.who.options(retries=5, deadline=scaled(30))()] == [1, 1],
                30,
                "a fresh start of both ranks",
            )
            after = actor.who()
            assert not {one["pid"] for one in before} & {one["pid"] for one in after}
            assert actor.add("x") == [1, 1]
    finally:
        starter.join()
        for process in agents:
            process.terminate()
            process.wait(scaled(20))
    assert "died" not in (tmp_path / "agent1.log").read_text()


@pytest.mark.ci
@pytest.mark.parametrize("restart", ["never", "one", "all"])
def test_a_driver_restarts_a_group_whose_ranks_are_stuck(tmp_path, restart):
    """``bus.restart`` ends what runs, with or without a policy: fresh processes and a known outcome."""
    role = Role(ENGINE, replicas=2, args=[str(tmp_path / "effects")], restart=restart)
    with launch(tmp_path, {"actor": role}) as bus:
        actor = bus.group("actor")
        before = {one["pid"] for one in actor.who()}
        stuck = actor.add.submit("stuck", 600.0)
        wait_until(lambda: (tmp_path / "effects").exists() and "stuck" in (tmp_path / "effects").read_text(),
                   what="the call to run")  # fmt: skip
        began = time.monotonic()
        bus.restart("actor", timeout=scaled(30))
        print(f"{restart}: restarted in {time.monotonic() - began:.1f} s")
        error = stuck.exception(scaled(10))
        assert isinstance(error, zbus.BatchError)
        assert {one.outcome for one in (error.root, *error.collateral)} == {"UNKNOWN"}
        now = actor.who()
        assert [one["start"] for one in now] == [1, 1]
        assert not before & {one["pid"] for one in now}
        assert actor.add("after") == [1, 1]


def test_a_role_that_is_not_there_cannot_be_restarted(tmp_path):
    """Neither can one without processes of its own."""
    role = Role(ENGINE, args=[str(tmp_path / "effects")])
    with launch(tmp_path, {"actor": role}, scheduler="inline") as bus:
        with pytest.raises(zbus.ConfigError, match="no role 'critic'"):
            bus.restart("critic")
        with pytest.raises(zbus.ConfigError, match="no processes of their own"):
            bus.restart("actor")
    assert isinstance(bus, Controller)
