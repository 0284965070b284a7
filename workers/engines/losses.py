"""Losses of causal language models: supervised, and the clipped policy gradient of PPO and GRPO.

Each takes a model and a portion of a batch as tensors and returns ``(loss, weight, stats)``: the loss *summed* over the
tokens that count, how many those are, and sums of statistics over the same tokens. The engine divides by the weight of
the whole batch, so every token weighs the same however ranks and portions share it.

Columns: ``input_ids`` (or ``tokens``) int64 ``[rows, longest]`` and ``loss_mask`` ``[rows, longest]``, true where a
token is to be learned (never the first one: nothing predicts it).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every torch reader expects

from workers.engines.models import logits_of

__all__ = ["GRPO", "Loss", "grpo", "sft", "token_logprobs"]

Columns = Mapping[str, Any]

_MASK: Final = "attention_mask"
"""A column, and the argument of a model that is given it."""


class Loss(NamedTuple):
    """What a loss function returns.

    Attributes:
        loss: Summed over the tokens that count; a scalar that gradients flow from.
        weight: How many those are.
        stats: Sums over the same tokens by name; divided by the weight they are means.
    """

    loss: Tensor
    weight: Tensor
    stats: dict[str, Tensor]


def token_logprobs(model: nn.Module, batch: Columns) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token given those before it, and the entropy of its distribution.

    Both are ``[rows, longest]``, 0 at the first place, which nothing predicts. They are computed in at least float32.
    """
    tokens = _tokens(batch)
    logs = _distributions(model, batch)
    # A word that the model rules out has the logarithm -inf, and adds nothing.
    entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
    return _chosen(logs, tokens), F.pad(entropy, (1, 0))


def _distributions(model: nn.Module, batch: Columns) -> Tensor:
    told = {_MASK: batch[_MASK]} if _MASK in batch and _MASK in inspect.signature(model.forward).parameters else {}
    logits = logits_of(model(_tokens(batch), **told))[:, :-1]
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return logits.log_softmax(-1)


def _chosen(logs: Tensor, tokens: Tensor) -> Tensor:
    return F.pad(logs.gather(-1, tokens[:, 1:, None]).squeeze(-1), (1, 0))


def sft(model: nn.Module, batch: Columns) -> Loss:
    """Cross entropy of the tokens under ``loss_mask``, in nats."""
    tokens, mask = _tokens(batch), _mask(batch)
    loss = -torch.where(mask, _chosen(_distributions(model, batch), tokens), 0.0).sum()
    return Loss(loss, mask.sum(), {"loss": loss.detach()})


class GRPO:
    """Policy gradient with the ratio to the generating policy clipped, and optionally a price on leaving a reference.

    Further columns: ``logprobs`` ``[rows, longest]`` of the tokens when they were generated, ``advantages`` ``[rows]``
    or ``[rows, longest]``, and ``ref_logprobs`` where ``kl`` is not 0. The objective is Schulman et al., "Proximal
    Policy Optimization Algorithms", 2017, eq. 7; the estimate of the divergence Schulman, "Approximating KL
    Divergence", 2020 (k3).

    Args:
        clip: How far the ratio counts below 1.
        clip_high: How far above 1; None: as ``clip`` (a larger one leaves room for unlikely tokens: Yu et al., "DAPO",
            2025).
        kl: Price of a nat of divergence per token; 0: there is no reference.
        entropy: What a nat of entropy per token is worth.
    """

    def __init__(
        self, *, clip: float = 0.2, clip_high: float | None = None, kl: float = 0.0, entropy: float = 0.0
    ) -> None:
        self.low, self.high = 1 - clip, 1 + (clip if clip_high is None else clip_high)
        self.kl = kl
        self.entropy = entropy

    def __call__(self, model: nn.Module, batch: Columns) -> Loss:
        """Return the loss of a portion; see the class."""
        logs, entropy = token_logprobs(model, batch)
        if not self.entropy:
            entropy = entropy.detach()  # what its gradient would need is as large as the logits
        mask = _mask(batch)
        advantages = batch["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        difference = torch.where(mask, logs - batch["logprobs"], 0.0)
        ratio = difference.exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(self.low, self.high) * advantages)
        cost = -gain - self.entropy * entropy if self.entropy else -gain
        # An estimate of the divergence from the generating policy, from its tokens: never negative, without bias.
        drift = ratio - 1 - difference
        stats = {
            "loss": cost,
            "entropy": entropy,
            "drift": drift,
            "clipped": ((ratio < self.low) & (advantages < 0)) | ((ratio > self.high) & (advantages > 0)),
            "ratio": ratio,
        }
        if self.kl:
            away = torch.where(mask, batch["ref_logprobs"] - logs, 0.0)
            divergence = away.exp() - 1 - away
            cost = cost + self.kl * divergence
            stats |= {"loss": cost, "kl": divergence}
        sums = {name: (value.detach() * mask).sum() for name, value in stats.items()}
        return Loss((cost * mask).sum(), mask.sum(), sums)


grpo: Final = GRPO()
"""With the usual clipping of 0.2 and no reference; an instance of your own is named like any loss."""


def _tokens(batch: Columns) -> Tensor:
    tokens: Tensor = batch["input_ids"] if "input_ids" in batch else batch["tokens"]
    return tokens


def _mask(batch: Columns) -> Tensor:
    mask: Tensor = batch["loss_mask"].bool().clone()
    mask[:, :1] = False
    return mask
