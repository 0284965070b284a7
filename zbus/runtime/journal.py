"""The crash journal on disk: one mapped file for each start of a worker, written by it, read when it is gone.

What was stored in the map survives the process (SIGKILL, segmentation fault, out of memory), since its pages belong to
the kernel. It does not survive the host, and a store makes no promise to other hosts: whoever reads must run on the
same kernel. ``protocol.journal`` has the layout and what it proves.

The file is one sparse file of about 2 MiB, of which each (session, lane) takes 33 KiB. Space is allocated before it is
mapped into use: a store never meets a full disk, which would be a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from zbus.protocol import journal
from zbus.protocol.journal import JournalError, JournalReport, LaneRing

__all__ = ["CrashJournal", "journal_file", "read_journal"]

log = logging.getLogger("zbus.journal")


def journal_file(trial_dir: Path, role: str, rank: int, start: int) -> Path:
    """Return the journal of one start of one rank: ``journal/<role>.<rank>.<start>.bin``."""
    return trial_dir / "journal" / f"{role}.{rank}.{start}.bin"


def _nobody(_session: bytes) -> bool:
    return False


class CrashJournal:
    """The journal that this process writes.

    Args:
        path: Where; an old file there is replaced.
        incarnation: Of this process.
        is_over: Tells whether a session is over: none of its calls runs, and none will. Its space may be used again.

    Raises:
        OSError: The file cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, incarnation: int, *, is_over: Callable[[bytes], bool] = _nobody) -> None:
        self.path = path
        self.unkept = 0
        self._is_over = is_over
        self._nowhere = LaneRing.unkept()
        self._lock = threading.Lock()
        self._rings: dict[tuple[bytes, str], LaneRing] = {}
        self._owners: list[tuple[bytes, str] | None] = [None] * journal.BLOCKS
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(self._fd, journal.FILE_BYTES)
            os.posix_fallocate(self._fd, 0, journal.HEADER_BYTES)
            self._map = mmap.mmap(self._fd, journal.FILE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        header = journal.file_header(incarnation)
        self._map[: len(header)] = header
        self._words = memoryview(self._map).cast("Q")
        with contextlib.suppress(OSError):  # without a lock only the parent of this process knows when it is gone
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._words[journal.LOCKED_WORD] = 1

    def ring(self, session: bytes, lane: str) -> LaneRing:
        """Return the ring of a lane; one that nobody will read if there is no space for it. Any thread."""
        ring = self._rings.get((session, lane))
        return ring if ring is not None else self._take(session, lane)

    def close(self) -> None:
        """Let go of the map if nothing uses it any more; the file stays. At the end of the process."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            self._rings.clear()
            self._words.release()
            with contextlib.suppress(BufferError):  # a call may still run: its ring holds the map
                self._map.close()

    # -- rare ----------------------------------------------------------------------------------------------------

    def _take(self, session: bytes, lane: str) -> LaneRing:
        key = (session, lane)
        with self._lock:
            found = self._rings.get(key)
            if found is not None:
                return found
            name = lane.encode()
            number = self._free_block() if len(name) <= journal.LANE_BYTES else None
            ring = None if number is None else self._open_block(number, session, name)
            if number is None or ring is None:
                self._words[journal.COMPLETE_WORD] = 0  # before any call of it begins
                self.unkept += 1
                ring = self._nowhere
            else:
                self._owners[number] = key
            self._rings[key] = ring
            return ring

    def _free_block(self) -> int | None:
        for number, owner in enumerate(self._owners):
            if owner is None:
                return number
        for key in [key for key in self._rings if self._is_over(key[0]) and key not in self._owners]:
            del self._rings[key]  # rings that nobody will read, of sessions that are over
        for number, owner in enumerate(self._owners):
            if owner is not None and self._is_over(owner[0]) and not self._rings[owner].running:
                self._words[journal.COMPLETE_WORD] = 0  # its calls will be missing, and must not seem never started
                del self._rings[owner]
                self._owners[number] = None
                return number
        return None

    def _open_block(self, number: int, session: bytes, lane: bytes) -> LaneRing | None:
        at = journal.HEADER_BYTES + number * journal.BLOCK_BYTES
        try:
            os.posix_fallocate(self._fd, at, journal.BLOCK_BYTES)
        except OSError as error:
            log.warning("no crash journal for lane %r: %s", lane.decode(), error.strerror)
            return None
        first = at // journal.WORD
        self._words[first] = 0  # an earlier owner's block is no block while it changes hands
        self._map[at + journal.WORD : at + journal.BLOCK_BYTES] = bytes(journal.BLOCK_BYTES - journal.WORD)
        head = journal.block_header(session, lane)
        self._map[at + journal.WORD : at + journal.WORD + len(head)] = head
        self._words[first] = journal.MAGIC
        marks = first + journal.MARKS_AT // journal.WORD
        prints = first + journal.PRINTS_AT // journal.WORD
        return LaneRing(self._words[marks : marks + journal.RING], self._words[prints : prints + journal.RING])


def read_journal(path: Path, incarnation: int, *, reaped: bool) -> JournalReport | None:
    """Read the journal of a process of this kernel that is gone; None where there is none that can be read.

    A process that still runs may start calls after the reading, so its journal proves nothing. Who did not reap the
    process itself must have the lock tell: it holds whatever pid namespace the process lives in, and is let go only
    when its last thread is gone.

    Args:
        path: See ``journal_file``.
        incarnation: Whose it must be.
        reaped: The caller has seen the process end; otherwise it must be shown by its lock.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not reaped:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        data = os.pread(fd, journal.FILE_BYTES, 0)
        report = journal.read(data, incarnation)
        return report if reaped or journal.is_locked(data) else None
    except BlockingIOError:
        return None  # it lives
    except (OSError, JournalError) as error:
        log.warning("the crash journal %s cannot be read: %s", path.name, error)
        return None
    finally:
        os.close(fd)
