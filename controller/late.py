"""Calls that take too long: which ranks have not answered, in which method, since when, and where they are.

A rank is STUCK when its part of a call runs longer than ``rpc.stuck_after`` and longer, by ``rpc.stuck_factor``, than
the same method has ever taken; or, some seconds at least, longer by that factor than the ranks that have answered the
same call. STUCK is a word in the log with the rank's stacks, and nothing else: nobody is killed for it (P9).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from controller.outcomes import spans
from controller.places import fold
from controller.stacks import Dump, Stacks
from zbus.registry.records import WorkerRecord

__all__ = ["Late", "LateCall", "Patience"]

log = logging.getLogger("zbus.members")

_LOOK_S: Final = 0.5
_LEAST_S: Final = 10.0
"""A rank is never stuck by comparison with its peers before this many seconds (or ``stuck_after``, if less)."""

_GAP_S: Final = 5.0
"""Longer between two readings means that this process did not run: no call is late for that time."""

_RUNNING: Final = ("running", "sent, not confirmed")
"""A worker that holds the GIL from the start on cannot confirm that it runs the call."""


class LateCall(Protocol):
    """What is read of a call that is out; see ``controller.placement.Placement``."""

    @property
    def order(self) -> Any:
        """What was placed."""
        ...

    @property
    def slots(self) -> Any:
        """Who has answered."""
        ...

    def late(self, call: int) -> dict[int, str]:
        """Say of each rank that has not answered how far it is."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """When a rank is stuck.

    Attributes:
        after_s: Seconds that any call may run.
        factor: How much longer than its peers, or than ever before, a call may run.
    """

    after_s: float = 60.0
    factor: float = 3.0

    @property
    def least_s(self) -> float:
        """Return the seconds before which no rank is stuck, however quick its peers were."""
        return min(_LEAST_S, self.after_s)


@dataclass
class _Seen:
    """What has been noticed of one call that is out."""

    began: float
    role: str
    methods: tuple[str, ...]
    call: int = 0
    call_began: float = 0.0
    answered: int = 0
    slowest_s: float = 0.0
    next_s: float = 0.0
    asked: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Role and method of the call that runs now."""
        return self.role, self.methods[self.call]


