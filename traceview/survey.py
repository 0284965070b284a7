"""One pass over all files: what statistics, straggler tables, critical paths and reports are made of.

Bounded memory: every span is counted, but only the first ``MAX_SPANS`` of a name and rank are kept with their times.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from traceview.align import MAX_US
from traceview.choose import Choice, choose
from traceview.distribution import Distribution
from traceview.event import BAD_JSON, NO_ARGS, Event, args_of
from traceview.leftovers import find_sources
from traceview.pairs import ANSWERED
from traceview.problems import Problems
from traceview.reader import Blocks, read_batches
from traceview.steps import StepFinder, Steps
from traceview.units import doubtful_units

__all__ = ["MAX_SPANS", "Call", "Rank", "Spans", "Survey", "survey"]

MAX_SPANS: Final = 50_000
_MAX_CALLS: Final = 200_000

Who = tuple[str, int]
"""(role, rank)."""


class _BusArgs(msgspec.Struct):
    kind: str = ""
    call: str = ""
    method: str = ""
    worker: str = ""
    attempt: int = 1
    batch: int | str | None = None
    outcome: str = ""
    status: str = ""


_decode_bus = msgspec.json.Decoder(_BusArgs).decode
_CALL_MARK: Final = b'"call"'


@dataclass(slots=True)
class Spans:
    """The spans of one name on one rank, in ns on the run's clock; ``starts`` and ``durs`` are bounded samples."""

    category: str = ""
    times: Distribution = field(default_factory=Distribution)
    starts: array[int] = field(default_factory=lambda: array("q"))
    durs: array[int] = field(default_factory=lambda: array("q"))

    def add(self, start: int, dur: int) -> None:
        """Add a span."""
        self.times.add(dur)
        if len(self.starts) < MAX_SPANS:
            self.starts.append(start)
            self.durs.append(dur)


