"""Every option is proved by what the socket does: several read back right and do nothing when set too late."""

import contextlib
import resource
import socket as stdlib
import struct
import time
from pathlib import Path

import pytest
import zmq
from msgspec import structs

from waiting import scaled, wait_until, within
from zbus.transport import profile
from zbus.transport.multipart import PeerGone, Receiver, send
from zbus.transport.profile import PROFILES
from zbus.transport.security import ProcessKeys
from zbus.transport.sockets import SocketFactory, read_event

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """Return the READY command of a ZMTP peer of one socket type."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


class RawPeer:
    """A TCP client that speaks just enough ZMTP to misbehave."""

    def __init__(self, endpoint: str, *, handshake: bytes | None = None) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.tcp = stdlib.create_connection((host.strip("[]"), int(port)), timeout=scaled(10))
        if handshake is not None:
            self.tcp.sendall(GREETING)
            self.read(64)
            self.tcp.sendall(ready(handshake))
            head = self.read(2)
            self.read(head[1])

    def read(self, count: int) -> bytes:
        """Read exactly so many bytes."""
        got = b""
        while len(got) < count:
            more = self.tcp.recv(count - len(got))
            assert more, "cut"
            got += more
        return got

    def seconds_until_cut(self) -> float:
        """Ignore whatever comes until the connection ends."""
        began = time.monotonic()
        try:
            while self.tcp.recv(65_536):
                pass
        except ConnectionResetError:
            pass
        return time.monotonic() - began

    def close(self) -> None:
        """Hang up."""
        self.tcp.close()


def connect(factory, server, client) -> None:
    """Bind and connect over loopback tcp."""
    factory.connect(client, factory.bind(server, "tcp://127.0.0.1:0"))


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("purpose", ["main", "ctl", "data"])
def test_a_header_that_claims_a_terabyte_cuts_that_peer_only(factory, purpose):
    """MAXMSGSIZE holds on every ROUTER: no allocation, and the others go on."""
    router, dealer = factory.router(purpose), factory.dealer(purpose)
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    factory.connect(dealer, endpoint)
    wait_until(lambda: send(dealer, [b"before"]), what="the good peer")
    space = address_space()
    liar = RawPeer(endpoint, handshake=b"DEALER")
    liar.tcp.sendall(b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 100)
    assert liar.seconds_until_cut() < within(5)
    assert address_space() - space < 1 << 30
    assert send(dealer, [b"after"])
    receiver = Receiver(router)
    got = [wait_until(receiver.recv, what="a message")[1] for _ in range(2)]
    assert got == [b"before", b"after"]
    liar.close()
    dealer.close()
    router.close()


def test_a_frame_of_the_size_limit_passes_and_a_larger_one_cuts(factory, monkeypatch):
    """The limit is per frame and in force on a DEALER too, which then reconnects by itself."""
    monkeypatch.setitem(PROFILES, "ctl", structs.replace(PROFILES["ctl"], max_frame=1_000))
    router, dealer = factory.router("ctl"), factory.dealer("ctl")
    connect(factory, router, dealer)
    monitor = factory.monitor(router)
    wait_until(lambda: send(dealer, [bytes(1_000)]), what="the connection")
    receiver = Receiver(router)
    assert len(wait_until(receiver.recv, what="the frame at the limit")[1]) == 1_000
    assert send(dealer, [bytes(1_001)])
    wait_until(lambda: (event := read_event(monitor)) and event.lost, what="the cut")
    wait_until(lambda: send(dealer, [b"small"]) and receiver.recv(), what="a message after the reconnect")
    for socket in (monitor, dealer, router):
        socket.close()


def test_a_tcp_peer_that_says_nothing_is_cut(factory, monkeypatch):
    """HANDSHAKE_IVL: a silent connection does not hold a descriptor for ever."""
    network = tuple((o, 300 if o == zmq.HANDSHAKE_IVL else v) for o, v in profile._NETWORK)
    monkeypatch.setattr(profile, "_NETWORK", network)
    router = factory.router("main")
    silent = RawPeer(factory.bind(router, "tcp://127.0.0.1:0"))
    assert 0.1 < silent.seconds_until_cut() < within(5)
    silent.close()
    router.close()


def test_a_peer_that_stops_answering_pings_is_cut(factory, monkeypatch):
    """HEARTBEAT_IVL and HEARTBEAT_TIMEOUT: a host that vanished is noticed without any message."""
    quick = structs.replace(PROFILES["ctl"], heartbeat_every=100, heartbeat_timeout=300)
    monkeypatch.setitem(PROFILES, "ctl", quick)
    router = factory.router("ctl")
    deaf = RawPeer(factory.bind(router, "tcp://127.0.0.1:0"), handshake=b"DEALER")
    assert 0.2 < deaf.seconds_until_cut() < within(5)
    deaf.close()
    router.close()


def test_heartbeats_leave_room_for_a_busy_host():
    """No default cuts a peer that is silent for 5 s; bulk sockets bear a frame that takes a minute."""
    for purpose, options in PROFILES.items():
        assert options.heartbeat_timeout >= 10_000, purpose
    assert min(PROFILES[purpose].heartbeat_timeout for purpose in ("main", "data")) >= 60_000


def test_the_kernel_socket_has_keepalive_and_a_limit_for_unacknowledged_bytes(factory):
    """TCP_KEEPALIVE and TCP_MAXRT reach the kernel on both ends."""
    router, dealer = factory.router("main"), factory.dealer("main")
    ends = [
        (factory.monitor(router, zmq.EVENT_ACCEPTED), "accepted"),
        (factory.monitor(dealer, zmq.EVENT_CONNECTED), "connected"),
    ]
    connect(factory, router, dealer)
    for monitor, side in ends:
        event = wait_until(lambda monitor=monitor: read_event(monitor), what=side)
        copy = stdlib.fromfd(event.value, stdlib.AF_INET, stdlib.SOCK_STREAM)
        with copy:
            assert copy.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE) == 1, side
            assert copy.getsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE) == 5, side
            assert copy.getsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPINTVL) == 5, side
            assert copy.getsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT) == 3, side
            assert copy.getsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT) == 30_000, side
        monitor.close()
    dealer.close()
    router.close()


def test_high_water_is_above_any_window(factory):
    """A peer that reads nothing for a while is not noticed by a sender within its credit."""
    router, dealer = factory.router("main"), factory.dealer("main")
    connect(factory, router, dealer)
    wait_until(lambda: send(dealer, [b"0"]), what="the connection")
    assert all(send(dealer, [b"x"]) for _ in range(20_000))
    dealer.close()
    router.close()


def test_an_ipv6_address_can_be_bound_and_connected(factory):
    """IPV6 is on from the start."""
    if not stdlib.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        with stdlib.socket(stdlib.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no ::1")
    router, dealer = factory.router("main"), factory.dealer("main")
    endpoint = factory.bind(router, "tcp://[::1]:0")
    assert endpoint.startswith("tcp://[::1]:")
    factory.connect(dealer, endpoint)
    wait_until(lambda: send(dealer, [b"six"]), what="the connection")
    dealer.close()
    router.close()


def test_no_close_waits_for_a_peer_that_does_not_read(factory):
    """LINGER is 0 before anything is sent: megabytes queued for a silent peer do not delay the end."""
    with stdlib.create_server(("127.0.0.1", 0)) as silent:
        own = SocketFactory(max_sockets=16)
        dealer = own.dealer("data")
        router = own.router("data")
        own.connect(dealer, own.bind(router, "tcp://127.0.0.1:0"))
        wait_until(lambda: send(dealer, [b"x"]), what="the connection")
        for _ in range(20):
            send(dealer, [bytes(1 << 20)])
        own.connect(own_second := own.dealer("data"), f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        for socket in (dealer, router, own_second):
            socket.close()
        assert own.close()
        assert time.monotonic() - began < within(1)


def test_a_plain_send_or_receive_never_waits(factory):
    """SNDTIMEO and RCVTIMEO are 0, so a forgotten NOBLOCK is an error, not a hang."""
    dealer = factory.dealer("main")
    began = time.monotonic()
    with pytest.raises(zmq.Again):
        dealer.send(b"x")
    with pytest.raises(zmq.Again):
        dealer.recv()
    assert time.monotonic() - began < within(1)
    dealer.close()


def test_routing_ids_are_random_per_connection(factory):
    """Two peers never share an identity, and a reconnect is another one."""
    router = factory.router("main")
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    receiver = Receiver(router)
    ids = set()
    for _ in range(3):
        dealer = factory.dealer("main")
        factory.connect(dealer, endpoint)
        wait_until(lambda dealer=dealer: send(dealer, [b"x"]), what="the connection")
        ids.add(wait_until(receiver.recv, what="a message")[0])
        dealer.close()
    assert len(ids) == 3
    router.close()


def test_keys_let_the_right_peer_in_and_nobody_else():
    """With CURVE, a client without keys or with a wrong server key is never heard."""
    server, friend, stranger = (
        SocketFactory(max_sockets=16, curve=ProcessKeys.create()),
        SocketFactory(max_sockets=16, curve=ProcessKeys.create()),
        SocketFactory(max_sockets=16),
    )
    router = server.router("main")
    endpoint = server.bind(router, "tcp://127.0.0.1:0")
    good = friend.dealer("main", server_key=server.curve.public)
    wrong = friend.dealer("main", server_key=friend.curve.public)
    plain = stranger.dealer("main")
    for socket, owner in ((wrong, friend), (plain, stranger), (good, friend)):
        owner.connect(socket, endpoint)
    wait_until(lambda: send(good, [b"friend"]), what="the encrypted connection")
    receiver = Receiver(router)
    assert wait_until(receiver.recv, what="the message")[1] == b"friend"
    assert not send(wrong, [b"wrong key"])
    assert not send(plain, [b"no key"])
    assert receiver.recv() is None
    for socket in (good, wrong, plain, router):
        socket.close()
    assert all(owner.close() for owner in (server, friend, stranger))


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(100), b"SSH-2.0-OpenSSH_9.7\r\n", b"220 ready\r\n", bytes(100)],
    ids=["http", "ssh", "ftp", "zeros"],
)
def test_a_foreign_service_on_the_port_is_never_taken_for_a_peer(factory, greeting):
    """Row 33: libzmq would serve any service that greets first as an old ZMTP peer; here nothing is sent to it."""
    with stdlib.create_server(("127.0.0.1", 0)) as server:
        dealer = factory.dealer("main")
        monitor = factory.monitor(dealer)
        factory.connect(dealer, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        server.settimeout(scaled(10))
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting)
            event = wait_until(lambda: read_event(monitor), what="an event")
            assert event.lost or event.refused
            assert not send(dealer, [b"secret"])
            connection.settimeout(scaled(10))
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                while more := connection.recv(1_000):
                    heard += more
            assert b"secret" not in heard
        monitor.close()
        dealer.close()


def test_an_old_peer_without_a_handshake_is_not_heard(factory):
    """A ZMTP 1 client, which could skip every check of the handshake, is cut."""
    router = factory.router("main")
    old = RawPeer(factory.bind(router, "tcp://127.0.0.1:0"))
    old.tcp.sendall(b"\x01\x00" + b"\x06\x00hello")
    assert old.seconds_until_cut() < within(5)
    assert Receiver(router).recv() is None
    old.close()
    router.close()


def test_garbage_on_a_port_does_not_disturb_others(factory):
    """Random bytes and half greetings are dropped; a real peer is served meanwhile."""
    router, dealer = factory.router("main"), factory.dealer("main")
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    rubbish = [RawPeer(endpoint) for _ in range(4)]
    for peer, words in zip(rubbish, (b"GET / HTTP/1.0\r\n\r\n", bytes(200), GREETING[:30], b"\xff" * 100), strict=True):
        peer.tcp.sendall(words)
    factory.connect(dealer, endpoint)
    wait_until(lambda: send(dealer, [b"real"]), what="the connection")
    receiver = Receiver(router)
    assert wait_until(receiver.recv, what="the message")[1] == b"real"
    assert receiver.recv() is None
    for peer in rubbish:
        peer.close()
    dealer.close()
    router.close()


def test_a_peer_at_its_high_water_mark_blocks_nobody(factory, monkeypatch):
    """Z7: a full peer is False at once, also after it vanished; the others are served."""
    monkeypatch.setitem(PROFILES, "main", structs.replace(PROFILES["main"], high_water=10))
    router, full, other = factory.router("main"), factory.dealer("main"), factory.dealer("main")
    endpoint = factory.bind(router, "tcp://127.0.0.1:0")
    receiver = Receiver(router)
    routes = []
    for dealer in (full, other):
        factory.connect(dealer, endpoint)
        wait_until(lambda dealer=dealer: send(dealer, [b"x"]), what="the connection")
        routes.append(wait_until(receiver.recv, what="a message")[0])
    began = time.monotonic()
    sent = 0
    while send(router, [routes[0], bytes(1 << 20)]):
        sent += 1
        assert sent < 1_000
    assert send(router, [routes[1], b"still served"])
    assert wait_until(Receiver(other).recv, what="the other's message") == [b"still served"]
    full.close()

    def gone() -> bool:
        try:
            return not send(router, [routes[0], b"x"]) and False
        except PeerGone:
            return True

    wait_until(gone, what="the end of the full peer")
    assert time.monotonic() - began < within(10)
    other.close()
    router.close()
