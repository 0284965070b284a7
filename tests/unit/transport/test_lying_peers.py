"""Peers that lie, over real sockets: a worker that answers wrongly, a caller that sends what is no message."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgpack
import pytest
import zmq

from link_kit import NAME, call, echo_worker
from waiting import scaled
from zbus.codec import decode, encode
from zbus.ids import new_session
from zbus.protocol import frames
from zbus.protocol.messages import Header, Kind, Outcome, OutcomeKind, Status
from zbus.transport.client import Client, PeerState

OK = OutcomeKind.OK


class FakeWorker:
    """Welcomes everyone at ``endpoint``, and answers each request with what ``lie`` makes of it."""

    def __init__(self, endpoint: str, lie: Callable[[Header], list[tuple[Header, list[bytes]]]]) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(endpoint)
        self.lie = lie
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self) -> None:
        """Answer until it is stopped."""
        while not self.stop.is_set():
            if not self.router.poll(20):
                continue
            peer, *rest = self.router.recv_multipart()
            header, _ = frames.decode(rest)
            if header.kind == Kind.HELLO:
                welcome = msgpack.packb({"role": "actor", "rank": 0, "lanes": {}, "protocol": 1})
                answers = [(header._replace(kind=Kind.WELCOME), [welcome])]
            elif header.kind == Kind.REQ:
                answers = self.lie(header)
            else:
                continue
            for answer, buffers in answers:
                self.router.send_multipart([peer, *frames.encode(answer, buffers)])

    def close(self) -> None:
        """End it."""
        self.stop.set()
        self.thread.join(scaled(10))
        self.context.destroy(0)


def right(header: Header, text: str = "right", **changes: int) -> tuple[Header, list[bytes]]:
    """Return a RESULT for a request, or for another by ``changes``."""
    answer = header._replace(kind=Kind.RESULT, status=Status.OK, floor=0, trace=0, budget_ms=0)._replace(**changes)
    return answer, [bytes(frame) for frame in encode(text)]


LIES: dict[str, Callable[[Header], list[tuple[Header, list[bytes]]]]] = {
    "of a later call": lambda h: [right(h, "wrong", seq=h.seq + 1), right(h)],
    "of an unknown call": lambda h: [right(h, "wrong", seq=h.seq + 5_000), right(h)],
    "twice": lambda h: [right(h), right(h, "wrong")],
    "of more calls": lambda h: [right(h, "wrong", calls=3), right(h)],
    "of another lane": lambda h: [right(h._replace(lane="side"), "wrong"), right(h)],
    "of another session": lambda h: [right(h._replace(session=b"another session!"), "wrong"), right(h)],
    "of another incarnation": lambda h: [right(h, "wrong", incarnation=h.incarnation + 1), right(h)],
    "items of what streams nothing": lambda h: [right(h, "wrong", kind=Kind.CHUNK, floor=3), right(h)],
    "words that only callers say": lambda h: [right(h, "wrong", kind=kind) for kind in (3, 4, 10, 11, 17)] + [right(h)],
}


COUNTED = {
    "of another lane": "foreign_lane",
    "of another session": "foreign_session",
    "of another incarnation": "foreign_lane",
    "items of what streams nothing": "",  # asked for again, as for a stream
}
"""Where a lie is counted, if not as a stray answer."""


@pytest.mark.parametrize("lie", LIES)
def test_wrong_answers_are_dropped_and_the_right_one_stands(factory, tmp_path, lie):
    """Row 70: unknown calls, doubled answers, answers of others: 20 calls, each its own result, once."""
    endpoint = f"ipc://{tmp_path}/worker"
    fake = FakeWorker(endpoint, LIES[lie])
    client = Client(session=new_session(), epoch=1, factory=factory)
    try:
        peer = client.connect(NAME, 1, {"main": [endpoint]})
        assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
        told: list[Outcome] = []
        for number in range(20):
            client.place([peer], "main", [encode(0)], 1, deadline_s=scaled(20), sink=lambda *one: told.append(one[2]))
            assert client.wait(lambda wanted=number + 1: len(told) >= wanted, scaled(10))
        assert [outcome.kind for outcome in told] == [OK] * 20
        assert {decode(outcome.payload) for outcome in told} == {"right"}
        assert peer.state is PeerState.READY
        counter = COUNTED.get(lie, "stray_answers")
        assert not counter or client.statistics()[counter] >= 19, "the last one may still be on its way"
        client.disconnect(peer)
        assert not counter or client.statistics()[counter] >= 19, "kept when the connection is closed"
    finally:
        client.close()
        fake.close()


def test_what_is_no_message_is_counted_and_the_others_are_served(factory, tmp_path):
    """Rows 65 and 66: a raw peer sends other versions and kinds, frames too few and too many, each byte changed."""
    endpoint = f"ipc://{tmp_path}/worker"
    message = frames.encode(Header(Kind.REQ, b"session-16-bytes", 1, 1, "main", 0), [b"x" * 70_000, b"more"])
    (head, *rest) = [bytes(frame) for frame in message]
    fields = list(msgpack.unpackb(head))
    bad = [
        [msgpack.packb([99, *fields[1:]]), *rest],
        [msgpack.packb([fields[0], 77, *fields[2:]]), *rest],
        [head],
        [head, rest[0]],
        [head, *rest, b"extra"],
        [head, rest[0][:-1], rest[1]],
        [b""],
        [msgpack.packb({"not": "a header"})],
    ]
    for position in range(len(head)):
        changed = bytearray(head)
        changed[position] ^= 0x55
        bad.append([bytes(changed), *rest])
        bad.append([head[:position], *rest])
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    client = Client(session=new_session(), epoch=1, factory=factory)
    try:
        with echo_worker(factory, endpoint) as (server, _):
            raw.connect(endpoint)
            peer = client.connect(NAME, 1, {"main": [endpoint]})
            assert client.wait(lambda: peer.state is PeerState.READY, scaled(10))
            for number, one in enumerate(bad):
                raw.send_multipart(one)
                if number % 20 == 0:
                    assert call(client, peer, number) == number
            hello = msgpack.packb({"role": "actor", "rank": 0, "t": 1})
            raw.send_multipart(frames.encode(Header(Kind.HELLO, b"session-16-bytes", 1, 1, "main"), [hello]))
            kind = 0
            while kind != Kind.WELCOME:  # behind everything that was sent before
                assert raw.poll(int(scaled(10) * 1000)), "no answer to a good HELLO after all that"
                kind = frames.decode(raw.recv_multipart())[0].kind
            refused = sum(number for why, number in server.statistics().items() if why.startswith("refused_"))
            assert refused > len(bad) // 2
            assert call(client, peer, "after") == "after"
            assert server.callee.running == 0
    finally:
        client.close()
        context.destroy(0)
