"""Where a merge writes: unnamed part files, joined into one output that gets its name only when it is whole.

Several processes may fill parts at once. A part of a gz output holds deflate blocks, so that joining parts costs no
second compression and the result is one gzip member.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from traceview.problems import OutputError

__all__ = ["OutputFile", "Part", "PartFile", "temporary_fd", "write_all"]

_COPY: Final = 1 << 20
_LEVEL: Final = 1
_POLYNOMIAL: Final = 0xEDB88320
_GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"

Part = tuple[int, int, int, int]
"""(offset in the part file, bytes there, CRC-32 and size of what they inflate to; both 0 without compression)."""


def temporary_fd(directory: Path) -> int:
    """Return a new file without a name in ``directory``: it is gone with its last descriptor, whatever happens.

    Raises:
        OutputError: It cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=directory, prefix=".traceview-")
        os.unlink(name)  # noqa: PTH108  # the pair of mkstemp
    except OSError as error:
        msg = f"{directory} cannot be written: {error.strerror}"
        raise OutputError(msg, hint="choose another place with -o; nothing was left behind") from error
    return fd


def write_all(fd: int, data: bytes, shown: str) -> None:
    """Write all bytes to ``fd``; raises OutputError that names ``shown`` when the disk takes no more."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        msg = f"{shown} cannot be written: {error.strerror}"
        raise OutputError(msg, hint="choose another place with -o; nothing was left behind") from error


class PartFile:
    """Collects pieces into parts of one open file.

    Args:
        fd: Open for writing; positioned at its end.
        compress: Whether the output is gz.
        shown: The output's name, for errors.
    """

    def __init__(self, fd: int, *, compress: bool, shown: str) -> None:
        self._fd = fd
        self._compress = compress
        self._shown = shown
        self._begin = self._at = os.lseek(fd, 0, os.SEEK_CUR)
        self._squeeze = self._new_squeeze()
        self._crc = self._size = 0

    def _new_squeeze(self) -> zlib._Compress | None:
        return zlib.compressobj(_LEVEL, zlib.DEFLATED, -15) if self._compress else None

    def write(self, data: bytes) -> None:
        """Add bytes to the current part; raises OutputError when the disk takes no more."""
        if self._squeeze is not None:
            self._crc = zlib.crc32(data, self._crc)
            self._size += len(data)
            data = self._squeeze.compress(data)
        write_all(self._fd, data, self._shown)
        self._at += len(data)

    def end_part(self) -> Part:
        """End the current part and begin another."""
        if self._squeeze is not None:
            tail = self._squeeze.flush(zlib.Z_FULL_FLUSH)
            write_all(self._fd, tail, self._shown)
            self._at += len(tail)
        part = (self._begin, self._at - self._begin, self._crc, self._size)
        self._begin, self._squeeze, self._crc, self._size = self._at, self._new_squeeze(), 0, 0
        return part


class OutputFile:
    """A context manager: bytes and parts in, one file out; on any error nothing stays behind.

    Args:
        path: Output; gz if the name ends in ``.gz``. An existing file is replaced, in one step, at the end.

    Raises:
        OutputError: From any method, when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.compress = path.name.endswith(".gz")
        self.directory = path.parent
        self.shown = str(path)
        self._fd = -1
        self._crc = self._size = 0
        self.bytes = 0

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error) from error
        if self.compress:
            self._raw(_GZIP_HEADER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temp.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Add bytes."""
        if not self.compress:
            self._raw(data)
            return
        squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
        self._raw(squeeze.compress(data) + squeeze.flush(zlib.Z_FULL_FLUSH))
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)

    def add_part(self, fd: int, part: Part) -> None:
        """Add a part that a ``PartFile`` wrote to ``fd``."""
        offset, length, crc, size = part
        while length:
            data = os.pread(fd, min(_COPY, length), offset)
            if not data:
                msg = f"{self._path} cannot be written: a part of it ended early"
                raise OutputError(msg)
            self._raw(data)
            offset += len(data)
            length -= len(data)
        if self.compress:
            self._crc = _combine(self._crc, crc, size)
            self._size += size

    def commit(self) -> None:
        """End the file and give it its name."""
        if self.compress:
            end = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15).flush()
            self._raw(end + self._crc.to_bytes(4, "little") + (self._size & 0xFFFFFFFF).to_bytes(4, "little"))
        try:
            os.close(self._fd)
            self._fd = -1
            self._temp.replace(self._path)
        except OSError as error:
            raise self._error(error) from error

    def _raw(self, data: bytes) -> None:
        write_all(self._fd, data, str(self._path))
        self.bytes += len(data)

    def _error(self, error: OSError) -> OutputError:
        msg = f"{self._path} cannot be written: {error.strerror}"
        return OutputError(msg, hint="choose another place with -o; nothing was left behind")


def _combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two joined pieces from theirs and the length of the second, as zlib's crc32_combine."""

    def times(matrix: list[int], vector: int) -> int:
        total = 0
        for row in matrix:
            if not vector:
                break
            if vector & 1:
                total ^= row
            vector >>= 1
        return total

    matrix = [_POLYNOMIAL, *(1 << n for n in range(31))]  # one zero bit appended
    for _ in range(3):
        matrix = [times(matrix, row) for row in matrix]  # one zero byte
    while length:
        if length & 1:
            first = times(matrix, first)
        matrix = [times(matrix, row) for row in matrix]
        length >>= 1
    return first ^ second
