"""Weights from trainers to generators in real processes, and what becomes of them when something fails midway."""

import os
import signal
from contextlib import contextmanager

import pytest

from controller import Role
from controller.weights import Limits, WeightSync
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus.errors import ConfigError

LIMITS = Limits(*[scaled(20)] * 6)
PATHS = ("memory", "disk", "group")


class Bench:
    """Two trainers and three generators that are started once, and brought back to health after each test."""

    def __init__(self, bus, root):
        self.bus = bus
        self.root = root
        self.train, self.rollout = bus.group("train"), bus.group("rollout")
        self.told = []  # what a listener was told
        self.made = 0

    @property
    def group(self):
        """As a RolloutController has it."""
        return self.rollout

    def mark_stale(self, rank, why):
        self.told.append((rank, "stale"))

    def mark_current(self, rank, version):
        self.told.append((rank, version))

    def set_version(self, version):
        self.told.append(("all", version))

    @contextmanager
    def sync(self, path="memory", *, listens=False, **options):
        """Yield a WeightSync that starts from version 1."""
        self.told.clear()
        if path == "disk":
            self.made += 1
            options["directory"] = self.root / f"weights-{self.made}"
        options.setdefault("limits", LIMITS)
        sync = WeightSync(self.train, self if listens else self.rollout, path=path, **options)
        sync.update(1)
        self.told.clear()
        try:
            yield sync
        finally:
            sync.close()

    def heal(self):
        """Wait until everyone is there, without troubles, paused or torn."""
        for group in (self.train, self.rollout):
            wait_until(lambda: group.ready, 60, f"{group!r} to be ready")  # noqa: B023  # used in this round
        self.rollout.expect({})
        self.rollout.pause()
        self.train.expect({})

    def state(self):
        """Return what each rank says of its weights, hashed anew."""
        return dict(enumerate(self.rollout.weights()))

    def pid(self, role, rank):
        return next(status["pid"] for name, status in self.bus.statuses().items() if str(name) == f"{role}/{rank}")

    def kill(self, role, rank, signum=signal.SIGKILL):
        os.kill(self.pid(role, rank), signum)


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """Start the processes once."""
    common = {"sys_path": [str(HERE)], "preload": ["torch", "weights_engines"], "max_restarts": 1000}
    roles = {
        "train": Role("weights_engines:Trainer", replicas=2, ports=1, restart="all", **common),
        "rollout": Role("weights_engines:Generator", replicas=3, restart="one", **common),
    }
    root = tmp_path_factory.mktemp("weights")
    with launch(root, roles) as bus:
        yield Bench(bus, root)


@pytest.fixture
def bench(trial):
    """Hand the processes over in good health."""
    trial.heal()
    return trial


def fine(version, digest):
    """Return what a rank in order says of its weights."""
    return {"version": version, "digest": digest, "torn": "", "paused": False}


@pytest.mark.parametrize("path", PATHS)
def test_all_ranks_have_the_trainers_weights_by_each_path(bench, path):
    """One digest everywhere, the version named on both sides, everyone goes on; the changed ones alone where asked."""
    with bench.sync(path, listens=True, changed_only=True) as sync:
        resumed = [count for count, _ in bench.rollout.counts()]
        bench.train.step("norm")
        report = sync.update()
        assert (report.version, report.ranks, report.stale, report.full) == (2, (0, 1, 2), {}, False)
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))
        assert bench.train.get_version() == sync.version == 2
        assert [count for count, _ in bench.rollout.counts()] == [count + 1 for count in resumed]
        assert bench.told == [(0, 2), (1, 2), (2, 2), ("all", 2)]
        assert {"pause", "publish", "transfer", "version", "resume"} <= set(report.seconds)
        bench.train.step()
        again = sync.update(7)
        assert again.digest != report.digest
        assert bench.state() == dict.fromkeys(range(3), fine(7, again.digest))
        with pytest.raises(ConfigError, match="version 7 is not above 7"):
            sync.update(7)
