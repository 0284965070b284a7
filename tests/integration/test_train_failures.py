from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

from controller import Role  # noqa: E402  # after torch is known to be there
from controller.train import TrainController  # noqa: E402  # after torch is known to be there
from launching import HERE, launch  # noqa: E402
from train_kit import batch, role  # noqa: E402
from waiting import scaled, wait_until  # noqa: E402
from zbus.errors import BatchError, ConfigError  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(120))]

KWARGS = {
    "model": "train_models:Brittle",
    "parallel": "fsdp2",
    "optimizer": {"lr": 0.01},
    "losses": {"picky": "train_models:picky", "one_way": "train_models:one_way"},
}
CALLS = {
    "train": lambda train, rows, loss: train.train_batch(rows, loss),
    "evaluate": lambda train, rows, loss: train.eval_batch(rows, loss),
    "forward": lambda train, rows, _: train.forward_batch(rows),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Two ranks that hold a part of each layer, for tests that leave them alive."""
    with launch(tmp_path_factory.mktemp("runs"), {"actor": role(kwargs=KWARGS)}) as bus:
        controller = TrainController(bus)
        controller.initialize()
        yield controller


def fails(call, train, rows, loss="sft") -> BatchError:
    """Have a call fail, soon and on all ranks."""
    began = time.monotonic()
    with pytest.raises(BatchError) as caught:
        call(train, rows, loss)
    assert time.monotonic() - began < scaled(20)
    assert not caught.value.late
    return caught.value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("first", "said"), [(12, "a layer refuses a row"), (99, "index out of range")])
def test_a_rank_that_fails_inside_a_model_in_parts_keeps_no_other_waiting(train, call, first, said):
    """Its own error is the root, the others leave at their next layer, and what follows is as if nothing had been."""
    before = train.eval_batch(batch(9))["loss"]
    error = fails(call, train, batch(8, 4, first=first))
    assert said in str(error.root)
    assert [isinstance(one, ConnectionAbortedError) for one in error.collateral] == [True]
    assert train.eval_batch(batch(9))["loss"] == before
    assert CALLS["forward"](train, batch(8, 4), None) is not None


def test_a_publication_that_fails_on_rank_0_keeps_no_other_in_its_gathering(train):
    """Weights of a dtype that cannot travel are refused by the rank that gathers, at once, and training can go on."""
    began = time.monotonic()
    with pytest.raises(BatchError, match=r"tensor 'odd' of dtype 'bits8'") as caught:
        train.group.publish_weights()
    assert list(caught.value.results) + list(caught.value.late) == [1]
    assert train.train_batch(batch(1))["loss"] > 0
    assert time.monotonic() - began < scaled(20)


def test_a_rank_that_writes_after_its_save_has_failed_leaves_nothing(tmp_path):
    """What a late rank makes anew is removed again when it has ended."""
    folder = tmp_path / "saved"
    folder.mkdir()
    late = Role("late_saver:LateSaver", replicas=2, sys_path=[str(HERE)])
    with launch(tmp_path, {"actor": late}) as bus:
        train = TrainController(bus, patience=None)
        with pytest.raises(ConfigError, match="deadline"):
            train.save(folder / "one", deadline="soon")
        assert list(folder.iterdir()) == [], "nor does a save that cannot be asked for"
        with pytest.raises(BatchError, match="no room here") as caught:
            train.save(folder / "one")
        assert list(caught.value.late) == [1]
        assert list(folder.iterdir()) == []
        (folder / "go").touch()
        assert train.group[1].get_version() == 0, "what comes after the save was answered"
        wait_until(lambda: [one.name for one in folder.iterdir()] == ["go"], what="what was written late to be removed")


@pytest.mark.ci
def test_ranks_that_stay_in_a_collective_get_fresh_processes(tmp_path):
    """A rank that fails on the way back cannot be left by the others: they are replaced, and told what to do next."""
    with launch(tmp_path, {"actor": role(kwargs={**KWARGS, "model": "train_models:Tiny"})}) as bus:
        train = TrainController(bus, patience=0.5)
        train.initialize()
        train.train_batch(batch(0))
        train.save(tmp_path / "saved")
        known = train.eval_batch(batch(9))["loss"]
        before = [bus.statuses()[name]["pid"] for name in sorted(bus.statuses())]
        error = fails(CALLS["train"], train, batch(8, 4, first=12), "one_way")
        assert "no way back from a row" in str(error.root)
        assert "all ranks of actor were given fresh processes" in error.root.facts["group"]
        assert error.root.hint == "train.initialize(), then train.load(...) of the last checkpoint"
        assert not set(before) & {one["pid"] for one in bus.statuses().values()}
        train.initialize()
        train.load(tmp_path / "saved")
        assert train.eval_batch(batch(9))["loss"] == known
