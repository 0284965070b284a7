"""Fresh processes for the ranks of a role: asked of its agents, which hold the processes, over ``ctl``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zbus.codec import encode
from zbus.errors import ZbusError
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.registry.records import AgentRecord, JobRecord, Records
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["ask_restart"]

_ANSWER_S: Final = 2.0


def ask_restart(client: Client, records: Records, job: JobRecord, *, but: str = "") -> list[str]:
    """Have the agents of a role replace the processes of their ranks; return the agents that agreed. Blocks briefly.

    Args:
        client: Whose epoch and sockets to use; the session is a new one, since an agent remembers places.
        records: Names the agents.
        job: The role; under ``restart="all"`` an agent replaces all of its ranks when asked for one.
        but: Leave this agent alone.

    Raises:
        RegistryError: The agents are not known.
    """
    agents = [one for one in records.agents(job.role) if one.ctl and one.ranks and one.agent != but]
    if not agents:
        return []
    asker = Client(session=new_session(), epoch=client.epoch, factory=client.factory)
    try:
        peers = [asker.connect(WorkerName(one.agent, 0), 0, {"ctl": one.ctl}) for one in agents]
        asker.wait(lambda: all(peer.state is PeerState.READY for peer in peers), _ANSWER_S)
        answers: list[tuple[str, bool]] = []
        asked = 0
        for one, peer in zip(agents, peers, strict=True):
            ranks = one.ranks[:1] if job.restart == "all" else one.ranks
            asked += sum(_ask(asker, peer, one, rank, answers) for rank in ranks)
        asker.wait(lambda: len(answers) == asked, _ANSWER_S)
        refused = {agent for agent, agreed in answers if not agreed}
        return sorted({agent for agent, _ in answers} - refused)
    finally:
        asker.close()


def _ask(asker: Client, peer: Peer, agent: AgentRecord, rank: int, answers: list[tuple[str, bool]]) -> bool:
    def sink(_member: int, _call: int, outcome: Outcome) -> None:
        answers.append((agent.agent, outcome.kind is OutcomeKind.OK))

    frames: Sequence[bytes] = encode([["zbus.restart", (rank,), {}]])  # type: ignore[assignment]  # one short frame
    try:
        asker.place([peer], "ctl", [frames], 1, deadline_s=_ANSWER_S, sink=sink)
    except ZbusError:  # it does not answer
        return False
    return True
