"""An engine that writes down what it really does, for tests that kill it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from typing import Any

import zbus
from zbus import AnyOne, Everywhere, PerRank, failpoints

__all__ = ["Diary", "Truth"]


class Diary(zbus.Engine):
    """Each call leaves a line when it begins and one when it ends, in one write each."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def setup(self, ctx: zbus.Context) -> None:
        path = Path(self.folder) / f"{ctx.role}.{ctx.rank}.diary"
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.start = ctx.start

    def _line(self, word: str, what: Any) -> None:
        os.write(self.fd, f"{word} {what}\n".encode())

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def who(self) -> tuple[int, int]:
        return os.getpid(), self.start

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def hold(self, released: str) -> None:
        """Keep the lane until a file is there, so that what follows is all sent to this very start."""
        Path(f"{released}.held").touch()
        while not Path(released).exists():
            time.sleep(0.001)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def arm(self, points: str) -> None:
        failpoints.configure(points)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def write(self, what: str, seconds: float = 0.0, how: str = "") -> str:
        self._line("begin", what)
        if seconds:
            time.sleep(seconds)
        if how:
            _die(how)
        self._line("end", what)
        return what

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def join(self, cgroup: str) -> None:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def fail(self, what: str) -> None:
        self._line("begin", what)
        self._line("end", what)
        raise ValueError(what)

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=4)
    async def write_async(self, what: str, seconds: float = 0.0) -> str:
        self._line("begin", what)
        await asyncio.sleep(seconds)
        self._line("end", what)
        return what

    @zbus.endpoint(AnyOne(), lane="pool", concurrency=4)
    def write_in_thread(self, what: str, seconds: float = 0.0) -> str:
        self._line("begin", what)
        time.sleep(seconds)
        self._line("end", what)
        return what


def _die(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(7)
    elif how == "oom":
        hog = []
        while True:
            hog.append(bytearray(16 << 20))


class Truth:
    """What the diary of one rank says of each call."""

    def __init__(self, folder: Path, role: str, rank: int) -> None:
        path = folder / f"{role}.{rank}.diary"
        self.lines = path.read_text().splitlines() if path.exists() else []

    def times(self, word: str, what: str) -> int:
        """Return how often a call left that line."""
        return self.lines.count(f"{word} {what}")

    def ran(self, what: str) -> str:
        """Return ``no``, ``began`` or ``yes``; a second run is an error."""
        begins, ends = self.times("begin", what), self.times("end", what)
        assert ends <= begins <= 1, (what, begins, ends)
        return "yes" if ends else "began" if begins else "no"
