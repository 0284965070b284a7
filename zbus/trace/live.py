"""What a sidecar knows of a running trial: finished steps, how busy each rank was in them, and who was slow.

Bounded whatever the length of a run. A step ends at its ``zbus_step`` mark; it is closed once every rank that still
speaks has told of later times, or some seconds after. Where nothing marks steps, the n-th call of a method on the ranks
of a role takes their place.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any, Final

from zbus.trace.events import Event

__all__ = ["Live"]

_KEPT_STEPS: Final = 1000
_KEPT_RUNS: Final = 20_000
_KEPT_NAMES: Final = 500
_WAIT_NS: Final = 3_000_000_000
_SILENT_NS: Final = 5_000_000_000
_UNMARKED_NS: Final = 5_000_000_000
"""A run that marked no step so far is told call by call."""


class Live:
    """Aggregates of one trial. One thread."""

    def __init__(self) -> None:
        self._runs: deque[tuple[float, float, str, str]] = deque(maxlen=_KEPT_RUNS)  # (end µs, dur µs, who, method)
        self._marks: deque[tuple[int, float, int]] = deque(maxlen=_KEPT_STEPS)  # (step, µs, seen at ns), not closed yet
        self._lines: deque[dict[str, Any]] = deque(maxlen=_KEPT_STEPS)
        self._told = 0
        self._last_mark: float | None = None
        self._marked = False
        self._reached: dict[str, tuple[float, int]] = {}  # who -> (latest µs, heard at ns)
        self._counts: dict[tuple[str, str], dict[str, int]] = {}  # (role, method) -> who -> calls
        self._calls: dict[tuple[str, str, int], dict[str, float]] = {}
        self._totals: dict[str, dict[str, list[float]]] = {}  # who -> name -> count, total and longest µs
        self._names = 0  # in all of them
        self._held: deque[tuple[dict[str, Any], dict[str, float]]] = deque(maxlen=_KEPT_STEPS)
        self._first_ns: int | None = None

    def feed(self, role: str, rank: int, events: list[Event], now_ns: int) -> None:
        """Take the events of one block of ``role/rank``; ``now_ns`` is the sidecar's clock."""
        who = f"{role}/{rank}"
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        latest = self._reached.get(who, (0.0, 0))[0]
        totals = self._totals.setdefault(who, {})
        for event in events:
            ts, args = event.ts, event.args
            if ts is None or type(event.name) is not str:  # what a process says may be anything
                continue
            if event.ph == "X":
                duration = event.dur or 0.0
                end = ts + duration
                if end > latest:  # noqa: PLR1730  # a call of max would cost a tenth of the loop
                    latest = end
                if event.cat == "rpc" and type(args) is dict and args.get("kind") == "run":
                    self._run(role, who, event, end)
                total = totals.get(event.name)
                if total is None:
                    self._begin_total(totals, event.name, duration)
                else:
                    total[0] += 1
                    total[1] += duration
                    if duration > total[2]:  # noqa: PLR1730  # as above
                        total[2] = duration
            elif event.ph == "i" and event.name == "zbus_step" and type(args) is dict:
                step = args.get("step")
                if isinstance(step, int):
                    self._mark(step, ts, now_ns)
                    latest = max(latest, ts)
        self._reached[who] = latest, now_ns

    def gone(self, role: str, rank: int) -> None:
        """A rank said its end: nobody waits for it any more."""
        self._reached.pop(f"{role}/{rank}", None)

    def lines(self, since: int, now_ns: int) -> list[dict[str, Any]]:
        """Return the lines numbered above ``since``, oldest first; closes what can be closed."""
        self._close_steps(now_ns)
        if self._first_ns is not None and now_ns - self._first_ns >= _UNMARKED_NS:
            while self._held:
                self._say(*self._held.popleft())
        return [line for line in self._lines if line["n"] > since]

    def busiest(self, top: int = 50) -> list[dict[str, Any]]:
        """Return the names most time was spent in, by rank: count, total and longest in seconds."""
        found = [(who, name, total) for who, totals in self._totals.items() for name, total in totals.items()]
        found.sort(key=lambda row: -row[2][1])
        return [
            {"who": who, "name": name, "count": int(count), "total_s": total / 1e6, "max_s": longest / 1e6}
            for who, name, (count, total, longest) in found[:top]
        ]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, role: str, who: str, event: Event, end: float) -> None:
        method = event.name.removeprefix("run ")
        if method.startswith("zbus."):
            return
        duration = event.dur or 0.0
        self._runs.append((end, duration, who, method))
        if self._marked:
            return
        ranks = self._counts.get((role, method))
        if ranks is None:
            if len(self._counts) >= _KEPT_NAMES:
                return
            ranks = self._counts[role, method] = {}
        number = ranks[who] = ranks.get(who, -1) + 1
        found = self._calls.setdefault((role, method, number), {})
        found[who] = duration
        if len(found) == len(ranks) and len(ranks) > 1:
            del self._calls[role, method, number]
            line = {"method": method, "call": number, "at_s": end / 1e6, "wall_s": max(found.values()) / 1e6}
            self._held.append((line, found))
        elif len(self._calls) > _KEPT_STEPS:
            self._calls.pop(next(iter(self._calls)))

    def _begin_total(self, totals: dict[str, list[float]], name: str, duration: float) -> None:
        if self._names < _KEPT_NAMES:
            self._names += 1
            totals[name] = [1, duration, duration]

    def _mark(self, step: int, at: float, now_ns: int) -> None:
        if not self._marked:
            self._marked = True
            self._calls.clear()
            self._held.clear()
        if not any(step == known for known, _, _ in self._marks):
            self._marks.append((step, at, now_ns))

    def _close_steps(self, now_ns: int) -> None:
        while self._marks:
            step, at, seen_ns = self._marks[0]
            speaking = [reached for reached, heard in self._reached.values() if now_ns - heard < _SILENT_NS]
            if now_ns - seen_ns < _WAIT_NS and any(reached < at for reached in speaking):
                return
            self._marks.popleft()
            before = self._last_mark
            self._last_mark = at
            busy: dict[str, float] = {}
            while self._runs and self._runs[0][0] <= at:
                end, duration, who, _ = self._runs.popleft()
                if before is None or end > before:
                    busy[who] = busy.get(who, 0.0) + duration
            self._say({"step": step, "at_s": at / 1e6, "wall_s": None if before is None else (at - before) / 1e6}, busy)

    def _say(self, line: dict[str, Any], busy: dict[str, float]) -> None:
        self._told += 1
        by_role: dict[str, dict[str, float]] = {}
        for who, duration in busy.items():
            by_role.setdefault(who.partition("/")[0], {})[who] = duration
        slow = []
        for ranks in by_role.values():
            if len(ranks) > 1:
                worst = max(ranks, key=lambda who: ranks[who])
                middle = statistics.median(d for who, d in ranks.items() if who != worst)
                if middle > 0:
                    slow.append({"who": worst, "busy_s": ranks[worst] / 1e6, "ratio": ranks[worst] / middle})
        slow.sort(key=lambda row: -float(str(row["ratio"])))
        shown = {who: duration / 1e6 for who, duration in sorted(busy.items())}
        self._lines.append({"n": self._told, **line, "busy_s": shown, "slowest": slow})
