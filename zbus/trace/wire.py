"""What processes and the sidecar say to each other: one msgpack frame, then a payload where there is one.

From a process: ``Open``, ``Data`` (payload: a block), ``Ping``, ``End``; from a viewer: ``Query``. From the sidecar:
``Opened``, ``Ack``, ``Pong``, ``Ended``, ``Unknown``, ``State`` (payload: JSON).
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any, Final

import msgspec

__all__ = [
    "LINES",
    "RAW",
    "Ack",
    "Data",
    "End",
    "Ended",
    "FromSidecar",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "Query",
    "SidecarRecord",
    "State",
    "ToSidecar",
    "Unknown",
    "decode_from_sidecar",
    "decode_to_sidecar",
    "encode",
    "frame",
    "read_frame",
]

RAW: Final = 0
"""A block's payload is msgpack records."""
LINES: Final = 1
"""A block's payload is finished lines, as when it comes from a spill file."""


class Open(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A process introduces its stream; ``facts`` are the args of its ``zbus_meta``."""

    source: str
    facts: dict[str, Any]
    file: tuple[int, int]
    """Device and inode of the file the process began; the sidecar continues it where it sees the same."""
    fork: int = 0
    """Process id of a forked child, whose file is named after it; else 0."""


class Data(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """One block."""

    source: str
    seq: int
    records: int
    form: int = RAW


class Ping(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A clock sample begins: the asker's clock."""

    t1: int


class End(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The stream ended in order: all its blocks are acknowledged. ``event`` is its closing line, block ``seq``."""

    source: str
    seq: int
    event: bytes


class Query(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A viewer asks for what is new since a step number it knows."""

    since: int = -1


class Opened(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The sidecar knows the stream."""

    source: str


class Ack(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The block is safe (``ok``), or the sidecar could not store it."""

    source: str
    seq: int
    ok: bool = True


class Pong(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A clock sample: the asker's clock, ours on arrival, ours on leaving; and whose clock ours is."""

    t1: int
    t2: int
    t3: int
    boot_id: str
    time_ns: int


class Ended(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The end of the stream is stored."""

    source: str


class Unknown(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The sidecar does not know the stream (it was restarted): introduce it again."""

    source: str


class State(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The answer to a query; its payload is JSON."""


ToSidecar = Open | Data | Ping | End | Query
FromSidecar = Opened | Ack | Pong | Ended | Unknown | State

_encoder: Final = msgspec.msgpack.Encoder()
_to_sidecar: Final = msgspec.msgpack.Decoder(ToSidecar)
_from_sidecar: Final = msgspec.msgpack.Decoder(FromSidecar)


class SidecarRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Where a trial's sidecar listens: the registry record ``trace/sidecar`` (JSON)."""

    endpoints: list[str]
    host: str = ""
    pid: int = 0
    boot_id: str = ""
    time_ns: int = 0


def encode(message: ToSidecar | FromSidecar) -> bytes:
    """Return a message as a frame."""
    return _encoder.encode(message)


def decode_to_sidecar(data: bytes | memoryview) -> ToSidecar:
    """Return what a process said.

    Raises:
        msgspec.DecodeError: These bytes say nothing.
    """
    message: ToSidecar = _to_sidecar.decode(data)
    return message


def decode_from_sidecar(data: bytes | memoryview) -> FromSidecar:
    """Return what the sidecar said.

    Raises:
        msgspec.DecodeError: These bytes say nothing.
    """
    message: FromSidecar = _from_sidecar.decode(data)
    return message


# -- frames of the spool -------------------------------------------------------------------------------------------

_HEAD: Final = struct.Struct("<III")  # bytes of the message, bytes of the payload, crc32 of both
_MAX: Final = 1 << 28


def frame(message: bytes, payload: bytes | memoryview) -> bytes:
    """Return one spool frame."""
    crc = zlib.crc32(payload, zlib.crc32(message))
    return b"".join((_HEAD.pack(len(message), len(payload), crc), message, payload))


def read_frame(fd: int, at: int) -> tuple[bytes, bytes, int] | None:
    """Return (message, payload, end) of the frame at offset ``at`` of a file; None if it is not whole or not right.

    Raises:
        OSError: The file cannot be read.
    """
    start = os.pread(fd, _HEAD.size, at)
    if len(start) < _HEAD.size:
        return None
    head, body, crc = _HEAD.unpack(start)
    if head > _MAX or body > _MAX:
        return None
    data = os.pread(fd, head + body, at + _HEAD.size)
    if len(data) < head + body or zlib.crc32(data) != crc:
        return None
    return data[:head], data[head:], at + _HEAD.size + head + body
