"""The owner's side of bulk data: a ROUTER that answers each ASK with the bytes themselves, not a copy of them.

What a peer does not take at once waits here, a bounded number of answers per peer; what is more is dropped, and asked
for again by those who want it. So a peer that asks and does not read holds up nobody and fills no memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import zmq

from zbus.protocol.messages import Buffer
from zbus.protocol.parts import Kind, PartError, pack, unpack
from zbus.protocol.stock import Stock
from zbus.transport.multipart import PeerGone, Receiver, Socket, send_gated
from zbus.transport.reactor import Reactor

__all__ = ["Counter"]

_BURST: Final = 32
_MOST_PARKED: Final = 64
"""Answers that wait for one peer; an honest one has a window of 8 MiB, so never as many are out."""

_AGAIN_NS: Final = 1_000_000_000
"""How often what is parked is tried, whatever the socket tells."""

_NEVER: Final = 1 << 62


class Counter:
    """A bound ROUTER where parts are handed out. All methods under the reactor's lock, inside the gate.

    Args:
        reactor: Where readiness comes from.
        socket: Its ROUTER; this object owns it from now on.
        stock: What there is to give.
    """

    def __init__(self, reactor: Reactor, socket: Socket, stock: Stock) -> None:
        self.socket = socket
        self._reactor = reactor
        self._stock = stock
        self._receiver = Receiver(socket)
        self._parked: dict[bytes, deque[list[Any]]] = {}
        self._due_ns = _NEVER
        self._fd = int(socket.getsockopt(zmq.FD))
        self.given_bytes = 0
        self.given_parts = 0
        self.refused: dict[str, int] = {}
        reactor.register(self._fd, self._on_readable)

    def counts(self) -> dict[str, int]:
        """Return what was given, and what was refused by reason."""
        given = {"bulk_given_bytes": self.given_bytes, "bulk_given_parts": self.given_parts}
        return {**given, **{f"bulk_refused_{reason}": number for reason, number in self.refused.items()}}

    def close(self) -> None:
        """Unregister and close the socket. Never waits."""
        self._reactor.unregister(self._fd)
        self._parked.clear()
        self.socket.close(0)

    def on_timer(self, now: int) -> int:
        """Try what is parked; return when that is due again (ns). The socket may have told of a peer's end long ago."""
        if self._parked and self._due_ns <= now:
            self._flush()
            self._due_ns = now + _AGAIN_NS
        return self._due_ns if self._parked else _NEVER

    def _check(self) -> bool:
        if not self._receiver.more():
            return False
        self._on_readable()
        return True

    def _on_readable(self) -> None:
        if self._parked:
            self._flush()
        for _ in range(_BURST):
            frames = self._receiver.take()
            if frames is None:
                return
            self._take(frames)
        self._reactor.call_again(self._fd)

    def _take(self, frames: list[Buffer]) -> None:
        try:
            if len(frames) != 2:
                reason = "ask_frames"
                raise PartError(reason)
            peer, ask = bytes(frames[0]), unpack(bytes(frames[1]))
            if ask.kind is not Kind.ASK:
                reason = "no_ask"
                raise PartError(reason)
        except PartError as error:
            self._refuse(error.reason)
            return
        status, view = self._stock.answer(ask, self._reactor.clock.monotonic_ns())
        if view is None:
            self._send(peer, [peer, pack(ask._replace(kind=Kind.REFUSED, status=status))])
        elif self._send(peer, [peer, pack(ask._replace(kind=Kind.PART)), view]):
            self.given_bytes += view.nbytes
            self.given_parts += 1

    def _send(self, peer: bytes, frames: list[Any]) -> bool:
        """Send an answer, or park it; False if it is dropped."""
        parked = self._parked.get(peer)
        if parked is not None:
            if len(parked) >= _MOST_PARKED:
                self._refuse("flood")
                return False
            parked.append(frames)
            return True
        self._reactor.check_later(self._fd, self._check)
        try:
            if not send_gated(self.socket, frames):
                self._parked[peer] = deque([frames])
                self._due_ns = self._reactor.clock.monotonic_ns() + _AGAIN_NS
                self._reactor.note_due(self._due_ns)
        except PeerGone:
            self._refuse("peer_gone")
            return False
        return True

    def _flush(self) -> None:
        for peer, waiting in list(self._parked.items()):
            try:
                while waiting and send_gated(self.socket, waiting[0]):
                    waiting.popleft()
            except PeerGone:
                waiting.clear()
            if not waiting:
                del self._parked[peer]
        self._reactor.check_later(self._fd, self._check)

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
