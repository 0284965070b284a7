"""Engines that end, hang and fail in every way; loaded by path in real workers of the fault tests."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zbus
from zbus import Everywhere, PerRank


class Unprintable(Exception):
    """An exception whose every text raises."""

    def __repr__(self) -> str:
        msg = "no repr"
        raise RuntimeError(msg)

    __str__ = __repr__


class Victim(zbus.Engine):
    """One rank (``FAULT_RANK``, default 1) does what is asked; the others follow ``peers``."""

    def __init__(self, setup: str = "") -> None:
        self.in_setup = setup
        self.recovered = False

    def setup(self, ctx: zbus.Context) -> None:
        self.ctx = ctx
        self.counted = 0
        if ctx.rank == int(os.environ.get("FAULT_RANK", "1")):
            self.do(self.in_setup)

    def recover(self, ctx: zbus.Context) -> None:
        self.recovered = True

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def step(self, how: str = "", peers: str = "", rank: int = 1) -> str:
        print(f"step: {how}", flush=True)
        if self.ctx.rank == rank:
            self.do(how)
        else:
            self.do(peers)
        return "done"

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def count(self) -> int:
        self.counted += 1
        return self.counted

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def me(self) -> dict[str, Any]:
        return {"rank": self.ctx.rank, "start": self.ctx.start, "pid": os.getpid(), "recovered": self.recovered}

    def do(self, how: str) -> None:
        """Run ``how``: verb, or verb:argument."""
        verb, _, argument = how.partition(":")
        if verb:
            getattr(self, f"do_{verb}")(argument)

    def do_kill(self, argument: str) -> None:
        os.kill(os.getpid(), int(argument or signal.SIGKILL))

    def do_exit(self, argument: str) -> None:
        os._exit(int(argument))

    def do_segfault(self, _argument: str) -> None:
        ctypes.string_at(0)

    def do_raise(self, argument: str) -> None:
        raise ValueError(argument)

    def do_counted(self, argument: str) -> None:
        self.counted += 1
        raise ValueError(argument)

    def do_sysexit(self, argument: str) -> None:
        sys.exit(int(argument))

    def do_unprintable(self, _argument: str) -> None:
        raise Unprintable

    def do_sleep(self, argument: str) -> None:
        time.sleep(float(argument or 100))

    def do_hang(self, _argument: str) -> None:
        print("hanging here", flush=True)
        threading.Event().wait()

    def do_eat(self, argument: str) -> None:
        hog = []
        for _ in range(int(argument) // 16):
            hog.append(bytearray(16 << 20))
            hog[-1][::4096] = b"x" * len(hog[-1][::4096])
        time.sleep(5)

    def do_cgroup(self, argument: str) -> None:
        group, _, megabytes = argument.partition("@")
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        print("allocating logits", flush=True)
        self.do_eat(megabytes)

    def do_child(self, argument: str) -> None:
        """Leave a child that holds stdout, then go on with the argument."""
        child = subprocess.Popen(["sleep", "300"])
        print(f"child {child.pid}", flush=True)
        self.do(argument)

    def do_wait(self, argument: str) -> None:
        """Wait for a file."""
        while not Path(argument).exists():
            time.sleep(0.005)

    def do_tear(self, argument: str) -> None:
        self.teardown_s = float(argument)

    def teardown(self) -> None:
        time.sleep(getattr(self, "teardown_s", 0.0))


class Collective(Victim):
    """All ranks meet in an all-reduce; rank 1 may not come."""

    def setup(self, ctx: zbus.Context) -> None:
        ctx.init_torch("gloo")
        super().setup(ctx)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def reduce(self, how: str) -> float:
        import torch
        import torch.distributed as dist

        if self.ctx.rank == 1:
            self.do(how)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor)


class NotAnEngine:
    """A class that is not an engine."""
