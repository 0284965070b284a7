"""The one place that makes sockets: every option is set before the socket is bound or connected.

Options set later mostly do nothing although they read back right, so nobody outside this package makes a socket or sets
an option.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import struct
import threading
import weakref
from pathlib import Path
from typing import Any, Final, NamedTuple

import zmq

from zbus.errors import TransportError
from zbus.transport import endpoints
from zbus.transport.multipart import COPY_LIMIT, Receiver, Socket
from zbus.transport.profile import PROFILES, WAITS_NEVER, Profile, Purpose, check_libzmq, sockets_needed
from zbus.transport.security import CurveKeys

__all__ = ["DEFAULT_PEERS", "MONITORED", "MonitorEvent", "SocketFactory", "end_monitor", "read_event"]

DEFAULT_PEERS: Final = 256
"""Peers a factory is sized for when nobody says."""

MONITORED: Final = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
"""Events a monitor reports by default: whether there is a peer at the other end, and why not."""

_MAPPED: Final = re.compile(r"\[::ffff:([0-9.]+)\]")
_ZAP_DOMAIN: Final = b"zbus"
_TERM_LIMIT_S: Final = 1.0
_monitor_numbers: Final = itertools.count()
_kept: Final[list[zmq.Context[Socket]]] = []  # contexts that could not end; collecting one would block


class MonitorEvent(NamedTuple):
    """One event of a monitored socket.

    Attributes:
        event: A ``zmq.Event`` number.
        value: Its value: a descriptor, an errno or a protocol error, by event.
        endpoint: Which endpoint it is about.
    """

    event: int
    value: int
    endpoint: str

    @property
    def connected(self) -> bool:
        """Whether messages can flow from now on."""
        return self.event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    @property
    def lost(self) -> bool:
        """Whether a connection ended, established or still in its handshake."""
        return self.event == zmq.EVENT_DISCONNECTED

    @property
    def retried(self) -> bool:
        """Whether libzmq tries again by itself; after a lost connection that it does not, nobody does."""
        return self.event == zmq.EVENT_CONNECT_RETRIED

    @property
    def refused(self) -> bool:
        """Whether the other end is not ours: it speaks otherwise, has other keys, or closed in the handshake."""
        return self.event in _REFUSALS

    def __str__(self) -> str:
        return f"{str(zmq.Event(self.event).name).lower()} {self.endpoint}"


_REFUSALS: Final = frozenset(
    (
        int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
        int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
        int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
    )
)


class SocketFactory:
    """Makes sockets with the whole profile of their purpose.

    One per process that talks. Methods may be called from any thread; each socket belongs to the thread (or the lock)
    that uses it and is closed there with ``socket.close()``.

    Args:
        max_sockets: Most sockets open at once; ``check_limits(peers).max_sockets`` for a process with many peers.
        io_threads: libzmq's threads.
        curve: Key pair of this process; None: no encryption, so only ipc and loopback may be bound.

    Raises:
        ConfigError: libzmq is too old or lacks ipc or CURVE.
    """

    def __init__(self, *, max_sockets: int | None = None, io_threads: int = 1, curve: CurveKeys | None = None) -> None:
        check_libzmq()
        self.max_sockets = sockets_needed(DEFAULT_PEERS) if max_sockets is None else max_sockets
        self.curve = curve
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._context: zmq.Context[Socket] = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, self.max_sockets)
        self._sockets: weakref.WeakKeyDictionary[Socket, str] = weakref.WeakKeyDictionary()
        self._files: list[Path] = []

    # -- sockets

    def router(self, purpose: Purpose) -> Socket:
        """Return an unbound ROUTER: an unknown routing id raises ``PeerGone`` instead of vanishing."""
        socket = self._new(zmq.ROUTER, purpose, PROFILES[purpose])
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._serve(socket)
        return socket

    def dealer(self, purpose: Purpose, *, server_key: bytes | None = None) -> Socket:
        """Return an unconnected DEALER that queues nothing for a peer that is not there.

        Args:
            purpose: What it carries.
            server_key: Public key of the peer, needed where this factory has keys and the peer does too.
        """
        socket = self._new(zmq.DEALER, purpose, PROFILES[purpose])
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self._ask(socket, server_key)
        return socket

    def xpub(self, *, connects: bool = False, server_key: bytes | None = None) -> Socket:
        """Return an XPUB: to bind (the hub's subscriber side), or with ``connects`` a publisher told of subscriptions.

        Either way a subscriber that does not read loses messages and delays nobody.
        """
        socket = self._new(zmq.XPUB, "discovery", PROFILES["discovery"])
        if connects:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # else a lost hub is not reported as the end of its subscriptions
            self._ask(socket, server_key)
        else:
            self._serve(socket)
        return socket

    def xsub(self) -> Socket:
        """Return an unbound XSUB for the hub's publisher side."""
        socket = self._new(zmq.XSUB, "discovery", PROFILES["discovery"])
        self._serve(socket)
        return socket

    def pub(self, *, server_key: bytes | None = None) -> Socket:
        """Return an unconnected PUB; a subscriber that does not read loses messages, the publisher never waits."""
        socket = self._new(zmq.PUB, "discovery", PROFILES["discovery"])
        self._ask(socket, server_key)
        return socket

    def sub(self, *, server_key: bytes | None = None) -> Socket:
        """Return an unconnected SUB without subscriptions."""
        socket = self._new(zmq.SUB, "discovery", PROFILES["discovery"])
        self._ask(socket, server_key)
        return socket

    def pair(self) -> tuple[Socket, Socket]:
        """Return two connected PAIR sockets, to wake or steer another thread of this process."""
        address = f"inproc://zbus-pair-{next(_monitor_numbers)}"
        near = self._new(zmq.PAIR, "pair", None)
        far = self._new(zmq.PAIR, "pair", None)
        near.bind(address)
        far.connect(address)
        return near, far

    def monitor(self, socket: Socket, events: int = MONITORED) -> Socket:
        """Return a PAIR that receives ``socket``'s connection events; read it with ``read_event``.

        Call before ``socket`` binds or connects. Close the monitor before or after ``socket``, in the same thread.

        Raises:
            TransportError: There is no socket or descriptor left for it; ``socket`` is as it was.
        """
        address, purpose = f"inproc://zbus-monitor-{next(_monitor_numbers)}", "monitor"
        try:
            socket.monitor(address, events)
        except zmq.ZMQError as error:
            raise self._no_socket(purpose, error) from error
        try:
            watcher = self._new(zmq.PAIR, purpose, None)
            watcher.connect(address)
        except BaseException:
            end_monitor(socket)
            raise
        return watcher

    def monitored_dealer(self, purpose: Purpose) -> tuple[Socket, Socket]:
        """Return an unconnected DEALER and its monitor: both, or neither.

        Raises:
            TransportError: There is no socket or descriptor left for them.
        """
        dealer = self.dealer(purpose)
        try:
            return dealer, self.monitor(dealer)
        except BaseException:
            dealer.close(0)
            raise

    # -- endpoints

    def bind(self, socket: Socket, endpoint: str) -> str:
        """Bind and return the endpoint really bound (port 0 becomes a number).

        Raises:
            ConfigError: A socket path that is too long, or an address that is not loopback while there are no keys.
            TransportError: The address is taken or does not exist here.
        """
        endpoints.check(endpoint, has_keys=self.curve is not None)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _bind_failure(endpoint, error) from error
        if endpoint.startswith("ipc://"):
            self._files.append(Path(endpoint.removeprefix("ipc://")))
        # A dual-stack socket reports IPv4 addresses in IPv6 clothes, which a peer without IPv6 could not use.
        return _MAPPED.sub(r"\1", socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, socket: Socket, endpoint: str) -> None:
        """Connect; returns at once, whether or not anybody is there.

        Raises:
            ConfigError: A socket path that is too long.
            TransportError: The endpoint is malformed.
        """
        endpoints.check_length(endpoint)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            msg = f"cannot connect to {endpoint!r}: {error}"
            raise TransportError(msg) from error

    # -- the end

    @property
    def open_sockets(self) -> dict[str, int]:
        """Number of open sockets by purpose."""
        counts: dict[str, int] = {}
        with self._lock:
            for socket, purpose in self._sockets.items():
                if not socket.closed:
                    counts[purpose] = counts.get(purpose, 0) + 1
        return counts

    def close(self) -> bool:
        """End the context; bounded, never waits for a peer or for another thread's socket. Safe to repeat.

        Socket files bound here are removed. Sockets still open elsewhere fail with ``TransportError`` from now on.

        Returns:
            True when everything was freed; False when sockets were still open (see ``open_sockets``).
        """
        with self._lock:
            if self._closed:
                return self._context.closed
            self._closed = True
        if os.getpid() != self._pid:
            _kept.append(self._context)
            return False
        for file in self._files:  # libzmq leaves them
            file.unlink(missing_ok=True)
        busy = bool(self.open_sockets)
        # Ending a context wakes every call on its sockets with an error and waits until their threads close them, so
        # it is left to a thread of its own.
        ender = threading.Thread(target=self._context.term, name="zbus-context-end", daemon=True)
        ender.start()
        ender.join(0 if busy else _TERM_LIMIT_S)
        if ender.is_alive():
            _kept.append(self._context)
            return False
        return True

    # -- inside

    def _new(self, kind: int, purpose: str, profile: Profile | None) -> Socket:
        if os.getpid() != self._pid:
            msg = "this process was forked from one that had sockets; make a SocketFactory of its own"
            raise TransportError(msg)
        if self._closed:
            msg = f"cannot make a {purpose} socket: the socket factory is closed"
            raise TransportError(msg)
        try:
            socket: Socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise self._no_socket(purpose, error) from error
        for option, value in WAITS_NEVER if profile is None else profile.common():
            socket.setsockopt(option, value)
        if profile is not None:
            # With a domain libzmq refuses peers of ZMTP 1 and 2. Otherwise any service that greets first (ssh, ftp,
            # http) counts as a ZMTP 1 peer without a handshake, and messages are sent to it.
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.copy_threshold = COPY_LIMIT
        with self._lock:
            self._sockets[socket] = purpose
        return socket

    def _no_socket(self, purpose: str, error: zmq.ZMQError) -> TransportError:
        if error.errno != errno.EMFILE:
            return TransportError(f"cannot make a {purpose} socket: {error}")
        count = sum(self.open_sockets.values())
        if _descriptor_left():  # a count would miss what libzmq has of its own: one per monitor, those being closed
            return TransportError(
                f"cannot make a {purpose} socket: all {self.max_sockets} sockets of this process are in use",
                hint="size the factory for its peers: SocketFactory(max_sockets=check_limits(peers).max_sockets)",
            )
        return TransportError(
            f"cannot make a {purpose} socket: no file descriptor left ({count} sockets open)",
            hint="raise the descriptor limit (`ulimit -n`)",
        )

    def _serve(self, socket: Socket) -> None:
        if self.curve is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.curve.secret)

    def _ask(self, socket: Socket, server_key: bytes | None) -> None:
        if self.curve is not None and server_key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.curve.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.curve.secret)


