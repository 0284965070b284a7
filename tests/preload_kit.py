"""Processes whose clocks a test sets or whose system calls it fails: libraries that are preloaded."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

__all__ = ["Clocks", "compiled", "needs_compiler"]

SOURCES = Path(__file__).parent / "faults" / "drivers"
COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (Debian: gcc)")


@functools.cache
def compiled(name: str) -> Path:
    """Compile a library that stands between a process and its kernel, once per test process."""
    assert COMPILER is not None
    directory = Path(tempfile.mkdtemp(prefix="zt-preload"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / f"{name}.so"
    source = SOURCES / f"{name}.c"
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lm"]
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
        self.environment = {"LD_PRELOAD": str(compiled("fakeclock")), "ZT_CLOCK_FILE": str(file)}

    def set(self, *, jump: float = 0.0, wall: float = 0.0) -> None:
        """Put all clocks ``jump`` seconds ahead, and the wall clock another ``wall`` seconds. At once."""
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), self._pack(jump, wall), 0)

    def _pack(self, jump: float, wall: float) -> bytes:
        return struct.pack("4d", self._origin, self._rate, jump, wall)
