"""One directory seen by two hosts through a slow file server, on one machine: two FUSE mounts that remember names."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled, wait_until

__all__ = ["Client", "needs_fuse", "share"]

SERVER = Path(__file__).parent / "faults" / "drivers" / "share_server.py"

_MISSING = [
    what
    for what, there in (
        ("root", os.geteuid() == 0),
        ("/dev/fuse", os.access("/dev/fuse", os.R_OK | os.W_OK)),
        ("fuse3 (Debian)", shutil.which("fusermount3") is not None),
        ("mfusepy (pip)", importlib.util.find_spec("mfusepy") is not None),
    )
    if not there
]
needs_fuse = pytest.mark.skipif(bool(_MISSING), reason=f"file systems of a test need {', '.join(_MISSING)}")


class Client:
    """One host's view of the shared directory.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path, faults: Path) -> None:
        self.path = path
        self._faults = faults

    @contextmanager
    def fault(self, **rules: dict[str, Any]) -> Iterator[None]:
        """Apply faults by operation for a block; see ``drivers/share_server.py``."""
        self._write(rules)
        try:
            yield
        finally:
            self._write({})

    def _write(self, rules: dict[str, Any]) -> None:
        fresh = self._faults.with_suffix(".new")
        fresh.write_text(json.dumps(rules))
        fresh.replace(self._faults)  # the server never sees half of it


@contextmanager
def _client(directory: Path, path: Path, lag_s: float) -> Iterator[Client]:
    path.mkdir()
    faults = path.with_suffix(".faults")
    faults.write_text("{}")
    log = path.with_suffix(".log")
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(directory), str(path), str(lag_s), str(faults)], stdout=out, stderr=out
        )
    try:
        wait_until(lambda: os.path.ismount(path) or server.poll() is not None, what="the mount")
        if server.poll() is not None:
            pytest.skip(f"FUSE does not work here: {log.read_text()[-300:]}")
        yield Client(path, faults)
    finally:
        if server.poll() is None:
            subprocess.run(["umount", "-l", str(path)], check=True)
            server.wait(scaled(20))


@contextmanager
def share(base: Path, lag_s: float) -> Iterator[tuple[Client, Client]]:
    """Give two views of one private directory; each remembers names, absent names and attributes for ``lag_s``."""
    directory = base / "server"
    directory.mkdir(mode=0o700)
    with ExitStack() as stack:
        yield tuple(stack.enter_context(_client(directory, base / name, lag_s)) for name in ("here", "there"))  # type: ignore[misc]
