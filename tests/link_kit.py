"""The ends of links over real sockets: workers that echo, and services that are no peers of ours."""

from __future__ import annotations

import contextlib
import socket as stdlib
import threading
from collections.abc import Callable, Iterator

from waiting import scaled, wait_until
from zbus.codec import decode, encode
from zbus.ids import WorkerName
from zbus.protocol.messages import Execute, Kind, Outcome, OutcomeKind, Status
from zbus.transport.client import Client, Peer
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

__all__ = ["NAME", "call", "echo_worker", "foreign_service", "free_port", "is_free", "meet_a_stranger"]

NAME = WorkerName("actor", 0)


@contextlib.contextmanager
def echo_worker(factory: SocketFactory, endpoint: str, *, ran: list[int] | None = None) -> Iterator[tuple[Server, str]]:
    """Serve an echo; gives the server and the endpoint it is bound to. ``ran`` grows with each call."""

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
        yield server, bound
    finally:
        server.stop()
        thread.join(scaled(10))
        server.close()


def call(client: Client, peer: Peer, value: object) -> object:
    """Make one call and return its answer."""
    told: list[Outcome] = []
    client.place([peer], "main", [encode(value)], 1, deadline_s=scaled(20), sink=lambda *one: told.append(one[2]))
    assert client.wait(lambda: bool(told), scaled(20))
    assert told[0].kind is OutcomeKind.OK, told[0]
    return decode(told[0].payload or ())


@contextlib.contextmanager
def foreign_service(port: int, serve: Callable[[stdlib.socket], object]) -> Iterator[list[int]]:
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


def is_free(port: int) -> bool:
    """Return whether nobody listens at a port; libzmq frees one a moment after its socket was closed."""
    try:
        stdlib.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def meet_a_stranger(port: int) -> None:
    """Have another service answer whoever dials a port, until libzmq gives that connection up; leave the port free."""
    given_up = threading.Event()

    def serve(connection: stdlib.socket) -> None:
        try:
            connection.sendall(b"SSH-2.0-OpenSSH_9.7\r\n")
            while connection.recv(100):
                pass
        finally:  # mostly it is reset
            given_up.set()

    wait_until(lambda: is_free(port), what="a port that is free")
    with foreign_service(port, serve):
        wait_until(given_up.is_set, what="libzmq to give up")
    wait_until(lambda: is_free(port), what="a port that is free again")
