"""Where the numbers of a run go: the console, ``metrics.jsonl``, and whatever fills a protocol of two methods.

::

    with Metrics([ConsoleSink(), JsonlSink(run.trial_dir.path / "metrics.jsonl")]) as metrics:
        metrics.log(step, values(merge(dumps)))

Used by the thread that runs the user's loop. A sink that fails never ends the run.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO, runtime_checkable

from controller.console import clean
from zbus.errors import ConfigError

if TYPE_CHECKING:
    from zbus.config import TrialDir

__all__ = ["FILE", "ConsoleSink", "JsonlSink", "Metrics", "Sink", "open_metrics"]

_log = logging.getLogger("zbus.controller.metrics")

FILE: Final = "metrics.jsonl"
"""Name in the trial directory; the report draws what stands there."""

_RESERVED: Final = ("step", "wall_time")


class Sink(Protocol):
    """Takes the numbers of steps. One that also has ``resume(step)`` is told when a run goes on after that step."""

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Take the numbers of one step; steps only rise. What it raises is reported once and does no harm."""
        ...

    def close(self) -> None:
        """Write out what is held back and end."""
        ...


@runtime_checkable
class _Resumes(Protocol):
    def resume(self, step: int, /) -> None: ...


class Metrics:
    """Hands the numbers of each step to every sink.

    Args:
        sinks: Where they go.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._missed = [0] * len(self._sinks)
        self._last: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    @property
    def last_step(self) -> int | None:
        """The step logged last, for the next run's ``resume``; None before any."""
        return self._last

    def resume(self, step: int | None) -> None:
        """Go on after ``step``: what sinks have of later steps is taken away where they can, for they are taken again.

        Args:
            step: The last that stays; None: none does.

        Raises:
            Exception: What a sink raises: a run that has not begun may as well stop.
        """
        self._last = step
        for sink in self._sinks:
            if isinstance(sink, _Resumes):
                sink.resume(-1 if step is None else step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand the numbers of a step to all sinks.

        Args:
            step: Above that of the last call.
            values: Numbers by key: floats, integers, or arrays and tensors of one element.

        Raises:
            ValueError: The step does not rise, a value is no number, or a key is ``step`` or ``wall_time``.
            ConfigError: A sink has steps of an earlier run, and ``resume`` was not called.
        """
        if self._last is not None and step <= self._last:
            msg = f"metrics of step {step} come after those of step {self._last}; steps only rise"
            raise ValueError(msg)
        numbers = {key: _number(key, value) for key, value in values.items()}
        if taken := [key for key in _RESERVED if key in numbers]:
            msg = f"metrics may not be named {' or '.join(taken)}: these stand beside the numbers of each step"
            raise ValueError(msg)
        self._last = step
        self._each(lambda sink: sink.log(step, numbers))

    def close(self) -> None:
        """End all sinks. Safe to repeat."""
        self._each(lambda sink: sink.close())
        for sink, missed in zip(self._sinks, self._missed, strict=True):
            if missed:
                _log.info("%s missed %d calls", _name(sink), missed)
        self._sinks, self._missed = [], []

    def _each(self, act: Callable[[Sink], None]) -> None:
        for place, sink in enumerate(self._sinks):
            try:
                act(sink)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - a user's sink may raise anything, and training goes on
                self._missed[place] += 1
                if self._missed[place] == 1:
                    _log.warning(
                        "metrics go on without %s, which failed: %s: %s (said once)",
                        _name(sink), type(error).__name__, error,
                    )  # fmt: skip


class ConsoleSink:
    """One line per step: ``step 12 · reward 0.41 · loss 1.2``.

    Args:
        keys: Which to show, in this order; ``*`` and ``?`` match as in file names. All where empty.
        every: Only each so many steps.
        stream: Where to; stderr where None.
    """

    def __init__(self, keys: Sequence[str] = (), *, every: int = 1, stream: TextIO | None = None) -> None:
        self._keys = tuple(keys)
        self._every = max(1, every)
        self._stream = stream

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show one line."""
        if step % self._every:
            return
        parts = [f"{clean(key)} {_shown(values[key])}" for key in self._chosen(values)]
        print(" · ".join([f"step {step}", *parts]), file=self._stream or sys.stderr)

    def close(self) -> None:
        """Nothing is held back."""

    def _chosen(self, values: Mapping[str, float]) -> list[str]:
        if not self._keys:
            return list(values)
        return list(dict.fromkeys(key for wanted in self._keys for key in fnmatch.filter(values, wanted)))


class JsonlSink:
    """One JSON object per line: ``{"step": 12, "wall_time": 1764500000.0, "actor/loss": 0.3}``.

    NaN and infinities are the texts ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, so every line is strict JSON. A line is
    written by one call, whole or not at all.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = self._open()
        self._began = os.fstat(self._fd).st_size > 0
        """Whether lines of an earlier run are there, which ``resume`` has not judged yet."""

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"

    def resume(self, step: int) -> None:
        """Drop the lines of later steps, and torn ones."""
        temp = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temp.open("wb") as file:
            file.writelines(line for line in _lines(self.path) if (at := _step(line)) is not None and at <= step)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(self.path)
        os.close(self._fd)
        self._fd = self._open()
        self._began = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            OSError: It could not be written; the file is as before.
            ConfigError: The file has lines of an earlier run and ``resume`` was not called.
        """
        if self._began:
            msg = f"{self.path} holds steps of an earlier run"
            raise ConfigError(msg, hint="go on in it with Metrics.resume(step), or start with another file")
        plain = {key: value if math.isfinite(value) else _odd(value) for key, value in values.items()}
        line = json.dumps({"step": step, "wall_time": round(time.time(), 3), **plain}, ensure_ascii=False) + "\n"
        data = line.encode()
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) == len(data):
                return
            reason = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            reason = error
        os.ftruncate(self._fd, size)
        raise reason

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = f"metrics cannot be written to {self.path}: {error.strerror}"
            raise ConfigError(msg, hint="name a file in a directory that can be written") from error


