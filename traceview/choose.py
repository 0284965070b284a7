"""Which files a command reads, and how each file's clock is moved: what the beginnings of the files tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.align import (
    MAX_US,
    Anchor,
    ClockPoint,
    Link,
    Shift,
    align,
    anchor_of,
    clock_of,
    clock_point,
    measured,
)
from traceview.clockline import ClockLine
from traceview.envelope import Limits, fit
from traceview.event import BAD_JSON, Event, args_of, decode_event
from traceview.pairs import Pairs, read_pairs
from traceview.problems import InputError, Problems
from traceview.reader import Source, read_events

__all__ = ["Choice", "choose", "match_clocks", "read_heads"]

_HEAD_EVENTS: Final = 800
_CLOCK_MARK: Final = b'"zbus_clock"'
_BLOCK: Final = 4 << 20


_UNMOVED: Final = Shift(0, "none")

Ints = NDArray[np.int64]


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
        clocks: ``clock`` (measured offsets and calls, else wall), ``rpc`` (calls alone, else wall), ``wall``,
            ``start`` (each first event at 0) or ``none``.

    Raises:
        InputError: Nothing is left.
    """
    heads = read_heads(sources)
    if not all_runs:
        heads = _one_run(heads, problems)
    if not heads:
        msg = "no trace file is left of the newest run"
        raise InputError(msg)
    match_clocks(heads, problems, clocks)
    _near_roles(heads, problems)
    kept = [h for h in heads if (not roles or h.role in roles) and (not ranks or h.rank in ranks)]
    if not kept:
        msg = "no trace file has the roles and ranks asked for"
        raise InputError(msg, hint=f"found: {', '.join(sorted({f'{h.role}/{h.rank}' for h in heads}))}")
    for head in kept:
        _doubt(head, problems, alone=len(heads) == 1)
    return kept


def match_clocks(heads: Sequence[Choice], problems: Problems, clocks: str = "clock") -> None:
    """Set the shift of each file.

    Args:
        heads: As ``read_heads`` returns them.
        problems: Told of clock doubts.
        clocks: As of ``choose``.
    """
    pairs = _pairs(heads)
    for number, first_ns in pairs.firsts().items() if pairs is not None else ():
        head = heads[number]
        head.anchor = replace(head.anchor, first_ns=min(head.anchor.first_ns, first_ns + head.base_us * 1000))
    anchors = [head.anchor for head in heads]
    if clocks == "none":
        lowest = min((anchor.first_ns for anchor in anchors), default=0)
        shifts = [Shift(-min(0, lowest), "none") for _ in heads]
    elif clocks == "start":
        shifts = [Shift(-anchor.first_ns, "start") for anchor in anchors]
    elif clocks == "wall":
        shifts = align([anchor.by_wall() for anchor in anchors], [])
    else:
        if clocks == "clock" and len({clock_of(a, n) for n, a in enumerate(anchors)}) > 1:
            for head in heads:
                if head.anchor.clock is not None:
                    head.anchor.points.extend(_points(head.source))
        links = _links(anchors, pairs, measured(anchors) if clocks == "clock" else [])
        _tell_steps(heads, links, problems)
        shifts = align(anchors, links)
    for head, shift in zip(heads, shifts, strict=True):
        head.shift = shift
    _tell_backwards(heads, pairs, problems)


def _pairs(heads: Sequence[Choice]) -> Pairs | None:
    """Return the calls that were seen from two clocks; None: all files have one clock."""
    if len({clock_of(head.anchor, number) for number, head in enumerate(heads)}) < 2:
        return None
    pairs = read_pairs([head.source for head in heads], [head.base_us for head in heads])
    return pairs if len(pairs) else None


