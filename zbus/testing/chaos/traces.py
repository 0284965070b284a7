"""What the traces of a soak say: every record accounted for, every execution of a process that ended has its span."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from traceview.event import Event, args_of
from traceview.leftovers import find_sources
from traceview.merge import merge
from traceview.problems import Problems
from traceview.reader import Blocks, Source, read_batches
from zbus.errors import ZbusError
from zbus.testing.chaos.truth import Run

__all__ = ["TraceFindings", "check_traces"]

_RUNS: Final = frozenset({"run once", "run idempotent", "run pure", "run items", "run echo"})
"""Spans of what the ground truth knows too."""


@dataclass
class TraceFindings:
    """What was found.

    Attributes:
        sources: Processes that traced.
        ended: Those that ended in order; the others were killed.
        recorded, written: Records of those that ended.
        lost: What they counted as lost, by reason.
        spans: Executions that have their span, of all processes.
        missing: Executions of processes that ended which have none, beyond what these counted as lost.
        merged: Events in the merged trace.
        problems: What the merge told, by kind.
        broken: All that is wrong, in words.
    """

    sources: int = 0
    ended: int = 0
    recorded: int = 0
    written: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    spans: int = 0
    missing: int = 0
    merged: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "sources": self.sources,
            "ended": self.ended,
            "recorded": self.recorded,
            "written": self.written,
            "lost": dict(self.lost),
            "spans": self.spans,
            "missing_spans": self.missing,
            "merged_events": self.merged,
            "merge_problems": self.problems,
        }


class _Stream:
    """What the files of one process say."""

    def __init__(self) -> None:
        self.who = ("", -1, -1)
        self.end: dict[str, Any] | None = None
        self.ends = 0
        self.runs = 0


def check_traces(trial: Path, truth: Mapping[str, Sequence[Run]], role: str) -> TraceFindings:
    """Read the traces of a trial that is over and compare them with the ground truth.

    Args:
        trial: Its directory.
        truth: Executions by call id.
        role: Whose executions the truth tells.
    """
    found = TraceFindings()
    try:
        sources = find_sources([str(trial)], Problems())
        for source in sources:
            _check_stream(found, _read(source), source.label, truth, role)
        report = merge([str(trial)], trial / "merged.pftrace")
        (trial / "merged.pftrace").unlink()
    except ZbusError as error:
        found.broken.append(f"the traces cannot be merged: {error}")
        return found
    found.merged, found.problems = report.events, report.problems
    if killed := report.problems.get("no_end", 0) - (found.sources - found.ended):
        found.broken.append(f"the merge tells of {killed} more processes without an end than there are")
    return found


def _read(source: Source) -> _Stream:
    stream, blocks = _Stream(), Blocks()
    parts = [source] if source.spill is None else [source, Source(source.spill, f"{source.label} (spill)")]
    for part in parts:
        for batch in read_batches(part, Problems(), 0, blocks):
            _take(stream, batch)
    return stream


def _take(stream: _Stream, events: Iterable[Event]) -> None:
    for event in events:
        if event.ph == "X":
            stream.runs += event.name in _RUNS
        elif event.name == "zbus_meta":
            args = args_of(event)
            stream.who = str(args.get("role")), int(args.get("rank", -1)), int(args.get("start", -1))
        elif event.name == "zbus_end":
            stream.ends += 1
            stream.end = args_of(event)


def _check_stream(
    found: TraceFindings, stream: _Stream, label: str, truth: Mapping[str, Sequence[Run]], role: str
) -> None:
    found.sources += 1
    found.spans += stream.runs
    end = stream.end
    if end is None:
        return
    found.ended += 1
    lost = sum(end["lost"].values())
    found.recorded += end["recorded"]
    found.written += end["written"]
    found.lost.update(end["lost"])
    if stream.ends > 1:
        found.broken.append(f"{label} ends {stream.ends} times")
    if end["pending"] or end["recorded"] != end["written"] + lost:
        found.broken.append(f"{label} ends with {end}")
    if stream.who[0] != role:
        return
    ran = _runs_by_start(truth).get(stream.who[1:], 0)
    if missing := max(0, ran - stream.runs - lost):
        found.missing += missing
        found.broken.append(f"{label}: {ran} executions, {stream.runs} spans of them, {lost} records counted as lost")


def _runs_by_start(truth: Mapping[str, Sequence[Run]]) -> dict[tuple[int, ...], int]:
    counted: dict[tuple[int, ...], int] = defaultdict(int)
    for runs in truth.values():
        for run in runs:
            counted[run.rank, run.start] += run.ended
    return counted
