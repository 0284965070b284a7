"""An engine for tests of delivery: starts together, stops when asked, runs again, and keeps a ground truth on disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import zbus
from zbus import AnyOne, Everywhere, PerRank


class Delivery(zbus.Engine):
    """Writes a line to ``truth`` for each start and end of a call."""

    def __init__(self, truth: str) -> None:
        self.truth = truth

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx

    def recover(self, ctx: zbus.Context) -> None:
        self.ctx = ctx

    def note(self, what: str, word: str) -> None:
        """Append one line in one write."""
        line = f"{word} {what} {self.ctx.rank}.{self.ctx.start}\n"
        fd = os.open(self.truth, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line.encode())
        os.close(fd)

    @zbus.endpoint(Everywhere(), collect=PerRank(), start="together")
    def together(self, what: str) -> int:
        self.note(what, "began")
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def pid(self) -> int:
        return os.getpid()

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def each(self, what: str) -> int:
        self.note(what, "began")
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def hold(self, what: str, gate: str) -> str:
        """Run until the file ``gate`` is there."""
        self.note(what, "began")
        while not Path(gate).exists():
            time.sleep(0.005)
        self.note(what, "ended")
        return what

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def work(self, what: str) -> str:
        """Go on until told to stop."""
        self.note(what, "began")
        try:
            while True:
                time.sleep(0.005)
                zbus.checkpoint()
        finally:
            self.note(what, "ended")

    @zbus.endpoint(AnyOne(), lane="aside", concurrency=2)
    async def wait(self, what: str) -> str:
        self.note(what, "began")
        try:
            await asyncio.sleep(1000)
        finally:
            self.note(what, "ended")
        return what

    @zbus.endpoint(AnyOne(), lane="aside")
    def beside(self, what: str) -> str:
        """Run on a thread of an async lane until told to stop."""
        return self.work(what)

    @zbus.endpoint(AnyOne(), lane="aside")
    async def numbers(self) -> AsyncIterator[int]:
        number = 0
        while True:
            yield number
            number += 1
            await asyncio.sleep(0)

    @zbus.endpoint(AnyOne(), lane="stream")
    def items(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    @zbus.endpoint(AnyOne(), effect="pure", lane="pure")
    def pure(self, what: str, seconds: float = 0.0) -> int:
        self.note(what, "began")
        time.sleep(seconds)
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent", lane="again")
    def again(self, what: str, die_at: str = "") -> str:
        """Die by SIGKILL if this is the start to die at; ``*`` for each."""
        self.note(what, "began")
        if die_at in ("*", f"{self.ctx.rank}.{self.ctx.start}"):
            os.kill(os.getpid(), 9)
        return f"{self.ctx.rank}.{self.ctx.start}"


def lines(truth: Path) -> list[str]:
    """Return the ground truth so far."""
    return truth.read_text().splitlines() if truth.exists() else []
