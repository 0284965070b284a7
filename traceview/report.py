"""The report of a run: one page with summary, stragglers, critical path, timeline and sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from traceview.curves import FILE, Curve, charts
from traceview.page import bars, cards, colour, histogram, legend, page, section, table
from traceview.problems import Problems
from traceview.sessions import Session, summarise
from traceview.stats import span_rows
from traceview.stragglers import PARTS, critical_paths, stragglers
from traceview.survey import Rank, Survey

__all__ = ["duration", "report_page", "sessions_page"]

_BUCKETS: Final = 250
_MAX_ROWS: Final = 64
_MAX_SESSIONS: Final = 60
_MAX_LEGEND: Final = 16


def duration(us: float) -> str:
    """Return microseconds as text for people."""
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / factor:.1f} {unit}"
    return f"{us / 1e6:.2f} s"


def report_page(
    found: Survey,
    problems: Problems,
    sessions: Sequence[Session],
    *,
    title: str = "",
    curves: Mapping[str, Curve] | None = None,
) -> str:
    """Return the report as HTML; ``curves`` are the run's own metrics over its steps."""
    first, last = found.window
    late = stragglers(found)
    parts = [_summary(found, problems, len(late))]
    if drawn := charts(curves or {}):
        parts.append(
            section("Metrics", f"over the steps, as {FILE} has them; the newest value stands on the right", drawn)
        )
    rows: list[Sequence[Any]] = [
        (s.rank, f"{s.lost_s:.3f} s", f"{s.units} of {s.of}", s.where, f"{s.factor:.2f}x", s.why, s.detail)
        for s in late
    ]
    note = "seconds that the other ranks of a role waited for this one, over all units of work it ended last"
    heads: Sequence[str] = ("rank", "lost", "last in", "where", "factor", "why", "detail")
    parts.append(section("Stragglers", note, table(heads, rows, limit=20)))
    paths = critical_paths(found)
    if paths:
        note = "of each ordered batch, the member that answered last: where its time went, on average"
        heads = ("method", "batches", "mean", *PARTS, "last most often")
        rows = [
            (
                p.method,
                p.batches,
                duration(p.mean_us),
                *(duration(p.parts_us[n]) for n in PARTS),
                f"{p.last} {p.last_count}×",
            )
            for p in paths
        ]
        parts.append(section("Critical path", note, table(heads, rows, limit=20)))
    parts.extend(_clocks(found))
    parts.append(_timeline(found, first, last))
    spans = span_rows(found)
    heads = ("role", "span", "count", "p50", "p90", "p99", "max", "total")
    keys = ("p50_us", "p90_us", "p99_us", "max_us", "total_us")
    rows = [(r["role"], r["name"], r["count"], *(duration(r[k]) for k in keys)) for r in spans]
    parts.append(section("Spans", "longest total first", table(heads, rows, limit=30)))
    if sessions:
        parts.extend(_session_parts(sessions, per_rank=False))
    if problems.counts:
        rows = [(kind, count) for kind, count in problems.by_kind().items()]
        places = table(("code", "first places"), [(w.code, w.text) for w in problems.first])
        parts.append(section("Damage and doubts", "", table(("kind", "count"), rows), "<br>", places))
    subtitle = f"{found.files} files · {len(found.ranks)} ranks · {duration((last - first) / 1000)}"
    return page(title or (f"Run {found.run}" if found.run else "Trace report"), subtitle, parts)


_MATCHED: Final = {
    "measured": "offsets measured while it ran",
    "rpc": "requests and replies",
    "wall": "wall clock",
    "none": "not matched",
    "start": "its first event",
}


def _clocks(found: Survey) -> list[str]:
    """Return how the clocks of other hosts were matched; nothing where all share one."""
    rows = [
        (rank.name, _MATCHED[rank.clock], "unknown" if rank.clock_bound_us is None else duration(rank.clock_bound_us))
        for ranks in found.roles().values()
        for rank in ranks
        if rank.clock in _MATCHED
    ]
    note = "ranks that do not share the controller's clock, and by how much their times may be wrong"
    return [section("Clocks", note, table(("rank", "matched by", "error at most"), rows, limit=40))] if rows else []


