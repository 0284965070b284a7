"""Batches of rows as dicts of columns, joined behind one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zbus.errors import ConfigError
from zbus.ragged import Ragged

__all__ = ["concat"]


def concat(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of several batches as one batch, in their order.

    Args:
        batches: Dicts with the same columns; a column is a ``Ragged``, an array ``[rows, ...]`` or a list, of the same
            kind in every batch.

    Raises:
        ConfigError: There is no batch, or their columns differ; the message names batch and column.
    """
    if not batches:
        msg = "there is no batch to join"
        raise ConfigError(msg)
    names = list(batches[0])
    for number, batch in enumerate(batches):
        odd = sorted(batch.keys() ^ set(names))
        if odd:
            msg = f"batch {number} and the first one do not have the same columns: {', '.join(odd)}"
            raise ConfigError(msg)
    return {name: _column(name, [batch[name] for batch in batches]) for name in names}


def _column(name: str, parts: list[Any]) -> Any:
    kind = Ragged if isinstance(parts[0], Ragged) else list if isinstance(parts[0], list) else None
    for number, part in enumerate(parts):
        fits = isinstance(part, kind) if kind is not None else hasattr(part, "shape") and not isinstance(part, Ragged)
        if not fits:
            first = type(parts[0]).__name__
            msg = f"column {name!r} of batch {number} is a {type(part).__name__}, of the first one a {first}"
            raise ConfigError(msg, hint="a column is a Ragged, an array or a list, the same in every batch")
    if kind is list:
        return [item for part in parts for item in part]
    try:
        if kind is Ragged:
            begins = np.cumsum([0, *(part.offsets[-1] for part in parts[:-1])])
            offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins, strict=True)]
            return Ragged(np.concatenate([part.values for part in parts]), np.concatenate([[0], *offsets]))
        return np.concatenate(parts)
    except ValueError as error:
        shapes = ", ".join(str(getattr(part, "values", part).shape) for part in parts[:4])
        msg = f"column {name!r} cannot be joined: {shapes}"
        raise ConfigError(msg, hint="rows of different length travel as zbus.Ragged") from error
