"""The slots of one placed batch: one outcome per (member, call), and who failed first.

Pure: no clocks, threads or sockets. The owner guards it with a lock; every method is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from zbus.protocol.messages import Outcome, OutcomeKind

__all__ = ["BatchSlots", "Failure", "causes"]


_OK: Final = OutcomeKind.OK


class Failure(NamedTuple):
    """One slot that ended other than OK; ``order`` counts arrivals within the batch from 0."""

    member: int
    call: int
    outcome: Outcome
    order: int


class BatchSlots:
    """One slot per member and call; each is filled once.

    Args:
        members: How many workers hold the batch.
        calls: How many calls it has.

    Attributes:
        failed: Whether some slot ended other than OK.
        row: What the first member's slots hold: the body of a result that came with others, or an outcome, or None.
    """

    __slots__ = (
        "_arrivals", "_attempts", "_came", "_members", "_open", "_open_calls", "_slots", "calls", "failed", "row"
    )  # fmt: skip

    #: for each member, one entry per call: None while it is open, the body of a result that came with others, or the
    #: outcome; bodies of one member have one number of attempts
    _slots: list[list[Outcome | bytes | None]]
    #: (member, first call, calls, how many came before) of each arrival
    _arrivals: list[tuple[int, int, int, int]]

    def __init__(self, members: int, calls: int) -> None:
        self._members = members
        self.calls = calls
        self._slots = [[None] * calls for _ in range(members)]
        self.row = self._slots[0]
        self._open = members * calls
        self._open_calls = [members] * calls if members > 1 else None  # of one member, its slots tell
        self._arrivals = []
        self._came = 0
        self._attempts = 1
        self.failed = False

    def fill(self, member: int, call: int, outcome: Outcome) -> bool:
        """Take an outcome; False if the slot was filled before (the first one stands)."""
        row = self._slots[member]
        if row[call] is not None:
            return False
        row[call] = outcome
        if outcome.kind is not _OK:
            self.failed = True
        self._open -= 1
        if self._open_calls is not None:
            self._open_calls[call] -= 1
        self._arrivals.append((member, call, 1, self._came))
        self._came += 1
        return True

    def fill_together(self, member: int, call: int, bodies: Sequence[bytes], attempts: int) -> bool:
        """Take the results of consecutive calls of one member, OK each; False, and nothing taken, if one was filled.

        Args:
            member: Whose.
            call: The first of them.
            bodies: The encoded result of each, one frame without buffers.
            attempts: See ``Outcome``.
        """
        row, end = self._slots[member], call + len(bodies)
        if row[call:end].count(None) != len(bodies) or (attempts != self._attempts and self._came):
            return False
        self._attempts = attempts
        row[call:end] = bodies
        self._open -= len(bodies)
        if self._open_calls is not None:
            for one in range(call, end):
                self._open_calls[one] -= 1
        self._arrivals.append((member, call, len(bodies), self._came))
        self._came += len(bodies)
        return True

    def outcome(self, member: int, call: int) -> Outcome | None:
        """Return what a slot holds."""
        held = self._slots[member][call]
        return Outcome(_OK, (held,), attempts=self._attempts) if type(held) is bytes else held  # type: ignore[return-value]  # the other two

    def settled(self, call: int | None = None) -> bool:
        """Tell whether every slot (of one call) is filled."""
        if call is None:
            return self._open == 0
        return self.row[call] is not None if self._open_calls is None else self._open_calls[call] == 0

    def missing(self, call: int) -> list[int]:
        """Return the members that have not answered a call."""
        return [member for member, row in enumerate(self._slots) if row[call] is None]

    def arrivals(self, call: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (position, member) of a call's outcomes in order of arrival, from a position on."""
        for position in range(start, len(self._arrivals)):
            member, first, calls, _ = self._arrivals[position]
            if first <= call < first + calls:
                yield position, member

    def failures(self, call: int | None = None) -> list[Failure]:
        """Return the slots that ended other than OK, in order of arrival."""
        found: list[Failure] = []
        if not self.failed:
            return found
        for member, of, calls, order in self._arrivals:
            outcome = self._slots[member][of] if calls == 1 else None
            if type(outcome) is Outcome and outcome.kind is not _OK and call in (None, of):
                found.append(Failure(member, of, outcome, order))
        return found


_CLASS: Final = {
    "worker_exit": 0,
    "lease": 1,
    "superseded": 0,
    "fenced": 2,
    "deadline": 3,
    "evicted": 3,
    "protocol": 3,
    "shutdown": 4,
    "not_sent": 4,
    "predecessor": 5,
    "gang": 5,
    "cancelled": 6,
}


def causes(
    failures: Sequence[Failure], is_echo: Callable[[Failure], bool] = lambda _failure: False
) -> tuple[Failure, ...]:
    """Order failures root first.

    A worker's own error or death comes before what only follows from another's: errors that look like the echo of a
    lost peer in a collective, leases and deadlines running out, successors of a failed call, cancellations. Within a
    class the earlier arrival comes first.

    Args:
        failures: In any order.
        is_echo: Tells whether an application error looks like the echo of another rank's failure.
    """

    def place(failure: Failure) -> tuple[int, int]:
        if failure.outcome.is_error and failure.outcome.reason in ("", "refused"):
            return (1 if is_echo(failure) else 0), failure.order
        return _CLASS.get(failure.outcome.reason, 3), failure.order

    return tuple(sorted(failures, key=place))
