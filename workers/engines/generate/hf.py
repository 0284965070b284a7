"""Rows of a Hugging Face causal model, with its own cache.

Its caches hold all rows equally long, so rows are filled up on the left and a mask says what is text. Rows that are
computed apart are joined by filling up the shorter side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name every torch reader expects

from zbus.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HfRows"]


class HfRows:
    """Rows of a model of ``transformers``; see ``workers.engines.generate.rows.Rows``.

    Args:
        model: A causal model whose layers keep keys and values of all tokens.
        device: Where it is.

    Raises:
        ConfigError: Its layers keep something else, such as a sliding window or a recurrent state.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        self._model = model
        self._device = device
        new_cache: Any = DynamicCache
        self._new_cache: Callable[[], Any] = lambda: new_cache(config=model.config)
        odd = {type(layer).__name__ for layer in self._new_cache().layers if type(layer) is not DynamicLayer}
        if odd:
            msg = f"{type(model).__name__} keeps {', '.join(sorted(odd))}, of which rows cannot be joined"
            raise ConfigError(msg, hint="use a model with full attention in every layer")
        takes = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in takes:
            self._options["logits_to_keep"] = 1
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # its older name
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._lengths: list[int] = []

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Rows``."""
        if self._cache is None:
            return
        if not rows:
            self.clear()
            return
        chosen = torch.tensor(rows, device=self._device)
        self._lengths = [self._lengths[row] for row in rows]
        spare = self._mask.shape[1] - max(self._lengths)  # filled up in all rows
        self._mask = self._mask[chosen, spare:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[chosen, :, spare:]
            layer.values = layer.values[chosen, :, spare:]

    def reserve(self, rows: int, longest: int) -> None:
        """See ``Rows``; its cache grows by itself."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """See ``Rows``."""
        longest = max(map(len, sequences))
        empty = [longest - len(sequence) for sequence in sequences]
        tokens = torch.tensor([[0] * n + list(s) for n, s in zip(empty, sequences, strict=True)], device=self._device)
        mask = torch.arange(longest, device=self._device) >= torch.tensor(empty, device=self._device)[:, None]
        cache = self._new_cache()
        places = (mask.long().cumsum(1) - 1).clamp(min=0)
        logits = self._forward(tokens, mask, places, cache)
        self._join(cache, mask)
        self._lengths += map(len, sequences)
        return logits

    def decode(self, tokens: Tensor) -> Tensor:
        """See ``Rows``."""
        mask = F.pad(self._mask, (0, 1), value=True)
        logits = self._forward(
            tokens[:, None], mask, torch.tensor(self._lengths, device=self._device)[:, None], self._cache
        )
        self._mask = mask
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def clear(self) -> None:
        """See ``Rows``."""
        self._cache = None
        self._mask = torch.empty(0)
        self._lengths = []

    def _forward(self, tokens: Tensor, mask: Tensor, places: Tensor, cache: Any) -> Tensor:
        known = {"attention_mask": mask.long(), "position_ids": places, self._cache_name: cache}
        output = self._model(input_ids=tokens, **known, **self._options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _join(self, cache: Any, mask: Tensor) -> None:
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_widened(part, 1, width) for part in (self._mask, mask)])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widened(part, 2, width) for part in (old.keys, new.keys)])
            old.values = torch.cat([_widened(part, 2, width) for part in (old.values, new.values)])


def _widened(part: Tensor, dim: int, width: int) -> Tensor:
    """Fill up one dimension on the left."""
    missing = width - part.shape[dim]
    return F.pad(part, (*(0, 0) * (part.dim() - 1 - dim), missing, 0)) if missing else part
