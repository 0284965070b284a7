"""Who made whom wait: seconds lost per rank, and why.

The same work on all ranks of a role is compared occurrence by occurrence: the k-th ``run train`` of every rank is one
unit. The rank that ends a unit last made the others wait from their (median) end to its own. Why it was last is told
by what differs from its peers' median: it began later, or it took longer, in one phase or in all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.survey import Call, Rank, Spans, Survey

__all__ = ["CriticalPath", "Straggler", "critical_paths", "stragglers"]

_SERVER: Final = ("run ", "rpc.server")
_ONE_PHASE: Final = 0.7
"""A phase that makes up this part of the extra time is the reason; else the rank is slow in general."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Straggler:
    """One rank with what it cost the others.

    Attributes:
        rank: ``actor/3``.
        lost_s: Seconds that its peers waited for it.
        units: Units of work it ended last, of ``of``.
        where: The span it was last in, most of all.
        factor: How long that takes here, in medians of its peers.
        why: ``late start``, ``slow phase``, ``slow rank`` or ``clock doubt``.
        detail: The same in words.
    """

    rank: str
    lost_s: float
    units: int
    of: int
    where: str
    factor: float
    why: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Loss:
    """What one rank lost in one kind of unit, in ns."""

    name: str
    lost: float
    units: int
    of: int
    late: float
    extra: float
    factor: float


def stragglers(found: Survey, *, threshold: float = 1.05) -> list[Straggler]:
    """Return the ranks that made others wait, the worst first; those slower by less than ``threshold`` are noise."""
    rows = []
    for ranks in found.roles().values():
        if len(ranks) < 2:
            continue
        units = _units(ranks)
        losses: dict[int, list[_Loss]] = {}
        for name in units:
            for place, loss in _compare(ranks, name):
                losses.setdefault(place, []).append(loss)
        for place, own in losses.items():
            row = _verdict(ranks, place, own, units)
            if row is not None and (row.factor >= threshold or row.why in ("late start", "clock doubt")):
                rows.append(row)
    return sorted(rows, key=lambda row: -row.lost_s)


def _units(ranks: list[Rank]) -> list[str]:
    """Return the names of the spans that are units of work: calls if there are any, else outermost spans."""
    names = sorted({name for rank in ranks for name in rank.spans})
    calls = [name for name in names if name.startswith(_SERVER)]
    if calls:
        return calls
    common = [n for n in names if sum(n in r.spans for r in ranks) * 2 > len(ranks)]
    return [n for n in common if not any(_inside(ranks, n, other) for other in common if other != n)]


def _inside(ranks: list[Rank], name: str, other: str) -> bool:
    """Return whether most spans of a name lie within spans of another, on the first rank that has both."""
    for rank in ranks:
        if name in rank.spans and other in rank.spans:
            inner, outer = rank.spans[name], rank.spans[other]
            starts, ends = np.array(outer.starts), np.array(outer.starts) + np.array(outer.durs)
            order = np.argsort(starts, kind="stable")
            starts, ends = starts[order], ends[order]
            mine = np.array(inner.starts)
            at = np.searchsorted(starts, mine, side="right") - 1
            inside = (at >= 0) & (mine + np.array(inner.durs) <= ends[np.maximum(at, 0)])
            same = len(mine) == len(starts) and bool((np.sort(mine) == starts).all())
            return bool(inside.mean() > 0.5) and not (same and inner.times.total >= outer.times.total)
    return False


def _matrix(ranks: list[Rank], name: str) -> tuple[list[int], Ints, Ints] | None:
    """Return (places of the ranks, starts, durations), one row per rank and one column per unit."""
    places = [place for place, rank in enumerate(ranks) if name in rank.spans]
    if len(places) < 2:
        return None
    spans = [ranks[place].spans[name] for place in places]
    count = min(len(one.starts) for one in spans)
    starts = np.zeros((len(places), count), dtype=np.int64)
    durs = np.zeros_like(starts)
    for row, one in enumerate(spans):
        order = np.argsort(np.array(one.starts), kind="stable")[:count]
        starts[row], durs[row] = np.array(one.starts)[order], np.array(one.durs)[order]
    return places, starts, durs


