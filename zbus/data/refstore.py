"""Which values a process keeps for whom, and when each may go. Pure: values are opaque, time is handed in.

Theory of operation. Whoever has a value kept is its *holder*: a caller's session, or the process itself. A holder names
each call whose results it has kept by a *claim*, a number of its own choice, before it knows what the call will make.
So it can let go of results that it never saw: of a call whose answer was lost, or that it gave up. A value goes when

- its holder releases its claim or its number (also before it is put: the claim is then remembered, and what comes is
  dropped at once),
- its holder is over: it said farewell, or a newer controller has taken its place,
- its holder was silent for longer than the lease. A holder is heard with every message it sends; no user has to renew.

A claim released before its value came is remembered until its holder is over, however silent: the call may wait behind
others for longer than the lease, and a value that came of it would be released by nobody.

Numbers are never used again, and the store has a random generation, so a stale handle never finds another value.

Events come in as methods, and each returns the values that are dropped by it; nothing else is an effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

__all__ = ["OWN", "Full", "Held", "Holding", "RefStore"]

OWN: Final = b""
"""The holder of what a process keeps for itself: it is never over and never silent."""

_REMEMBERED: Final = 4096
"""Reasons of drops that are remembered: the oldest go first."""

_EARLY: Final = 1 << 14
"""Claims of one holder that are remembered as released: those whose values came go first, then the oldest."""


class Held(msgspec.Struct, frozen=True):
    """One value that is kept.

    Attributes:
        number: Which value of this store.
        holder: For whom.
        claim: Which call of that holder made it; 0 for none.
        nbytes: Size in bytes.
        method: What made it.
        since_ns: Since when.
        value: The value, as its keeper has it.
    """

    number: int
    holder: bytes
    claim: int
    nbytes: int
    method: str
    since_ns: int
    value: Any


class _Holder(msgspec.Struct):
    heard_ns: int
    numbers: set[int] = msgspec.field(default_factory=set)
    # Claims released; those whose values came stand in front.
    early: OrderedDict[int, None] = msgspec.field(default_factory=OrderedDict)


class Holding(msgspec.Struct, frozen=True):
    """What one holder has here.

    Attributes:
        holder: Who.
        count, nbytes: How much.
        oldest_ns: Since when the oldest is kept.
        methods: Bytes by what made them, largest first.
    """

    holder: bytes
    count: int
    nbytes: int
    oldest_ns: int
    methods: tuple[tuple[str, int], ...]


class Full(Exception):  # an answer of the core, translated by the shell
    """There is no room for a value.

    Attributes:
        nbytes: What was to be kept.
        total, limit: What is kept, and may be.
        holdings: By whom, largest first.
    """

    def __init__(self, nbytes: int, total: int, limit: int, holdings: tuple[Holding, ...]) -> None:
        super().__init__(nbytes, total, limit)
        self.nbytes = nbytes
        self.total = total
        self.limit = limit
        self.holdings = holdings


class RefStore:
    """The values of one process. One mutator at a time.

    Args:
        generation: Which store this is: random, so that handles of another are told apart.
        limit: Most bytes kept at once.
        lease_ns: How long a silent holder keeps what it has.
        deaf_ns: A longer time between two ticks is no silence of the holders: nobody listened. None: any is.
    """

    #: by number: what is kept; ``total`` is the sum of its bytes
    values: dict[int, Held]
    #: by holder: when it was heard, and the numbers of its values; exactly those that have values or early claims
    holders: dict[bytes, _Holder]
    #: why values went that went lately
    gone: OrderedDict[int, str]

    def __init__(self, generation: int, limit: int, lease_ns: int, deaf_ns: int | None = None) -> None:
        self.generation = generation
        self.limit = limit
        self.lease_ns = lease_ns
        self.deaf_ns = deaf_ns
        self._ticked_ns: int | None = None
        self.total = 0
        self.values = {}
        self.holders = {}
        self.gone = OrderedDict()
        self._last = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def check(self, nbytes: int) -> None:
        """Make sure that there is room.

        Raises:
            Full: There is none.
        """
        if self.total + nbytes > self.limit or (nbytes == 0 and self.total >= self.limit):
            raise Full(nbytes, self.total, self.limit, self.holdings())

    def put(
        self, holder: bytes, claim: int, nbytes: int, value: Any, method: str, now_ns: int
    ) -> tuple[int, Sequence[Held]]:
        """Keep a value and return its number; it is dropped at once if its claim was released before.

        Raises:
            Full: There is no room; nothing has changed.
        """
        known = self.holders.get(holder)
        early = known is not None and bool(claim) and claim in known.early
        if not early:
            self.check(nbytes)
        self._last += 1
        held = Held(self._last, holder, claim, nbytes, method, now_ns, value)
        if early:
            self._remember(held, "its holder had let go of it before it was there")
            return held.number, (held,)
        if known is None:
            known = self.holders[holder] = _Holder(now_ns)
        if not known.numbers:
            known.heard_ns = max(known.heard_ns, now_ns)  # it was owed nothing before, so its silence meant nothing
        known.numbers.add(held.number)
        self.values[held.number] = held
        self.total += nbytes
        return held.number, ()

    def release(
        self, holder: bytes, *, claims: Iterable[int] = (), numbers: Iterable[int] = (), now_ns: int
    ) -> Sequence[Held]:
        """A holder lets go of all that some calls made, and of some values. Idempotent; it is heard by this."""
        self.heard(holder, now_ns)
        wanted = set(claims)
        known = self.holders.get(holder)
        if known is None and wanted:
            known = self.holders[holder] = _Holder(now_ns)
        if known is None:
            return ()
        chosen = {number for number in numbers if number in known.numbers}
        made = {number for number in known.numbers if self.values[number].claim in wanted} if wanted else set()
        came = {self.values[number].claim for number in made}
        for claim in wanted:
            known.early[claim] = None
            if claim in came:  # what it was for is done; only a call that runs once more would bring another
                known.early.move_to_end(claim, last=False)
        while len(known.early) > _EARLY:
            known.early.popitem(last=False)
        return self._drop(sorted(chosen | made), "it was released")

    def release_any(self, numbers: Iterable[int]) -> Sequence[Held]:
        """Let go of values whoever holds them: their owner says so."""
        return self._drop(sorted(self.values.keys() & set(numbers)), "it was released")

    def heard(self, holder: bytes, now_ns: int) -> None:
        """A holder was heard."""
        known = self.holders.get(holder)
        if known is not None:
            known.heard_ns = max(known.heard_ns, now_ns)

    def over(self, holder: bytes) -> Sequence[Held]:
        """A holder has ended."""
        known = self.holders.pop(holder, None)
        if known is None:
            return ()
        return [self._take(number, "whoever had it kept has ended") for number in sorted(known.numbers)]

    def tick(self, now_ns: int, is_over: Callable[[bytes], bool] = lambda _: False) -> Sequence[Held]:
        """Drop what belongs to holders that were silent for too long, or are over."""
        gap_ns = 0 if self._ticked_ns is None else now_ns - self._ticked_ns
        self._ticked_ns = now_ns
        if self.deaf_ns is not None and gap_ns > self.deaf_ns:  # this process stood still, and has not read yet
            for known in self.holders.values():
                known.heard_ns = min(now_ns, known.heard_ns + gap_ns)
        dropped: list[Held] = []
        silent = f"whoever had it kept was silent for more than {self.lease_ns / 1e9:g} s"
        for holder, known in list(self.holders.items()):
            if holder == OWN:
                continue
            if is_over(holder):
                dropped += self.over(holder)
            elif now_ns - known.heard_ns > self.lease_ns:
                dropped += self._drop(sorted(known.numbers), silent)
        return dropped

    # -- looking -------------------------------------------------------------------------------------------------------

    def find(self, generation: int, number: int) -> Held | str:
        """Return a value, or in words why it is not here."""
        if generation != self.generation:
            return "its owner has started anew since"
        held = self.values.get(number)
        if held is not None:
            return held
        return self.gone.get(number, "it was released" if 0 < number <= self._last else "it was never there")

    def holdings(self) -> tuple[Holding, ...]:
        """Return what each holder has, largest first."""
        found = []
        for holder, known in self.holders.items():
            values = [self.values[number] for number in known.numbers]
            if not values:
                continue
            methods: dict[str, int] = {}
            for held in values:
                methods[held.method] = methods.get(held.method, 0) + held.nbytes
            found.append(
                Holding(
                    holder,
                    len(values),
                    sum(methods.values()),
                    min(held.since_ns for held in values),
                    tuple(sorted(methods.items(), key=lambda entry: (-entry[1], entry[0]))),
                )
            )
        return tuple(sorted(found, key=lambda holding: (-holding.nbytes, holding.holder)))

    def validate(self) -> None:
        """Check what always holds.

        Raises:
            AssertionError: It does not.
        """
        assert self.total == sum(held.nbytes for held in self.values.values())  # noqa: S101  # what this is for
        assert self.total <= self.limit or not self.values  # noqa: S101
        listed = [number for known in self.holders.values() for number in known.numbers]
        assert sorted(listed) == sorted(self.values)  # noqa: S101
        for holder, known in self.holders.items():
            assert known.numbers or known.early, holder  # noqa: S101
            assert all(self.values[number].holder == holder for number in known.numbers)  # noqa: S101
        assert not set(self.gone) & set(self.values)  # noqa: S101

    # -- inside --------------------------------------------------------------------------------------------------------

    def _drop(self, numbers: Iterable[int], why: str) -> Sequence[Held]:
        dropped = []
        for number in numbers:
            held = self._take(number, why)
            known = self.holders[held.holder]
            known.numbers.discard(number)
            if not known.numbers and not known.early:
                del self.holders[held.holder]
            dropped.append(held)
        return dropped

    def _take(self, number: int, why: str) -> Held:
        held = self.values.pop(number)
        self.total -= held.nbytes
        self._remember(held, why)
        return held

    def _remember(self, held: Held, why: str) -> None:
        self.gone[held.number] = why
        while len(self.gone) > _REMEMBERED:
            self.gone.popitem(last=False)
