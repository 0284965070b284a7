"""Write a Chrome trace (JSON object form, plain or gz) that appears under its name only when it is whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from traceview.problems import OutputError

__all__ = ["ChromeWriter"]


class ChromeWriter:
    """A context manager: events in, one file out; on any error nothing stays behind.

    Args:
        path: Output; gz if the name ends in ``.gz``. An existing file is replaced, in one step, at the end.

    Raises:
        OutputError: From any method, when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._squeeze = zlib.compressobj(3, zlib.DEFLATED, 31) if path.name.endswith(".gz") else None
        self._encode = msgspec.json.Encoder().encode
        self._first = True
        self._fd = -1
        self.bytes = 0

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error) from error
        try:
            self._put(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        except OutputError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temp.unlink(missing_ok=True)

    def events(self, events: Sequence[msgspec.Struct | Mapping[str, Any]]) -> None:
        """Add events; some thousands at a time are best."""
        if events:
            self._put((b"" if self._first else b",\n") + self._encode(events)[1:-1])
            self._first = False

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write the rest and ``metadata`` (as ``otherData``), then give the file its name."""
        self._put(b'\n],"otherData":%b}\n' % self._encode(metadata))
        if self._squeeze is not None:
            self._write(self._squeeze.flush())
        try:
            os.close(self._fd)
            self._fd = -1
            self._temp.replace(self._path)
        except OSError as error:
            raise self._error(error) from error

    def _put(self, data: bytes) -> None:
        self._write(data if self._squeeze is None else self._squeeze.compress(data))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._error(error) from error
        self.bytes += len(data)

    def _error(self, error: OSError) -> OutputError:
        msg = f"{self._path} cannot be written: {error.strerror}"
        return OutputError(msg, hint="choose another place with -o; nothing was left behind")
