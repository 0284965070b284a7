"""Rollout sessions: read their records, and say how long they took, per step, per rank and per phase."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from traceview.align import Anchor, Shift, align, anchor_of
from traceview.choose import match_clocks, read_heads
from traceview.content import read_bytes
from traceview.event import BAD_JSON
from traceview.problems import InputError, Problems
from traceview.reader import Source, find_files
from traceview.steps import Steps, find_steps

__all__ = ["Session", "SessionSummary", "read_sessions", "summarise"]

_MAX_SESSIONS: Final = 1_000_000
_FAR_S: Final = 4e9
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Session:
    """One session; times in seconds on the run's clock.

    Attributes:
        phases: Name to (start, end) of each instance; an end that never came is the session's.
        step: The step it was finished in, by recorded markers; None: not told.
    """

    role: str
    rank: int
    session_id: str
    task_id: str
    status: str
    reason: str
    submit_s: float
    finalized_s: float | None
    phases: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    @property
    def who(self) -> str:
        """Role and rank, as shown."""
        return f"{self.role}/{self.rank}"

    @property
    def total_s(self) -> float | None:
        """From submit to finalize; None: never ended."""
        return None if self.finalized_s is None else self.finalized_s - self.submit_s

    def phase_s(self, name: str) -> float:
        """Return the time in which at least one instance of the phase was running."""
        total, until = 0.0, float("-inf")
        for start, end in sorted(self.phases.get(name, ())):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    def idle_s(self) -> float:
        """Return the time in which no phase was running."""
        busy, until = 0.0, float("-inf")
        for start, end in sorted(pair for pairs in self.phases.values() for pair in pairs):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return max(0.0, (self.total_s or 0.0) - busy)


def read_sessions(inputs: Collection[str], problems: Problems) -> list[Session]:
    """Return the sessions behind ``inputs``, with their steps, in order of submission.

    Raises:
        InputError: No session file is found.
    """
    files = find_files(inputs, problems, sessions=True)
    if not files:
        msg = f"no session files in {', '.join(inputs)}"
        raise InputError(msg, hint="sessions are recorded with zbus.trace.session_context() and trace_session(...)")
    try:
        traces = read_heads(find_files(inputs, Problems()))
    except InputError:
        traces = []
    records = [list(_records(source, problems)) for source in files]
    anchors = [_anchor(own) for own in records]
    match_clocks(traces, Problems())
    alone = align([*(t.anchor for t in traces), *anchors])[len(traces) :]
    known = {trace.anchor.clock: trace for trace in traces if trace.anchor.clock is not None}
    shifts = []
    for anchor, shift in zip(anchors, alone, strict=True):
        trace = known.get(anchor.clock) if anchor.clock is not None else None
        shifts.append(trace.shift.of_sibling(trace.anchor, anchor) if trace is not None else shift)
    steps = find_steps(traces) if traces else Steps({})
    found: list[Session] = []
    for source, own, shift in zip(files, records, shifts, strict=True):
        for record in own:
            session = _session(source, record, shift)
            if session is not None and len(found) < _MAX_SESSIONS:
                end = session.finalized_s if session.finalized_s is not None else session.submit_s
                session.step = steps.at(round(end * 1e9))
                found.append(session)
    return sorted(found, key=lambda session: session.submit_s)


def _records(source: Source, problems: Problems) -> Iterator[dict[str, Any]]:
    rest, number = b"", 0
    try:
        for piece in read_bytes(source, problems):
            lines = (rest + piece).split(b"\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                yield from _record(line, f"{source.label}:{number}", problems)
        yield from _record(rest, f"{source.label}:{number + 1}", problems)
    except OSError as error:
        problems.add("ZT0102", "unreadable", f"{source.label} cannot be read: {error.strerror}")


def _record(line: bytes, where: str, problems: Problems) -> Iterator[dict[str, Any]]:
    if not line.strip(b"\0\r "):
        return
    try:
        record = _decode(line)
    except BAD_JSON:
        problems.add("ZT0107", "bad_line", f"{where} cut off or not JSON ({len(line)} bytes ignored)")
        return
    if isinstance(record, dict):
        yield record
    else:
        problems.add("ZT0107", "not_an_object", f"{where} is not a JSON object, skipped")


def _anchor(records: list[dict[str, Any]]) -> Anchor:
    for record in records[:1]:
        meta = record.get("zbus_sessions")
        if isinstance(meta, Mapping):
            anchor = anchor_of(meta, 0.0)
            if anchor is not None:
                return anchor
    first = min((t for r in records if (t := _number(r.get("submit_ts"))) is not None), default=0.0)
    return Anchor(round(min(max(first, 0.0), _FAR_S) * 1e9))


def _session(source: Source, record: dict[str, Any], shift: Shift) -> Session | None:
    submit = _number(record.get("submit_ts"))
    if submit is None:
        return None
    at = round(min(max(submit, -_FAR_S), _FAR_S) * 1e9)
    add_s = (shift.moved(at) - at) / 1e9 if shift.how != "none" else 0.0
    final = _number(record.get("finalized_ts"))
    end = final if final is not None else submit
    rank = record.get("rank")
    session = Session(
        str(record.get("role") or source.role or "?"),
        rank if type(rank) is int else source.rank or 0,
        str(record.get("session_id", "")),
        str(record.get("task_id", "")),
        str(record.get("status", "")),
        str(record.get("reason") or ""),
        submit + add_s,
        None if final is None else final + add_s,
    )
    phases = record.get("phases")
    for name, instances in phases.items() if isinstance(phases, dict) else ():
        for one in instances if isinstance(instances, list) else ():
            start = _number(one.get("start_ts")) if isinstance(one, dict) else None
            if start is not None:
                stop = _number(one.get("end_ts"))
                until = stop if stop is not None else max(start, end)
                session.phases.setdefault(str(name), []).append((start + add_s, until + add_s))
    counters = record.get("counters")
    for name, value in counters.items() if isinstance(counters, dict) else ():
        number = _number(value)
        if number is not None:
            session.counters[str(name)] = number
    return session


def _number(value: object) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15 else None
    )


@dataclass(slots=True)
class SessionSummary:
    """Rows of statistics: each has count, p50, p95, mean and max in seconds.

    Attributes:
        overall: Row per measure: ``total``, each phase, ``idle``.
        by_step, by_rank, by_role: Rows of ``total`` per step, rank and role.
        status: Count per role and status.
        unfinished: Sessions that never ended.
    """

    overall: list[dict[str, Any]]
    by_step: list[dict[str, Any]]
    by_rank: list[dict[str, Any]]
    by_role: list[dict[str, Any]]
    status: list[dict[str, Any]]
    unfinished: int

    def to_dict(self) -> dict[str, Any]:
        """Return all as JSON values, with the schema name."""
        names = ("overall", "by_step", "by_rank", "by_role", "status", "unfinished")
        return {"schema": "zbus.traceview.sessions/1", **{name: getattr(self, name) for name in names}}


def summarise(sessions: Collection[Session]) -> SessionSummary:
    """Return the statistics of sessions."""
    done = [s for s in sessions if s.total_s is not None]
    names = sorted({name for s in done for name in s.phases})
    overall = [_row({"measure": "total"}, [s.total_s or 0.0 for s in done])]
    overall += [_row({"measure": n}, [s.phase_s(n) for s in done if n in s.phases]) for n in names]
    overall.append(_row({"measure": "idle"}, [s.idle_s() for s in done]))
    steps = sorted({s.step for s in done if s.step is not None})
    by_step = [_row({"step": step}, [s.total_s or 0.0 for s in done if s.step == step]) for step in steps]
    by_rank = _grouped(done, "rank", lambda s: s.who)
    by_role = _grouped(done, "role", lambda s: s.role)
    counted = Counter((s.role, s.status, s.reason) for s in sessions)
    status = [{"role": r, "status": st, "reason": why, "count": n} for (r, st, why), n in sorted(counted.items())]
    return SessionSummary(overall, by_step, by_rank, by_role, status, len(sessions) - len(done))


def _grouped(done: list[Session], head: str, key: Callable[[Session], str]) -> list[dict[str, Any]]:
    groups: dict[str, list[float]] = {}
    for session in done:
        groups.setdefault(key(session), []).append(session.total_s or 0.0)
    return [_row({head: name}, values) for name, values in sorted(groups.items())]


def _row(head: dict[str, Any], values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    if not ordered:
        return {**head, "count": 0, "p50_s": 0.0, "p95_s": 0.0, "mean_s": 0.0, "max_s": 0.0}
    found = {"p50_s": statistics.median(ordered), "p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}
    found |= {"mean_s": statistics.fmean(ordered), "max_s": ordered[-1]}
    return {**head, "count": len(ordered), **{name: round(value, 6) for name, value in found.items()}}
