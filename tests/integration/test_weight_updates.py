"""Weights from trainers to generators in real processes, and what becomes of them when something fails midway."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from controller import Role, RolloutController
from controller.weights import Limits, WeightSync
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus.errors import ConfigError, WeightsError

LIMITS = Limits(*[scaled(20)] * 6)


def ci(*values):
    """Return parameters that only the long suite takes: other cases show the same in the short one."""
    return pytest.param(*values, marks=pytest.mark.ci)


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

    def mark_current(self, rank, version, incarnation):
        assert incarnation == self.rollout.roster.peers()[rank].incarnation
        self.told.append((rank, version))

    def advance(self, version):
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
    width = {"width": 128}
    common = {"kwargs": width, "sys_path": [str(HERE)], "preload": ["torch", "weights_engines"], "max_restarts": 1000}
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


def test_an_update_can_be_awaited_alone_and_in_a_pause(bench):
    """Ranks take over the weights while the caller's loop runs on, and go on after the block."""

    async def story(sync):
        ticks = []
        ticker = asyncio.create_task(tick(ticks))
        first = await sync.aio.update()
        async with sync.aio.paused() as window:
            assert window.ranks == (0, 1, 2)
            assert all(one["paused"] for one in bench.state().values())
            second = await window.update()
        ticker.cancel()
        assert ticks
        return first.version, second

    async def tick(ticks):
        while True:
            ticks.append(True)
            await asyncio.sleep(0)

    with bench.sync() as sync:
        number, report = asyncio.run(story(sync))
        assert report.version == number + 1 == sync.version
        assert bench.state() == dict.fromkeys(range(3), fine(report.version, report.digest))


# -- ranks that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["memory", ci("disk"), "group"])
def test_a_rank_killed_while_it_writes_is_stale_and_comes_back_with_the_weights(bench, path):
    """The others have the new weights and go on; the new start of it gets work when it was refreshed, by digest."""
    with bench.sync(path, listens=True) as sync:
        bench.train.step()
        bench.rollout[1].expect({"half": "die"})
        report = sync.update()
        assert (report.version, report.ranks, list(report.stale)) == (2, (0, 2), [1])
        assert ("did not take over version 2" if path != "group" else "went during the update") in report.stale[1]
        assert [one for one in bench.told if one[0] in (1, "all")] == [(1, "stale"), ("all", 2)]
        wait_until(lambda: bench.rollout.ready, 60, "the rank to be back")
        assert list(sync.stale()) == [1]
        own = bench.rollout[1].weights()
        assert (own["version"], own["digest"] == report.digest) == (0, False)
        assert {rank: one for rank, one in bench.state().items() if rank != 1} == dict.fromkeys(
            (0, 2), fine(2, report.digest)
        )
        assert sync.refresh() == {}
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))
        assert (bench.told[-1], sync.stale()) == ((1, 2), {})


@pytest.mark.parametrize("point", ["half", ci("cache"), "version"])
def test_a_rank_that_fails_in_an_update_is_torn_and_generates_nothing_until_refreshed(bench, point):
    """Wherever it fails: it does not resume, its requests are ended, and the reason names what it said."""
    with bench.sync() as sync:
        resumed, aborted = bench.rollout[1].counts()
        bench.train.step()
        bench.rollout[1].expect({point: "fail"})
        report = sync.update()
        assert (report.ranks, list(report.stale)) == ((0, 2), [1])
        assert f"told to fail at {point}" in report.stale[1]
        assert "rollout/1" not in str(report.stale.keys())
        torn = bench.rollout[1].weights()
        assert (torn["paused"], "did not end" in torn["torn"]) == (True, True)
        assert bench.rollout[1].resume() is False
        assert bench.rollout[1].counts() == (resumed, aborted + 1)
        bench.rollout.expect({})
        assert sync.refresh([1]) == {}
        assert bench.rollout[1].counts() == (resumed + 1, aborted + 1)
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))


def test_a_rank_that_missed_updates_of_changes_gets_all_of_them(bench):
    """Refreshed or by the next update: what was published in full, and every change since."""
    with bench.sync(changed_only=True) as sync:
        for version, only in ((2, "body.0"), (3, "norm")):
            bench.train.step(only)
            if version == 2:
                bench.rollout[0].expect({"half": "fail"})
            report = sync.update()
            bench.rollout[0].expect({"update": "fail"})
            assert (report.full, report.ranks) == (False, (1, 2))
        bench.rollout.expect({})
        assert sync.refresh() == {}
        assert bench.state() == dict.fromkeys(range(3), fine(3, report.digest))
        bench.rollout[0].expect({"update": "fail"})
        bench.train.step("body.0")
        assert list(sync.update().stale) == [0]
        bench.rollout.expect({})
        bench.train.step("norm.bias")
        report = sync.update()
        assert (report.full, report.ranks, report.stale) == (False, (0, 1, 2), {})
        assert bench.state() == dict.fromkeys(range(3), fine(5, report.digest))


