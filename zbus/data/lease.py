"""What travels in place of an array: a short frame that names a slot, and keeps it for as long as it is kept itself.

====== ====== =====================================================================
offset type   meaning
====== ====== =====================================================================
0      4s     ``zshm``
4      u32    row of the slot
8      u64    birth: which file of that row
16     u64    generation: which lending
24     u64    where the array begins in the slot, bytes
32     u64    bytes of the array
====== ====== =====================================================================

Little endian, 40 bytes. The codec never makes a buffer frame that short (smaller arrays stand in the body), so a frame
of this length is one of these or an error. Whose slot it is, the frame does not say: each side opens only what its peer
named in the handshake.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Self

from zbus.protocol.messages import Buffer

if TYPE_CHECKING:
    from zbus.data.arena import Arena

__all__ = ["DESCRIPTOR", "MAGIC", "SHARED_FROM", "Lease", "is_descriptor"]

DESCRIPTOR: Final = struct.Struct("<4sIQQQQ")
MAGIC: Final = b"zshm"
SHARED_FROM: Final = 1 << 16
"""Bytes from which an array goes through shared memory; below, frames are as quick."""


_NBYTES: Final = DESCRIPTOR.size


def is_descriptor(frame: Buffer) -> bool:
    """Tell whether a received buffer names a slot instead of holding an array."""
    return len(frame) == _NBYTES and frame[:4] == MAGIC


class Lease(bytes):
    """The frame, on its owner's side. Whoever may send it again keeps it; with the last one, the lease ends."""

    arena: Arena
    row: int
    generation: int
    offset: int
    nbytes: int

    def __new__(cls, arena: Arena, row: int, birth: int, generation: int, offset: int, nbytes: int) -> Self:
        """Make the frame that names ``nbytes`` of a slot from ``offset`` on."""
        made = super().__new__(cls, DESCRIPTOR.pack(MAGIC, row, birth, generation, offset, nbytes))
        made.arena, made.row, made.generation, made.offset, made.nbytes = arena, row, generation, offset, nbytes
        return made

    def __del__(self) -> None:
        self.arena.dropped(self.row, self.generation)

    def __reduce__(self) -> Any:
        msg = "a lease stays in its process"
        raise TypeError(msg)
