"""What stays of a run: ``summary.json``, the merged trace and the last lines on the screen."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zbus.config import TrialDir, format_duration, write_atomically

__all__ = ["SCHEMA", "MergeResult", "Summary", "merge_traces", "plain_data"]

SCHEMA: Final = "zbus.run/1"
_MERGE_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Summary:
    """The object of ``summary.json`` and of ``run --json``.

    Attributes:
        status: ``ok``, ``failed``, ``interrupted`` or ``terminated``.
        exit_code: What the command ended with.
        wall_s: Seconds from the start of the command to its end.
        trial_dir: The trial directory, or None if none was made.
        trace: The merged timeline, or None.
        report: The page that explains it (``report.html``), or None.
        metrics: What the driver returned.
        bus: Counters of the bus: calls, retries, and so on.
        error: The error block as data, or None.
    """

    status: str = "ok"
    exit_code: int = 0
    experiment: str = ""
    trial: str = ""
    trial_dir: str | None = None
    target: str = ""
    wall_s: float = 0.0
    started_at: str = ""
    version: str = ""
    trace: str | None = None
    report: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    bus: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data with its schema; NaN and infinities become text."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["wall_s"] = round(self.wall_s, 3)
        cleaned: dict[str, Any] = plain_data({"schema": SCHEMA, **data})
        return cleaned

    def write(self, trial: TrialDir) -> None:
        """Write ``summary.json``, whole or not at all.

        Raises:
            OSError: The trial directory cannot be written.
        """
        write_atomically(trial.summary, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")

    def text(self) -> str:
        """Return what ends a run on the screen: ``done in 7.2 s · 160 calls · 0 retries``, and the metrics below."""
        verb = {"ok": "done", "failed": "failed", "interrupted": "interrupted"}.get(self.status, "terminated")
        parts = [f"{verb} in {format_duration(self.wall_s)}"]
        for name in ("calls", "retries"):
            if isinstance(count := self.bus.get(name), int):
                word = name if count != 1 else {"calls": "call", "retries": "retry"}[name]
                parts.append(f"{count:,} {word}")
        figures = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
            for name, value in self.metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        return " · ".join(parts) + ("\n" + " · ".join(figures) if figures else "")


def plain_data(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as data that JSON carries: arrays as lists, other objects as their text. Never raises."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > 32:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_data(item, depth + 1) for item in value]
    try:
        if callable(to_list := getattr(value, "tolist", None)):
            return plain_data(to_list(), depth + 1)
        return os.fspath(value) if hasattr(value, "__fspath__") else str(value)
    except Exception:  # noqa: BLE001 - a user's object may refuse; the summary is written all the same
        return f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """How reading the traces went: the timeline and the report, each a path or None, and what to warn of."""

    path: Path | None
    report: Path | None = None
    problem: str = ""


def merge_traces(trial: TrialDir) -> MergeResult:
    """Merge the trial's traces and write its report, by the ``traceview`` command. Never raises.

    Each is a process of its own, so that memory and failures stay there. A failure is a warning: the per-rank files are
    intact.
    """
    if not any(trial.traces.glob("*/*.jsonl")):
        return MergeResult(None)
    path, problem = _traceview("merge", trial.traces, "traces were not merged")
    if problem:
        return MergeResult(path, problem=problem)
    report, problem = _traceview("report", trial.path, "report.html was not written")
    return MergeResult(path, report, problem)


def _traceview(command: str, place: Path, failure: str) -> tuple[Path | None, str]:
    """Run a command of ``traceview``; return the file it wrote, and what to warn of if it failed."""
    line = [sys.executable, "-m", "traceview", command, str(place), "--json"]
    try:
        done = subprocess.run(  # a command of ours, no shell
            line, capture_output=True, text=True, timeout=_MERGE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{failure}: {error}"
    try:
        output = Path(json.loads(done.stdout)["output"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return None, f"{failure}: {last}"
    return (output if output.is_file() else None), ""
