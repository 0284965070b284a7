"""How a model computes the next tokens of several sequences of unequal length: rows side by side.

Three kinds, by what the model can do: ``CachedRows`` for a model whose ``forward`` takes a ``cache`` (``Cache``),
``PlainRows`` for any causal model without one, and ``workers.engines.generate.hf`` for those of Hugging Face.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name every torch reader expects

from workers.engines.models import logits_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Cache", "CachedRows", "PlainRows", "Rows", "rows_of"]


class Rows(Protocol):
    """Sequences that a model goes on with; used by one thread."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a kept row stands where it was or nearer to the front."""

    def reserve(self, rows: int, longest: int) -> None:
        """Make ready for so many rows of at most so many tokens."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Compute sequences as new rows behind the others; returns the logits of what follows, ``[new, vocabulary]``.

        If it raises, the rows are what they were.
        """
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Go on by one token in every row, ``[rows]``; returns the logits of what follows, ``[rows, vocabulary]``."""
        ...

    def clear(self) -> None:
        """Forget all rows and give their memory back."""


def rows_of(model: nn.Module, *, device: str, places: int) -> Rows:
    """Return the rows that fit a model.

    Raises:
        ConfigError: A Hugging Face model keeps something that cannot be told apart by rows.
    """
    if hasattr(model, "prepare_inputs_for_generation"):
        from workers.engines.generate.hf import HfRows

        return HfRows(model, device)
    if "cache" in inspect.signature(model.forward).parameters:
        return CachedRows(model, device, places)
    return PlainRows(model, device)


# -- models without a cache ------------------------------------------------------------------------------------------


class PlainRows:
    """Rows of a model that maps tokens ``[batch, length]`` to logits, never looking right: all is computed anew.

    Args:
        model: The model.
        device: Where it is.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self._device = device
        self._rows: list[list[int]] = []

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Rows``."""
        self._rows = [self._rows[row] for row in rows]

    def reserve(self, rows: int, longest: int) -> None:
        """See ``Rows``; nothing is kept."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """See ``Rows``."""
        logits = self._last(sequences)
        self._rows += map(list, sequences)
        return logits

    def decode(self, tokens: Tensor) -> Tensor:
        """See ``Rows``."""
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._last(self._rows)

    def clear(self) -> None:
        """See ``Rows``."""
        self._rows = []

    def _last(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        tokens, last = _padded(sequences, self._device)
        logits: Tensor = logits_of(self._model(tokens))
        return logits[torch.arange(len(sequences), device=self._device), last]


# -- models that take a cache ----------------------------------------------------------------------------------------


class Cache:
    """What a model's ``forward`` gets as ``cache``: keys and values of earlier tokens, and where the given ones stand.

    A model uses two things of it::

        def forward(self, tokens, cache=None):
            places = self.place.weight[: tokens.shape[1]] if cache is None else self.place(cache.positions)
            x = self.token(tokens) + places
            ...
            mixed = causal(query, key, value) if cache is None else cache.attend(layer, query, key, value)

    Attributes:
        positions: int64 ``[rows, length]``: of each given token in its sequence.
    """

    def __init__(self, store: _Store) -> None:
        self._store = store
        self.positions = torch.empty(0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attend causally to what came before in each row and to the given tokens, which are remembered.

        Args:
            layer: Number of the attention: any int, each its own.
            query: ``[rows, heads, length, width]``.
            key: The same, perhaps with fewer heads that divide those of the query.
            value: As ``key``.
            scale: Of the products; None: one by the square root of the width.

        Returns:
            As ``query``, with the width of the values.
        """
        kept = self._store.layer(layer, key, value)
        grouped = query.shape[1] != key.shape[1]
        work = self._store.work
        if isinstance(work, _Prefill):
            rows = slice(work.first, work.first + len(work.source))
            kept.keys[rows, :, : key.shape[2]] = key[work.source]
            kept.values[rows, :, : value.shape[2]] = value[work.source]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        kept.keys[work.number, :, work.place] = key[:, :, 0]
        kept.values[work.number, :, work.place] = value[:, :, 0]
        keys, values = (held[: work.rows, :, : work.longest] for held in (kept.keys, kept.values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=work.mask, scale=scale, enable_gqa=grouped)


@dataclass(slots=True)
class _Layer:
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class _Prefill:
    first: int
    source: Tensor  # for each new row, the computed sequence that it is


@dataclass(slots=True)
class _Decode:
    rows: int
    longest: int
    number: Tensor
    place: Tensor
    mask: Tensor


class _Store:
    """The memory behind a cache: equally long rows for every layer, at most ``places`` tokens in all."""

    def __init__(self, places: int) -> None:
        self.work: _Prefill | _Decode = _Prefill(0, torch.empty(0))
        self.layers: dict[int, _Layer] = {}
        self._places = places
        self._rows = 0
        self._columns = 0

    def layer(self, number: int, key: Tensor, value: Tensor) -> _Layer:
        """Return what is kept of an attention, made at its first use."""
        if number not in self.layers:
            self.layers[number] = _Layer(self._empty(key), self._empty(value))
        return self.layers[number]

    def grow(self, rows: int, columns: int, used_rows: int, used_columns: int) -> None:
        """Have room for so many; what is used is kept. More rows than asked for, as they come one by one."""
        if rows <= self._rows and columns <= self._columns:
            return
        if columns <= self._columns:
            spare = min(rows + rows // 2, self._places // max(columns, 1))
            self._rows, self._columns = max(rows, spare), columns
        else:
            self._rows, self._columns = rows, columns
        for layer in self.layers.values():
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = self._empty(old)
                new[:used_rows, :, :used_columns] = old[:used_rows, :, :used_columns]
                setattr(layer, name, new)

    def move(self, to: Tensor, of: Tensor) -> None:
        """Copy rows over others."""
        for layer in self.layers.values():
            layer.keys[to] = layer.keys[of]
            layer.values[to] = layer.values[of]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._columns, like.shape[3])


class CachedRows:
    """Rows of a model whose ``forward`` takes ``cache``; see ``Cache``.

    Row n of the memory holds the keys and values of sequence n from its column 0 on. What stands behind a row's length
    is never attended to, and written over when the row gets there.

    Args:
        model: The model.
        device: Where it is.
        places: Most tokens in all rows, if all were as long as the longest.
    """

    def __init__(self, model: nn.Module, device: str, places: int) -> None:
        self._model = model
        self._device = device
        self._places = places
        self._store = _Store(places)
        self._cache = Cache(self._store)
        self._lengths: list[int] = []

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Rows``."""
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            to, of = torch.tensor(moved, device=self._device).unbind(1)
            self._store.move(to, of)
        self._lengths = [self._lengths[row] for row in rows]

    def reserve(self, rows: int, longest: int) -> None:
        """See ``Rows``."""
        self._store.grow(rows, longest, len(self._lengths), max(self._lengths, default=0))

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """See ``Rows``. Equal sequences are computed once."""
        number: dict[tuple[int, ...], int] = {}
        source = [number.setdefault(tuple(sequence), len(number)) for sequence in sequences]
        tokens, last = _padded(list(number), self._device)
        self.reserve(len(self._lengths) + len(sequences), tokens.shape[1])
        places = torch.tensor(source, device=self._device)
        self._cache.positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        self._store.work = _Prefill(len(self._lengths), places)
        logits: Tensor = logits_of(self._model(tokens, cache=self._cache))
        self._lengths += map(len, sequences)
        return logits[torch.arange(len(last), device=self._device), last][places]

    def decode(self, tokens: Tensor) -> Tensor:
        """See ``Rows``."""
        rows = len(self._lengths)
        place = torch.tensor(self._lengths, device=self._device)
        longest = max(self._lengths) + 1
        self.reserve(rows, longest)
        mask = torch.arange(longest, device=self._device) <= place[:, None]
        self._cache.positions = place[:, None]
        number = torch.arange(rows, device=self._device)
        self._store.work = _Decode(rows, longest, number, place, mask[:, None, None])
        logits: Tensor = logits_of(self._model(tokens[:, None], cache=self._cache))
        self._lengths = [length + 1 for length in self._lengths]
        return logits[:, -1]

    def clear(self) -> None:
        """See ``Rows``."""
        self._store = _Store(self._places)
        self._cache = Cache(self._store)
        self._lengths = []


def _padded(sequences: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Return sequences as one tensor, filled up with 0 on the right, and where the last token of each stands."""
    longest = max(map(len, sequences))
    rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    last = [len(sequence) - 1 for sequence in sequences]
    return torch.tensor(rows, device=device), torch.tensor(last, device=device)
