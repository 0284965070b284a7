"""Small models and losses for the tests of training: ranks find them on their import path."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import torch
from torch import nn

from workers.engines.losses import sft
from workers.engines.train import TorchTrainEngine

VOCABULARY = 13


class Block(nn.Module):
    """Mixes a place with the mean of what is left of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        seen = self.norm(x)
        before = seen.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(nn.functional.gelu(self.up(seen + before)))


class Tiny(nn.Module):
    """A causal model of next tokens; the same weights wherever the generators were seeded alike."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, width: int = 8, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def picky(model: Any, batch: Any, scale: float = 1.0) -> Any:
    """As ``sft``, but refuse a row that begins with token 12 and report what only some rows have."""
    if (batch["input_ids"][:, 0] == 12).any():
        msg = "a row begins with 12"
        raise ValueError(msg)
    loss, weight, stats = sft(model, batch)
    longest = int(batch["lengths"].max())
    stats = {**stats, "longest": ("max", longest), "rows": ("sum", len(batch["input_ids"]))}
    if (batch["input_ids"] == 11).any():
        stats["eleven"] = weight * 1.0
    return loss * scale, weight, stats


def deadly(model: Any, batch: Any) -> Any:
    """As ``sft``, but kill the process that has a row beginning with token 12."""
    if (batch["input_ids"][:, 0] == 12).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return sft(model, batch)


def endless(model: Any, batch: Any) -> Any:
    """A loss whose gradient is not finite."""
    loss, weight, stats = sft(model, batch)
    return loss * float("inf"), weight, stats


class Subclass(TorchTrainEngine):
    """Brings its model, optimizer, a loss and an output itself."""

    losses: ClassVar = {"twice": lambda model, batch: (2 * sft(model, batch)[0], sft(model, batch)[1], {})}
    outputs: ClassVar = {"first": lambda model, batch: batch["input_ids"][:, 0].double() + 0 * model.head.bias.sum()}

    def make_model(self) -> Any:
        return Tiny().double()

    def make_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.5)


class _Brittle(Block):
    """A layer that refuses what ``Brittle`` marks."""

    refuses = False

    def forward(self, x: Any) -> Any:
        if self.refuses:
            msg = "a layer refuses a row that begins with 12"
            raise ValueError(msg)
        return super().forward(x)


class Brittle(Tiny):
    """A model whose last layer fails, with the layers before it done, on a row that begins with token 12."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].__class__ = _Brittle
        self.register_buffer("odd", torch.zeros(1, dtype=torch.uint8).view(torch.bits8))  # of a dtype without a name

    def forward(self, tokens: Any) -> Any:
        self.blocks[-1].refuses = bool((tokens[:, 0] == 12).any())
        return super().forward(tokens)


class _NoWayBack(torch.autograd.Function):
    """As it was forward, and an error back."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        msg = "no way back from a row that begins with 12"
        raise ValueError(msg)


def one_way(model: Any, batch: Any) -> Any:
    """As ``sft``, but with a row that begins with token 12 the way back fails at once."""
    loss, weight, stats = sft(model, batch)
    if (batch["input_ids"][:, 0] == 12).any():
        loss = _NoWayBack.apply(loss)
    return loss, weight, stats
