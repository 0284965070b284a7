"""The clocks of other hosts, measured by the controller while it runs: what the traces are aligned by.

Processes of one boot and time namespace share their monotonic clock; nothing is asked of them. Of every other clock one
process is asked for the time on its ``ctl`` link, often at first and a few times a second later, and the narrowest
exchange of each window gives an offset with a bound (``zbus.trace.clocksync``). The offset is written into the trace of
the controller, and told to every process of that clock, for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from zbus.clock import ClockId
from zbus.trace.blocks import ClockLine
from zbus.trace.clocksync import ClockFilter, ClockPoint
from zbus.transport.client import Client, Exchange, Peer, PeerState
from zbus.transport.interrupts import gate

__all__ = ["ClockWatch"]

_FIRST_NS: Final = 5_000_000
_EVERY_NS: Final = 200_000_000
_PER_CLOCK_NS: Final = 10_000_000
_FIRST_PER_CLOCK_NS: Final = 3_000_000
"""With many clocks each is asked less often: an exchange costs some 150 µs, so all together 5 % of a core in the first
seconds, and 1.5 % later, whatever their number."""

_LOST_NS: Final = 1_000_000_000
_OFF_NS: Final = 1_000_000_000


class _Watched:
    """One clock that is not ours."""

    def __init__(self) -> None:
        self.filter = ClockFilter()
        self.peers: dict[int, Peer] = {}
        self.due = 0
        self.asked: Peer | None = None

    def ready(self) -> list[Peer]:
        """Return the processes that can be asked, and forget those that ended."""
        for key, peer in list(self.peers.items()):
            if peer.state is PeerState.DEAD:
                del self.peers[key]
        return [peer for peer in self.peers.values() if peer.state is PeerState.READY]


class ClockWatch:
    """Asks, on the client's reactor; ``close`` ends it. Nothing is asked while ``wanted`` says no.

    Args:
        client: Whose peers.
        own: The clock of this process.
        wanted: Whether anything is traced.
        note: Takes each line for the trace of this process; called under the client's lock.
    """

    def __init__(
        self, client: Client, own: ClockId, wanted: Callable[[], bool], note: Callable[[ClockLine], None]
    ) -> None:
        self._client = client
        self._own = own
        self._wanted = wanted
        self._note = note
        self._clocks: dict[ClockId, _Watched] = {}
        client.on_exchange = self._on_exchange
        client.reactor.add_ticker(self._tick)

    def close(self) -> None:
        """Write what the open windows hold, and ask no more."""
        client = self._client
        client.reactor.remove_ticker(self._tick)
        with gate, client.reactor.lock:
            for clock, watched in self._clocks.items():
                self._say(clock, watched, watched.filter.finish())
            self._clocks.clear()

    def _on_exchange(self, peer: Peer, stamps: Exchange) -> None:
        clock = _clock_of(peer)
        if clock is None or clock == self._own:
            return
        watched = self._clocks.setdefault(clock, _Watched())
        watched.peers[id(peer)] = peer
        if not self._wanted():
            return
        self._say(clock, watched, watched.filter.add(*stamps))
        count = len(self._clocks)
        settled = watched.filter.settled
        every = max(_EVERY_NS, _PER_CLOCK_NS * count) if settled else max(_FIRST_NS, _FIRST_PER_CLOCK_NS * count)
        watched.due = stamps[3] + every
        self._client.reactor.note_due(watched.due)

    def _tick(self, now: int) -> int:
        if not self._wanted():
            return now + _OFF_NS
        for watched in self._clocks.values():
            if watched.due <= now:
                self._ask(watched, now)
        return min((watched.due for watched in self._clocks.values()), default=1 << 62)

    def _ask(self, watched: _Watched, now: int) -> None:
        """Ask the process that was asked before, or another one if it did not answer."""
        ready = watched.ready()
        watched.due = now + _LOST_NS
        if watched.asked in ready and len(ready) > 1:
            ready.remove(watched.asked)
            ready.insert(0, watched.asked)
        for peer in ready:
            if self._client.ping(peer):
                watched.asked = peer
                return

    def _say(self, clock: ClockId, watched: _Watched, point: ClockPoint | None) -> None:
        if point is None:
            return
        self._note(_line(point, clock))
        back = point._replace(
            at_ns=point.at_ns + point.offset_ns, offset_ns=-point.offset_ns, drift_ppb=-point.drift_ppb
        )
        told = msgspec.msgpack.encode(_line(back, self._own))
        self._tell(watched.ready(), told)

    def _tell(self, peers: Iterable[Peer], told: bytes) -> None:
        for peer in peers:
            self._client.ping(peer, told)


def _line(point: ClockPoint, ref: ClockId) -> ClockLine:
    return ClockLine(**point._asdict(), ref_boot_id=ref.boot_id, ref_time_ns=ref.time_ns)


def _clock_of(peer: Peer) -> ClockId | None:
    """Return the clock a peer says it has; None where it does not say."""
    boot, space = peer.welcome.get("boot_id"), peer.welcome.get("time_ns")
    return ClockId(boot, space) if isinstance(boot, str) and boot and type(space) is int else None
