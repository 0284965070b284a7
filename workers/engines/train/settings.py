"""What a role says of its training engine, checked when the engine is made, before any model is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from workers.engines.models import check_model
from zbus.errors import ConfigError

__all__ = ["Optimizer", "Parallel", "Schedule", "Settings"]

Parallel = Literal["ddp", "fsdp2", "none"]
"""How ranks of the axis ``dp`` share the model: each has all of it, each has a part, or there is one rank."""

_PARALLEL: Final = ("ddp", "fsdp2", "none")


def _refuse(what: str, value: Any, hint: str) -> None:
    msg = f"training engine: {what}={value!r} cannot be"
    raise ConfigError(msg, hint=hint)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW.

    Attributes:
        lr: Learning rate, at the top of the schedule.
        betas, eps, weight_decay: As torch's.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what no optimizer can do."""
        if not 0 <= self.lr < math.inf:
            _refuse("optimizer.lr", self.lr, "give a learning rate such as 1e-5")
        betas: tuple[float, ...] = self.betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            _refuse("optimizer.betas", self.betas, "give two numbers below 1, such as [0.9, 0.95]")
        if not self.eps > 0:
            _refuse("optimizer.eps", self.eps, "give a small number above 0")
        if not self.weight_decay >= 0:
            _refuse("optimizer.weight_decay", self.weight_decay, "give 0 or more")
        object.__setattr__(self, "betas", tuple(betas))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over the steps of the schedule.

    Attributes:
        kind: ``constant``, ``linear`` or ``cosine``: how it falls after the warm-up.
        warmup: Steps in which it rises to the optimizer's rate.
        steps: Steps until it has fallen; needed unless constant.
        floor: What it falls to, as a fraction of the optimizer's rate.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        if self.kind not in ("constant", "linear", "cosine"):
            _refuse("schedule.kind", self.kind, "constant, linear or cosine")
        if self.warmup < 0:
            _refuse("schedule.warmup", self.warmup, "give a number of steps")
        if self.kind != "constant" and self.steps <= self.warmup:
            _refuse("schedule.steps", self.steps, f"a {self.kind} schedule needs more steps than its warm-up")
        if not 0 <= self.floor <= 1:
            _refuse("schedule.floor", self.floor, "give a fraction of the learning rate")

    def factor(self, step: int) -> float:
        """Return what the rate of step ``step`` (from 0) is multiplied by."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return 1.0
        gone = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        left = 1 - gone if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * gone))
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True)
class Settings:
    """The arguments of ``TorchTrainEngine``; see there."""

    model: Any
    dtype: str | None = None
    device: str = "cpu"
    parallel: Parallel = "ddp"
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = 1.0
    autocast: str | None = None
    micro_rows: int | None = None
    micro_tokens: int | None = None
    seed: int = 0
    nonfinite: Literal["raise", "skip"] = "raise"
    unused_parameters: bool = False
    equal_parts: bool = False
    losses: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if self.model is not None:
            check_model(self.model)
        if self.parallel not in _PARALLEL:
            _refuse("parallel", self.parallel, f"one of {', '.join(_PARALLEL)}")
        if self.clip is not None and not self.clip > 0:
            _refuse("clip", self.clip, "give the largest norm of the gradient, or null")
        for name in ("micro_rows", "micro_tokens"):
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or limit < 1):
                _refuse(name, limit, "give a whole number, at least 1, or null")
        if self.nonfinite not in ("raise", "skip"):
            _refuse("nonfinite", self.nonfinite, "raise or skip")
        for what in ("losses", "outputs"):
            paths = getattr(self, what)
            if not isinstance(paths, Mapping) or not all(isinstance(path, str) for path in paths.values()):
                _refuse(what, paths, 'give names with paths: {"sft": "losses.py:sft"}')

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Read the keywords of an engine.

        Raises:
            ConfigError: One is not known, or its value cannot be.
        """
        told = dict(arguments)
        unknown = told.keys() - {f.name for f in fields(cls)}
        if unknown:
            msg = f"training engine: there is no argument {', '.join(map(repr, sorted(unknown)))}"
            raise ConfigError(msg, hint=f"it takes {', '.join(f.name for f in fields(cls))}")
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule)):
            if name in told:
                told[name] = _section(name, kind, told[name])
        return cls(**told)


def _section(name: str, kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    known = [f.name for f in fields(kind)]
    if not isinstance(value, Mapping) or not value.keys() <= set(known):
        msg = f"training engine: {name}={value!r} is not understood"
        raise ConfigError(msg, hint=f"its keys are {', '.join(known)}")
    return kind(**value)
