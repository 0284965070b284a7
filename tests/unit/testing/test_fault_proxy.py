from __future__ import annotations

import asyncio
import random

import pytest

from waiting import wait_until
from zbus.protocol import frames
from zbus.protocol.messages import Header, Kind
from zbus.testing.proxy import FaultProxy, Rule
from zbus.testing.proxy.wire import Message, frame_of, read_message
from zbus.transport.multipart import Receiver, send
from zbus.transport.sockets import SocketFactory

SESSION = bytes(16)


def message(kind: Kind = Kind.REQ, lane: str = "main") -> Message:
    """Make a message of a kind."""
    header = Header(kind, SESSION, 1, 1, lane)
    return Message(b"raw", header, command=False)


def applied(rule: Rule, *messages: Message, direction: str = "request", worker: str = "a/0") -> list[bool]:
    """Tell which messages a rule takes."""
    chance = random.Random(1)
    return [rule.applies(one, direction, worker, "main", chance) for one in messages]


def test_a_rule_takes_calls_and_answers_unless_kinds_are_named():
    """Control messages pass by default, so that a fault hits what the user means."""
    assert applied(Rule("drop", "request"), message(Kind.REQ), message(Kind.PROBE), message(Kind.SKIP)) == [1, 0, 1]
    reply = [message(Kind.RESULT), message(Kind.PROGRESS), message(Kind.CHUNK)]
    assert applied(Rule("drop", "reply"), *reply, direction="reply") == [1, 0, 1]
    assert applied(Rule("drop", "request", kinds={Kind.PROBE}), message(Kind.REQ), message(Kind.PROBE)) == [0, 1]
    assert applied(Rule("drop", "request"), message(), direction="reply") == [0]


def test_a_rule_keeps_to_its_worker_lane_count_and_skip():
    """What is not named is left alone, and a spent rule does nothing."""
    assert applied(Rule("drop", "both", worker="a/1"), message()) == [0]
    assert applied(Rule("drop", "both", lane="gen"), message(), message(lane="gen")) == [0, 1]
    rule = Rule("drop", "both", skip=1, count=2)
    assert applied(rule, *[message()] * 5) == [0, 1, 1, 0, 0]
    assert rule.hits == 2
    assert rule.spent


def test_a_rule_by_chance_takes_the_same_for_the_same_seed():
    """Choices come from the seed."""
    taken = [applied(Rule("drop", "both", probability=0.5), *[message()] * 50) for _ in range(2)]
    assert taken[0] == taken[1]
    assert 10 < sum(taken[0]) < 40


def test_what_cannot_be_read_is_taken_only_by_a_rule_that_asks_for_nothing_in_it():
    """Encrypted or foreign traffic can be harmed, but not by kind or lane; handshakes and pings never are."""
    unknown = Message(b"raw", None, command=False)
    assert applied(Rule("drop", "both"), unknown) == [1]
    assert applied(Rule("drop", "both", lane="main"), unknown) == [0]
    assert applied(Rule("drop", "both", kinds={Kind.REQ}), unknown) == [0]
    assert applied(Rule("drop", "both"), Message(b"ping", None, command=True)) == [0]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_messages_are_read_whole_whatever_their_frames(size):
    """Short and long frames, several to a message, commands: each comes back byte for byte."""
    header = bytes(frames.encode(Header(Kind.REQ, SESSION, 1, 1, "main"), [b"x" * size])[0])
    rest = [bytes(one) for one in frames.encode(Header(Kind.REQ, SESSION, 1, 1, "main"), [b"x" * size])[1:]]
    parts = [header, *rest]
    raw = b"".join(frame_of(part, more=index < len(parts) - 1) for index, part in enumerate(parts))
    ping = frame_of(b"\4PING", command=True)

    async def read() -> list[Message]:
        reader = asyncio.StreamReader()
        reader.feed_data(ping + raw)
        reader.feed_eof()
        return [await read_message(reader), await read_message(reader)]

    command, whole = asyncio.run(read())
    assert (command.raw, command.command, command.kind) == (ping, True, None)
    assert (whole.raw, whole.kind, whole.lane) == (raw, Kind.REQ, "main")


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_messages_pass_through_unchanged_and_are_counted(short_dir, transport):
    """Over tcp and ipc, both ways: a proxy without faults is invisible."""
    factory = SocketFactory()
    with FaultProxy() as proxy:
        router = factory.router("main")
        endpoint = factory.bind(router, "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{short_dir}/s")
        front = proxy.front(endpoint, worker="a/0")
        assert front == proxy.front(endpoint, worker="a/0")
        dealer = factory.dealer("main")
        factory.connect(dealer, front)
        inward, outward = Receiver(router), Receiver(dealer)
        parts = frames.encode(Header(Kind.REQ, SESSION, 1, 1, "main"), [b"body" * 1000, bytes(1 << 20)])
        wait_until(lambda: send(dealer, parts), what="a connection")
        got = wait_until(inward.recv, what="the request")
        assert [bytes(one) for one in got[1:]] == [bytes(one) for one in parts]
        assert send(router, [bytes(got[0]), *frames.encode(Header(Kind.RESULT, SESSION, 1, 1, "main"))])
        wait_until(outward.recv, what="the answer")
        assert (proxy.counters["request"], proxy.counters["reply"], proxy.connections) == (1, 1, 1)
        router.close(0)
        dealer.close(0)
    assert factory.close()


def test_only_ipc_and_tcp_have_fronts():
    """Other endpoints are refused by name; a closed proxy says so."""
    proxy = FaultProxy()
    with pytest.raises(ValueError, match="inproc"):
        proxy.front("inproc://x")
    proxy.close()
    proxy.close()
    with pytest.raises(RuntimeError, match="closed"):
        proxy.cut()
