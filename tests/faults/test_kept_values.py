"""Values that ranks keep, while their owner, their reader or their holder dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from controller import Controller, Role
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus import NotExecuted, RefLostError
from zbus.config import Config
from zbus.config.schema import DataConfig

SIZE = (256, 1 << 20)
NBYTES = SIZE[0] * SIZE[1]


def keepers(**fields) -> Role:
    """Return a role of engines that keep and take."""
    return Role("ref_engine:Keeper", replicas=1, sys_path=[str(HERE)], **fields)


def status_of(bus: Controller, role: str) -> dict:
    """Return what the only rank of a role says of itself."""
    return next((status for name, status in bus.statuses().items() if name.role == role), {})


def pulling(bus: Controller, before: int) -> bool:
    """Tell whether the reader has some of the value, and not all."""
    return before < status_of(bus, "critic").get("bulk_pulled_bytes", 0) < before + NBYTES


@pytest.mark.parametrize("victim", ["actor", "critic"])
def test_a_death_in_the_middle_of_a_pull_is_told_and_leaves_nothing(tmp_path, victim):
    """The owner's is a lost Ref, the reader's that of its call: the method did not start, the other one serves on."""
    config = Config(data=DataConfig(shared_memory=0, refs=1 << 30))
    roles = {"actor": keepers(restart="one"), "critic": keepers(restart="one")}
    with launch(tmp_path, roles, config=config) as bus:
        actor, critic = bus.group("actor")[0], bus.group("critic")[0]
        for _ in range(5):
            ref = None  # the last one goes before the next is made
            ref = actor.blob.options(keep=True)(*SIZE)
            before = status_of(bus, "critic").get("bulk_pulled_bytes", 0)
            pid = status_of(bus, victim)["pid"]
            future = critic.corners.options(retries=0).submit(ref)
            wait_until(lambda future=future, before=before: future.done() or pulling(bus, before), what="the pull")
            os.kill(pid, signal.SIGSTOP)
            caught = not future.done()
            os.kill(pid, signal.SIGKILL)
            error = future.exception(scaled(20))
            del future
            if caught and error is not None:
                break
            wait_until(lambda: bus.group("actor").ready and bus.group("critic").ready, what="the rank to return")
        wanted = RefLostError if victim == "actor" else NotExecuted
        assert isinstance(error, wanted), error
        if victim == "actor":
            assert "killed by SIGKILL" in str(error)
            assert (error.started, error.outcome) == (False, "NOT_EXECUTED")
        del error
        if victim == "critic":
            wait_until(lambda: bus.group("critic").ready, what="the reader to return")
            assert critic.corners(ref) == [0, (SIZE[0] - 1) % 256, *SIZE]
        del ref
        wait_until(lambda: status_of(bus, "actor").get("refs") == 0, what="the value to go")
        wait_until(lambda: not status_of(bus, "actor").get("bulk_offered_bytes", 0), what="what is offered to go")


FIRST = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, {here!r})
    from controller import Controller, Role

    role = Role("ref_engine:Keeper", replicas=1, sys_path=[{here!r}], orphans="wait")
    bus = Controller.launch("test", {{"actor": role}}, root={root!r}, trial="t")
    refs = [bus.group("actor")[0].rollout(64, 512) for _ in range(3)]
    print("ready", flush=True)
    time.sleep(600)
    """
)


def test_values_of_a_killed_controller_go_and_its_successor_starts_with_none(tmp_path):
    """Nobody can use its handles any more: what workers that wait kept for it goes long before the lease ends."""
    code = FIRST.format(here=str(HERE), root=str(tmp_path))
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        with first.stdout:
            assert first.stdout.readline() == "ready\n"
        with Controller.attach(tmp_path / "test" / "t") as guest:
            assert status_of(guest, "actor")["refs"] == 3
            first.kill()
            first.wait()
            wait_until(lambda: status_of(guest, "actor")["refs"] == 0, what="its values to go")
        with Controller.takeover(tmp_path / "test" / "t", timeout=scaled(30)) as bus:
            ref = bus.group("actor")[0].rollout(64, 512)
            assert ref.get()["ids"].shape == (64, 512)
            assert status_of(bus, "actor")["refs"] == 1
    finally:
        first.kill()
        first.wait()
