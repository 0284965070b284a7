from __future__ import annotations

import logging
import threading
import time

import pytest

from waiting import scaled, wait_until
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Execute, Kind, Outcome, OutcomeKind, Status
from zbus.runtime.watchdog import Handler, Watchdog
from zbus.testing.clock import FakeClock
from zbus.transport.client import Client, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

NS = 1_000_000_000


class Looks:
    """A watchdog over a fake clock, and the handlers that run."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.running: list[Handler] = []
        self.dog = Watchdog(look_s=0.25, clock=self.clock)
        self.dog.watch(lambda: self.running)
        self.clock.advance(10)
        self.dog.look()

    def pass_by(self, seconds: float) -> int:
        """Let time pass, look, and return how many handlers were told of so far."""
        self.clock.advance(seconds)
        self.dog.look()
        return self.dog.count


def test_a_handler_seen_at_two_looks_is_told_once_with_its_stack(caplog):
    """Name, how long, and where it stands, innermost frame first; and that it ended."""
    looks = Looks()
    here = threading.get_ident()
    looks.running = [Handler("ctl method zbus.status", looks.clock.monotonic_ns(), here)]
    with caplog.at_level(logging.WARNING, "zbus.watchdog"):
        assert [looks.pass_by(0.25) for _ in range(4)] == [0, 1, 1, 1]
        looks.running = []
        looks.pass_by(0.25)
    (slow,) = looks.dog.slow
    assert (slow.name, slow.seconds) == ("ctl method zbus.status", 0.5)
    assert any("test_watchdog.py" in line and line.endswith("in pass_by") for line in slow.stack)
    assert "ctl method zbus.status has run for 0.5 s on a thread that must not wait:" in caplog.text
    assert "ctl method zbus.status has ended" in caplog.text
    assert looks.dog.facts()["count"] == 1


def test_handlers_that_come_and_go_are_no_slow_handler():
    """Another one of the same name on the same thread is another one."""
    looks = Looks()
    for _ in range(5):
        looks.running = [Handler("a handler of the bus thread", looks.clock.monotonic_ns(), 7)]
        assert looks.pass_by(0.25) == 0


def test_a_look_that_comes_late_proves_nothing():
    """The process was stopped, or one call held the GIL: every handler waited, and so did the look."""
    looks = Looks()
    looks.running = [Handler("a handler of the bus thread", looks.clock.monotonic_ns(), 7)]
    assert looks.pass_by(0.25) == 0
    assert looks.pass_by(30.0) == 0
    assert looks.pass_by(0.25) == 1, "it still runs, and now the looks come in time"


def test_looks_in_a_row_count_as_one():
    """Whoever looks more often than asked learns nothing more."""
    looks = Looks()
    looks.running = [Handler("a handler of the bus thread", looks.clock.monotonic_ns(), 7)]
    assert [looks.pass_by(0.01) for _ in range(20)][-1] == 0


class Faulty:
    """A server one of whose handlers can be told to block, to raise, or to end the bus thread; and a client."""

    def __init__(self) -> None:
        self.block_s = 0.0
        self.error: Exception | None = None
        self.fatal: list[BaseException] = []
        self.factory = SocketFactory(max_sockets=32)
        self.server = Server(
            name=WorkerName("actor", 0), incarnation=1, factory=self.factory, lanes={"ctl": 4},
            dispatch=self.handle, on_fatal=self.fatal.append,
        )  # fmt: skip
        endpoint = self.server.bind("ctl", "tcp://127.0.0.1:0")
        self.server.start()
        self.client = Client(session=new_session(), epoch=1, factory=self.factory)
        self.peer = self.client.connect(WorkerName("actor", 0), 1, {"ctl": [endpoint]})
        assert self.client.wait(lambda: self.peer.state is PeerState.READY, scaled(10))

    def handle(self, request: Execute) -> None:
        """Answer a request on the bus thread, after what was asked for."""
        if self.block_s:
            time.sleep(self.block_s)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.server.finish(request, 0, Kind.RESULT, Status.OK, [b"answer"])

    def ask(self, deadline_s: float | None = None) -> Outcome:
        """Make a call and return its outcome."""
        told: list[Outcome] = []
        self.client.place([self.peer], "ctl", [[b"?"]], 1, deadline_s=deadline_s, sink=lambda *one: told.append(one[2]))
        assert self.client.wait(lambda: bool(told), scaled(20))
        return told[0]

    def close(self) -> None:
        """End both."""
        self.client.close()
        self.server.close()
        assert self.factory.close()


@pytest.fixture
def faulty():
    """Give a server with a faulty handler."""
    made = Faulty()
    yield made
    made.close()


def test_a_handler_that_blocks_the_bus_thread_is_told_and_the_rest_goes_on(faulty, caplog):
    """It is named with its stack while it blocks; afterwards everybody is served."""
    dog = Watchdog(look_s=0.05)
    dog.watch(lambda: [] if (busy := faulty.server.round_since()) is None else [Handler("bus", *busy)])
    dog.start()
    try:
        with caplog.at_level(logging.WARNING, "zbus.watchdog"):
            faulty.block_s = scaled(0.8)
            assert faulty.ask().kind is OutcomeKind.OK
            faulty.block_s = 0.0
            assert faulty.ask().kind is OutcomeKind.OK
            wait_until(lambda: "bus has ended" in caplog.text, what="the end to be told")
    finally:
        dog.close()
    assert dog.count == 1
    assert any(line.endswith("in handle") for line in dog.slow[0].stack)
    assert faulty.fatal == []


def test_a_handler_that_raises_costs_its_message_and_not_the_thread(faulty, caplog):
    """Its call is answered no more, everybody else's is; it is counted."""
    faulty.error = ValueError("a fault of ours")
    with caplog.at_level(logging.ERROR, "zbus.transport"):
        assert faulty.ask(deadline_s=0.2).kind is OutcomeKind.UNKNOWN
    assert faulty.ask().kind is OutcomeKind.OK
    assert faulty.server.statistics()["refused_handler_error"] == 1
    assert "a fault of ours" in caplog.text
    assert faulty.fatal == []


def test_the_end_of_the_bus_thread_is_told(faulty):
    """Whatever ended it, whoever owns the server can end the process with the cause."""

    def ticker(_now: int) -> int:
        msg = "the timers are broken"
        raise RuntimeError(msg)

    faulty.server._bus.add_ticker(ticker)
    wait_until(lambda: faulty.fatal, what="the end of the thread")
    assert str(faulty.fatal[0]) == "the timers are broken"
