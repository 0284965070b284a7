"""The byte layout of what passes between two ``data`` sockets: ranges of large buffers, asked for and given.

A message is one header of 64 bytes; a PART has the bytes of its range as a second frame. Little endian:

====== ====== ==========================================================================================
offset type   meaning
====== ====== ==========================================================================================
0      2s     ``zp``
2      u8     version, 1
3      u8     kind: 1 ASK, 2 PART, 3 REFUSED
4      u32    buffer: which of those that are offered under the key
8      u64    serial: the asker's number of this ASK; the answer repeats it
16     u64    offset of the range in the buffer
24     u64    bytes of the range, at most ``MAX_RANGE``
32     u64    bytes of the whole buffer, as the asker was told
40     16s    key
56     u32    status: why it is refused (``Status``), else 0
60     u32    0
====== ====== ==========================================================================================

Answers repeat all fields of the ASK. Whoever owns the buffers keeps no state of who asked for what: each ASK is
answered by itself, so losing one, doubling one or asking again is harmless.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

__all__ = ["HEADER_BYTES", "KEY_BYTES", "MAX_RANGE", "Kind", "PartError", "PartHeader", "Status", "pack", "unpack"]

KEY_BYTES: Final = 16
MAX_RANGE: Final = 4 << 20
"""Most bytes of one range: what one message may hold up others for."""

_LAYOUT: Final = struct.Struct("<2sBBIQQQQ16sII")
HEADER_BYTES: Final = _LAYOUT.size
_MAGIC: Final = b"zp"
_VERSION: Final = 1
_MOST: Final = 1 << 62


class Kind(enum.IntEnum):
    """What a message is; numbers are wire format."""

    ASK = 1
    PART = 2
    REFUSED = 3


class Status(enum.IntEnum):
    """Why an ASK is refused; numbers are wire format."""

    NONE = 0
    UNKNOWN_KEY = 1
    UNKNOWN_BUFFER = 2
    OUT_OF_RANGE = 3
    OTHER_SIZE = 4
    TOO_MUCH = 5


class PartHeader(NamedTuple):
    """The fields of a header; see the module docstring."""

    kind: Kind
    buffer: int
    serial: int
    offset: int
    nbytes: int
    total: int
    key: bytes
    status: Status = Status.NONE


class PartError(Exception):
    """A frame is no header of this protocol; ``reason`` is one of a few fixed words for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def pack(header: PartHeader) -> bytes:
    """Return the header's frame."""
    kind, buffer, serial, offset, nbytes, total, key, status = header
    return _LAYOUT.pack(_MAGIC, _VERSION, kind, buffer, serial, offset, nbytes, total, key, status, 0)


def unpack(frame: bytes) -> PartHeader:
    """Return the fields of a header's frame.

    Raises:
        PartError: It is none, or of another version.
    """
    if len(frame) != HEADER_BYTES or frame[:2] != _MAGIC:
        reason = "no_part"
        raise PartError(reason)
    _, version, kind, buffer, serial, offset, nbytes, total, key, status, _ = _LAYOUT.unpack(frame)
    if version != _VERSION:
        reason = "part_version"
        raise PartError(reason)
    try:
        header = PartHeader(Kind(kind), buffer, serial, offset, nbytes, total, key, Status(status))
    except ValueError:
        reason = "part_kind"
        raise PartError(reason) from None
    if max(serial, offset, nbytes, total) > _MOST:  # so that no sum of them leaves 64 bits
        reason = "part_range"
        raise PartError(reason)
    return header
