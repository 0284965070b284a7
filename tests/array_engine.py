"""An engine that takes, keeps, makes and changes arrays."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zbus
from zbus import AnyOne, Concat, Everywhere, PerRank, Reduce, Split


def digest(array: Any) -> str:
    """Return a hash of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).hexdigest()


class Arrays(zbus.Engine):
    """Does with arrays what engines do."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.rank, self.start = ctx.rank, ctx.start
        self.kept: list[Any] = []

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def digest(self, array: Any) -> str:
        return digest(array)

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure")
    def double(self, array: Any) -> Any:
        return array * 2

    @zbus.endpoint(Split("dp", by="tokens"), collect=Concat(), effect="pure")
    def same(self, batch: Any) -> Any:
        return batch

    @zbus.endpoint(Split("dp"), collect=Reduce("mean", by="items"), effect="pure")
    def mean(self, array: Any) -> Any:
        return {"all": float(array.mean()), "columns": array.mean(axis=0)} if len(array) else None

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def make(self, nbytes: int, seed: int) -> Any:
        return np.random.default_rng(seed + self.rank).integers(0, 256, nbytes, np.uint8)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def fill(self, nbytes: int, value: int) -> Any:
        made = self.ctx.empty(nbytes, np.uint8)
        made[:] = value
        return made

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def keep(self, array: Any) -> int:
        self.kept.append(array)
        return len(self.kept)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def kept_digests(self) -> list[str]:
        return [digest(array) for array in self.kept]

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def drop(self) -> None:
        self.kept.clear()

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def change(self, array: Any) -> Any:
        array += 1
        return array

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def refuse(self, array: Any) -> None:
        raise ValueError(len(array))

    @zbus.endpoint(AnyOne(), effect="pure")
    def refuse_one(self, array: Any) -> None:
        raise ValueError(len(array))

    @zbus.endpoint(AnyOne(), effect="pure")
    def items(self, count: int, nbytes: int) -> Iterator[Any]:
        for number in range(count):
            yield np.full(nbytes, number, np.uint8)

    @zbus.endpoint(AnyOne(), effect="pure")
    def growing(self, count: int, nbytes: int) -> Iterator[Any]:
        for number in range(count):
            yield np.full(nbytes * (1 + number % 6), number, np.uint8)

    @zbus.endpoint(AnyOne(), lane="beside", concurrency=16)
    async def order(self, number: int, array: Any) -> int:
        """Return how many began before."""
        self.begun = getattr(self, "begun", -1) + 1
        return self.begun

    @zbus.endpoint(AnyOne(), effect="pure")
    def digest_or_die(self, array: Any, marker: str) -> tuple[int, int, str]:
        """Die while reading, the first time anybody is asked."""
        found = digest(array)
        if not Path(marker).exists():
            Path(marker).write_text(found)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank, self.start, found
