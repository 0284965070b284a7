"""Who gets which arguments: a declared dispatch applied to one call. Pure.

``plan`` turns (declaration, mesh, members, arguments) into one argument list per member. Members that get the same
share get the same object, so it is encoded once. Nothing is copied but what ``by="tokens"`` re-orders, and that once,
to where it is sent from: consecutive items of arrays and tensors are views.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from zbus.codec import JoinedRef, Ref
from zbus.codec.rows import Empty, is_array, is_sequence, take
from zbus.engine import AnyOne, EndpointSpec, Everywhere, Mesh, RankZero, Scatter, Split, Whole
from zbus.errors import ConfigError
from zbus.ragged import Ragged

__all__ = ["Arguments", "DispatchError", "Plan", "balanced", "consecutive", "plan"]


HANDLES: Final = (Ref, JoinedRef)
"""What stands for a value that is elsewhere, and says how many rows it has."""


class DispatchError(ConfigError, ValueError):
    """The arguments of a call do not fit the endpoint's dispatch; nothing was sent."""


class Arguments(NamedTuple):
    """What one member is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Plan(NamedTuple):
    """One call, spread.

    Attributes:
        members: Positions (in the group or slice) of those who are called, ascending.
        arguments: What each of them gets, in the same order; the same object where the share is the same.
        shares: Item numbers of each share, or None where nothing was split.
        share_of: Which share each member got.
        heads: Index into ``members`` of the lowest member of each share: the ones whose answers ``Concat`` joins.
    """

    members: tuple[int, ...]
    arguments: tuple[Arguments, ...]
    shares: tuple[Sequence[int], ...] | None = None
    share_of: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


def plan(
    spec: EndpointSpec,
    mesh: Mesh,
    ranks: Sequence[int],
    call: Arguments,
    *,
    choose: Callable[[], int] = lambda: 0,
    empty: Empty | None = None,
) -> Plan:
    """Apply an endpoint's dispatch to the arguments of one call.

    Args:
        spec: The endpoint.
        mesh: Mesh of the whole group.
        ranks: Ranks of the group or slice that is called, ascending.
        call: Its arguments.
        choose: Picks the member (its position in ``ranks``) for ``AnyOne``; asked only then.
        empty: Makes the numpy arrays that scattered items are gathered in; None: fresh memory.

    Raises:
        TypeError: The arguments do not fit the endpoint's signature.
        DispatchError: They cannot be split as declared; the message names them.
        ConfigError: The mesh has no such axis.
    """
    _check_signature(spec, call)
    everyone = tuple(range(len(ranks)))
    match spec.dispatch:
        case Split() as split:
            return _plan_split(spec, split, _share_of(spec, split, mesh, ranks), call, empty)
        case Scatter():
            return _plan_scatter(spec, len(ranks), call)
        case Everywhere():
            members = everyone
        case AnyOne():
            members = (choose(),)
        case RankZero():
            members = (0,)
    whole = _unwrap(call)
    return Plan(members, (whole,) * len(members), heads=tuple(range(len(members))))


def _check_signature(spec: EndpointSpec, call: Arguments) -> None:
    least, most = spec.arity
    if (not call.kwargs and least <= len(call.args) <= most) or spec.signature is None:
        return
    try:
        spec.signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        msg = f"{spec.name}() {error}"
        raise TypeError(msg) from None


def _unwrap(call: Arguments) -> Arguments:
    if not call.kwargs and Whole not in map(type, call.args):
        return call
    return Arguments(tuple(map(_bare, call.args)), {name: _bare(value) for name, value in call.kwargs.items()})


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Whole) else value


def _labels(spec: EndpointSpec, count: int) -> list[str]:
    """Name the positional arguments for messages and for ``Split(args=...)``."""
    names = [p.name for p in spec.parameters or () if p.kind in ("pos", "any")]
    rest = next((p.name for p in spec.parameters or () if p.kind == "args"), "args")
    return [names[i] if i < len(names) else f"{rest}[{i - len(names)}]" for i in range(count)]


# -- scatter ---------------------------------------------------------------------------------------------------------


def _named(spec: EndpointSpec, call: Arguments) -> dict[str, Any]:
    return {**dict(zip(_labels(spec, len(call.args)), call.args, strict=True)), **call.kwargs}


def _plan_scatter(spec: EndpointSpec, size: int, call: Arguments) -> Plan:
    named = _named(spec, call)
    lists = {name: value for name, value in named.items() if is_sequence(value)}
    wrong = {name: len(value) for name, value in lists.items() if len(value) != size}
    if wrong:
        given = ", ".join(f"`{name}` has {length}" for name, length in wrong.items())
        msg = f"endpoint `{spec.name}` scatters one item to each of {size} ranks, but {given}"
        raise DispatchError(msg, hint="pass one item per rank, or wrap what every rank shall get in zbus.Whole(...)")
    if not lists:
        msg = f"endpoint `{spec.name}` scatters, but no argument is a list or tuple with one item per rank"
        raise DispatchError(msg, hint=f"pass a list of {size} items, or declare Everywhere()")

    def item(value: Any, index: int) -> Any:
        return value[index] if is_sequence(value) else _bare(value)

    arguments = tuple(
        Arguments(tuple(item(v, i) for v in call.args), {name: item(v, i) for name, v in call.kwargs.items()})
        for i in range(size)
    )
    everyone = tuple(range(size))
    return Plan(everyone, arguments, heads=everyone)


# -- split -----------------------------------------------------------------------------------------------------------


def _plan_split(
    spec: EndpointSpec, split: Split, share_of: tuple[int, ...], call: Arguments, empty: Empty | None
) -> Plan:
    count = max(share_of) + 1
    batches = _batches(spec, split, _named(spec, call))
    total = _common_length(spec, batches)
    shares = _divide(spec, split, batches, total, count)

    def share(name: str, value: Any, indices: Sequence[int]) -> Any:
        return _take(value, indices, empty) if name in batches else _bare(value)

    labels = _labels(spec, len(call.args))
    per_share = [
        Arguments(
            tuple(share(name, value, indices) for name, value in zip(labels, call.args, strict=True)),
            {name: share(name, value, indices) for name, value in call.kwargs.items()},
        )
        for indices in shares
    ]
    return Plan(
        members=tuple(range(len(share_of))),
        arguments=tuple(per_share[s] for s in share_of),
        shares=tuple(shares),
        share_of=share_of,
        heads=tuple(share_of.index(s) for s in range(count)),
    )


def _share_of(spec: EndpointSpec, split: Split, mesh: Mesh, ranks: Sequence[int]) -> tuple[int, ...]:
    """Number the positions on the axis that the members hold; members at one position share one share."""
    if split.axis not in mesh.axes:
        msg = f"endpoint `{spec.name}` splits over axis {split.axis!r}, which the mesh does not have"
        raise DispatchError(msg, hint=f"the axes are {', '.join(mesh.axes)}; set them with Role(mesh={{...}})")
    positions = [mesh.coords(rank)[split.axis] for rank in ranks]
    numbered = {position: number for number, position in enumerate(sorted(set(positions)))}
    return tuple(numbered[position] for position in positions)


def _batches(spec: EndpointSpec, split: Split, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are split, by name."""
    if split.args is None:
        found = {name: value for name, value in named.items() if _columns(value, name)}
        if not found:
            msg = f"endpoint `{spec.name}` splits its arguments, but none of them holds items"
            raise DispatchError(msg, hint="pass a list, array, tensor or dict of these, or declare Everywhere()")
        return found
    found = {}
    for name in split.args:
        if name not in named or named[name] is None:
            continue
        value = named[name]
        if isinstance(value, Whole):
            continue
        if not _columns(value, name):
            msg = f"endpoint `{spec.name}` splits `{name}`, but {type(value).__name__} holds no items"
            raise DispatchError(msg, hint="pass a list, array, tensor or dict of these")
        found[name] = value
    if not found:
        msg = (
            f"endpoint `{spec.name}` splits {', '.join(f'`{a}`' for a in split.args)}, but the call gives none of them"
        )
        raise DispatchError(msg)
    return found


