"""What one encoded value may weigh. Both directions hold the same limits, so a caller learns of an excess first."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["DEFAULT_LIMITS", "INLINE_BELOW", "Limits"]

INLINE_BELOW: Final = 512
"""Arrays of fewer bytes travel inside the body: a frame of its own costs more than the copy."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds that are checked before anything of that size is allocated.

    Attributes:
        depth: Nesting of containers: a scalar is 0, ``[]`` is 1, ``[[]]`` is 2. At most 200 (the packer's own bound).
        items: Entries of one list, tuple, set or dict.
        body_bytes: The first frame.
        buffers: Number of frames after the body.
        buffer_bytes: Sum of the frames after the body.
        arrays: Whether numpy's and torch's values are accepted. A process that must not import either says False, or
            a message could make it.
    """

    depth: int = 64
    items: int = 16_777_216
    body_bytes: int = 268_435_456
    buffers: int = 65_536
    buffer_bytes: int = 1 << 38
    arrays: bool = True

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be held.

        Raises:
            ValueError: ``depth`` is outside 1..200, or another bound is negative.
        """
        if not 1 <= self.depth <= 200:  # every level costs at most two of msgpack's 511
            msg = f"depth {self.depth} is outside 1..200"
            raise ValueError(msg)
        if min(self.items, self.body_bytes, self.buffers, self.buffer_bytes) < 0:
            msg = "a limit is negative"
            raise ValueError(msg)


DEFAULT_LIMITS: Final = Limits()
