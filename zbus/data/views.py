"""Arrays over mapped memory that keep something else alive for as long as any view of them lives."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from zbus.codec.decoder import Lender
from zbus.protocol.messages import Buffer

__all__ = ["Shown", "keeping"]


def keeping(memory: mmap.mmap, nbytes: int, keeps: object, offset: int = 0) -> np.ndarray[Any, Any]:
    """Return bytes of mapped memory as an array that keeps an object alive, and so do all views of it.

    It must stand directly on the mapping: numpy takes arrays of its own class out of the chain of bases of a view, and
    with one in between it would take this out too.
    """
    made = _Keeping((nbytes,), np.uint8, memory, offset)
    made.keeps = keeps
    return made


class Shown(np.ndarray[Any, Any], Lender):
    """Bytes of this process's own that are kept for others, read in place; see ``zbus.codec.decoder.Lender``."""

    @classmethod
    def of(cls, buffer: Buffer) -> memoryview:
        """Return memory to decode: arrays in it are read-only and uncopied."""
        return np.frombuffer(buffer, np.uint8).view(cls).data.toreadonly()

    def private(self) -> memoryview:
        """Return a copy."""
        return memoryview(bytearray(self))


class _Keeping(np.ndarray[Any, Any]):
    keeps: object = None
