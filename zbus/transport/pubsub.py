"""The hint channel: a hub in the controller, publishers and subscribers everywhere, and no silent gap.

Messages are ``[topic, body]``. A topic ends with ``$``, which no name contains, because subscriptions match prefixes
and ``actor`` would also hear ``actor2``. The body is a msgpack array ``[version, publisher, seq, payload]``: ``seq``
counts the messages of one publisher on one topic from 0, so a subscriber sees what it missed. A message with an empty
payload is a beat: it repeats how many messages there were, which shows the loss of the last one too.

Hints are never truth: whoever misses one reads the registry.
"""

from __future__ import annotations

import enum
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import zmq

from zbus.transport.multipart import Receiver, Socket, send
from zbus.transport.sockets import SocketFactory

__all__ = [
    "END_MARK",
    "Delivery",
    "GapTracker",
    "Hub",
    "HubStatistics",
    "Message",
    "Publisher",
    "Subscriber",
    "choose_endpoints",
    "topic_bytes",
    "wait_readable",
]

END_MARK: Final = "$"
"""Last character of every topic; no name component contains it."""

_VERSION: Final = 1
_MAX_STREAMS: Final = 65_536
_STATISTICS: Final = b"STATISTICS"
_TERMINATE: Final = b"TERMINATE"


class _Body(msgspec.Struct, array_like=True, frozen=True):
    version: int
    publisher: int
    seq: int
    payload: bytes = b""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Body).decode


def topic_bytes(topic: str) -> bytes:
    """Return the wire form of a topic: its text and the end mark.

    Raises:
        ValueError: The text holds the end mark.
    """
    if END_MARK in topic:
        msg = f"topic {topic!r} contains {END_MARK!r}"
        raise ValueError(msg)
    return f"{topic}{END_MARK}".encode()


def choose_endpoints(endpoints: Sequence[str]) -> list[str]:
    """Return those of a hub's endpoints to connect to: an ipc one whose socket exists here, else all tcp ones.

    Two connections to one hub would deliver everything twice; a subscriber drops the second copy by its seq.
    """
    for endpoint in endpoints:
        if endpoint.startswith("ipc://") and os.path.exists(endpoint.removeprefix("ipc://")):  # noqa: PTH110  # text path
            return [endpoint]
    return [endpoint for endpoint in endpoints if not endpoint.startswith("ipc://")] or list(endpoints)


def wait_readable(sources: Sequence[Socket | int | None], timeout_s: float) -> None:
    """Wait until a socket or descriptor is readable, or for ``timeout_s`` seconds. None entries are skipped."""
    poller = zmq.Poller()
    for source in sources:
        if source is not None:
            poller.register(source, zmq.POLLIN)
    poller.poll(max(0, math.ceil(timeout_s * 1000)))


# -- the hub ---------------------------------------------------------------------------------------------------------


class HubStatistics(NamedTuple):
    """Frames (two a message) and bytes that went through a hub since its start."""

    from_publishers: int
    bytes_from_publishers: int
    to_subscribers: int
    bytes_to_subscribers: int