class _AwakeTime:
    """Seconds in which this process ran: a monotonic clock without the time it was stopped. Any thread; read often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: float | None = None
        self._asleep = 0.0

    def now(self) -> float:
        with self._lock:
            now = time.monotonic()
            if self._last is not None and now - self._last > _GAP_S:
                self._asleep += now - self._last
            self._last = now
            return now - self._asleep


class Late:
    """Watches the calls of all roles. ``began`` and ``ended`` may be called from any thread and under any lock.

    Args:
        stacks: Takes stacks.
        patience: When a rank is stuck.
        record_of: Returns the record of a connected rank, None where it has none (any more).
        unwatched: Returns the calls that are out for so many seconds without ``began``; their ``look`` says it.
    """

    def __init__(
        self,
        stacks: Stacks,
        patience: Patience,
        record_of: Callable[[Any], WorkerRecord | None],
        unwatched: Callable[[float], Iterable[Any]] = lambda _: (),
    ) -> None:
        self._unwatched = unwatched
        self.stacks = stacks
        self._patience = patience
        self._record_of = record_of
        self._calls: dict[int, tuple[LateCall, float]] = {}
        self._seen: dict[int, _Seen] = {}
        self._longest: dict[tuple[str, str], float] = {}
        self._time = _AwakeTime()
        self._looked = 0.0

    # -- calls ---------------------------------------------------------------------------------------------------------

    def began(self, call: LateCall) -> None:
        """A call is out."""
        self._calls[id(call)] = (call, self._time.now())

    def ended(self, call: LateCall) -> None:
        """Every rank's outcome is known."""
        self._calls.pop(id(call), None)

    # -- stacks of ranks that are late ---------------------------------------------------------------------------------

    def ask(self, peer: Any) -> None:
        """Have the stacks of a rank taken. Never waits."""
        record = self._record_of(peer)
        if record is not None:
            self.stacks.ask(record)

    def where(self, peers: Mapping[int, Any], timeout_s: float) -> dict[int, Dump]:
        """Return where ranks are, by their key in ``peers``; waits up to ``timeout_s``. Not under a lock."""
        records = {key: record for key, peer in peers.items() if (record := self._record_of(peer)) is not None}
        dumps = self.stacks.take(records.values(), timeout_s)
        return {key: dumps[one.incarnation] for key, one in records.items() if one.incarnation in dumps}

    def close(self) -> None:
        """Stop taking stacks."""
        self._calls.clear()
        self.stacks.close()

    # -- stuck ranks ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look for stuck ranks, twice a second at most; never waits. On the members thread, at least once a second."""
        now = self._time.now()
        if now - self._looked < _LOOK_S:
            return
        before, self._looked = self._looked, now
        for unwatched in self._unwatched(_LOOK_S):
            unwatched.look()
        out = dict(self._calls)
        for key, seen in list(self._seen.items()):
            if key not in out or out[key][1] != seen.began:  # ended; another may have its id by now
                if seen.call < len(seen.methods):
                    self._learn(seen, before)
                del self._seen[key]
        for key, (call, began) in out.items():
            order = call.order
            if now - began >= _LOOK_S and not order.streams:  # a stream may flow for as long as it likes
                seen = self._seen.setdefault(
                    key, _Seen(began, order.roster.role, tuple(order.methods), call_began=began)
                )
                self._look_at(call, seen, now)

    def _look_at(self, call: LateCall, seen: _Seen, now: float) -> None:
        slots, order = call.slots, call.order
        while seen.call < slots.calls and slots.settled(seen.call):
            self._learn(seen, now)
        if seen.call >= slots.calls:
            return
        age = now - seen.call_began
        answered = len(order.ranks) - len(slots.missing(seen.call))
        if answered != seen.answered:
            seen.answered, seen.slowest_s = answered, age
        if age < max(self._limit_s(seen), seen.next_s):
            return
        late = {rank: words for rank, words in call.late(seen.call).items() if words.startswith(_RUNNING)}
        peers = {rank: peer for rank, peer in zip(order.ranks, order.peers, strict=False) if rank in late}
        if not seen.asked:  # and tell it next time, when the stacks are here
            for peer in peers.values():
                self.ask(peer)
            seen.asked = bool(peers)
            return
        seen.asked, seen.next_s = False, 2 * age
        if peers:
            others = f"; {seen.answered} others took at most {seen.slowest_s:.0f} s" if seen.answered else ""
            words = unanswered(seen.role, order.methods[seen.call], late, age)
            log.warning("%s", f"stuck: {words}{others}{places(seen.role, self._known(peers))}")

    def _known(self, peers: Mapping[int, Any]) -> dict[int, Dump]:
        found = {rank: self.stacks.get(peer.incarnation, 0.0) for rank, peer in peers.items()}
        return {rank: dump for rank, dump in found.items() if dump is not None}

    def _learn(self, seen: _Seen, now: float) -> None:
        """Keep how long a call took that all ranks have answered; begin with the next of its batch."""
        self._longest[seen.key] = max(self._longest.get(seen.key, 0.0), now - seen.call_began)
        seen.call, seen.call_began = seen.call + 1, now
        seen.answered, seen.slowest_s, seen.next_s, seen.asked = 0, 0.0, 0.0, False

    def _limit_s(self, seen: _Seen) -> float:
        patience = self._patience
        limit = max(patience.after_s, patience.factor * self._longest.get(seen.key, 0.0))
        if seen.answered:
            limit = min(limit, max(patience.least_s, patience.factor * seen.slowest_s))
        return limit


def unanswered(role: str, method: str, ranks: Iterable[int], age_s: float | None) -> str:
    """Say who has not answered, in which method, since when."""
    told = sorted(ranks)
    have = "has" if len(told) == 1 else "have"
    since = "" if age_s is None else f" for {age_s:.1f} s"
    return f"{role}/{spans(told)} {have} not answered `{method}`{since}"


def places(role: str, dumps: Mapping[int, Dump]) -> str:
    """Say where ranks are, those at one place together, a line each; the file of stacks of the first of each."""
    lines = []
    for ranks, place in fold({rank: dump.place for rank, dump in dumps.items()}):
        path = dumps[ranks[0]].path
        lines.append(f"\n  {role}/{spans(ranks)} in {place}" + (f"; all threads in {path}" if path else ""))
    return "".join(lines)