def _common_length(spec: EndpointSpec, batches: Mapping[str, Any]) -> int:
    columns = [column for name, value in batches.items() for column in _columns(value, name)]
    lengths = {length for _, length in columns}
    if len(lengths) > 1:
        given = ", ".join(f"`{path}` has {length}" for path, length in columns)
        msg = f"endpoint `{spec.name}` splits arguments of different length: {given}"
        hint = 'wrap what every rank shall get in zbus.Whole(...), or name what is split: Split(..., args=("batch",))'
        raise DispatchError(msg, hint=hint)
    return lengths.pop()


def _columns(value: Any, path: str) -> list[tuple[str, int]]:
    """Return path and length of everything in ``value`` that would be split; empty if nothing."""
    if is_sequence(value) or isinstance(value, Ragged):
        return [(path, len(value))]
    if is_array(value):
        return [(path, int(value.shape[0]))] if len(value.shape) else []
    if isinstance(value, dict):
        return [column for key, entry in value.items() for column in _columns(entry, f"{path}[{key!r}]")]
    if isinstance(value, HANDLES):
        return [] if value.rows is None else [(path, value.rows)]
    return []


def _take(value: Any, indices: Sequence[int], empty: Empty | None) -> Any:
    """Return the share of ``value``; what holds no items is returned as it is."""

    def other(part: Any) -> Any:
        return part.take(indices) if isinstance(part, HANDLES) and part.rows is not None else _bare(part)

    return take(value, indices, empty, other)


