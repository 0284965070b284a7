from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

from controller.train import TrainController  # noqa: E402  # after torch is known to be there
from launching import launch  # noqa: E402
from train_kit import batch, role  # noqa: E402
from train_models import Tiny  # noqa: E402
from waiting import scaled  # noqa: E402
from workers.engines.losses import sft  # noqa: E402
from workers.engines.train.settings import Settings  # noqa: E402
from workers.engines.train.trainer import Trainer  # noqa: E402
from zbus.errors import BatchError  # noqa: E402
from zbus.rl.steps import merge_reports  # noqa: E402

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(scaled(240))]

STEPS = range(6)


def alone(make=lambda: Tiny().double(), settings=None) -> list[float]:
    """The losses of the job in one process."""
    torch.manual_seed(0)
    told = Settings.of(settings or {"model": "train_models:Tiny"})
    trainer = Trainer(make(), told)
    return [merge_reports({0: trainer.train(batch(step), sft)})["loss"] for step in STEPS]


@pytest.mark.parametrize(("mesh", "parallel"), [({"dp": 1, "tp": 2}, "ddp"), ({"dp": 2, "tp": 2}, "fsdp2")])
def test_split_layers_learn_what_one_process_learns(tmp_path, mesh, parallel):
    """Tensor parallelism by the model's plan, alone and with FSDP2, has the losses of one process to 1e-9."""
    size = mesh["dp"] * mesh["tp"]
    with launch(
        tmp_path, {"actor": role(size, mesh=mesh, kwargs={"parallel": parallel})}, startup_timeout=scaled(90)
    ) as bus:
        train = TrainController(bus)
        train.initialize()
        found = [train.train_batch(batch(step))["loss"] for step in STEPS]
        assert found == pytest.approx(alone(), abs=1e-9)
        assert train.heads == tuple(range(0, size, 2))


def test_copies_of_a_model_with_split_layers_are_refused(tmp_path):
    """DDP over tp is an error that says what to do, not a wrong result."""
    with launch(tmp_path, {"actor": role(4, mesh={"dp": 2, "tp": 2})}, startup_timeout=scaled(90)) as bus:
        with pytest.raises(BatchError, match="parallel=ddp cannot copy a model") as caught:
            TrainController(bus).initialize()
        assert any("phase: engine" in note for note in caught.value.__notes__)


def test_a_checkpoint_of_parts_loads_on_another_number_of_ranks(tmp_path):
    """What two FSDP2 ranks wrote goes on with one rank, step by step the same to 1e-9."""
    with launch(tmp_path / "two", {"actor": role(kwargs={"parallel": "fsdp2"})}) as bus:
        train = TrainController(bus)
        train.initialize()
        for step in STEPS:
            train.train_batch(batch(step))
        train.save(tmp_path / "saved")
        train.save(tmp_path / "model", "model")
        went_on = [train.train_batch(batch(step))["loss"] for step in STEPS]
    with launch(tmp_path / "one", {"actor": role(1)}) as bus:
        train = TrainController(bus)
        train.initialize()
        found = train.load(tmp_path / "saved")
        assert (found["steps"], found["generators"]) == (len(STEPS), False)
        assert [train.train_batch(batch(step))["loss"] for step in STEPS] == pytest.approx(went_on, abs=1e-9)
        train.load(tmp_path / "model", "model")
        assert train.train_batch(batch(0))["loss"] == pytest.approx(went_on[0], abs=1e-9)


def test_dropout_goes_on_from_a_checkpoint_where_it_was(tmp_path):
    """Generators of every rank are part of a checkpoint: the steps after it draw the same numbers."""
    model = {"factory": "train_models:Tiny", "kwargs": {"dropout": 0.5}}
    with launch(tmp_path, {"actor": role(kwargs={"model": model})}) as bus:
        train = TrainController(bus)
        train.initialize()
        train.train_batch(batch(0))
        train.save(tmp_path / "saved")
        went_on = [train.train_batch(batch(1))["loss"] for _ in range(3)]
        train.load(tmp_path / "saved")
        assert [train.train_batch(batch(1))["loss"] for _ in range(3)] == went_on
        assert train.train_batch(batch(1))["loss"] != went_on[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_hugging_face_directory_trains_and_is_written_back(tmp_path, parallel):
    """A causal model's directory is taken as it is, trained, and saved so that transformers reads it."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    made = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
    )
    made.save_pretrained(tmp_path / "hf")
    kwargs = {"model": {"hf": str(tmp_path / "hf")}, "dtype": "float64", "parallel": parallel}
    with launch(tmp_path, {"actor": role(kwargs=kwargs)}) as bus:
        train = TrainController(bus)
        train.initialize()
        found = [train.train_batch(batch(step))["loss"] for step in STEPS]
        train.save(tmp_path / "back", "model")
        known = train.eval_batch(batch(1))["loss"]
    assert found == pytest.approx(alone(made.double, {"model": {"hf": "x"}}), abs=1e-6)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float64)
    trainer = Trainer(back, Settings.of({"model": {"hf": "x"}}))
    assert merge_reports({0: trainer.evaluate(batch(1), sft)})["loss"] == pytest.approx(known, abs=1e-9)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_half_of_the_digits_learn_nearly_the_same(tmp_path, parallel):
    """Autocast to bfloat16 keeps weights in float32 and follows the losses of one process in float32."""
    kwargs = {"dtype": "float32", "autocast": "bfloat16", "parallel": parallel}
    with launch(tmp_path, {"actor": role(kwargs=kwargs)}) as bus:
        train = TrainController(bus)
        train.initialize()
        found = [train.train_batch(batch(step))["loss"] for step in STEPS]
        assert {dtype for _, dtype, _ in train.group.publish_weights()["manifest"]} == {"float32"}
    expected = alone(Tiny)
    assert found == pytest.approx(expected, abs=0.02)
    assert found != expected
