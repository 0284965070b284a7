"""What is kept of a rank that ended: the exit record and the crash report, with the tail of that start's own log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.cgroup import OomVerdict
from zbus.config import TrialDir
from zbus.config.trialdir import write_atomically
from zbus.protocol.journal import JournalReport
from zbus.registry.records import ExitRecord
from zbus.runtime.journal import journal_file, read_journal
from zbus.runtime.processes import describe_exit

__all__ = ["CRASH_SCHEMA", "RankExit", "log_tail", "make_record", "write_crash_file"]

CRASH_SCHEMA: Final = "zbus.crash/1"
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16 * 1024
_LINE_CHARACTERS: Final = 400
_FATAL: Final = "Fatal Python error"
_CRASH_BYTES: Final = 1024 * 1024


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of one rank ended, as its agent saw it.

    Attributes:
        role, rank, start, incarnation: Who ended.
        agent, host, pid: Where.
        exit_code, signum: Exactly one is set; both None only if the status could not be read.
        oom: Whether it was killed for memory.
        asked: The agent had asked it to stop.
        started_wall_ns, ended_wall_ns: For display.
        log: Path of its log.
        note: What else is known, such as a spawn failure.
    """

    role: str
    rank: int
    start: int
    incarnation: int
    agent: str
    host: str
    pid: int
    exit_code: int | None = None
    signum: int | None = None
    oom: OomVerdict = msgspec.field(default_factory=OomVerdict)
    asked: bool = False
    started_wall_ns: int = 0
    ended_wall_ns: int = 0
    log: Path
    note: str = ""

    @property
    def in_order(self) -> bool:
        """Whether nothing went wrong: code 0, or an end that the agent asked for."""
        return self.exit_code == 0 or self.asked

    def cause(self) -> str:
        """Say how it ended: ``killed by SIGKILL; memory limit of its cgroup was hit (…)``."""
        words = self.note or describe_exit(self.exit_code, self.signum)
        return f"{words}; {self.oom.evidence}" if self.oom.evidence else words


def log_tail(path: Path, *, lines: int = _TAIL_LINES, max_bytes: int = _TAIL_BYTES) -> list[str]:
    """Return the last lines of a log, oldest first, bounded in lines, bytes and line length.

    A missing or unreadable log gives an empty list. Never follows a link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        size = os.fstat(fd).st_size
        offset = max(0, size - max_bytes)
        text = os.pread(fd, max_bytes, offset).decode(errors="replace")
    except OSError:
        return []
    finally:
        os.close(fd)
    found = text.splitlines()
    if offset and len(found) > 1:
        found = found[1:]  # cut off in the middle
    return [line[:_LINE_CHARACTERS] for line in _crash_report(found, lines) or found[-lines:]]


def _crash_report(found: list[str], lines: int) -> list[str]:
    """Return the interpreter's report of a fatal error that ends a log: what it was, and the thread that did it.

    The stacks of the other threads are longer than any tail and come first.
    """
    fatal = next((n for n in range(len(found) - 1, -1, -1) if found[n].startswith(_FATAL)), None)
    if fatal is None:
        return []
    thread = next((n for n in range(fatal, len(found)) if found[n].startswith("Current thread")), fatal + 1)
    stack = [line for line in found[thread : thread + lines - 1] if line]
    return [found[fatal], *stack]


def _left_by_worker(path: Path) -> dict[str, Any]:
    """Return what the worker itself wrote into its crash file before it ended."""
    try:
        with path.open("rb") as file:
            text = file.read(_CRASH_BYTES)
    except OSError:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"worker_text": text.decode(errors="replace")}


def _exception_words(left: dict[str, Any]) -> str:
    exception = left.get("exception")
    if not isinstance(exception, dict):
        return ""
    kind, message = exception.get("type"), exception.get("message")
    if not isinstance(kind, str) or not kind:
        return ""
    first = str(message or "").splitlines()[:1]
    return f"{kind}: {first[0][:_LINE_CHARACTERS]}" if first else kind


def write_crash_file(
    trial: TrialDir, ended: RankExit, tail: list[str], journal: JournalReport | None = None
) -> tuple[str, str]:
    """Complete the crash report of a rank; what the worker wrote there itself is kept.

    Returns:
        The path, relative to the trial directory, and the worker's exception in a line; both empty where there is
        nothing to report.

    Raises:
        OSError: The report cannot be written.
    """
    path = trial.crash_file(ended.role, ended.rank, ended.start)
    left = _left_by_worker(path)
    if ended.in_order and not left:
        return "", ""
    report = {
        **left,
        "schema": CRASH_SCHEMA,
        "role": ended.role,
        "rank": ended.rank,
        "start": ended.start,
        "incarnation": f"{ended.incarnation:016x}",
        "agent": ended.agent,
        "host": ended.host,
        "pid": ended.pid,
        "exit": {
            "exit_code": ended.exit_code,
            "signal": ended.signum,
            "oom": ended.oom.oom,
            "oom_evidence": ended.oom.evidence,
            "reason": ended.cause(),
            "asked": ended.asked,
        },
        "started_wall_ns": ended.started_wall_ns,
        "ended_wall_ns": ended.ended_wall_ns,
        "log": trial.relative(ended.log),
        "log_tail": tail,
        "stacks": stack_dumps(trial, ended),
        "journal": None if journal is None else msgspec.to_builtins(journal),
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    return trial.relative(path), _exception_words(left)


def stack_dumps(trial: TrialDir, ended: RankExit) -> str:
    """Return the path of a rank's stack dumps, relative to the trial directory; empty where none was taken."""
    path = trial.stack_file(ended.role, ended.rank, ended.start)
    try:
        return trial.relative(path) if path.stat().st_size else ""
    except OSError:
        return ""


def make_record(trial: TrialDir, ended: RankExit) -> ExitRecord:
    """Read the log tail and the crash journal, write the crash report and return the exit record. Blocks on the disk.

    A crash report that cannot be written is left out: the exit record matters more.
    """
    tail = log_tail(ended.log)
    path = journal_file(trial.path, ended.role, ended.rank, ended.start)
    journal = read_journal(path, ended.incarnation, reaped=True)
    try:
        crash_file, exception = write_crash_file(trial, ended, tail, journal)
    except OSError:
        crash_file, exception = "", ""
    reason = f"{ended.cause()} after {exception}" if exception else ended.cause()
    return ExitRecord(
        role=ended.role,
        rank=ended.rank,
        start=ended.start,
        incarnation=ended.incarnation,
        agent=ended.agent,
        host=ended.host,
        pid=ended.pid,
        exit_code=ended.exit_code,
        signal=ended.signum,
        oom=ended.oom.oom,
        oom_evidence=ended.oom.evidence,
        reason=reason,
        started_wall_ns=ended.started_wall_ns,
        ended_wall_ns=ended.ended_wall_ns,
        log=trial.relative(ended.log),
        log_tail=tail,
        crash_file=crash_file,
        stacks=stack_dumps(trial, ended),
        stopped=ended.asked,
        journal=journal,
    )
