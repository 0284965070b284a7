"""File systems that fail, for tests as root: small ones, read-only ones, and workers that see them from elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec import structs

from controller import Controller, Role
from waiting import scaled
from zbus.config import Config, TrialDir

__all__ = ["ELSEWHERE", "Worker", "external", "filled", "mount", "mounted", "needs_root", "worker"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces need root")

ELSEWHERE = ("unshare", "--time", "--monotonic", "100000", "--boottime", "100000", "--fork", "--kill-child")
"""A time namespace: a process in it is a stranger whose pid and clock mean nothing outside, as on another host."""

_WORKER = (sys.executable, "-m", "workers", "start")


def mount(*words: object) -> None:
    """Run mount; skip the test where this machine does not allow it."""
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *words: object) -> Iterator[Path]:
    """Mount something at a directory that is made for it; unmount it at the end."""
    place.mkdir(exist_ok=True)
    mount(*words, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def filled(place: Path) -> Iterator[None]:
    """Use up every byte and every inode of a small file system for a block."""
    stuffing = place / "stuffing"
    stuffing.mkdir()
    try:
        with suppress(OSError), (stuffing / "bytes").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with suppress(OSError):
            for number in range(1_000_000):
                (stuffing / str(number)).touch()
        yield
    finally:
        shutil.rmtree(stuffing)


def external(trial: TrialDir, roles: Mapping[str, Role], **rpc: float) -> Controller:
    """Launch a trial whose workers are started by hand."""
    config = Config()
    config = structs.replace(
        config, rpc=structs.replace(config.rpc, **rpc), trace=structs.replace(config.trace, level="full")
    )
    return Controller.launch(
        trial.experiment,
        dict(roles),
        trial=trial.trial,
        root=trial.path.parents[1],
        scheduler="external",
        config=config,
        startup_timeout=scaled(30),
    )


class Worker:
    """A ``zbus-worker`` command started by hand, with what it has written so far."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text()

    def end(self, timeout_s: float = 20.0) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(scaled(timeout_s))


@contextmanager
def worker(
    trial: Path, role: str, *arguments: str, log: Path, prefix: Sequence[str] = (), lease: str = "1s"
) -> Iterator[Worker]:
    """Start a worker by hand, through ``prefix``; it is gone at the end of the block."""
    command = [*prefix, *_WORKER, "--trial-dir", str(trial), "--role", role, "--lease", lease, *arguments]
    made = Worker(command, log)
    try:
        yield made
    finally:
        with suppress(subprocess.TimeoutExpired):
            made.process.wait(scaled(10))
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()
