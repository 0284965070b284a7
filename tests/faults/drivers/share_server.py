"""A directory mounted as a client of a slow file server sees it: names are remembered, calls fail or hang.

``python share_server.py DIRECTORY MOUNTPOINT SECONDS FAULTS``: SECONDS is how long the kernel remembers names, absent
names and attributes. FAULTS is a JSON file that may change at any time: by operation, ``{"rename": {"error": "ESTALE",
"every": 3}}`` fails each third one, ``{"write": {"sleep": 1.5}}`` delays all. With ``"under": "registry"`` a rule is
for paths that hold that word alone.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mfusepy
from mfusepy import FuseOSError

_ATTRIBUTES = ("st_atime", "st_ctime", "st_mtime")


class Share(mfusepy.Operations):
    """Passes every operation on to the directory, after the faults."""

    use_ns = True

    def __init__(self, directory: Path, faults: Path) -> None:
        self._directory = directory
        self._faults = faults
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def _at(self, operation: str, path: str) -> Path:
        rule = json.loads(self._faults.read_text() or "{}").get(operation)
        if rule is not None and rule.get("under", "") in path:
            with self._lock:
                self._counts[operation] += 1
                hit = self._counts[operation] % rule.get("every", 1) == 0
            time.sleep(rule.get("sleep", 0.0))
            if hit and "error" in rule:
                raise FuseOSError(getattr(errno, rule["error"]))
        return Path(f"{self._directory}{path}")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at("getattr", path)) if fh is None else os.fstat(fh)
        words = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
        return {
            **{word: getattr(found, word) for word in words},
            **{word: getattr(found, f"{word}_ns") for word in _ATTRIBUTES},
        }

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        with os.scandir(self._at("readdir", path)) as entries:
            names = [(entry.name, entry.inode()) for entry in entries]
        # an entry whose inode is 0 would be passed over
        return [(name, {"st_ino": inode or 1}, 0) for name, inode in ((".", 1), ("..", 1), *names)]

    def mkdir(self, path: str, mode: int) -> int:
        self._at("mkdir", path).mkdir(mode)
        return 0

    def rmdir(self, path: str) -> int:
        self._at("rmdir", path).rmdir()
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at("create", path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at("open", path), flags & ~os.O_APPEND)  # the kernel says where to write

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._at("read", path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._at("write", path)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at("truncate", path) if fh is None else fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._at("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._at("fsyncdir", path)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(f"{self._directory}{source}", self._at("link", target))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._at("rename", old).rename(f"{self._directory}{new}")
        return 0

    def unlink(self, path: str) -> int:
        self._at("unlink", path).unlink()
        return 0

    def symlink(self, target: str, source: str) -> int:
        self._at("symlink", target).symlink_to(source)
        return 0

    def readlink(self, path: str) -> str:
        return str(self._at("readlink", path).readlink())

    def chmod(self, path: str, mode: int) -> int:
        self._at("chmod", path).chmod(mode)
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        os.utime(self._at("utimens", path), ns=times)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._at("fallocate", path)
        os.posix_fallocate(fh, offset, size)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at("statfs", path))
        words = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize", "f_namemax")
        return {word: getattr(found, word) for word in words}


def main(directory: str, mountpoint: str, seconds: str, faults: str) -> None:
    """Serve until unmounted."""
    mfusepy.FUSE(
        Share(Path(directory), Path(faults)),
        mountpoint,
        foreground=True,
        fsname="zbus-test",
        hard_remove=True,
        use_ino=True,
        entry_timeout=float(seconds),
        attr_timeout=float(seconds),
        negative_timeout=float(seconds),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
