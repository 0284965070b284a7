"""Frames to values. Everything a peer may lie about is checked before memory is taken for it.

msgpack's C parser calls three hooks: for ext types, for arrays and for maps. Marks are counted when they are read and
again when an array uses them; a mark that no array used makes the message invalid.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final

import msgpack
import msgspec
from msgspec import Meta

from zbus.codec.limits import DEFAULT_LIMITS, INLINE_BELOW, Limits
from zbus.codec.wire import BIGINT, MARK, Kind, Mark
from zbus.errors import CodecError
from zbus.protocol.messages import Buffer

__all__ = ["BUILD", "CONTAINERS", "NOT_PLAIN", "Build", "Decoder", "decode", "decode_calls", "decode_plain", "exactly"]

Build = Callable[[list[Any], "Decoder"], Any]

_MARKS: Final = {bytes((kind,)): Mark(kind) for kind in Kind}
_TUPLE: Final = _MARKS[bytes((Kind.TUPLE,))]

# Below this size lying lengths cannot claim memory worth a second look (msgpack holds each to the body's length).
_VERIFY_FROM: Final = 2048

# Calls of plain values are read without hooks up to this size: lists are made as their items are read.
_PLAIN_BELOW: Final = 16_384

NOT_PLAIN: Final[Any] = object()
"""What ``decode_plain`` returns in place of a value."""

_FIELD_ERRORS: Final = "the fields of this part do not fit its kind"


class Lender:
    """The object behind a buffer whose bytes stay as they are for as long as any view of it lives.

    A base and no protocol: whether a buffer has such an object is asked for every array that arrives.
    """

    __slots__ = ()

    def private(self) -> memoryview:
        """Return the same bytes in memory that is writable and nobody else's."""
        raise NotImplementedError


