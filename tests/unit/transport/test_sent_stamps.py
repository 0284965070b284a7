"""When each member's request of a group call leaves, for the trace."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from link_kit import NAME, echo_worker
from waiting import scaled
from zbus.codec import encode
from zbus.ids import new_session
from zbus.protocol.messages import Header, Kind, Outcome
from zbus.transport.channel import Channel
from zbus.transport.client import Client, PeerState
from zbus.transport.sockets import SocketFactory

MEMBERS = 4


@pytest.mark.parametrize("alike", [True, False], ids=["one call, one frame", "other arguments"])
@pytest.mark.parametrize("asked", [True, False], ids=["traced", "not traced"])
def test_each_members_request_has_a_time_of_its_own(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, *, alike: bool, asked: bool
) -> None:
    """It lies between the departure of the one before and its own; where nobody asks, none is taken."""
    left: list[int] = []
    send = Channel.send

    def note(channel: Channel, header: Header, *rest: object) -> object:
        found = send(channel, header, *rest)  # type: ignore[arg-type]
        if header.kind == Kind.REQ:
            left.append(time.monotonic_ns())
        return found

    factory = SocketFactory()
    client = Client(session=new_session(), epoch=1, factory=factory)
    if asked:
        client.on_sent = lambda _peer, _header: None
    told: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        stack.callback(factory.close)
        stack.callback(client.close)
        peers = []
        for number in range(MEMBERS):
            _, bound = stack.enter_context(echo_worker(factory, f"ipc://{short_dir}/{number}"))
            peers.append(client.connect(NAME, 1, {"main": [bound]}))
        assert client.wait(lambda: all(peer.state is PeerState.READY for peer in peers), scaled(20))
        monkeypatch.setattr(Channel, "send", note)
        payload = encode("x")
        payloads = [payload] * MEMBERS if alike else [encode(str(number)) for number in range(MEMBERS)]
        before = time.monotonic_ns()
        placed = client.place(peers, "main", payloads, 1, deadline_s=scaled(20), sink=lambda *one: told.append(one[2]))
        assert client.wait(lambda: len(told) == MEMBERS, scaled(20))
    if asked:
        assert len(placed.sent_ns) == len(left) == MEMBERS
        marks = [moment for pair in zip(placed.sent_ns, left, strict=True) for moment in pair]
        assert [before, *marks] == sorted([before, *marks])
    else:
        assert not placed.sent_ns
