"""Who made whom wait: seconds lost per rank, and why.

The same work on all ranks of a role is compared: the calls of one batch, or where no batch is recorded the k-th span of
a name on every rank. The rank that ends a unit last made the others wait from their (median) end to its own. Where it
began later because its unit before was not over, that was lost there and is not counted again. Why it was last is told
by what differs from its peers' median: it began later, or it took longer, in one phase or in all. How long something
takes needs no clock of others; who began later does, so a delay within the clocks' errors is a doubt and blames nobody.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.survey import Call, Rank, Spans, Survey

__all__ = ["CriticalPath", "Straggler", "clock_rows", "critical_paths", "stragglers"]

_SERVER: Final = ("run ", "rpc.server")
_OWN: Final = "run zbus."
"""Calls of the bus itself: to make engines, to save traces. They are no work that others wait for."""

_SPREAD: Final = 0.4
"""If the other phases are slower by more than this part of what the slowest is, the rank is slow in general."""

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
class _Units:
    """The same units of work on several ranks: a row per rank, a column per unit, NaN where a rank had none; ns."""

    name: str
    places: list[int]
    starts: Floats
    durs: Floats


@dataclass(slots=True)
class _Loss:
    """What one rank lost in one kind of unit, in ns, a value per unit that it ended last (others are 0)."""

    name: str
    starts: Floats
    ends: Floats
    lag: Floats
    late: Floats
    extra: Floats
    of: int
    factor: float


def stragglers(found: Survey, *, threshold: float = 1.05) -> list[Straggler]:
    """Return the ranks that made others wait, the worst first and doubts last.

    Ranks that are slower by less than ``threshold`` are noise.
    """
    rows: list[Straggler] = []
    for ranks in found.roles().values():
        if len(ranks) < 2:
            continue
        unknown = {place for place, rank in enumerate(ranks) if _doubtful(rank)}
        own = _of_role(found, ranks, unknown)
        doubts = {place: row for place, row in own.items() if row.why == "clock doubt" and place not in unknown}
        if doubts:  # who only seems to be last must not hide who is
            again = _of_role(found, ranks, unknown | set(doubts))
            slow = {place for place in doubts if place in again and again[place].factor >= threshold}
            own = {**again, **{place: row for place, row in doubts.items() if place not in slow}}
        rows += own.values()
    rows = [row for row in rows if row.factor >= threshold or row.why in ("late start", "clock doubt")]
    return sorted(rows, key=lambda row: (row.why == "clock doubt", -row.lost_s))


def _of_role(found: Survey, ranks: list[Rank], doubted: set[int]) -> dict[int, Straggler]:
    """Return what each rank of a role cost the others, by its place; ``doubted``: when these began is not known."""
    units = _units(ranks)
    losses: dict[int, list[_Loss]] = {}
    for name in units:
        batches = _of_batches(found, ranks, name)
        for place, loss in _compare(batches if batches is not None else _kth(ranks, name), doubted):
            losses.setdefault(place, []).append(loss)
    rows = {place: _verdict(ranks, place, own, units, doubted=place in doubted) for place, own in losses.items()}
    return {place: row for place, row in rows.items() if row is not None}


def clock_rows(found: Survey) -> list[dict[str, Any]]:
    """Return how the clock of each rank was matched, and the error at most in µs (None: unknown)."""
    ranks = [rank for ranks in found.roles().values() for rank in ranks]
    return [{"rank": r.name, "clock": r.clock, "clock_bound_us": r.clock_bound_us} for r in ranks]


def _units(ranks: list[Rank]) -> list[str]:
    """Return the names of the spans that are units of work: calls if there are any, else outermost spans."""
    names = sorted({name for rank in ranks for name in rank.spans})
    calls = [name for name in names if name.startswith(_SERVER) and not name.startswith(_OWN)]
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


def _of_batches(found: Survey, ranks: list[Rank], name: str) -> _Units | None:
    """Return the calls of a method by the batch they were made in; None where no batch is recorded.

    Calls that were made one by one count as a batch where they were made in rounds, one per rank in each, and awaited.
    Otherwise they were dealt out to whoever was free: nobody waits for another, and there are no units.
    """
    method = name.removeprefix("run ") if name.startswith("run ") else ""
    rows = {rank.name: row for row, rank in enumerate(ranks)}
    calls = [c for c in found.calls.values() if c.method == method and c.batch and c.run_end and c.worker in rows]
    if not method or not calls:
        return None
    batches: dict[tuple[str, str], dict[int, Call]] = {}
    for call in calls:
        batches.setdefault((call.caller, call.batch), {})[rows[call.worker]] = call
    shared = [batch for batch in batches.values() if len(batch) > 1] or _rounds(calls, rows)
    units = _Units(name, list(range(len(ranks))), *(np.full((len(ranks), len(shared)), np.nan) for _ in range(2)))
    for column, batch in enumerate(shared):
        for row, call in batch.items():
            units.starts[row, column], units.durs[row, column] = call.run_start, call.run_end - call.run_start
    return units


def _rounds(calls: list[Call], rows: dict[str, int]) -> list[dict[int, Call]]:
    """Return the k-th call of every rank, if all k-th calls were over before any next one was made; else nothing."""
    own: dict[int, list[Call]] = {}
    for call in sorted(calls, key=lambda call: call.submit):
        own.setdefault(rows[call.worker], []).append(call)
    rounds = [dict(zip(own, members, strict=True)) for members in zip(*own.values(), strict=False)]
    if len(own) < 2 or len({len(mine) for mine in own.values()}) > 1:
        return []
    times = [(min(c.submit for c in one.values()), max(c.done for c in one.values())) for one in rounds]
    return rounds if all(a[1] <= b[0] for a, b in pairwise(times)) else []


def _kth(ranks: list[Rank], name: str) -> _Units | None:
    """Return the k-th span of a name on every rank that has it."""
    places = [place for place, rank in enumerate(ranks) if name in rank.spans]
    if len(places) < 2:
        return None
    spans = [ranks[place].spans[name] for place in places]
    count = min(len(one.starts) for one in spans)
    units = _Units(name, places, *(np.zeros((len(places), count)) for _ in range(2)))
    for row, one in enumerate(spans):
        order = np.argsort(np.array(one.starts), kind="stable")[:count]
        units.starts[row], units.durs[row] = np.array(one.starts)[order], np.array(one.durs)[order]
    return units


def _compare(units: _Units | None, doubted: set[int]) -> list[tuple[int, _Loss]]:
    if units is None or not units.starts.size:
        return []
    places, starts, durs = units.places, units.starts, units.durs
    doubt = np.array([place in doubted for place in places])
    if doubt.any():  # when it began is not known: as if it had begun with its peers
        usual = _median(starts[~doubt]) if (~doubt).any() else np.zeros(starts.shape[1])
        starts = np.where(doubt[:, None], np.where(np.isnan(starts), np.nan, usual), starts)
    ends = starts + durs
    found = []
    for row, place in enumerate(places):
        others = np.delete(np.arange(len(places)), row)
        with np.errstate(invalid="ignore"):
            last = ends[row] > np.fmax.reduce(ends[others])
        lag = np.where(last, ends[row] - _median(ends[others]), 0.0)
        late = np.where(last, starts[row] - _median(starts[others]), 0.0)
        peers = _median(durs[others])
        extra = np.where(last, durs[row] - peers, 0.0)
        both = ~np.isnan(durs[row]) & ~np.isnan(peers)
        factor = float(durs[row][both].sum() / max(1.0, peers[both].sum()))
        found.append((place, _Loss(units.name, starts[row], ends[row], lag, late, extra, int(both.sum()), factor)))
    return found


def _median(values: Floats) -> Floats:
    """Return the medians of columns, of what is there; NaN where nothing is."""
    there = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1], np.nan)
    if there.any():
        found[there] = np.nanmedian(values[:, there], axis=0)
    return found


def _doubtful(rank: Rank) -> bool:
    """Return whether times of this rank cannot be compared with those of others."""
    return rank.clock in ("wall", "none", "start") and rank.clock_bound_us is None


def _verdict(
    ranks: list[Rank], place: int, losses: list[_Loss], units: list[str], *, doubted: bool
) -> Straggler | None:
    rank = ranks[place]
    behind = _carried(losses)
    last = [loss.lag > 0 for loss in losses]
    costs = [
        np.where(mine, np.maximum(0.0, loss.lag - old), 0.0)
        for loss, old, mine in zip(losses, behind, last, strict=True)
    ]
    total = float(sum(cost.sum() for cost in costs))
    if total <= 0:
        return None
    worst = losses[max(range(len(losses)), key=lambda n: float(costs[n].sum()))]
    late = float(sum((loss.late - old)[mine].sum() for loss, old, mine in zip(losses, behind, last, strict=True)))
    extra = float(sum(loss.extra[mine].sum() for loss, mine in zip(losses, last, strict=True)))
    count = sum(int(mine.sum()) for mine in last)
    error_us = _error_us(ranks, place)
    if (late > extra and error_us is not None and late <= error_us * 1000 * count) or (doubted and extra <= 0):
        why = "clock doubt"
        error = f"{error_us:.0f} µs" if error_us is not None else "an unknown amount"
        detail = f"clocks may be wrong by {error}, which explains the difference"
    elif late > extra:
        why = "late start"
        detail = f"begins `{worst.name}` {_length(late / max(1, count))} after its peers, {_times(count)}"
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


def _length(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 1e9 else f"{ns / 1e9:.3g} s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _carried(losses: list[_Loss]) -> list[Floats]:
    """Return for each unit how much later the rank began because its unit before was not over."""
    starts, ends, late = (
        np.concatenate([getattr(loss, name) for loss in losses]) for name in ("starts", "ends", "late")
    )
    order = np.argsort(starts, kind="stable")
    before = np.concatenate([[-np.inf], np.fmax.accumulate(ends[order])[:-1]])
    found = np.zeros(len(starts))
    blocked = np.clip(before - (starts - late)[order], 0.0, np.maximum(0.0, late[order]))
    found[order] = np.where(before <= starts[order], blocked, 0.0)  # else they run side by side
    return np.split(np.nan_to_num(found), np.cumsum([len(loss.starts) for loss in losses])[:-1])


def _error_us(ranks: list[Rank], place: int) -> float | None:
    """Return by how much a start of this rank and those of its peers may be wrong together; None: unknown."""
    own = ranks[place].clock_bound_us
    others = [rank.clock_bound_us or 0.0 for n, rank in enumerate(ranks) if n != place]
    return None if own is None else own + float(np.median(others))


def _phase(ranks: list[Rank], place: int, units: list[str], extra: float) -> tuple[str, float] | None:
    """Return the one phase that makes up the extra time, with its factor; None if it is spread over several."""
    found: list[tuple[float, str, float, float]] = []
    own = ranks[place].spans
    whole = sum(own[unit].times.total for unit in units if unit in own)
    for name, spans in own.items():
        if name in units or spans.category == "rpc" or spans.times.total > whole:
            continue  # of the bus, or around the unit and not in it
        peers = [rank.spans[name] for at, rank in enumerate(ranks) if at != place and name in rank.spans]
        if peers:
            usual = float(np.median([_mean(peer) for peer in peers])) * spans.times.count
            found.append((spans.times.total - usual, name, spans.times.total, usual))
    if not found:
        return None
    found.sort(reverse=True)
    cost, name, mine, usual = found[0]
    if usual <= 0 or cost <= 0 or cost < 0.3 * extra:
        return None
    factor = mine / usual
    rest, rest_usual = sum(one[2] for one in found[1:]), sum(one[3] for one in found[1:])
    if rest_usual > 0 and rest / rest_usual - 1 > _SPREAD * (factor - 1):
        return None  # the others are slower too
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
