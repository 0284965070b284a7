"""Leases: a counter that its holder raises, judged by each observer's own monotonic clock (promise R4).

Both halves are pure: no thread, no clock, no I/O; ``now_ns`` is handed in. No clock of one host is ever compared with
a clock of another: an observer measures only how long *it* has been watching a counter that did not move.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from zbus.registry.records import Lease

__all__ = ["HOLDER_MARGIN", "LeaseObserver", "LeaseRenewer", "LeaseState"]

HOLDER_MARGIN: Final = 0.8
"""A holder stops trusting its own lease at this part of the TTL, before any observer calls it expired."""

_RENEWALS_PER_TTL: Final = 3
_RETRIES_PER_TTL: Final = 10
_NS: Final = 1_000_000_000


class LeaseRenewer:
    """Says when a holder renews and whether it may still act; the caller does the writing.

    ::

        if renewer.due(now_ns):
            lease = renewer.next(now_ns)
            try:
                records.renew_lease(lease)
            except RegistryError:
                renewer.failed()          # tried again after a tenth of the TTL
            else:
                renewer.renewed()

    Not thread-safe: one thread owns it.

    Args:
        holder: Who holds it: an agent id, or ``controller.N``.
        ttl_s: Seconds without a renewal after which observers call it expired.
        counter: Number before the first renewal. A holder that reuses its name must go on from another value.
    """

    def __init__(self, holder: str, ttl_s: float, *, counter: int = 0) -> None:
        if ttl_s <= 0:
            msg = f"lease time {ttl_s} s is not positive"
            raise ValueError(msg)
        self.holder = holder
        self.ttl_s = ttl_s
        self.counter = counter
        self._ttl_ns = int(ttl_s * _NS)
        self._due_ns: int | None = None
        self._asked_ns = 0
        self._good_ns: int | None = None
        self.failures = 0

    def due(self, now_ns: int) -> bool:
        """Return whether a renewal should be written now."""
        return self._due_ns is None or now_ns >= self._due_ns

    def wait_s(self, now_ns: int) -> float:
        """Return seconds until the next renewal is due (0 when it is)."""
        return 0.0 if self._due_ns is None else max(0, self._due_ns - now_ns) / _NS

    def next(self, now_ns: int) -> Lease:
        """Return the lease to write, with the counter raised by one; then call ``renewed`` or ``failed``."""
        self.counter += 1
        self._asked_ns = now_ns
        self._due_ns = now_ns + self._ttl_ns // _RENEWALS_PER_TTL
        return Lease(holder=self.holder, counter=self.counter, ttl_s=self.ttl_s)

    def renewed(self) -> None:
        """The last renewal was written. It counts from the moment it was asked for, not from when it returned."""
        self._good_ns = self._asked_ns
        self.failures = 0

    def failed(self) -> None:
        """The last renewal may not have been written; it is due again after a tenth of the TTL."""
        self.failures += 1
        self._due_ns = self._asked_ns + self._ttl_ns // _RETRIES_PER_TTL

    @property
    def held_until_ns(self) -> int:
        """Until when the holder may act on it: 0.8 TTL after the last good renewal was asked for."""
        return 0 if self._good_ns is None else self._good_ns + int(self._ttl_ns * HOLDER_MARGIN)

    def held(self, now_ns: int) -> bool:
        """Return whether the holder may still act on it: a good renewal began less than 0.8 TTL ago."""
        return now_ns < self.held_until_ns


class LeaseState(enum.Enum):
    """What an observer knows of a lease."""

    UNKNOWN = "unknown"
    """Never seen."""
    LIVE = "live"
    """Renewed in time."""
    LATE = "late"
    """Two renewals are overdue; no reason yet to act."""
    EXPIRED = "expired"
    """Silent for its whole TTL while this observer kept looking."""


class _Watched(msgspec.Struct):
    counter: int
    ttl_ns: int
    looked_ns: int
    silent_ns: int = 0


class LeaseObserver:
    """Judges leases from repeated looks at the registry. Not thread-safe: one thread owns it.

    Silence is added up from look to look, and one gap between looks counts for at most half the TTL. So an observer
    that was itself stopped, or could not read the registry, expires nobody for time in which it did not look; it looks
    again first. To expire a lease in time, look at least twice per TTL.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def observe(self, leases: Mapping[str, Lease], now_ns: int) -> None:
        """Take one successful look: the leases by holder, at ``now_ns`` of the observer's monotonic clock.

        A lease seen before but absent now ages like one that did not move (its file may reappear). After a failed
        read call nothing.
        """
        for holder, lease in leases.items():
            watched = self._watched.get(holder)
            if watched is None or watched.counter != lease.counter:
                self._watched[holder] = _Watched(lease.counter, int(lease.ttl_s * _NS), now_ns)
            else:
                _age(watched, now_ns)
        for holder, watched in self._watched.items():
            if holder not in leases:
                _age(watched, now_ns)

    def expect(self, holder: str, ttl_s: float, now_ns: int) -> None:
        """Watch a holder that ought to have a lease: one that never writes it is silent from now on. Before a look."""
        if holder not in self._watched:
            self._watched[holder] = _Watched(-1, int(ttl_s * _NS), now_ns)

    def state(self, holder: str) -> LeaseState:
        """Return what the looks so far say about a holder."""
        watched = self._watched.get(holder)
        if watched is None:
            return LeaseState.UNKNOWN
        if watched.silent_ns >= watched.ttl_ns:
            return LeaseState.EXPIRED
        late_ns = watched.ttl_ns * (_RENEWALS_PER_TTL - 1) // _RENEWALS_PER_TTL
        return LeaseState.LATE if watched.silent_ns >= late_ns else LeaseState.LIVE

    def silence_s(self, holder: str) -> float:
        """Return seconds this observer has watched the counter not move (0 for an unknown holder)."""
        watched = self._watched.get(holder)
        return watched.silent_ns / _NS if watched else 0.0

    def expired(self) -> tuple[str, ...]:
        """Return the holders whose leases have expired, in name order."""
        return tuple(sorted(holder for holder in self._watched if self.state(holder) is LeaseState.EXPIRED))

    def forget(self, holder: str) -> None:
        """Stop watching a holder (it said goodbye, or its end was handled)."""
        self._watched.pop(holder, None)


def _age(watched: _Watched, now_ns: int) -> None:
    gap = max(0, now_ns - watched.looked_ns)
    watched.silent_ns += min(gap, watched.ttl_ns // 2)
    watched.looked_ns = max(watched.looked_ns, now_ns)
