"""Where libzmq gives a connection up without a word, the client dials anew: foreign services, cuts, mangled frames."""

from __future__ import annotations

import contextlib
import logging
import socket as stdlib
import threading
from collections.abc import Callable, Iterator

import pytest

from waiting import scaled, wait_until
from zbus.codec import decode, encode
from zbus.errors import Unavailable
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Execute, Kind, Outcome, OutcomeKind, Status
from zbus.testing.proxy import FaultProxy
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

NAME = WorkerName("actor", 0)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def factory() -> Iterator[SocketFactory]:
    """Give a factory, and check that all its sockets were closed."""
    factory = SocketFactory(max_sockets=64)
    yield factory
    assert factory.close(), factory.open_sockets


@pytest.fixture
def client(factory: SocketFactory) -> Iterator[Client]:
    """Give a client."""
    client = Client(session=new_session(), epoch=1, factory=factory)
    yield client
    client.close()


@contextlib.contextmanager
def worker(factory: SocketFactory, endpoint: str, ran: list[int] | None = None) -> Iterator[str]:
    """Serve an echo at an endpoint; ``ran`` grows with each call."""

    def run(request: Execute) -> None:
        if ran is not None:
            ran.append(request.seq)
        server.finish(request, 0, Kind.RESULT, Status.OK, [bytes(buffer) for buffer in request.buffers])

    server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1, "ctl": 1}, dispatch=run)
    bound = server.bind("main", endpoint)
    server.start()
    thread = threading.Thread(target=server.run, args=(run,))
    thread.start()
    try:
        yield bound
    finally:
        server.stop()
        thread.join(scaled(10))
        server.close()


@contextlib.contextmanager
def service(port: int, serve: Callable[[stdlib.socket], None]) -> Iterator[list[int]]:
    """Accept connections at a port and do something with each; gives a list that grows with them."""
    accepted: list[int] = []
    stop = threading.Event()
    with stdlib.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.02)

        def loop() -> None:
            with contextlib.ExitStack() as held:
                while not stop.is_set():
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        continue
                    accepted.append(1)
                    held.enter_context(connection)
                    with contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield accepted
        finally:
            stop.set()
            thread.join()


def free_port() -> int:
    """Return a port that is free now; the test binds it again and again."""
    with stdlib.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answered(client: Client, peer: Peer) -> bool:
    """Tell whether a call is answered."""
    outcomes: list[Outcome] = []
    frames = encode("hello")
    client.place([peer], "main", [frames], 1, deadline_s=scaled(10), sink=lambda *told: outcomes.append(told[2]))
    client.wait(lambda: bool(outcomes), scaled(10))
    return outcomes[0].kind is OutcomeKind.OK and decode(outcomes[0].payload or ()) == "hello"


SERVICES = {
    "http": (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(100)), "handshake_garbage"),
    "ssh": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.7\r\n"), "handshake_garbage"),
    "mangled": (lambda c: c.sendall(GREETING + b"\x04\x05\x05WRONG"), "handshake_protocol"),
    "cut": (lambda c: (c.sendall(GREETING[:30]), c.close()), "handshake_cut"),
    "keys": (lambda c: c.sendall(GREETING.replace(b"NULL", b"CURVE")), "handshake_protocol"),
}


@pytest.mark.parametrize("kind", SERVICES)
def test_a_worker_comes_back_to_an_address_that_another_service_had(factory, client, caplog, kind):
    """Row 33: whatever answers meanwhile is refused and counted; the worker is READY when it is there again."""
    serve, reason = SERVICES[kind]
    port = free_port()
    with worker(factory, f"tcp://127.0.0.1:{port}"):
        peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
    client.wait(lambda: peer.state is PeerState.SUSPECT, scaled(10))
    with caplog.at_level(logging.WARNING, "zbus.client"), service(port, serve) as accepted:
        client.wait(lambda: len(accepted) >= 3, scaled(10))
        assert len(accepted) >= 3, "nobody dialled again"
        assert peer.state is PeerState.SUSPECT
    assert client.statistics()[f"refused_{reason}"] >= 2
    if kind != "cut":  # libzmq itself tries again after one
        assert client.statistics()["redials"] >= 2
        assert f"actor/0 is not reached: tcp://127.0.0.1:{port} is not a zbus peer" in caplog.text
        assert caplog.text.count("not reached") == 1
    with worker(factory, f"tcp://127.0.0.1:{port}"):
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(20)), peer.evidence
        assert answered(client, peer)


def test_dialling_anew_gets_slower_and_leaks_nothing(factory, client):
    """A foreign service that stays is asked less and less often, each time by a socket of its own."""
    port = free_port()
    with service(port, SERVICES["ssh"][0]) as accepted:
        peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
        client.wait(lambda: len(accepted) >= 2, scaled(10))
        sockets = dict(factory.open_sockets)
        client.wait(lambda: len(accepted) >= 4, scaled(10))
        assert factory.open_sockets == sockets
        assert peer.links["main"].machine.redials >= 3


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_mangled_frame_costs_a_connection_and_no_call(factory, client, direction):
    """Bytes that are no message, in either direction: the call is answered once, on the next connection."""
    with worker(factory, "tcp://127.0.0.1:0") as endpoint, FaultProxy() as proxy:
        peer = client.connect(NAME, 1, {"main": [proxy.front(endpoint, worker="actor/0")]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        rule = proxy.mangle(direction)
        assert answered(client, peer)
        assert rule.hits == 1
        assert client.statistics().get("redials", 0) == (direction == "reply")
        client.disconnect(peer)
    wait_until(lambda: factory.open_sockets.get("main", 0) == 0, what="all sockets to be closed")


def test_a_peer_declared_dead_is_not_dialled_and_not_asked(factory, client):
    """It comes back to its address: it gets no HELLO, and its state stays what it is."""
    port = free_port()
    peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
    with service(port, SERVICES["ssh"][0]) as accepted:
        client.wait(lambda: bool(accepted), scaled(10))
        client.declare_dead(peer, reason="lease", evidence="silent")
        redials = client.statistics().get("redials", 0)
    with worker(factory, f"tcp://127.0.0.1:{port}"):
        client.wait(lambda: False, 0.5)
        assert peer.state is PeerState.DEAD
        assert client.statistics().get("redials", 0) == redials


def test_a_peer_lost_for_its_silence_is_ready_again_when_it_answers(factory, client):
    """P9: its calls are settled and it refuses new ones; back again, it serves, and what was given up does not run."""
    ran = []
    with FaultProxy() as proxy, worker(factory, "tcp://127.0.0.1:0", ran=ran) as endpoint:
        peer = client.connect(NAME, 1, {"main": [proxy.front(endpoint, worker="actor/0")]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        assert not client.lose(peer, reason="lease", evidence="silent"), "it answers"
        assert answered(client, peer)
        proxy.freeze(direction="request")
        told: list[Outcome] = []
        for _ in range(3):
            client.place([peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *one: told.append(one[2]))
        proxy.refuse()
        assert client.wait(lambda: peer.state is PeerState.SUSPECT, scaled(10))
        assert client.lose(peer, reason="lease", evidence="silent for 5 s")
        assert [(one.kind.value, one.reason) for one in told] == [("UNKNOWN", "lease")] * 3
        assert (peer.state, peer.reason, peer.evidence) == (PeerState.DEAD, "lease", "silent for 5 s")
        with pytest.raises(Unavailable, match="actor/0 is dead"):
            client.place([peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *_: None)
        proxy.heal()
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        assert (peer.reason, peer.evidence) == ("", "")
        assert answered(client, peer)
        assert len(ran) == 2
        client.disconnect(peer)
