"""Files of lines: where they lie, what stands at their head, and appending whole lines or nothing."""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Any, Final, NamedTuple

from zbus.clock import Clock, boot_id, time_namespace
from zbus.trace.config import TraceConfig

__all__ = [
    "FORMAT",
    "LineFile",
    "RunEpoch",
    "new_source",
    "opening_facts",
    "run_epoch",
    "sessions_path",
    "spill_path",
    "trace_path",
]

FORMAT: Final = 1
"""Version of the trace format, in every opening metadata event."""

_LOG = logging.getLogger("zbus.trace")
_COMPONENT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


# -- names ---------------------------------------------------------------------------------------------------------


def trace_path(root: str | Path, role: str, rank: int, start: int = 0) -> Path:
    """Return ``{root}/{role}/traces_{rank}.jsonl``; with a start n > 0 ``traces_{rank}.{n}.jsonl``.

    Raises:
        ValueError: The role could leave the root, or the rank is negative.
    """
    return _path(root, role, rank, start, "traces")


def sessions_path(root: str | Path, role: str, rank: int, start: int = 0) -> Path:
    """Return ``{root}/{role}/sessions_{rank}.jsonl``; with a start n > 0 ``sessions_{rank}.{n}.jsonl``.

    Raises:
        ValueError: As ``trace_path``.
    """
    return _path(root, role, rank, start, "sessions")


def spill_path(path: Path) -> Path:
    """Return where the process that traces into ``path`` puts what the sidecar does not take."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.spill.jsonl")


def _path(root: str | Path, role: str, rank: int, start: int, kind: str) -> Path:
    if not _COMPONENT.fullmatch(role) or not role.strip(".") or rank < 0 or start < 0:
        msg = f"no trace file for role {role!r}, rank {rank}, start {start}"
        raise ValueError(msg)
    return Path(root) / role / (f"{kind}_{rank}.{start}.jsonl" if start else f"{kind}_{rank}.jsonl")


# -- clocks and identity -------------------------------------------------------------------------------------------


def new_source() -> str:
    """Return a fresh id for one process's stream of records: 16 random hex digits."""
    return os.urandom(8).hex()


class RunEpoch(NamedTuple):
    """This process's monotonic clock at the run epoch, and whether that is exact (one shared clock)."""

    mono_ns: int
    shared: bool


def run_epoch(config: TraceConfig, clock: Clock) -> RunEpoch:
    """Return where ``config`` puts time 0 on this process's monotonic clock."""
    mono, wall = clock.monotonic_ns(), clock.wall_ns()
    if not config.run_epoch_wall_ns:
        return RunEpoch(mono, shared=True)
    same_ns = config.clock_time_ns in (0, time_namespace())
    if config.run_epoch_mono_ns and config.clock_boot_id and config.clock_boot_id == boot_id() and same_ns:
        return RunEpoch(config.run_epoch_mono_ns, shared=True)
    return RunEpoch(mono - (wall - config.run_epoch_wall_ns), shared=False)


def opening_facts(
    config: TraceConfig,
    *,
    role: str,
    rank: int,
    start: int,
    incarnation: int,
    source: str,
    epoch: RunEpoch,
    clock: Clock,
) -> dict[str, Any]:
    """Return the facts that open a file: the args of ``zbus_meta``."""
    mono, wall = clock.monotonic_ns(), clock.wall_ns()
    return {
        "format": FORMAT,
        "run": config.run,
        "role": role,
        "rank": rank,
        "start": start,
        "incarnation": f"{incarnation:016x}",
        "source": source,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "time_ns": time_namespace(),
        "run_epoch_wall_ns": config.run_epoch_wall_ns or wall - (mono - epoch.mono_ns),
        "epoch_mono_ns": epoch.mono_ns,
        "epoch_clock": "shared" if epoch.shared else "wall",
        "mono_ns": mono,
        "wall_ns": wall,
        "level": config.level,
    }


# -- appending -----------------------------------------------------------------------------------------------------


class LineFile:
    """An append-only file of lines, mode 0600: a failed append is undone, a torn tail is never glued to.

    One thread at a time. No fsync: a killed process loses nothing that reached the kernel.

    Attributes:
        path: Of the file.
        size: Bytes of it that are known to be whole lines.
        error: What the last failed append met, or None after a good one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        self._fd = -1
        self._warned = False

    @property
    def fd(self) -> int:
        """The descriptor, or -1."""
        return self._fd

    def open(self) -> None:
        """Open or make the file and its directory; a line torn by a crash is ended first.

        Raises:
            OSError: It cannot be made.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        self.size = os.fstat(self._fd).st_size
        if self.size > 0 and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")

    def append(self, data: bytes) -> bool:
        """Append whole lines; on failure take the torn part back and return False."""
        if self._fd < 0:
            return False
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._undo(error)
            return False
        self.size += len(data)
        self.error = None
        return True

    def close(self) -> None:
        """Close the descriptor; may be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _undo(self, error: OSError) -> None:
        self.error = error
        try:
            os.ftruncate(self._fd, self.size)
        except OSError:
            self.size = os.fstat(self._fd).st_size  # a torn line stays; the reader skips it
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "trace file %s cannot be written (%s): the run goes on, losses are counted", self.path, error.strerror
            )
