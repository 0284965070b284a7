"""Which files a command reads, and how each file's clock is moved: what the beginnings of the files tell."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from traceview.align import MAX_US, Anchor, ClockPoint, Shift, align, anchor_of, clock_point
from traceview.event import Event, args_of, decode_event
from traceview.problems import InputError, Problems
from traceview.reader import Source, read_events

__all__ = ["Choice", "choose", "read_heads"]

_HEAD_EVENTS: Final = 1000
_CLOCK_MARK: Final = b'"zbus_clock"'
_BLOCK: Final = 4 << 20


_UNMOVED: Final = Shift(0, "none")


@dataclass(slots=True)
class Choice:
    """One file to read.

    Attributes:
        source: The file.
        shift: How to move its times.
        role, rank: As its header or its path tell.
        run: Name of the run; empty: not told.
        anchor: What its header says about its clock.
        epoch_wall: Wall clock at the run's epoch, as the header says.
        base_us: Subtract from its times before they become floating point: those of epoch times have no room left.
    """

    source: Source
    anchor: Anchor
    role: str | None
    rank: int | None
    run: str
    epoch_wall: int
    shift: Shift = _UNMOVED
    base_us: int = 0


def choose(
    sources: list[Source],
    problems: Problems,
    *,
    roles: Collection[str] = (),
    ranks: Collection[int] = (),
    all_runs: bool = False,
    clocks: str = "clock",
) -> list[Choice]:
    """Return the files to read, with their clocks matched.

    Args:
        sources: What was found.
        problems: Told of other runs, near-equal role names and clock doubts.
        roles: Only these; empty: all.
        ranks: Only these; empty: all.
        all_runs: Keep files of older runs.
        clocks: ``clock`` (measured offsets, else wall), ``wall``, ``start`` (each first event at 0) or ``none``.

    Raises:
        InputError: Nothing is left.
    """
    heads = read_heads(sources)
    if not all_runs:
        heads = _one_run(heads, problems)
    if not heads:
        msg = "no trace file is left of the newest run"
        raise InputError(msg)
    for head, shift in zip(heads, _shifts(heads, clocks), strict=True):
        head.shift = shift
    _near_roles(heads, problems)
    kept = [h for h in heads if (not roles or h.role in roles) and (not ranks or h.rank in ranks)]
    if not kept:
        msg = "no trace file has the roles and ranks asked for"
        raise InputError(msg, hint=f"found: {', '.join(sorted({f'{h.role}/{h.rank}' for h in heads}))}")
    for head in kept:
        _doubt(head, problems, alone=len(heads) == 1)
    return kept


def _doubt(head: Choice, problems: Problems, *, alone: bool) -> None:
    how, label = head.shift.how, head.source.label
    if how == "wall" and not alone:
        text = f"{label} is matched by wall clock: its error was not measured"
        problems.add("ZT0112", "clock_by_wall", text)
    elif how == "none" and not alone:
        text = f"{label} says nothing about its clock: its times are taken as they are"
        problems.add("ZT0112", "clock_unknown", text)


def _shifts(heads: list[Choice], clocks: str) -> list[Shift]:
    if clocks == "none":
        return [Shift(0, "none") for _ in heads]
    if clocks == "start":
        return [Shift(-head.anchor.first_ns, "start") for head in heads]
    anchors = [head.anchor for head in heads]
    if clocks == "wall":
        anchors = [a.by_wall() for a in anchors]
    else:
        reference = next((h for h in heads if h.anchor.clock is not None and h.anchor.role == "controller"), None)
        known = [h for h in heads if h.anchor.clock is not None]
        reference = reference or (known[0] if known else None)
        if reference is not None:
            for head in known:
                if head.anchor.clock != reference.anchor.clock:
                    head.anchor.points.extend(_points(head.source))
    return align(anchors)


def read_heads(sources: list[Source]) -> list[Choice]:
    """Return what the beginning of each file tells; clocks are not matched yet."""
    return [_head(source) for source in sources]


def _head(source: Source) -> Choice:
    first: float | None = None
    for number, event in enumerate(read_events(source, Problems())):
        if event.name == "zbus_meta" and event.ph == "M":
            meta = args_of(event)
            anchor = anchor_of(meta, event.ts)
            if anchor is not None:
                role, rank = meta.get("role"), meta.get("rank")
                role = role.strip() if isinstance(role, str) else source.role
                rank = rank if type(rank) is int else source.rank
                return Choice(source, anchor, role, rank, anchor.run, _epoch_of(meta, anchor))
        ts = event.ts
        if event.ph != "M" and ts is not None and -MAX_US < ts < MAX_US and (first is None or ts < first):
            first = ts
        if number >= _HEAD_EVENTS and not Anchor(round((first or 0.0) * 1000)).is_absolute():
            break  # of epoch times all are looked at: the earliest becomes 0, wherever it stands
    anchor = Anchor(round((first or 0.0) * 1000))
    base = int(first) if first is not None and anchor.is_absolute() else 0
    return Choice(source, anchor, source.role, source.rank, "", 0, base_us=base)


def _epoch_of(meta: dict[str, Any], anchor: Anchor) -> int:
    epoch = meta.get("run_epoch_wall_ns")
    return epoch if type(epoch) is int else anchor.epoch_wall_ns


def _points(source: Source) -> list[ClockPoint]:
    """Return the measured clock offsets in a file; only lines that can hold one are decoded."""
    found = []
    if source.packed:
        lines = (event for event in read_events(source, Problems()) if event.name == "zbus_clock")
        return [point for event in lines if (point := clock_point(args_of(event), event.ts)) is not None]
    rest = b""
    try:
        with source.path.open("rb", buffering=0) as file:
            while data := file.read(_BLOCK):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                rest = data[cut:] if len(data) - cut < _BLOCK else b""
                at = data.find(_CLOCK_MARK, 0, cut)
                while at >= 0:
                    begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
                    point = _point_of(data[begin:end])
                    if point is not None:
                        found.append(point)
                    at = data.find(_CLOCK_MARK, end, cut)
    except OSError:
        return found
    return found


def _point_of(line: bytes) -> ClockPoint | None:
    try:
        event: Event = decode_event(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return clock_point(args_of(event), event.ts) if event.name == "zbus_clock" else None


def _one_run(heads: list[Choice], problems: Problems) -> list[Choice]:
    """Keep the newest run; a tree may still hold files of an older one.

    Another run differs in name and in epoch: processes begun by hand share only the name, a damaged name only the
    epoch.
    """
    named = [head for head in heads if head.run]
    if not named:
        return heads
    newest = max(named, key=lambda head: head.epoch_wall)
    kept = []
    for head in heads:
        if head.run in ("", newest.run) or head.epoch_wall == newest.epoch_wall:
            kept.append(head)
        else:
            text = f"{head.source.label} belongs to run {head.run}, not {newest.run}: skipped (--all-runs keeps it)"
            problems.add("ZT0105", "other_run", text)
    return kept


def _near_roles(heads: list[Choice], problems: Problems) -> None:
    """Tell of roles that differ only by case: usually one role, spelled twice."""
    spelled: dict[str, set[str]] = {}
    for head in heads:
        if head.role:
            spelled.setdefault(head.role.casefold(), set()).add(head.role)
    for names in spelled.values():
        if len(names) > 1:
            both = " and ".join(sorted(names))
            problems.add("ZT0108", "near_equal_roles", f"the roles {both} differ only by case: kept apart")


def total_bytes(choices: Collection[Choice]) -> int:
    """Return the size of the files as they lie on disk."""
    return sum(os.stat(choice.source.path).st_size for choice in choices if choice.source.path.exists())  # noqa: PTH116
