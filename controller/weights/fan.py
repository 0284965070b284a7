"""One call to each of several ranks, every rank for itself: who does not answer in time is named and left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from controller.futures import BatchFuture
from controller.group import Group
from zbus.errors import BatchError, CallError, Fenced, ZbusError
from zbus.retry import RetryPolicy

__all__ = ["NOW", "Answers", "ask", "here", "ranks_of", "reason", "tell"]

log = logging.getLogger("zbus.weights")

NOW: Final = RetryPolicy(attempts=1, budget_s=0.0)
"""A rank that comes back is another one: no call of an update waits for it, and none is made twice."""


class Answers(NamedTuple):
    """What came back.

    Attributes:
        values: Answers by rank.
        errors: By rank, why there is none.
    """

    values: dict[int, Any]
    errors: dict[int, Exception]

    @property
    def missing(self) -> dict[int, str]:
        """Return the errors in words."""
        return {rank: reason(error) for rank, error in self.errors.items()}


def here(group: Group) -> dict[int, int]:
    """Return the ranks that take calls now, with their incarnations."""
    return {peer.name.rank: peer.incarnation for peer in group.roster.peers() if peer.state.name == "READY"}


def reason(error: BaseException) -> str:
    """Say in one line why a call failed, with the place of the engine where that is known."""
    if isinstance(error, BatchError):
        error = error.root
    text = " ".join(str(error).split("\n", 1)[0].split())
    at = error.facts.get("at") if isinstance(error, CallError) else None
    return f"{text}; it is in {at}" if at else text


def ask(
    group: Group, ranks: Iterable[int], method: str, args: Sequence[Any] | Mapping[int, Sequence[Any]], limit_s: float
) -> Answers:
    """Call an endpoint of each rank and wait for all of them.

    Args:
        group: The whole role.
        ranks: Who is called.
        method: The endpoint.
        args: Of each call, or by rank.
        limit_s: Deadline of each call, in seconds; they run at once.

    Raises:
        Fenced: Another controller has taken over.
    """
    futures: dict[int, BatchFuture[Any]] = {}
    answers = Answers({}, {})
    for rank in ranks:
        endpoint = getattr(group[rank].options(deadline=limit_s, retries=NOW), method)
        own = args[rank] if isinstance(args, Mapping) else args
        try:
            futures[rank] = endpoint.submit(*own)
        except Fenced:
            raise
        except ZbusError as error:
            answers.errors[rank] = error
    for rank, future in futures.items():
        try:
            answers.values[rank] = future.result()
        except Fenced:
            raise
        except (ZbusError, BatchError) as error:
            answers.errors[rank] = error
    return answers


def tell(group: Group, ranks: Iterable[int], method: str, args: Sequence[Any], limit_s: float) -> None:
    """Call an endpoint of each rank and wait for none: its later calls come after this one anyway.

    Raises:
        Fenced: Another controller has taken over.
    """
    for rank in ranks:
        try:
            getattr(group[rank].options(deadline=limit_s, retries=NOW), method).submit(*args)
        except Fenced:
            raise
        except ZbusError as error:
            log.info("%s/%d was not told to `%s`: %s", group.role, rank, method, reason(error))


def ranks_of(role: str, missing: Mapping[int, str]) -> str:
    """Write who is missing and why."""
    return "; ".join(f"{role}/{rank}: {why}" for rank, why in sorted(missing.items()))
