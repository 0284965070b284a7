"""A process that has run out of descriptors serves those it has, refuses new ones, and recovers."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from msgspec import structs

from controller import Controller
from launching import launch, probes
from waiting import scaled, wait_until
from zbus.config import Config
from zbus.errors import ZbusError

pytestmark = [pytest.mark.ci, pytest.mark.alone]


def over_tcp() -> Config:
    """Return a config whose workers are reached over tcp."""
    config = Config()
    return structs.replace(config, scheduler=structs.replace(config.scheduler, transport="tcp"))


def test_a_worker_without_descriptors_refuses_newcomers_and_serves_on(tmp_path):
    """Row 59: the limit of a live worker falls to what it has open: calls go on, a guest is told, and later let in.

    Over tcp: libzmq itself ends a process that cannot accept a connection over ipc.
    """
    with launch(tmp_path, {"actor": probes(1)}, config=over_tcp()) as bus:
        actor = bus.group("actor")
        pid = actor[0].whoami()["pid"]
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, hard))
        try:
            for number in range(3):
                with pytest.raises(ZbusError) as caught, Controller.attach(bus.trial.path, timeout=1.0) as guest:
                    guest.group("actor").options(deadline=1.0).whoami()
                assert "actor" in str(caught.value) or "0" in str(caught.value)
                for _ in range(50):
                    assert actor.echo(number) == number
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

        def let_in() -> bool:
            try:
                with Controller.attach(bus.trial.path, timeout=scaled(2.0)) as guest:
                    return guest.group("actor").options(deadline=scaled(2.0)).whoami()[0]["pid"] == pid
            except ZbusError:
                return False

        wait_until(let_in, timeout_s=20.0, what="a guest to be let in")
        assert actor[0].whoami()["pid"] == pid
