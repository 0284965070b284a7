"""Calls that leave with those placed around them, over real sockets: when they leave, and what becomes of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import scaled, wait_until
from zbus.codec import encode
from zbus.ids import WorkerName
from zbus.protocol.messages import Execute, Kind, Outcome, OutcomeKind, Status
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory
from zbus.transport.soon import BUSY, MOST

NAME = WorkerName("actor", 0)


class Call:
    """Waits for one call, and keeps what it is told."""

    def __init__(self) -> None:
        self.began_ns = time.monotonic_ns()
        self.seq = -1
        self.told: list[bytes | Outcome | str] = []

    def placed(self, seq: int) -> None:
        self.seq = seq

    def unplaced(self) -> None:
        self.told.append("unplaced")

    def came(self, body: bytes, _attempts: int) -> None:
        self.told.append(body)

    def ended(self, outcome: Outcome) -> None:
        self.told.append(outcome)


class Worker:
    """A server whose main thread waits for ``go`` in each call, and notes the order."""

    def __init__(self, factory: SocketFactory, directory: Path) -> None:
        self.go = threading.Event()
        self.ran: list[int] = []
        self.server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1}, dispatch=self.run)
        self.endpoint = self.server.bind("main", f"ipc://{directory}/worker")
        self.server.start()
        self.thread = threading.Thread(target=self.server.run, args=(self.run,))
        self.thread.start()

    def run(self, request: Execute) -> None:
        self.go.wait(scaled(30))
        self.ran.append(request.seq)
        if request.calls > 1:
            held = self.server.hold(request, lambda *_: None)
            held.extend(bytes(encode(number)[0]) for number in range(request.calls))
            self.server.flush(over=True)
            return
        self.server.finish(request, 0, Kind.RESULT, Status.OK, encode(request.seq))

    def close(self) -> None:
        self.go.set()
        self.server.stop()
        self.thread.join(scaled(10))
        self.server.close()


@pytest.fixture
def worker(factory: SocketFactory, tmp_path: Path) -> Iterator[Worker]:
    """Serve until the test ends."""
    worker = Worker(factory, tmp_path)
    yield worker
    worker.close()


@pytest.fixture
def peer(client: Client, worker: Worker) -> Peer:
    """Return the worker as the client sees it, behind one call."""
    peer = client.connect(NAME, 1, {"main": [worker.endpoint]})
    assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
    told: list[Outcome] = []
    worker.go.set()
    client.place([peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *one: told.append(one[2]))
    assert client.wait(lambda: bool(told), scaled(10))
    worker.go.clear()
    return peer


def place(client: Client, peer: Peer, count: int) -> list[Call]:
    """Place so many calls, none of which is refused."""
    calls = [Call() for _ in range(count)]
    for call in calls:
        assert client.soon.place(peer, "main", encode(0), None, call)
    return calls


def piled(peer: Peer) -> int:
    """Return how many calls wait to leave together."""
    return len(peer.lanes["main"].pile)


def test_calls_to_a_worker_with_little_to_do_leave_at_once(client: Client, peer: Peer) -> None:
    """Each has its place when ``place`` returns: nothing waits for company."""
    calls = place(client, peer, BUSY)
    assert [call.seq for call in calls] == list(range(1, BUSY + 1))
    assert not piled(peer)


def test_calls_to_a_busy_worker_leave_together_in_their_order(client: Client, peer: Peer, worker: Worker) -> None:
    """As soon as there are enough, or when a thread begins to wait; each is answered."""
    with client.reactor.lock:  # whoever drives the sockets comes behind this
        calls = place(client, peer, BUSY + MOST + 3)
        assert [call.seq for call in calls] == [*range(1, BUSY + MOST + 1), -1, -1, -1]
        assert piled(peer) == 3
    worker.go.set()
    assert client.wait(lambda: all(call.told for call in calls), scaled(10))
    assert [call.told for call in calls] == [[bytes(encode(call.seq)[0])] for call in calls]
    assert worker.ran == list(range(BUSY + MOST + 4))


def test_piled_calls_leave_though_nobody_waits_or_places_more(client: Client, peer: Peer) -> None:
    """The thread that drives the sockets when nobody waits sends them."""
    calls = place(client, peer, BUSY + 3)
    wait_until(lambda: all(call.seq >= 0 for call in calls), what="the piled calls to leave")


def test_what_is_placed_otherwise_comes_behind_what_is_piled(client: Client, peer: Peer) -> None:
    """The lane keeps the order in which calls were made, in whatever way."""
    with client.reactor.lock:
        calls = place(client, peer, BUSY + 3)
        placed = client.place([peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *_: None)
    assert placed.seqs[0] == calls[-1].seq + 1 == BUSY + 4


def test_calls_piled_for_a_worker_that_is_lost_are_told_so(client: Client, peer: Peer) -> None:
    """They were not sent; whoever waits for them decides what becomes of them."""
    with client.reactor.lock:
        calls = place(client, peer, BUSY + 3)
        client.declare_dead(peer, reason="worker_exit", evidence="it was killed")
        assert not client.soon.place(peer, "main", encode(0), None, Call())
    assert [call.told for call in calls[BUSY:]] == [["unplaced"]] * 3
    assert all(isinstance(call.told[0], Outcome) for call in calls[:BUSY])


def test_calls_that_are_piled_when_the_bus_closes_are_not_executed(client: Client, peer: Peer) -> None:
    """Each has its outcome, and it is proved."""
    with client.reactor.lock:
        calls = place(client, peer, BUSY + 3)
        client.close()
    ends = [call.told[0] for call in calls[BUSY:]]
    assert [(end.kind, end.reason) for end in ends if isinstance(end, Outcome)] == [
        (OutcomeKind.NOT_EXECUTED, "shutdown")
    ] * 3


def test_nothing_is_piled_for_a_worker_that_knows_no_joined_calls(client: Client, peer: Peer) -> None:
    """Its WELCOME does not say that it takes them; the usual way is left."""
    peer.joins = False
    assert not client.soon.place(peer, "main", encode(0), None, Call())


def test_nothing_is_piled_beyond_the_window(client: Client, peer: Peer) -> None:
    """A call that had to wait for room is refused here: its caller waits instead."""
    window = peer.lanes["main"].machine.window_calls
    placed = 0
    while client.soon.place(peer, "main", encode(0), None, Call()):
        placed += 1
        client.soon.send_all()
        assert placed <= window
    assert window - MOST <= placed <= window


def test_calls_that_are_out_for_long_are_found(client: Client, peer: Peer) -> None:
    """So that somebody watches them, though nobody waits."""
    calls = place(client, peer, 3)
    assert client.soon.older_than(0) == calls
    assert client.soon.older_than(3_600_000_000_000) == []


def test_who_asks_for_all_to_be_sent_while_a_pile_is_sent_waits_until_its_calls_have_places(
    client: Client, peer: Peer
) -> None:
    """Else a cancel on another thread would find no place to cancel, and be lost."""

    class Asking(Call):
        waited = False

        def placed(self, seq: int) -> None:
            super().placed(seq)
            asking.start()
            asking.join(0.1)
            self.waited = asking.is_alive()

    asking = threading.Thread(target=client.soon.send_all)
    calls: list[Call] = [Call() for _ in range(BUSY)]
    for call in calls:
        assert client.soon.place(peer, "main", encode(1), None, call)
    last = Asking()
    with client.reactor.lock:  # so that nobody sends the pile before it is asked for
        assert client.soon.place(peer, "main", encode(2), None, last)
        assert last.seq < 0
        client.soon.send(peer.lanes["main"])
    asking.join(scaled(10))
    assert not asking.is_alive()
    assert last.waited


def test_calls_that_came_together_expire_in_the_queue_though_their_caller_is_silent(
    client: Client, peer: Peer, worker: Worker
) -> None:
    """Their worker watches the deadline of each, as of calls that came alone."""
    place(client, peer, BUSY)
    with client.reactor.lock:  # so the caller can ask for nothing
        for _ in range(3):
            assert client.soon.place(peer, "main", encode(0), 0.05, Call())
        client.soon.send_all()
        wait_until(lambda: arrived(client, worker) == BUSY + 4, what="all to arrive")
        wait_until(lambda: queued(worker) == BUSY - 1, what="three to expire")


def arrived(client: Client, worker: Worker) -> int:
    """Return how many calls have come, the one of the fixture among them."""
    with worker.server.lock:
        return worker.server.callee.lane_cursors(client.session)["main"]


def queued(worker: Worker) -> int:
    """Return how many calls wait behind the one that runs."""
    with worker.server.lock:
        return worker.server.callee.queued


def test_results_that_wait_for_each_other_leave_before_those_of_a_batch_behind_them(
    client: Client, peer: Peer, worker: Worker
) -> None:
    """Batches that keep coming would hold them up as long as they come."""
    heard: list[str] = []

    class Noting(Call):
        def came(self, body: bytes, attempts: int) -> None:
            super().came(body, attempts)
            heard.append("call")

    calls = [Noting() for _ in range(BUSY + 2)]
    with client.reactor.lock:  # so the last two leave together
        for call in calls:
            assert client.soon.place(peer, "main", encode(0), None, call)
        client.soon.send_all()
    batch = [encode([1, 1])]
    client.place([peer], "main", batch, 2, deadline_s=None, sink=lambda *_: heard.append("batch"))
    wait_until(lambda: arrived(client, worker) == BUSY + 5, what="all to arrive")
    worker.go.set()
    assert client.wait(lambda: len(heard) == BUSY + 4, scaled(10))
    assert heard == ["call"] * len(calls) + ["batch"] * 2


def test_one_that_raises_when_its_call_is_not_placed_costs_no_other_its_word(client: Client, peer: Peer) -> None:
    """Each of a pile is told, whatever another does; what raised is counted."""

    class Raising(Call):
        def unplaced(self) -> None:
            msg = "no thread can be started"
            raise RuntimeError(msg)

    place(client, peer, BUSY)
    pile = [Call(), Raising(), Call()]
    with client.reactor.lock:  # so that nobody sends them before the worker is lost
        for call in pile:
            assert client.soon.place(peer, "main", encode(0), None, call)
        peer.state = PeerState.SUSPECT
        client.soon.send(peer.lanes["main"])
    assert [call.told for call in pile] == [["unplaced"], [], ["unplaced"]]
    assert client.statistics()["failed_listeners"] == 1
