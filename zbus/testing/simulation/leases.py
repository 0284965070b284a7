"""Leases in the simulation: a holder that renews, observers that judge it by their own clocks, and no clock compared.

Each process's clock has a rate between 0.5 and 2 of its own. Processes are stopped for a while, renewals fail, a file
server shows them late, the holder may die.

I13: nobody is called expired whose renewals an observer could see within the lease time of its own clock, whatever
pauses lay between, the observer's own above all. I11: a dead holder is called expired in time. P9: while clocks agree
within the holder's margin and renewals are seen at once, a holder has given up before any observer calls it expired.
"""

from __future__ import annotations

from random import Random
from typing import Final

from zbus.registry.lease import HOLDER_MARGIN, LeaseObserver, LeaseRenewer, LeaseState
from zbus.registry.records import Lease
from zbus.testing.simulation.clocks import NodeClock
from zbus.testing.simulation.knobs import MS
from zbus.testing.simulation.ledger import broken

__all__ = ["leases"]

_SALT: Final = 0x1EA5ED
_TTL: Final = 300 * MS
_STEP: Final = 5 * MS
_END: Final = 4_000 * MS
_SEEN_AFTER: Final = 3
"""So many lease times after a death every observer that looks must know."""


class _Node:
    """A process with a clock that is stopped now and then."""

    def __init__(self, rng: Random, *, pauses: float, wrong: bool) -> None:
        self.clock = NodeClock(0.5 * 4 ** rng.random() if wrong else 1.0, int(rng.random() * 1e12))
        self._rng = rng
        self._pauses = pauses
        self._until = 0

    def stopped(self, now: int) -> bool:
        """Whether it does not run now; decides about the next pause."""
        if now >= self._until and self._rng.random() < self._pauses:
            self._until = now + int(self._rng.random() * 3 * _TTL)
        return now < self._until


class _Watcher(_Node):
    """An observer, and what a judge with no machine knows of what it could see."""

    def __init__(self, rng: Random, *, pauses: float, wrong: bool) -> None:
        super().__init__(rng, pauses=pauses, wrong=wrong)
        self.observer = LeaseObserver()
        self.counter = 0
        self.changed_at = 0  # own time of the last look that showed another counter
        self.looked_for = 0  # own time since then in which it looked, no gap counting more than half a lease
        self.looked_at = 0
        self.next_look = 0


def leases(seed: int, covered: dict[object, int]) -> None:
    """Play one holder and its observers; raises ``Violation`` when a promise of leases breaks."""
    rng = Random(seed ^ _SALT)  # noqa: S311  # a schedule, not a secret
    r = rng.random
    wrong, lag = r() < 0.5, int(r() * _TTL) if r() < 0.4 else 0
    fails, pauses = (r() * 0.5 if r() < 0.4 else 0.0), (0.01 if r() < 0.5 else 0.0)
    holder = _Node(rng, pauses=pauses, wrong=wrong)
    watchers = [_Watcher(rng, pauses=pauses, wrong=wrong) for _ in range(1 + int(r() * 2))]
    dies_at = int(r() * _END) if r() < 0.5 else _END
    renewer = LeaseRenewer("agent", _TTL / 1e9)
    written: list[tuple[int, Lease]] = []  # when it is seen, and what
    for now in range(0, _END, _STEP):
        if now < dies_at and not holder.stopped(now) and renewer.due(holder.clock.read(now)):
            lease = renewer.next(holder.clock.read(now))
            if fails and r() < fails:
                renewer.failed()
            else:
                written.append((now + int(r() * lag), lease))
                renewer.renewed()
        seen = max((lease.counter for at, lease in written if at <= now), default=0)
        for watcher in watchers:
            if watcher.stopped(now) or watcher.clock.read(now) < watcher.next_look:
                continue
            _look(watcher, now, seen)
            if watcher.observer.state("agent") is LeaseState.EXPIRED:
                covered["lease", "expired"] += 1
                near = watcher.clock.rate * HOLDER_MARGIN < holder.clock.rate
                if near and not lag and renewer.held(holder.clock.read(now)) and now < dies_at:
                    broken("P9", "an observer calls a lease expired on which its holder still acts")
            elif seen:
                covered["lease", "live or late"] += 1
    for watcher in watchers:
        if dies_at < _END and not pauses and not lag:
            alive_for = watcher.clock.read(_END) - watcher.clock.read(dies_at)
            expired = watcher.observer.state("agent") in (LeaseState.EXPIRED, LeaseState.UNKNOWN)
            if alive_for > _SEEN_AFTER * _TTL and not expired:
                broken("I11", "a holder died, and an observer that kept looking did not call it expired")
    covered["lease", "clocks at other rates"] += wrong
    covered["lease", "renewals seen late"] += bool(lag)
    covered["lease", "renewals that fail"] += bool(fails)
    covered["lease", "processes stopped"] += bool(pauses)


def _look(watcher: _Watcher, now: int, seen: int) -> None:
    own = watcher.clock.read(now)
    if seen:
        watcher.observer.observe({"agent": Lease(holder="agent", counter=seen, ttl_s=_TTL / 1e9)}, own)
        if seen != watcher.counter:
            watcher.counter, watcher.changed_at, watcher.looked_for = seen, own, 0
        else:
            watcher.looked_for += min(own - watcher.looked_at, _TTL // 2)
        watcher.looked_at = own
    watcher.next_look = own + _TTL // 4
    if watcher.observer.state("agent") is LeaseState.EXPIRED:
        if own - watcher.changed_at < _TTL:
            silence_ms = (own - watcher.changed_at) / 1e6
            broken(
                "I13", f"a lease of {_TTL / 1e6:.0f} ms is called expired, and was seen renewed {silence_ms:.0f} ms ago"
            )
        if watcher.looked_for < _TTL:
            broken(
                "I13", f"a lease is called expired after {watcher.looked_for / 1e6:.0f} ms of looking: it was stopped"
            )
