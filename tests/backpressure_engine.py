"""An engine for tests of back-pressure: generators without end that count what they make, and a slow endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import zbus
from zbus import AnyOne


class Source(zbus.Engine):
    """Counts items made and generators ended."""

    def __init__(self) -> None:
        self.items = 0
        self.ends = 0

    @zbus.endpoint(effect="pure", lane="look")
    def made(self) -> int:
        return self.items

    @zbus.endpoint(effect="pure", lane="look")
    def ended(self) -> int:
        return self.ends

    @zbus.endpoint(effect="pure", lane="look")
    def echo(self, value: object) -> object:
        return value

    @zbus.endpoint(AnyOne(), lane="async")
    async def numbers(self) -> AsyncIterator[int]:
        try:
            number = 0
            while True:
                self.items += 1
                yield number
                number += 1
                await asyncio.sleep(0)
        finally:
            self.ends += 1

    @zbus.endpoint(AnyOne(), lane="sync")
    def numbers_sync(self) -> Iterator[int]:
        try:
            number = 0
            while True:
                self.items += 1
                yield number
                number += 1
        finally:
            self.ends += 1

    @zbus.endpoint(AnyOne(), lane="sync")
    def blobs(self, count: int, size: int) -> Iterator[bytes]:
        for _ in range(count):
            self.items += 1
            yield bytes(size)

    @zbus.endpoint(AnyOne(), lane="sync")
    def count(self, count: int) -> Iterator[int]:
        yield from range(count)

    @zbus.endpoint(lane="slow")
    def swallow(self, payload: bytes, gate: str = "") -> int:
        """Take it; with a ``gate``, once that file is there."""
        self.items += 1
        while gate and not Path(gate).exists():
            time.sleep(0.005)
        return len(payload)

    @zbus.endpoint(effect="pure", lane="bulk")
    def blob(self, size: int) -> bytes:
        return bytes(size)
