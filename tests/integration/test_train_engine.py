from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: install zbus-runtime[torch]")

from launching import launch  # noqa: E402  # after torch is known to be there
from train_kit import batch, role  # noqa: E402
from train_models import Tiny  # noqa: E402
from waiting import scaled  # noqa: E402
from workers.engines.losses import sft  # noqa: E402
from workers.engines.train.settings import Settings  # noqa: E402
from workers.engines.train.trainer import Trainer  # noqa: E402
from zbus.rl.steps import merge_reports  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(120))]

STEPS = 50
OPTIMIZER = {"lr": 0.01}


@pytest.fixture(scope="module")
def alone():
    """The losses of the same job in one process."""
    torch.manual_seed(0)
    trainer = Trainer(Tiny().double(), Settings.of({"model": "train_models:Tiny", "optimizer": OPTIMIZER}))
    return [merge_reports({0: trainer.train(batch(step, rows=1 + step % 7), sft)})["loss"] for step in range(STEPS)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_learn_what_one_process_learns(tmp_path, alone, parallel):
    """In float64 two ranks, with uneven and empty shares and several portions, have the losses of one to 1e-9."""
    kwargs = {"parallel": parallel, "optimizer": OPTIMIZER, "micro_tokens": 17}
    with launch(tmp_path, {"actor": role(kwargs=kwargs)}) as bus:
        actor = bus.group("actor")
        actor.create_process_group()
        actor.initialize()
        reports = [actor.train_batch(batch(step, rows=1 + step % 7), "sft") for step in range(STEPS)]
    losses = [merge_reports(dict(enumerate(report)))["loss"] for report in reports]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-9)
