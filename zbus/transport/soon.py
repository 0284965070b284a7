"""Calls that leave with those placed right before and behind them: none waits for others, those that wait go together.

A call to a worker that has little to do leaves at once. Where ``BUSY`` calls are ahead of it already, it cannot begin
before they end; then it is *piled*, and leaves with what else is piled for that lane in one message: as soon as there
are ``MOST``, before anything else is placed there, before a thread waits for an answer, and a few milliseconds later at
the latest, by whoever drives the sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from zbus.protocol.messages import Buffers, Outcome, OutcomeKind
from zbus.transport.interrupts import gate

if TYPE_CHECKING:
    from zbus.transport.client import Client, Placed
    from zbus.transport.peer import Peer, PeerLane

__all__ = ["Awaited", "Soon"]

BUSY: Final = 16
"""So many calls ahead in its lane are enough for a worker to be busy until a piled call comes."""

MOST: Final = 32
"""Calls in one message."""

_LONGEST_NS: Final = 1_000_000
"""A pile that is so old leaves with the next call that joins it."""

_PILES: Final = -1
"""Stands for all piles where the reactor wants a descriptor."""


_CLOSED: Final = Outcome(OutcomeKind.NOT_EXECUTED, None, "shutdown", "this controller closed before it was sent", 0)


class Awaited(Protocol):
    """Who waits for the outcome of one call. All of it is told under the client's lock."""

    @property
    def began_ns(self) -> int:
        """Since when (monotonic)."""
        ...

    def placed(self, seq: int) -> None:
        """It has its place in the lane; an outcome follows."""

    def unplaced(self) -> None:
        """It was not placed and will not be: its worker is not ready any more, or this process ends."""

    def came(self, body: bytes, attempts: int) -> None:
        """Its outcome is OK, with a result of one frame."""

    def ended(self, outcome: Outcome) -> None:
        """It has any other outcome."""


class Soon:
    """The piles of a client. Methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._now = client.clock.monotonic_ns
        self._piled: dict[int, PeerLane] = {}  # lanes that have a pile, by id

    def place(self, peer: Peer, lane: str, payload: Buffers, deadline_s: float | None, awaited: Awaited) -> bool:
        """Place one call of one frame now, or pile it.

        Args:
            peer: Who is called.
            lane: Name of the lane.
            payload: The one frame.
            deadline_s: Seconds from now, or None for no deadline.
            awaited: Told what becomes of it.

        Returns:
            False where nothing was done: the peer is not ready, knows no calls that travel together, or has no room.
            What was piled for it before is on its way then.
        """
        client = self._client
        with gate, client.reactor.lock:
            found = peer.lanes.get(lane)
            if found is None:
                return False
            if not client.takes(peer):
                self.send(found)
                return False
            now = self._now()
            deadline_ns = None if deadline_s is None else now + int(deadline_s * 1e9)
            pile, machine = found.pile, found.machine
            if not pile:
                if machine.credit < MOST or machine.waiting:
                    return False
                found.piled_ns = now
            pile.append((payload, deadline_ns, awaited))
            if machine.outstanding < BUSY or len(pile) >= MOST or now - found.piled_ns > _LONGEST_NS:
                self.send(found)
                found.link.channel.check()
            elif len(pile) == 1:
                self._piled[id(found)] = found
                client.reactor.look_soon(_PILES, self._send_all)
            return True

    def send(self, lane: PeerLane) -> None:
        """Send what is piled in a lane. Under the lock, inside the gate."""
        pile = lane.pile
        if not pile:
            return
        client = self._client
        lane.pile = []
        if not client.takes(lane.link.peer):
            self._piled.pop(id(lane), None)
            for _, _, awaited in pile:
                try:
                    if client.closed:
                        awaited.ended(_CLOSED)
                    else:
                        awaited.unplaced()
                except Exception as error:  # noqa: BLE001  # as in ``Client.execute``: it costs nobody else theirs
                    client.not_heard(lane, error)
            return
        payloads, deadlines, waiting = zip(*pile, strict=True)
        first, effects = lane.machine.place_joined(payloads, deadlines, self._now())
        lane.waiters.soon.update(enumerate(waiting, first))
        for seq, awaited in enumerate(waiting, first):
            awaited.placed(seq)
        self._piled.pop(id(lane), None)  # not before: ``send_all`` waits for the lock as long as it stands there
        client.execute(lane, effects, placing=True)
        client.reactor.note_due(lane.machine.due_ns)

    @staticmethod
    def handle(peer: Peer, lane: str, seq: int) -> Placed:
        """Return the handle of a call that has its place, for ``Client.cancel``."""
        from zbus.transport.client import Placed  # which imports this module

        return Placed((peer,), lane, [seq], 1)

    def send_all(self) -> None:
        """Send all that is piled."""
        if self._piled:
            with gate, self._client.reactor.lock:
                self._send_all()

    def _send_all(self) -> bool:
        came = False
        for lane in list(self._piled.values()):
            self.send(lane)
            came = lane.link.channel.check() or came
        return came

    def older_than(self, age_ns: int) -> list[Awaited]:
        """Return those that have waited longer than ``age_ns``."""
        client = self._client
        with gate, client.reactor.lock:
            before = self._now() - age_ns
            found = []
            for lane in client.lanes():
                for awaited in lane.waiters.soon.values():  # the oldest first
                    if awaited.began_ns > before:
                        break
                    found.append(awaited)
            return found
