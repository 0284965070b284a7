from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

from controller import Role  # noqa: E402  # after torch is known to be there
from controller.train import TrainController  # noqa: E402  # after torch is known to be there
from launching import launch  # noqa: E402
from train_kit import batch, role  # noqa: E402
from train_models import Tiny  # noqa: E402
from waiting import scaled, within  # noqa: E402
from workers.engines.losses import sft  # noqa: E402
from workers.engines.train.settings import Settings  # noqa: E402
from workers.engines.train.trainer import Trainer  # noqa: E402
from zbus.errors import BatchError, StartupError, WorkerLost, ZbusError  # noqa: E402
from zbus.rl.steps import merge_reports  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(300))]

STEPS = 50
KWARGS = {"optimizer": {"lr": 0.01}, "micro_tokens": 17}


def reference() -> Trainer:
    """The same job in one process, in one portion."""
    torch.manual_seed(0)
    return Trainer(Tiny().double(), Settings.of({"model": "train_models:Tiny", "optimizer": KWARGS["optimizer"]}))


def rows(step: int) -> int:
    """Of fifty steps some have fewer rows than ranks, and most do not divide."""
    return 1 + step % 7


@pytest.fixture(scope="module")
def alone():
    """The losses of fifty steps in one process."""
    trainer = reference()
    return [merge_reports({0: trainer.train(batch(step, rows(step)), sft)})["loss"] for step in range(STEPS)]


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    """Two ranks under DDP for all tests that leave them alive."""
    losses = {"picky": "train_models:picky", "endless": "train_models:endless"}
    with launch(tmp_path_factory.mktemp("runs"), {"actor": role(kwargs={**KWARGS, "losses": losses})}) as bus:
        yield bus


@pytest.fixture
def train(bus):
    """A controller over ranks with a fresh model."""
    controller = TrainController(bus)
    controller.initialize()
    yield controller
    assert controller.destroy() == {}


def losses_of(train: TrainController, steps: range = range(STEPS)) -> list[float]:
    """Train and return the loss of each step."""
    return [train.train_batch(batch(step, rows(step)))["loss"] for step in steps]


def test_two_ranks_learn_what_one_process_learns(train, alone):
    """In float64, with uneven and empty shares and several portions, DDP has the losses of one process to 1e-9."""
    found = losses_of(train)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-9)


@pytest.mark.ci
def test_parts_of_a_model_learn_what_one_process_learns(tmp_path, alone):
    """FSDP2 has the same losses to 1e-9 over the same fifty steps."""
    with launch(tmp_path, {"actor": role(kwargs={**KWARGS, "parallel": "fsdp2"})}) as bus:
        train = TrainController(bus)
        train.initialize()
        np.testing.assert_allclose(losses_of(train), alone, rtol=0, atol=1e-9)


def test_rows_may_stay_where_they_are(bus, train):
    """A Ref to a batch is split by its owner's rows and lengths, and gives what the batch itself gives."""
    ref = bus.put(batch(4))
    assert train.eval_batch(ref) == train.eval_batch(batch(4))
    np.testing.assert_array_equal(train.forward_batch(ref).values, train.forward_batch(batch(4)).values)


def token_logprobs(model, b):
    """Log-probabilities by torch's own words, not the engine's."""
    tokens = b["input_ids"]
    logs = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logs, (1, 0))