@pytest.mark.parametrize("path", ["memory", ci("disk"), ci("group")])
def test_where_no_rank_took_the_weights_generation_goes_on_with_the_old_ones(bench, path):
    """Ranks that refused before the first write still have them, whole; the version does not count."""
    with bench.sync(path, listens=True, changed_only=True) as sync:
        before = bench.state()[0]["digest"]
        bench.train.step("norm")
        bench.rollout.expect({"update": "refuse"})
        with pytest.raises(WeightsError, match="no rank has version 2") as caught:
            sync.update()
        assert (caught.value.phase, set(caught.value.missing), sync.version) == ("transfer", set(), 1)
        assert bench.state() == dict.fromkeys(range(3), fine(1, before))
        assert sync.stale() == {}
        assert bench.told[-3:] == [(0, 1), (1, 1), (2, 1)]
        assert bench.train.get_version() == 1
        bench.rollout.expect({})
        report = sync.update()
        assert report.full, "nobody has what the changes were to"
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))


def test_a_rollout_controller_knows_what_the_ranks_hold(bench):
    """The version counts there when ranks have confirmed it, and a stale rank gets no work until it was refreshed."""
    with RolloutController(bench.bus, "rollout") as rollout:
        sync = WeightSync(bench.train, rollout, limits=LIMITS)
        sync.update(1)
        assert (rollout.get_version(), rollout.stale()) == (1, {})
        bench.rollout[1].expect({"update": "fail"})
        sync.update()
        assert (rollout.get_version(), list(rollout.stale())) == (2, [1])
        bench.rollout.expect({})
        assert sync.refresh() == {}
        assert rollout.stale() == {}
        sync.close()


# -- trainers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "point"), [("memory", "publish"), ci("disk", "save"), ci("group", "publish")])
def test_a_trainer_killed_before_it_gave_anything_away_leaves_all_as_it_was(bench, path, point):
    """Generation goes on with the old weights; with the trainers back, the next update brings all."""
    with bench.sync(path) as sync:
        before = bench.state()
        bench.train[0].expect({point: "die"})
        with pytest.raises(WeightsError, match="publish of the weights of train failed") as caught:
            sync.update()
        assert caught.value.phase == "publish"
        assert bench.state() == before
        wait_until(lambda: bench.train.ready, 60, "the trainers to be back")
        report = sync.update()
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))
        if path == "disk":
            assert [one.name.split("-")[0] for one in (bench.root / f"weights-{bench.made}").iterdir()] == ["v2"]


def test_a_trainer_killed_in_a_broadcast_leaves_nobody_with_a_mixture(bench):
    """Receivers are torn and stand still, whatever they got; the next update heals them."""
    with bench.sync("group") as sync:
        bench.train[0].expect({"broadcast": "die"})
        with pytest.raises(WeightsError, match="no rank has version 2") as caught:
            sync.update()
        assert (caught.value.phase, set(caught.value.missing)) == ("transfer", {0, 1, 2})
        assert all(one["paused"] and one["torn"] for one in bench.state().values())
        wait_until(lambda: bench.train.ready, 60, "the trainers to be back")
        report = sync.update()
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))


def test_a_trainer_that_is_not_told_the_version_is_named_and_generation_goes_on(bench):
    """The ranks that generate have the new weights, which count."""
    with bench.sync() as sync:
        bench.train[1].expect({"version": "fail"})
        with pytest.raises(WeightsError, match=r"train/1.*told to fail at version") as caught:
            sync.update()
        assert (caught.value.phase, list(caught.value.missing), sync.version) == ("version", [1], 2)
        assert {(one["version"], one["paused"]) for one in bench.state().values()} == {(2, False)}


# -- deadlines -------------------------------------------------------------------------------------------------------

SHORT_S = scaled(1.0)


@contextmanager
def stuck(bench, group, rank, point, tmp_path):
    """Have a rank wait at a point until the end of the block."""
    file = tmp_path / point
    group[rank].expect({point: str(file)})
    try:
        yield
        assert file.with_name(f"{point}.there").exists()
    finally:
        file.touch()
        group[rank].expect({})


@pytest.mark.parametrize(
    ("phase", "point"), [ci("pause", "pause"), ci("transfer", "update"), ("transfer", "half"), ("resume", "resume")]
)
def test_a_rank_that_is_late_in_a_phase_is_left_behind_and_named(bench, phase, point, tmp_path):
    """Each phase has its deadline; the reason says where it is; the others go on, and it is refreshed later."""
    with bench.sync() as sync:
        sync.limits = limits_with(**{phase: SHORT_S})
        bench.train.step()
        with stuck(bench, bench.rollout, 2, point, tmp_path):
            report = sync.update()
            assert report.version == 2
            stale = sync.stale()
            assert list(stale) == [2]
            assert {"pause": "did not pause", "transfer": "did not take over", "resume": "did not resume"}[
                phase
            ] in stale[2]
            assert "weights_engines.py" in stale[2], stale[2]
            assert [one["paused"] for one in bench.rollout[0:2].weights()] == [False, False]
        assert sync.refresh() == {}
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))