def _compare(ranks: list[Rank], name: str) -> list[tuple[int, _Loss]]:
    matrix = _matrix(ranks, name)
    if matrix is None:
        return []
    places, starts, durs = matrix
    doubt = np.array([_doubtful(ranks[place]) for place in places])
    starts = np.where(doubt[:, None], np.median(starts[~doubt], axis=0) if (~doubt).any() else 0, starts)
    ends = starts + durs
    found = []
    for row, place in enumerate(places):
        others = np.delete(np.arange(len(places)), row)
        peers_end = np.median(ends[others], axis=0)
        last = (ends[row] > ends[others].max(axis=0)) if len(others) else np.zeros(0, dtype=bool)
        lost = np.where(last, ends[row] - peers_end, 0.0)
        late = np.where(last, starts[row] - np.median(starts[others], axis=0), 0.0)
        peers_dur = np.median(durs[others], axis=0)
        extra = np.where(last, durs[row] - peers_dur, 0.0)
        factor = float(durs[row].sum() / max(1.0, peers_dur.sum()))
        loss = _Loss(name, float(lost.sum()), int(last.sum()), last.size, float(late.sum()), float(extra.sum()), factor)
        found.append((place, loss))
    return found


def _doubtful(rank: Rank) -> bool:
    """Return whether times of this rank cannot be compared with those of others."""
    return rank.clock in ("wall", "none", "start") and rank.clock_bound_us is None


def _verdict(ranks: list[Rank], place: int, losses: list[_Loss], units: list[str]) -> Straggler | None:
    rank = ranks[place]
    total = sum(loss.lost for loss in losses)
    if total <= 0:
        return None
    worst = max(losses, key=lambda loss: loss.lost)
    late, extra = sum(loss.late for loss in losses), sum(loss.extra for loss in losses)
    count = sum(loss.units for loss in losses)
    bound = (rank.clock_bound_us or 0.0) * 1000
    doubted = total <= 2 * bound * max(1, count)
    if doubted or (_doubtful(rank) and extra <= 0):
        why = "clock doubt"
        error = f"{rank.clock_bound_us:.0f} µs" if rank.clock_bound_us is not None else "an unknown amount"
        detail = f"its clock may be wrong by {error}, which explains the difference"
    elif late > extra:
        why = "late start"
        detail = f"begins `{worst.name}` {late / 1e6 / max(1, count):.3g} ms after its peers, {count} times"
    else:
        phase = _phase(ranks, place, units, extra)
        if phase is not None:
            why, (name, factor) = "slow phase", phase
            detail = f"`{name}` takes {factor:.2f}x its peers"
        else:
            why = "slow rank"
            detail = f"`{worst.name}` takes {worst.factor:.2f}x its peers, in all its parts"
    of = sum(loss.of for loss in losses)
    return Straggler(rank.name, round(total / 1e9, 9), count, of, worst.name, round(worst.factor, 3), why, detail)


def _phase(ranks: list[Rank], place: int, units: list[str], extra: float) -> tuple[str, float] | None:
    """Return the one phase that makes up the extra time, with its factor; None if it is spread over several."""
    found: list[tuple[float, str, float]] = []
    own = ranks[place].spans
    for name, spans in ranks[place].spans.items():
        if name in units or spans.times.total > sum(ranks[place].spans[u].times.total for u in units if u in own):
            continue  # around the unit, not in it
        peers = [rank.spans[name] for at, rank in enumerate(ranks) if at != place and name in rank.spans]
        if peers:
            usual = float(np.median([_mean(peer) for peer in peers]))
            mine = _mean(spans)
            if usual > 0 and mine > usual:
                found.append(((mine - usual) * spans.times.count, name, mine / usual))
    if not found:
        return None
    found.sort(reverse=True)
    whole = sum(cost for cost, _, _ in found)
    cost, name, factor = found[0]
    if cost < _ONE_PHASE * whole or cost < 0.3 * extra:
        return None
    return name, factor


