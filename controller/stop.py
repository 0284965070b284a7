"""``zbus-controller stop``: end one trial in order, then harder; never anybody else's process."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from controller.console import Console
from controller.trials import find_trial, is_here, open_records
from zbus.config import TrialDir, format_duration
from zbus.runtime.processes import ProcessHandle

if TYPE_CHECKING:
    from zbus.registry.records import AgentRecord, EpochRecord, WorkerRecord

__all__ = ["stop_trial"]

_CONTROLLER = "controller"


def stop_trial(console: Console, root: str | None, name: str | None, *, grace_s: float, force: bool = False) -> int:
    """Stop one trial on this host and return the exit code.

    The controller is asked first and stops its workers in order; what still lives after ``grace_s`` is asked by
    SIGTERM, agents before ranks, and killed at last. Every process is held by pid and start time before it is
    signalled.

    Args:
        console: Where to report.
        root: Directory of all experiments.
        name: The trial, or None for the one that runs.
        grace_s: Seconds for each of the two orderly steps.
        force: Kill at once.

    Raises:
        TrialError: The trial is not found or ambiguous.
        RegistryError: Its registry cannot be read.
    """
    trial = find_trial(root, name, running=name is None)
    began = time.monotonic()
    groups, elsewhere = _processes(trial)
    stopped: list[str] = []
    try:
        if not force:
            stopped += _end(groups[:1], signal.SIGTERM, grace_s)
            stopped += _end(groups[1:2], signal.SIGTERM, min(grace_s, 5.0))
        stopped += _end(groups, signal.SIGKILL, 5.0)
        left = [label for group in groups for label, handle in group if not handle.ended()]
    finally:
        for group in groups:
            for _, handle in group:
                handle.close()
    took = time.monotonic() - began
    data: dict[str, Any] = {
        "schema": "zbus.stop/1",
        "experiment": trial.experiment,
        "trial": trial.trial,
        "stopped": stopped,
        "elsewhere": elsewhere,
        "left": left,
        "wall_s": round(took, 3),
    }
    console.object(data)
    count = f"{len(stopped)} process{'es' if len(stopped) != 1 else ''}"
    console.result(f"stopped {trial.name}: {count} in {format_duration(took)}" if stopped else f"{trial.name} is idle")
    for where in elsewhere:
        console.warn(f"{where} is on another host; it stops when the controller's lease runs out")
    return 1 if left else 0


_Group = list[tuple[str, ProcessHandle]]


def _processes(trial: TrialDir) -> tuple[list[_Group], list[str]]:
    """Return the live processes of a trial on this host (controller; agents; ranks), and names of others elsewhere."""
    records = open_records(trial)
    try:
        epoch = records.current_epoch()
        ended = {record.incarnation for record in records.exits()}
        found: list[list[tuple[str, EpochRecord | AgentRecord | WorkerRecord]]] = [
            [(_CONTROLLER, epoch)] if epoch is not None else [],
            [(f"agent of {agent.role} ({agent.agent})", agent) for agent in records.agents()],
            [(f"{w.role}/{w.rank}", w) for w in records.workers() if w.incarnation not in ended],
        ]
    finally:
        records.close()
    groups: list[_Group] = []
    elsewhere: list[str] = []
    for members in found:
        group: _Group = []
        for label, record in members:
            if not is_here(record.host, record.pid_space):
                elsewhere.append(f"{label} on {record.host}")
            elif (handle := ProcessHandle.open(record.pid, record.pid_start)) is not None:
                group.append((f"{label} (pid {record.pid})", handle))
        groups.append(group)
    return groups, elsewhere


def _end(groups: Iterable[_Group], number: int, timeout_s: float) -> list[str]:
    """Signal every live process, wait until all of them ended or the time is over, and return who did."""
    living = [(label, handle) for group in groups for label, handle in group if not handle.ended()]
    for _, handle in living:
        handle.signal(number)
    deadline = time.monotonic() + timeout_s
    return [label for label, handle in living if handle.wait(max(0.0, deadline - time.monotonic()))]