def _summary(found: Survey, problems: Problems, late: int) -> str:
    first, last = found.window
    events = sum(rank.events for rank in found.ranks.values())
    crashed = sum(1 for rank in found.ranks.values() if rank.complete is False)
    lost = sum(rank.lost for rank in found.ranks.values())
    bounds = [r.clock_bound_us for r in found.ranks.values()]
    known = [bound for bound in bounds if bound is not None]
    worst = max(known, default=0.0)
    error = ("exact" if not worst else f"≤ {duration(worst)}") if worst or len(known) == len(bounds) else "not measured"
    if worst and len(known) < len(bounds):
        error += f", {len(bounds) - len(known)} unknown"
    return cards(
        [
            ("duration", duration((last - first) / 1000), False),
            ("steps", len(found.steps.windows) or "not marked", False),
            ("events", f"{events:,}", False),
            ("stragglers", late, late > 0),
            ("ended early", crashed, crashed > 0),
            ("records lost", lost, lost > 0),
            ("clock error", error, len(known) != len(bounds)),
            ("problems", sum(problems.counts.values()), bool(problems.counts)),
        ]
    )


def _timeline(found: Survey, first: int, last: int) -> str:
    ranks = [rank for own in found.roles().values() for rank in own if rank.spans]
    used: Counter[str] = Counter()
    rows = [(rank.name, _busy(rank, first, last, used)) for rank in ranks[:_MAX_ROWS]]
    note = "how busy each rank was, by category (of the bus's spans: by name) of its longest spans; darker is busier"
    more = f"{len(ranks) - _MAX_ROWS} more ranks are not drawn. " if len(ranks) > _MAX_ROWS else ""
    drawn = bars(rows, first / 1e9, last / 1e9) if rows else ""
    return section("Timeline", more + note, legend(sorted(name for name, _ in used.most_common(_MAX_LEGEND))), drawn)


def _busy(rank: Rank, first: int, last: int, used: Counter[str]) -> list[tuple[float, float, str, str, float]]:
    """Return bars: per bucket the busiest span, not counting calls that only wait for others."""
    edges = np.linspace(first, max(last, first + 1), _BUCKETS + 1)
    best, score = np.zeros(_BUCKETS), np.zeros(_BUCKETS)
    name_of = [""] * _BUCKETS
    waiting = ("call ", "wire", "queue ", "rpc.client", "controller.step", "train_step")
    names = [n for n in rank.spans if not n.startswith(waiting)] or list(rank.spans)
    for name in names:
        spans = rank.spans[name]
        starts = np.array(spans.starts, dtype=np.float64)
        ends = starts + np.array(spans.durs, dtype=np.float64)
        fill = _coverage(starts, ends, edges)
        # What the user marked inside a method tells more than the method around it.
        weight = 0.5 if spans.category == "rpc" else 1.0
        for at in np.flatnonzero(fill * weight > score).tolist():
            best[at], score[at], name_of[at] = fill[at], fill[at] * weight, name
    out = []
    at = 0
    while at < _BUCKETS:
        until = at
        while until + 1 < _BUCKETS and name_of[until + 1] == name_of[at] and abs(best[until + 1] - best[at]) < 0.15:
            until += 1
        name = name_of[at]
        if name:
            group = rank.spans[name].category or "other"
            if group == "rpc":  # of the bus's own spans the method tells more
                group = name
            used[group] += edges[until + 1] - edges[at]
            said = f"{rank.name} · {name} · {best[at]:.0%} busy"
            out.append((edges[at] / 1e9, edges[until + 1] / 1e9, colour(group), said, 0.25 + 0.75 * min(1.0, best[at])))
        at = until + 1
    return out


