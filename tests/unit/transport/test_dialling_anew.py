"""Where libzmq gives a connection up without a word, the client dials anew: foreign services, cuts, mangled frames."""

from __future__ import annotations

import logging

import pytest

from link_kit import NAME, call, echo_worker, foreign_service, free_port
from waiting import scaled, wait_until
from zbus.codec import encode
from zbus.errors import TransportError, Unavailable
from zbus.ids import new_session
from zbus.protocol.messages import Outcome
from zbus.testing.proxy import FaultProxy
from zbus.transport.client import Client, PeerState
from zbus.transport.sockets import SocketFactory

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


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
    with echo_worker(factory, f"tcp://127.0.0.1:{port}"):
        peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
    client.wait(lambda: peer.state is PeerState.SUSPECT, scaled(10))
    with caplog.at_level(logging.WARNING, "zbus.client"), foreign_service(port, serve) as accepted:
        client.wait(lambda: len(accepted) >= 3, scaled(10))
        assert len(accepted) >= 3, "nobody dialled again"
        assert peer.state is PeerState.SUSPECT
    assert client.statistics()[f"refused_{reason}"] >= 2
    if kind != "cut":  # libzmq itself tries again after one
        assert client.statistics()["redials"] >= 2
        assert f"actor/0 is not reached: tcp://127.0.0.1:{port} is not a zbus peer" in caplog.text
        assert caplog.text.count("not reached") == 1
    with echo_worker(factory, f"tcp://127.0.0.1:{port}"):
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(20)), peer.evidence
        assert call(client, peer, "hello") == "hello"


def test_dialling_anew_gets_slower_and_leaks_nothing(factory, client):
    """A foreign service that stays is asked less and less often, each time by a socket of its own."""
    port = free_port()
    with foreign_service(port, SERVICES["ssh"][0]) as accepted:
        peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
        client.wait(lambda: len(accepted) >= 2, scaled(10))
        sockets = dict(factory.open_sockets)
        client.wait(lambda: len(accepted) >= 4, scaled(10))
        assert factory.open_sockets == sockets
        assert peer.links["main"].machine.redials >= 3


def test_without_a_socket_dialling_waits_and_the_client_lives(caplog):
    """A process at its limit of sockets says so, serves its other peers, and dials again when it can."""
    factory = SocketFactory(max_sockets=16)
    client = Client(session=new_session(), epoch=1, factory=factory)
    port = free_port()
    try:
        with foreign_service(port, SERVICES["ssh"][0]) as accepted, caplog.at_level(logging.WARNING, "zbus.client"):
            peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
            hogs = []
            with pytest.raises(TransportError, match="all 16 sockets"):
                hogs.extend(factory.dealer("ctl") for _ in range(16))
            with pytest.raises(TransportError, match="all 16 sockets"):
                client.connect(NAME, 2, {"main": [f"tcp://127.0.0.1:{port}"]})
            client.wait(lambda: "redials_failed" in client.statistics(), scaled(10))
            assert "cannot be dialled again yet: cannot make a" in caplog.text
            dialled = len(accepted)
            for hog in hogs:
                hog.close(0)
            client.wait(lambda: len(accepted) > dialled, scaled(20))
            assert len(accepted) > dialled, "nobody dialled again"
            client.disconnect(peer)
        assert not sum(factory.open_sockets.values())
    finally:
        client.close()
    assert factory.close()


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_mangled_frame_costs_a_connection_and_no_call(factory, client, direction):
    """Bytes that are no message, in either direction: the call is answered once, on the next connection."""
    with echo_worker(factory, "tcp://127.0.0.1:0") as (_, endpoint), FaultProxy() as proxy:
        peer = client.connect(NAME, 1, {"main": [proxy.front(endpoint, worker="actor/0")]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        rule = proxy.mangle(direction)
        assert call(client, peer, "hello") == "hello"
        assert rule.hits == 1
        assert client.statistics().get("redials", 0) == (direction == "reply")
        client.disconnect(peer)
    wait_until(lambda: factory.open_sockets.get("main", 0) == 0, what="all sockets to be closed")


def test_a_peer_declared_dead_is_not_dialled_and_not_asked(factory, client):
    """It comes back to its address: it gets no HELLO, and its state stays what it is."""
    port = free_port()
    peer = client.connect(NAME, 1, {"main": [f"tcp://127.0.0.1:{port}"]})
    with foreign_service(port, SERVICES["ssh"][0]) as accepted:
        client.wait(lambda: bool(accepted), scaled(10))
        client.declare_dead(peer, reason="lease", evidence="silent")
        redials = client.statistics().get("redials", 0)
    with echo_worker(factory, f"tcp://127.0.0.1:{port}"):
        client.wait(lambda: False, 0.5)
        assert peer.state is PeerState.DEAD
        assert client.statistics().get("redials", 0) == redials


def test_a_peer_lost_for_its_silence_is_ready_again_when_it_answers(factory, client):
    """P9: its calls are settled and it refuses new ones; back again, it serves, and what was given up does not run."""
    ran = []
    with FaultProxy() as proxy, echo_worker(factory, "tcp://127.0.0.1:0", ran=ran) as (_, endpoint):
        peer = client.connect(NAME, 1, {"main": [proxy.front(endpoint, worker="actor/0")]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        assert not client.lose(peer, reason="lease", evidence="silent"), "it answers"
        assert call(client, peer, "hello") == "hello"
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
        assert call(client, peer, "hello") == "hello"
        assert len(ran) == 2
        client.disconnect(peer)
