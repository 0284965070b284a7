"""Asking running ranks what they do, as a guest: own session, epoch 0, only the ``ctl`` lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbus.registry.records import WorkerRecord

__all__ = ["ask_status"]


def ask_status(workers: Sequence[WorkerRecord], timeout_s: float) -> dict[int, Mapping[str, Any]]:
    """Return ``zbus.status`` of each rank that answers within ``timeout_s``, by incarnation. Never raises for one.

    Works while the controller is stuck, and while engines run: workers answer ``ctl`` on a thread of their own.
    """
    from zbus import codec
    from zbus.ids import WorkerName, new_session
    from zbus.protocol.messages import Outcome, OutcomeKind
    from zbus.transport.client import Client, PeerState
    from zbus.transport.sockets import SocketFactory

    factory = SocketFactory()
    client = Client(session=new_session(), epoch=0, factory=factory, name="zbus-controller status")
    answers: dict[int, Mapping[str, Any]] = {}
    outcomes: dict[int, Outcome] = {}
    settled = (PeerState.READY, PeerState.DEAD)
    try:
        peers = [client.connect(WorkerName(w.role, w.rank), w.incarnation, {"ctl": w.ctl}) for w in workers if w.ctl]
        client.wait(lambda: all(peer.state in settled for peer in peers), timeout_s / 2)
        ready = [peer for peer in peers if peer.state is PeerState.READY]
        if ready:
            body = codec.encode([["zbus.status", (), {}]])

            def sink(member: int, _call: int, outcome: Outcome) -> None:
                outcomes[member] = outcome

            client.place(ready, "ctl", [body] * len(ready), 1, deadline_s=timeout_s / 2, sink=sink)
            client.wait(lambda: len(outcomes) == len(ready), timeout_s / 2)
        for member, outcome in outcomes.items():
            if outcome.kind is OutcomeKind.OK and outcome.payload is not None:
                answer = codec.decode(outcome.payload)
                if isinstance(answer, Mapping):
                    answers[ready[member].incarnation] = answer
    finally:
        client.close()
        factory.close()
    return answers
