"""What becomes of the answers of one call: a declared collect applied to them. Pure but for the array libraries.

numpy and torch are imported only when an answer is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from controller.answers import CollectError, Empty, kind_of, library_of, require_same_keys, short
from controller.dispatch import Plan
from controller.reduction import reduce
from zbus.codec import JoinedRef, Ref
from zbus.engine import Collect, Concat, First, PerRank, Reduce, Same
from zbus.ragged import Ragged, entries_of

__all__ = ["CollectError", "collect", "equal"]


def collect(
    how: Collect,
    plan: Plan,
    ranks: Sequence[int],
    values: Sequence[Any],
    method: str = "",
    *,
    empty: Empty | None = None,
) -> Any:
    """Merge the answers of one call.

    Args:
        how: The declaration.
        plan: How the call was spread.
        ranks: Rank of each called member, in the order of ``plan.members``.
        values: Their answers, in the same order.
        method: Endpoint name, for messages.
        empty: Makes the arrays that others are joined in; None: fresh memory.

    Raises:
        CollectError: The answers do not fit the declaration; it names the rank and keeps every answer.
    """
    try:
        match how:
            case PerRank():
                return list(values)
            case First():
                return values[0]
            case Same():
                return _same(ranks, values)
            case Concat():
                return _concat(plan, ranks, values, empty)
            case Reduce():
                heads = plan.heads or tuple(range(len(values)))
                items = None if plan.shares is None else [len(plan.shares[number]) for number in range(len(heads))]
                return reduce(how, [values[head] for head in heads], [ranks[head] for head in heads], items, empty)
    except CollectError as error:
        error.results = dict(zip(ranks, values, strict=True))
        error.message = f"endpoint `{method}`: {error.message}" if method else error.message
        raise


# -- same ------------------------------------------------------------------------------------------------------------


def equal(left: Any, right: Any) -> bool:
    """Tell whether two answers are the same: NaN equals NaN, arrays by type, shape and content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, Ragged):
        return equal(left.offsets, right.offsets) and equal(left.values, right.values)
    if library_of(left) == "torch":
        return _equal_tensors(left, right)
    if library_of(left) == "numpy":
        return _equal_arrays(left, right)
    return bool(left == right)


def _equal_arrays(left: Any, right: Any) -> bool:
    import numpy as np

    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))


def _equal_tensors(left: Any, right: Any) -> bool:
    import torch

    if not isinstance(left, torch.Tensor):
        return bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_floating_point or left.dtype.is_complex:
        wide = torch.complex128 if left.dtype.is_complex else torch.float64
        left, right = left.to(wide), right.to(wide)
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return bool(torch.equal(left, right))


def _same(ranks: Sequence[int], values: Sequence[Any]) -> Any:
    camps: list[tuple[Any, list[int]]] = []
    for rank, value in zip(ranks, values, strict=True):
        for known, members in camps:
            if equal(known, value):
                members.append(rank)
                break
        else:
            camps.append((value, [rank]))
    if len(camps) > 1:
        camps.sort(key=lambda camp: (len(camp[1]), camp[1][0]))
        told = "; ".join(f"{_name(members)} answered {short(value)}" for value, members in camps)
        msg = f"the ranks were to answer the same, but {told}"
        raise CollectError(msg, hint="collect=PerRank() keeps each rank's answer")
    return values[0]


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -- concat ----------------------------------------------------------------------------------------------------------


def _concat(plan: Plan, ranks: Sequence[int], values: Sequence[Any], empty: Empty | None) -> Any:
    heads = plan.heads or tuple(range(len(values)))
    parts = [values[head] for head in heads]
    names = [ranks[head] for head in heads]
    if all(type(part) is Ref for part in parts):
        return _join_refs(plan, parts, names)
    if plan.shares is None:
        return _join(parts, names, None, "", empty)
    full = [number for number, items in enumerate(plan.shares) if len(items)]
    for number, part in enumerate(parts):
        if number not in full and not _is_empty(part):
            msg = f"rank {names[number]} got no items but answered {short(part)}"
            raise CollectError(msg, hint="answer an empty list for an empty share, or declare collect=PerRank()")
    if not full:
        return parts[0]
    return _join([parts[n] for n in full], [names[n] for n in full], [plan.shares[n] for n in full], "", empty)


def _join_refs(plan: Plan, parts: Sequence[Ref], names: Sequence[int]) -> JoinedRef:
    """Return one handle for what the ranks keep, with its rows in input order."""
    for part, name in zip(parts, names, strict=True):
        if part.rows is None:
            msg = f"Concat cannot join what rank {name} keeps ({part.about}), which has no rows"
            raise CollectError(msg, hint="answer one entry per item, or declare collect=PerRank()")
    if plan.shares is None:
        return JoinedRef(parts)
    full = [number for number, items in enumerate(plan.shares) if len(items)] or [0]
    chosen = [parts[number] for number in full]
    order = _order(chosen, [names[n] for n in full], [plan.shares[n] for n in full], "") if len(full) > 1 else None
    return JoinedRef(chosen, order)


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(entry) for entry in value.values())
    if isinstance(value, list | tuple | Ragged):
        return not len(value)
    return value is None or (library_of(value) != "" and len(value.shape) > 0 and value.shape[0] == 0)


