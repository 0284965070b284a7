"""The bus's own methods, asked of peers on ``ctl``: what answers, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbus.codec import decode, encode
from zbus.errors import Unavailable
from zbus.ids import WorkerName
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.transport.client import Client, Peer

__all__ = ["ask"]


def ask(
    client: Client, peers: Sequence[Peer], method: str, args: Sequence[Any], timeout_s: float
) -> dict[WorkerName, Any]:
    """Call a method on ``ctl`` of each peer and return the good answers by name."""
    if not peers:
        return {}
    outcomes: dict[int, Outcome] = {}

    def sink(member: int, _call: int, outcome: Outcome) -> None:
        outcomes[member] = outcome

    frames = encode([[method, tuple(args), {}]])
    try:
        client.place(peers, "ctl", [frames] * len(peers), 1, deadline_s=timeout_s, sink=sink)
    except Unavailable:  # one of them went meanwhile: ask the others one by one
        if len(peers) == 1:
            return {}
        return {name: answer for peer in peers for name, answer in ask(client, [peer], method, args, timeout_s).items()}
    client.wait(lambda: len(outcomes) == len(peers), timeout_s + 1.0)
    return {
        peers[member].name: decode(outcome.payload)
        for member, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.OK and outcome.payload is not None
    }
