"""Until when an agent's lease is held, in memory that its ranks share: they read it without disk, lock or system call.

Both sides are on one host and read one monotonic clock. The word is written before the lease counts for less than
others may think: from the moment the renewal was asked for, and for 0.8 of its time (``registry.lease``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final, Self

__all__ = ["LeaseWord"]

_SIZE: Final = 8
_NEVER: Final = (1 << 63) - 1


class LeaseWord:
    """One 64-bit time. ``hold_until`` belongs to the agent, on one thread; ``until`` may be read anywhere.

    Args:
        fd: Descriptor of the memory; this object owns it from now on.
        writable: Whether this is the agent's side.
    """

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self._fd = fd
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, _SIZE, access=access)
        self._word = memoryview(self._map).cast("q")

    @classmethod
    def make(cls) -> Self:
        """Make the agent's side; until something is said, the lease counts as held.

        Raises:
            OSError: No descriptor is left.
        """
        fd = os.memfd_create("zbus-lease", os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        made = cls(fd, writable=True)
        made.hold_until(_NEVER)
        return made

    def fileno(self) -> int:
        """Return the descriptor, to be passed to ranks."""
        return self._fd

    def hold_until(self, when_ns: int) -> None:
        """Say until when (monotonic ns) the lease is held. One store: a reader sees the old time or the new one."""
        self._word[0] = when_ns

    def until(self) -> int:
        """Return until when the lease is held, in monotonic ns."""
        return self._word[0]

    def close(self) -> None:
        """Let go of the memory. Not while another thread reads it."""
        self._word.release()
        self._map.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)
