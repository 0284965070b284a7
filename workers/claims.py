"""Which agent runs which rank: claims in the registry, and whether a holder still lives.

Every start of a rank is claimed before its process exists, so two agents never run one rank. A claim outlives its
agent; whether it still binds is judged by the agent's process on this host, else by its lease counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zbus.errors import RankClaimed
from zbus.registry.identity import pid_space
from zbus.registry.records import RankClaim, Records
from zbus.registry.watch import lease_moves
from zbus.runtime.processes import is_alive

__all__ = ["Claimant", "claim_free_ranks", "claim_start", "holder_lives", "replaced_by"]


class Claimant(msgspec.Struct, frozen=True):
    """The agent that claims: its id, role, host and pid."""

    agent: str
    role: str
    host: str
    pid: int


def holder_lives(records: Records, claim: RankClaim) -> bool:
    """Tell whether the agent that made ``claim`` still runs. Blocks up to a lease time for agents of other hosts."""
    record = records.agent(claim.agent)
    if record is None:
        return False  # agents publish themselves before they claim and withdraw when they end
    if record.pid_space == pid_space():
        return is_alive(record.pid, record.pid_start)
    return lease_moves(records, claim.agent)  # on another host, or in a container of this kernel


def _newest(records: Records, role: str) -> dict[int, RankClaim]:
    return {claim.rank: claim for claim in records.rank_claims(role)}  # sorted by rank, then start


def _refuse(me: Claimant, claim: RankClaim) -> RankClaimed:
    return RankClaimed(
        f"{claim.role}/{claim.rank} is already run by another agent",
        facts={
            "held by": f"agent {claim.agent}, host {claim.host}, pid {claim.pid}",
            "claimed by": f"agent {me.agent}, host {me.host}, pid {me.pid}",
        },
        hint="give each agent its own --rank, or stop the other one",
    )


def claim_start(records: Records, me: Claimant, rank: int) -> int:
    """Claim the next start of ``rank`` and return its number (0, 1, …).

    Raises:
        RankClaimed: A living agent holds the rank; both agents are named.
        RegistryError: The registry cannot be used.
    """
    newest = _newest(records, me.role).get(rank)
    while True:
        if newest is not None and newest.agent != me.agent and holder_lives(records, newest):
            raise _refuse(me, newest)
        start = 0 if newest is None else newest.start + 1
        mine = RankClaim(role=me.role, rank=rank, start=start, agent=me.agent, host=me.host, pid=me.pid)
        newest = records.claim_rank(mine)
        if newest == mine:
            return start


def replaced_by(records: Records, role: str, starts: Mapping[int, int], agent: str) -> dict[int, RankClaim]:
    """Return, by rank, the claims of other agents to the next start: these ranks have been given to somebody else.

    Args:
        records: The registry.
        role: The role.
        starts: The ranks that ``agent`` runs, with the number of their start.
        agent: Who asks; its own claims are no replacement.

    Raises:
        RegistryError: The registry cannot be read: then nobody is known to be replaced.
    """
    found = {}
    for rank, start in starts.items():
        claim = records.rank_claim(role, rank, start + 1)
        if claim is not None and claim.agent != agent:
            found[rank] = claim
    return found


def claim_free_ranks(records: Records, me: Claimant, world_size: int, count: int) -> dict[int, int]:
    """Claim ``count`` ranks that nobody holds, lowest first, and return their starts by rank.

    Raises:
        RankClaimed: Fewer than ``count`` ranks are free; a holder is named.
    """
    found: dict[int, int] = {}
    refusals: list[RankClaimed] = []
    for rank in range(world_size):
        if len(found) == count:
            break
        try:
            found[rank] = claim_start(records, me, rank)
        except RankClaimed as error:
            refusals.append(error)
    if len(found) < count:
        held = refusals[0]
        msg = f"{me.role} has {world_size} ranks and {len(refusals)} are taken: no room for {count} more"
        raise RankClaimed(msg, facts=held.facts, hint=held.hint)
    return found


def claim_ranks(
    records: Records, me: Claimant, *, ranks: Sequence[int] | None, world_size: int, count: int
) -> dict[int, int]:
    """Claim the given ranks, or any ``count`` free ones, and return their starts by rank.

    Raises:
        RankClaimed: A rank is held by a living agent.
    """
    if ranks is None:
        return claim_free_ranks(records, me, world_size, count)
    return {rank: claim_start(records, me, rank) for rank in ranks}
