"""What all commands share: options, durations and ranges as text, warnings, errors, progress, tables."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

if TYPE_CHECKING:
    from traceview.problems import Problems, Warned
    from zbus.errors import ZbusError

__all__ = [
    "Progress",
    "SourcePath",
    "duration",
    "errors",
    "fail",
    "ledger",
    "modes",
    "numbers",
    "output_options",
    "print_json",
    "print_table",
    "range_of",
    "shown",
    "source_options",
    "sources",
    "time_ns",
    "words",
]

_UNITS: Final = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_TIME: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|h)?")
_EVERY_S: Final = 0.2


class SourcePath(click.ParamType[str]):
    """What names traces: any text; ``DIR/last`` is the newest trial in DIR."""

    name = "input"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path; an input error later if it leads nowhere."""
        path = Path(value)
        if path.name != "last" or path.exists() or not path.parent.is_dir():
            return value
        trials = [trial for trial in path.parent.iterdir() if (trial / "traces").is_dir()]
        return str(max(trials, key=lambda trial: (trial / "traces").stat().st_mtime)) if trials else value


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and ``--quiet``."""
    function = click.option("-q", "--quiet", is_flag=True, help="No warnings, no progress, no hints.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add INPUT and the choice of files."""
    function = click.option("--all-runs", is_flag=True, help="Keep files of older runs in the same tree.")(function)
    function = click.option("--ranks", metavar="0,2-5", default="", help="Only these ranks.")(function)
    function = click.option("--roles", metavar="A,B", default="", help="Only these roles.")(function)
    return sources(function)


sources = click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=SourcePath())
"""Add INPUT..."""


def modes(context: click.Context, options: dict[str, Any]) -> tuple[bool, bool]:
    """Return (as JSON, quiet), given before or after the command's name."""
    above = context.obj or {"json": False, "quiet": False}
    return options["as_json"] or above["json"], options["quiet"] or above["quiet"]


def words(text: str) -> list[str]:
    """Return the words of ``a,b``."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str, option: str = "--ranks") -> list[int]:
    """Return the numbers of ``0,2-5``; a usage error for anything else."""
    found: list[int] = []
    for part in words(text):
        low, high = range_of(part, option)
        if high - low > 1_000_000:
            msg = f"{part!r} is too long a range"
            raise click.BadParameter(msg, param_hint=option)
        found.extend(range(low, high + 1))
    return found


def range_of(text: str, option: str) -> tuple[int, int]:
    """Return the ends of ``2-5`` or ``7``; a usage error for anything else."""
    low, dash, high = text.strip().partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        msg = f"{text!r} is not a number or a range such as 2-5"
        raise click.BadParameter(msg, param_hint=option)
    return int(low), int(high if dash else low)


def time_ns(text: str | None, option: str) -> int | None:
    """Return ``1.5s``, ``20ms``, ``300us`` (without unit: seconds) in ns; a usage error for anything else."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        msg = f"{text!r} is not a time such as 1.5s, 20ms or 300us"
        raise click.BadParameter(msg, param_hint=option)
    return round(float(match[1]) * _UNITS[match[2] or "s"])


def ledger(*, quiet: bool) -> Problems:
    """Return a new ledger that warns on stderr."""
    from traceview.problems import Problems

    return Problems(on_warning=None if quiet else warn)


def warn(warned: Warned) -> None:
    """Print a warning."""
    click.echo(f"warning[{warned.code}]: {shown(warned.text, 400)}", err=True)


@contextmanager
def errors(*, as_json: bool) -> Iterator[None]:
    """Turn errors of ours into their message and exit code; no garbage collection meanwhile.

    Millions of small objects and no cycles: the collector would only look at them again and again.
    """
    from zbus.errors import ZbusError

    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    except ZbusError as error:
        fail(error, as_json=as_json)
    finally:
        if collecting:
            gc.enable()


def fail(error: ZbusError, *, as_json: bool) -> NoReturn:
    """Print an error and exit with its code."""
    if as_json:
        facts = {"code": error.code, "message": error.message, "hint": error.hint}
        print_json({"schema": "zbus.error/1", "error": facts})
    click.echo(f"error[{error.code}]: {shown(error.message, 400)}", err=True)
    if error.hint:
        click.echo(f"hint: {shown(error.hint, 400)}", err=True)
    sys.exit(error.exit_code)


class Progress:
    """A line on stderr that says how many files are done; only on a terminal.

    Args:
        quiet: Say nothing.
        what: The verb.
    """

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what = what
        self._on = not quiet and sys.stderr.isatty()
        self._last = 0.0

    def __call__(self, done: int, of: int) -> None:
        """Show ``done`` of ``of`` files."""
        now = time.monotonic()
        if self._on and (now - self._last > _EVERY_S or done == of):
            self._last = now
            end = "\r\x1b[K" if done == of else ""
            sys.stderr.write(f"\r{self._what} {done} of {of} files{end}")
            sys.stderr.flush()


def shown(text: str, width: int) -> str:
    """Return foreign text safe for a terminal: control characters as escapes, cut at ``width``."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def duration(us: float) -> str:
    """Return microseconds as text for people."""
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if abs(us) < limit:
            return f"{us / factor:.1f} {unit}"
    return f"{us / 1e6:.2f} s"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, limit: int | None = None) -> None:
    """Print a table; texts left, all else right; no cell wider than 48."""
    kept = [[shown(str(cell), 48) for cell in row] for row in rows[:limit]]
    widths = [max(len(str(head)), *(len(row[at]) for row in kept), 1) for at, head in enumerate(heads)]
    texts = [
        all(isinstance(row[at], str) and not str(row[at])[:1].isdigit() for row in rows) for at in range(len(heads))
    ]
    for cells in ([str(head) for head in heads], *kept):
        line = [c.ljust(w) if left else c.rjust(w) for c, w, left in zip(cells, widths, texts, strict=True)]
        click.echo("  ".join(line).rstrip())
    if limit is not None and len(rows) > limit:
        click.echo(f"… {len(rows) - limit} more rows: --top {len(rows)}", err=True)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, allow_nan=False))