def end_monitor(socket: Socket) -> None:
    """Have a socket report to its monitor no more. Never raises: the socket is closed next."""
    with contextlib.suppress(zmq.ZMQError):  # its context has ended, and the monitor with it
        socket.disable_monitor()


def read_event(monitor: Socket) -> MonitorEvent | None:
    """Return the next event of a monitor, or None when there is none; never waits.

    Raises:
        TransportError: The monitor is closed.
    """
    frames = Receiver(monitor).recv()
    if frames is None:
        return None
    event, value = struct.unpack("=hi", frames[0])
    return MonitorEvent(event, value, _MAPPED.sub(r"\1", bytes(frames[1]).decode("utf-8", "replace")))


def _descriptor_left() -> bool:
    try:
        os.close(os.eventfd(0))
    except OSError:
        return False
    return True


def _bind_failure(endpoint: str, error: zmq.ZMQError) -> TransportError:
    causes: dict[Any, tuple[str, str | None]] = {
        errno.EADDRINUSE: ("the address is in use", "bind port 0 and publish the bound endpoint"),
        errno.EADDRNOTAVAIL: ("this host has no such address", None),
        errno.ENODEV: ("this host has no such interface", None),
        errno.ENOENT: ("the directory of the socket does not exist", None),
        errno.EACCES: ("no permission", None),
    }
    cause, hint = causes.get(error.errno, (str(error), None))
    return TransportError(f"cannot bind {endpoint!r}: {cause}", hint=hint)
