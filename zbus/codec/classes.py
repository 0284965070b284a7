"""Users' classes. Only what both sides registered under one tag is carried; nothing is ever imported by name.

Objects are rebuilt through their fields: neither ``__init__`` nor ``__post_init__`` runs, so ``init=False`` fields and
frozen classes arrive as they were. Attributes that are not fields do not travel.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, overload

from zbus.codec.decoder import BUILD, CONTAINERS, Decoder, exactly
from zbus.codec.encoder import PREPARE, Encoder, Prepare
from zbus.codec.hints import name_of
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError

__all__ = ["fields_of", "register", "registered"]

_C = TypeVar("_C", bound=type)
_MAX_TAG: Final = 200

_classes: dict[str, type] = {}
_fields: dict[type, tuple[str, ...]] = {}


@overload
def register(cls: _C, tag: str | None = None) -> _C: ...
@overload
def register(cls: None = None, tag: str | None = None) -> Any: ...
def register(cls: _C | None = None, tag: str | None = None) -> Any:
    """Let instances of a dataclass, an enum or a named tuple travel. Call it in every process; any thread may.

    Use it as ``@register``, ``@register(tag="shop.Item")`` or ``register(Item)``. Subclasses are registered for
    themselves. To repeat a registration is harmless; a class of the same name takes over its tag (a reloaded module).

    Args:
        cls: The class.
        tag: Its name on the wire, the same in every process; by default ``module.qualified_name``. A class defined in
            a script (``__main__``) that workers import under another module name needs an explicit tag.

    Returns:
        The class, unchanged.

    Raises:
        CodecError: The class is of another sort, or the tag is taken by another class.
    """
    if cls is None:
        return lambda decorated: register(decorated, tag)
    wire_tag = tag or f"{cls.__module__}.{cls.__qualname__}"
    if len(wire_tag) > _MAX_TAG:
        msg = f"tag {wire_tag[:40]!r}… is longer than {_MAX_TAG} characters"
        raise CodecError(msg)
    holder = _classes.get(wire_tag)
    if holder is not None and name_of(holder) != name_of(cls):
        msg = f"tag {wire_tag!r} of {name_of(cls)} already belongs to {name_of(holder)}"
        raise CodecError(msg, hint="give one of them another tag")
    _add(cls, wire_tag)
    _classes[wire_tag] = cls
    return cls


def registered() -> dict[str, type]:
    """Return the registered classes by tag."""
    return dict(_classes)


def fields_of(cls: type) -> Sequence[str]:
    """Return the field names of a registered dataclass, else nothing."""
    return _fields.get(cls, ())


def _add(cls: type, tag: str) -> None:
    """Put the class into the tables by its sort."""
    if issubclass(cls, enum.Enum):
        PREPARE[cls] = _enum_function(cls, tag)
    elif dataclasses.is_dataclass(cls):
        if issubclass(cls, (dict, list, tuple, set, frozenset, str, bytes, int, float, BaseException)):
            msg = f"dataclass {name_of(cls)} is also a builtin container or exception; its fields are not all of it"
            raise CodecError(msg, hint="hold that part in a field")
        names = tuple(field.name for field in dataclasses.fields(cls))
        _fields[cls] = names
        PREPARE[cls] = _object_function(tag, names)
        CONTAINERS[cls] = lambda value: _values(value, names)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        PREPARE[cls] = _namedtuple_function(tag)
        CONTAINERS[cls] = iter
    else:
        msg = f"{name_of(cls)} is not a dataclass, an enum or a named tuple"
        raise CodecError(msg, hint="make it a dataclass, or send its parts as plain data")


def _values(value: Any, names: Sequence[str]) -> Iterator[Any]:
    return (getattr(value, name) for name in names)


# -- to the wire ---------------------------------------------------------------------------------------------------

_OBJECT: Final = marker(Kind.OBJECT)
_ENUM: Final = marker(Kind.ENUM)
_FLAG: Final = marker(Kind.FLAG)
_NAMEDTUPLE: Final = marker(Kind.NAMEDTUPLE)


def _object_function(tag: str, names: tuple[str, ...]) -> Prepare:
    def prepare_object(value: Any, state: Encoder) -> list[Any]:
        state.enter(len(names))
        operands = {}
        for name in names:
            try:
                item = getattr(value, name)
            except AttributeError:
                msg = f"field {name!r} of {name_of(type(value))} is not set"
                raise CodecError(msg, hint="give every field a value before the object is sent") from None
            operands[name] = state.prepare(item)
        state.depth -= 1
        return [_OBJECT, tag, operands]

    return prepare_object


def _enum_function(cls: type[enum.Enum], tag: str) -> Prepare:
    if issubclass(cls, enum.Flag):
        return lambda value, _state: [_FLAG, tag, int(value.value)]
    return lambda value, _state: [_ENUM, tag, value.name]


def _namedtuple_function(tag: str) -> Prepare:
    def prepare_namedtuple(value: Any, state: Encoder) -> list[Any]:
        state.enter(len(value))
        prepared = [_NAMEDTUPLE, tag, *map(state.prepare, value)]
        state.depth -= 1
        return prepared

    return prepare_namedtuple


# -- from the wire -------------------------------------------------------------------------------------------------


def _class_of(tag: Any) -> Any:
    cls = _classes.get(tag) if type(tag) is str else None
    if cls is None:
        msg = f"class tag {str(tag)[:_MAX_TAG]!r} is not registered in this process"
        raise CodecError(msg, hint="import the module that registers it here too, or give both sides the same tag")
    return cls


def _build_object(items: list[Any], _state: Decoder) -> Any:
    tag, operands = exactly(items, str, dict)
    cls = _class_of(tag)
    names = _fields.get(cls, ())
    if cls not in _fields or operands.keys() != set(names):
        different = sorted(str(name) for name in operands.keys() ^ set(names))
        msg = f"{name_of(cls)} came with other fields than it has here: {', '.join(different)}"
        raise CodecError(msg, hint="run the same version of the class on both sides")
    made = object.__new__(cls)
    for name in names:
        object.__setattr__(made, name, operands[name])
    return made


def _build_enum(items: list[Any], _state: Decoder) -> enum.Enum:
    tag, name = exactly(items, str, str)
    cls = _class_of(tag)
    member = cls.__members__.get(name) if issubclass(cls, enum.Enum) else None
    if member is None:
        msg = f"{name_of(cls)} has no member {name!r} here"
        raise CodecError(msg, hint="run the same version of the enum on both sides")
    return member  # type: ignore[no-any-return]  # looked up in the enum itself


def _build_flag(items: list[Any], _state: Decoder) -> enum.Flag:
    tag, number = exactly(items, str, int)
    cls = _class_of(tag)
    if not issubclass(cls, enum.Flag):
        msg = f"{name_of(cls)} is not a flag here"
        raise CodecError(msg)
    return cls(number)  # type: ignore[no-any-return]  # a flag by the check above


def _build_namedtuple(items: list[Any], _state: Decoder) -> Any:
    cls = _class_of(items[0] if items else None)
    if not (issubclass(cls, tuple) and len(items) - 1 == len(cls._fields)):
        msg = f"{name_of(cls)} came with {len(items) - 1} fields"
        raise CodecError(msg, hint="run the same version of the class on both sides")
    return tuple.__new__(cls, items[1:])


BUILD.update(
    {
        Kind.OBJECT: _build_object,
        Kind.ENUM: _build_enum,
        Kind.FLAG: _build_flag,
        Kind.NAMEDTUPLE: _build_namedtuple,
    }
)