def _links(anchors: Sequence[Anchor], pairs: Pairs | None, known: Sequence[Link]) -> list[Link]:
    """Return how each two clocks compare: as measured, as requests and replies say, or both if they agree."""
    found: dict[tuple[Hashable, Hashable], list[Limits]] = {}
    for caller, worker in pairs.links() if pairs is not None else []:
        one, two = clock_of(anchors[caller], caller), clock_of(anchors[worker], worker)
        if pairs is None or one == two:
            continue
        there, here = pairs.limits(caller, worker, anchors[caller].epoch_mono_ns, anchors[worker].epoch_mono_ns)
        if (one, two) in found:  # calls that go the other way say the same of the two
            found[one, two].append(here)
        else:
            found.setdefault((two, one), []).append(there)
    links = list(known)
    for (clock, ref), own in found.items():
        line = fit(Limits.all_of(own))
        if line is None:
            continue
        same = [link for link in known if {link.clock, link.ref} == {clock, ref}]
        points = [_points_of(link.line if link.clock == clock else link.line.inverse()) for link in same]
        both = fit(Limits.all_of([*own, *points])) if same else None
        if both is not None and len(both.steps) == len(line.steps):
            links = [link for link in links if link not in same]
            links.append(Link(clock, ref, both, "measured"))
        else:
            links.append(Link(clock, ref, line, "rpc"))
    return links


def _points_of(line: ClockLine) -> Limits:
    """Return what the points of a line say, without its ends, which are none."""
    at, offset, bound = (column[1:-1] for column in (line.at_ns, line.offset_ns, line.bound_ns))
    most = np.arange(2 * len(at)) >= len(at)
    return Limits(np.concatenate([at, at]), np.concatenate([offset - bound, offset + bound]), most)


def _tell_steps(heads: Sequence[Choice], links: Sequence[Link], problems: Problems) -> None:
    labels = {clock_of(head.anchor, number): head.source.label for number, head in reversed(list(enumerate(heads)))}
    for link in links:
        for step in link.line.steps:
            label, other = labels.get(link.clock, "a clock"), labels.get(link.ref, "another")
            text = f"the clocks of {label} and {other} parted by {step.by_ns / 1e9:+.6f} s at once: one host slept, or"
            unsure = (step.before_ns - step.after_ns) / 1e9
            text += f" its clock was set; times within {unsure:.3f} s of it are uncertain"
            problems.add("ZT0112", "clock_step", text)


def _tell_backwards(heads: Sequence[Choice], pairs: Pairs | None, problems: Problems) -> None:
    """Tell of calls that seem to arrive before they are sent: a matched clock cannot show that."""
    if pairs is None:
        return
    moved = [_mover(head) for head in heads]
    for (caller, worker), (count, most) in pairs.backwards(moved).items():
        one, two = heads[caller].source.label, heads[worker].source.label
        text = f"{count} calls from {one} to {two} go backwards in time, by up to {most / 1000:.1f} µs"
        problems.add("ZT0112", "causality_violations", text, count)


def _mover(head: Choice) -> Callable[[Ints], Ints]:
    base = head.base_us * 1000
    return lambda ns: head.shift.move(ns + base)


def _doubt(head: Choice, problems: Problems, *, alone: bool) -> None:
    how, label = head.shift.how, head.source.label
    if head.shift.at_ns and how in ("wall", "none"):
        text = f"{label} is matched with the processes it exchanged calls with, but not with the controller"
        problems.add("ZT0112", "clock_of_a_group", text)
    elif how == "wall" and not alone:
        text = f"{label} is matched by wall clock: its error was not measured"
        problems.add("ZT0112", "clock_by_wall", text)
    elif how == "none" and not alone:
        text = f"{label} says nothing about its clock: its times are taken as they are"
        problems.add("ZT0112", "clock_unknown", text)
    if head.shift.apart_ns:
        wrong = f"it may be wrong by {head.shift.apart_ns / 1000:.0f} µs"
        text = f"{label}: two ways to match its clock contradict each other; {wrong}"
        problems.add("ZT0112", "clock_contradiction", text)


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
    anchor = Anchor(round((first or 0.0) * 1000), source.role or "")
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
    except BAD_JSON:
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
