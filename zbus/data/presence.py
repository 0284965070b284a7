"""Who on this host holds shared memory: one private directory per process, and a lock that tells whether it lives.

The directories stand below ``/dev/shm/zbus-<uid>``. Each holds a file ``lock`` with a POSIX record lock on it, which
the kernel drops when the process ends, however it ends and in whatever pid namespace it lived. A record lock is not
inherited by ``fork``, so a child that outlives its parent does not keep the parent's memory. It is also lost when the
same process closes any descriptor of the file: a process never opens a lock of its own again (``_ours``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import Final, Self

from zbus.errors import TransportError

__all__ = ["VARIABLE", "Presence", "is_token", "lives", "shared_root", "sweep"]

_TOKEN: Final = re.compile(r"[0-9a-f]{16}")
_FRESH_S: Final = 60.0
"""A directory without a lock is one that is being made, for so long."""

_TRIES: Final = 20
_UNMADE: Final = "lock.new"

_ours: set[str] = set()
_ours_lock: Final = threading.Lock()


VARIABLE: Final = "ZBUS_SHARED_MEMORY_DIR"
"""Names another file system in memory than ``/dev/shm``, which containers often keep small."""


def shared_root() -> Path:
    """Return the directory of all processes of this user."""
    place = os.environ.get(VARIABLE) or "/dev/shm"  # noqa: S108  # owner and mode are checked before use
    return Path(place) / f"zbus-{os.getuid()}"


def is_token(text: object) -> bool:
    """Tell whether a value from outside is the name of a process's directory."""
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


class Presence:
    """This process's directory, from ``enter`` to ``leave``.

    Attributes:
        token: Its name, random, made known to peers.
        path: Where it stands.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.token = path.name
        self._descriptor = descriptor
        self._owner = os.getpid()

    @classmethod
    def enter(cls, root: Path) -> Self:
        """Make a directory, and sweep those of processes that are gone.

        Raises:
            TransportError: There is no shared memory here, or the directory of this user is not private.
        """
        try:
            path = cls._make(root)
            # Locked before it bears its name: a lock that nobody holds yet would say that its process is gone.
            descriptor = os.open(path / _UNMADE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            (path / _UNMADE).rename(path / "lock")
        except OSError as error:
            msg = f"no shared memory in {root}: {error.strerror or error}"
            raise TransportError(msg) from error
        return cls(path, descriptor)

    @staticmethod
    def _make(root: Path) -> Path:
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            path = root / os.urandom(8).hex()
            with _ours_lock:
                _ours.add(str(path))
            with contextlib.suppress(FileNotFoundError):  # the last one to leave has removed the root
                _require_private(root)
                sweep(root)
                path.mkdir(mode=0o700)
                return path
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(root))

    def leave(self) -> None:
        """Remove the directory; what peers have mapped stays readable for them. Idempotent; not from a forked child."""
        if self._descriptor < 0 or os.getpid() != self._owner:
            return
        descriptor, self._descriptor = self._descriptor, -1
        _remove(self.path)
        os.close(descriptor)
        with _ours_lock:
            _ours.discard(str(self.path))
        _remove_root(self.path.parent)


def lives(root: Path, token: str) -> bool:
    """Tell whether the process of a directory is alive, as far as its lock tells; False if there is none."""
    path = root / token
    with _ours_lock:
        if str(path) in _ours:
            return True
    descriptor = _try_lock(path)
    if descriptor is None:
        return path.is_dir()
    os.close(descriptor)
    return False


def sweep(root: Path) -> int:
    """Remove the directories of processes that are gone; return how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            if not _TOKEN.fullmatch(entry.name) or entry.is_symlink():
                continue
            with _ours_lock:
                if entry.path in _ours:
                    continue
            descriptor = _try_lock(Path(entry.path))
            if descriptor is not None:
                _remove(Path(entry.path))
                os.close(descriptor)
                swept += 1
    if swept:
        _remove_root(root)
    return swept


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a process that is gone; None if it lives, or nothing can be said."""
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _lock_of_the_unmade(path)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _lock_of_the_unmade(path: Path) -> int | None:
    """Lock a directory whose maker died before it had a lock, once it is surely not being made any more."""
    try:
        if time.time() - path.stat().st_mtime < _FRESH_S:
            return None
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return descriptor


def _remove(path: Path) -> None:
    """Remove a directory of files; the lock last, so that one that was left half is swept by the next."""
    with contextlib.suppress(OSError):
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "lock"):
            entry.unlink(missing_ok=True)
        path.rmdir()


def _remove_root(root: Path) -> None:
    with contextlib.suppress(OSError):  # others are there; whoever enters just now makes it again
        root.rmdir()


def _require_private(root: Path) -> None:
    facts = root.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        msg = f"{root} is not a private directory of this user"
        raise TransportError(msg, hint=f"remove it, or: chmod 700 {root}")