# -- dividing items ----------------------------------------------------------------------------------------------------


def consecutive(total: int, count: int) -> list[range]:
    """Cut ``total`` items into ``count`` runs whose sizes differ by at most one, longer ones first."""
    size, longer = divmod(total, count)
    starts = [share * size + min(share, longer) for share in range(count + 1)]
    return [range(starts[share], starts[share + 1]) for share in range(count)]


def balanced(weights: Sequence[float], count: int) -> list[list[int]]:
    """Spread weighted items over ``count`` shares so that the heaviest share is light (longest first).

    With at least as many items as shares no share is empty. Item numbers within a share rise. Ties go to the share
    with fewer items, then to the lower one, so equal input gives equal output.
    """
    heap: list[tuple[float, int, int]] = [(0.0, 0, share) for share in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, held, share = heap[0]
        shares[share].append(item)
        heapq.heapreplace(heap, (load + weights[item], held + 1, share))
    for share_items in shares:
        share_items.sort()
    return shares


def _divide(
    spec: EndpointSpec, split: Split, batches: Mapping[str, Any], total: int, count: int
) -> list[Sequence[int]]:
    units = None if split.groups is None else _groups(spec, split.groups, batches, total)
    if split.by == "tokens":
        tokens = _token_counts(spec, split, batches)
        if units is None:
            return [_as_range(share) for share in balanced(tokens, count)]
        return _flatten(balanced([sum(tokens[i] for i in unit) for unit in units], count), units)
    if units is None:
        return list(consecutive(total, count))
    if len({len(unit) for unit in units}) <= 1:
        return _flatten(consecutive(len(units), count), units)
    return _flatten(balanced([len(unit) for unit in units], count), units)


def _flatten(shares: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return [_as_range(sorted(item for unit in share for item in units[unit])) for share in shares]


def _as_range(items: Sequence[int]) -> Sequence[int]:
    """Return consecutive items as a range, so that arrays are sliced, not copied."""
    if items and items[-1] - items[0] + 1 == len(items):
        return range(items[0], items[-1] + 1)
    return items or range(0)


def _groups(spec: EndpointSpec, groups: int | str, batches: Mapping[str, Any], total: int) -> list[Sequence[int]]:
    if isinstance(groups, int):
        if total % groups:
            msg = f"endpoint `{spec.name}` keeps each {groups} items together, but {total} items do not divide so"
            raise DispatchError(msg, hint=f"pass a multiple of {groups} items, or name a column: Split(groups='...')")
        return [range(start, start + groups) for start in range(0, total, groups)]
    keys = _find(batches, groups)
    if keys is None and any(isinstance(value, HANDLES) for _, value in _leaves(batches)):
        msg = f"endpoint `{spec.name}` keeps items together by `{groups}`, which stands with the owner of a Ref"
        raise DispatchError(msg, hint=f"pass `{groups}` as an argument of its own, or keep a fixed number together")
    if keys is None:
        msg = f"endpoint `{spec.name}` keeps items together by `{groups}`, which the call does not have"
        raise DispatchError(msg, hint=f"pass a column or argument `{groups}` with one value per item")
    if isinstance(keys, Ragged):
        msg = (
            f"endpoint `{spec.name}` keeps items together by `{groups}`, which holds sequences, not one value per item"
        )
        raise DispatchError(msg)
    members: dict[Any, list[int]] = {}
    for item, key in enumerate(_listed(keys)):
        members.setdefault(tuple(key) if isinstance(key, list) else key, []).append(item)
    return list(members.values())


_TOKEN_COLUMNS: Final = ("attention_mask", "lengths", "input_ids")


def _token_counts(spec: EndpointSpec, split: Split, batches: Mapping[str, Any]) -> list[float]:
    if split.tokens is not None:
        column = _find(batches, split.tokens)
        if column is None and any(isinstance(value, HANDLES) for _, value in _leaves(batches)):
            msg = f"endpoint `{spec.name}` balances by `{split.tokens}`, which stands with the owner of a Ref"
            raise DispatchError(msg, hint="a Ref tells the counts of a column `lengths` or `attention_mask` only")
        if column is None:
            msg = f"endpoint `{spec.name}` balances by `{split.tokens}`, which the call does not have"
            raise DispatchError(msg, hint=f"pass a column or argument `{split.tokens}` with one entry per item")
        return _count_column(spec, split.tokens, column)
    for name in _TOKEN_COLUMNS:
        column = _find(batches, name)
        if column is not None:
            return _count_column(spec, name, column)
    leaves = list(_leaves(batches))
    declared = next((one.lengths for _, one in leaves if isinstance(one, HANDLES) and one.lengths is not None), None)
    if declared is not None:
        return [float(tokens) for tokens in declared]
    name, first = leaves[0]
    return [1.0] * len(first) if isinstance(first, HANDLES) else _count_column(spec, name, first)


def _count_column(spec: EndpointSpec, name: str, column: Any) -> list[float]:
    if isinstance(column, Ragged):
        return list(map(float, column.lengths.tolist()))
    if is_array(column) and len(column.shape) > 1:
        if "mask" in name:
            return list(column.reshape(column.shape[0], -1).sum(1).tolist())
        return [float(column.shape[1])] * int(column.shape[0])
    counts = [_count_item(spec, name, item) for item in _listed(column)]
    if any(not tokens >= 0 for tokens in counts):
        msg = f"endpoint `{spec.name}` balances by `{name}`, which holds a negative token count"
        raise DispatchError(msg)
    return counts


def _count_item(spec: EndpointSpec, name: str, item: Any) -> float:
    if isinstance(item, int | float):
        return float(item) if name in _TOKEN_COLUMNS or name == getattr(spec.dispatch, "tokens", None) else 1.0
    if isinstance(item, dict):
        for column in _TOKEN_COLUMNS:
            if column in item:
                return _count_item(spec, column, item[column])
    if "mask" in name and not isinstance(item, str | bytes):
        return float(item.sum()) if is_array(item) else float(sum(item))
    if is_array(item):
        return float(item.shape[-1]) if len(item.shape) else 1.0
    if hasattr(item, "__len__"):
        return float(len(item))
    msg = f"endpoint `{spec.name}` balances by tokens, but an item of `{name}` ({type(item).__name__}) has no length"
    raise DispatchError(msg, hint='pass a column `lengths` or `attention_mask`, or declare by="count"')


def _listed(column: Any) -> list[Any]:
    return list(column.tolist()) if is_array(column) else list(column)


def _leaves(batches: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in batches.items():
        if isinstance(value, dict):
            yield from _leaves({str(k): v for k, v in value.items() if _columns(v, "")})
        else:
            yield name, value


def _find(batches: Mapping[str, Any], name: str) -> Any:
    """Return the column called ``name``: an argument, a dict's entry, or an entry of every item; None if none."""
    for label, value in batches.items():
        if label == name and not isinstance(value, HANDLES):
            return value
        if isinstance(value, dict):
            found = _find({k: v for k, v in value.items() if isinstance(k, str) and _columns(v, "")}, name)
            if found is not None:
                return found
        if is_sequence(value) and value and all(isinstance(item, dict) and name in item for item in value):
            return [item[name] for item in value]
    return None
