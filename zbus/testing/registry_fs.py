"""File systems for testing the file registry: one that fails at a chosen operation, one that behaves like NFS.

Both fill ``zbus.registry.fs.FS``: hand them to ``FileRegistry(root, fs=...)``.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

from zbus.registry.fs import FS, Area, FileInfo

__all__ = ["Crashed", "FaultyFS", "Quirks", "SimulatedDisk", "SimulatedFS"]

_T = TypeVar("_T")


class Crashed(BaseException):
    """The process of a test died here: no handler of the code under test may run on."""


class FaultyFS:
    """Counts operations and makes the ``fail_at``-th one fail.

    Args:
        inner: The file system that does the work.
        fail_at: Number of the operation, from 1; 0 for none.
        error: The errno to fail with; None raises ``Crashed`` at that operation and at each one after it.
        once: Fail that operation only; False fails all from there on.
        after: Do the work first and then report the failure, as a lost reply does.

    Attributes:
        count: Operations so far.
        hits: How many of them failed.
        last: Name of the operation that failed first.
    """

    def __init__(
        self, inner: FS, *, fail_at: int = 0, error: int | None = 0, once: bool = True, after: bool = False
    ) -> None:
        self._inner = inner
        self.root = inner.root
        self.fail_at = fail_at
        self.count = 0
        self.hits = 0
        self.last = ""
        self._error = error
        self._once = once and error is not None
        self._after = after

    def make_root(self, *, parents: bool = False) -> bool:
        """As the inner one, or fail."""
        return self.run("make_root", lambda: self._inner.make_root(parents=parents))

    def make_area(self, area: str) -> None:
        """As the inner one, or fail."""
        self.run("make_area", lambda: self._inner.make_area(area))

    def open(self, area: str) -> Area:
        """As the inner one, or fail."""
        opened = self.run("open", lambda: self._inner.open(area), undo=lambda a: a.__exit__(None, None, None))
        return _FaultyArea(self, opened)

    def run(self, name: str, work: Callable[[], _T], undo: Callable[[_T], object] = lambda _: None) -> _T:
        """Do one operation, or fail it. ``undo`` gives back what a caller never receives."""
        self.count += 1
        hit = self.fail_at and (self.count == self.fail_at if self._once else self.count >= self.fail_at)
        if not hit:
            return work()
        self.hits += 1
        self.last = self.last or name
        if self._error is None:
            raise Crashed
        if self._after:
            undo(work())
        raise OSError(self._error, os.strerror(self._error))


class _FaultyArea:
    def __init__(self, fs: FaultyFS, inner: Area) -> None:
        self._fs = fs
        self._inner = inner

    def create_excl(self, name: str) -> int:
        return self._fs.run("create", lambda: self._inner.create_excl(name), undo=self._inner.close_file)

    def write(self, handle: int, data: bytes) -> None:
        self._fs.run("write", lambda: self._inner.write(handle, data))

    def fsync(self, handle: int) -> None:
        self._fs.run("fsync", lambda: self._inner.fsync(handle))

    def close_file(self, handle: int) -> None:
        try:
            self._fs.run("close", lambda: None)
        finally:
            self._inner.close_file(handle)  # a descriptor is gone whatever close() reports

    def link(self, source: str, target: str) -> None:
        self._fs.run("link", lambda: self._inner.link(source, target))

    def rename(self, source: str, target: str) -> None:
        self._fs.run("rename", lambda: self._inner.rename(source, target))

    def read(self, name: str, limit: int) -> tuple[FileInfo, bytes]:
        return self._fs.run("read", lambda: self._inner.read(name, limit))

    def links(self, name: str) -> int:
        return self._fs.run("links", lambda: self._inner.links(name))

    def names(self) -> list[str]:
        return self._fs.run("names", self._inner.names)

    def version(self) -> int:
        return self._fs.run("version", self._inner.version)

    def unlink(self, name: str) -> None:
        self._fs.run("unlink", lambda: self._inner.unlink(name))

    def sync(self) -> None:
        self._fs.run("sync", self._inner.sync)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)


# -- an NFS-like file system in memory -----------------------------------------------------------------------------


@dataclass(eq=False)
class _File:
    data: bytes = b""
    synced: bytes | None = None
    links: int = 1


@dataclass(eq=False)
class _Directory:
    files: dict[str, _File] = field(default_factory=dict)
    durable: dict[str, _File] = field(default_factory=dict)
    pending: list[dict[str, _File | None]] = field(default_factory=list)
    version: int = 0

    def change(self, entries: dict[str, _File | None]) -> None:
        """Apply one atomic change of names; it is durable after the next sync, or by luck."""
        for name, file in entries.items():
            self.files.pop(name, None)  # a replaced entry moves to the end, as on some file systems
            if file is not None:
                self.files[name] = file
        self.pending.append(entries)
        self.version += 1


class SimulatedDisk:
    """What a file server holds, with what of it would survive a power cut."""

    def __init__(self) -> None:
        self.areas: dict[str, _Directory] | None = None

    def power_cut(self, rng: random.Random) -> None:
        """Lose what was not synced: a part of each unsynced file, and the latest unsynced changes of names."""
        for directory in (self.areas or {}).values():
            kept = directory.pending[: rng.randint(0, len(directory.pending))]
            for entries in kept:
                for name, file in entries.items():
                    directory.durable.pop(name, None)
                    if file is not None:
                        directory.durable[name] = file
            directory.pending = []
            directory.files = dict(directory.durable)
            for file in directory.files.values():
                if file.synced is None:
                    file.synced = file.data[: rng.randint(0, len(file.data))]
                file.data = file.synced


@dataclass(frozen=True)
class Quirks:
    """How unreliable a client is. Probabilities per operation.

    Attributes:
        resend: A link, rename, create or unlink is done, its reply is lost, and the repeat is told EEXIST or ENOENT.
        stale: Whatever looks a path up (open, read, list, make a directory) reports ESTALE.
        absent_for: So many operations of this client a name stays "not found" after a lookup that missed it.
        full: A write finds no space left: ENOSPC, with half of it written.
    """

    resend: float = 0.0
    stale: float = 0.0
    absent_for: int = 0
    full: float = 0.0


_ROOT: Final = Path("/simulated/registry")


class SimulatedFS:
    """One client of a ``SimulatedDisk``.

    Args:
        disk: The server.
        rng: Decides which quirk strikes.
        quirks: How unreliable this client is.
        switch: Called before every operation, so that a test can let another client go first.
    """

    def __init__(
        self,
        disk: SimulatedDisk,
        rng: random.Random,
        *,
        quirks: Quirks = Quirks(),
        switch: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = _ROOT
        self.disk = disk
        self.rng = rng
        self.quirks = quirks
        self._switch = switch
        self._operations = 0
        self._absent: dict[tuple[str, str], int] = {}

    def make_root(self, *, parents: bool = False) -> bool:
        """Make the root; return whether it was missing."""
        self.step()
        self.maybe_stale()
        missing = self.disk.areas is None
        if self.disk.areas is None:
            self.disk.areas = {}
        return missing

    def make_area(self, area: str) -> None:
        """Make an area."""
        self.step()
        self.maybe_stale()
        self._areas().setdefault(area, _Directory())

    def open(self, area: str) -> SimulatedArea:
        """Open an area."""
        self.step()
        self.maybe_stale()
        if area not in self._areas():
            raise _error(errno.ENOENT)
        return SimulatedArea(self, area, self._areas()[area])

    def _areas(self) -> dict[str, _Directory]:
        if self.disk.areas is None:
            raise _error(errno.ENOENT)
        return self.disk.areas

    def step(self) -> None:
        """Begin an operation."""
        self._operations += 1
        self._switch()

    def maybe_stale(self) -> None:
        """Report a stale handle now and then."""
        if self.rng.random() < self.quirks.stale:
            raise _error(errno.ESTALE)

    def is_full(self) -> bool:
        """Whether a write finds no space this time."""
        return self.quirks.full > 0 and self.rng.random() < self.quirks.full

    def maybe_resent(self, code: int) -> None:
        """Report, after the work was done, what a repeated request is told."""
        if self.rng.random() < self.quirks.resend:
            raise _error(code)

    def missed(self, area: str, name: str) -> None:
        """Remember a name as absent."""
        self._absent[area, name] = self._operations + self.quirks.absent_for

    def hides(self, area: str, name: str) -> bool:
        """Return whether this client still believes a name absent."""
        return self._operations < self._absent.get((area, name), 0)

    def made(self, area: str, name: str) -> None:
        """Forget that a name was absent: this client made it itself."""
        self._absent.pop((area, name), None)


class SimulatedArea:
    """One open directory of a ``SimulatedFS``."""

    def __init__(self, fs: SimulatedFS, area: str, directory: _Directory) -> None:
        self._fs = fs
        self._area = area
        self._directory = directory
        self._open: dict[int, _File] = {}

    def create_excl(self, name: str) -> int:
        """Create a file that must not exist."""
        self._fs.step()
        if name in self._directory.files:
            raise _error(errno.EEXIST)
        file = _File()
        self._directory.change({name: file})
        self._fs.maybe_resent(errno.EEXIST)
        handle = len(self._open) + 1
        self._open[handle] = file
        return handle

    def write(self, handle: int, data: bytes) -> None:
        """Append data."""
        self._fs.step()
        full = self._fs.is_full()
        self._open[handle].data += data[: len(data) // 2] if full else data
        self._open[handle].synced = None
        if full:
            raise _error(errno.ENOSPC)

    def fsync(self, handle: int) -> None:
        """Make the data durable."""
        self._fs.step()
        self._open[handle].synced = self._open[handle].data

    def close_file(self, handle: int) -> None:
        """Forget a handle."""
        self._fs.step()
        self._open[handle] = _File()

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        self._fs.step()
        file = self._find(source)
        if target in self._directory.files:
            raise _error(errno.EEXIST)
        file.links += 1
        self._directory.change({target: file})
        self._fs.maybe_resent(errno.EEXIST)
        self._fs.made(self._area, target)

    def rename(self, source: str, target: str) -> None:
        """Rename over."""
        self._fs.step()
        file = self._find(source)
        replaced = self._directory.files.get(target)
        if replaced is not None:
            replaced.links -= 1
        self._directory.change({source: None, target: file})
        self._fs.made(self._area, target)
        self._fs.maybe_resent(errno.ENOENT)

    def read(self, name: str, limit: int) -> tuple[FileInfo, bytes]:
        """Read a whole file; a client may believe it absent."""
        self._fs.step()
        self._fs.maybe_stale()
        if self._fs.hides(self._area, name):
            raise _error(errno.ENOENT)
        try:
            file = self._find(name)
        except FileNotFoundError:
            self._fs.missed(self._area, name)
            raise
        info = FileInfo(regular=True, trusted=True, size=len(file.data), links=file.links)
        return info, file.data if len(file.data) <= limit else b""

    def links(self, name: str) -> int:
        """Return how many names a file has."""
        self._fs.step()
        self._fs.maybe_stale()
        return self._find(name).links

    def names(self) -> list[str]:
        """Return the names in two passes with another client's turn between them, as a big directory is read."""
        self._fs.step()
        self._fs.maybe_stale()
        seen = list(self._directory.files)[::-1]
        first = seen[: len(seen) // 2]
        self._fs.step()
        # the second pass goes on behind the entries that were there: what moved meanwhile is missed
        second = [name for name in seen[len(first) :] if name in self._directory.files and not self._moved(name, seen)]
        return first + second

    def _moved(self, name: str, seen: list[str]) -> bool:
        """Return whether an entry was replaced since ``seen`` was taken, so that it now comes before its old place."""
        now = list(self._directory.files)[::-1]
        place = seen.index(name)
        return place > 0 and seen[place - 1] in now and now.index(name) < now.index(seen[place - 1])

    def version(self) -> int:
        """Return the number of changes."""
        self._fs.step()
        return self._directory.version

    def unlink(self, name: str) -> None:
        """Remove a name."""
        self._fs.step()
        self._find(name).links -= 1
        self._directory.change({name: None})
        self._fs.maybe_resent(errno.ENOENT)

    def sync(self) -> None:
        """Make the names durable."""
        self._fs.step()
        self._directory.durable = dict(self._directory.files)
        self._directory.pending = []

    def __enter__(self) -> Self:
        """Return the open directory."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close nothing: there is nothing to leak."""

    def _find(self, name: str) -> _File:
        file = self._directory.files.get(name)
        if file is None:
            raise _error(errno.ENOENT)
        return file


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
