"""What the commands write where: results on stdout, everything else on stderr, colour only where wanted.

Light: no rich, no msgspec.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

__all__ = ["Console", "Style", "clean", "clip", "shown", "wants_color"]

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_LONGEST: Final = 2000
_FALSE: Final = ("", "0", "false")


def clean(text: str) -> str:
    """Return foreign text made harmless for a terminal: controls, escapes and bidi marks become visible.

    Tabs become spaces; one line stays one line only if it had no newline, which is escaped as well.
    """
    text = text.expandtabs(4)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char.isprintable() or (char == " "):
        return char
    if unicodedata.category(char) == "Zs":
        return " "
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clip(text: str, limit: int = _LONGEST) -> str:
    """Return ``text``, its middle left out where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 30) // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as a person would type it: relative where it lies below the current directory."""
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def wants_color(choice: str, stream: TextIO, env: Mapping[str, str] | None = None) -> bool:
    """Return whether to colour: ``--color`` first, then NO_COLOR, FORCE_COLOR, then whether it is a terminal."""
    environment = os.environ if env is None else env
    if choice != "auto":
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "").lower() not in _FALSE:
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"


@dataclass(frozen=True, slots=True)
class Style:
    """Wraps text in colour codes, or leaves it alone."""

    color: bool = False

    def __call__(self, text: str, *names: str) -> str:
        """Return ``text`` in the named styles (``bold``, ``dim``, ``red``, ``green``, ``yellow``, ``cyan``)."""
        if not self.color or not names:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"


@dataclass(slots=True)
class Console:
    """One command's output.

    Attributes:
        json: One JSON object on stdout instead of text; hints and next steps are left out.
        verbosity: -1 quiet, 0, 1 (``-v``), 2.
        color: ``auto``, ``always`` or ``never``.
    """

    json: bool = False
    verbosity: int = 0
    color: str = "auto"
    _stdout: TextIO | None = field(default=None, repr=False)
    _stderr: TextIO | None = field(default=None, repr=False)

    @property
    def stdout(self) -> TextIO:
        """Where results go."""
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> TextIO:
        """Where everything else goes."""
        return self._stderr or sys.stderr

    @property
    def quiet(self) -> bool:
        """Whether only results and errors are shown."""
        return self.verbosity < 0

    @property
    def verbose(self) -> bool:
        """Whether hidden frames and folded failures are shown."""
        return self.verbosity > 0 or os.environ.get("ZBUS_TRACEBACK") == "full"

    @property
    def width(self) -> int:
        """Columns of the terminal (at least 40)."""
        return max(40, shutil.get_terminal_size((100, 24)).columns)

    def out_style(self) -> Style:
        """Return the style of stdout."""
        return Style(wants_color(self.color, self.stdout))

    def err_style(self) -> Style:
        """Return the style of stderr."""
        return Style(wants_color(self.color, self.stderr))

    def result(self, text: str) -> None:
        """Write a line of the result (nothing with ``--json``: use ``object``)."""
        if not self.json:
            _write(self.stdout, text)

    def object(self, data: Mapping[str, Any]) -> None:
        """Write the one JSON object of ``--json``."""
        if self.json:
            _write(self.stdout, json.dumps(data, ensure_ascii=False, allow_nan=False))

    def note(self, text: str) -> None:
        """Write a line of progress or information to stderr unless ``-q``."""
        if not self.quiet:
            _write(self.stderr, text)

    def next(self, command: str) -> None:
        """Name the next useful command, except with ``-q`` and ``--json``."""
        if not (self.quiet or self.json):
            _write(self.stderr, f"next: {command}")

    def warn(self, text: str) -> None:
        """Write a warning to stderr."""
        _write(self.stderr, f"{self.err_style()('warning:', 'yellow', 'bold')} {text}")

    def error(self, text: str) -> None:
        """Write an error block to stderr."""
        _write(self.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """Write a line; text the stream's encoding cannot carry is escaped instead of failing."""
    encoding = stream.encoding or "utf-8"
    safe = re.sub(r"[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    stream.write(safe.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()