class Hub:
    """Forwards every publisher's messages to every subscriber, in libzmq's own loop on a daemon thread (no GIL).

    Binds at once; ``start`` begins forwarding. A subscriber that does not read loses messages after 10,000 and delays
    nobody. Methods may be called from any thread.

    Args:
        factory: Makes the sockets.
        pub: Endpoints to bind for publishers.
        sub: Endpoints to bind for subscribers.

    Attributes:
        pub_endpoints, sub_endpoints: What was really bound; they go into the epoch record.

    Raises:
        ConfigError, TransportError: An endpoint cannot be bound; no socket is left.
    """

    def __init__(self, factory: SocketFactory, *, pub: Sequence[str], sub: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._front = factory.xsub()
        self._back = factory.xpub()
        self._control, self._far = factory.pair()
        self._thread: threading.Thread | None = None
        self._done = False
        try:
            self.pub_endpoints = [factory.bind(self._front, endpoint) for endpoint in pub]
            self.sub_endpoints = [factory.bind(self._back, endpoint) for endpoint in sub]
        except BaseException:
            self._close_sockets()
            raise

    def start(self) -> None:
        """Begin forwarding. Once."""
        if self._thread is not None:
            msg = "the hub is already started"
            raise RuntimeError(msg)
        self._thread = threading.Thread(target=self._run, name="zbus-hub", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether messages are being forwarded."""
        return self._thread is not None and self._thread.is_alive()

    def statistics(self, timeout_s: float = 1.0) -> HubStatistics | None:
        """Ask the loop for its counters; None when it does not answer within ``timeout_s`` seconds."""
        with self._lock:
            if not self.running or self._done or not send(self._control, [_STATISTICS]):
                return None
            if not self._control.poll(int(timeout_s * 1000)):
                return None
            frames = Receiver(self._control).recv()
        if frames is None or len(frames) != 8:
            return None
        counts = [struct.unpack("=Q", frame)[0] for frame in frames]
        return HubStatistics(counts[0], counts[1], counts[6], counts[7])

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Stop forwarding and close the sockets within ``timeout_s`` seconds; return whether that worked.

        Hints under way may be lost. Safe to repeat.
        """
        with self._lock:
            if self._done:
                return True
            if self._thread is not None and self._thread.is_alive():
                send(self._control, [_TERMINATE])
                self._thread.join(timeout_s)
                if self._thread.is_alive():
                    return False
            self._done = True
            self._close_sockets()
        return True

    def _run(self) -> None:
        try:
            zmq.proxy_steerable(self._front, self._back, None, self._far)
        except zmq.ZMQError:  # the context ended first
            return

    def _close_sockets(self) -> None:
        for socket in (self._front, self._back, self._control, self._far):
            socket.close()


# -- publishing ------------------------------------------------------------------------------------------------------


class Publisher:
    """Publishes with a sequence number per topic. Never waits and never fails for want of a listener.

    The socket is an XPUB, because that one is told when a hub begins to listen. Thread: one.

    Args:
        factory: Makes the socket.
        publisher: Number that names this process's stream: its incarnation, or any random uint64.
    """

    def __init__(self, factory: SocketFactory, publisher: int) -> None:
        self._factory = factory
        self._publisher = publisher
        self._next: dict[str, int] = {}
        self._listening: set[bytes] = set()
        self.endpoints: list[str] = []
        self.socket: Socket | None = None
        self._receiver: Receiver | None = None

    def connect(self, endpoints: Sequence[str]) -> None:
        """Leave the hub so far, if any, and connect to another. Sequence numbers go on."""
        self.close()
        socket = self._factory.xpub(connects=True)
        for endpoint in choose_endpoints(endpoints):
            self._factory.connect(socket, endpoint)
        self.socket = socket
        self._receiver = Receiver(socket)
        self.endpoints = list(endpoints)

    @property
    def listened(self) -> bool:
        """Whether a hub with subscribers is connected, as of the last ``heard``."""
        return bool(self._listening)

    def publish(self, topic: str, payload: bytes) -> int:
        """Publish one message and return its seq. It counts even if nobody hears it, so that the next shows the gap.

        Raises:
            ValueError: Empty payload, or a topic with the end mark.
        """
        if not payload:
            msg = "an empty payload is a beat"
            raise ValueError(msg)
        seq = self._next.get(topic, 0)
        self._next[topic] = seq + 1
        self._send(topic, seq, payload)
        return seq

    def beat(self) -> None:
        """Repeat on every topic used how many messages there were."""
        for topic, count in self._next.items():
            self._send(topic, count, b"")

    def heard(self) -> bool:
        """Take in what hubs subscribe to; return whether any new subscription arrived. Call when readable."""
        receiver = self._receiver
        fresh = False
        while receiver is not None and (frames := receiver.recv()) is not None:
            word = bytes(frames[0])
            if word[:1] == b"\x01":
                self._listening.add(word[1:])
                fresh = True
            elif word[:1] == b"\x00":
                self._listening.discard(word[1:])
        return fresh

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; messages already published get up to ``linger_ms`` in the background."""
        if self.socket is not None:
            self.socket.close(linger_ms)
            self.socket = self._receiver = None
        self._listening.clear()
        self.endpoints = []

    def _send(self, topic: str, seq: int, payload: bytes) -> None:
        if self.socket is not None:
            send(self.socket, [topic_bytes(topic), _encode(_Body(_VERSION, self._publisher, seq, payload))])


# -- subscribing -----------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """One message off the channel. ``payload`` is empty for a beat."""

    topic: str
    publisher: int
    seq: int
    payload: bytes


class Delivery(enum.Enum):
    """What the sequence number of a message says."""

    NEXT = "next"
    """Nothing was missed."""
    GAP = "gap"
    """Something was missed before it."""
    OLD = "old"
    """It, or a later one, was seen before: a second copy."""


class GapTracker:
    """Follows sequence numbers per (publisher, topic). Pure; not thread-safe.

    A first message with a number above 0 is a gap: the subscriber came late. Memory is bounded; a forgotten stream
    looks like a late one, which costs one registry read.
    """

    def __init__(self, limit: int = _MAX_STREAMS) -> None:
        self._limit = limit
        self._next: OrderedDict[tuple[int, str], int] = OrderedDict()

    def take(self, message: Message) -> Delivery:
        """Judge one message and remember it."""
        key = (message.publisher, message.topic)
        expected = self._next.get(key, 0)
        after = message.seq + 1 if message.payload else message.seq
        self._next[key] = max(after, expected)
        self._next.move_to_end(key)
        if len(self._next) > self._limit:
            self._next.popitem(last=False)
        if message.seq > expected:
            return Delivery.GAP
        return Delivery.OLD if message.seq < expected else Delivery.NEXT

    def reset(self) -> None:
        """Forget everything: another hub, another audience."""
        self._next.clear()


class Subscriber:
    """Receives from a hub. Thread: one.

    Attributes:
        junk: Messages that are not of this channel's form; each was counted and skipped.
    """

    def __init__(self, factory: SocketFactory) -> None:
        self._factory = factory
        self.socket: Socket | None = None
        self._receiver: Receiver | None = None
        self.endpoints: list[str] = []
        self.junk = 0

    def connect(self, endpoints: Sequence[str], subscriptions: Sequence[bytes]) -> None:
        """Leave the hub so far, if any, and connect to another.

        Args:
            endpoints: The hub's subscriber side.
            subscriptions: Topic prefixes on the wire, in this order: a probe's own topic last, since hearing it then
                proves all the others.
        """
        self.close()
        socket = self._factory.sub()
        for endpoint in choose_endpoints(endpoints):
            self._factory.connect(socket, endpoint)
        for prefix in subscriptions:
            socket.setsockopt(zmq.SUBSCRIBE, prefix)
        self.socket = socket
        self._receiver = Receiver(socket)
        self.endpoints = list(endpoints)

    def recv(self) -> Message | None:
        """Return the next well-formed message, or None when there is none; never waits, skips junk."""
        while self._receiver is not None:
            frames = self._receiver.recv()
            if frames is None:
                return None
            message = _parse(frames)
            if message is not None:
                return message
            self.junk += 1
        return None

    def close(self) -> None:
        """Close the socket."""
        if self.socket is not None:
            self.socket.close()
            self.socket = self._receiver = None
        self.endpoints = []


def _parse(frames: Sequence[bytes | bytearray | memoryview]) -> Message | None:
    if len(frames) != 2:
        return None
    try:
        topic = bytes(frames[0]).decode("ascii")
        body = _decode(frames[1])
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return None
    if not topic.endswith(END_MARK) or body.version != _VERSION or body.seq < 0 or not 0 <= body.publisher < 1 << 64:
        return None
    return Message(topic[:-1], body.publisher, body.seq, body.payload)
