"""Training without the bus: one rank's model, optimizer, step, evaluation and checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data import PAD, Batch
from model import G2P, greedy, loss_sum, targets

__all__ = ["Trainer"]


class Trainer:
    """One rank's part of data-parallel training.

    Inside an initialised process group of more than one rank, gradients are averaged over the ranks by
    DistributedDataParallel; every rank must then make the same calls of ``train``.

    Args:
        seed: Of the initial weights; the same on every rank.
        dtype: Of weights and arithmetic.
        weight_decay: AdamW's.
        clip: Largest norm of the gradient.

    Attributes:
        step: Optimizer steps taken so far.
    """

    def __init__(
        self, *, seed: int = 0, dtype: torch.dtype = torch.float32, weight_decay: float = 0.01, clip: float = 1.0
    ) -> None:
        torch.manual_seed(seed)
        self.model = G2P().to(dtype)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.replica: torch.nn.Module = DistributedDataParallel(self.model) if self.world_size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=weight_decay)
        self.clip = clip
        self.step = 0

    def train(self, batch: Batch, step: int, lr: float) -> dict[str, float]:
        """Take optimizer step number ``step`` (from 0) on this rank's share of the batch, which may be empty.

        Each token of the whole batch weighs the same however the ranks share it, so the result does not depend on the
        number of ranks.

        Returns:
            ``loss_sum`` (nats) and ``tokens`` of this share before the step, ``grad_norm`` of the whole batch.

        Raises:
            ValueError: ``step`` is not the next one: a step was lost or given twice.
        """
        if step != self.step:
            msg = f"asked for step {step} with {self.step} steps taken"
            raise ValueError(msg)
        tokens = _tensor(batch)
        count = _answer_tokens(tokens)
        total = count.clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        loss = loss_sum(self.replica(tokens), tokens)
        self.optimizer.zero_grad()
        # DDP divides the summed gradients by the number of ranks; each share shall weigh by its tokens instead.
        (loss * (self.world_size / total.item())).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step += 1
        return {"loss_sum": loss.item(), "tokens": int(count), "grad_norm": norm.item()}

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, decode: bool = True) -> dict[str, float]:
        """Score the answers of a batch; touches neither weights nor other ranks.

        Returns:
            ``loss_sum`` (nats) over ``tokens``, ``exact`` words answered right by greedy decoding, of ``words``.
        """
        tokens = _tensor(batch)
        scores = {
            "loss_sum": loss_sum(self.model(tokens), tokens).item(),
            "tokens": int(_answer_tokens(tokens)),
            "words": len(tokens),
        }
        if decode:
            width = tokens.shape[1]
            answers = greedy(self.model, tokens)
            scores["exact"] = int(((answers[:, :width] == tokens).all(1) & (answers[:, width:] == PAD).all(1)).sum())
        return scores

    def save(self, path: Path) -> None:
        """Write weights and optimizer state to ``path`` (``.npz``): whole or not at all, whenever the power fails.

        Raises:
            OSError: The directory cannot be written; what stood at ``path`` is intact.
        """
        arrays = {name: value.numpy(force=True) for name, value in self._tensors().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temp.open("wb") as file:
                np.savez(file, **arrays, step=np.int64(self.step))
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself must survive
        finally:
            os.close(directory)

    def load(self, path: Path) -> int:
        """Take over weights, optimizer state and step of a checkpoint; return its step.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not a checkpoint of this model; nothing was changed.
        """
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
        self._start_optimizer()
        tensors = self._tensors()
        if arrays.keys() != {*tensors, "step"} or any(arrays[n].shape != t.shape for n, t in tensors.items()):
            msg = f"{path} is not a checkpoint of this model"
            raise ValueError(msg)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        self.step = int(arrays["step"])
        return self.step

    def _tensors(self) -> Mapping[str, Tensor]:
        """Return every tensor of the state by its name in a checkpoint; writing to one changes the state."""
        self._start_optimizer()
        named = {}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter
            for key, value in self.optimizer.state[parameter].items():
                named[f"adamw.{key}.{name}"] = value
        return named

    def _start_optimizer(self) -> None:
        """Give the optimizer the state it would otherwise make at its first step."""
        for parameter in self.model.parameters():
            state: dict[str, Any] = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def _tensor(batch: Batch) -> Tensor:
    return torch.from_numpy(np.array(batch["tokens"], dtype=np.int64))  # a copy: what the bus hands out is read-only


def _answer_tokens(tokens: Tensor) -> Tensor:
    return (targets(tokens) != PAD).sum()