@pytest.mark.parametrize(("phase", "point"), [("publish", "publish"), ("version", "version")])
def test_a_trainer_that_is_late_in_a_phase_is_named_and_generation_goes_on(bench, phase, point, tmp_path):
    """The error says who and where; an update later reaches everyone."""
    with bench.sync() as sync:
        sync.limits = limits_with(**{phase: SHORT_S})
        with stuck(bench, bench.train, 0, point, tmp_path):
            with pytest.raises(WeightsError, match=r"weights_engines.py") as caught:
                sync.update()
            assert caught.value.phase == phase
            assert {one["paused"] for one in bench.state().values()} == {False}
        sync.limits = LIMITS
        report = sync.update()
        assert bench.state() == dict.fromkeys(range(3), fine(report.version, report.digest))


@pytest.mark.ci
def test_a_stopped_rank_keeps_a_group_waiting_no_longer_than_its_deadline(bench):
    """It is left behind; the others get the weights in a group without it, or by the way around it."""
    with bench.sync("group") as sync:
        sync.limits = limits_with(pause=SHORT_S, join=2 * SHORT_S, transfer=2 * SHORT_S)
        pid = bench.pid("rollout", 0)
        bench.train.step()
        os.kill(pid, signal.SIGSTOP)
        try:
            report = sync.update()
            assert (report.ranks, list(report.stale)) == ((1, 2), [0])
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: bench.rollout.ready, 60, "the rank to be back")
        wait_until(lambda: not sync.refresh(), 60, "the rank to be refreshed")
        assert bench.state() == dict.fromkeys(range(3), fine(2, report.digest))


def limits_with(**fields):
    """Return the tests' limits with others in some phases."""
    return replace(LIMITS, **fields)


# -- windows and turns -----------------------------------------------------------------------------------------------


def test_generation_goes_on_whatever_happens_while_it_is_paused(bench):
    """Pausing is paired with resuming, also where the block raises."""
    with bench.sync() as sync:
        seen = []

        def work():
            with sync.paused() as window:
                seen.append((window.ranks, {one["paused"] for one in bench.state().values()}))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert seen == [((0, 1, 2), {True})]
        assert {one["paused"] for one in bench.state().values()} == {False}


def test_what_is_known_can_be_read_while_an_update_runs_and_another_waits_its_turn(bench, tmp_path):
    """No lock is held across a call: version and stale ranks answer at once; updates never overlap."""
    with bench.sync() as sync, ThreadPoolExecutor(2) as pool:
        with stuck(bench, bench.rollout, 0, "update", tmp_path):
            first = pool.submit(sync.update)
            wait_until((tmp_path / "update.there").exists, what="the update to be under way")
            second = pool.submit(sync.update)
            assert sync.version == 1
            assert list(sync.stale()) == [0, 1, 2]
            assert not second.done()
        assert (first.result(scaled(60)).version, second.result(scaled(60)).version) == (2, 3)


def test_what_cannot_be_is_refused_before_anything_is_called(bench):
    """Another path, no directory, an engine without the endpoints, a refresh before the first update."""
    with pytest.raises(ConfigError, match="cannot go by 'carrier pigeon'"):
        WeightSync(bench.train, bench.rollout, path="carrier pigeon")
    with pytest.raises(ConfigError, match="no directory was given"):
        WeightSync(bench.train, bench.rollout, path="disk")
    with pytest.raises(ConfigError, match="role 'rollout' has no endpoint `publish_weights`"):
        WeightSync(bench.rollout, bench.rollout)
    with pytest.raises(ConfigError, match="no weights were published for rollout yet"):
        WeightSync(bench.train, bench.rollout).refresh()
    with pytest.raises(WeightsError, match="cannot be cast to 'int7'") as caught:
        WeightSync(bench.train, bench.rollout, dtype="int7").update()
    assert caught.value.phase == "publish"
    assert {one["paused"] for one in bench.state().values()} == {False}


def test_shared_memory_holds_the_weights_once_for_all_readers(bench):
    """What the trainer lends is one model, however many ranks read it and however many versions there were."""

    def status(key):
        return next(one[key] for name, one in bench.bus.statuses().items() if str(name) == "train/0")

    before = status("shared_lent_bytes")
    with bench.sync() as sync:
        report = sync.update()
        assert report.ranks == (0, 1, 2)
        for _ in range(3):
            sync.update()
        wait_until(lambda: status("shared_lent_bytes") - before < 2 * report.nbytes, what="older versions to be let go")
        kept = status("refs")
        sync.close()
        wait_until(lambda: status("refs") == kept - 1, what="the last version to be let go")
