"""One socket on a reactor: whole messages out (parked while nobody is there), whole messages in, link events.

A channel decides nothing: it moves messages, counts what it refuses, and reports what the monitor says.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import zmq

from zbus.errors import TransportError
from zbus.protocol.frames import FrameError, VersionMismatch, decode, encode
from zbus.protocol.messages import Buffer, Buffers, Header, Kind
from zbus.transport.multipart import PeerGone, Receiver, Socket, send_gated
from zbus.transport.reactor import Reactor
from zbus.transport.sockets import MonitorEvent, end_monitor, read_event

__all__ = ["Channel", "LinkEvents"]

log = logging.getLogger("zbus.transport")

_BURST: Final = 256
_LAST_BURSTS: Final = 16


class LinkEvents(Protocol):
    """What a monitored channel reports. Called under the reactor's lock."""

    def on_link_up(self) -> None:
        """The transport handshake with the peer succeeded."""

    def on_link_down(self, why: str) -> None:
        """The connection is gone, or its handshake failed; ``why`` is the monitor's word."""

    def on_link_retried(self) -> None:
        """The transport tries again by itself. Unless this follows a lost connection closely, it has given up."""


class Channel:
    """A socket with its receiver, its parked messages and its counters.

    All methods run under the reactor's lock and inside the gate.

    Args:
        reactor: Where readiness comes from.
        socket: From the socket factory; this channel owns it from now on.
        on_message: Called with (header, buffers, peer) for each valid message; ``peer`` is the routing id on a ROUTER
            and empty on a DEALER.
        router: Whether the socket is a ROUTER.
        monitor: Monitor socket of a DEALER, or None.
        events: Receiver of link events; needed with a monitor.
    """

    def __init__(
        self,
        reactor: Reactor,
        socket: Socket,
        on_message: Callable[[Header, Sequence[Buffer], bytes], None],
        *,
        router: bool,
        monitor: Socket | None = None,
        events: LinkEvents | None = None,
        on_bad: Callable[[FrameError, bytes], None] | None = None,
    ) -> None:
        self.socket = socket
        self._reactor = reactor
        self._router = router
        self._on_message = on_message
        self._on_bad = on_bad
        self._receiver = Receiver(socket)
        self._outbox: deque[list[Any]] = deque()
        self._monitor = monitor
        self._events = events
        self._up = False
        self._refusal = ""
        self._fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = -1 if monitor is None else int(monitor.getsockopt(zmq.FD))
        self.refused: dict[str, int] = {}
        self.unroutable = 0
        self.unsent = 0
        self._closed = False
        try:
            reactor.register(self._fd, self.on_readable)
            if monitor is not None:
                reactor.register(self._monitor_fd, self._on_monitor)
        except BaseException:
            self.close()
            raise
        if monitor is not None:
            self._on_monitor()

    def send(self, header: Header, buffers: Buffers = (), peer: bytes | None = None) -> None:
        """Send one message, or park it until the peer can take it.

        A gone peer's message is counted and dropped: the protocol recovers it when the peer returns.
        """
        frames = encode(header, buffers)
        if peer is not None:
            frames.insert(0, peer)
        self._reactor.check_later(self._fd, self.check)
        if self._outbox:
            self._outbox.append(frames)
            self._flush()
            return
        try:
            if not send_gated(self.socket, frames):
                self._outbox.append(frames)
        except PeerGone:
            self.unroutable += 1

    def check(self) -> bool:
        """Take what is there although the descriptor may be silent, as it is after a send; True if there was anything.

        Call after sends, unless the thread goes on with a round of this channel's own reactor, which begins with it.
        """
        self._reactor.checked(self._fd)
        if self._closed or not self._receiver.more():
            return False
        self.take_all()
        return True

    def drain(self) -> None:
        """Take all that has arrived, for the last time."""
        for _ in range(_LAST_BURSTS):
            self.check()

    def clear_outbox(self) -> None:
        """Drop parked messages, counted; the protocol sends anew after a reconnect."""
        self.unsent += len(self._outbox)
        self._outbox.clear()

    @property
    def parked(self) -> int:
        """Number of messages waiting for the peer."""
        return len(self._outbox)

    def counts(self) -> dict[str, int]:
        """Return what was refused or dropped here, by reason; reasons that never occurred are left out.

        ``refused_…``: messages that are none, and handshakes that failed. ``unroutable``: sent to a peer that was gone.
        ``unsent``: parked when the connection was lost. ``torn``: struck by an interrupt in the middle of a receive.
        """
        counts = {f"refused_{reason}": number for reason, number in self.refused.items()}
        others = {"unroutable": self.unroutable, "unsent": self.unsent, "torn": self._receiver.dropped}
        return {**counts, **{reason: number for reason, number in others.items() if number}}

    def on_readable(self) -> None:
        """Take one message: most often it is the only one, and whoever waits for it need not wait for a look.

        The look comes at the start of the reactor's next round.
        """
        frames = self._receiver.take()
        self._reactor.check_later(self._fd, self.check)
        if frames is not None:
            self._take(frames)
        if self._outbox and not self._closed:
            self._flush()

    def take_all(self) -> None:
        """Take a burst of messages; what is left is taken in the reactor's next round."""
        receiver = self._receiver
        for _ in range(_BURST):
            frames = receiver.take()
            if frames is None:
                break
            self._take(frames)
            if self._closed:
                return
            if not receiver.more():
                break
        else:
            self._reactor.call_again(self._fd)
        if self._outbox:
            self._flush()

    def close(self) -> None:
        """Unregister and close the socket and its monitor. Never waits."""
        if self._closed:
            return
        self._closed = True
        self._reactor.unregister(self._fd)
        if self._monitor is not None:
            self._reactor.unregister(self._monitor_fd)
            end_monitor(self.socket)
            self._monitor.close(0)
        self.socket.close(0)

    def _take(self, frames: list[Buffer]) -> None:
        peer = b""
        try:
            if self._router:
                peer = frames.pop(0)  # type: ignore[assignment]  # short, so bytes
                header, buffers = decode(frames)
            else:
                header, buffers = decode(frames)
        except FrameError as error:
            self._count(error.reason)
            if self._on_bad is not None and isinstance(error, VersionMismatch):
                self._on_bad(error, peer)
            return
        try:
            self._on_message(header, buffers, peer)
        except TransportError:  # about the socket: its owner's to answer
            raise
        except Exception:  # a fault of ours costs this message, not the thread and all that it serves
            self._count("handler_error")
            log.exception("a message of kind %s could not be handled", Kind(header.kind).name)

    def _flush(self) -> None:
        outbox = self._outbox
        while outbox:
            try:
                if not send_gated(self.socket, outbox[0]):
                    return
            except PeerGone:
                self.unroutable += 1
            outbox.popleft()

    def _on_monitor(self) -> None:
        events = self._events
        while not self._closed and self._monitor is not None and events is not None:
            event = read_event(self._monitor)
            if event is None:
                return
            if event.connected:
                self._up, self._refusal = True, ""
                events.on_link_up()
                self._flush()
            elif event.retried:
                events.on_link_retried()
            elif event.refused:
                self._refusal = _refusal(event)
                self._count(_REFUSED[event.event])
                events.on_link_down(self._refusal)
            elif event.lost:  # also after each refusal
                if not self._up and not self._refusal:  # what came was no greeting at all
                    self._count("handshake_garbage")
                    self._refusal = f"{event.endpoint} is not a zbus peer"
                why, self._up, self._refusal = self._refusal, False, ""
                events.on_link_down(why or "the connection was lost")

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


_REFUSED: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake_cut",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake_protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "handshake_auth",
}


def _refusal(event: MonitorEvent) -> str:
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"{event.endpoint} refused our key"
    if event.event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"{event.endpoint} closed the connection before it said who it is"
    return f"{event.endpoint} is not a zbus peer, or has other keys"
