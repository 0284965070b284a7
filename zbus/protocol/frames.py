"""The byte layout of a message: ``[header][body][buffer 0]…[buffer n]``, or one frame where the body is small.

The header is one msgpack array; every message of every kind has all fields:

=====  ============  ==============================================================================================
index  field         meaning
=====  ============  ==============================================================================================
0      version       protocol version, 1
1      kind          ``messages.Kind``
2      session       16 bytes: the caller's session
3      epoch         controller epoch, 0 for a guest
4      incarnation   uint64: the callee's incarnation (0 in HELLO: not known)
5      lane          lane name, at most 64 characters
6      seq           first seq of the message
7      calls         number of consecutive seqs
8      attempt       transmission number, from 1
9      floor         lowest seq whose outcome the caller has not taken (CHUNK: its number; END: number of chunks)
10     budget_ms     remaining time, 0 = none stated
11     status        ``messages.Status``
12     trace         caller's span id, 0 = none
13     frames        number of frames that follow
14     bytes         their total size
15     inline        the body itself where it is the only buffer and at most 1,024 bytes, else nil
=====  ============  ==============================================================================================

A RESULT of several calls (``calls`` > 1) has one body: a msgpack array of the bodies of their values, in order, each a
bin. It is sent where each is small and needs no buffers; otherwise every call has its own RESULT.

A REQ of status JOINED has one body: a msgpack array of ``[budget_ms, body]`` of each of its requests, in order. It says
what as many REQ of one call each would say, and is sent only to a callee whose WELCOME says that it ``joins``.

``frames`` and ``bytes`` make a torn or glued message detectable: a message whose frames disagree with its header is
refused as a whole. An inline body spares a small call one frame each way, about an eighth of its round trip
(``docs/decisions/0002-small-bodies-travel-in-the-header.md``). Nothing here allocates more than the frames hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from zbus.protocol.messages import PROTOCOL_VERSION, Buffer, Buffers, Header, Kind

T = TypeVar("T")

__all__ = [
    "INLINE_BYTES",
    "MAX_CALLS",
    "MAX_HEADER_BYTES",
    "FrameError",
    "VersionMismatch",
    "decode",
    "decode_header",
    "encode",
    "join_bodies",
    "join_requests",
    "split_bodies",
    "split_requests",
]

INLINE_BYTES: Final = 1024
"""Largest body that travels inside the header's frame."""

MAX_HEADER_BYTES: Final = 512 + INLINE_BYTES
"""A valid header is about 60 to 200 bytes, plus an inline body; anything longer is not ours."""

_FIELDS: Final = 16
MAX_CALLS: Final = 1 << 20
"""Largest number of calls in one request."""

_MAX_LANE: Final = 64
_MAX_SEQ: Final = 1 << 62
_SESSION_BYTES: Final = 16
_KINDS: Final = frozenset(int(kind) for kind in Kind)
_PLAIN: Final = (int, int, bytes, int, int, str, *(int,) * 9, type(None))
_INLINE: Final = (*_PLAIN[:-1], bytes)

_Number = Annotated[int, Meta(ge=0)]
_Seq = Annotated[int, Meta(ge=0, le=_MAX_SEQ)]
_Valid = tuple[
    Annotated[int, Meta(ge=PROTOCOL_VERSION, le=PROTOCOL_VERSION)],
    Annotated[int, Meta(ge=int(min(Kind)), le=int(max(Kind)))],
    Annotated[bytes, Meta(min_length=_SESSION_BYTES, max_length=_SESSION_BYTES)],
    _Number,
    _Number,
    Annotated[str, Meta(max_length=_MAX_LANE)],
    _Seq,
    Annotated[int, Meta(ge=1, le=MAX_CALLS)],
    _Number,
    _Seq,
    _Number,
    _Number,
    _Number,
    _Number,
    _Number,
    bytes | None,
]

# Reading and checking sixteen fields is one call in C; only a frame that is refused is looked at again, for the reason.
_pack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(_Valid).decode
_read_bodies = msgspec.msgpack.Decoder(list[bytes]).decode
_read_requests = msgspec.msgpack.Decoder(list[tuple[_Number, bytes]]).decode
_unpack = msgpack.unpackb
_new = tuple.__new__


class FrameError(Exception):
    """Received frames are not a message of this protocol; ``reason`` is one of a few fixed words for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class VersionMismatch(FrameError):
    """The peer speaks another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__("version", f"peer speaks protocol {theirs}, this process {PROTOCOL_VERSION}")
        self.theirs = theirs


def encode(header: Header, buffers: Buffers = ()) -> list[Any]:
    """Return the frames of a message. Every buffer must be contiguous.

    Args:
        header: The header.
        buffers: Body and buffers that follow it.
    """
    if not buffers:
        return [_pack((PROTOCOL_VERSION, *header, 0, 0, None))]
    body = buffers[0]
    if type(body) is bytes and len(buffers) == 1 and len(body) <= INLINE_BYTES:
        return [_pack((PROTOCOL_VERSION, *header, 0, 0, body))]
    total = 0
    for buffer in buffers:
        total += buffer.nbytes if type(buffer) is memoryview else len(buffer)
    return [_pack((PROTOCOL_VERSION, *header, len(buffers), total, None)), *buffers]