class Decoder:
    """The state of one ``decode`` call."""

    __slots__ = ("buffers", "containers", "limits", "open_marks", "owned", "refs", "used")

    def __init__(self, buffers: Sequence[Buffer], limits: Limits, owned: bool) -> None:  # noqa: FBT001  # a keyword costs
        self.buffers = buffers
        self.limits = limits
        self.owned = owned
        self.open_marks = 0
        self.containers = 0
        self.used: set[int] = set()
        self.refs: list[Any] | None = None

    def ext(self, code: int, data: bytes) -> Any:
        """Turn an ext type into a mark or a big integer."""
        if code == MARK:
            mark = _MARKS.get(data)
            if mark is not None:
                self.open_marks += 1
                return mark
        elif code == BIGINT and data:
            return int.from_bytes(data, "big", signed=True)
        msg = f"unknown ext type {code} of {len(data)} bytes"
        raise CodecError(msg)

    def array(self, items: list[Any]) -> Any:
        """Turn a marked array into what it stands for; leave a plain one."""
        self.containers += 1
        if not items:
            return items
        mark = items[0]
        if mark.__class__ is not Mark:
            return items
        self.open_marks -= 1
        del items[0]
        if mark is _TUPLE:
            return tuple(items)
        if mark.library and not self.limits.arrays:
            msg = "an array came to a process that takes none"
            raise CodecError(msg)
        build = BUILD.get(mark.kind) or _late(mark.kind)
        return build(items, self)

    def map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Turn pairs into a dict; refuse a key that comes twice."""
        self.containers += 1
        made = dict(pairs)
        if len(made) != len(pairs):
            msg = "a map holds one key twice"
            raise CodecError(msg)
        return made

    def view(self, operand: Any, nbytes: int, *, writable: bool = False) -> memoryview:
        """Return ``nbytes`` of memory that an array may keep: nobody else writes to it.

        It is writable, but for memory that another process lends (see ``Lender``): that is read-only unless asked for.

        Args:
            operand: Bytes from the body, or the index of a buffer, each of which may be named once.
            nbytes: What dtype and shape demand.
            writable: Whatever uses it cannot be told that memory is read-only.

        Raises:
            CodecError: Size, index or type of the operand is wrong.
        """
        if type(operand) is bytes:
            if len(operand) == nbytes:
                return memoryview(bytearray(operand))
            data = memoryview(operand)
        elif type(operand) is int:
            data = self._buffer(operand)
        else:
            raise CodecError(_FIELD_ERRORS)
        if data.nbytes != nbytes:
            msg = f"an array of {nbytes:,} bytes was announced, {data.nbytes:,} bytes came"
            raise CodecError(msg)
        if self.owned and not data.readonly:
            return data
        if isinstance(data.obj, Lender):
            return data.obj.private() if writable else data
        return memoryview(bytearray(data))

    def raw(self, operand: Any) -> memoryview | bytes:
        """Return the bytes an operand names, to be copied by the caller."""
        if type(operand) is bytes:
            return operand
        if type(operand) is int:
            return self._buffer(operand)
        raise CodecError(_FIELD_ERRORS)

    def raw_buffer(self, operand: Any) -> memoryview:
        """Return the buffer an operand names; what keeps its memory alive is behind it."""
        if type(operand) is not int:
            raise CodecError(_FIELD_ERRORS)
        return self._buffer(operand)

    def _buffer(self, index: int) -> memoryview:
        if not 0 <= index < len(self.buffers):
            msg = f"buffer {index} was announced, {len(self.buffers)} came"
            raise CodecError(msg)
        if index in self.used:
            msg = f"buffer {index} is named twice"
            raise CodecError(msg)
        self.used.add(index)
        return memoryview(self.buffers[index]).cast("B")


def decode(
    frames: Sequence[Buffer],
    *,
    limits: Limits = DEFAULT_LIMITS,
    owned: bool = False,
    refs: list[Any] | None = None,
) -> Any:
    """Return the value that ``encode`` turned into ``frames``. Any thread may call.

    Arrays are always writable and nobody else's: their memory is copied out of the frames, except with ``owned``.

    Args:
        frames: ``[body, buffer 0, …]``: anything with the buffer protocol, so received frames as they are.
        limits: Bounds of depth, counts and bytes.
        owned: The caller gives the frames up. Arrays then live in the memory of those that are writable, uncopied.
            Never set it for frames that are kept, sent again or decoded again.
        refs: Is given each ``Ref`` that the value holds.

    Raises:
        CodecError: The frames are not exactly one valid value within the limits. Nothing else escapes.
    """
    try:
        body = frames[0] if len(frames) == 1 else b""
        if body.__class__ is bytes and 0 < len(body) < INLINE_BELOW and body[0] in _SCALAR_FIRST:
            return _read_scalar(body)  # a lone number, text or bytes: no hooks to call, nothing to count
        body, buffers = _open(frames, limits)
        state = Decoder(buffers, limits, owned)
        state.refs = refs
        value = msgpack.unpackb(
            body,
            ext_hook=state.ext,
            list_hook=state.array,
            object_pairs_hook=state.map,
            strict_map_key=False,
            timestamp=3,
            max_array_len=2 * limits.items + 2,
            max_map_len=limits.items,
        )
    except CodecError:
        raise
    except Exception as error:
        msg = f"not a valid value: {str(error) or type(error).__name__}"
        raise CodecError(msg) from error
    if state.open_marks or value.__class__ is Mark:
        msg = "not a valid value: a mark outside its place"
        raise CodecError(msg)
    if len(state.used) != len(buffers):
        msg = f"{len(buffers)} buffers came, the value names {len(state.used)}"
        raise CodecError(msg)
    if state.containers > limits.depth and _is_deeper(value, limits.depth):
        msg = f"nesting is deeper than {limits.depth} levels"
        raise CodecError(msg)
    return value


def decode_plain(body: bytes) -> Any:
    """Return the value of a short frame that is a lone number, text or bytes; ``NOT_PLAIN`` if ``decode`` must tell."""
    if 0 < len(body) < INLINE_BELOW and body[0] in _SCALAR_FIRST:
        try:
            return _read_scalar(body)
        except Exception:  # noqa: BLE001, S110  # the whole decoder says why
            pass
    return NOT_PLAIN


def decode_calls(frames: Sequence[Buffer], refs: list[Any] | None = None) -> Any:
    """Return the calls of a request, ``[[name, args, kwargs], …]``: as ``decode``, but cheaper for short plain ones.

    Raises:
        CodecError: As ``decode``.
    """
    if len(frames) == 1:
        body = frames[0]
        if body.__class__ is bytes and len(body) < _PLAIN_BELOW:
            try:
                calls = _read_calls(body)
            except msgspec.DecodeError:  # a keyword, or no calls at all: the whole decoder tells
                return decode(frames, refs=refs)
            if _SCALARS.issuperset(map(type, itertools.chain.from_iterable(map(_ARGUMENTS, calls)))):
                return calls
    return decode(frames, refs=refs)


_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_ARGUMENTS: Final = operator.itemgetter(1)
_read_scalar: Final = msgspec.msgpack.Decoder().decode
_read_calls: Final = msgspec.msgpack.Decoder(
    list[tuple[str, list[Any], Annotated[dict[str, None], Meta(max_length=0)]]]
).decode

# First bytes of msgpack's numbers, texts, bytes, nil and booleans (not of arrays, maps and extensions).
_SCALAR_FIRST: Final = frozenset(
    (*range(0x80), *range(0xA0, 0xC7), *range(0xCA, 0xD4), *range(0xD9, 0xDC), *range(0xE0, 0x100))
) - {0xC1}


def _open(frames: Sequence[Buffer], limits: Limits) -> tuple[bytes, Sequence[Buffer]]:
    """Check sizes and counts of the frames and the lengths inside the body."""
    if not frames:
        msg = "no body came"
        raise CodecError(msg)
    body = frames[0]
    if body.__class__ is not bytes:
        view = memoryview(body)
        if view.nbytes > limits.body_bytes:
            raise CodecError(_too_big(view.nbytes, limits))
        body = bytes(view)
    if len(body) > limits.body_bytes:
        raise CodecError(_too_big(len(body), limits))
    if len(body) >= _VERIFY_FROM:
        # Lists are made at their claimed length before their items are read: nested claims would multiply. Skipping
        # makes no lists and fails unless each claimed item is there, so the claims add up to at most the body.
        scout = msgpack.Unpacker(max_buffer_size=len(body))
        scout.feed(body)
        scout.skip()
    if len(frames) == 1:
        return body, ()
    buffers = frames[1:]
    if len(buffers) > limits.buffers:
        msg = f"{len(buffers):,} buffers came; the limit is {limits.buffers:,}"
        raise CodecError(msg)
    total = sum(memoryview(buffer).nbytes for buffer in buffers)
    if total > limits.buffer_bytes:
        msg = f"{total:,} bytes of buffers came; the limit is {limits.buffer_bytes:,}"
        raise CodecError(msg)
    return body, buffers


def _too_big(size: int, limits: Limits) -> str:
    return f"a body of {size:,} bytes came; the limit is {limits.body_bytes:,}"


# -- depth ---------------------------------------------------------------------------------------------------------

CONTAINERS: Final[dict[type, Callable[[Any], Iterable[Any]]]] = {
    list: iter,
    tuple: iter,
    set: iter,
    frozenset: iter,
    collections.deque: iter,
    dict: lambda value: itertools.chain(value.keys(), value.values()),
    collections.OrderedDict: lambda value: itertools.chain(value.keys(), value.values()),
}
"""How to look into each kind of container; registered classes are added."""


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if type(value) in CONTAINERS else []
    for _ in range(depth):
        below: list[Any] = []
        for container in level:
            look = CONTAINERS[type(container)]
            if not CONTAINERS.keys().isdisjoint(map(type, look(container))):
                below += [item for item in look(container) if type(item) in CONTAINERS]
        if not below:
            return False
        level = below
    return bool(level)


# -- builders ------------------------------------------------------------------------------------------------------


def exactly(items: list[Any], *types: type | tuple[type, ...]) -> list[Any]:
    """Return ``items`` if they are of exactly these types, in this order.

    Raises:
        CodecError: They are not.
    """
    if len(items) != len(types):
        raise CodecError(_FIELD_ERRORS)
    for item, allowed in zip(items, types, strict=True):
        if type(item) not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            raise CodecError(_FIELD_ERRORS)
    return items


def _set(items: list[Any], _state: Decoder) -> set[Any]:
    made = set(items)
    if len(made) != len(items):
        msg = "a set holds one item twice"
        raise CodecError(msg)
    return made


def _frozenset(items: list[Any], state: Decoder) -> frozenset[Any]:
    return frozenset(_set(items, state))


def _dict(items: list[Any], state: Decoder) -> dict[Any, Any]:
    if len(items) % 2:
        raise CodecError(_FIELD_ERRORS)
    return state.map(list(zip(items[::2], items[1::2], strict=True)))


def _ordered_dict(items: list[Any], state: Decoder) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_dict(items, state))


def _deque(items: list[Any], _state: Decoder) -> collections.deque[Any]:
    if not items or type(items[0]) not in (int, type(None)):
        raise CodecError(_FIELD_ERRORS)
    maxlen = items[0]
    if maxlen is not None and len(items) - 1 > maxlen:
        raise CodecError(_FIELD_ERRORS)
    return collections.deque(items[1:], maxlen)


def _bytes(items: list[Any], state: Decoder) -> bytes:
    return bytes(state.raw(exactly(items, int)[0]))


def _bytearray(items: list[Any], state: Decoder) -> bytearray:
    return bytearray(state.raw(exactly(items, (int, bytes))[0]))


BUILD: Final[dict[int, Build]] = {
    Kind.SET: _set,
    Kind.FROZENSET: _frozenset,
    Kind.DICT: _dict,
    Kind.ORDERED_DICT: _ordered_dict,
    Kind.DEQUE: _deque,
    Kind.BYTES: _bytes,
    Kind.BYTEARRAY: _bytearray,
}
"""How the operands of each kind become a value. Other modules of the codec add theirs."""


def _late(kind: Kind) -> Build:
    """Return a builder whose module is imported only now, when a value of its kind has come."""
    if kind >= Kind.TENSOR:
        from zbus.codec import tensors  # torch is imported by the first tensor, not before

        tensors.install()
    elif kind >= Kind.NDARRAY:
        from zbus.codec import arrays  # numpy is imported by the first array, not before

        arrays.install()
    return BUILD[kind]