@dataclass(slots=True)
class Rank:
    """One rank of a role, all its starts together.

    Attributes:
        clock, clock_bound_us: How its clock was matched, and the error at most (None: unknown).
        complete: False if one of its processes did not end in order.
        lost: Records lost.
        starts: Processes seen.
    """

    role: str
    rank: int
    clock: str = "none"
    clock_bound_us: float | None = None
    complete: bool | None = None
    lost: int = 0
    starts: int = 0
    first_ns: int = 1 << 62
    last_ns: int = -(1 << 62)
    events: int = 0
    spans: dict[str, Spans] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As shown: ``actor/3``."""
        return f"{self.role}/{self.rank}" if self.rank >= 0 else self.role


@dataclass(slots=True)
class Call:
    """One attempt of one call, from both sides; times in ns, 0 where unknown."""

    method: str = ""
    caller: str = ""
    worker: str = ""
    batch: str = ""
    outcome: str = ""
    submit: int = 0
    encoded: int = 0
    sent: int = 0
    replied: int = 0
    done: int = 0
    arrived: int = 0
    taken: int = 0
    run_start: int = 0
    run_end: int = 0
    answered: int = 0


@dataclass(slots=True)
class Survey:
    """All that was found.

    Attributes:
        ranks: By (role, rank); rank -1 where nothing tells.
        calls: By (call id, attempt); bounded.
        calls_dropped: Calls beyond the bound.
        steps: From recorded markers.
        files: Read.
        run: Name of the run, if told.
    """

    ranks: dict[Who, Rank] = field(default_factory=dict)
    calls: dict[tuple[str, int], Call] = field(default_factory=dict)
    calls_dropped: int = 0
    steps: Steps = field(default_factory=lambda: Steps({}))
    files: int = 0
    run: str = ""

    @property
    def window(self) -> tuple[int, int]:
        """First and last time in ns; (0, 0) without events."""
        seen = [r for r in self.ranks.values() if r.first_ns <= r.last_ns]
        return (min(r.first_ns for r in seen), max(r.last_ns for r in seen)) if seen else (0, 0)

    def roles(self) -> dict[str, list[Rank]]:
        """Return the ranks of each role, the controller first."""
        found: dict[str, list[Rank]] = {}
        for rank in sorted(self.ranks.values(), key=lambda r: (r.role != "controller", r.role, r.rank)):
            found.setdefault(rank.role, []).append(rank)
        return found


def survey(
    inputs: Collection[str],
    problems: Problems,
    *,
    roles: Collection[str] = (),
    ranks: Collection[int] = (),
    all_runs: bool = False,
    on_progress: Any = None,
) -> Survey:
    """Read everything behind ``inputs`` once.

    Args:
        inputs: As of a merge; a merged file will do.
        problems: Told of damage and doubts.
        roles: Only these; empty: all.
        ranks: Only these; empty: all.
        all_runs: Keep files of older runs.
        on_progress: Told of files done and files in all.

    Raises:
        InputError: No trace file is found.
    """
    choices = choose(find_sources(inputs, problems), problems, roles=roles, ranks=ranks, all_runs=all_runs)
    found = Survey(files=len(choices), run=next((c.run for c in choices if c.run), ""))
    finders = {True: StepFinder(), False: StepFinder()}
    for count, choice in enumerate(choices, 1):
        file = _File(choice, found, finders, alone=len(choices) == 1)
        file.read(problems)
        file.note_bounds()
        if on_progress is not None:
            on_progress(count, len(choices))
    if len(choices) == 1 and choices[0].anchor.clock is None:
        for rank in found.ranks.values():  # a merged file: how well its clocks were matched was told then
            rank.clock, rank.clock_bound_us = "merged", None
    _tell_backwards(found, problems)
    _tell_units(found, problems)
    controller = finders[True].steps()
    found.steps = controller if controller.windows else finders[False].steps()
    return found


def _tell_backwards(found: Survey, problems: Problems) -> None:
    """Tell of calls that arrive before they are sent, or return before they are answered; no true clock shows that."""
    if ("ZT0112", "causality_violations") in problems.counts:
        return  # told when the clocks were matched
    wrong: dict[tuple[str, str], list[int]] = {}
    for call in found.calls.values():
        # A request leaves while it is being sent; the caller notes it as sent when it runs again.
        left = min(call.encoded or call.sent, call.sent)
        late = max(left - call.arrived if left and call.arrived else 0, 0)
        back = call.run_end - call.replied if call.replied and call.run_end and call.outcome in ANSWERED else 0
        if late > 0 or back > 0:
            wrong.setdefault((call.caller, call.worker), []).append(max(late, back))
    for (caller, worker), by in wrong.items():
        text = f"{len(by)} calls from {caller} to {worker} go backwards in time, by up to {max(by) / 1000:.1f} µs"
        problems.add("ZT0112", "causality_violations", text, len(by))


def _tell_units(found: Survey, problems: Problems) -> None:
    for ranks in found.roles().values():
        for rank, factor in doubtful_units(ranks):
            text = (
                f"{rank.name}: spans are about {factor:,.0f} times as long as those of its peers; if its times are "
                f"in ns, convert its file first: traceview convert FILE -o DIR --to jsonl --unit ns"
            )
            problems.add("ZT0121", "unit_doubt", text)


class _File:
    """The pass over one file."""

    def __init__(self, choice: Choice, found: Survey, finders: dict[bool, StepFinder], *, alone: bool) -> None:
        self._choice = choice
        self._found = found
        self._finders = finders
        self._ranks: dict[int, Rank] = {}
        self._default: Who = (
            choice.role or ("trace" if alone else choice.source.path.name),
            -1 if choice.rank is None else choice.rank,
        )

    def read(self, problems: Problems) -> None:
        blocks = Blocks()
        sources = [self._choice.source]
        if self._choice.source.spill is not None:
            sources.append(type(sources[0])(self._choice.source.spill, f"{sources[0].label} (spill)"))
        for source in sources:
            for batch in read_batches(source, problems, self._choice.base_us, blocks):
                for event in batch:
                    self._take(event)

    def note_bounds(self) -> None:
        """Give the ranks of this file the error of its clock, over the time that they were seen."""
        for rank in self._ranks.values():
            bound = self._choice.shift.worst_us(rank.first_ns, rank.last_ns)
            known = rank.clock_bound_us
            rank.clock_bound_us = bound if known is None or bound is None else max(known, bound)

    def _take(self, event: Event) -> None:
        if event.ph == "M":
            self._metadata(event)
            return
        ts = event.ts
        if ts is None or not -MAX_US < ts < MAX_US:
            return
        shift = self._choice.shift
        start = round(ts * 1000) + self._choice.base_us * 1000
        start = shift.moved(start) if shift.at_ns else start + shift.add_ns
        dur = event.dur
        length = round(dur * 1000) if event.ph == "X" and dur is not None and 0 < dur < MAX_US else 0
        rank = self._ranks.get(event.pid) or self._rank(event.pid, self._default)
        rank.events += 1
        rank.first_ns = min(rank.first_ns, start)
        rank.last_ns = max(rank.last_ns, start + length)
        if event.ph == "X":
            self._span(event, rank, start, length)
        if event.args is not NO_ARGS:
            self._finders[rank.role == "controller"].see(event, start, start + length)

    def _span(self, event: Event, rank: Rank, start: int, length: int) -> None:
        spans = rank.spans.get(event.name)
        if spans is None:
            spans = rank.spans[event.name] = Spans(event.cat)
        spans.add(start, length)
        if event.args is not NO_ARGS and _CALL_MARK in (raw := bytes(event.args)):
            try:
                args = _decode_bus(raw)
            except BAD_JSON:
                return
            if args.call:
                self._call(event.name, args, rank, start, start + length)

    def _call(self, name: str, args: _BusArgs, rank: Rank, start: int, end: int) -> None:
        kind = args.kind or name
        if kind in ("sent", "encode_result"):
            return
        key = (args.call, args.attempt if kind not in ("encode", "send") else 1)
        calls = self._found.calls
        call = calls.get(key)
        if call is None:
            if len(calls) >= _MAX_CALLS:
                self._found.calls_dropped += 1
                return
            call = calls[key] = Call()
        if kind in ("client", "rpc.client"):
            call.method, call.caller, call.outcome = args.method, rank.name, args.outcome or args.status
            call.worker = args.worker or call.worker
            call.batch = str(args.batch) if args.batch is not None else ""
            call.submit, call.done = start, end
        elif kind == "encode":
            call.encoded = end
        elif kind == "wire":
            call.sent, call.replied = start, end
        elif kind == "queue":
            call.arrived, call.taken, call.worker = start, end, rank.name
            call.method = call.method or args.method
        elif kind in ("run", "rpc.server"):
            call.run_start, call.run_end, call.worker = start, end, rank.name
            call.method = call.method or args.method
        elif kind == "reply":
            call.answered = end

    def _metadata(self, event: Event) -> None:
        if event.name in ("zbus_meta", "process_name"):
            args = args_of(event)
            role, number = args.get("role"), args.get("rank")
            role = role.strip() if isinstance(role, str) and role.strip() else self._default[0]
            who = (role, number if type(number) is int else self._default[1])
            rank = self._rank(event.pid, who)
            if event.name == "zbus_meta":
                rank.starts += 1
                rank.complete = False
        elif event.name == "zbus_end" and (ended := self._ranks.get(event.pid)) is not None:
            ended.complete = True
        elif event.name == "zbus_loss":
            lost = args_of(event).get("lost")
            if type(lost) is int and lost > 0:
                self._rank(event.pid, self._default).lost += lost

    def _rank(self, pid: int, who: Who) -> Rank:
        known = self._ranks.get(pid)
        if known is not None and who == self._default:
            return known
        rank = self._found.ranks.get(who)
        if rank is None:
            rank = self._found.ranks[who] = Rank(*who)
            shift = self._choice.shift
            rank.clock = shift.how
            rank.clock_bound_us = shift.bound_ns / 1000 if shift.bound_ns is not None else None
        self._ranks[pid] = rank
        return rank


def spans_of(ranks: Collection[Rank]) -> Iterator[tuple[Rank, str, Spans]]:
    """Yield all spans of these ranks, name by name."""
    for rank in ranks:
        for name, spans in rank.spans.items():
            yield rank, name, spans
