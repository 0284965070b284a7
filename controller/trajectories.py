"""Batches as the dispatch takes them: a dict of columns with one row per sequence, out of what drivers have at hand.

numpy is imported only where a batch is at hand; torch never: its tensors stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from controller.dispatch import HANDLES
from zbus.errors import ConfigError
from zbus.ragged import Ragged

__all__ = ["FILL", "Batch", "as_batch", "fill_up", "per_item", "rows_of"]

FILL: Final = "row_mask"
"""Column of a batch that was filled up: false for rows that are not the caller's."""

_TOKENS: Final = "input_ids"


class Batch(NamedTuple):
    """Columns, and whether they came as a list of items."""

    columns: Any
    listed: bool


def as_batch(given: Any) -> Batch:
    """Return columns out of a dict of them, a list of trajectories, or tokens alone.

    A trajectory is a dict of one sequence: lists, arrays and tensors of it become ``Ragged`` columns, numbers arrays
    (Python floats as float32), anything else lists. Tokens alone are the column ``input_ids``. A ``Ref`` stays one.

    Raises:
        ConfigError: It holds no rows, or trajectories have different keys; they are named.
    """
    if isinstance(given, HANDLES):
        return Batch(given, listed=False)
    if isinstance(given, Mapping):
        if not given:
            msg = "a batch without columns holds no rows"
            raise ConfigError(msg)
        return Batch(dict(given), listed=False)
    if isinstance(given, Ragged) or (hasattr(given, "shape") and hasattr(given, "dtype") and len(given.shape)):
        return Batch({_TOKENS: given}, listed=False)
    if isinstance(given, list | tuple):
        return Batch(_columns(given), listed=True)
    msg = f"a batch is a dict of columns or a list of trajectories, not {type(given).__name__}"
    raise ConfigError(msg)


def _columns(items: Sequence[Any]) -> dict[str, Any]:
    if not items:
        msg = "a batch without trajectories holds no rows"
        raise ConfigError(msg)
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            msg = f"trajectory {number} of the batch is a {type(item).__name__}, not a dict"
            raise ConfigError(msg, hint='for example {"input_ids": tokens, "reward": 0.5}')
        odd = sorted(map(str, item.keys() ^ items[0].keys()))
        if odd:
            msg = f"trajectory {number} of the batch and the first do not have the same keys: {', '.join(odd)}"
            raise ConfigError(msg)
    if not items[0]:
        msg = "a batch of trajectories without keys holds no rows"
        raise ConfigError(msg)
    return {key: _column(key, [item[key] for item in items]) for key in items[0]}


def _column(key: str, values: list[Any]) -> Any:
    import numpy as np

    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        first = _kind(values[0])
        number = next(n for n, value in enumerate(values) if _kind(value) != first)
        msg = f"`{key}` is {first} in the first trajectory, but {_kind(values[number])} in trajectory {number}"
        raise ConfigError(msg)
    match kinds.pop():
        case "a sequence":
            return Ragged.of(values)
        case "a number":
            bare = [value.item() if hasattr(value, "shape") else value for value in values]
            typed = next((value.dtype for value in values if hasattr(value, "dtype")), None)
            if typed is not None and type(values[0]).__module__ != "torch":
                return np.array(bare, typed)
            return np.array(bare, np.float32 if any(isinstance(value, float) for value in bare) else None)
        case _:
            return values


def _kind(value: Any) -> str:
    if isinstance(value, int | float):
        return "a number"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return "a sequence" if len(value.shape) else "a number"
    if isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value):
        return "a sequence"
    return "something else"


def rows_of(columns: Any) -> int:
    """Return the number of rows of a batch; 0 where it is not known here."""
    if isinstance(columns, HANDLES):
        return columns.rows or 0
    first = next(iter(columns.values()), ())
    return (first.rows or 0) if isinstance(first, HANDLES) else len(first)


def fill_up(columns: Any, parts: int, groups: int | str | None) -> tuple[Any, int]:
    """Return a batch whose rows divide evenly into ``parts``, with a column ``row_mask``, and how many rows are real.

    The rows at the end repeat the first ones, with nothing in their masks; groups stay whole.

    Raises:
        ConfigError: Rows stand with the owner of a Ref, or groups are named by a column.
    """
    import numpy as np

    if isinstance(columns, HANDLES) or any(isinstance(column, HANDLES) for column in columns.values()):
        msg = "the engine asks for equal parts, but rows of a Ref cannot be filled up here"
        raise ConfigError(msg, hint="pass the values, or a number of rows that divides by the data-parallel ranks")
    if isinstance(groups, str):
        msg = f"the engine asks for equal parts, which groups by the column {groups!r} do not have"
        raise ConfigError(msg, hint="keep a fixed number of rows together: groups=n")
    count = rows_of(columns)
    unit = groups or 1
    missing = -(count // unit) % parts * unit
    which = [*range(count), *(row % unit for row in range(missing))]
    filled = {key: _blank(key, _take(column, which), count) if missing else column for key, column in columns.items()}
    filled[FILL] = np.arange(len(which)) < count
    return filled, count


def _take(column: Any, which: list[int]) -> Any:
    if isinstance(column, Ragged):
        return column.take(which)
    if isinstance(column, list | tuple):
        return [column[row] for row in which]
    return column[which]


def _blank(key: str, column: Any, real: int) -> Any:
    """Empty the masks of the rows from ``real`` on; the column is a copy."""
    if "mask" in key and isinstance(column, Ragged):
        column.values[int(column.offsets[real]) :] = 0
    elif "mask" in key and hasattr(column, "shape"):
        column[real:] = 0
    return column


def per_item(answer: Any, count: int) -> list[Any]:
    """Return the answer of each item out of columns: of a dict of columns a dict each."""
    if isinstance(answer, Mapping):
        columns = {key: per_item(column, count) for key, column in answer.items()}
        return [{key: column[number] for key, column in columns.items()} for number in range(count)]
    return [answer[number] for number in range(count)]
