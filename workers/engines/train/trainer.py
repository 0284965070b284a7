"""One rank's training: portions of its rows through the model, gradients over all ranks, steps of the optimizer.

Works without the bus: a process of its own is a group of one rank.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workers.engines.train.meeting import Meeting, left
from workers.engines.train.outputs import joined
from workers.engines.train.parallel import Replica, norm_and_clip, scale_gradients
from workers.engines.train.place import Peers, Place
from workers.engines.train.rows import Rows
from workers.engines.train.settings import Settings
from zbus.errors import ConfigError
from zbus.rl.steps import part
from zbus.trace import span

__all__ = ["Trainer", "memory", "seed_all"]

Loss = Callable[[nn.Module, Mapping[str, Any]], Any]
Output = Callable[[nn.Module, Mapping[str, Any]], Any]

_Stat = tuple[str, float, float | None]
"""How a number of a loss is merged, the number, and its weight; None: the weight of the rows."""


@dataclass
class _Sums:
    """What the portions of one batch came to on this rank."""

    loss: float = 0.0
    weight: float = 0.0
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def report(self) -> dict[str, list[Any]]:
        extra = {
            name: part(reduce, value, self.weight if weight is None else weight)
            for name, (reduce, value, weight) in self.extra.items()
        }
        return {**extra, "loss": part("mean", self.loss, self.weight), "weight": part("sum", self.weight)}


class _Passes(NamedTuple):
    """A batch on its way through the model: its rows, those of each portion, and tensors that count or do not."""

    rows: Rows
    portions: list[list[int]]
    todo: list[tuple[dict[str, Any], bool]]


class Trainer:
    """A model, its optimizer and its schedule on one rank of a group. All methods run on one thread.

    Methods that say "collective" are called by every rank of the group in the same order.

    Args:
        model: On its device, the same on every rank.
        settings: See ``TorchTrainEngine``.
        place: This rank's.
        make_optimizer: Makes another optimizer than AdamW, for the parameters of the (sharded) model.

    Attributes:
        model: The model, as losses see it.
        steps: Optimizer steps taken.
        position: Steps of the learning-rate schedule taken.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        place: Place | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.place = place or Place()
        self.settings = settings
        self._peers = Peers(self.place)
        self._replica = Replica(model, self.place, settings)
        self._meeting = Meeting(self._peers)
        self._replica.meet(self._meeting)
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = (
            _adamw(self.parameters, settings, self.place) if make_optimizer is None else make_optimizer(model)
        )
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.steps = 0
        self.position = 0
        self._weight = 0.0  # of all ranks' rows whose gradients are there
        self._set_rate()
        seed_all(settings.seed * 1_000_003 + 1 + self.place.dp)

    @property
    def rate(self) -> float:
        """Learning rate of the next step, of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    # -- batches -----------------------------------------------------------------------------------------------------

    def train(self, batch: Any, loss: Loss, name: str = "loss", groups: int | str | None = None) -> dict[str, Any]:
        """Take one optimizer step on this rank's rows. Collective. Gradients that were there are forgotten.

        Returns:
            Parts of ``loss``, ``weight``, what the loss reports, ``grad_norm`` and ``lr``, as ``zbus.rl.steps`` merges.

        Raises:
            ConfigError: The batch is none, or no rank has a row.
            ConnectionAbortedError: Another rank failed; no rank has taken the step.
            FloatingPointError: The gradient is not finite; no rank has taken the step.
        """
        self.zero_grad()
        report = self.forward_backward(batch, loss, name, groups)
        return {**report, **self.step(name)}

    def forward_backward(
        self, batch: Any, loss: Loss, name: str = "loss", groups: int | str | None = None
    ) -> dict[str, Any]:
        """Add the gradients of this rank's rows to those that are there. Collective.

        Returns:
            Parts of ``loss``, ``weight`` and what the loss reports.

        Raises:
            ConfigError, ConnectionAbortedError: As ``train``; the gradients that were there are lost.
        """
        sums = _Sums()
        self.model.train()
        try:
            passes = self._passes(batch, name, groups, equally=True).todo
            with self._meeting.passing(name):
                for number, (rows, counts) in enumerate(passes):
                    with self._replica.portion(last=number == len(passes) - 1):
                        total = self._forward(loss, name, rows, sums, counts=counts)
                        with self._meeting.apart(), span("backward", category="compute", loss=name):
                            total.backward()
                self._meeting.end()  # nobody steps unless all have gone back
        except BaseException:
            self.zero_grad()
            self._replica.recover()
            raise
        return sums.report()

    def evaluate(self, batch: Any, loss: Loss, name: str = "loss", groups: int | str | None = None) -> dict[str, Any]:
        """Compute a loss on this rank's rows without gradients. Collective.

        Returns:
            Parts of ``loss``, ``weight`` and what the loss reports.

        Raises:
            ConfigError, ConnectionAbortedError: As ``train``.
        """
        sums = _Sums()
        self.model.eval()
        for answer, counts in self._looked(
            self._passes(batch, name, groups, equally=self._replica.in_parts), loss, name
        ):
            if counts:
                _add(sums, *_read(answer, name))
        return sums.report()

    def forward(self, batch: Any, output: Output, name: str = "output") -> Any:
        """Return one value per row: an array ``[rows]`` or, of values per token, what the tokens came as. Collective.

        Values per token come as ``Ragged`` where the tokens did, else padded with 0 to the width the tokens had. A dict
        of outputs gives a dict.

        Raises:
            ConfigError, ConnectionAbortedError: As ``train``.
        """
        self.model.eval()
        passes = self._passes(batch, name, None, equally=self._replica.in_parts, filled=True)
        found = [answer for answer, counts in self._looked(passes, output, name) if counts]
        return joined(passes.rows, list(zip(passes.portions, found, strict=True)), name)

    # -- steps -------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self._weight = 0.0

    def step(self, name: str = "loss") -> dict[str, Any]:
        """Weigh and clip the gradients and let the optimizer step. Collective where the model is in parts.

        Raises:
            ConfigError: There are no gradients.
            FloatingPointError: They are not finite; the model is as it was, and they are forgotten.
        """
        if not self._weight:
            msg = f"there is nothing to learn from: the weight of all rows under loss {name!r} is 0"
            raise ConfigError(msg, hint="look at the mask that the loss counts by")
        # Ranks were averaged; each unit of weight of the whole batch shall count the same instead.
        scale_gradients(self.parameters, self.place.dp_size / self._weight)
        norm = norm_and_clip(self.parameters, self.settings.clip)
        report = {"grad_norm": part("max", norm), "lr": part("max", self.rate)}
        if not math.isfinite(norm):
            self.zero_grad()
            if self.settings.nonfinite == "skip":
                return {**report, "skipped": part("max", 1)}
            msg = f"the gradient of loss {name!r} is not finite (norm {norm}), so no step was taken"
            raise FloatingPointError(msg)
        self._replica.part()
        with span("optimizer", category="compute"):
            self.optimizer.step()
        self.zero_grad()
        self.steps += 1
        return {**report, "skipped": part("max", 0)} if self.settings.nonfinite == "skip" else report

    def advance(self) -> float:
        """Go one step on in the schedule and return the rate of the next optimizer step."""
        self.position += 1
        self._set_rate()
        return self.rate

    def move_to(self, position: int) -> None:
        """Go to a step of the schedule."""
        self.position = position
        self._set_rate()

    def _set_rate(self) -> None:
        factor = self.settings.schedule.factor(self.position)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def move(self, device: str | None) -> None:
        """Move weights and optimizer state to another device, or (None) back to their own. Gradients are forgotten."""
        target = self.place.device if device is None else torch.device(device)
        self.zero_grad()
        self._replica.part()
        self.model.to(target)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():  # AdamW keeps its count of steps on the host
                    state[key] = value.to(target)
        if target.type == "cpu" and self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- passes ------------------------------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Tell the other ranks, which have a batch, that this one cannot begin. Collective, with theirs."""
        self._peers.gather(0, 0, 1)

    def _passes(
        self, batch: Any, name: str, groups: int | str | None, *, equally: bool, filled: bool = False
    ) -> _Passes:
        """Return what goes through the model one after the other, and whether it counts.

        With ``equally`` every rank gets as many passes: a rank that has fewer runs a row that counts nothing, its own
        or, without any, one that another rank lends. ``filled``: rows that only fill up count too.
        """
        try:
            rows = Rows(batch, filled=filled)
            portions = rows.portions(self.settings.micro_rows, self.settings.micro_tokens, groups)
            own = [(rows.tensors(portion, self.place.device), True) for portion in portions]
        except Exception:
            self.withdraw()
            raise
        told = self._peers.gather(rows.count, len(own), 0)
        failed = [dp for dp, (_, _, wrong) in enumerate(told) if wrong]
        if failed:
            raise ConnectionAbortedError(left(f"position {', '.join(map(str, failed))} of dp", name))
        if not any(count for count, _, _ in told):
            msg = f"no rank has a row of this batch for {name!r}"
            raise ConfigError(msg, hint="pass at least one row")
        if not equally:
            return _Passes(rows, portions, own)
        lent = self._lent(rows, [count for count, _, _ in told])
        most = max(passes for _, passes, _ in told)
        if len(own) < most:
            spare = rows.tensors([0], self.place.device) if rows.count else lent
            own += [(spare, False)] * (most - len(own))
        return _Passes(rows, portions, own)

    def _lent(self, rows: Rows, counts: Sequence[int]) -> dict[str, Any]:
        """Have the first rank with rows lend one, if some rank has none; return it as tensors."""
        if all(counts):
            return {}
        owner = next(dp for dp, count in enumerate(counts) if count)
        lent = self._peers.lend(rows.row(0) if owner == self.place.dp else None, owner)
        return Rows(lent).tensors([0], self.place.device)

    def _looked(self, passes: _Passes, function: Loss, name: str) -> list[tuple[Any, bool]]:
        """Run passes without gradients; return each answer, and whether it counts."""
        if not self._replica.in_parts:  # no rank needs another
            return [(self._replica.look(function, rows), counts) for rows, counts in passes.todo]
        answers = []
        try:
            with self._meeting.passing(name):
                for rows, counts in passes.todo:
                    answers.append((self._replica.look(function, rows), counts))
                    self._meeting.end()
        except BaseException:
            self._replica.recover()
            raise
        return answers

    def _forward(self, loss: Loss, name: str, rows: dict[str, Any], sums: _Sums, *, counts: bool) -> Tensor:
        """Run a loss forward; all ranks learn whether it failed anywhere before any goes back, so none waits for it."""
        with span("forward", category="compute", loss=name):
            answer = self._replica.run(loss, rows)
        total, weight, extra = _read(answer, name)
        self._weight += self._meeting.end(float(weight) if counts else 0.0)
        if not counts:
            return total * 0
        _add(sums, total, weight, extra)
        return total


