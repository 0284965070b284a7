"""The torch engines themselves: sharded weights to ranks that generate, in the middle of their answers."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="engines are on torch: install zbus-runtime[torch]")

from controller import Role
from controller.train import TrainController
from controller.weights import Limits, WeightSync
from launching import HERE, launch
from train_kit import batch
from waiting import scaled, wait_until
from zbus import Ragged
from zbus.rl import Sampling

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(300))]

MODEL = {"model": "train_models:Tiny", "dtype": "float64"}
TOKENS = 40


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    """Two training ranks with a sharded model, one that generates a few answers at a time."""
    common = {"sys_path": [str(HERE)], "env": {"OMP_NUM_THREADS": "1"}}
    roles = {
        "train": Role(
            "workers.engines.train:TorchTrainEngine", replicas=2, ports=1,
            kwargs={**MODEL, "parallel": "fsdp2", "optimizer": {"lr": 0.02}},
            preload=["torch", "torch.distributed.tensor"], **common,
        ),
        "rollout": Role(
            "workers.engines.generate:TorchRolloutEngine", kwargs={**MODEL, "max_batch": 4}, preload=["torch"], **common
        ),
    }  # fmt: skip
    with launch(tmp_path_factory.mktemp("weights"), roles) as bus:
        yield bus


@pytest.mark.parametrize("path", ["memory", "group"])
def test_sharded_weights_are_the_ones_that_generate(bus, path):
    """What the trainer computes of an answer with its sharded weights is what the generating rank told of it."""
    train, rollout = TrainController(bus, "train"), bus.group("rollout")
    train.initialize()
    sync = WeightSync(train, rollout, path=path)
    for _ in range(2):
        train.train_batch(batch(1), "sft")
        report = sync.update()
        answer = rollout.generate([1, 2, 3], Sampling(max_tokens=12, seed=5))
        assert [span.version for span in answer.versions] == [report.version]
        ids = np.concatenate([[1, 2, 3], answer.ids])
        (known,) = train.forward_batch({"input_ids": Ragged.of([ids]), "loss_mask": Ragged.of([np.arange(15) > 2])})
        assert np.allclose(known[-12:], answer.logprobs, atol=1e-5), (known, answer.logprobs)
    sync.close()


def test_answers_under_way_go_on_with_the_new_weights_and_say_so(bus):
    """Frozen between two tokens: what came before is of the old weights, the rest as the new ones would go on."""
    train, rollout = TrainController(bus, "train"), bus.group("rollout")
    train.initialize()
    greedy = Sampling(max_tokens=TOKENS, temperature=0)
    sync = WeightSync(train, rollout)
    sync.update(1)
    prompts = [[one, two, 3] for one, two in itertools.product(range(8), repeat=2)]
    across = []
    while not across:
        old = sync.version
        calls = [rollout.generate.submit(prompt, greedy) for prompt in prompts]
        wait_until(
            lambda calls=calls: rollout.state()[0]["running"] or all(call.done() for call in calls),
            what="answers to be under way",
        )
        train.train_batch(batch(2), "sft")
        new = sync.update().version
        answers = [call.result() for call in calls]
        for answer in answers:
            assert {span.version for span in answer.versions} <= {old, new}
            assert answer.versions[0].start == 0
            assert answer.versions[-1].end == len(answer.ids) == TOKENS
            assert all(one.end == two.start for one, two in itertools.pairwise(answer.versions))
        across = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer.versions) > 1]
    for prompt, answer in across:
        cut = answer.versions[1].start
        rest = rollout.generate([*prompt, *answer.ids[:cut].tolist()], Sampling(max_tokens=TOKENS - cut, temperature=0))
        assert rest.ids.tolist() == answer.ids[cut:].tolist()
    sync.close()


def test_a_trainer_that_was_destroyed_broadcasts_again(bus):
    """Its port can be listened on once: groups of the model that is built next meet at the same store."""
    train, rollout = TrainController(bus, "train"), bus.group("rollout")
    for _ in range(2):
        train.initialize()
        sync = WeightSync(train, rollout, path="group", limits=Limits(join=scaled(20)))
        train.train_batch(batch(1), "sft")
        report = sync.update(sync.version or rollout.get_version()[0] + 1)
        assert report.ranks == (0,), report.stale
        assert train.destroy() == {}
