"""The ranks of a rollout role, as the routes see them: who is there, and one call to one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from controller.group import Group
from controller.placer import is_dead, is_ready
from controller.rollouts.routing import Presence
from zbus.engine import AnyOne, EndpointSpec
from zbus.errors import ConfigError, Fenced, NotExecuted, OutcomeUnknown, TransportError, Unavailable
from zbus.retry import RetryPolicy

__all__ = ["BusRanks", "RankLost", "Ranks", "Sight", "any_one"]

_NOW_OR_NOT: Final = RetryPolicy(attempts=1, budget_s=0.0)
"""A rank that comes back has other weights, so no call waits for it: the routes choose anew."""


class Sight(NamedTuple):
    """How a rank looks now.

    Attributes:
        presence: Whether it takes calls.
        incarnation: Its start; 0 where there is none just now.
        why: Why it is not here.
    """

    presence: Presence
    incarnation: int
    why: str


class RankLost(Exception):
    """The rank of a call went before it answered, and another may be asked; the bus's error is the cause.

    Attributes:
        reached: Whether the call may have reached it.
    """

    def __init__(self, why: str, *, reached: bool) -> None:
        super().__init__(why)
        self.reached = reached


class Ranks(Protocol):
    """What the driver needs of ranks. Used on the driver's loop."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def look(self) -> Sequence[Sight]:
        """Return how each looks now, in rank order."""
        ...

    async def call(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an endpoint of one rank.

        Raises:
            RankLost: It went before it answered, and the call may be made elsewhere.
        """
        ...


class BusRanks:
    """Ranks of a group, called over the bus.

    Args:
        group: The whole role.
        deadline_s: Of each call, in seconds; None: the endpoint's own.
    """

    def __init__(self, group: Group, deadline_s: float | None = None) -> None:
        self._roster = group.roster
        self._ranks = [group[rank].options(deadline=deadline_s, retries=_NOW_OR_NOT) for rank in range(len(group))]

    def __len__(self) -> int:
        return len(self._ranks)

    def look(self) -> list[Sight]:
        """Return how each looks now."""
        return [self._sight(peer) for peer in self._roster.peers()]

    def _sight(self, peer: Any) -> Sight:
        if is_ready(peer):
            return Sight(Presence.HERE, peer.incarnation, "")
        why = f"{peer.state.value}: {peer.evidence}".rstrip(": ")
        if is_dead(peer) and not self._roster.will_return(peer):
            return Sight(Presence.GONE, peer.incarnation, why)
        return Sight(Presence.AWAY, peer.incarnation, why)

    async def call(self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an endpoint of one rank; see ``Ranks.call``."""
        endpoint = getattr(self._ranks[rank], method)
        before = self._roster.peers()[rank].incarnation
        try:
            value = await endpoint.aio(*args, **kwargs)
        except Fenced:
            raise
        except TransportError as error:  # the bus was closed since this rank was chosen
            raise RankLost(str(error), reached=False) from error
        except (Unavailable, NotExecuted, OutcomeUnknown) as error:
            if not _may_move(error, endpoint.spec):
                raise
            raise RankLost(str(error), reached=not isinstance(error, Unavailable)) from error
        if self._roster.peers()[rank].incarnation != before and endpoint.spec.effect == "pure":
            why = f"rank {rank} was restarted meanwhile, so which weights answered is not known"
            raise RankLost(why, reached=True)
        return value


def _may_move(error: Unavailable | NotExecuted | OutcomeUnknown, spec: EndpointSpec) -> bool:
    """Tell whether a call that ended so may be made on another rank: it did not run, or a second run does no harm."""
    if error.reason in {"deadline", "cancelled"}:
        return False
    return spec.effect == "pure" or not isinstance(error, OutcomeUnknown)


def any_one(group: Group, endpoint: str) -> EndpointSpec:
    """Return the declaration of an endpoint whose calls may go to any rank.

    Raises:
        AttributeError: The role has no such endpoint.
        ConfigError: It is declared otherwise.
    """
    spec: EndpointSpec = getattr(group, endpoint).spec
    if not isinstance(spec.dispatch, AnyOne):
        msg = f"endpoint `{endpoint}` of role {group.role!r} is not AnyOne, so rollouts cannot be spread"
        raise ConfigError(msg, hint="declare it with AnyOne()")
    return spec
