"""Progress of a run on stderr: a bar on a terminal, else one plain line per ten seconds, or JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from controller.console import Console, clean
from zbus.config import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["MODES", "Bar", "Mode", "Progress", "open_progress", "short"]

Mode = Literal["auto", "bar", "plain", "json", "none"]
MODES: Final = ("auto", "bar", "plain", "json", "none")
_PLAIN_EVERY_S: Final = 10.0
_JSON_EVERY_S: Final = 1.0


class Progress(Protocol):
    """One line of progress, used as a context manager on the thread that made it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def update(self, advance: float = 1, /, **fields: Any) -> None:
        """Go on by ``advance`` and show ``fields`` beside the bar (numbers are shortened). Never raises."""
        ...


def open_progress(console: Console, mode: str, total: float | None, text: str) -> Progress:
    """Return progress in ``mode``; ``auto`` is a bar on a terminal and plain lines elsewhere."""
    if mode == "auto":
        terminal = console.stderr.isatty() and not console.json
        mode = "none" if console.quiet else "bar" if terminal else "plain"
    if mode == "bar":
        return Bar(console, total, text)
    if mode == "none":
        return _Silent()
    return _Lines(console, total, text, as_json=mode == "json")


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, advance: float = 1, /, **fields: Any) -> None:
        """Show nothing."""


class _Lines:
    """A line per ten seconds (JSON: per second), and one at the end."""

    def __init__(self, console: Console, total: float | None, text: str, *, as_json: bool) -> None:
        self._console = console
        self._total = total
        self._text = text
        self._json = as_json
        self._done = 0.0
        self._fields: dict[str, Any] = {}
        self._began = time.monotonic()
        self._next = self._began + (0 if as_json else _PLAIN_EVERY_S)
        self._shown = -1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._shown != self._done:
            self._show()

    def update(self, advance: float = 1, /, **fields: Any) -> None:
        """Count, and show a line when one is due."""
        self._done += advance
        self._fields.update(fields)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (_JSON_EVERY_S if self._json else _PLAIN_EVERY_S)
            self._show()

    def _show(self) -> None:
        self._shown = self._done
        elapsed = max(time.monotonic() - self._began, 1e-9)
        if self._json:
            line = {
                "schema": "zbus.progress/1",
                "text": self._text,
                "done": self._done,
                "total": self._total,
                "elapsed_s": round(elapsed, 3),
                "fields": {key: _jsonable(value) for key, value in self._fields.items()},
            }
            # Not a note: whoever asks for JSON lines wants them with -q too.
            self._console.error(json.dumps(line))
            return
        parts = [self._text, f"{self._done:g}" + (f"/{self._total:g}" if self._total else "")]
        if self._total:
            parts.append(f"{100 * self._done / self._total:.0f}%")
        parts += [format_duration(elapsed), f"{self._done / elapsed:.3g}/s", *_shown(self._fields)]
        self._console.note("  ".join(parts))


class Bar:
    """A bar that redraws itself; drawn by rich, which loads only here."""

    def __init__(self, console: Console, total: float | None, text: str) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        style = console.err_style()
        rich_console = RichConsole(file=console.stderr, no_color=not style.color, highlight=False)
        self._progress: RichProgress = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[shown]}", markup=False),
            console=rich_console,
            # What the user prints must reach their own stdout, untouched.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID = self._progress.add_task(clean(text), total=total, shown="")
        self._fields: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._progress.stop()

    def update(self, advance: float = 1, /, **fields: Any) -> None:
        """Move the bar."""
        self._fields.update(fields)
        self._progress.update(self._task, advance=advance, shown="  ".join(_shown(self._fields)))


def _shown(fields: Mapping[str, Any]) -> list[str]:
    return [f"{clean(str(key))} {short(value)}" for key, value in fields.items()]


def short(value: Any) -> str:
    """Return a value as a few characters: numbers in four digits, text cut and made harmless. Never raises."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return clean(str(value))[:40]
    try:
        return f"{float(value):.4g}"
    except Exception:  # noqa: BLE001 - a user's number may refuse; progress never breaks a run
        return "?"


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - as above
        return str(value)[:200]
    return number if number - number == 0 else str(number)
