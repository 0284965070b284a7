"""Which rows a value has, how long each is, how to take some of them and how to join such parts again.

Rows are what ``Split`` divides: the items of a list or tuple, the first dimension of an array or tensor, and of each
column of a dict. Everything else goes along whole. numpy and torch are used only where a value is theirs.
"""

from __future__ import annotations

import array
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from zbus.ragged import Ragged

__all__ = [
    "LENGTH_COLUMNS",
    "Empty",
    "describe",
    "is_array",
    "is_sequence",
    "join",
    "lengths_of",
    "packed",
    "rows_of",
    "take",
    "unpacked",
]

Empty = Callable[[Sequence[int], Any], Any]
"""Makes an uninitialised numpy array of a shape and a dtype."""

LENGTH_COLUMNS: Final = ("attention_mask", "lengths")
"""Columns of a dict that declare how many tokens each row has."""

_SHOWN: Final = 160


def is_sequence(value: Any) -> bool:
    """Tell a list or tuple of items; a named tuple is a record, not items."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def is_array(value: Any) -> bool:
    """Tell numpy arrays, torch tensors and their kin without importing them."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def _columns(value: Any) -> list[int]:
    if is_sequence(value) or isinstance(value, Ragged):
        return [len(value)]
    if is_array(value):
        return [int(value.shape[0])] if len(value.shape) else []
    if isinstance(value, dict):
        return [length for entry in value.values() for length in _columns(entry)]
    return []


def rows_of(value: Any) -> int | None:
    """Return the number of rows, or None where a value has none, or columns of different length."""
    lengths = set(_columns(value))
    return lengths.pop() if len(lengths) == 1 else None


def lengths_of(value: Any) -> list[int] | None:
    """Return the token count of each row, where a value says it; else None.

    A dict does in a column of ``LENGTH_COLUMNS``, or by its first ``Ragged``; so does a ``Ragged`` itself.
    """
    if isinstance(value, Ragged):
        return [int(count) for count in value.lengths]
    if not isinstance(value, dict):
        return None
    for name in LENGTH_COLUMNS:
        column = value.get(name)
        if column is None or not _columns(column):
            continue
        if is_array(column):
            if len(column.shape) > 1:
                column = column.reshape(column.shape[0], -1).sum(1)
            return [int(count) for count in column.tolist()]
        counts = [sum(item) if is_sequence(item) else item for item in column]
        if all(isinstance(count, int) and count >= 0 for count in counts):
            return counts
    ragged = next((column for column in value.values() if isinstance(column, Ragged)), None)
    return None if ragged is None else lengths_of(ragged)


def _itself(value: Any) -> Any:
    return value


def take(value: Any, rows: Sequence[int], empty: Empty | None = None, other: Callable[[Any], Any] = _itself) -> Any:
    """Return some rows of a value: of a range, views; of scattered numbers, copies.

    Args:
        value: The value.
        rows: Their numbers.
        empty: Makes the numpy arrays that rows are copied to; None: fresh memory.
        other: Returns what becomes of a part that has no rows; it goes along whole where nothing else is said.
    """
    if isinstance(value, Ragged):
        return value[rows.start : rows.stop] if isinstance(rows, range) else value.take(rows, empty)
    if is_sequence(value):
        if isinstance(rows, range):
            return value[rows.start : rows.stop]
        picked = [value[row] for row in rows]
        return picked if isinstance(value, list) else tuple(picked)
    if is_array(value) and len(value.shape):
        if isinstance(rows, range):
            return value[rows.start : rows.stop]
        if not rows or empty is None or type(value).__name__ != "ndarray":
            return value[list(rows)] if rows else value[:0]
        made = empty((len(rows), *value.shape[1:]), value.dtype)
        return value.take(rows, 0, made, "clip")  # "raise" would copy twice
    if isinstance(value, dict):
        return {key: take(entry, rows, empty, other) for key, entry in value.items()}
    return other(value)


def join(parts: Sequence[Any]) -> Any:
    """Return parts that ``take`` could have made of one value as one; what has no rows is the first part's.

    Raises:
        ValueError: They do not fit together; the message says where.
    """
    return _join(parts, "")


def _join(parts: Sequence[Any], path: str) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts) and not all(map(is_array, parts)):
        names = ", ".join(sorted({type(part).__name__ for part in parts}))
        msg = f"parts of different types{path}: {names}"
        raise ValueError(msg)
    if isinstance(first, Ragged):
        return _join_ragged(parts, path)
    if is_sequence(first):
        joined = [item for part in parts for item in part]
        return joined if isinstance(first, list) else tuple(joined)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            msg = f"parts with different keys{path}"
            raise ValueError(msg)
        return {key: _join([part[key] for part in parts], f"{path or ' in '}[{key!r}]") for key in first}
    if not is_array(first) or not len(first.shape):
        return first
    if len({tuple(part.shape[1:]) for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        msg = f"arrays of different shape{path}: {shapes}"
        raise ValueError(msg)
    if type(first).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(list(parts))
    import numpy as np

    return np.concatenate(list(parts))


def _join_ragged(parts: Sequence[Ragged], path: str) -> Ragged:
    import numpy as np

    ends = itertools.accumulate(len(part.values) for part in parts)
    starts = [0, *ends]
    offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
    return Ragged(_join([part.values for part in parts], path), np.concatenate([[0], *offsets]))


def describe(value: Any) -> str:
    """Return types and shapes of a value in one short line, such as ``dict(ids int64 [64, 4096], text list of 64)``."""
    text = _describe(value, 2)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _describe(value: Any, depth: int) -> str:
    if is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(map(int, value.shape))}"
    if isinstance(value, Ragged):
        return f"ragged {str(value.values.dtype).removeprefix('torch.')} [{len(value)} x ..]"
    if isinstance(value, dict) and depth and len(value) <= 16:
        return f"dict({', '.join(f'{key} {_describe(entry, depth - 1)}' for key, entry in value.items())})"
    if is_sequence(value) or isinstance(value, dict | set | frozenset):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def packed(numbers: Sequence[int]) -> bytes:
    """Return small numbers as bytes, four each (little endian); larger ones are cut to what four bytes hold."""
    made = array.array("I", [min(number, 0xFFFFFFFF) for number in numbers])
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def unpacked(data: bytes) -> Sequence[int]:
    """Return the numbers of ``packed``."""
    made = array.array("I")
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    return made
