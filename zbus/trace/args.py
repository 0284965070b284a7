"""Turn any span argument into plain JSON values at record time, without ever raising.

Done at once and not when written: an argument may change later, and a trace must not keep a tensor alive.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MAX_TEXT", "freeze", "freeze_in_place"]

MAX_TEXT: Final = 4096
"""Characters of a text that are kept."""
_MAX_REPR: Final = 200
_MAX_ITEMS: Final = 32
_MAX_DEPTH: Final = 4
_MAX_ALL: Final = 256
_MIN_INT: Final = -(1 << 63)
_MAX_INT: Final = (1 << 64) - 1
_PLAIN: Final = frozenset({float, bool, type(None)})


def freeze_in_place(args: dict[str, Any]) -> None:
    """Replace every value of ``args`` that is not a plain number or a short text by its frozen form."""
    for key, value in args.items():
        cls = type(value)
        if cls is int:
            if _MIN_INT <= value <= _MAX_INT:
                continue
        elif cls in _PLAIN or (cls is str and len(value) <= MAX_TEXT):
            continue
        args[key] = freeze(value)


def freeze(value: object) -> Any:
    """Return ``value`` as bounded JSON values: numbers, text, lists and dicts; never raises.

    numpy scalars become numbers; arrays and tensors become a text of dtype and shape (their data is not read, so a
    GPU is never waited for); other objects become their repr, cut at 200 characters. Of containers at most 32 items of
    each and 256 in all are looked at, four levels deep.
    """
    return _frozen(value, 0, _Budget())


class _Budget:
    """How many more items of containers may be looked at for one argument."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _MAX_ALL


def _frozen(value: object, depth: int, budget: _Budget) -> Any:
    try:
        return _freeze(value, depth, budget)
    except Exception:  # noqa: BLE001  # a foreign property, repr or iterator may raise anything
        return f"<{_type_name(value)}: not printable>"


def _freeze(value: Any, depth: int, budget: _Budget) -> Any:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return f"{cls.__name__}.{value.name}"
    if isinstance(value, str):
        return _cut(str.__str__(value), MAX_TEXT)
    if isinstance(value, int):
        return _freeze_int(int.__int__(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{cls.__name__}, {memoryview(value).nbytes} bytes>"
    if depth < _MAX_DEPTH and isinstance(value, Mapping | list | tuple | set | frozenset):
        return _freeze_container(value, depth, budget)
    return _freeze_object(value, cls)


def _freeze_int(value: int) -> int | str:
    if _MIN_INT <= value <= _MAX_INT:
        return value
    return str(value) if value.bit_length() <= 4096 else f"<int of {value.bit_length()} bits>"


def _freeze_container(value: Any, depth: int, budget: _Budget) -> Any:
    count = min(_MAX_ITEMS, budget.left)
    budget.left -= min(count, len(value))
    more = len(value) - count
    if isinstance(value, Mapping):
        pairs = [(key, item) for (key, item), _ in zip(value.items(), range(count), strict=False)]
        out = {str(_frozen(key, _MAX_DEPTH, budget)): _frozen(item, depth + 1, budget) for key, item in pairs}
        if more > 0:
            out["…"] = f"{more} more"
        return out
    items = [_frozen(item, depth + 1, budget) for item, _ in zip(value, range(count), strict=False)]
    if more > 0:
        items.append(f"… {more} more")
    return items


def _freeze_object(value: Any, cls: type) -> Any:
    if hasattr(cls, "dtype") and hasattr(cls, "shape"):
        shape = tuple(value.shape)
        if not shape and cls.__module__.partition(".")[0] == "numpy":
            plain = value.item()
            return plain if type(plain) in (int, float, bool) else _cut(str(plain), _MAX_REPR)
        return f"{cls.__name__}({value.dtype}, {list(shape)})"
    if isinstance(value, os.PathLike):
        return _cut(str(os.fspath(value)), MAX_TEXT)
    if isinstance(value, BaseException):
        return _cut(f"{cls.__name__}: {value}", _MAX_REPR)
    if vars(object)["__repr__"] is getattr(cls, "__repr__", None):
        return f"<{_type_name(value)}>"
    return _cut(repr(value), _MAX_REPR)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _type_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