def _join(
    parts: Sequence[Any],
    ranks: Sequence[int],
    shares: Sequence[Sequence[int]] | None,
    path: str,
    empty: Empty | None,
) -> Any:
    """Join one answer, or one column of it; ``shares`` None keeps rank order."""
    where = f" in {path}" if path else ""
    kinds = {kind_of(part) for part in parts}
    if len(kinds) > 1:
        told = ", ".join(f"rank {rank} {type(part).__name__}" for rank, part in zip(ranks, parts, strict=True))
        msg = f"Concat cannot join answers of different types{where}: {told}"
        raise CollectError(msg)
    kind = kinds.pop()
    if kind == "none":
        return None
    if kind == "dict":
        return _join_dicts(parts, ranks, shares, path, empty)
    if kind == "other":
        msg = f"Concat cannot join{where} {short(parts[0])} ({type(parts[0]).__name__}), which holds no items"
        raise CollectError(msg, hint="answer one entry per item, or declare collect=PerRank()")
    order = _order(parts, ranks, shares, where)
    if kind in ("list", "tuple"):
        joined = [item for part in parts for item in part]
        ordered = joined if order is None else [joined[i] for i in order]
        return ordered if kind == "list" else tuple(ordered)
    if kind == "ragged":
        return _join_ragged(parts, ranks, order, where, empty)
    return _join_arrays(kind, parts, ranks, order, where, empty)


def _join_dicts(
    parts: Sequence[dict[Any, Any]],
    ranks: Sequence[int],
    shares: Sequence[Sequence[int]] | None,
    path: str,
    empty: Empty | None,
) -> dict[Any, Any]:
    require_same_keys(parts, ranks, "Concat cannot join dicts")
    return {key: _join([part[key] for part in parts], ranks, shares, f"{path}[{key!r}]", empty) for key in parts[0]}


def _order(
    parts: Sequence[Any], ranks: Sequence[int], shares: Sequence[Sequence[int]] | None, where: str
) -> list[int] | None:
    """Return where each result of the joined parts comes from, or None when they are in input order already."""
    if shares is None:
        return None
    per_item = {len(part) / len(items) for part, items in zip(parts, shares, strict=True)}
    each = per_item.pop()
    if per_item or not each.is_integer():
        told = ", ".join(
            f"rank {rank} {len(part)} for {len(items)}" for rank, part, items in zip(ranks, parts, shares, strict=True)
        )
        msg = f"Concat cannot tell which result belongs to which item{where}: results for items: {told}"
        raise CollectError(msg, hint="answer the same number of results for each item, or declare collect=PerRank()")
    flat = [item for items in shares for item in items]
    if flat == sorted(flat):
        return None
    source = sorted(range(len(flat)), key=flat.__getitem__)
    return [position * int(each) + k for position in source for k in range(int(each))]


def _join_ragged(
    parts: Sequence[Ragged], ranks: Sequence[int], order: list[int] | None, where: str, empty: Empty | None
) -> Ragged:
    import numpy as np

    values = [part.values for part in parts]
    kinds = {kind_of(value) for value in values}
    if len(kinds) > 1:
        msg = f"Concat cannot join sequences of arrays with sequences of tensors{where}"
        raise CollectError(msg)
    lengths = np.concatenate([part.lengths for part in parts])
    entries = None
    if order is not None:
        begins = np.concatenate([[0], lengths.cumsum()])
        entries, lengths = entries_of(begins, order), lengths[order]
    joined = _join_arrays(kinds.pop(), values, ranks, entries, where, empty)
    return Ragged(joined, np.concatenate([[0], lengths.cumsum()]))


def _join_arrays(
    kind: str,
    parts: Sequence[Any],
    ranks: Sequence[int],
    order: Any,
    where: str,
    empty: Empty | None,
) -> Any:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        told = ", ".join(f"rank {rank} {tuple(part.shape)}" for rank, part in zip(ranks, parts, strict=True))
        msg = f"Concat cannot join arrays of different shape{where}: {told}"
        raise CollectError(msg, hint="pad them to one length, or answer a list with one array per item")
    return _join_tensors(parts, order, empty) if kind == "torch" else _join_numpy(parts, order, empty)


def _join_numpy(parts: Sequence[Any], order: Any, empty: Empty | None) -> Any:
    import numpy as np

    if any(type(part) is not np.ndarray or part.dtype != parts[0].dtype for part in parts):
        joined = np.concatenate(list(parts))
        return joined if order is None else joined[order]
    rows = sum(map(len, parts))
    joined = (empty or np.empty)((rows, *parts[0].shape[1:]), parts[0].dtype)
    if order is None:
        return np.concatenate(list(parts), out=joined)
    goes = np.empty(rows, np.intp)
    goes[order] = np.arange(rows)
    for part, places in _placed(parts, goes):
        joined[places] = part
    return joined


def _join_tensors(parts: Sequence[Any], order: Any, empty: Empty | None) -> Any:
    import torch

    first = parts[0]
    plain = all(type(part) is torch.Tensor and part.dtype == first.dtype for part in parts)
    rows = sum(map(len, parts))
    nbytes = rows * math.prod(first.shape[1:]) * first.element_size()
    if empty is None or not plain or not nbytes:
        joined = torch.cat(list(parts))
        return joined if order is None else joined[order]
    memory = torch.from_numpy(empty((nbytes,), "u1"))
    joined = memory.view(first.dtype).reshape(rows, *first.shape[1:])
    if order is None:
        return torch.cat(list(parts), out=joined)
    goes = torch.empty(rows, dtype=torch.int64)
    goes[torch.as_tensor(order)] = torch.arange(rows)
    for part, places in _placed(parts, goes):
        joined[places] = part
    return joined


def _placed(parts: Sequence[Any], goes: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part with the rows of the joined array that are its own."""
    at = 0
    for part in parts:
        yield part, goes[at : at + len(part)]
        at += len(part)
