"""The few file operations the file registry needs, as an interface, and the real file system behind it.

The registry's logic sees only ``FS`` and ``Area``, so tests hand in file systems that fail, lag or lose data. All
methods raise ``OSError`` as the system does; nothing here decides.

The real one opens everything relative to a directory descriptor of the root, never following a symbolic link below
it, so that no name and no planted link leads out of the root (R9). It opens the root anew for each piece of work: a
root that was deleted and made again is noticed at once, and on NFS opening is what revalidates caches.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from zbus import failpoints
from zbus.errors import RegistryError

__all__ = ["FS", "Area", "FileInfo", "LocalArea", "LocalFS"]

_OPEN_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a planted FIFO must not wait for a writer; it changes nothing for a regular file
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileInfo(NamedTuple):
    """What an open file says about itself."""

    regular: bool
    trusted: bool
    """Owned by the root directory's owner, this user or the superuser, and writable by nobody else."""
    size: int
    links: int


class Area(Protocol):
    """One open directory of records. Names are single components; used by one thread at a time."""

    def create_excl(self, name: str) -> int:
        """Create a file, mode 0600, that must not exist; return a handle."""
        ...

    def write(self, handle: int, data: bytes) -> None:
        """Write all of ``data``."""
        ...

    def fsync(self, handle: int) -> None:
        """Make the file's data durable."""
        ...

    def close_file(self, handle: int) -> None:
        """Close a handle; it is gone even if this raises."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fails if ``target`` exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file over ``target``, atomically."""
        ...

    def read(self, name: str, limit: int) -> tuple[FileInfo, bytes]:
        """Open and read a file of at most ``limit`` bytes; the data is empty for anything else."""
        ...

    def links(self, name: str) -> int:
        """Return how many names the file has."""
        ...

    def names(self) -> list[str]:
        """Return the names in the directory, in any order."""
        ...

    def version(self) -> int:
        """Return a number that changes when a name is added or removed (nanoseconds of the last change)."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name."""
        ...

    def sync(self) -> None:
        """Make the directory's names durable."""
        ...

    def __enter__(self) -> Self:
        """Return the open directory."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the directory."""
        ...


class FS(Protocol):
    """A root directory with one level of areas below it. May be used from any thread."""

    root: Path

    def make_root(self, *, parents: bool = False) -> bool:
        """Make the root, mode 0700, and what is missing above it if asked; return whether it was missing."""
        ...

    def make_area(self, area: str) -> None:
        """Make an area's directory, mode 0700; nothing happens if it exists."""
        ...

    def open(self, area: str) -> Area:
        """Open an area for use in a ``with`` statement.

        Raises:
            RegistryError: The root belongs to someone else or is open to others.
            OSError: Missing, not a directory, …
        """
        ...


class LocalFS:
    """``FS`` over the operating system (local disks, NFS).

    Args:
        root: Directory of the registry. Links above its last component are followed, the last one is not.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        path = Path(root)
        self.root = Path(os.path.realpath(path.parent)) / path.name

    def make_root(self, *, parents: bool = False) -> bool:
        """Make the root, mode 0700, and what is missing above it if asked; return whether it was missing."""
        missing = [self.root]
        if parents:
            missing += [parent for parent in self.root.parents if not parent.exists()]
        made = False
        for path in reversed(missing):
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                made = False
            else:
                made = True
        with self._open_root():
            return made

    def make_area(self, area: str) -> None:
        """Make an area's directory, mode 0700; nothing happens if it exists."""
        with self._open_root() as (root, _):
            try:
                os.mkdir(area, mode=0o700, dir_fd=root)
            except FileExistsError:
                return
            os.fsync(root)

    def open(self, area: str) -> LocalArea:
        """Open an area."""
        with self._open_root() as (root, owner):
            return LocalArea(os.open(area, _OPEN_DIR, dir_fd=root), owner)

    @contextmanager
    def _open_root(self) -> Iterator[tuple[int, int]]:
        """Yield the root's descriptor and owner."""
        root = os.open(self.root, _OPEN_DIR)
        try:
            info = os.fstat(root)
            me = os.geteuid()
            if me not in (info.st_uid, 0):
                msg = f"registry root {self.root} belongs to another user (uid {info.st_uid}, this is {me})"
                raise RegistryError(msg, hint="choose another root with ZBUS_ROOT")
            if info.st_mode & 0o077:
                msg = f"registry root {self.root} is open to other users (mode {stat.S_IMODE(info.st_mode):04o})"
                raise RegistryError(msg, hint=f"chmod 700 {self.root}")
            yield root, info.st_uid
        finally:
            os.close(root)


class LocalArea:
    """``Area`` over an open directory descriptor, which it owns."""

    __slots__ = ("_fd", "_trusted")

    def __init__(self, fd: int, owner: int) -> None:
        self._fd = fd
        self._trusted = (owner, os.geteuid(), 0)

    def create_excl(self, name: str) -> int:
        """Create a file, mode 0600, that must not exist; return its descriptor."""
        return os.open(name, _CREATE, mode=0o600, dir_fd=self._fd)

    def write(self, handle: int, data: bytes) -> None:
        """Write all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]

    def fsync(self, handle: int) -> None:
        """Make the file's data durable."""
        os.fsync(handle)

    def close_file(self, handle: int) -> None:
        """Close a descriptor."""
        os.close(handle)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fails if ``target`` exists."""
        if failpoints.active is not None:
            failpoints.active("before_link")
        os.link(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """Rename a file over ``target``, atomically."""
        if failpoints.active is not None:
            failpoints.active("before_rename")
        os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def read(self, name: str, limit: int) -> tuple[FileInfo, bytes]:
        """Open and read a file of at most ``limit`` bytes; the data is empty for anything else."""
        fd = os.open(name, _OPEN_FILE, dir_fd=self._fd)
        try:
            found = os.fstat(fd)
            info = FileInfo(
                regular=stat.S_ISREG(found.st_mode),
                trusted=found.st_uid in self._trusted and not found.st_mode & 0o022,
                size=found.st_size,
                links=found.st_nlink,
            )
            if not info.regular or info.size > limit:
                return info, b""
            data = b""
            # one more than the size, so that the end is seen without a further read
            while len(data) <= info.size and (part := os.read(fd, info.size + 1 - len(data))):
                data += part
            return info, data
        finally:
            os.close(fd)

    def links(self, name: str) -> int:
        """Return how many names the file has."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_nlink

    def names(self) -> list[str]:
        """Return the names in the directory."""
        return os.listdir(self._fd)

    def version(self) -> int:
        """Return the directory's last change in nanoseconds."""
        return os.fstat(self._fd).st_mtime_ns

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Make the directory's names durable."""
        os.fsync(self._fd)

    def __enter__(self) -> Self:
        """Return the open directory."""
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        """Close the descriptor."""
        os.close(self._fd)
