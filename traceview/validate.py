"""Check trace files one by one: damage, missing ends and ranks, lost records; and write what can be saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceview.event import Event, args_of, one_line
from traceview.leftovers import find_sources
from traceview.output import OutputFile
from traceview.problems import InputError, OutputError, Problems
from traceview.reader import Blocks, Source, read_batches

__all__ = ["validate_files"]


@dataclass(slots=True)
class _File:
    phases: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    ended: int = 0
    lost: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    open: Counter[tuple[int, int]] = field(default_factory=Counter)
    sources: set[str] = field(default_factory=set)

    def begin(self, source: str) -> None:
        """Count a process that begins; a spill opens with the same one again."""
        if not source or source not in self.sources:
            self.begun += 1
        self.sources.add(source)


def validate_files(inputs: Collection[str], problems: Problems, *, repair: Path | None = None) -> list[dict[str, Any]]:
    """Return one row per file (``file``, ``events``, ``processes``, ``complete``, ``lost``); damage: in ``problems``.

    Args:
        inputs: As of a merge.
        problems: Told of all damage.
        repair: Write the good and the repaired events of each file below this directory; inputs stay as they are.

    Raises:
        InputError: No trace file is found.
        OutputError: A repaired file cannot be written, or exists.
    """
    sources = find_sources(inputs, problems)
    _missing_ranks(sources, problems)
    return [_validate(source, problems, repair) for source in sources]


def _missing_ranks(sources: list[Source], problems: Problems) -> None:
    ranks: dict[str, set[int]] = {}
    for source in sources:
        if source.role is not None and source.rank is not None:
            ranks.setdefault(source.role, set()).add(source.rank)
    for role, seen in ranks.items():
        missing = sorted(set(range(max(seen))) - seen)
        if missing:
            names = ", ".join(f"{role}/{rank}" for rank in missing[:10])
            problems.add("ZT0103", "missing_rank", f"{names} left no file, though {role}/{max(seen)} did", len(missing))


def _validate(source: Source, problems: Problems, repair: Path | None) -> dict[str, Any]:
    seen = _File()
    if repair is None:
        _read(source, problems, seen, None)
    else:
        target = _target(source, repair)
        with OutputFile(target) as out:  # the spill goes into the same file
            _read(source, problems, seen, out)
            out.commit()
    still = sum(count for count in seen.open.values() if count > 0)
    if still:
        problems.add("ZT0110", "unfinished_span", f"{source.label} has {still} spans without an end", still)
    if seen.ended < seen.begun:
        problems.add("ZT0110", "no_end", f"{source.label} has no end event: its process did not end in order")
    if seen.lost:
        problems.add("ZT0111", "lost", f"{source.label} lost {seen.lost} records", seen.lost)
    return {
        "file": source.label,
        "events": sum(seen.phases.values()) - seen.phases["M"],
        "processes": seen.begun,
        "complete": seen.ended >= seen.begun if seen.begun else None,
        "lost": seen.lost,
    }


def _target(source: Source, repair: Path) -> Path:
    name = source.path.name
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    if not name.endswith(".jsonl"):
        name = f"{name.removesuffix('.json')}.jsonl"
    target = repair / (source.role or "") / name
    if target.exists():
        if target.samefile(source.path):
            msg = f"the repaired file {target} is its own input"
            raise InputError(msg, hint="name another directory with -o")
        msg = f"{target} exists"
        raise OutputError(msg, hint="name an empty directory with -o")
    return target


def _read(source: Source, problems: Problems, seen: _File, out: OutputFile | None) -> None:
    """Read a file, and its spill as a second part of it."""
    _read_one(source, problems, seen, out)
    if source.spill is not None:
        _read_one(Source(source.spill, f"{source.label} (spill)"), problems, seen, out)


def _read_one(source: Source, problems: Problems, seen: _File, out: OutputFile | None) -> None:
    for batch in read_batches(source, problems, 0, seen.blocks):
        for event in batch:
            _check(event, source, problems, seen)
        if out is not None:
            out.write(b"".join(one_line(event) for event in batch if event.name != "text_id"))


def _check(event: Event, source: Source, problems: Problems, seen: _File) -> None:
    phase = event.ph
    seen.phases[phase] += 1
    if phase == "X":
        if event.dur is None or event.dur < 0:
            problems.add("ZT0108", "bad_duration", f"{source.label} has a span without a valid duration")
            event.dur = 0.0
    elif phase == "M":
        if event.name == "zbus_meta":
            seen.begin(str(args_of(event).get("source") or ""))
        if event.name == "zbus_end":
            seen.ended += 1
            told = args_of(event).get("lost")
            counts = told.values() if isinstance(told, dict) else ()
            seen.lost = max(seen.lost, sum(count for count in counts if type(count) is int))
        if event.name == "zbus_loss":
            lost = args_of(event).get("lost")
            seen.lost += lost if type(lost) is int else 0
    elif phase == "B":
        seen.open[event.pid, event.tid] += 1
    elif phase == "E":
        if seen.open[event.pid, event.tid] <= 0:
            text = f"{source.label} has an end without a begin ({event.name or 'no name'})"
            problems.add("ZT0109", "end_without_begin", text)
        else:
            seen.open[event.pid, event.tid] -= 1
