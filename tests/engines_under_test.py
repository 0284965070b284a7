"""Engines that the integration and fault tests run in real workers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zbus
from zbus import AnyOne, Concat, Everywhere, PerRank, RankZero, Same, Split


class Probe(zbus.Engine):
    """Does what tests ask: answers, waits, fails and dies in every way."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.seen: list[Any] = []

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.met, self.all_met = 0, asyncio.Event()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def whoami(self) -> dict[str, Any]:
        return {
            "role": self.ctx.role,
            "rank": self.ctx.rank,
            "start": self.ctx.start,
            "pid": os.getpid(),
            "coords": self.ctx.coords,
            "greeting": self.greeting,
            "thread": threading.current_thread() is threading.main_thread(),
        }

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def monotonic(self) -> float:
        return time.monotonic()

    @zbus.endpoint(Split("dp"), collect=Concat(), effect="pure")
    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def note(self, what: Any) -> int:
        self.seen.append(what)
        return len(self.seen)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def notes(self) -> list[Any]:
        return self.seen

    @zbus.endpoint(Everywhere(), collect=Same(), effect="pure")
    def echo(self, value: Any) -> Any:
        return value

    @zbus.endpoint(RankZero(), effect="pure")
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def wait_for(self, path: str) -> str:
        """Run until somebody makes that file."""
        while not Path(path).exists():
            time.sleep(0.01)  # a file tells nobody that it has come
        return path

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=8)
    async def slow_echo(self, value: Any, seconds: float = 0.0) -> Any:
        await asyncio.sleep(seconds)
        return value

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=8)
    async def meet(self, expected: int) -> int:
        """Return once so many of these calls run at the same time."""
        self.met += 1
        if self.met == expected:
            self.all_met.set()
        await self.all_met.wait()
        return self.met

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=8)
    async def count(self, upto: int, fail_at: int = -1) -> Any:
        for number in range(upto):
            if number == fail_at:
                msg = f"no {number}"
                raise ValueError(msg)
            yield number

    # -- failures ------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def fail(self, kind: str, only_rank: int | None = None) -> str:
        if only_rank is not None and self.ctx.rank != only_rank:
            return "fine"
        if kind == "value":
            msg = "bad value"
            raise ValueError(msg)
        if kind == "attribute":
            return self.missing_attribute  # type: ignore[attr-defined,no-any-return]
        if kind == "exit":
            raise SystemExit(7)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "repr":
            raise UnprintableError
        if kind == "lambda":
            return lambda: None  # type: ignore[return-value]
        msg = f"unknown kind {kind}"
        raise AssertionError(msg)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def die(self, how: str, only_rank: int | None = None, marker: str | None = None) -> str:
        if only_rank is not None and self.ctx.rank != only_rank:
            return "alive"
        print(f"about to die: {how}", flush=True)
        if marker is not None:
            Path(marker).write_text("here")
            while True:
                time.sleep(0.01)
        if how == "segv":
            ctypes.string_at(0)
        elif how.startswith("exit"):
            os._exit(int(how[4:]))
        elif how.startswith("signal"):
            os.kill(os.getpid(), int(how[6:]))
            signal.pause()
        elif how == "oom":
            hog = []
            while True:
                hog.append(bytearray(16 << 20))
        return "alive"


class UnprintableError(Exception):
    """An exception whose every text raises."""

    def __repr__(self) -> str:
        msg = "no repr"
        raise RuntimeError(msg)

    __str__ = __repr__


class BadSetup(zbus.Engine):
    """Fails in setup on one rank."""

    def setup(self, ctx: zbus.Context) -> None:
        if ctx.rank == 1:
            msg = "cannot set up"
            raise OSError(5, msg)

    @zbus.endpoint()
    def nothing(self) -> None:
        return None


class DiesInSetup(zbus.Engine):
    """Dies in setup on one rank."""

    def setup(self, ctx: zbus.Context) -> None:
        if ctx.rank == 1:
            print("last words", flush=True)
            os._exit(9)

    @zbus.endpoint()
    def nothing(self) -> None:
        return None


class HangsInSetup(zbus.Engine):
    """Never finishes setup on one rank."""

    def setup(self, ctx: zbus.Context) -> None:
        if ctx.rank == 1:
            threading.Event().wait()

    @zbus.endpoint()
    def nothing(self) -> None:
        return None


class TorchSum(zbus.Engine):
    """All-reduces over gloo."""

    def setup(self, ctx: zbus.Context) -> None:
        ctx.init_torch("gloo")
        self.ctx = ctx

    @zbus.endpoint(Everywhere(), collect=Same())
    def total(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value * (self.ctx.rank + 1)], dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor)


if "antigravity" in sys.modules:  # never: workers import engines only by the job record
    raise SystemExit(1)
