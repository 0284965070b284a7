"""Who is missing at the deadline of a launch: each rank with its phase, its last words, and what it is doing now."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from controller.console import shown
from controller.members import Member, Members, Phase
from controller.outcomes import spans
from controller.scheduling.api import AgentExit, Scheduler
from zbus.config import TrialDir
from zbus.errors import StartupError, WorkerLost
from zbus.ids import WorkerName
from zbus.protocol.messages import OutcomeKind

__all__ = ["agent_error", "missing_error", "spans_of"]

_LINES: Final = 3
_TAIL_BYTES: Final = 4096
_MOST: Final = 8
"""Ranks that are told in full; of the rest only the names."""

_FRAME: Final = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_HERE: Final = Path(__file__).resolve().parent.parent
_LIBRARY: Final = f"{Path(os.__file__).parent}/"
_OWN: Final = (f"{_HERE}/zbus/", f"{_HERE}/workers/", "zbus/", "workers/", "<frozen ")  # short where it is compiled


def missing_error(
    members: Members,
    scheduler: Scheduler,
    trial: TrialDir,
    limit_s: float,
    stacks: Mapping[WorkerName, str],
    registry_id: str,
) -> StartupError:
    """Make the error of a launch whose deadline has passed.

    Args:
        members: Who is there and how far.
        scheduler: Knows of ranks that were never started.
        trial: Where the logs are.
        limit_s: The deadline, in seconds from the start.
        stacks: Stacks of ranks that answer ``ctl`` but are not ready.
        registry_id: Id of the registry, for comparison with what a worker on another host reports.
    """
    missing = members.missing()
    facts = {str(member.name): words for member, words in missing[:_MOST]}
    for line in scheduler.missing():
        name, _, words = line.partition(": ")
        if name in facts and members.phase_of(name) == Phase.WAITING:
            facts[name] = words
    for member, _ in missing[:_MOST]:
        if place := _place(stacks.get(member.name, "")):
            facts[str(member.name)] += f"\nis in {place}"
        if tail := _last_words(member, trial):
            facts[str(member.name)] += "".join(f"\nlog: {line}" for line in tail)
    names = spans_of([member.name for member, _ in missing])
    if len(missing) > _MOST:
        facts["others"] = f"{len(missing) - _MOST} more: {spans_of([m.name for m, _ in missing[_MOST:]])}"
    if members.strangers:
        facts["ignored"] = ", ".join(sorted(set(members.strangers))) + " (no such rank in this trial)"
    hint = "look at the logs named above, or raise scheduler.startup_timeout"
    if any(member.phase == Phase.WAITING for member, _ in missing):
        facts["registry"] = f"{trial.registry} (id {registry_id})"
        if _by_hand(scheduler):
            hint = (
                "start them with this trial directory; a worker that waits elsewhere names the registry it looks into"
            )
    return StartupError(f"{names} not ready within {limit_s:g} s", hint=hint, facts=facts)


def _by_hand(scheduler: Scheduler) -> bool:
    """Tell whether agents are started by hand."""
    return type(scheduler).__name__ == "ExternalScheduler"


def agent_error(ended: AgentExit) -> Exception:
    """Make the error of an agent that ended before its ranks were there."""
    return WorkerLost(
        f"the agent of {ended.role} ended before its ranks were ready",
        role=ended.role,
        host=ended.host,
        pid=ended.pid,
        outcome=OutcomeKind.NOT_EXECUTED.value,
        reason="agent_exit",
        exit_code_of_worker=ended.exit_code,
        signal_of_worker=ended.signal,
        log_tail=ended.log_tail,
        facts={"exit": ended.cause(), "log": ended.log},
    )


def spans_of(names: list[WorkerName]) -> str:
    """Write names shortly: ``actor/0-2, 4; critic/1``."""
    roles: dict[str, list[int]] = {}
    for name in names:
        roles.setdefault(name.role, []).append(name.rank)
    return "; ".join(f"{role}/{spans(sorted(ranks))}" for role, ranks in roles.items())


def _place(stacks: str) -> str:
    """Return the innermost frame of the user's on a worker's main thread: ``engines.py:12 in setup``."""
    inside, found = False, ""
    for line in stacks.splitlines():
        if line.startswith("thread "):
            inside = "MainThread" in line
        elif inside and (match := _FRAME.match(line)) and not _is_library(match["file"]):
            found = f"{shown(match['file'])}:{match['line']} in {match['name']}"
    return found


def _is_library(file: str) -> bool:
    return file.startswith(_OWN) or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _last_words(member: Member, trial: TrialDir) -> list[str]:
    record = member.record
    if record is None or not record.log:
        return []
    path = Path(record.log)
    path = path if path.is_absolute() else trial.path / path
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return [line[:400] for line in file.read().decode(errors="replace").splitlines()[-_LINES:] if line.strip()]
    return []
