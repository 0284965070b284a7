"""Finding a trial by what people type, and saying what is true of it from its files."""

from __future__ import annotations

import difflib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbus.config import DEFAULT_ROOT, TrialDir
from zbus.errors import TrialError
from zbus.registry.identity import pid_space
from zbus.runtime.processes import is_alive

if TYPE_CHECKING:
    from zbus.registry.records import EpochRecord, ExitRecord, Records, WorkerRecord

__all__ = ["Snapshot", "find_trial", "is_here", "open_records", "snapshot"]


def find_trial(root: str | None, text: str | None, *, running: bool = False) -> TrialDir:
    """Return the trial ``text`` names: a directory, EXPERIMENT/TRIAL, TRIAL, an EXPERIMENT's newest, or the newest.

    Args:
        root: Directory of all experiments; ZBUS_ROOT, then ``zbus-runs``, if None.
        text: What the user typed, if anything; ``last`` is the newest.
        running: Look only among running trials where nothing was typed.

    Raises:
        TrialError: Nothing fits, or several do.
    """
    base = Path(root or os.environ.get("ZBUS_ROOT") or DEFAULT_ROOT)
    if text and text != "last":
        path = Path(text)
        if (path / "registry").is_dir():
            return TrialDir.open(path)
        if (base / text / "registry").is_dir():
            return TrialDir.open(base / text)
        return _by_name(base, text)
    trials = [trial for trial in _all(base) if not running or trial.holder() is not None]
    if not trials:
        what = "no trial is running" if running else "there is no trial"
        msg = f"{what} under {base}"
        raise TrialError(msg, hint="name the directory of all experiments with --root, or the trial itself")
    if running and len(trials) > 1:
        raise _ambiguous(trials, "are running under", str(base))
    return trials[0]


def _by_name(base: Path, text: str) -> TrialDir:
    trials = _all(base)
    found = [trial for trial in trials if text == trial.trial]
    if len(found) > 1:
        raise _ambiguous(found, "are named", text)
    found = found or [trial for trial in trials if text == trial.experiment]
    if found:
        return found[0]
    known = [name for trial in trials for name in (trial.name, trial.trial)]
    near = difflib.get_close_matches(text, known, 1)
    msg = f"trial {text} is not found"
    raise TrialError(
        msg,
        facts={"looked in": str(base.resolve())},
        hint=f"did you mean {near[0]}?" if near else "name the directory of all experiments with --root",
    )


def _ambiguous(trials: list[TrialDir], verb: str, what: str) -> TrialError:
    shown = ", ".join(trial.name for trial in trials[:5]) + (", …" if len(trials) > 5 else "")
    return TrialError(f"{len(trials)} trials {verb} {what}: {shown}", hint="name one of them")


def _all(base: Path) -> list[TrialDir]:
    """Return all trials under a root, the newest first."""
    found = [TrialDir.open(path.parent) for path in base.glob("*/*/registry") if path.is_dir()]
    return sorted(found, key=lambda trial: trial.path.stat().st_mtime_ns, reverse=True)


def open_records(trial: TrialDir) -> Records:
    """Return the trial's records for reading.

    Raises:
        RegistryError: The registry cannot be read.
    """
    from zbus.registry.file import FileRegistry
    from zbus.registry.records import Records

    return Records(FileRegistry(trial.registry, create=False))


def is_here(host: str, space: str) -> bool:
    """Return whether a record's process lives, or lived, where its pid means something to this process."""
    return space == pid_space() if space else host == socket.gethostname()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the files of a trial say at one moment.

    Attributes:
        state: ``running``, ``finished``, ``failed``, ``interrupted``, ``terminated``, ``lost`` (its controller is
            gone without a word) or ``unknown`` (its controller is on another host).
        epoch: The current controller, if one ever started.
        workers: Newest incarnation of each rank.
        exits: How incarnations ended, by incarnation.
        expected: Role to world size.
        summary: ``summary.json``, if the run has ended.
    """

    trial: TrialDir
    state: str
    epoch: EpochRecord | None
    workers: list[WorkerRecord]
    exits: dict[int, ExitRecord]
    expected: dict[str, int]
    summary: Mapping[str, Any]


def snapshot(trial: TrialDir) -> Snapshot:
    """Read the trial's files.

    Raises:
        RegistryError: The registry cannot be read.
    """
    records = open_records(trial)
    try:
        epoch = records.current_epoch()
        newest = {(worker.role, worker.rank): worker for worker in records.workers()}
        exits = {record.incarnation: record for record in records.exits()}
        expected = {job.role: job.world_size for job in records.jobs()}
    finally:
        records.close()
    summary = _summary(trial)
    return Snapshot(
        trial, _state(trial, epoch, summary), epoch, [newest[key] for key in sorted(newest)], exits, expected, summary
    )


def _summary(trial: TrialDir) -> Mapping[str, Any]:
    try:
        found = json.loads(trial.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(trial: TrialDir, epoch: EpochRecord | None, summary: Mapping[str, Any]) -> str:
    if trial.holder() is not None:
        return "running"
    if epoch is not None and is_here(epoch.host, epoch.pid_space) and is_alive(epoch.pid, epoch.pid_start):
        return "running"
    if summary:
        status = str(summary.get("status"))
        return "finished" if status == "ok" else status
    if epoch is not None and not is_here(epoch.host, epoch.pid_space):
        return "unknown"
    return "lost"
