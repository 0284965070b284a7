"""A table of a run's steps on stderr: redrawn in place on a terminal, else plain rows at intervals, or JSON lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from controller.console import Console, clean
from controller.progress import Mode, open_progress, short

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["LiveTable", "open_table"]

_PLAIN_EVERY_S: Final = 10.0
_SHOWN: Final = 8
_WIDTH: Final = 10


class LiveTable(Protocol):
    """Used as a context manager on the thread that made it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def row(self, step: int, /, **values: Any) -> None:
        """Show the values of a step, by column; what is not a column is left out. Never raises."""
        ...


def open_table(console: Console, mode: Mode | str, columns: Sequence[str], total: int | None, text: str) -> LiveTable:
    """Return a table in one of ``controller.progress.MODES``; ``auto`` redraws on a terminal, else it writes rows."""
    if mode == "auto":
        mode = "none" if console.quiet else "bar" if console.stderr.isatty() and not console.json else "plain"
    if mode == "bar":
        return _Redrawn(console, columns, total, text)
    if mode == "plain":
        return _Rows(console, columns, total, text)
    return _Progress(console, mode, total, text)


class _Progress:
    """No table: JSON lines or nothing, as progress has them."""

    def __init__(self, console: Console, mode: str, total: int | None, text: str) -> None:
        self._progress = open_progress(console, mode, total, text)
        self._done = 0

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def row(self, step: int, /, **values: Any) -> None:
        """Tell it as progress."""
        self._progress.update(step + 1 - self._done, **values)
        self._done = step + 1


class _Rows:
    """The heads once, then a row per ten seconds and the last one."""

    def __init__(self, console: Console, columns: Sequence[str], total: int | None, text: str) -> None:
        self._console = console
        self._columns = columns
        self._total = total
        self._text = text
        self._next = time.monotonic()
        self._headed = False
        self._waiting: tuple[int, dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._waiting is not None:
            self._show(*self._waiting)

    def row(self, step: int, /, **values: Any) -> None:
        """Write a row when one is due."""
        self._waiting = (step, values)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_EVERY_S
            self._show(step, values)

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._headed:
            self._headed = True
            self._console.note(_line([self._text, *self._columns]))
        self._waiting = None
        self._console.note(_line([_step(step, self._total), *_cells(self._columns, values)]))


class _Redrawn:
    """The newest rows in a frame that is drawn anew; by rich, which loads only here."""

    def __init__(self, console: Console, columns: Sequence[str], total: int | None, text: str) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        style = console.err_style()
        self._columns = columns
        self._total = total
        self._text = text
        self._rows: deque[list[str]] = deque(maxlen=_SHOWN)
        self._live: Live = Live(
            console=RichConsole(file=console.stderr, no_color=not style.color, highlight=False),
            refresh_per_second=4,
            # What the user prints must reach their own stdout, untouched.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._live.stop()

    def row(self, step: int, /, **values: Any) -> None:
        """Put it at the end of the table; the oldest one leaves."""
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        self._rows.append([_step(step, self._total), *_cells(self._columns, values)])
        table = Table(box=SIMPLE, pad_edge=False)
        for name in (self._text, *self._columns):
            table.add_column(Text(clean(name)), justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*map(Text, row))
        self._live.update(table)


def _step(step: int, total: int | None) -> str:
    return f"{step + 1}" + (f"/{total}" if total else "")


def _cells(columns: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    return [short(values[name]) if name in values else "" for name in columns]


def _line(cells: Sequence[str]) -> str:
    return "  ".join(
        clean(cell).rjust(max(_WIDTH, len(cells[0])) if at == 0 else _WIDTH) for at, cell in enumerate(cells)
    )
