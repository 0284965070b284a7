"""An engine that keeps what it makes, and takes what others keep."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import zbus
from array_engine import digest
from zbus import AnyOne, Concat, Everywhere, PerRank, Split


class Keeper(zbus.Engine):
    """Makes, keeps, takes and measures batches."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.runs: dict[str, int] = {}

    def _ran(self, name: str) -> None:
        self.runs[name] = self.runs.get(name, 0) + 1

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def make(self, rows: int, width: int, seed: int = 0) -> dict[str, Any]:
        """Return a batch: ids [rows, width] int64, lengths [rows]."""
        rng = np.random.default_rng(seed + self.ctx.rank)
        return {
            "ids": rng.integers(0, 1000, (rows, width)),
            "lengths": rng.integers(1, width + 1, rows),
            "texts": [f"{self.ctx.rank}.{row}" for row in range(rows)],
        }

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", keep=True)
    def rollout(self, rows: int, width: int, seed: int = 0) -> dict[str, Any]:
        return self.make(rows, width, seed)

    @zbus.endpoint(AnyOne(), effect="pure", keep=True)
    async def later(self, nbytes: int) -> Any:
        return np.full(nbytes, 7, np.uint8)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def digest(self, batch: Any) -> Any:
        """Return what stands for the value: nested as it came, each array by its hash."""
        self._ran("digest")
        return _digests(batch)

    @zbus.endpoint(Split("dp"), collect=PerRank(), effect="pure")
    def share(self, batch: Any) -> Any:
        """Return the share of this rank as it came."""
        return {key: np.array(column) if hasattr(column, "shape") else column for key, column in batch.items()}

    @zbus.endpoint(Split("dp", by="tokens"), collect=PerRank(), effect="pure")
    def tokens(self, batch: Any) -> tuple[int, list[str]]:
        return int(batch["lengths"].sum()), batch["texts"]

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure", keep=True)
    def double(self, batch: Any) -> Any:
        return {"ids": batch["ids"] * 2, "texts": batch["texts"]}

    @zbus.endpoint(Split("dp", by="tokens"), collect=Concat(), effect="pure", keep=True)
    def balance(self, batch: Any) -> Any:
        return batch

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def put(self, nbytes: int) -> Any:
        return {"ref": self.ctx.put(np.full(nbytes, self.ctx.rank, np.uint8)), "rank": self.ctx.rank}

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def put_once(self, nbytes: int) -> Any:
        """Return the same handle each time."""
        self.once = getattr(self, "once", None) or self.ctx.put(np.full(nbytes, self.ctx.rank, np.uint8))
        return self.once

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def blob(self, rows: int, width: int) -> Any:
        """Return uint8 [rows, width], each row full of its number; made where it is lent from."""
        made = self.ctx.empty((rows, width), np.uint8)
        made[:] = np.arange(rows, dtype=np.uint8)[:, None]
        return made

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def corners(self, blob: Any) -> list[int]:
        """Return what tells a blob: its first and last value, and its shape."""
        return [int(blob[0, 0]), int(blob[-1, -1]), *blob.shape]

    @zbus.endpoint(Split("dp"), collect=PerRank(), effect="pure")
    def parts(self, blob: Any) -> list[int]:
        return self.corners(blob)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", lane="aside", concurrency=4)
    async def digest_aside(self, batch: Any) -> Any:
        """As ``digest``, on the event loop."""
        return _digests(batch)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def count(self, name: str) -> int:
        return self.runs.get(name, 0)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _digests(value: Any) -> Any:
    if hasattr(value, "shape"):
        return digest(value)
    if isinstance(value, dict):
        return {key: _digests(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_digests, value))
    return value
