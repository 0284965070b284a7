"""Which rank answers a call: the least loaded that is healthy and has the weights that count. Pure.

A call whose rank is lost goes to another one; each time is an attempt of its own. A call that finds no rank waits, in
order, until one is fit again; it fails when its attempts are spent or no rank will ever be fit again.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Call", "Fail", "Go", "Presence", "Rank", "Routes"]


class Presence(enum.Enum):
    """Whether a rank takes calls.

    ``HERE``: it does. ``AWAY``: not now; it may be back. ``GONE``: it never will again.
    """

    HERE = "here"
    AWAY = "away"
    GONE = "gone"


@dataclass(eq=False)
class Rank:
    """What is known of a rank.

    Attributes:
        rank: Its number.
        presence: Whether it takes calls.
        incarnation: Its start, 0 where none was seen.
        stale: Why its weights do not count; empty while they do.
        version: The version it is known to hold.
        load: Calls it has.
        served: Turn of its latest call, which decides among equals.
        why: Why it is not here, in words.
    """

    rank: int
    presence: Presence = Presence.AWAY
    incarnation: int = 0
    stale: str = ""
    version: int = 0
    load: int = 0
    served: int = 0
    why: str = ""

    @property
    def fit(self) -> bool:
        """Whether it gets work."""
        return self.presence is Presence.HERE and not self.stale

    def __str__(self) -> str:
        if self.presence is not Presence.HERE:
            return f"rank {self.rank} is {self.presence.value}" + (f" ({self.why})" if self.why else "")
        return f"rank {self.rank} is STALE: {self.stale}" if self.stale else f"rank {self.rank} has {self.load} calls"


@dataclass(eq=False)
class Call:
    """One call that wants a rank. Changed by ``Routes`` alone.

    Attributes:
        rank: Where it is now, None while it waits.
        lost: Ranks that were lost under it, one entry per attempt.
    """

    rank: int | None = None
    lost: list[int] = field(default_factory=list)


class Go(NamedTuple):
    """Send the call to its ``rank``."""

    call: Call
    rank: int


class Fail(NamedTuple):
    """The call will get no rank (any more)."""

    call: Call
    why: str


class Routes:
    """Who has which call. Not thread-safe. An event returns what is to be done after it.

    Args:
        ranks: Number of ranks.
        attempts: How many ranks may be lost under one call before it fails.

    Attributes:
        ranks: What is known of each.
        updated: Weights or a version were given to ranks since they started, so that a new start lacks them.
    """

    def __init__(self, ranks: int, *, attempts: int = 3) -> None:
        self.ranks = [Rank(rank) for rank in range(ranks)]
        self.updated = False
        self._attempts = attempts
        self._waiting: deque[Call] = deque()
        self._turn = 0

    # -- calls ---------------------------------------------------------------------------------------------------------

    def ask(self, call: Call) -> list[Go | Fail]:
        """A call wants a rank."""
        self._waiting.append(call)
        return self._assign()

    def ended(self, call: Call) -> None:
        """A call needs no rank any more: it was answered, has failed or was cancelled."""
        self._leave(call)

    def lost(self, call: Call, *, counts: bool = True) -> list[Go | Fail]:
        """The rank of a call was lost before it answered.

        Args:
            call: Which.
            counts: Whether it was an attempt; False if nothing reached the rank.
        """
        rank = call.rank
        self._leave(call)
        if counts and rank is not None:
            call.lost.append(rank)
            if len(call.lost) >= self._attempts:
                ranks = ", ".join(map(str, call.lost))
                return [Fail(call, f"its rank was lost {len(call.lost)} times (ranks {ranks})"), *self._assign()]
        self._waiting.append(call)
        return self._assign()

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def observe(self, rank: int, presence: Presence, incarnation: int = 0, why: str = "") -> list[Go | Fail]:
        """A rank was seen.

        Args:
            rank: Which.
            presence: How.
            incarnation: Its start; 0 where there is none just now. Another one than before is a restart, which has
                none of the weights that were given since.
            why: Why it is not here.
        """
        one = self.ranks[rank]
        if incarnation and one.incarnation and incarnation != one.incarnation and self.updated:
            one.stale = "it was restarted and has no weights since"
        if incarnation:
            one.incarnation = incarnation
        one.presence, one.why = presence, why
        return self._assign()

    def mark_stale(self, rank: int, why: str) -> list[Go | Fail]:
        """The weights of a rank do not count: it gets no work until ``mark_current``."""
        self.ranks[rank].stale = why or "its weights are not current"
        self.updated = True
        return self._assign()

    def mark_current(self, rank: int, version: int, incarnation: int = 0) -> list[Go | Fail]:
        """A rank has the weights of ``version``.

        Args:
            rank: Which.
            version: Version of its weights.
            incarnation: The start that was given them; where it has been replaced, the rank stays STALE.
        """
        one = self.ranks[rank]
        self.updated = True
        if incarnation and one.incarnation and incarnation != one.incarnation:
            one.stale = "it was restarted and has no weights since"
            return self._assign()
        one.stale, one.version = "", version
        return self._assign()

    def all_current(self, version: int) -> None:
        """Every rank that is not STALE has the weights of ``version``."""
        self.updated = self.updated or version > 0
        for one in self.ranks:
            if not one.stale:
                one.version = version

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many calls wait for a rank."""
        return len(self._waiting)

    def stale(self) -> dict[int, str]:
        """Return why ranks are STALE, by rank."""
        return {one.rank: one.stale for one in self.ranks if one.stale}

    def unfit(self) -> str:
        """Say of each rank that gets no work why."""
        return "; ".join(str(one) for one in self.ranks if not one.fit)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _leave(self, call: Call) -> None:
        if call.rank is not None:
            self.ranks[call.rank].load -= 1
            call.rank = None
        elif call in self._waiting:
            self._waiting.remove(call)

    def _assign(self) -> list[Go | Fail]:
        done: list[Go | Fail] = []
        while self._waiting:
            fit = [one for one in self.ranks if one.fit]
            if not fit:
                break
            call = self._waiting.popleft()
            best = min(fit, key=lambda one: (call.lost.count(one.rank), one.load, one.served))
            self._turn += 1
            best.load += 1
            best.served = self._turn
            call.rank = best.rank
            done.append(Go(call, best.rank))
        if self._waiting and all(one.presence is Presence.GONE for one in self.ranks):
            why = f"no rank is left: {self.unfit()}"
            done += [Fail(call, why) for call in self._waiting]
            self._waiting.clear()
        return done