def _coverage(starts: Any, ends: Any, edges: Any) -> Any:
    """Return which part of each bucket is covered by intervals, at most 1."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    starts = np.maximum(starts, np.concatenate([[-np.inf], reach[:-1]])) if len(ends) else starts
    lengths = np.maximum(0.0, ends - starts)
    order = np.argsort(starts, kind="stable")
    starts, ends, lengths = starts[order], (starts + lengths)[order], lengths[order]
    total = np.concatenate([[0.0], np.cumsum(lengths)])

    def covered(at: Any) -> Any:
        """Return the covered time before ``at``."""
        place = np.searchsorted(starts, at, side="right")
        inside = np.where(place > 0, np.maximum(0.0, ends[np.maximum(place - 1, 0)] - at), 0.0) if len(starts) else 0.0
        return total[place] - inside

    return np.clip(np.diff(covered(edges)) / np.diff(edges), 0.0, 1.0)


# -- sessions ------------------------------------------------------------------------------------------------------


def sessions_page(sessions: Sequence[Session], *, title: str = "") -> str:
    """Return the page of sessions as HTML."""
    ranks = {s.who for s in sessions}
    subtitle = f"{len(sessions)} sessions · {len(ranks)} ranks"
    return page(title or "Sessions", subtitle, _session_parts(sessions, per_rank=True))


def _session_parts(sessions: Sequence[Session], *, per_rank: bool) -> list[str]:
    found = summarise(sessions)
    keys = ("count", "p50_s", "p95_s", "mean_s", "max_s")
    heads = ("count", "p50", "p95", "mean", "max")

    def body(rows: list[dict[str, Any]], head: str) -> list[Sequence[Any]]:
        return [(row[head], row["count"], *(duration(row[k] * 1e6) for k in keys[1:])) for row in rows]

    parts = [section("Sessions", "", table(("measure", *heads), body(found.overall, "measure")))]
    rows: list[Sequence[Any]] = [(r["role"], r["status"], r["reason"], r["count"]) for r in found.status]
    parts.append(section("Outcomes", "", table(("role", "status", "reason", "count"), rows)))
    totals = [s.total_s for s in sessions if s.total_s is not None]
    whole = found.overall[0]
    marks = [(name, whole[f"{name}_s"]) for name in ("p50", "p95")] if totals else []
    drawn = histogram(totals, "#4c78a8", lambda s: duration(s * 1e6), marks)
    parts.append(section("Distribution of session length", "", drawn))
    if found.by_step:
        note = "a session belongs to the step it ended in, by recorded step markers"
        parts.append(section("Per step", note, table(("step", *heads), body(found.by_step, "step"))))
    parts.append(section("Latency per rank", "", table(("rank", *heads), body(found.by_rank, "rank"))))
    names = sorted({name for s in sessions for name in s.phases})
    key = legend(["idle", *names])
    whos = sorted({s.who for s in sessions})
    for who in whos if per_rank else whos[:1]:
        own = [s for s in sessions if s.who == who]
        note = f"the first {_MAX_SESSIONS} of {len(own)} sessions" if len(own) > _MAX_SESSIONS else ""
        own = own[:_MAX_SESSIONS]
        first = min(s.submit_s for s in own)
        last = max(s.finalized_s or s.submit_s for s in own)
        rows_drawn = [(f"{who} #{s.session_id}", _life(s)) for s in own]
        drawn = bars(rows_drawn, first, max(last, first + 1e-9), height=10)
        parts.append(section(f"Life cycle of {who}", note, key, drawn))
    return parts


def _life(session: Session) -> list[tuple[float, float, str, str, float]]:
    end = session.finalized_s if session.finalized_s is not None else session.submit_s
    said = f"{session.who} · session {session.session_id} · task {session.task_id} · {session.status}"
    said += f" ({session.reason})" if session.reason else ""
    step = f" · step {session.step}" if session.step is not None else ""
    drawn = [(session.submit_s, end, colour("idle"), f"{said}{step} · idle {duration(session.idle_s() * 1e6)}", 1.0)]
    for name, instances in session.phases.items():
        for start, stop in instances:
            drawn.append((start, stop, colour(name), f"{said} · {name} {duration((stop - start) * 1e6)}", 0.9))
    return drawn
