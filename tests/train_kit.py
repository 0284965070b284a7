"""What the tests of training share: batches, a launched role, and the same job in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from controller import Role
from zbus import Ragged

HERE = Path(__file__).parent


def role(replicas: int = 2, engine: str = "workers.engines.train:TorchTrainEngine", **fields: Any) -> Role:
    """Return a role of training engines with the tiny model in float64; ``kwargs`` add to the engine's."""
    told = {"model": "train_models:Tiny", "dtype": "float64", "losses": {"picky": "train_models:picky"}}
    kwargs = {**told, **fields.pop("kwargs", {})}
    return Role(
        engine, replicas=replicas, kwargs=kwargs, sys_path=[str(HERE)], env={"OMP_NUM_THREADS": "1"},
        preload=["torch", "torch.distributed.tensor", "workers.engines.train.trainer"], **fields,
    )  # fmt: skip


def batch(step: int, rows: int = 7, *, first: int | None = None) -> dict[str, Any]:
    """Return rows of different length, a function of the step: ``input_ids`` and ``loss_mask`` as ``Ragged``."""
    random = np.random.default_rng(step)
    ids = [random.integers(0, 11, int(random.integers(2, 9))) for _ in range(rows)]
    if first is not None:
        ids[0][0] = first
    masks = [np.arange(len(one)) >= min(2, len(one) - 1) for one in ids]
    return {"input_ids": Ragged.of(ids), "loss_mask": Ragged.of(masks)}