def _mean(spans: Spans) -> float:
    return spans.times.total / max(1, spans.times.count)


# -- critical path -------------------------------------------------------------------------------------------------

PARTS: Final = ("encode", "wire out", "queue", "decode", "run", "wire back", "return")
"""The parts of a call, in order. Without the worker's side, all between send and reply is ``wire out``."""


@dataclass(slots=True)
class CriticalPath:
    """Where the time of the batches of one method went: the member that came last decides.

    Attributes:
        method: Of the calls.
        batches: How many.
        mean_us: Mean length of a batch, first submit to last reply.
        parts_us: Mean of each part on the critical member.
        last: Worker that was last most often, and how often.
    """

    method: str
    batches: int
    mean_us: float
    parts_us: dict[str, float]
    last: str
    last_count: int

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def critical_paths(found: Survey) -> list[CriticalPath]:
    """Return the critical path of the ordered batches of each method, the costliest method first."""
    batches = _batches(found)
    rows = []
    for method, groups in batches.items():
        parts = dict.fromkeys(PARTS, 0.0)
        lasts: dict[str, int] = {}
        total = 0.0
        for calls in groups:
            last = max(calls, key=lambda call: call.done)
            lasts[last.worker] = lasts.get(last.worker, 0) + 1
            total += last.done - min(call.submit for call in calls)
            for name, length in _parts(last).items():
                parts[name] += length
        count = len(groups)
        who = max(lasts, key=lambda name: lasts[name])
        shares = {name: round(length / count / 1000, 3) for name, length in parts.items()}
        rows.append(CriticalPath(method, count, round(total / count / 1000, 3), shares, who, lasts[who]))
    return sorted(rows, key=lambda row: -row.mean_us * row.batches)


def _batches(found: Survey) -> dict[str, list[list[Call]]]:
    """Group calls: by their batch number if recorded, else those of one method that overlap, one per worker."""
    methods: dict[str, dict[str, list[Call]]] = {}
    loose: dict[str, list[Call]] = {}
    for call in found.calls.values():
        if not call.submit or not call.done:
            continue
        if call.batch:
            methods.setdefault(call.method, {}).setdefault(f"{call.caller} {call.batch}", []).append(call)
        else:
            loose.setdefault(call.method, []).append(call)
    batches = {method: list(groups.values()) for method, groups in methods.items()}
    for method, calls in loose.items():
        calls.sort(key=lambda call: call.submit)
        group: list[Call] = []
        workers: set[str] = set()
        for call in calls:
            if group and (call.worker in workers or call.submit > max(c.done for c in group)):
                batches.setdefault(method, []).append(group)
                group, workers = [], set()
            group.append(call)
            workers.add(call.worker)
        batches.setdefault(method, []).append(group)
    return batches


def _parts(call: Call) -> dict[str, int]:
    """Return how long each part of a call took."""
    encoded = call.encoded or call.submit
    replied = call.replied or call.done
    arrived = call.arrived or call.run_start
    taken = call.taken or call.run_start
    found = {"encode": encoded - call.submit, "return": call.done - replied}
    if arrived and call.run_end and (arrived < encoded or call.run_end > replied):  # clocks differ: only sums are true
        found |= {"queue": taken - arrived, "decode": call.run_start - taken, "run": call.run_end - call.run_start}
        found["wire out"] = replied - encoded - (call.run_end - arrived)
    elif arrived and call.run_end:
        found |= {
            "wire out": arrived - encoded,
            "queue": taken - arrived,
            "decode": call.run_start - taken,
            "run": call.run_end - call.run_start,
            "wire back": replied - call.run_end,
        }
    else:
        found["wire out"] = replied - encoded
    return {name: max(0, length) for name, length in found.items()}
