"""One rank's rows of a batch: how many, how long, and portions of them as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from workers.engines.train.portions import portions
from zbus.errors import ConfigError
from zbus.ragged import Ragged

__all__ = ["Rows"]

_TOKENS: Final = ("input_ids", "tokens")
"""Names of the column of tokens; the first that a batch has."""

_REAL: Final = "row_mask"


class Rows:
    """The rows that a rank got; ``tensors`` gives some of them.

    Args:
        batch: Columns by name, one row per sequence each: arrays, tensors, ``Ragged`` or lists.
            Rows that a column ``row_mask`` leaves out only fill a rank's part up.
        filled: Keep those.

    Attributes:
        count: Number of rows.
        lengths: Tokens of each row, without padding where the batch tells (``Ragged`` tokens, a column ``lengths`` or
            an ``attention_mask``).
        ragged: Whether the tokens came as ``Ragged``.
        width: Entries of a padded row of tokens as they came; 0 where there are none.

    Raises:
        ConfigError: It is no dict of columns of one length.
    """

    def __init__(self, batch: Any, *, filled: bool = False) -> None:
        if not isinstance(batch, Mapping) or not batch:
            told = "an empty dict" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            msg = f"a batch is a dict of columns with one row per sequence, not {told}"
            raise ConfigError(msg, hint="TrainController also takes a list of trajectories")
        counts = {name: _count(name, column) for name, column in batch.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"`{name}` has {count}" for name, count in counts.items())
            msg = f"the columns of a batch have one row per sequence each, but {told}"
            raise ConfigError(msg)
        self.columns = dict(batch)
        self.count = next(iter(counts.values()))
        real = self.columns.pop(_REAL, None)
        if real is not None and not filled:
            kept = [int(row) for row in np.flatnonzero(_numpy(real))]
            self.columns = {name: _take(column, kept) for name, column in self.columns.items()}
            self.count = len(kept)
        tokens = next((self.columns[name] for name in _TOKENS if name in self.columns), None)
        self.ragged = isinstance(tokens, Ragged)
        self.width = 0 if tokens is None or self.ragged or len(tokens.shape) < 2 else int(tokens.shape[1])
        told_lengths = self._lengths(tokens)
        self._told = told_lengths is not None
        self.lengths: list[int] = told_lengths if told_lengths is not None else [self.width or 1] * self.count

    def portions(self, most_rows: int | None, most_tokens: int | None, groups: int | str | None) -> list[list[int]]:
        """Cut them as ``portions`` does; ``groups`` (a count, or a column of equal values) stay together.

        Raises:
            ConfigError: There is no such column, or the rows do not divide so.
        """
        return portions(
            self.lengths,
            most_rows=most_rows,
            most_tokens=most_tokens,
            units=None if groups is None else self._units(groups),
        )

    def tensors(self, which: Sequence[int], device: torch.device) -> dict[str, Any]:
        """Return some rows as tensors, padded on the right with 0 to the longest of them.

        Integers come as int64; beside the columns there are ``lengths`` (int64 ``[rows]``) and ``attention_mask`` (bool
        ``[rows, longest]``) where lengths are known. A list stays a list.
        """
        longest = max((self.lengths[row] for row in which), default=0)
        made = {name: self._tensor(column, which, longest, device) for name, column in self.columns.items()}
        if self._told:
            lengths = torch.tensor([self.lengths[row] for row in which], dtype=torch.int64, device=device)
            made.setdefault("lengths", lengths)
            made.setdefault("attention_mask", torch.arange(longest, device=device) < lengths[:, None])
        return made

    def row(self, number: int) -> dict[str, Any]:
        """Return one row as a batch of its own."""
        return {name: _take(column, [number]) for name, column in self.columns.items()}

    def _tensor(self, column: Any, which: Sequence[int], longest: int, device: torch.device) -> Any:
        if isinstance(column, list | tuple):
            return [column[row] for row in which]
        taken = _take(column, which)
        if isinstance(taken, Ragged):
            taken = taken.padded()
        elif self._told and self.width and len(taken.shape) > 1 and taken.shape[1] == self.width:
            taken = taken[:, :longest]  # columns that go with the tokens end where these do
        tensor = taken if isinstance(taken, Tensor) else torch.from_numpy(_writable(taken))
        whole = not tensor.dtype.is_floating_point and tensor.dtype not in (torch.bool, torch.int64)
        return tensor.to(device, torch.int64 if whole and not tensor.dtype.is_complex else tensor.dtype)

    def _lengths(self, tokens: Any) -> list[int] | None:
        if isinstance(tokens, Ragged):
            return [int(length) for length in tokens.lengths]
        told = self.columns.get("lengths")
        if told is not None:
            return [int(length) for length in _numpy(told)]
        mask = self.columns.get("attention_mask")
        if mask is None or isinstance(mask, Ragged) or not self.width:
            return None
        seen = _numpy(mask) != 0  # a row ends with its last place that counts
        return [int(last) for last in np.where(seen.any(1), seen.shape[1] - seen[:, ::-1].argmax(1), 0)]

    def _units(self, groups: int | str) -> list[list[int]]:
        if isinstance(groups, int):
            if groups < 1 or self.count % groups:
                msg = f"each {groups} rows stay together, but this rank has {self.count}"
                raise ConfigError(msg, hint="pass the same groups to the controller: train_batch(..., groups=n)")
            return [list(range(begin, begin + groups)) for begin in range(0, self.count, groups)]
        column = self.columns.get(groups)
        if column is None or isinstance(column, Ragged):
            msg = f"rows stay together by {groups!r}, which is no column with one value per row"
            raise ConfigError(msg)
        found: dict[Any, list[int]] = {}
        for row, key in enumerate(column if isinstance(column, list | tuple) else _numpy(column).tolist()):
            found.setdefault(key, []).append(row)
        return list(found.values())


def _count(name: str, column: Any) -> int:
    if isinstance(column, Ragged | list | tuple):
        return len(column)
    shape = getattr(column, "shape", None)
    if shape is None or not len(shape):
        msg = f"column `{name}` of a batch is a {type(column).__name__}, which has no rows"
        raise ConfigError(msg, hint="pass what is the same for all rows in options={...}")
    return int(shape[0])


def _take(column: Any, which: Sequence[int]) -> Any:
    if isinstance(column, Ragged):
        return column.take(which)
    if isinstance(column, list | tuple):
        return [column[row] for row in which]
    return column[list(which)]


def _numpy(column: Any) -> Any:
    return column.cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)


def _writable(array: Any) -> Any:
    return array if array.flags.writeable and array.flags.c_contiguous else np.array(array)
