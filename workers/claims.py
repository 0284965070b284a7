"""Which agent runs which rank: claims in the registry, and whether a holder still lives.

Every start of a rank is claimed before its process exists, so two agents never run one rank. A claim outlives its
agent; whether it still binds is judged by the agent's process on this host, else by its lease counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from zbus.errors import RankClaimed
from zbus.registry.identity import pid_space
from zbus.registry.records import RankClaim, Records
from zbus.registry.watch import lease_moves
from zbus.runtime.processes import is_alive

__all__ = ["Claimant", "claim_free_ranks", "claim_start", "holder_lives", "replaced_by"]


_TOGETHER: Final = 8


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


def claim_start(records: Records, me: Claimant, rank: int, *, after: int | None = None) -> int:
    """Claim the next start of ``rank`` and return its number (0, 1, …).

    Args:
        records: The registry.
        me: Who claims.
        rank: Which rank.
        after: The newest start that this agent has claimed of the rank, so that the claims of all ranks need not be
            read; None: it has none yet.

    Raises:
        RankClaimed: A living agent holds the rank; both agents are named.
        RegistryError: The registry cannot be used.
    """
    if after is None:
        return _claim_next(records, me, rank, _newest(records, me.role).get(rank))
    return _claim_next(records, me, rank, _claim_of(me, rank, after))


def _claim_of(me: Claimant, rank: int, start: int) -> RankClaim:
    return RankClaim(role=me.role, rank=rank, start=start, agent=me.agent, host=me.host, pid=me.pid)


def _claim_next(records: Records, me: Claimant, rank: int, newest: RankClaim | None) -> int:
    """Claim the start after ``newest``, or after what stands there by now."""
    while True:
        if newest is not None and newest.agent != me.agent and holder_lives(records, newest):
            raise _refuse(me, newest)
        start = 0 if newest is None else newest.start + 1
        mine = _claim_of(me, rank, start)
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
    newest = _newest(records, me.role)
    for rank in range(world_size):
        if len(found) == count:
            break
        try:
            found[rank] = _claim_next(records, me, rank, newest.get(rank))
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
    newest = _newest(records, me.role)
    # Each claim waits for the disk; those that wait together share its work.
    with ThreadPoolExecutor(min(len(ranks), _TOGETHER) or 1, "zbus-claims") as pool:
        return dict(
            zip(ranks, pool.map(lambda rank: _claim_next(records, me, rank, newest.get(rank)), ranks), strict=True)
        )
