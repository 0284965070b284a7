"""Engines with weights and nothing else: what updates of weights are tested with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zbus
from waiting import wait_until
from workers.engines.weights import Publisher, PublishesWeights, Receiver, ReceivesWeights
from workers.engines.weights.tensors import State, tensors_of
from zbus.engine import Everywhere, PerRank
from zbus.errors import ConfigError
from zbus.rl import RolloutEngine, TrainEngine
from zbus.rl.rollout_engine import PauseMode
from zbus.rl.weights import TensorInfo


def model_of(width: int, seed: int) -> nn.Module:
    """Return a model with tied weights, a buffer, an empty tensor and a scalar."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.embed = nn.Embedding(16, width)
    model.body = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False))
    model.norm = nn.BatchNorm1d(width)
    model.head = nn.Linear(width, 16, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("none", torch.empty(0, 3))
    return model


class Trouble:
    """What happens where a call reaches a point: ``fail``, ``die``, or wait for a file of that name."""

    def __init__(self) -> None:
        self.what: Mapping[str, str] = {}

    def at(self, point: str) -> None:
        what = self.what.get(point)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "refuse":
            msg = f"told to refuse at {point}"
            raise ConfigError(msg)
        elif what == "fail":
            msg = f"told to fail at {point}"
            raise RuntimeError(msg)
        elif what:
            Path(f"{what}.there").touch()
            wait_until(Path(what).exists, 60, f"leave to go on at {point}")


class Trainer(PublishesWeights, TrainEngine):
    """Trains nothing: its weights are set."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.trouble = Trouble()

    def setup(self, ctx: zbus.Context) -> None:
        self.model = model_of(self.width, 1)
        self.publisher = Publisher(ctx, lambda: tensors_of(self.model))

    def do_publish_weights(self, dtype: str | None, since: str | None, keep: bool) -> dict[str, Any]:
        self.trouble.at("publish")
        return super().do_publish_weights(dtype, since, keep)

    def do_broadcast(self, name: str) -> None:
        self.trouble.at("broadcast")
        super().do_broadcast(name)

    def do_save_weights(self, path: str) -> dict[str, Any]:
        if self.trouble.what.get("save"):
            path_ = Path(path)
            path_.with_name(f".{path_.name}.part-half").mkdir(parents=True)  # as a kill in the middle leaves it
        self.trouble.at("save")
        return super().do_save_weights(path)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def set_version(self, version: int) -> int:
        self.trouble.at("version")
        self._version = version
        return version

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent", lane="trouble")
    async def expect(self, trouble: Mapping[str, str]) -> None:
        """As the generator's."""
        self.trouble.what = dict(trouble)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once")
    def step(self, only: str = "") -> None:
        """Change the weights; only those whose names begin so."""
        with torch.no_grad():
            for name, tensor in tensors_of(self.model).items():
                if name.startswith(only) and tensor.is_floating_point():
                    tensor.add_(1.0)


class _Watched(Receiver):
    """Tells when the first tensor was written and the second was not."""

    def __init__(self, state: Callable[[], State], at: Callable[[str], None]) -> None:
        super().__init__(state)
        self._at = at

    def _copy(self, state: State, tensors: Iterable[tuple[TensorInfo, torch.Tensor]]) -> None:
        def watched() -> Iterator[tuple[TensorInfo, torch.Tensor]]:
            for number, one in enumerate(tensors):
                if number == 1:
                    self._at("half")
                yield one

        super()._copy(state, watched())


class Generator(ReceivesWeights, RolloutEngine):
    """Generates nothing: it can be told to fail, to hang or to die where an update reaches a point."""

    def __init__(self, width: int = 8, dtype: str = "float32") -> None:
        super().__init__()
        self.width, self.dtype = width, dtype
        self.trouble = Trouble()
        self.resumed = 0
        self.aborted = 0

    def setup(self, ctx: zbus.Context) -> None:
        self.model = model_of(self.width, 2).to(getattr(torch, self.dtype))
        self.receiver = _Watched(lambda: tensors_of(self.model), self.trouble.at)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent", lane="trouble")
    async def expect(self, trouble: Mapping[str, str]) -> None:
        """From now on meet trouble at these points."""
        self.trouble.what = dict(trouble)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def counts(self) -> tuple[int, int]:
        return self.resumed, self.aborted

    def do_pause(self, mode: PauseMode) -> int:
        self.trouble.at("pause")
        return 0

    def do_resume(self) -> None:
        self.trouble.at("resume")
        self.resumed += 1

    def do_abort(self) -> int:
        self.aborted += 1
        return 0

    def do_reset_cache(self) -> None:
        self.trouble.at("cache")

    def do_version(self, version: int) -> None:
        self.trouble.at("version")

    def do_state(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0}

    def do_update(self, pieces: Any) -> None:
        self.trouble.at("update")
        super().do_update(pieces)

    def do_load(self, paths: Any) -> None:
        self.trouble.at("update")
        super().do_load(paths)

    def do_receive(self, name: str, manifest: Any, full: bool) -> None:
        self.trouble.at("update")
        super().do_receive(name, manifest, full)
