"""The start of a call on several workers at once: it begins on none until all of them hold it.

Each member's request goes through its lane like any other, but its callee stops before the start and says so
(``Poised``). When every member has said it, and every member is connected, the gang is *released*: GO to all of them.
Whatever ends a member before that (a death, a deadline, a cancel, a refusal) ends all, and nothing ran anywhere: the
caller alone gives GO, so it knows. After the release the members are calls like any other, each with its own outcome;
a member that dies between the release and its start is the one case in which some run and one does not.

Pure: no clocks or locks; one mutator at a time. The shell executes the effects it is handed, member by member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zbus.protocol.caller import CallerLane
from zbus.protocol.messages import Effect, Outcome, OutcomeKind

__all__ = ["Gang", "Step"]

_NEVER: Final = 1 << 62
_COMMON: Final = ("deadline", "cancelled")
"""Reasons that hold for every member by themselves."""

_UNSTARTED: Final = (OutcomeKind.NOT_EXECUTED, OutcomeKind.CANCELLED)
"""Outcomes that may do so too: one that has begun, or says so, speaks for itself alone."""


class Step(NamedTuple):
    """What one member's lane asks for."""

    member: int
    effects: list[Effect]


class Gang:
    """One request's start on all its members.

    Args:
        lanes: The lane of each member.
        seqs: First place of the request in each.
        names: What each member is called, for evidence.
        deadline_ns: When it is too late to start, or None; the caller's monotonic clock.
    """

    __slots__ = ("_deadline_ns", "_lanes", "_names", "_poised", "_seqs", "over", "released")

    def __init__(
        self, lanes: Sequence[CallerLane], seqs: Sequence[int], names: Sequence[str], deadline_ns: int | None
    ) -> None:
        self._lanes = lanes
        self._seqs = seqs
        self._names = names
        self._deadline_ns = _NEVER if deadline_ns is None else deadline_ns
        self._poised: set[int] = set()
        self.released = False
        self.over = False  # given up before the release

    def poised(self, member: int, now: int) -> list[Step]:
        """Take a member's word that it holds the request; release all when this was the last.

        A member whose connection is lost now could not be told, so its word counts again when it is back: the probe
        after its handshake makes it say so once more.
        """
        self._poised.add(member)
        if self.released or self.over or len(self._poised) < len(self._lanes):
            return []
        if now >= self._deadline_ns or not all(lane.connected for lane in self._lanes):
            return []  # too late: the lanes' own timers are about to say so
        self.released = True
        return [
            Step(index, lane.release(seq, now))
            for index, (lane, seq) in enumerate(zip(self._lanes, self._seqs, strict=True))
        ]

    def ended(self, member: int, outcome: Outcome, now: int) -> list[Step]:
        """Take a member's outcome; before the release it ends all the others, unstarted."""
        if self.released or self.over:
            return []
        self.over = True
        if outcome.reason not in _COMMON or outcome.kind not in _UNSTARTED:
            why = outcome.evidence or outcome.reason
            words = f"it had not begun on any rank when {self._names[member]} was out: {why}"
            outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, "gang", words)
        return [
            Step(index, lane.abandon(seq, outcome, now))
            for index, (lane, seq) in enumerate(zip(self._lanes, self._seqs, strict=True))
            if index != member
        ]
