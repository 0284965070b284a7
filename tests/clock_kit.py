"""Clocks of real processes that a test sets: a wall clock that jumps, clocks that run fast or slow, a long suspend."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

__all__ = ["Clocks", "needs_compiler"]

SOURCE = Path(__file__).parent / "faults" / "drivers" / "fakeclock.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (Debian: gcc)")


@functools.cache
def _library() -> Path:
    """Compile the library that stands between a process and its clocks, once per test process."""
    assert COMPILER is not None
    directory = Path(tempfile.mkdtemp(prefix="zt-clock"))
    library = directory / "fakeclock.so"
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return library


class Clocks:
    """The clocks of all processes that are started with ``environment``.

    Args:
        file: Where they are kept.
        rate: Seconds that pass for these processes in one real second.
    """

    def __init__(self, file: Path, rate: float = 1.0) -> None:
        self._file = file
        self._origin = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._rate = rate
        file.write_bytes(self._pack(0.0, 0.0))
        self.environment = {"LD_PRELOAD": str(_library()), "ZT_CLOCK_FILE": str(file)}

    def set(self, *, jump: float = 0.0, wall: float = 0.0) -> None:
        """Put all clocks ``jump`` seconds ahead, and the wall clock another ``wall`` seconds. At once."""
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), self._pack(jump, wall), 0)

    def _pack(self, jump: float, wall: float) -> bytes:
        return struct.pack("4d", self._origin, self._rate, jump, wall)
