"""What travels in place of an array that its reader has to pull: a short frame that names it.

====== ====== =====================================================================
offset type   meaning
====== ====== =====================================================================
0      4s     ``zblk``
4      u32    0
8      16s    key under which it is offered
24     u64    bytes of the array
====== ====== =====================================================================

Little endian, 32 bytes. The codec never makes a buffer frame that short, and ``lease`` has other lengths and letters.
Where it is pulled from the frame does not say: each side asks only at the addresses that its peer named in the
handshake.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, Final, Self

from zbus.protocol.messages import Buffer
from zbus.protocol.parts import KEY_BYTES

__all__ = ["Offer", "is_offer", "read_offer"]

_LAYOUT: Final = struct.Struct("<4sI16sQ")
_MAGIC: Final = b"zblk"


class Offer(bytes):
    """The frame, on its owner's side. Whoever may send it again keeps it; with the last of them, it is withdrawn.

    Attributes:
        key: Under which the bytes are offered.
        buffer: The bytes.
        nbytes: How many.
    """

    key: bytes
    buffer: memoryview
    nbytes: int
    _ended: Callable[[Offer], None]

    def __new__(cls, buffer: memoryview, ended: Callable[[Offer], None]) -> Self:
        """Make the frame of contiguous bytes; ``ended`` is told, from any thread, when nobody keeps it."""
        key = os.urandom(KEY_BYTES)
        made = super().__new__(cls, _LAYOUT.pack(_MAGIC, 0, key, buffer.nbytes))
        made.key, made.buffer, made.nbytes, made._ended = key, buffer, buffer.nbytes, ended
        return made

    def __del__(self) -> None:
        self._ended(self)

    def __reduce__(self) -> Any:
        msg = "an offer stays in its process"
        raise TypeError(msg)


def is_offer(frame: Buffer) -> bool:
    """Tell whether a received buffer names an array to pull instead of holding one."""
    return len(frame) == _LAYOUT.size and frame[:4] == _MAGIC


def read_offer(frame: Buffer) -> tuple[bytes, int]:
    """Return the key and the size that a frame names."""
    _, _, key, nbytes = _LAYOUT.unpack(bytes(frame))
    return key, nbytes