def join_bodies(bodies: Sequence[bytes]) -> bytes:
    """Return the body of a RESULT for several calls: a msgpack array of their bodies, each of one frame."""
    return _pack(bodies)


def split_bodies(buffers: Buffers) -> list[bytes]:
    """Return the bodies that ``join_bodies`` joined.

    Raises:
        FrameError: It is no such body.
    """
    return _read_joined(_read_bodies, buffers, "bodies")


def join_requests(requests: Sequence[tuple[int, Buffer]]) -> bytes:
    """Return the body of a REQ of status JOINED: (budget in ms, body of one frame) of each of its requests."""
    return _pack(requests)


def split_requests(buffers: Buffers) -> list[tuple[int, bytes]]:
    """Return what ``join_requests`` joined.

    Raises:
        FrameError: It is no such body.
    """
    return _read_joined(_read_requests, buffers, "requests")


def _read_joined(read: Callable[[Buffer], T], buffers: Buffers, reason: str) -> T:
    """Return what one frame holds; refuse anything else with ``reason``."""
    try:
        if len(buffers) == 1:
            return read(buffers[0])
    except msgspec.DecodeError:
        pass
    raise FrameError(reason)


def decode_header(frame: Any) -> tuple[Header, int, int, bytes | None]:
    """Return (header, number of frames that follow, their bytes, inline body).

    Raises:
        VersionMismatch: A well-formed header of another version.
        FrameError: Anything else that is not a header.
    """
    try:
        fields = _read(frame) if len(frame) <= MAX_HEADER_BYTES else _fields(frame)
    except msgspec.DecodeError:
        fields = _fields(frame)
    return _new(Header, fields[1:13]), fields[13], fields[14], fields[15]


def _fields(frame: Any) -> tuple[Any, ...]:
    """Return the fields of a header frame, checked one by one, so that a refusal has its reason."""
    if len(frame) > MAX_HEADER_BYTES:
        reason = "header_too_long"
        raise FrameError(reason, f"{len(frame)} bytes")
    try:
        fields = _unpack(frame, use_list=False)
    except Exception as error:  # noqa: BLE001  # msgpack raises many kinds (ValueError, StackError, UnicodeError …)
        reason = "header_not_msgpack"
        raise FrameError(reason, type(error).__name__) from None
    if type(fields) is not tuple or not fields or type(fields[0]) is not int:
        reason = "header_not_array"
        raise FrameError(reason)
    if fields[0] != PROTOCOL_VERSION:
        raise VersionMismatch(fields[0])
    types = tuple(map(type, fields))  # one comparison in C instead of a check per field
    if types not in (_PLAIN, _INLINE):
        reason = "header_fields" if len(fields) != _FIELDS else "header_type"
        raise FrameError(reason, f"{len(fields)} fields")
    (
        _,
        kind,
        session,
        epoch,
        incarnation,
        lane,
        seq,
        calls,
        attempt,
        floor,
        budget,
        status,
        trace,
        frames,
        size,
        _,
    ) = fields
    if epoch | incarnation | seq | calls | attempt | floor | budget | status | trace | frames | size < 0:
        reason = "header_type"
        raise FrameError(reason, "a negative number")
    if not 0 < calls <= MAX_CALLS or seq > _MAX_SEQ or floor > _MAX_SEQ:  # so that no sum of them leaves 64 bits
        reason = "header_range"
        raise FrameError(reason, f"{calls} calls from {seq}")
    if kind not in _KINDS:
        reason = "kind"
        raise FrameError(reason, str(kind)[:32])
    if len(session) != _SESSION_BYTES or len(lane) > _MAX_LANE:
        reason = "header_type"
        raise FrameError(reason, "session" if len(session) != _SESSION_BYTES else "lane")
    return fields


def decode(frames: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
    """Return (header, buffers) of a received multipart message.

    Raises:
        VersionMismatch: Another protocol version.
        FrameError: Not a message, or torn or glued: the frames disagree with the header.
    """
    if len(frames) == 1:  # most messages
        frame = frames[0]
        try:
            fields = _read(frame) if len(frame) <= MAX_HEADER_BYTES else _fields(frame)
        except msgspec.DecodeError:
            fields = _fields(frame)
        if not fields[13] and not fields[14]:
            body = fields[15]
            return _new(Header, fields[1:13]), () if body is None else (body,)
    if not frames:
        reason = "empty"
        raise FrameError(reason)
    header, n_frames, size, inline = decode_header(frames[0])
    if len(frames) - 1 != n_frames:
        reason = "frame_count"
        raise FrameError(reason, f"{len(frames) - 1} frames follow, header says {n_frames}")
    if not n_frames and not size:
        return header, () if inline is None else (inline,)
    if inline is not None:
        reason = "frame_count"
        raise FrameError(reason, "frames follow an inline body")
    buffers = frames[1:]
    total = 0
    for buffer in buffers:
        total += len(buffer)
    if total != size:
        reason = "frame_bytes"
        raise FrameError(reason, f"{total} bytes follow, header says {size}")
    return header, buffers
