"""``Reduce`` applied to the answers of one call: sums, means, maxima and minima over ranks, the same whoever was first.

Numbers are reduced exactly and rounded once. Arrays are reduced entry by entry in rank order: floats in double
precision and rounded once to the answers' dtype, integers exactly or not at all. So a result depends on the answers and
the number of ranks alone, never on who answered first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

from controller.answers import CollectError, Empty, library_of, require_same_keys, short
from zbus.engine import Reduce

__all__ = ["reduce"]

_BLOCK: Final = 1 << 16
"""Entries that are added up at once, so that the wide sums stay in the processor's cache."""

_NARROW: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"})
"""torch's dtypes that numpy lacks and float32 holds exactly."""

_HINT: Final = "answer a number, an array, a tensor or a dict of these, or declare collect=PerRank()"


def reduce(
    how: Reduce, values: Sequence[Any], ranks: Sequence[int], items: Sequence[int] | None, empty: Empty | None
) -> Any:
    """Reduce one answer per share.

    Args:
        how: The declaration.
        values: The answers, in rank order.
        ranks: Who gave them.
        items: How many items each of them got, or None where nothing was split.
        empty: Makes the arrays of the result; None: fresh memory.

    Returns:
        A value of the answers' kind; None if all of them are.

    Raises:
        CollectError: They do not fit together, or an integer does not hold the sum.
    """
    took_part = [k for k, value in enumerate(values) if value is not None or items is None or items[k]]
    parts, names = [values[k] for k in took_part], [ranks[k] for k in took_part]
    weights = _weights(how, parts, names, None if items is None else [items[k] for k in took_part])
    return _reduce(how, parts, names, weights, "", empty)


def _weights(
    how: Reduce, parts: Sequence[Any], ranks: Sequence[int], items: Sequence[int] | None
) -> list[Fraction] | None:
    """Return what each rank counts in a mean, or None for all the same."""
    found: list[Any]
    if how.weights is not None:
        found = [part.get(how.weights) if isinstance(part, dict) else None for part in parts]
        found = [_bare(entry) for entry in found]
    elif how.by == "items" and items is not None:
        found = list(items)
    else:
        return None
    for rank, entry, part in zip(ranks, found, parts, strict=True):
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 <= entry < math.inf:
            msg = f"Reduce weighs each answer by its entry {how.weights!r}, which rank {rank} has not: {short(part)}"
            raise CollectError(msg, hint="answer a dict with that entry: a number, not negative")
    if parts and not sum(found):
        msg = "Reduce has nothing to weigh by: the weights of all ranks are 0"
        raise CollectError(msg)
    return [Fraction(entry) for entry in found]


def _bare(value: Any) -> Any:
    """Return a number out of a numpy scalar or an array or tensor without dimensions."""
    return value.item() if library_of(value) and not value.shape else value


def _reduce(
    how: Reduce,
    parts: Sequence[Any],
    ranks: Sequence[int],
    weights: Sequence[Fraction] | None,
    path: str,
    empty: Empty | None,
) -> Any:
    kinds = [_kind(part) for part in parts]
    where = f" in {path}" if path else ""
    if len(set(kinds)) > 1:
        told = ", ".join(f"rank {rank} {short(part, 30)}" for rank, part in zip(ranks, parts, strict=True))
        msg = f"Reduce cannot take answers of different kinds together{where}: {told}"
        raise CollectError(msg)
    match kinds[0] if kinds else "none":
        case "none":
            return None
        case "dict":
            return _dicts(how, parts, ranks, weights, path, empty)
        case "number":
            return _numbers(how.op, [_bare(part) for part in parts], weights)
        case "numpy":
            return _arrays(how.op, parts, ranks, weights, where, empty)
        case "torch":
            return _tensors(how.op, parts, ranks, weights, where, empty)
    msg = f"Reduce has no {how.op} of {short(parts[0])} ({type(parts[0]).__name__}){where}"
    raise CollectError(msg, hint=_HINT)


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "dict"
    library = library_of(value)
    if library == "numpy" and not value.shape and value.dtype.kind in "biuf" and hasattr(value, "item"):
        return "number"
    return library or "other"


def _dicts(
    how: Reduce,
    parts: Sequence[dict[Any, Any]],
    ranks: Sequence[int],
    weights: Sequence[Fraction] | None,
    path: str,
    empty: Empty | None,
) -> dict[Any, Any]:
    require_same_keys(parts, ranks, "Reduce cannot take dicts together")
    made = {}
    for key in parts[0]:
        column = [part[key] for part in parts]
        if not path and how.weights is not None and key == how.weights:
            made[key] = _numbers("sum", [_bare(entry) for entry in column], None)
        else:
            made[key] = _reduce(how, column, ranks, weights, f"{path}[{key!r}]", empty)
    return made


