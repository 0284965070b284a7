"""ZMTP 3 on a byte stream: greeting, frames, messages: what a proxy must know to cut at the seams."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from zbus.protocol import frames as headers
from zbus.protocol.messages import Header, Kind

__all__ = ["GREETING_BYTES", "MANGLED", "Message", "frame_of", "read_message"]

GREETING_BYTES: Final = 64
"""Size of the greeting that either side sends first."""

MANGLED: Final = b"\x02\x7f" + b"\xff" * 7
"""Start of a frame that claims eight exabytes: no peer goes on with a connection on which it comes."""

_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4


class Message(NamedTuple):
    """One whole message as it stood on the wire, or one ZMTP command (handshake, ping, pong).

    Attributes:
        raw: All its bytes, frame headers included.
        header: The zbus header; None for a command, and where the payload is not readable (encrypted, or foreign).
        command: Whether it is a ZMTP command.
    """

    raw: bytes
    header: Header | None
    command: bool

    @property
    def kind(self) -> Kind | None:
        """Kind of the zbus message, or None."""
        return None if self.header is None else Kind(self.header.kind)

    @property
    def lane(self) -> str:
        """Lane of the zbus message, or empty."""
        return "" if self.header is None else self.header.lane


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Read the next message or command. In the event loop that owns ``reader``.

    Raises:
        asyncio.IncompleteReadError: The stream ended.
        OSError: The connection broke.
    """
    raw: list[bytes] = []
    first = b""
    while True:
        flags = await reader.readexactly(1)
        length = await reader.readexactly(8 if flags[0] & _LONG else 1)
        body = await reader.readexactly(int.from_bytes(length, "big"))
        if not raw:
            first = body
        raw += (flags, length, body)
        if not flags[0] & _MORE:
            break
    command = bool(flags[0] & _COMMAND)
    return Message(b"".join(raw), None if command else _header(first), command)


def frame_of(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """Return one frame as bytes on the wire."""
    flags = (_MORE if more else 0) | (_COMMAND if command else 0)
    if len(body) > 255:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def _header(first: bytes) -> Header | None:
    try:
        return headers.decode_header(first)[0]
    except headers.FrameError:
        return None
