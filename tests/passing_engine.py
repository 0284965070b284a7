"""An engine that makes values, passes them on and looks whether they are what they should be."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import zbus
from zbus import AnyOne, Concat, Everywhere, PerRank, Split

HELD = 4
"""How many values an engine holds on to."""


def value(seed: int, rank: int, rows: int, width: int) -> dict[str, Any]:
    """Return what ``rank`` makes of ``seed``: x [rows, width] uint8, ids [rows] int64, texts."""
    rng = np.random.default_rng((seed, rank))
    return {
        "x": rng.integers(0, 256, (rows, width), np.uint8),
        "ids": rng.integers(0, 1 << 40, rows),
        "texts": [f"{seed}.{rank}.{row}" for row in range(rows)],
    }


def turned(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine makes of another's value."""
    return {"x": 255 - batch["x"], "ids": batch["ids"] + 1, "texts": [f"{text}'" for text in batch["texts"]]}


def rows_of(batch: dict[str, Any], chosen: Any) -> dict[str, Any]:
    """Return some rows."""
    texts = batch["texts"][chosen] if isinstance(chosen, slice) else [batch["texts"][row] for row in chosen]
    return {"x": batch["x"][chosen], "ids": batch["ids"][chosen], "texts": texts}


def hash_of(batch: dict[str, Any]) -> str:
    """Return a hash of all that is in a value."""
    made = hashlib.blake2b(digest_size=12)
    for name in ("x", "ids"):
        made.update(repr(batch[name].shape).encode())
        made.update(np.ascontiguousarray(batch[name]).data)
    made.update("\0".join(batch["texts"]).encode())
    return made.hexdigest()


def belongings(places: Iterable[Path]) -> tuple[int, int, list[str]]:
    """Return how many descriptors and threads this process has, and what it has of shared memory that is gone.

    Descriptors of shared memory in use are not counted: there is one for each slot that was ever read.
    """
    roots, others, dead = tuple(map(str, places)), 0, []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(entry.readlink())
            if not target.startswith(roots):
                others += 1
            elif target.endswith(" (deleted)") and (nbytes := 512 * entry.stat().st_blocks):
                dead.append(f"{target}: {nbytes} bytes")
    return others, threading.active_count(), dead


class Passer(zbus.Engine):
    """Makes, keeps, takes and passes on; holds what it took last, and says so when that has changed."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.held: deque[tuple[dict[str, Any], str]] = deque()
        self.changed: list[str] = []

    def _hold(self, batch: dict[str, Any]) -> str:
        """Return the hash of a value, and look at one that was held for a while."""
        found = hash_of(batch)
        self.held.append((batch, found))
        if len(self.held) > HELD:
            self._look(*self.held.popleft())
        return found

    def _look(self, batch: dict[str, Any], was: str) -> None:
        if (now := hash_of(batch)) != was:
            self.changed.append(f"{batch['texts'][:1]} was {was}, is {now}")

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", keep=True)
    def make(self, seed: int, rows: int, width: int) -> Any:
        return value(seed, self.ctx.rank, rows, width)

    @zbus.endpoint(AnyOne(), effect="pure", keep=True)
    async def anywhere(self, what: list[int]) -> Any:
        seed, rows, width = what
        return value(seed, 0, rows, width)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def put(self, seed: int, rows: int, width: int) -> Any:
        return {"ref": self.ctx.put(value(seed, self.ctx.rank, rows, width))}

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def see(self, batch: Any) -> str:
        return self._hold(batch)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", lane="aside", concurrency=4)
    async def see_aside(self, batch: Any) -> str:
        return hash_of(batch)

    @zbus.endpoint(Split("dp"), collect=PerRank(), effect="pure")
    def see_share(self, batch: Any) -> str:
        return self._hold(batch)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", keep=True)
    def turn(self, batch: Any) -> Any:
        return turned(batch)

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure", keep=True)
    def turn_share(self, batch: Any) -> Any:
        return turned(batch)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def let_go(self) -> list[str]:
        """Look at all that is held, hold nothing any more, and return what has changed since it was taken."""
        while self.held:
            self._look(*self.held.popleft())
        return self.changed

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def belongings(self, places: list[str]) -> tuple[int, int, list[str]]:
        return belongings(map(Path, places))
