"""Rewards for the tests: good ones, and each kind of bad one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def same(value: Any) -> Any:
    """Return what it is given."""
    return value


def distance(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the edits between two sequences."""
    row = list(range(len(right) + 1))
    for place, one in enumerate(left, start=1):
        before, row[0] = row[0], place
        for at, other in enumerate(right, start=1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (one != other))
    return row[-1]


def whole(value: np.ndarray) -> np.ndarray:
    """Answer with a large array."""
    return np.arange(300_000, dtype=np.float32) + value


def mark(path: str, text: str, hang: bool = False) -> int:
    """Add a line to a file, and perhaps never return; says which process it was."""
    with Path(path).open("a") as file:
        file.write(f"{text}\n")
    if hang:
        threading.Event().wait()
    return os.getpid()


def wrong(value: int) -> float:
    """Raise."""
    raise ValueError(f"no reward for {value}")


def odd() -> object:
    """Return what no codec carries."""
    return object()


def hang() -> None:
    """Never return, and hold the GIL as native code may."""
    ctypes.PyDLL(None).pause()


def hang_with_child(path: str) -> None:
    """Start a process of its own and never return."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    child.wait()


def crash() -> None:
    """End the process as a crash in native code does."""
    ctypes.string_at(0)


def leave() -> None:
    """End the process without a word."""
    os._exit(7)


async def later() -> int:
    """Be no plain function."""
    return 1
