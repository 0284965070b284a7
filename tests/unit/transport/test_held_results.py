"""Requests and results that wait at the server, over real sockets."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zbus
from waiting import scaled, wait_until, within
from zbus.codec import encode
from zbus.engine import endpoints_of
from zbus.ids import WorkerName
from zbus.protocol.journal import LaneRing
from zbus.protocol.messages import Execute, Kind, Outcome, Status
from zbus.runtime.executor import Executor
from zbus.transport.client import Client, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

NAME = WorkerName("actor", 0)


def test_a_result_held_after_a_long_start_leaves_while_the_next_call_runs(
    factory: SocketFactory, client: Client, tmp_path: Path
) -> None:
    """The bus thread had taken over and gone to sleep before anything was held, as when a request is slow to read."""
    told: list[Outcome] = []
    first = threading.Event()
    seen: list[bool] = []

    def sleeps_long() -> bool:
        return server._takeover and server._bus._sleep_until - time.monotonic_ns() > 10_000_000_000

    def run(request: Execute) -> None:
        wait_until(sleeps_long, what="the bus thread to take over and to sleep")
        server.hold(request, lambda *_: None).append(bytes(encode(1)[0]))
        seen.append(first.wait(within(3)))  # the second call
        server.flush(over=True)
        server.finish(request, 1, Kind.RESULT, Status.OK, encode(2))

    server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1}, dispatch=run)
    bound = server.bind("main", f"ipc://{tmp_path}/worker")
    server.start()
    thread = threading.Thread(target=server.run, args=(run,))
    thread.start()
    try:
        peer = client.connect(NAME, 1, {"main": [bound]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        client.place([peer], "main", [encode(0)], 2, deadline_s=None, sink=lambda *one: told.append(one[2]))
        client.wait(lambda: bool(told), within(3))
        first.set()
        assert client.wait(lambda: len(told) == 2, scaled(10))
        assert seen == [True], "the first result came while the second call ran"
    finally:
        server.stop()
        thread.join(scaled(10))
        server.close()


def test_a_request_is_not_lost_where_a_signal_handler_raises_before_it_is_run(
    factory: SocketFactory, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run`` is called again, and runs it."""
    told: list[Outcome] = []
    left: list[int | None] = []

    def run(request: Execute) -> None:
        server.finish(request, 0, Kind.RESULT, Status.OK, encode(1))

    def serve() -> None:
        while not server.stopping:
            try:
                server.run(run)
            except KeyboardInterrupt:
                left.append(server._busy_since)

    server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1}, dispatch=run)
    begin_busy = server._begin_busy

    def interrupted(since_ns: int) -> None:
        begin_busy(since_ns)
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "_begin_busy", interrupted)
    bound = server.bind("main", f"ipc://{tmp_path}/worker")
    server.start()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        peer = client.connect(NAME, 1, {"main": [bound]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        client.place([peer], "main", [encode(0)], 1, deadline_s=None, sink=lambda *one: told.append(one[2]))
        assert client.wait(lambda: len(told) == 1, scaled(10))
        assert left == [None]
    finally:
        server.stop()
        thread.join(scaled(10))
        server.close()


class Works(zbus.Engine):
    """Sums, and takes its time."""

    @zbus.endpoint()
    def say(self, value: int) -> int:
        return value

    @zbus.endpoint()
    def nap(self) -> str:
        time.sleep(0.002)  # longer than results are held: the first one leaves behind it
        return "slept"


class Struck(Exception):
    """What the signal handler raises."""


class StruckRing(LaneRing):
    """A journal during whose first note of an answer a signal comes."""

    strikes = 1

    def answered_together(self, first: int, bodies: Sequence[bytes]) -> None:
        super().answered_together(first, bodies)
        if self.strikes:
            self.strikes -= 1
            signal.raise_signal(signal.SIGUSR1)


def test_calls_behind_the_place_where_a_signal_handler_raises_are_answered_and_the_next_request_runs(
    factory: SocketFactory, client: Client, tmp_path: Path
) -> None:
    """Between two calls of a batch: what has begun keeps its answer, the rest was not started, and the lane goes on."""

    def strike(_signum: int, _frame: object) -> None:
        raise Struck

    told: list[Outcome] = []
    last: list[Outcome] = []
    server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1}, dispatch=lambda _: None)
    ring = StruckRing([0] * 2048, [0] * 2048)
    executor = Executor(name="actor/0", incarnation=1, answers=server, builtins={}, rings=lambda *_: ring)
    executor.install(Works(), endpoints_of(Works))
    bound = server.bind("main", f"ipc://{tmp_path}/worker")
    server.start()
    before = signal.signal(signal.SIGUSR1, strike)
    in_time = threading.Timer(scaled(20), server.stop)
    in_time.start()
    try:
        peer = client.connect(NAME, 1, {"main": [bound]})
        body = encode([["nap", [], {}], ["say", [1], {}], ["say", [2], {}]])
        placing = threading.Thread(target=lambda: place_all(body))

        def place_all(body: list[Any]) -> None:
            client.wait(lambda: peer.state is PeerState.READY, scaled(10))
            client.place([peer], "main", [body], 3, deadline_s=None, sink=lambda *one: told.append(one[2]))
            after = encode([["say", [3], {}]])
            client.place([peer], "main", [after], 1, deadline_s=None, sink=lambda *one: ended(one[2]))

        def ended(outcome: Outcome) -> None:
            last.append(outcome)
            server.stop()

        placing.start()
        with pytest.raises(Struck):
            server.run(executor.run_main, executor.give_up)
        server.run(executor.run_main, executor.give_up)
        placing.join(scaled(10))
        assert [(one.kind.value, one.reason) for one in told] == [("OK", ""), *[("NOT_EXECUTED", "refused")] * 2]
        assert [one.kind.value for one in last] == ["OK"]
        assert executor._at_work == (None, ())
    finally:
        signal.signal(signal.SIGUSR1, before)
        in_time.cancel()
        server.stop()
        executor.close()
        server.close()


def test_a_request_that_is_given_up_before_its_first_step_is_told_to_whoever_answers(
    factory: SocketFactory, client: Client, tmp_path: Path
) -> None:
    """A handler that raises where the request is taken and not yet run: it is known not to have begun."""
    told: list[Outcome] = []
    server = Server(name=NAME, incarnation=1, factory=factory, lanes={"main": 1}, dispatch=lambda _: None)
    executor = Executor(name="actor/0", incarnation=1, answers=server, builtins={})
    executor.install(Works(), endpoints_of(Works))

    def struck(request: Execute) -> None:
        raise Struck

    def serve() -> None:
        with pytest.raises(Struck):
            server.run(struck, executor.give_up)

    bound = server.bind("main", f"ipc://{tmp_path}/worker")
    server.start()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        peer = client.connect(NAME, 1, {"main": [bound]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        body = encode([["say", [1], {}]])
        client.place([peer], "main", [body], 1, deadline_s=None, sink=lambda *one: told.append(one[2]))
        assert client.wait(lambda: len(told) == 1, scaled(10))
        assert (told[0].kind.value, told[0].reason) == ("NOT_EXECUTED", "refused")
    finally:
        server.stop()
        thread.join(scaled(10))
        executor.close()
        server.close()