# -- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(op: str, parts: Sequence[int | float], weights: Sequence[Fraction] | None) -> int | float:
    if op in ("max", "min"):
        if any(part != part for part in parts):  # noqa: PLR0124  # NaN is the only such number
            return math.nan
        return max(parts) if op == "max" else min(parts)
    if op == "sum" and all(isinstance(part, int) for part in parts):
        return sum(parts)
    if op == "sum" or weights is None:
        weights = [Fraction(1)] * len(parts)
    counted = [(weight, part) for weight, part in zip(weights, parts, strict=True) if weight]
    endless = [part for _, part in counted if not isinstance(part, int) and not math.isfinite(part)]
    if endless:
        return sum(endless)
    total = sum((weight * Fraction(part) for weight, part in counted), Fraction(0))
    return _rounded(total if op == "sum" else total / sum(weights))


def _rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


# -- arrays ----------------------------------------------------------------------------------------------------------


def _alike(parts: Sequence[Any], ranks: Sequence[int], where: str) -> None:
    if len({(str(part.dtype), tuple(part.shape)) for part in parts}) > 1:
        told = ", ".join(
            f"rank {rank} {part.dtype} {tuple(part.shape)}" for rank, part in zip(ranks, parts, strict=True)
        )
        msg = f"Reduce cannot take arrays of different dtype or shape together{where}: {told}"
        raise CollectError(msg)


def _arrays(
    op: str,
    parts: Sequence[Any],
    ranks: Sequence[int],
    weights: Sequence[Fraction] | None,
    where: str,
    empty: Empty | None,
) -> Any:
    import numpy as np

    _alike(parts, ranks, where)
    dtype = parts[0].dtype
    if dtype.kind not in "biufc" or (dtype.kind == "c" and op in ("max", "min")):
        msg = f"Reduce has no {op} of arrays of {dtype}{where}"
        raise CollectError(msg, hint=_HINT)
    given = [np.ascontiguousarray(part).reshape(-1) for part in parts]
    shape = parts[0].shape
    make = empty or np.empty
    if op in ("max", "min"):
        made = make(shape, dtype)
        flat = made.reshape(-1)
        np.copyto(flat, given[0])
        for part in given[1:]:
            (np.maximum if op == "max" else np.minimum)(flat, part, out=flat)
        return made
    counts = [float(weight) for weight in weights] if weights is not None and op == "mean" else None
    whole = dtype.kind in "biu"
    target = dtype if not whole else np.dtype(np.float64) if op == "mean" else _sum_dtype(dtype)
    if whole and op == "sum":
        _require_room(given, target, where)
    made = make(shape, target)
    wide = target if whole and op == "sum" else np.promote_types(target, np.float64)
    _add_up(given, made.reshape(-1), wide, counts, (sum(counts) if counts else len(given)) if op == "mean" else None)
    return made


def _sum_dtype(dtype: Any) -> Any:
    import numpy as np

    return np.dtype(np.int64) if dtype.kind == "b" else dtype


def _add_up(given: Sequence[Any], flat: Any, wide: Any, counts: Sequence[float] | None, share: float | None) -> None:
    """Add up arrays, block by block, into ``flat``; with ``share`` a mean over so much."""
    import numpy as np

    with np.errstate(all="ignore"):  # what overflows or is no number says so in the result
        for begin in range(0, len(flat), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            total = np.zeros(len(flat[block]), wide)
            for number, part in enumerate(given):
                if counts is None:
                    total += part[block]
                elif counts[number]:
                    total += part[block].astype(wide) * counts[number]
            if share is not None:
                total /= share
            flat[block] = total


def _require_room(given: Sequence[Any], target: Any, where: str) -> None:
    """Refuse a sum of integers that its dtype does not hold."""
    import numpy as np

    if not given[0].size:
        return
    bounds = np.iinfo(target)
    if sum(int(part.min()) for part in given) >= bounds.min and sum(int(part.max()) for part in given) <= bounds.max:
        return  # even if the extremes of all ranks fell on one entry
    bits = 32
    high = sum((part >> bits).astype(np.int64) if target.itemsize == 8 else part.astype(np.int64) for part in given)
    if target.itemsize == 8:
        low = sum((part & part.dtype.type((1 << bits) - 1)).astype(np.int64) for part in given)
        high += low >> bits
        least, most = int(bounds.min) >> bits, int(bounds.max) >> bits
    else:
        least, most = int(bounds.min), int(bounds.max)
    if int(high.min()) < least or int(high.max()) > most:
        msg = f"a sum over the ranks does not fit in {target}{where}"
        raise CollectError(msg, hint="answer a wider dtype, or declare collect=PerRank()")


def _tensors(
    op: str,
    parts: Sequence[Any],
    ranks: Sequence[int],
    weights: Sequence[Fraction] | None,
    where: str,
    empty: Empty | None,
) -> Any:
    import torch

    _alike(parts, ranks, where)
    kind = str(parts[0].dtype).removeprefix("torch.")
    given = [part.detach().cpu() for part in parts]
    if kind in _NARROW:
        given = [part.to(torch.float32) for part in given]
    arrays = None
    with contextlib.suppress(TypeError):  # a dtype that numpy has not
        arrays = [part.numpy() for part in given]
    if arrays is None:
        msg = f"Reduce has no {op} of tensors of {kind}{where}"
        raise CollectError(msg, hint=_HINT)
    made = torch.from_numpy(_arrays(op, arrays, ranks, weights, where, empty))
    return made.to(parts[0].dtype) if kind in _NARROW else made
