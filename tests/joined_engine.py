"""An engine for tests of calls that travel together: it writes down each start, waits when told to, and may die."""

from __future__ import annotations

import os
import time
from pathlib import Path

import zbus
from zbus import Everywhere, PerRank


class Noted(zbus.Engine):
    """Appends a line to ``truth`` for each call that begins."""

    def __init__(self, truth: str) -> None:
        self.truth = truth

    def setup(self, ctx: zbus.Context) -> None:
        self.file = os.open(self.truth, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _note(self, number: int) -> None:
        os.write(self.file, b"%d\n" % number)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def once(self, number: int) -> int:
        self._note(number)
        return number * 2

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def again(self, number: int) -> int:
        self._note(number)
        return number * 3

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def fails(self, number: int) -> int:
        self._note(number)
        msg = f"number {number}"
        raise ValueError(msg)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def many(self, number: int) -> list[int]:
        self._note(number)
        return list(range(2_000))

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def until(self, path: str, number: int) -> int:
        """Go on until there is a file."""
        self._note(number)
        while not Path(path).exists():
            time.sleep(0.002)
            zbus.checkpoint()
        return number

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def dies(self, number: int) -> None:
        self._note(number)
        os.kill(os.getpid(), 9)
