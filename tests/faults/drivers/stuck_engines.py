"""An engine that gets stuck in every way; loaded in real workers of the tests of stuck ranks."""

from __future__ import annotations

import ctypes
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import zbus
from zbus import AnyOne, Everywhere, PerRank


class Stuck(zbus.Engine):
    """Some ranks of a call get stuck, as asked; the others answer."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.ran = 0

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def step(self, how: str = "", ranks: tuple[int, ...] = (), seconds: float = 30.0) -> int:
        self.ran += 1
        if self.ctx.rank in ranks:
            getattr(self, f"in_{how}")(seconds)
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def mixed(self, seconds: float) -> int:
        getattr(self, ("in_sleep", "in_regex", "in_lock")[self.ctx.rank % 3])(seconds)
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def first_fails(self, seconds: float, meet: str) -> int:
        """Fail on rank 0 once all others sleep; each leaves a file in directory ``meet`` as it falls asleep."""
        if self.ctx.rank == 0:
            while len(list(Path(meet).iterdir())) < self.ctx.world_size - 1:
                time.sleep(0.005)
            msg = "root of it all"
            raise ValueError(msg)
        # One line, so that no other stack lies between the file and the sleep.
        fall_asleep = (Path(meet, str(self.ctx.rank)).touch, partial(time.sleep, seconds))
        [step() for step in fall_asleep]  # falls asleep here
        return self.ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def count(self) -> int:
        return self.ran

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def errno_after_a_dump(self, before: int) -> int:
        """Return what a system call's caller finds in ``errno`` if stacks are dumped before it looks."""
        libc = ctypes.CDLL(None, use_errno=True)
        ctypes.set_errno(before)
        getattr(libc, "raise")(signal.SIGUSR2)
        return ctypes.get_errno()

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=4)
    async def doze(self, seconds: float) -> int:
        """Block the event loop of all async methods, as one must not."""
        time.sleep(seconds)  # blocks the loop here  # noqa: ASYNC251
        return self.ctx.rank

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=4)
    async def quick(self) -> int:
        return self.ctx.rank

    def in_sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # sleeps here

    def in_lock(self, seconds: float) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=seconds)  # waits here

    def in_regex(self, seconds: float) -> None:
        """Hold the GIL for about ``seconds``: a pattern that backtracks, on a text made longer until it takes long."""
        length, took = 16, 0.0
        while took < seconds / 3:
            began = time.monotonic()
            re.match(r"(a+)+$", "a" * length + "b")  # holds the GIL here
            took = time.monotonic() - began
            length += 1
