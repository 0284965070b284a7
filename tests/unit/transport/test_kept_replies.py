"""Large replies over real sockets: kept until acknowledged, in memory and then in files, and said again whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from waiting import scaled
from zbus.ids import WorkerName
from zbus.protocol import frames
from zbus.protocol.messages import Execute, Header, Kind, Status
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

SESSION = b"session-16-bytes"
SIZE = 100_000


class Raw:
    """A caller without a machine: it asks what it likes."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(endpoint)
        hello = msgpack.packb({"role": "actor", "rank": 0, "t": 1})
        assert self.ask(Header(Kind.HELLO, SESSION, 1, 1, "main"), [hello])[0].kind == Kind.WELCOME

    def ask(self, header: Header, buffers: list[bytes]) -> tuple[Header, list[bytes]]:
        """Send a message and return the answer."""
        self.socket.send_multipart(frames.encode(header, buffers))
        assert self.socket.poll(int(scaled(10) * 1000)), f"no answer to {header}"
        answer, body = frames.decode(self.socket.recv_multipart())
        return answer, [bytes(frame) for frame in body]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, Raw]]:
    """Serve an echo that keeps 250 kB of large replies in memory, and a raw caller of it."""
    factory = SocketFactory(max_sockets=16)

    def run(request: Execute) -> None:
        server.finish(request, 0, Kind.RESULT, Status.OK, [bytes(buffer) for buffer in request.buffers])

    server = Server(
        name=WorkerName("actor", 0), incarnation=1, factory=factory, lanes={"main": 1}, dispatch=run, keep_bytes=250_000
    )
    bound = server.bind("main", f"ipc://{tmp_path}/worker")
    server.start()
    thread = threading.Thread(target=server.run, args=(run,))
    thread.start()
    raw = Raw(bound)
    yield server, raw
    raw.context.destroy(0)
    server.stop()
    thread.join(scaled(10))
    server.close()
    assert factory.close()


def test_lost_replies_of_ten_large_calls_are_said_again_from_memory_and_files(served):
    """Each retry gets its own reply, whole; nothing runs again; a floor frees memory and files."""
    server, raw = served
    body = [[b"head", bytes([seq]) * SIZE] for seq in range(10)]
    for seq in range(10):
        assert raw.ask(Header(Kind.REQ, SESSION, 1, 1, "main", seq), body[seq])[1] == body[seq]
    assert server._shelf.nbytes == 8 * (SIZE + 4)
    for seq in (0, 9, 4):
        answer, frames_ = raw.ask(Header(Kind.REQ, SESSION, 1, 1, "main", seq, attempt=2), body[seq])
        assert (answer.kind, answer.seq) == (Kind.RESULT, seq)
        assert frames_ == body[seq]
    assert raw.ask(Header(Kind.REQ, SESSION, 1, 1, "main", 10, floor=10), [b"small"])[1] == [b"small"]
    assert (server._shelf.nbytes, server.callee._kept_bytes) == (0, 0)


def test_without_room_a_lost_reply_is_told_as_executed_and_not_kept(served):
    """The shelf is full: the retry is told so, and nothing runs again."""
    server, raw = served
    server._shelf._limit = 0
    for seq in range(4):
        raw.ask(Header(Kind.REQ, SESSION, 1, 1, "main", seq), [b"head", bytes(SIZE)])
    answer, _ = raw.ask(Header(Kind.REQ, SESSION, 1, 1, "main", 0, attempt=2), [b"head", bytes(SIZE)])
    assert (answer.kind, answer.status) == (Kind.FAILURE, Status.NOT_KEPT)
    assert server.statistics()["dropped_reply_not_kept"] == 2
