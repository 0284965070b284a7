"""Rosters of a guest: the workers that live now, asked for their engine's endpoints over ``ctl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.placer import WorkerFacts
from controller.scheduling.api import live_workers
from zbus.codec import decode, encode
from zbus.engine import EndpointSpec, Mesh, table_from_wire
from zbus.errors import StartupError
from zbus.ids import WorkerName
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.registry.records import Records
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["GuestRoster"]


@dataclass
class GuestRoster:
    """One role as a guest sees it; fixed at the time of ``connect``."""

    role: str
    mesh: Mesh
    members: list[Peer]
    table: dict[str, EndpointSpec] = field(default_factory=dict)

    def peers(self) -> Sequence[Any]:
        """Return the workers in rank order."""
        return self.members

    def endpoints(self) -> Mapping[str, EndpointSpec]:
        """Return the endpoint table of the role's engine."""
        return self.table

    def facts(self, peer: Any) -> WorkerFacts:
        """Return what the worker said of itself."""
        return WorkerFacts(host=peer.welcome.get("host"), pid=peer.welcome.get("pid"))

    def will_return(self, peer: Any) -> bool:
        """A guest follows nobody's restart."""
        return False

    @classmethod
    def connect(cls, client: Client, records: Records, timeout_s: float) -> dict[str, GuestRoster]:
        """Connect to every live worker and learn the engines' endpoints.

        Raises:
            StartupError: A role has fewer live workers than ranks, or some do not answer.
        """
        rosters = {}
        for job in records.jobs():
            live = live_workers(records, job.role)
            absent = [f"{job.role}/{rank}" for rank in range(job.world_size) if rank not in live]
            if absent:
                msg = f"{', '.join(absent)} is not running, so {job.role} cannot be attached to"
                raise StartupError(msg, hint="zbus-controller status shows what runs")
            peers = [
                client.connect(
                    WorkerName(job.role, rank),
                    live[rank].incarnation,
                    {"main": live[rank].main, "ctl": live[rank].ctl},
                )
                for rank in range(job.world_size)
            ]
            rosters[job.role] = cls(job.role, Mesh.of(job.mesh or None, job.world_size), peers)
        everyone = [peer for roster in rosters.values() for peer in roster.members]
        if not client.wait(lambda: all(peer.state is PeerState.READY for peer in everyone), timeout_s):
            late = {str(p.name): f"{p.state.value}: {p.evidence}" for p in everyone if p.state is not PeerState.READY}
            msg = f"{', '.join(late)} did not answer within {timeout_s:g} s"
            raise StartupError(msg, facts=late)
        for roster in rosters.values():
            roster.table = _describe(client, roster.members[0], timeout_s)
        return rosters


def _describe(client: Client, peer: Peer, timeout_s: float) -> dict[str, EndpointSpec]:
    found: list[Outcome] = []
    frames = encode([["zbus.describe", (), {}]])
    client.place([peer], "ctl", [frames], 1, deadline_s=timeout_s, sink=lambda _m, _c, outcome: found.append(outcome))
    client.wait(lambda: bool(found), timeout_s + 1.0)
    if not found or found[0].kind is not OutcomeKind.OK or found[0].payload is None:
        msg = f"{peer.name} did not describe its engine"
        raise StartupError(msg)
    return dict(table_from_wire(decode(found[0].payload)["endpoints"]))
