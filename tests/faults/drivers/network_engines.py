"""An engine whose side effects are counted: one word per call in a file that every rank appends to."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any

import zbus
from zbus import AnyOne, Everywhere, PerRank


class Counting(zbus.Engine):
    """Appends the name of each call to a file, by one write: the ground truth of what ran."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = 0

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx

    def _note(self, word: str) -> None:
        os.write(self._file, f"{word}\n".encode())

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def add(self, word: str, seconds: float = 0.0) -> int:
        self._note(word)
        if seconds:
            time.sleep(seconds)
        self._calls += 1
        return self._calls

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def mirror(self, word: str, payload: bytes) -> bytes:
        self._note(word)
        return payload

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def weigh(self, word: str, array: Any) -> tuple[int, int]:
        """Return the size and a checksum of an array."""
        import zlib

        self._note(word)
        return array.nbytes, zlib.crc32(array)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def give(self, nbytes: int) -> Any:
        """Return an array."""
        import numpy as np

        return (np.arange(nbytes >> 3) * 7).view(np.uint8)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def who(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "start": self.ctx.start}

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=4)
    async def count(self, word: str, upto: int) -> AsyncIterator[int]:
        self._note(word)
        for number in range(upto):
            yield number

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def backtrack(self, word: str, letters: int) -> int:
        """Hold the GIL: a regular expression that backtracks; each letter more doubles the time."""
        import re

        self._note(word)
        assert re.match(r"(a|a)*b", "a" * letters) is None
        return letters
