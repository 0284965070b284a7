"""Trace files of a run whose truth is known: clocks, links and who is slow are planted.

Every span of work carries its true start as ``args.true_us``, on the controller's clock, so that whatever a program
makes of the files can be compared with it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WALL_NS = 1_796_000_000_000_000_000
"""Wall clock at the run's begin."""

_SWING_US = 600e6


@dataclass
class Clock:
    """A monotonic clock: ``ahead_us`` of the controller's at the run's begin, and running off by ``drift``.

    Its rate swings by ``swing`` to both sides every ten minutes, as with a room's temperature. At ``sleeps_at_us`` its
    host sleeps for ``sleeps_us``: the clock stands still, the others go on.
    """

    ahead_us: float = 0.0
    drift: float = 0.0
    boot_id: str = "controller's"
    time_ns: int = 1
    wall_wrong_us: float = 0.0
    swing: float = 0.0
    sleeps_at_us: float | None = None
    sleeps_us: float = 0.0

    def of(self, us: float) -> float:
        """Return what it shows at a true time."""
        asleep = 0.0
        if self.sleeps_at_us is not None:
            asleep = min(max(0.0, us - self.sleeps_at_us), self.sleeps_us)
        swung = self.swing * _SWING_US / math.tau * (1 - math.cos(us * math.tau / _SWING_US)) if self.swing else 0.0
        return (us - asleep) * (1 + self.drift) + self.ahead_us + swung


@dataclass
class Way:
    """A link: the least time each way, and the mean of what load adds."""

    there_us: float = 40.0
    back_us: float = 40.0
    load_us: float = 10.0

    def go(self, rng: random.Random) -> float:
        """Return the time of a request."""
        return self.there_us + rng.expovariate(1 / self.load_us)

    def come(self, rng: random.Random) -> float:
        """Return the time of a reply."""
        return self.back_us + rng.expovariate(1 / self.load_us)


@dataclass
class Plan:
    """What is planted.

    Attributes:
        ranks: Of the role ``actor``.
        steps: Each is one call of ``train`` on every rank.
        every_us: Between the begins of two steps.
        clocks: By rank; others have the controller's.
        ways: By rank.
        late_us, slow, reward: By rank: how much later it takes up a call, its factor on all work, and on one phase.
        headers: False: without ``zbus_meta`` and with spans ``rpc.client`` and ``rpc.server``, as other tools write.
        lost: Part of the requests whose first attempt gets lost.
    """

    ranks: int = 4
    steps: int = 300
    every_us: float = 100_000.0
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    ways: Mapping[int, Way] = field(default_factory=dict)
    late_us: Mapping[int, float] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    reward: Mapping[int, float] = field(default_factory=dict)
    headers: bool = True
    lost: float = 0.0
    seed: int = 0


class _File:
    """The file of one process."""

    def __init__(self, role: str, rank: int, clock: Clock, *, headers: bool) -> None:
        self.role, self.rank, self.clock, self.headers = role, rank, clock, headers
        self.lines: list[str] = []
        mono = round(clock.of(0) * 1000)
        wall = WALL_NS + round(clock.wall_wrong_us * 1000)
        # As the recorder does: the same machine shares the epoch exactly, another places it by its wall clock.
        self.epoch_ns = mono - (wall - WALL_NS) if clock.boot_id != Clock.boot_id else round(clock.ahead_us * 1000)
        if headers:
            args = {"format": 1, "run": "e/t", "role": role, "rank": rank, "pid": 7, "host": clock.boot_id}
            args |= {"boot_id": clock.boot_id, "time_ns": clock.time_ns, "epoch_mono_ns": self.epoch_ns}
            args |= {"mono_ns": mono, "wall_ns": wall, "run_epoch_wall_ns": WALL_NS}
            self._put({"name": "zbus_meta", "ph": "M", "ts": (mono - self.epoch_ns) / 1000, "args": args})

    def span(self, name: str, start: float, end: float, tid: int = 7, **args: Any) -> None:
        """Write a span of true times."""
        ts = self.ts(start)
        self._put({"name": name, "ph": "X", "ts": ts, "dur": round(self.ts(end) - ts, 3), "tid": tid, "args": args})

    def mark(self, name: str, at: float, **args: Any) -> None:
        """Write an instant."""
        self._put({"name": name, "ph": "i", "ts": self.ts(at), "tid": 7, "args": args})

    def ts(self, us: float) -> float:
        """Return the time of the file, in µs."""
        shown = self.clock.of(us) - (self.epoch_ns / 1000 if self.headers else 0)
        return round(shown, 3)

    def _put(self, event: dict[str, Any]) -> None:
        self.lines.append(json.dumps({**event, "pid": 7}, separators=(",", ":")) + "\n")

    def write(self, root: Path) -> None:
        """Write the file."""
        if self.headers:
            self._put({"name": "zbus_end", "ph": "M", "args": {"lost": {}}})
        path = root / "traces" / self.role / f"traces_{self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(self.lines))


