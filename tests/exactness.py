"""Exact comparison for codec tests: same types all the way down, same bits in floats and arrays."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import struct
import sys
from typing import Any

__all__ = ["same"]


def same(left: Any, right: Any) -> bool:
    """Return whether two values agree in type, order and bits; NaN equals NaN, 0.0 differs from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and type(left) is float:
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, decimal.Decimal):
        return str(left) == str(right)
    if isinstance(left, complex) and type(left) is complex:
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, collections.deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, dict):
        return same(list(left.keys()), list(right.keys())) and same(list(left.values()), list(right.values()))
    if isinstance(left, (set, frozenset)):
        return len(left) == len(right) and all(any(same(one, other) for other in right) for one in left)
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return _same_library(left, right)


def _same_library(left: Any, right: Any) -> bool:
    module = type(left).__module__.partition(".")[0]
    if module == "numpy" and hasattr(left, "tobytes"):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes("A") == right.tobytes("A"))
    if module == "torch" and hasattr(left, "numel"):
        torch = sys.modules["torch"]
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(_bits(left, torch), _bits(right, torch))
        )
    return bool(left == right)


def _bits(tensor: Any, torch: Any) -> Any:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8)
