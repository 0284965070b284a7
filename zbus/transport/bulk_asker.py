"""The asker's side of bulk data: one DEALER to one owner, from which parts are received into their places.

The header of a part is looked at before its bytes are taken out of the socket, so that they go where they belong with
one copy, and those that belong nowhere go nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq
import zmq.backend

from zbus.protocol.parts import Kind, PartError, PartHeader, pack, unpack
from zbus.protocol.puller import Ask, Ended, Ending, Patience, Puller, Range
from zbus.transport.multipart import send_gated
from zbus.transport.reactor import Reactor
from zbus.transport.sockets import SocketFactory, end_monitor, read_event

__all__ = ["OwnerLink"]

_BURST: Final = 4
"""Parts taken before others may have the lock: a few MiB, about a millisecond."""

_DONT_WAIT: Final = int(zmq.NOBLOCK)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_recv: Final[Any] = zmq.backend.Socket.recv
_recv_into: Final[Any] = zmq.backend.Socket.recv_into
_get: Final[Any] = zmq.backend.Socket.get

_SPOILING: Final = frozenset((Ending.STALLED, Ending.ABSENT, Ending.LIED))

OnEnd = Callable[[int, Ending, str], None]


class OwnerLink:
    """A connection to one owner. All methods under the reactor's lock, inside the gate; receiving on one thread only.

    Args:
        reactor: Where readiness comes from.
        factory: Makes the socket.
        endpoint: Where the owner is bound.
        puller: The machine; its time is this object's to give.
        on_end: Told of each pull that ended: number, how, evidence.
        now: Returns monotonic ns.
        piece, window, patience: As of ``Puller``.

    Attributes:
        idle_since: Since when nothing is pulled, if nothing is.
        spoilt: A pull ended because of this connection: the next one shall have a new one.
    """

    def __init__(
        self,
        reactor: Reactor,
        factory: SocketFactory,
        endpoint: str,
        on_end: OnEnd,
        now: Callable[[], int],
        *,
        piece: int,
        window: int,
        patience: Patience,
    ) -> None:
        self.endpoint = endpoint
        self.idle_since = now()
        self.spoilt = False
        self.pulled_bytes = 0
        self.refused: dict[str, int] = {}
        self._reactor = reactor
        self._on_end = on_end
        self._now = now
        self.puller = Puller(piece=piece, window=window, patience=patience)
        self._into: dict[int, Sequence[memoryview]] = {}
        self._outbox: deque[bytes] = deque()
        self._up = False
        self._why = ""
        self._closed = False
        self._socket, self._monitor = factory.monitored_dealer("data")
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        try:
            reactor.register(self._fd, self._on_readable)
            reactor.register(self._monitor_fd, self._on_monitor)
            factory.connect(self._socket, endpoint)
            self._on_monitor()
        except BaseException:
            self.close()
            raise

    def pull(self, key: bytes, ranges: Sequence[Range], into: Sequence[memoryview], deadline_ns: int | None) -> int:
        """Begin a pull into writable memory, one piece of it per range; return its number."""
        number, asks = self.puller.pull(key, ranges, deadline_ns, self._now())
        self._into[number] = into
        self._do(asks)
        return number

    def cancel(self, number: int) -> None:
        """Want a pull no more: its memory is not written to any more when this returns."""
        self._into.pop(number, None)
        self._do(self.puller.cancel(number, self._now()))

    def owner_gone(self, evidence: str) -> None:
        """End all pulls."""
        self._outbox.clear()
        self._do(self.puller.owner_gone(evidence))

    def on_timer(self, now: int) -> None:
        """Look at what is due."""
        if self.puller.due_ns <= now:
            self._do(self.puller.on_timer(now))

    def counts(self) -> dict[str, int]:
        """Return what came, and what was ignored or refused."""
        counts = {"bulk_pulled_bytes": self.pulled_bytes}
        others = {"bulk_ignored_parts": self.puller.ignored, "bulk_asked_again": self.puller.repeated}
        return {
            **counts,
            **{name: number for name, number in others.items() if number},
            **{f"bulk_refused_{reason}": number for reason, number in self.refused.items()},
        }

    def close(self) -> None:
        """Unregister and close both sockets. Never waits."""
        if self._closed:
            return
        self._closed = True
        self._reactor.unregister(self._fd)
        self._reactor.unregister(self._monitor_fd)
        end_monitor(self._socket)
        self._monitor.close(0)
        self._socket.close(0)

    # -- inside --------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Ask | Ended]) -> None:
        for effect in effects:
            if type(effect) is Ask:
                self._outbox.append(pack(effect.header))
            elif type(effect) is Ended:
                self._into.pop(effect.pull, None)
                self.spoilt = self.spoilt or effect.how in _SPOILING
                self._on_end(effect.pull, effect.how, effect.evidence)
        if self._outbox:
            self._flush()
        if self.puller.idle:
            self.idle_since = self._now()
        else:
            self._reactor.note_due(self.puller.due_ns)

    def _flush(self) -> None:
        outbox = self._outbox
        self._reactor.check_later(self._fd, self._check)
        while outbox and send_gated(self._socket, [outbox[0]]):
            outbox.popleft()

    def _check(self) -> bool:
        if self._closed or not _get(self._socket, _EVENTS) & _POLLIN:
            return False
        self._on_readable()
        return True

    def _on_readable(self) -> None:
        if self._outbox:
            self._flush()
        for _ in range(_BURST):
            try:
                frame = _recv(self._socket, _DONT_WAIT)
            except zmq.Again:
                return
            self._take(frame)
            if self._closed:
                return
        self._reactor.call_again(self._fd)

    def _take(self, frame: bytes) -> None:
        """Take one message, of which the first frame is there."""
        try:
            header = unpack(frame)
        except PartError as error:
            self._skip()
            self._refuse(error.reason)
            return
        whole = True
        if header.kind is Kind.PART:
            whole = self._receive(header)
        if self._skip():
            whole = False
        self._do(self.puller.came(header, self._now(), whole=whole))

    def _receive(self, header: PartHeader) -> bool:
        """Take the bytes of a part to their place, if they have one; tell whether they are as many as was said."""
        if not _get(self._socket, _RCVMORE):
            return False
        place = self.puller.place_of(header)
        into = None if place is None else self._into.get(place.pull)
        if place is None or into is None:
            _recv_into(self._socket, bytearray(), flags=_DONT_WAIT)  # discards it
            return True
        target = into[place.range][place.offset : place.offset + place.nbytes]
        came = _recv_into(self._socket, target, flags=_DONT_WAIT)
        if came != place.nbytes:
            self._refuse("part_bytes")
            return False
        self.pulled_bytes += place.nbytes
        return True

    def _skip(self) -> int:
        """Discard the frames that are left of a message; return how many."""
        skipped = 0
        while _get(self._socket, _RCVMORE):
            _recv_into(self._socket, bytearray(), flags=_DONT_WAIT)
            skipped += 1
        return skipped

    def _on_monitor(self) -> None:
        while not self._closed:
            event = read_event(self._monitor)
            if event is None:
                return
            if event.connected:
                self._up, self._why = True, ""
                self._do(self.puller.link_up(self._now()))
            elif event.refused:
                self._why = f"{event.endpoint} is not a zbus peer, or has other keys"
                self._refuse("handshake")
            elif event.lost:
                self._outbox.clear()
                why = self._why or ("the connection was lost" if self._up else "no connection")
                self.puller.link_down(why, self._now())
                self._up = False
                self._reactor.note_due(self.puller.due_ns)
            elif event.retried and not self._up:
                self.puller.link_down(self._why or f"nobody answers at {self.endpoint}", self._now())

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