def plant(root: Path, plan: Plan) -> Path:
    """Write the files of a run below ``root/traces`` and return ``root``."""
    rng = random.Random(plan.seed)
    controller = _File("controller", 0, Clock(), headers=plan.headers)
    ranks = {n: _File("actor", n, plan.clocks.get(n, Clock()), headers=plan.headers) for n in range(plan.ranks)}
    at = 10_000.0
    for step in range(plan.steps):
        done = at
        for rank, file in ranks.items():
            done = max(done, _call(plan, rng, controller, file, rank, step, at + rng.uniform(0, 30)))
        controller.span("step", at, done + 5, tid=8, step=step, true_us=at)
        controller.mark("zbus_step", done + 6, step=step)
        at += max(plan.every_us, done - at + 100)
    for file in (controller, *ranks.values()):
        file.write(root)
    return root


def _call(plan: Plan, rng: random.Random, controller: _File, file: _File, rank: int, step: int, at: float) -> float:
    """Write both sides of one call and return when it is over."""
    way, row = plan.ways.get(rank, Way()), 100 + rank
    call, worker = f"{step:08x}{rank:08x}", f"actor/{rank}"
    attempt = 1
    sent = at + 20
    if rng.random() < plan.lost:
        attempt = 2
        if not plan.headers:
            controller.span("rpc.client", sent, sent + 300, tid=row, call=call, attempt=1, status="timeout")
        sent += 350
    asleep = file.clock.sleeps_at_us
    arrived = sent + way.go(rng)
    if asleep is not None and asleep <= arrived < asleep + file.clock.sleeps_us:
        arrived = asleep + file.clock.sleeps_us + 50.0
    slow = plan.slow.get(rank, 1.0)
    begin = arrived + 15 + plan.late_us.get(rank, 0.0)
    now = begin + 5
    for name, mean in (("forward", 1000.0), ("reward", 500.0)):
        took = mean * rng.uniform(0.99, 1.01) * slow * (plan.reward.get(rank, 1.0) if name == "reward" else 1.0)
        file.span(name, now, now + took, true_us=now)
        now += took + 5
    returned, left = now, now + 20
    back = left + way.come(rng)
    who = {"call": call, "method": "train"}
    if plan.headers:
        more = {"kind": "run", "attempt": attempt, "step": step, **who}
        file.span("queue train", arrived, begin, tid=9, kind="queue", attempt=attempt, worker=worker, **who)
        file.span("run train", begin, returned, true_us=begin, **more)
        file.span("reply", returned, left + 10, kind="reply", call=call, attempt=attempt)
        controller.span("encode", at, at + 20, tid=row, kind="encode", call=call)
        controller.span("wire", at + 20, back, tid=row, kind="wire", call=call, attempt=attempt)
        more = {"kind": "client", "attempt": attempt, "outcome": "OK", "worker": worker, "batch": step, "true_us": at}
        controller.span("call train", at, back + 8, tid=row, **more, **who)
    else:
        file.span("rpc.server", arrived, left, attempt=attempt, true_us=arrived, **who)
        controller.span("rpc.client", sent, back, tid=row, attempt=attempt, status="ok", true_us=sent, **who)
    return back + 8


def planted_clocks(seed: int, ranks: int = 4, *, offset_s: float = 5.0, drift_ppm: float = 50.0) -> dict[int, Clock]:
    """Return a clock of its own for every rank, and wall clocks that are wrong by up to a second."""
    rng = random.Random(seed)
    return {
        rank: Clock(
            rng.uniform(-offset_s, offset_s) * 1e6,
            rng.uniform(-drift_ppm, drift_ppm) * 1e-6,
            f"host {rank}",
            wall_wrong_us=rng.uniform(-1e6, 1e6),
        )
        for rank in range(ranks)
    }
