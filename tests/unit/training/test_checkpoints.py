from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

import torch.distributed as dist  # noqa: E402  # after torch is known to be there

from train_kit import batch  # noqa: E402
from train_models import Tiny  # noqa: E402
from workers.engines.losses import sft  # noqa: E402
from workers.engines.train import checkpoints  # noqa: E402
from workers.engines.train.outputs import logprobs  # noqa: E402
from workers.engines.train.place import Place  # noqa: E402
from workers.engines.train.settings import Settings  # noqa: E402
from workers.engines.train.trainer import Trainer  # noqa: E402
from zbus.errors import ConfigError  # noqa: E402

# Torch says so of every model in parts whose last layer is linear; no loss here writes into its outputs.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


class Idle(Tiny):
    """Has a part that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Linear(3, 3)


def trainer(model=Tiny, place=None, **settings) -> Trainer:
    """A trainer in float64, the same at each call."""
    torch.manual_seed(0)
    return Trainer(model().double(), Settings.of({"model": "a:b", **settings}), place)


def losses(made: Trainer, *steps: int) -> list:
    """Loss and weight of each step."""
    return [made.train(batch(step), sft)["loss"] for step in steps]


@pytest.fixture
def place(tmp_path):
    """The only rank of a group: with ``fsdp2`` its model is in parts all the same."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Place(mesh=dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    dist.destroy_process_group()


def test_writing_a_checkpoint_changes_nothing_of_what_comes(place, tmp_path):
    """Also before the first step, where the optimizer has no state: it learns as if nothing had been written."""
    plain, kept = trainer(), trainer(place=place)
    checkpoints.save(kept, str(tmp_path / "first"), "checkpoint", 0)
    assert losses(kept, 0, 1, 2) == losses(plain, 0, 1, 2)


@pytest.mark.parametrize("model", [Tiny, Idle])
@pytest.mark.parametrize("before", [0, 2])
def test_training_goes_on_from_a_checkpoint_whatever_the_trainer_did_before(place, tmp_path, model, before):
    """Steps and gradients of its own leave no trace, nor do parameters that never had a gradient."""
    source = trainer(model, place)
    losses(source, *range(before))
    checkpoints.save(source, str(tmp_path / "kept"), "checkpoint", 0)
    expected = losses(source, 7, 8, 9)
    fresh, stepped, began = trainer(model, place), trainer(model, place), trainer(model, place)
    losses(stepped, 4, 5)
    began.forward_backward(batch(3), sft)
    for other in (fresh, stepped, began):
        checkpoints.load(other, str(tmp_path / "kept"), "checkpoint")
        assert other.steps == before
        assert losses(other, 7, 8, 9) == expected


def test_looking_at_a_model_in_parts_between_gradient_and_step_changes_nothing(place):
    """Weights that an evaluation gathered are not those of the passes after the step."""
    whole, shared = trainer(), trainer(place=place, parallel="fsdp2")
    found = []
    for made in (whole, shared):
        made.forward_backward(batch(0), sft)
        made.evaluate(batch(1), sft)
        made.forward(batch(1), logprobs)
        made.step()
        found.append((made.forward(batch(2), logprobs).values.tolist(), losses(made, 3, 4)))
    assert found[1] == found[0]


def test_a_model_in_parts_on_one_rank_is_written_and_read_as_a_whole_one(place, tmp_path):
    """The file of safetensors holds plain tensors, which a whole model takes."""
    shared, whole = trainer(place=place, parallel="fsdp2"), trainer()
    losses(shared, 0, 1)
    checkpoints.save(shared, str(tmp_path / "model"), "model", 0)
    checkpoints.load(whole, str(tmp_path / "model"), "model")
    assert whole.forward(batch(2), logprobs).values.tolist() == shared.forward(batch(2), logprobs).values.tolist()


@pytest.mark.parametrize("lost", [".metadata", "generators.0.npz"])
def test_a_checkpoint_that_lacks_a_file_is_refused_and_changes_nothing(place, tmp_path, lost):
    """The error names directory and file, and the trainer goes on as it was."""
    source, other, plain = trainer(place=place), trainer(), trainer()
    losses(source, 0)
    checkpoints.save(source, str(tmp_path / "kept"), "checkpoint", 0)
    (tmp_path / "kept" / lost).unlink()
    with pytest.raises(ConfigError, match=f"kept' is damaged: it has no {lost}"):
        checkpoints.load(other, str(tmp_path / "kept"), "checkpoint")
    assert losses(other, 1, 2) == losses(plain, 1, 2)


def test_a_rank_makes_no_directory_in_one_that_is_gone(tmp_path):
    """The directory of a call that was given up is removed with its parent: who is late writes nothing anywhere."""
    with pytest.raises(FileNotFoundError):
        checkpoints.save(trainer(), str(tmp_path / "gone" / "whole"), "checkpoint", 1)
    assert list(tmp_path.iterdir()) == []
