"""A callee whose place may be somebody else's by now starts nothing until it hears that it is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from waiting import scaled, wait_until, within
from zbus.codec import encode
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Execute, Kind, Outcome, OutcomeKind, Status
from zbus.runtime.leaseword import LeaseWord
from zbus.testing.proxy import FaultProxy
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

NAME = WorkerName("actor", 0)
FAR = 1 << 62


class Bench:
    """A callee with a lease behind a proxy, a caller, and the order in which calls began."""

    def __init__(self, proxy: FaultProxy, contact_s: float) -> None:
        self.proxy = proxy
        self.lease = LeaseWord.make()
        self.factory = SocketFactory(max_sockets=64)
        self.began: list[int] = []
        self.told: list[Outcome] = []
        self.gate = threading.Event()
        self.server = Server(
            name=NAME, incarnation=1, factory=self.factory, lanes={"main": 1, "ctl": 1}, dispatch=self.run,
            lease=self.lease.until, contact_ns=int(contact_s * 1e9),
        )  # fmt: skip
        endpoint = self.server.bind("main", "tcp://127.0.0.1:0")
        self.server.start()
        self._thread = threading.Thread(target=self.server.run, args=(self.run,))
        self._thread.start()
        self.client = Client(session=new_session(), epoch=1, factory=self.factory)
        self.peer: Peer = self.client.connect(NAME, 1, {"main": [proxy.front(endpoint, worker="actor/0")]})
        assert self.client.wait(lambda: self.peer.state is PeerState.READY, scaled(10))

    def run(self, request: Execute) -> None:
        """Run one call: the first one ends when the gate opens."""
        self.began.append(request.seq)
        if request.seq == 0:
            assert self.gate.wait(scaled(20))
        self.server.finish(request, 0, Kind.RESULT, Status.OK, [b""])

    def place(self, calls: int) -> None:
        """Place some calls, and see the first run and the others queued."""
        for _ in range(calls):
            self.client.place(
                [self.peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *one: self.told.append(one[2])
            )
        wait_until(lambda: self.began and self.server.callee.queued == calls - 1, what="the calls to arrive")

    def close(self) -> None:
        """End everything."""
        self.gate.set()
        self.client.close()
        self.server.stop()
        self._thread.join(scaled(10))
        self.server.close()
        assert self.factory.close()
        self.lease.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Give a bench on which a word of the controller counts for 0.2 s."""
    with FaultProxy() as proxy:
        bench = Bench(proxy, 0.2)
        yield bench
        bench.close()


def test_a_callee_that_is_cut_off_beyond_its_lease_starts_nothing_until_it_is_not(bench):
    """What runs ends; what is queued begins when the controller is heard again, in order."""
    bench.place(3)
    bench.proxy.freeze()
    bench.lease.hold_until(0)
    time.sleep(0.3)  # longer than a word counts
    bench.gate.set()
    wait_until(lambda: bench.server.callee.held_off, what="the callee to hold off")
    time.sleep(0.3)  # nothing may begin meanwhile
    assert bench.began == [0]
    bench.proxy.thaw()
    assert bench.client.wait(lambda: len(bench.told) == 3, scaled(20))
    assert bench.began == [0, 1, 2]
    assert {one.kind for one in bench.told} == {OutcomeKind.OK}


def test_a_lease_that_is_held_again_is_enough(bench):
    """Cut off from its controller only, it goes on: nobody can have replaced it."""
    bench.place(2)
    bench.proxy.freeze()
    bench.lease.hold_until(0)
    time.sleep(0.3)  # longer than a word counts
    bench.gate.set()
    wait_until(lambda: bench.server.callee.held_off, what="the callee to hold off")
    bench.lease.hold_until(FAR)
    wait_until(lambda: bench.began == [0, 1], what="the second call to begin")


def test_a_dead_disk_costs_a_connected_callee_nothing(bench):
    """The lease cannot be renewed, and nothing was heard for long: it asks, is answered, and goes on (R8)."""
    bench.place(3)
    bench.lease.hold_until(0)
    time.sleep(0.3)  # longer than a word counts
    began = time.monotonic()
    bench.gate.set()
    assert bench.client.wait(lambda: len(bench.told) == 3, scaled(20))
    assert time.monotonic() - began < within(0.3)
    assert bench.began == [0, 1, 2]


def test_a_peer_declared_dead_is_not_told_that_its_place_is_its_own(bench):
    """Its controller does not answer it any more."""
    bench.place(2)
    bench.lease.hold_until(0)
    bench.client.declare_dead(bench.peer, reason="fenced", evidence="start 1 has replaced it")
    time.sleep(0.3)  # longer than a word counts
    bench.gate.set()
    wait_until(lambda: bench.server.callee.held_off, what="the callee to hold off")
    time.sleep(0.7)  # it asks twice a second
    assert bench.began == [0]