def seed_all(seed: int) -> None:
    """Seed every generator of this process that models and losses draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  # what user code may draw from


def memory(device: torch.device) -> dict[str, int]:
    """Return the memory in use, in bytes: ``resident`` of this process, and of CUDA ``allocated`` and ``reserved``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    found = {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
    if device.type == "cuda":
        found |= {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    return found


def _adamw(parameters: Sequence[nn.Parameter], settings: Settings, place: Place) -> torch.optim.Optimizer:
    told = settings.optimizer
    return torch.optim.AdamW(
        parameters, lr=told.lr, betas=told.betas, eps=told.eps, weight_decay=told.weight_decay,
        foreach=False if place.tp_size > 1 else None,  # split and whole parameters do not go in one list
    )  # fmt: skip


def _read(answer: Any, name: str) -> tuple[Tensor, float, Mapping[str, _Stat]]:
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[0], Tensor):
        told = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        msg = f"loss {name!r} returned {told}, not (loss_sum, weight, stats)"
        raise TypeError(msg)
    total, weight, told = answer
    if total.numel() != 1:
        msg = f"loss {name!r} returned a loss of shape {tuple(total.shape)}; it is one sum over all rows"
        raise TypeError(msg)
    number = float(weight)
    if not 0 <= number < math.inf:
        msg = f"loss {name!r} returned the weight {number}, which is no number from 0 on"
        raise ValueError(msg)
    return total, number, {key: _stat(key, value, name) for key, value in told.items()}


def _add(sums: _Sums, total: Tensor, weight: float, stats: Mapping[str, _Stat]) -> None:
    sums.loss += float(total.detach())
    sums.weight += weight
    for key, (reduce, number, own) in stats.items():
        if key not in sums.extra:
            sums.extra[key] = [reduce, number, own]
            continue
        known = sums.extra[key]
        if reduce in ("max", "min"):
            known[1] = max(known[1], number) if reduce == "max" else min(known[1], number)
        else:
            known[1] += number
            known[2] = None if own is None else known[2] + own


def _stat(key: str, value: Any, name: str) -> _Stat:
    """Read what a loss reports: a sum to be divided by the weight, or how it is to be merged and what."""
    try:
        if not isinstance(value, tuple):
            return "mean", float(value), None
        reduce, number, *weight = value
        counted = float(weight[0]) if weight else 1.0
        part(reduce, float(number), counted)
        return str(reduce), float(number), None if reduce == "mean" and not weight else counted
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        msg = (
            f"loss {name!r} reports {key!r} as {type(value).__name__}, which is no number or way to merge one: {error}"
        )
        raise TypeError(msg) from error
