"""What to say about a value that cannot be carried: what it is, and the one change that helps."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

__all__ = ["name_of", "refusal", "short"]

_SHORT = 40


def name_of(cls: type) -> str:
    """Return the full name of a class, without ``builtins.``."""
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def short(value: Any) -> str:
    """Return a short ``repr`` that never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a user's repr may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def refusal(value: Any) -> tuple[str, str]:
    """Return the message and the hint for a value of a type that has no place in the codec."""
    cls = type(value)
    name = name_of(cls)
    if isinstance(value, enum.Enum):
        return f"enum {name} is not registered", f"call zbus.register({cls.__name__}) in controller and engine"
    if dataclasses.is_dataclass(cls):
        return (
            f"dataclass {name} is not registered",
            f"call zbus.register({cls.__name__}), or use it as a decorator, where both sides import it",
        )
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return f"named tuple {name} is not registered", f"call zbus.register({cls.__name__}), or send tuple(...)"
    return f"{name} cannot be carried exactly", _plain_hint(value, cls)


def _plain_hint(value: Any, cls: type) -> str:
    for base in (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float):
        if isinstance(value, base):
            return f"{cls.__name__} is a subclass of {base.__name__}; send {base.__name__}(value)"
    if isinstance(value, memoryview):
        return "send bytes(view)"
    if isinstance(value, BaseException):
        return "raise it, or send str(error)"
    if isinstance(value, type):
        return "send its name and look it up on the other side"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return "code does not travel: declare an endpoint on the engine and call that"
    if isinstance(value, (types.GeneratorType, types.AsyncGeneratorType)):
        return "send list(value), or make the endpoint a generator"
    if hasattr(cls, "__array__"):
        return "send numpy.asarray(value)"
    return "send plain data, an array, or a registered dataclass"
