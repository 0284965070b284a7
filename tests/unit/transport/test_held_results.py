"""Requests and results that wait at the server, over real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from waiting import scaled, wait_until
from zbus.codec import encode
from zbus.ids import WorkerName
from zbus.protocol.messages import Execute, Kind, Outcome, Status
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
        seen.append(first.wait(scaled(3)))  # the second call
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
        client.wait(lambda: bool(told), scaled(6))
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
