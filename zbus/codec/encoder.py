"""Values to frames. One pass turns what msgpack would lose into marked arrays; msgpack's C code does the rest.

Plain lists and dicts are handed on as they are (no copy). Each type of value has one entry in a table; what has none
is refused, with the path to it. numpy and torch enter the table when a value of theirs is first met, so a process that
has not imported them never does so here.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgpack
import msgspec

from zbus.codec import hints
from zbus.codec.limits import DEFAULT_LIMITS, INLINE_BELOW, Limits
from zbus.codec.wire import BIGINT, Kind, marker
from zbus.errors import CodecError
from zbus.protocol.messages import Buffer
from zbus.ragged import Ragged

__all__ = [
    "PLAIN",
    "PREPARE",
    "SCALARS",
    "Encoder",
    "Keep",
    "Prepare",
    "encode",
    "encode_call",
    "encode_plain",
    "encode_plain_batch",
    "encode_plain_call",
    "encode_plain_calls",
]

SCALARS: Final = frozenset({type(None), bool, int, float, str})
"""What msgpack carries exactly (integers beyond 64 bits through its hook)."""

PLAIN: Final = frozenset({*SCALARS, bytes})
"""Types of which a short value is carried by msgpack alone."""

_SHORT: Final = 8
"""Below this length one loop is quicker than a look at all types first."""

_BYTES_OUT_OF_BAND: Final = 65_536
_PLAIN_BELOW: Final = 16_384
"""A body of plain calls stays far from every limit below this."""
_KEEP_PACKER_BELOW: Final = 1_048_576

Prepare = Callable[[Any, "Encoder"], Any]

Keep = Callable[[memoryview | bytes], Buffer]
"""Makes the frame that stands for the memory of an array. A true attribute ``all_map`` says that all readers map it."""


class Encoder:
    """The state of one ``encode`` call: buffers met so far and the current depth."""

    __slots__ = ("buffer_bytes", "buffers", "depth", "keep", "limits", "refs")

    def __init__(self, limits: Limits, keep: Keep = memoryview) -> None:
        self.limits = limits
        self.keep = keep
        self.depth = 0
        self.buffers: list[Buffer] = []
        self.buffer_bytes = 0
        self.refs: list[Any] | None = None

    def prepare(self, value: Any) -> Any:
        """Return ``value`` in terms that msgpack carries exactly.

        Raises:
            CodecError: It cannot be carried.
        """
        cls = type(value)
        if cls in SCALARS:
            return value
        function = PREPARE.get(cls)
        if function is None:
            function = _resolve(value)
        return function(value, self)

    def enter(self, count: int) -> None:
        """Count one level of nesting and the entries of a container; ``self.depth -= 1`` leaves it again."""
        if self.depth >= self.limits.depth:
            msg = f"nesting is deeper than {self.limits.depth} levels (or the value contains itself)"
            raise CodecError(msg, hint="flatten the value; a list or dict may not contain itself")
        if count > self.limits.items:
            msg = f"{count:,} entries in one container; the limit is {self.limits.items:,}"
            raise CodecError(msg, hint="send numbers as a numpy array or a torch tensor")
        self.depth += 1

    def place(self, data: memoryview | bytes) -> int | bytes:
        """Return the operand that names ``data``: the bytes themselves when small, else the index of a new buffer."""
        size = len(data)
        if size < INLINE_BELOW:
            return bytes(data)
        if len(self.buffers) >= self.limits.buffers:
            msg = f"more than {self.limits.buffers:,} arrays in one value"
            raise CodecError(msg, hint="stack them into fewer arrays")
        self.buffer_bytes += size
        if self.buffer_bytes > self.limits.buffer_bytes:
            msg = f"arrays of more than {self.limits.buffer_bytes:,} bytes in one value"
            raise CodecError(msg, hint="send them in several calls")
        self.buffers.append(self.keep(data))
        return len(self.buffers) - 1


def encode(
    value: Any,
    *,
    limits: Limits = DEFAULT_LIMITS,
    snapshot: bool = False,
    keep: Keep | None = None,
    refs: list[Any] | None = None,
) -> list[Buffer]:
    """Return ``value`` as frames ``[body, buffer 0, …]``, each contiguous. Any thread may call.

    Buffers are views of the arrays in ``value``: until the frames are sent (and acknowledged), a change of an array in
    place changes what is sent. With ``snapshot`` every array is copied now.

    Args:
        value: The value; see ``docs/reference/codec.md`` for what is carried.
        limits: Bounds of depth, counts and bytes.
        snapshot: Copy arrays instead of viewing them.
        keep: Makes the frame for the memory of an array, in place of a view or a copy of it; the decoding side must
            get the same bytes from it.
        refs: Is given each ``Ref`` that the value holds.

    Raises:
        CodecError: A part of it cannot be carried exactly or exceeds a limit; ``path`` names that part.
    """
    plain = encode_plain(value)
    if plain is not None:
        return [plain]
    state = Encoder(limits, keep or (bytes if snapshot else memoryview))
    state.refs = refs
    try:
        body = _pack(state.prepare(value))
    except CodecError as error:
        raise _with_path(error, value, limits) from error.__cause__
    except (RecursionError, MemoryError, UnicodeEncodeError, ValueError, OverflowError, TypeError) as error:
        raise _with_path(CodecError(f"cannot be encoded: {error}"), value, limits) from error
    if len(body) > limits.body_bytes:
        msg = f"{len(body):,} bytes of plain data; the limit is {limits.body_bytes:,}"
        raise CodecError(msg, hint="send numbers as a numpy array or a torch tensor, or in several calls")
    return [body, *state.buffers]


def encode_plain(value: Any) -> bytes | None:
    """Return the one frame of a number, text or bytes, if it is short; None: ``encode`` must be asked."""
    if value.__class__ in PLAIN:  # most results; nothing in it to mark, to copy or to count
        try:
            body: bytes = _pack_plain(value)
        except (UnicodeEncodeError, OverflowError):  # to be said, or an integer beyond 64 bits
            return None
        if len(body) < INLINE_BELOW:
            return body
    return None


def encode_plain_call(name: str, args: tuple[Any, ...]) -> list[Buffer] | None:
    """Return what ``encode_call`` would, if the arguments are few numbers, texts and bytes; else None."""
    if PLAIN.issuperset(map(type, args)):
        try:
            body = _pack_plain(((name, args, _NO_KEYWORDS),))
        except (UnicodeEncodeError, OverflowError):
            return None
        if len(body) < INLINE_BELOW:
            return [body]
    return None


def encode_plain_calls(calls: Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any]]]) -> list[Buffer] | None:
    """Return the body of a request of several calls, if their arguments are numbers, texts and bytes; else None."""
    arguments = [args for _, args, kwargs in calls if not kwargs]
    if len(arguments) < len(calls) or not PLAIN.issuperset(map(type, itertools.chain.from_iterable(arguments))):
        return None
    try:
        body = _pack_plain(calls)
    except (UnicodeEncodeError, OverflowError):
        return None
    return [body] if len(body) < _PLAIN_BELOW else None


def encode_plain_batch(names: Sequence[str], arguments: Sequence[tuple[Any, ...]]) -> list[Buffer] | None:
    """As ``encode_plain_calls``, for calls without keywords."""
    if not PLAIN.issuperset(map(type, itertools.chain.from_iterable(arguments))):
        return None
    try:
        body = _pack_plain(list(zip(names, arguments, itertools.repeat(_NO_KEYWORDS))))
    except (UnicodeEncodeError, OverflowError):
        return None
    return [body] if len(body) < _PLAIN_BELOW else None


def encode_call(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    snapshot: bool = False,
    keep: Keep | None = None,
    refs: list[Any] | None = None,
) -> list[Buffer]:
    """Return the body of a request with one call: ``encode([[name, list(args), kwargs]])``, but cheaper for plain ones.

    Raises:
        CodecError: As ``encode``.
    """
    plain = None if kwargs else encode_plain_call(name, args)
    if plain is not None:
        return plain
    return encode([[name, list(args), dict(kwargs)]], snapshot=snapshot, keep=keep, refs=refs)


# -- packing -------------------------------------------------------------------------------------------------------


def _big_integer(value: Any) -> msgpack.ExtType:
    """Carry an integer beyond 64 bits; nothing else that msgpack does not know should get this far."""
    if type(value) is not int:
        msg = f"{hints.name_of(type(value))} cannot be carried (was the value changed while it was encoded?)"
        raise CodecError(msg)
    return msgpack.ExtType(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


_NO_KEYWORDS: Final[dict[str, Any]] = {}
_pack_plain: Final = msgspec.msgpack.Encoder().encode
"""The same bytes for what is ``PLAIN``, in half the time."""

# pop and append of a list are atomic, and a signal handler that encodes in the middle of a pack takes another packer.
_packers: list[msgpack.Packer] = []


def _pack(prepared: Any) -> bytes:
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_big_integer, strict_types=True, use_bin_type=True)
    body: bytes = packer.pack(prepared)
    if len(body) < _KEEP_PACKER_BELOW:
        _packers.append(packer)
    return body


# -- containers ----------------------------------------------------------------------------------------------------


def _list(value: list[Any], state: Encoder) -> list[Any]:
    state.enter(len(value))
    if len(value) < _SHORT or not SCALARS.issuperset(map(type, value)):
        value = _prepare_each(value, state)
    state.depth -= 1
    return value


def _prepare_each(items: Iterable[Any], state: Encoder) -> list[Any]:
    """Prepare each item; the loop spares small calls a frame per scalar."""
    prepared = []
    for item in items:
        cls = type(item)
        if cls in SCALARS:
            prepared.append(item)
        else:
            prepared.append((PREPARE.get(cls) or _resolve(item))(item, state))
    return prepared


def _marked(kind: Kind) -> Prepare:
    """Return the function that carries an iterable of items under a mark."""
    mark = marker(kind)

    def prepare_items(value: Any, state: Encoder) -> list[Any]:
        state.enter(len(value))
        if len(value) < _SHORT or not SCALARS.issuperset(map(type, value)):
            value = _prepare_each(value, state)
        state.depth -= 1
        return [mark, *value]

    return prepare_items


def _dict(value: dict[Any, Any], state: Encoder) -> Any:
    state.enter(len(value))
    prepare = state.prepare
    prepared: Any = value
    if not value:
        pass
    elif not SCALARS.issuperset(map(type, value)):
        prepared = [_DICT]
        for key, item in value.items():
            prepared += (prepare(key), prepare(item))
    elif not SCALARS.issuperset(map(type, value.values())):
        prepared = {key: prepare(item) for key, item in value.items()}
    state.depth -= 1
    return prepared


def _ordered_dict(value: collections.OrderedDict[Any, Any], state: Encoder) -> list[Any]:
    state.enter(len(value))
    prepared: list[Any] = [_ORDERED_DICT]
    for key, item in value.items():
        prepared += (state.prepare(key), state.prepare(item))
    state.depth -= 1
    return prepared


def _deque(value: collections.deque[Any], state: Encoder) -> list[Any]:
    state.enter(len(value))
    prepared = [_DEQUE, value.maxlen, *map(state.prepare, value)]
    state.depth -= 1
    return prepared


def _bytes(value: bytes, state: Encoder) -> Any:
    return value if len(value) < _BYTES_OUT_OF_BAND else [_BYTES, state.place(value)]


def _ragged(value: Ragged, state: Encoder) -> list[Any]:
    return [_RAGGED, state.prepare(value.values), state.prepare(value.offsets)]


def _bytearray(value: bytearray, state: Encoder) -> list[Any]:
    # A view would forbid the owner to resize it for as long as the message lives.
    return [_BYTEARRAY, state.place(bytes(value))]


_DICT: Final = marker(Kind.DICT)
_ORDERED_DICT: Final = marker(Kind.ORDERED_DICT)
_DEQUE: Final = marker(Kind.DEQUE)
_BYTES: Final = marker(Kind.BYTES)
_BYTEARRAY: Final = marker(Kind.BYTEARRAY)
_RAGGED: Final = marker(Kind.RAGGED)

PREPARE: Final[dict[type, Prepare]] = {
    list: _list,
    dict: _dict,
    tuple: _marked(Kind.TUPLE),
    set: _marked(Kind.SET),
    frozenset: _marked(Kind.FROZENSET),
    collections.OrderedDict: _ordered_dict,
    collections.deque: _deque,
    bytes: _bytes,
    bytearray: _bytearray,
    Ragged: _ragged,
    **{kind: lambda value, _state: value for kind in SCALARS},
}
"""How each exact type is carried. Other modules of the codec add theirs."""


def _resolve(value: Any) -> Prepare:
    """Return the table entry of a type not met before, or refuse the value."""
    cls = type(value)
    root = str(cls.__module__).partition(".")[0]
    if root == "numpy" and "numpy" in sys.modules:
        from zbus.codec import arrays  # only for processes that use numpy

        arrays.install()
    elif root == "torch" and "torch" in sys.modules:
        from zbus.codec import tensors  # only for processes that use torch

        tensors.install()
    function = PREPARE.get(cls)
    if function is None:
        message, hint = hints.refusal(value)
        raise CodecError(message, hint=hint)
    return function


# -- where it went wrong -------------------------------------------------------------------------------------------


def _fails(value: Any, limits: Limits) -> bool:
    try:
        _pack(Encoder(limits).prepare(value))
    except Exception:  # noqa: BLE001  # any failure at all marks the culprit
        return True
    return False


def _with_path(error: CodecError, value: Any, limits: Limits) -> CodecError:
    """Return ``error`` with the path to the smallest part of ``value`` that fails alone."""
    path = "$"
    for _ in range(limits.depth):
        for step, child in _children(value):
            if _fails(child, limits):
                path += step
                value = child
                break
        else:
            break
    return CodecError(error.message, path=path, hint=error.hint)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container with their path steps."""
    from zbus.codec import classes  # it imports this module

    if isinstance(value, dict):
        for key, item in value.items():
            yield f"<key {hints.short(key)}>", key
            yield f"[{hints.short(key)}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield f"{{{hints.short(item)}}}", item
    elif isinstance(value, (list, tuple, collections.deque)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        for name in classes.fields_of(type(value)):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