def open_metrics(trial: TrialDir, sinks: Sequence[str] = ("console", "jsonl")) -> Metrics:
    """Return metrics for a trial, their sinks by name, as a config lists them.

    Args:
        trial: The trial directory.
        sinks: ``console``, ``jsonl`` (``metrics.jsonl`` in the trial directory), ``tensorboard`` (``tensorboard/``
            there), or ``file.py:name`` / ``package.module:name`` of something that is called with ``trial`` and returns
            a sink.

    Raises:
        ConfigError: A name is unknown, or a sink cannot be opened.
        EngineLoadError: What a path names cannot be loaded.
    """
    return Metrics([_open_sink(trial, name) for name in sinks])


def _open_sink(trial: TrialDir, name: str) -> Sink:
    if name == "console":
        return ConsoleSink()
    if name == "jsonl":
        return JsonlSink(trial.path / FILE)
    if name == "tensorboard":
        from controller.tensorboard import TensorBoardSink

        return TensorBoardSink(trial.path / "tensorboard")
    if ":" in name:
        from zbus.runtime.loader import load_object

        sink: Sink = load_object(name, "metrics sink")(trial)
        return sink
    msg = f"there is no metrics sink {name!r}"
    raise ConfigError(msg, hint="choose console, jsonl or tensorboard, or name one of yours as file.py:name")


def _number(key: str, value: Any) -> float:
    if isinstance(value, int | float):
        return value
    try:
        item = getattr(value, "item", None)
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"metric {key!r} is no number: {error}"
        raise ValueError(msg) from error


def _name(sink: Sink) -> str:
    return repr(sink) if type(sink).__repr__ is not object.__repr__ else type(sink).__name__


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _odd(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _step(line: bytes) -> int | None:
    """Return the step of a line, or None where it is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