def test_outputs_come_in_the_order_and_form_of_the_rows(train):
    """Log-probabilities are those of one process, per trajectory, per padded row, and for a single row."""
    trainer = reference()
    columns = batch(3)
    expected = trainer.forward({"input_ids": columns["input_ids"]}, token_logprobs)
    listed = train.forward_batch([{"input_ids": one} for one in columns["input_ids"]])
    for one, other in zip(listed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    padded = {"input_ids": columns["input_ids"].padded(), "lengths": columns["input_ids"].lengths}
    np.testing.assert_allclose(train.forward_batch(padded), expected.padded(), rtol=0, atol=1e-12)
    assert [len(one) for one in train.forward_batch([{"input_ids": [1, 2, 3]}])] == [3]


def test_gradients_of_several_batches_step_as_those_of_one(train):
    """forward_backward_batch twice and a step equal one train_batch with all the rows."""
    whole = batch(5, 6)
    halves = [{name: column[k : k + 3] for name, column in whole.items()} for k in (0, 3)]
    train.optimizer_zero_grad()
    for half in halves:
        train.forward_backward_batch(half)
    apart = train.optimizer_step()
    after = train.eval_batch(batch(6))["loss"]
    train.destroy()
    train.initialize()
    assert train.train_batch(whole)["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-12)
    assert train.eval_batch(batch(6))["loss"] == pytest.approx(after, abs=1e-12)


def test_reports_are_of_all_ranks_and_name_who_lacks_what(train):
    """Sums, maxima and means of a loss are over both ranks; a scalar that one of them has is there, and named."""
    columns = batch(7, 6)
    columns["input_ids"].values[0] = 11
    plain = train.eval_batch(columns, "picky")
    report = train.train_batch(columns, "picky", {"scale": 2.0})
    assert report["rows"] == 6
    assert report["longest"] == columns["input_ids"].lengths.max()
    assert report["loss"] == pytest.approx(2 * plain["loss"], rel=1e-12)
    assert len(report.partial["eleven"]) == 1
    assert {rank: "eleven" in own for rank, own in report.heads.items()} in ({0: True, 1: False}, {0: False, 1: True})


def test_a_rank_that_fails_in_its_loss_keeps_no_other_waiting(train):
    """The rank's own error is the root, the others say that they left, nobody took the step, and training goes on."""
    before = train.eval_batch(batch(9))["loss"]
    began = time.monotonic()
    with pytest.raises(BatchError) as caught:
        train.train_batch(batch(8, 4, first=12), "picky")
    assert time.monotonic() - began < within(20)
    assert "a row begins with 12" in str(caught.value.root)
    assert isinstance(caught.value.root, ValueError)
    assert all(isinstance(one, ConnectionError) for one in caught.value.collateral)
    assert train.eval_batch(batch(9))["loss"] == before
    train.train_batch(batch(8, 4))


def test_a_batch_that_one_rank_cannot_read_keeps_no_other_waiting(train):
    """Columns that do not fit on a rank, and groups that do not divide there, end the call on all of them."""
    with pytest.raises(BatchError) as caught:
        train.group.train_batch({"input_ids": batch(1, 3)["input_ids"]}, "sft", {"groups": 2})
    assert any("each 2 rows stay together" in str(one) for one in caught.value.exceptions)
    assert math.isfinite(train.train_batch(batch(1))["loss"])


def test_a_gradient_that_is_not_finite_takes_no_step(train):
    """The error names the loss and the norm, and the model is as it was."""
    before = train.eval_batch(batch(9))["loss"]
    with pytest.raises(BatchError, match="gradient of loss 'endless' is not finite"):
        train.train_batch(batch(2), "endless")
    assert train.eval_batch(batch(9))["loss"] == before


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(train, tmp_path):
    """Model, optimizer, steps, schedule and version come back; the steps after it are the same to the last bit."""
    losses_of(train, range(3))
    train.set_version(7)
    train.save(tmp_path / "three")
    went_on = losses_of(train, range(3, 6))
    train.destroy()
    train.initialize()
    found = train.load(tmp_path / "three")
    assert (found["steps"], found["version"], found["generators"]) == (3, 7, True)
    assert train.get_version() == 7
    assert losses_of(train, range(3, 6)) == went_on


def test_a_model_alone_is_a_file_of_safetensors(train, tmp_path):
    """It comes back into a fresh engine; a checkpoint of another model or none at all changes nothing."""
    losses_of(train, range(3))
    known = train.eval_batch(batch(9))["loss"]
    train.save(tmp_path / "model", "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    train.destroy()
    train.initialize()
    train.load(tmp_path / "model", "model")
    assert train.eval_batch(batch(9))["loss"] == known
    from safetensors.torch import save_file

    save_file({"head.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(BatchError, match=r"does not hold this model: no token\.weight"):
        train.load(tmp_path / "other.safetensors", "model")
    with pytest.raises(BatchError, match="there is no checkpoint at"):
        train.load(tmp_path / "nothing")
    assert train.eval_batch(batch(9))["loss"] == known


def test_names_that_the_role_does_not_declare_are_refused_with_a_near_one(train):
    """A misspelt loss runs nothing and hangs nobody."""
    with pytest.raises(BatchError, match=r"declares no loss 'pickey'; did you mean 'picky'\?"):
        train.train_batch(batch(1), "pickey")
    with pytest.raises(BatchError, match=r"declares no output 'values'; it has entropy, logprobs"):
        train.forward_batch(batch(1), "values")


def test_a_rank_killed_in_a_step_is_named_and_the_rest_leave_in_order(tmp_path):
    """SIGKILL inside a step: the lost rank is the root, nobody hangs, destroy visits the other and names it (B43)."""
    with launch(tmp_path, {"actor": role(kwargs={**KWARGS, "losses": {"deadly": "train_models:deadly"}})}) as bus:
        train = TrainController(bus)
        train.initialize()
        began = time.monotonic()
        with pytest.raises((BatchError, WorkerLost)) as caught:
            train.train_batch(batch(1, 4, first=12), "deadly")
        assert time.monotonic() - began < within(20)
        root = caught.value.root if isinstance(caught.value, BatchError) else caught.value
        assert isinstance(root, WorkerLost)
        lost = root.rank
        with pytest.raises((ZbusError, BatchError), match=rf"actor/{lost} died"):
            train.train_batch(batch(1))
        assert list(train.destroy()) == [lost]
        with pytest.raises(StartupError, match=f"actor/{lost} not ready within"):
            train.initialize(ready=0.2)


@pytest.mark.ci
def test_a_role_that_restarts_goes_on_from_its_checkpoint(tmp_path):
    """Where all ranks restart after a death, initialize and load bring training back to the step that was saved."""
    own = role(restart="all", kwargs={**KWARGS, "losses": {"deadly": "train_models:deadly"}})
    with launch(tmp_path, {"actor": own}) as bus:
        train = TrainController(bus)
        train.initialize()
        losses_of(train, range(3))
        train.save(tmp_path / "three")
        went_on = losses_of(train, range(3, 6))
        with pytest.raises((BatchError, WorkerLost)):
            train.train_batch(batch(1, 4, first=12), "deadly")
        bus.restart("actor")
        train.initialize()
        assert train.load(tmp_path / "three")["steps"] == 3
        assert losses_of(train, range(3, 6)) == went_on


def test_a_subclass_brings_what_it_trains(tmp_path):
    """Model, optimizer, losses and outputs may be methods and attributes of a class in a file."""
    own = Role(f"{Path(__file__).parents[1] / 'train_models.py'}:Subclass")
    with launch(tmp_path, {"actor": own}, scheduler="inline") as bus:
        train = TrainController(bus)
        train.initialize()
        report = train.train_batch(batch(1), "twice")
        assert report["loss"] == pytest.approx(2 * merge_reports({0: reference().train(batch(1), sft)})["loss"])
        assert report["lr"] == 0.5
        first = [int(one[0]) for one in batch(1)["input_ids"]]
        assert train.forward_batch(batch(1), "first").tolist() == first
