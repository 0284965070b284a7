"""What a forward pass returns, put together from its portions in the order of the rows.

An output is a function ``(model, batch) -> tensor`` or to a dict of tensors: ``[rows]``, or ``[rows, longest, ...]``
with a value per token, or ``PerRow`` of another shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workers.engines.losses import token_logprobs
from workers.engines.train.rows import Rows
from zbus.ragged import Ragged

__all__ = ["PerRow", "entropy", "joined", "logprobs"]


class PerRow(NamedTuple):
    """An output ``[rows, ...]`` of more than one dimension that has no entry per token, such as an embedding."""

    values: Tensor


def logprobs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the log-probability of each token given those before it; 0 for the first."""
    return token_logprobs(model, batch)[0]


def entropy(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the entropy in nats of the distribution that each token was drawn from; 0 for the first."""
    return token_logprobs(model, batch)[1]


def joined(rows: Rows, found: Sequence[tuple[Sequence[int], Any]], name: str) -> Any:
    """Join the outputs of portions.

    Args:
        rows: All rows.
        found: Row numbers of each portion with its output.
        name: Of the output, for messages.

    Returns:
        An array ``[rows, ...]``; of values per token a ``Ragged`` where the tokens came as one, else an array padded
        with 0 to the width they had. Of dicts a dict. Without rows an empty array.

    Raises:
        TypeError: An output does not have a row per row.
    """
    if not found:
        return np.empty(0, np.float32)
    if isinstance(found[0][1], Mapping):
        return {
            key: joined(rows, [(which, answer[key]) for which, answer in found], f"{name}[{key!r}]")
            for key in found[0][1]
        }
    values: dict[int, Any] = {}
    per_token = False
    for which, answer in found:
        tensor = answer.values if isinstance(answer, PerRow) else answer
        longest = max(rows.lengths[row] for row in which)
        per_token = not isinstance(answer, PerRow) and isinstance(tensor, Tensor) and tensor.dim() > 1
        _check(tensor, len(which), longest if per_token else None, name)
        values.update(zip(which, _array(tensor), strict=True))
    listed = [values[row] for row in range(rows.count)]
    if not per_token:
        return np.stack(listed)
    cut = [value[:length] for value, length in zip(listed, rows.lengths, strict=True)]
    if rows.ragged:
        return Ragged.of(cut)
    made = np.zeros((rows.count, rows.width, *cut[0].shape[1:]), cut[0].dtype)
    for row, one in enumerate(cut):
        made[row, : len(one)] = one
    return made


def _check(tensor: Any, count: int, longest: int | None, name: str) -> None:
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
    wanted = (count,) if longest is None else (count, longest)
    if shape is None or shape[: len(wanted)] != wanted:
        told = f"a {type(tensor).__name__}" if shape is None else f"of shape {shape}"
        tokens = "" if longest is None else f" of at most {longest} tokens"
        msg = f"output {name!r} is {told} for {count} rows{tokens}: it is [rows], [rows, longest, ...] or PerRow"
        raise TypeError(msg)


def _array(tensor: Tensor) -> Any:
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if narrow else tensor).cpu().numpy()
