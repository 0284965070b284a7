"""Whether the kernel's memory limit killed a process: counters of its cgroup (v1 and v2) and of the host.

A zombie no longer tells its cgroup (v1 shows ``/``), so a ``MemoryWatch`` is opened while the rank lives, refreshed
now and then (a rank may be moved), and asked once after the exit.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["MemoryCounters", "MemoryWatch", "OomVerdict", "cgroup_directory", "read_counters"]

_UNLIMITED: Final = 1 << 60
_KERNEL_LOG: Final = Path("/dev/kmsg")


class MemoryCounters(msgspec.Struct, frozen=True):
    """Memory counters of one cgroup. ``None`` where the kernel does not say."""

    oom_kills: int | None = None
    failures: int | None = None
    limit_bytes: int | None = None
    peak_bytes: int | None = None


class OomVerdict(msgspec.Struct, frozen=True):
    """Whether a process was killed for memory, and the words that prove or hint at it."""

    oom: bool = False
    evidence: str = ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _keyed(text: str, key: str) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value)
    return None


def _mounts() -> tuple[str, str]:
    """Return the mount points of the v1 memory hierarchy and of v2 (empty where absent)."""
    v1 = v2 = ""
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            v1 = v1 or fields[4]
        elif kind[0] == "cgroup2":
            v2 = v2 or fields[4]
    return v1, v2


def cgroup_directory(pid: int) -> Path | None:
    """Return the directory of the cgroup that accounts the memory of ``pid``, or None where there is none."""
    v1, v2 = _mounts()
    unified: Path | None = None
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if "memory" in controllers.split(",") and v1:
            return _inside(Path(v1), path)
        if not controllers and v2:
            unified = _inside(Path(v2), path)
    return unified


def _inside(mount: Path, path: str) -> Path:
    """Join a cgroup path to its mount point; in a container the path may lie outside, then the mount itself is ours."""
    found = mount / path.lstrip("/")
    return found if found.is_dir() else mount


def read_counters(directory: Path) -> MemoryCounters:
    """Read the counters of one cgroup, of either version."""
    if (directory / "memory.oom_control").exists():
        limit = _number(_read(directory / "memory.limit_in_bytes"))
        return MemoryCounters(
            oom_kills=_keyed(_read(directory / "memory.oom_control"), "oom_kill"),
            failures=_number(_read(directory / "memory.failcnt")),
            limit_bytes=None if limit is None or limit > _UNLIMITED else limit,
            peak_bytes=_number(_read(directory / "memory.max_usage_in_bytes")),
        )
    events = _read(directory / "memory.events")
    return MemoryCounters(
        oom_kills=_keyed(events, "oom_kill"),
        failures=_keyed(events, "max"),
        limit_bytes=_number(_read(directory / "memory.max")),
        peak_bytes=_number(_read(directory / "memory.peak")),
    )


def _host_kills() -> int | None:
    return _keyed(_read(Path("/proc/vmstat")), "oom_kill")


def kernel_log_lines() -> Iterable[str]:
    """Yield the kernel log, where this process may read it; else nothing. Never blocks."""
    try:
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                yield os.read(fd, 8192).decode(errors="replace")
            except BrokenPipeError:  # the ring ran over while it was read: go on with what is there
                continue
            except OSError:
                return
    finally:
        os.close(fd)


def size_text(count: int) -> str:
    """Say a number of bytes in binary units: ``63.8 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


class MemoryWatch:
    """Memory counters of one process from its start to its end. Used by the agent's loop only."""

    def __init__(self, pid: int, *, kernel_log: Callable[[], Iterable[str]] = kernel_log_lines) -> None:
        self._pid = pid
        self._kernel_log = kernel_log
        self._directory: Path | None = None
        self._before = MemoryCounters()
        self._host_before = _host_kills()
        self.refresh()

    def refresh(self) -> None:
        """Look again which cgroup the process is in; a new cgroup starts a new baseline."""
        directory = cgroup_directory(self._pid)
        if directory is not None and directory != self._directory:
            self._directory = directory
            self._before = read_counters(directory)

    def verdict(self, signum: int | None, *, by_us: bool = False) -> OomVerdict:
        """Judge an exit.

        Args:
            signum: The signal that ended the process, or None.
            by_us: The agent itself sent SIGKILL, so a kill proves nothing.
        """
        if signum != signal.SIGKILL or by_us:
            return OomVerdict()
        after = MemoryCounters() if self._directory is None else read_counters(self._directory)
        rose = after.oom_kills is not None and after.oom_kills > (self._before.oom_kills or 0)
        host = _host_kills()
        host_rose = host is not None and self._host_before is not None and host > self._host_before
        if (rose or host_rose) and (named := self._named_in_kernel_log()):
            line, group = named
            if rose:
                words = self._limit_words(after)
            elif group is not None:  # it was moved into that cgroup a moment before
                words = self._limit_words(read_counters(group))
            else:
                words = "the host ran out of memory"
            return OomVerdict(oom=True, evidence=f"{words}; kernel log: {line}")
        if rose:
            return OomVerdict(oom=True, evidence=self._limit_words(after))
        if host_rose:
            return OomVerdict(
                oom=False, evidence="the kernel killed a process of this host for memory meanwhile; not known which"
            )
        return OomVerdict()

    def _limit_words(self, after: MemoryCounters) -> str:
        words = []
        if after.oom_kills is not None:
            words.append(f"oom_kill {min(self._before.oom_kills or 0, after.oom_kills - 1)} -> {after.oom_kills}")
        if after.peak_bytes is not None and after.limit_bytes is not None:
            words.append(f"peak {size_text(after.peak_bytes)} of {size_text(after.limit_bytes)}")
        return "memory limit of its cgroup was hit" + (f" ({', '.join(words)})" if words else "")

    def _named_in_kernel_log(self) -> tuple[str, Path | None] | None:
        """Return what the kernel says of this process's end, and the cgroup whose limit it blames."""
        killed = re.compile(rf"(Memory cgroup out of memory: )?(Killed process {self._pid} \([^)]*\))")
        blamed = re.compile(rf"oom_memcg=([^,]*),.*\bpid={self._pid}\b")
        found: tuple[str, Path | None] | None = None
        group = ""
        for line in self._kernel_log():
            if match := blamed.search(line):
                group = match[1]
            if match := killed.search(line):
                v1, v2 = _mounts()
                found = match[2], Path(f"{v1 or v2}/{group.lstrip('/')}") if match[1] else None
        return found
