"""Files for large replies that memory has no room for, until their callers have them."""

from __future__ import annotations

import logging
import tempfile
from typing import IO, Final, NamedTuple

from zbus.protocol.messages import Buffer, Buffers

__all__ = ["SHELF_BYTES", "ReplyShelf"]

log = logging.getLogger("zbus.replies")

SHELF_BYTES: Final = 4 << 30
"""Most bytes on a worker's shelf."""


_BYTES: Final = frozenset((bytes, bytearray, memoryview))


class _Token(NamedTuple):
    """Where a reply is.

    Attributes:
        file: Its frames one after the other, but for those that only name an array.
        sizes: Bytes of each frame in the file.
        named: The frames that name an array, and None for the others. As long as such a frame is kept, so is the array.
    """

    file: IO[bytes]
    sizes: tuple[int, ...]
    named: tuple[Buffer | None, ...]


class ReplyShelf:
    """Keeps each reply in a file without a name: it is gone with this process, however that ends.

    Not thread-safe: guard it with the owner's lock. Writes and reads block on the disk.

    Args:
        folder: Where the files are; None: the system's folder for temporary files.
        limit: Most bytes in all.
    """

    def __init__(self, folder: str | None = None, *, limit: int = SHELF_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self.nbytes = 0
        self._tokens: set[_Token] = set()

    def put(self, buffers: Buffers) -> _Token | None:
        """Keep a reply and return a token for it; None if the shelf or its disk is full."""
        named = tuple(None if type(buffer) in _BYTES else buffer for buffer in buffers)
        sizes = tuple(
            memoryview(buffer).nbytes if name is None else 0 for buffer, name in zip(buffers, named, strict=True)
        )
        nbytes = sum(sizes)
        if self.nbytes + nbytes > self._limit:
            return None
        try:
            file = tempfile.TemporaryFile(prefix="zbus-reply-", dir=self._folder)  # noqa: SIM115  # kept open by its token
        except OSError as error:
            log.warning("a reply of %d bytes is not kept: %s", nbytes, error)
            return None
        try:
            for buffer, name in zip(buffers, named, strict=True):
                if name is None:
                    file.write(buffer)
            file.flush()
        except OSError as error:
            log.warning("a reply of %d bytes is not kept: %s", nbytes, error)
            _close(file)
            return None
        self.nbytes += nbytes
        token = _Token(file, sizes, named)
        self._tokens.add(token)
        return token

    def get(self, token: object) -> Buffers | None:
        """Return what was kept; None if it cannot be read."""
        assert isinstance(token, _Token)  # noqa: S101  # nobody else makes them
        try:
            token.file.seek(0)
            parts = [token.file.read(size) for size in token.sizes]
        except OSError as error:
            log.warning("a kept reply cannot be read: %s", error)
            return None
        if tuple(map(len, parts)) != token.sizes:
            return None
        return [part if name is None else name for part, name in zip(parts, token.named, strict=True)]

    def drop(self, token: object) -> None:
        """Forget it; its space is free."""
        assert isinstance(token, _Token)  # noqa: S101  # as above
        self._tokens.remove(token)
        self.nbytes -= sum(token.sizes)
        _close(token.file)

    def close(self) -> None:
        """Forget everything."""
        for token in tuple(self._tokens):
            self.drop(token)


def _close(file: IO[bytes]) -> None:
    try:
        file.close()
    except OSError:  # what could not be written cannot be flushed now either: the space is free all the same
        return
