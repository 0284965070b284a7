from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

from train_kit import batch  # noqa: E402  # after torch is known to be there
from train_models import Tiny, endless  # noqa: E402
from workers.engines.losses import sft  # noqa: E402
from workers.engines.train import TorchTrainEngine  # noqa: E402
from workers.engines.train.settings import Settings  # noqa: E402
from workers.engines.train.trainer import Trainer  # noqa: E402
from zbus.errors import ConfigError  # noqa: E402
from zbus.rl.steps import plain  # noqa: E402


def trainer(**settings) -> Trainer:
    """A trainer of the tiny model, the same at each call."""
    torch.manual_seed(0)
    return Trainer(Tiny().double(), Settings.of({"model": "train_models:Tiny", **settings}))


def weights(made: Trainer) -> list[float]:
    """All weights in one list."""
    return torch.cat([one.detach().flatten() for one in made.parameters]).tolist()


@pytest.mark.parametrize("limits", [{"micro_rows": 2}, {"micro_tokens": 9}, {"micro_rows": 1, "micro_tokens": 1}])
def test_portions_change_nothing_but_rounding(limits):
    """However rows are cut into portions, loss, norm and step are those of the whole batch."""
    whole, cut = trainer(), trainer(**limits)
    for step in range(3):
        expected, found = plain(whole.train(batch(step), sft)), plain(cut.train(batch(step), sft))
        assert found == pytest.approx(expected, rel=1e-12)
    assert weights(cut) == pytest.approx(weights(whole), abs=1e-12)


def test_the_gradient_is_that_of_the_mean_over_all_tokens():
    """The reported norm is that of torch's own mean cross entropy, and clipping bounds the step."""
    made = trainer(clip=None)
    columns = batch(1)
    tokens = torch.from_numpy(columns["input_ids"].padded())
    mask = torch.from_numpy(columns["loss_mask"].padded().astype(bool))[:, 1:]
    logits = made.model(tokens)[:, :-1]
    torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask]).backward()
    norm = math.sqrt(sum(float((one.grad**2).sum()) for one in made.parameters))
    assert plain(made.train(columns, sft))["grad_norm"] == pytest.approx(norm, rel=1e-12)
    torch.manual_seed(0)
    model = Tiny().double()
    clipped = Trainer(
        model,
        Settings.of({"model": "a:b", "clip": norm / 4}),
        make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
    )
    before = np.array(weights(clipped))
    clipped.train(columns, sft)
    assert np.linalg.norm(np.array(weights(clipped)) - before) == pytest.approx(norm / 4, rel=1e-5)


def test_the_rate_moves_by_the_schedule_and_only_when_told():
    """Steps use the rate of the position; advance moves it and tells the next rate."""
    made = trainer(optimizer={"lr": 1.0}, schedule={"kind": "linear", "warmup": 1, "steps": 3})
    assert plain(made.train(batch(0), sft))["lr"] == 0.5
    assert plain(made.train(batch(0), sft))["lr"] == 0.5
    assert [made.advance() for _ in range(4)] == [1.0, 0.5, 0.0, 0.0]


def test_what_is_not_finite_is_raised_or_skipped_and_said():
    """No step is taken in either case; skipped steps are counted in the report."""
    strict, lenient = trainer(), trainer(nonfinite="skip")
    before = weights(strict)
    with pytest.raises(FloatingPointError, match="gradient of loss 'endless' is not finite"):
        strict.train(batch(0), endless, "endless")
    assert plain(lenient.train(batch(0), endless, "endless"))["skipped"] == 1
    assert weights(strict) == weights(lenient) == before
    assert (strict.steps, lenient.steps) == (0, 0)
    assert plain(lenient.train(batch(0), sft))["skipped"] == 0


def test_a_batch_that_weighs_nothing_is_refused():
    """A mask that leaves no token is an error that names the loss, not a division by zero."""
    columns = batch(0)
    columns["loss_mask"].values[:] = False
    made = trainer()
    with pytest.raises(ConfigError, match="the weight of all rows under loss 'sft' is 0"):
        made.train(columns, sft, "sft")
    assert math.isnan(plain(made.evaluate(columns, sft))["loss"])
    with pytest.raises(ConfigError, match="no rank has a row"):
        made.train({"input_ids": np.zeros((0, 4), int)}, sft)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda total: total, "loss 'mine' returned a Tensor, not"),
        (lambda total: (total, 1), "a tuple of 2"),
        (lambda total: (total[None].expand(3), 1, {}), r"a loss of shape \(3,\)"),
        (lambda total: (total, -1, {}), "the weight -1"),
        (lambda total: (total, math.nan, {}), "the weight nan"),
        (lambda total: (total, 1, {"x": ("median", 1)}), "loss 'mine' reports 'x' as tuple, .* 'median'"),
        (lambda total: (total, 1, {"x": torch.ones(3)}), "loss 'mine' reports 'x' as Tensor"),
        (lambda total: (total, 1, {"x": None}), "loss 'mine' reports 'x' as NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(returned, message):
    """What is expected of a loss is said with its name."""
    with pytest.raises((TypeError, ValueError), match=message):
        trainer().train(batch(0), lambda model, b: returned(sft(model, b)[0]), "mine")


def test_what_a_loss_reports_is_merged_over_portions_as_it_says():
    """Sums per unit of weight, maxima, minima, sums and means of their own, over all portions."""

    def loss(model, b):
        total, weight, _ = sft(model, b)
        length = float(b["lengths"].max())
        low = float(b["lengths"].min())
        rows = len(b["lengths"])
        stats = {"nats": total.detach(), "longest": ("max", length), "shortest": ("min", low), "rows": ("sum", rows)}
        return total, weight, {**stats, "length": ("mean", float(b["lengths"].sum()), rows)}

    lengths = batch(2)["input_ids"].lengths
    found = plain(trainer(micro_rows=2).train(batch(2), loss))
    assert found["nats"] == pytest.approx(found["loss"])
    assert (found["longest"], found["shortest"], found["rows"]) == (lengths.max(), lengths.min(), len(lengths))
    assert found["length"] == pytest.approx(lengths.mean())


def test_moved_away_and_back_training_goes_on():
    """Offload and onload change no weight, no optimizer state and no later step."""
    stays, moves = trainer(), trainer()
    for step in range(3):
        expected = stays.train(batch(step), sft)
        assert moves.train(batch(step), sft) == expected
        moves.move("cpu")
        moves.move(None)


def test_an_engine_says_what_is_to_be_called_first():
    """Before initialize, and while the weights are away, calls are refused with the next step."""
    engine = TorchTrainEngine(model="train_models:Tiny")
    with pytest.raises(ConfigError, match="not initialised") as caught:
        engine.do_train_batch(batch(0), "sft", {})
    assert "initialize" in caught.value.hint
    with pytest.raises(ConfigError, match="in no process group"):
        engine.do_initialize()
    engine._trainer = trainer()
    engine.do_offload()
    with pytest.raises(ConfigError, match="off the device"):
        engine.do_train_batch(batch(0), "sft", {})
    engine.do_onload()
    assert "loss" in engine.do_train_batch(batch(0), "sft", {})
