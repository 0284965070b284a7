from __future__ import annotations

import os

import pytest

from workers.background import Background
from workers.membership import Joiner, Notice, controller_lease
from zbus.config import TrialDir
from zbus.errors import RegistryError
from zbus.registry.identity import pid_space, pid_start
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import EpochRecord, JobRecord, Lease, Records

TTL_S = 1.0


class Sick(MemoryRegistry):
    """A registry that cannot be read while ``sick``."""

    sick = False

    def get(self, key: str) -> bytes | None:
        if self.sick:
            msg = "the disk does not answer"
            raise RegistryError(msg)
        return super().get(key)


class Watching:
    """A joiner that watches the lease of a controller elsewhere, driven step by step, over a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trial: TrialDir) -> None:
        self.now_ns = 0
        self.hears: set[int] = set()
        self.news: list[Notice] = []
        self.registry = Sick()
        self.records = Records(self.registry)
        self.epoch = self.records.claim_epoch(EpochRecord(session="aa", host="far", pid_space="far", pid=1)).epoch
        self.renew(1)
        monkeypatch.setattr("workers.membership.time.monotonic_ns", lambda: self.now_ns)
        self.joiner = Joiner(
            trial,
            "actor",
            Background(self.news.append),  # type: ignore[arg-type]  # takes what nobody expected, too
            self.news.append,
            wait_s=1.0,
            hears=lambda epoch: epoch in self.hears,
        )
        self.joiner._records = self.records
        self.joiner._epoch = self.epoch

    def renew(self, counter: int) -> None:
        """Let the controller renew its lease."""
        self.records.renew_lease(Lease(holder=controller_lease(self.epoch), counter=counter, ttl_s=TTL_S))

    def look(self, times: int) -> None:
        """Look again and again, as often as the joiner wants to."""
        for _ in range(times):
            pause_s = self.joiner._watch_lease()
            if pause_s is None:
                return
            self.now_ns += int(pause_s * 1e9)


@pytest.fixture
def watching(monkeypatch, tmp_path):
    """Give a joiner whose controller is on another host."""
    return Watching(monkeypatch, TrialDir.create(tmp_path, "exp", "trial"))


def test_a_lease_that_stands_still_means_a_lost_controller(watching):
    """Silent for its time and not connected: lost, and told once."""
    watching.look(3)
    assert watching.news == []
    watching.look(10)
    assert watching.news == ["controller lost"]


def test_a_controller_that_is_connected_is_not_lost_by_its_lease(watching):
    """R8: while its hub is connected a lease that does not move is the disk's fault; its time runs from the loss on."""
    watching.hears = {watching.epoch}
    watching.look(100)
    assert watching.news == []
    watching.hears = {watching.epoch + 1}  # another controller's hub is no sign of this one
    watching.look(3)
    assert watching.news == []
    watching.look(10)
    assert watching.news == ["controller lost"]


def test_a_registry_that_cannot_be_read_proves_nothing_and_is_read_on(watching):
    """However long the disk is away, the lease does not age meanwhile, and is watched again after it."""
    watching.look(1)
    watching.registry.sick = True
    watching.look(1000)
    assert watching.news == []
    watching.registry.sick = False
    watching.renew(2)
    watching.look(3)
    assert watching.news == []
    watching.look(10)
    assert watching.news == ["controller lost"]


@pytest.mark.parametrize("kind", ["pid", "time"])
def test_a_pid_means_nothing_in_another_namespace(watching, kind):
    """Row 57: the same boot, pid and start in another space are no proof of life; the lease decides."""
    pid = os.getpid()
    boot, *rest = pid_space().split("-")
    assert rest[0].isdigit()
    other = "-".join([boot, "1", rest[1]] if kind == "pid" else [boot, rest[0], "1"])
    assert len({other, pid_space()}) == 2
    for space, handle_expected in ((pid_space(), True), (other, False)):
        record = EpochRecord(session="bb", pid_space=space, pid=pid, pid_start=pid_start(pid))
        epoch = watching.records.claim_epoch(record)
        watching.records.publish_job(JobRecord(role="actor", epoch=epoch.epoch, engine="a:B", world_size=1))
        watching.records.renew_lease(Lease(holder=controller_lease(epoch.epoch), counter=1, ttl_s=TTL_S))
        alive, handle, _ = watching.joiner._controller_lives(watching.records, epoch)
        assert (alive, handle is not None) == (handle_expected, handle_expected)
        if handle is not None:
            handle.close()


def lead(watching: Watching, **fields: object) -> EpochRecord:
    """Have a controller elsewhere claim the next epoch, with a job and a lease."""
    epoch = watching.records.claim_epoch(EpochRecord(session="cc", host="far", pid_space="far", pid=7, **fields))  # type: ignore[arg-type]
    watching.records.publish_job(JobRecord(role="actor", epoch=epoch.epoch, engine="a:B", world_size=1))
    watching.epoch = epoch.epoch
    watching.renew(1)
    return epoch


def test_a_controller_elsewhere_is_called_gone_only_after_the_time_of_its_lease(watching):
    """Before, it has only not been heard: an agent that starts late sees its lease stand still between two renewals."""
    epoch = lead(watching)
    joiner = watching.joiner
    joiner._look()
    assert joiner._reason == (
        f"its controller has still to give a sign of life, within 1 s (epoch {epoch.epoch}, pid 7 on far)"
    )
    watching.now_ns += int(0.9e9 * TTL_S)
    joiner._look()
    assert joiner._reason.startswith("its controller has still to give a sign of life")
    watching.now_ns += int(0.2e9 * TTL_S)
    joiner._look()
    assert joiner._reason.startswith("the last controller of this trial is gone: no sign of life for 1 s (epoch")
    watching.renew(2)
    joiner._look()
    assert [news.epoch for news in watching.news] == [epoch]


def test_a_controller_that_claims_the_trial_while_it_is_awaited_lives(watching):
    """No sign of its lease is waited for: the claim is one."""
    joiner = watching.joiner
    joiner._look()
    assert joiner._reason == "no controller has claimed this trial yet"
    epoch = lead(watching)
    joiner._look()
    assert [news.epoch for news in watching.news] == [epoch]


def test_a_controller_of_this_kernel_is_gone_with_its_process(watching):
    """Nobody waits for the time of its lease, and that it has claimed the trial just now is no sign of life."""
    joiner = watching.joiner
    joiner._look()
    epoch = watching.records.claim_epoch(
        EpochRecord(session="dd", host="here", pid_space=pid_space(), pid=os.getpid(), pid_start=1)
    )
    watching.records.renew_lease(Lease(holder=controller_lease(epoch.epoch), counter=1, ttl_s=TTL_S))
    joiner._look()
    assert joiner._reason.startswith("the last controller of this trial is gone (epoch")
    assert watching.news == []
