r"""The bytes of a record file: one header line, then the value.

::

    zbus-record 1 00000123 89abcdef\n
    <value: exactly so many bytes>

Magic, format version, length of the value in decimal, CRC-32 of the value in hex, one newline. The value of zbus's own
records is one JSON object, so the file can be read with ``tail -n +2``.
"""

from __future__ import annotations

import zlib
from typing import Final

from zbus.registry.fs import FileInfo

__all__ = ["MAX_FILE_BYTES", "NotARecord", "pack", "unpack"]

MAX_FILE_BYTES: Final = 65_536
"""A larger file is not read at all."""

_MAGIC: Final = b"zbus-record 1 "
_HEADER_BYTES: Final = len(_MAGIC) + 8 + 1 + 8 + 1


class NotARecord(Exception):
    """Why a file is not a record, in a few words. Internal: becomes a line of junk or a ``JunkRecord``."""


def pack(value: bytes) -> bytes:
    """Return the file content of a value."""
    return b"%s%08d %08x\n%s" % (_MAGIC, len(value), zlib.crc32(value), value)


def unpack(info: FileInfo, data: bytes) -> bytes:
    """Return the value in a file.

    Raises:
        NotARecord: Not a regular file, another user's, too large, empty, foreign, torn, or its checksum differs.
    """
    if not info.regular:
        reason = "not a regular file"
    elif not info.trusted:
        reason = "owned or writable by another user"
    elif info.size > MAX_FILE_BYTES:
        reason = f"too large ({info.size:,} bytes)"
    elif not data:
        reason = "empty"
    elif not data.startswith(_MAGIC):
        reason = "another format version" if data.startswith(_MAGIC.split()[0]) else "not a zbus record"
    else:
        value = data[_HEADER_BYTES:]
        if pack(value)[:_HEADER_BYTES] == data[:_HEADER_BYTES]:
            return value
        reason = "torn or damaged (length or checksum differs)"
    raise NotARecord(reason)
