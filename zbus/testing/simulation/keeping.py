"""Kept values in the simulation: ranks that keep, controllers that hold and let go, readers that ask and open.

The deciding halves are the real ones: ``RefStore`` and ``Pool`` at the owner, ``RefBook`` with its holds and claims at
the holder, ``Borrowed`` at the reader. Played are processes, sockets and time, in seconds as they are in the product.
A message is late, lost and sent again, or comes twice; owners and holders die between any two effects, are stopped, cut
off, replaced; calls wait for minutes before they run, and are given up meanwhile.

I15: a value that is held is there, unless its holder could not be heard for long; whoever opens a value sees that very
value, for as long as it looks at it; one whose owner has died is said to be lost; what nobody holds is gone within the
lease; and when all is let go, nothing is kept, lent or to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from controller.refs import Claim
from zbus.codec import Ref
from zbus.data.borrowed import Borrowed
from zbus.data.holds import Tell
from zbus.data.refstore import Held
from zbus.testing.simulation.keepers import (
    DEAF,
    LEASE,
    RENEW,
    TELL,
    UNIT,
    Column,
    Holder,
    Kept,
    Name,
    Owner,
    Peer,
    Process,
    S,
    Value,
    View,
)
from zbus.testing.simulation.ledger import broken

__all__ = ["keeping"]

_SALT: Final = 0x4E9
_AGAIN: Final = S
"""How soon a message is sent again that was not answered."""

_GONE_WITHIN: Final = LEASE + RENEW + TELL + 25 * S
"""By when a value is gone that nobody holds."""

_CLEAR: Final = 40 * S
"""When a holder could be heard for so long without a break, its silence is an error of the machines."""

_ROUGH: Final = 600 * S
_HEALED: Final = 120 * S
_CALM: Final = 400 * S
_GIVEN_BACK: Final = -1


class _Died(Exception):  # no error: it unwinds what a process was at
    """A process ended between two effects."""


class _Play:
    """One run."""

    def __init__(self, seed: int, covered: dict[object, int]) -> None:
        self.rng = Random(seed ^ _SALT)  # noqa: S311  # a schedule, not a secret
        self.covered = covered
        self.now = 0
        self.contents = self.calls = self.sessions = self.columns = self._number = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        choice = self.rng.choice
        self.loss, self.twice = choice((0.0, 0.1, 0.4)), choice((0.0, 0.2))
        self.late = choice((S // 100, S, 20 * S))
        self.slow = choice((S // 10, 5 * S, 150 * S))  # how long a call waits for its turn, at most
        self.deadly = choice((0.0, 0.0, 0.02))
        self.rough = True
        self.known: dict[Hashable, Owner] = {}  # whose end nobody has seen yet
        self.values: dict[tuple[int, int], Value] = {}  # by store and number: what is kept
        self.owners = [self._start_owner(rank, 0) for rank in range(2)]
        self.holders = [self._start_holder() for _ in range(choice((1, 2)))]
        self.steps = (
            *(self._call,) * 6, *(self._use,) * 6, *(self._drop,) * 4, self._release, self._give_up,
            *(self._look_away,) * 3, *choice(((), (self._stop,), (self._cut,), (self._kill,), (self._replace,),
            (self._stop, self._cut, self._kill, self._replace))),
        )  # fmt: skip

    # -- time ----------------------------------------------------------------------------------------------------------

    def monotonic_ns(self) -> int:
        """See ``Clock``."""
        return self.now

    def wall_ns(self) -> int:
        """See ``Clock``."""
        return self.now

    def column(self) -> int:
        """Return a column that no other process has."""
        self.columns += 1
        return self.columns

    def after(self, delay: int, job: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heappush(self._heap, (self.now + delay, self._number, job))

    def within(self, delay: int) -> int:
        """Return a drawn time."""
        return int(self.rng.random() * delay)

    def on(self, process: Process, job: Callable[[], None]) -> None:
        """Do something in a process: when it goes on, if it is stopped; never, if it has ended."""
        if not process.alive:
            return
        if process.stopped_until > self.now:
            self.after(process.stopped_until - self.now + self.within(S // 2), partial(self.on, process, job))
            return
        try:
            job()
        except _Died:
            self._end_process(process)

    def job(self, process: Process, job: Callable[[], None], delay_s: float = 0.0) -> None:
        """Do a background job of a process."""
        self.after(int(delay_s * S), partial(self.on, process, job))

    def boundary(self) -> None:
        """Between two effects: here a process may end."""
        if self.rough and self.rng.random() < self.deadly:
            self.covered["keeping", "deaths between two effects"] += 1
            raise _Died

    def run(self) -> None:
        """Play it to its end."""
        self.after(0, self._step)
        self._until(_ROUGH)
        self.rough = False
        self._until(_ROUGH + _HEALED)
        for holder in self.holders:
            for call in list(holder.calls):
                self._given_up(holder, call)
            while holder.refs:
                self._let_go(holder, 0)
        self._until(_ROUGH + _HEALED + _CALM)
        self._check_end()

    def _until(self, time: int) -> None:
        while self._heap and self._heap[0][0] <= time:
            self.now, _, job = heappop(self._heap)
            job()
        self.now = time

    def _step(self) -> None:
        if self.rough:
            self.rng.choice(self.steps)()
            self._look()
            self.after(self.within(3 * S), self._step)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_owner(self, rank: int, incarnation: int) -> Owner:
        made = Owner(self, rank, incarnation)
        self.known[made.key] = made
        self.after(S, partial(self.on, made, partial(self._tick, made)))
        return made

    def _start_holder(self) -> Holder:
        self.sessions += 1
        return Holder(self, self.sessions)

    def _end_process(self, process: Process) -> None:
        process.alive = False
        if isinstance(process, Owner):
            self.covered["keeping", "owners that died"] += 1
            for key in [key for key, value in self.values.items() if value.owner is process]:
                del self.values[key]
            self.after(self.within(8 * S), partial(self._seen, process))
            self.after(self.within(3 * S), partial(self._restart, process))
        elif isinstance(process, Holder):
            self.covered["keeping", "holders that died"] += 1
            process.book.close()
            process.held.clear()
            for value in self.values.values():
                if value.holder is process and value.since is None:
                    value.since = self.now
            if self.rng.random() < 0.5:  # on this host: its lock is seen, or it said farewell
                self.after(self.within(3 * S), process.be_over)
            self.holders[self.holders.index(process)] = self._start_holder()

    def _seen(self, owner: Owner) -> None:
        """Its end is known."""
        del self.known[owner.key]

    def _restart(self, owner: Owner) -> None:
        self.owners[owner.rank] = self._start_owner(owner.rank, owner.incarnation + 1)

    def _stop(self) -> None:
        """A process stands still: shortly, or for longer than a lease."""
        process = self.rng.choice([*self.owners, *self.holders])
        if process.stopped_until <= self.now:
            process.stopped_until = self.now + (8 * S + self.within(100 * S) if self.rng.random() < 0.5 else S // 2)
            process.stops.append((self.now, process.stopped_until))
            self.covered["keeping", "processes stopped"] += 1

    def _cut(self) -> None:
        self.rng.choice(self.holders).cuts.append(
            (self.rng.randrange(len(self.owners)), self.now, self.now + self.within(100 * S))
        )
        self.covered["keeping", "cut off"] += 1

    def _kill(self) -> None:
        if self.rng.random() < 0.3:
            living = [process for process in (*self.owners, *self.holders) if process.alive]
            if living:
                self._end_process(self.rng.choice(living))

    def _replace(self) -> None:
        """A controller takes over: the old one is over for all, though it may go on for a while."""
        if self.rng.random() < 0.3:
            holder = self.rng.choice(self.holders)
            holder.over = True
            self.after(self.within(20 * S), lambda: self._end_process(holder) if holder.alive else None)
            self.covered["keeping", "holders replaced"] += 1

    # -- messages ------------------------------------------------------------------------------------------------------

    def _arrives(self, process: Process, owner: Owner) -> bool:
        """Tell whether a message between two arrives that is sent now."""
        if isinstance(process, Holder) and process.cut_off(owner.rank, self.now):
            return False
        return not self.rough or self.rng.random() >= self.loss

    def request(
        self, process: Process, to: Callable[[], Owner], limit: int, serve: Callable[[], Any],
        done: Callable[[Any], None],
    ) -> None:  # fmt: skip
        """Ask until there is an answer: ``done`` is called once, with None when the time is over."""
        until = self.now + limit
        ended = False

        def end(answer: Any) -> None:
            nonlocal ended
            if not ended:
                ended = True
                done(answer)

        def answer() -> None:
            told = serve()
            self.boundary()
            if self._arrives(process, to()):
                self.after(self.within(self.late), partial(self.on, process, partial(end, told)))

        def send() -> None:
            if self.now >= until:
                end(None)
            if ended:
                return
            if self._arrives(process, to()):
                for _ in range(1 + (self.rng.random() < self.twice)):
                    self.after(self.within(self.late), lambda: self.on(to(), answer))
            self.after(_AGAIN, partial(self.on, process, send))

        send()

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _tick(self, owner: Owner) -> None:
        """Once a second an owner looks who is over or silent, and which readers are dead."""
        over = {holder.session for holder in owner.heard if holder.over}
        self._dropped(owner, owner.store.tick(self.now, over.__contains__))
        owner.store.validate()
        owner.pool.collect(self.now)
        self._forget_dead_readers(owner)
        woke = max((end for _, end in owner.stops), default=0)
        for value in self.values.values():
            if value.owner is owner and value.since is not None:
                late = self.now - max(value.since, value.kept_ns, woke)
                if late > _GONE_WITHIN:
                    broken("I15", f"{owner} keeps for {value.holder} what nobody holds since {late / S:.0f} s")
        self.after(S, partial(self.on, owner, partial(self._tick, owner)))

    def _forget_dead_readers(self, owner: Owner) -> None:
        living = {process.column for process in (*self.owners, *self.holders) if process.alive}
        for column in owner.pool.awaited() - living:
            owner.pool.died(column)

    def _call(self) -> None:
        """A holder calls a rank, whose result is kept there."""
        holder, owner = self.rng.choice(self.holders), self.rng.choice(self.owners)
        if not holder.alive or holder.stopped_until > self.now:
            return
        claim = holder.book.claim()
        self.calls += 1
        holder.calls[self.calls] = claim
        holder.take(claim.number)
        self._send_call(holder, self.calls, claim, owner)
        self.after(S + self.within(200 * S), partial(self.on, holder, partial(self._given_up, holder, self.calls)))

    def _send_call(self, holder: Holder, call: int, claim: Claim, owner: Owner) -> None:
        claim.placed_on([owner.rank], [Peer(Name("rank", owner.rank), owner.incarnation)])
        number = claim.number
        if self._arrives(holder, owner):
            delay = self.within(self.late) + self.within(self.slow)
            self.after(delay, partial(self.on, owner, partial(self._ran, owner, holder, call, number)))
        self.after(30 * S, partial(self.on, holder, partial(self._again, holder, call, owner)))

    def _again(self, holder: Holder, call: int, owner: Owner) -> None:
        """A call whose rank was lost runs once more, on its successor."""
        claim, successor = holder.calls.get(call), self.owners[owner.rank]
        if claim is not None and owner.key not in self.known and successor.alive:
            self.covered["keeping", "calls that ran again"] += 1
            self._send_call(holder, call, claim, successor)

    def _ran(self, owner: Owner, holder: Holder, call: int, claim: int) -> None:
        """The call runs: its result is put into a slot and kept, and its caller told."""
        self.boundary()
        self._dropped(owner, owner.store.tick(self.now, lambda session: session == holder.session and holder.over))
        slot = owner.pool.take(UNIT, self.now)
        if slot is None:
            gone, slot = owner.pool.grow(UNIT)
            for old in gone:
                owner.files.pop((old.row, old.birth))[0] = _GIVEN_BACK
        if slot is None:
            self.covered["keeping", "no room"] += 1
            return
        self.contents += 1
        owner.words[slot.row] = slot.generation
        owner.files.setdefault((slot.row, slot.birth), [0])[0] = self.contents
        self._look()
        self.boundary()
        if not any(value.owner is owner and value.holder is holder for value in self.values.values()):
            owner.heard[holder] = self.now  # it was owed nothing before, so its silence meant nothing
        held = holder.alive and claim in holder.held
        truth = Value(holder, claim, self.contents, owner, None if held else self.now, self.now)
        kept = Kept(truth, slot, slot.generation)
        number, gone_at_once = owner.store.put(holder.session, claim, UNIT, kept, "make", self.now)
        if gone_at_once:
            self.covered["keeping", "let go before it was there"] += 1
            if held:
                broken("I15", f"{owner} does not keep what {holder} waits for")
            owner.pool.drop(slot.row, slot.generation)
            return
        self.values[owner.store.generation, number] = truth
        self.covered["keeping", "kept"] += 1
        self.boundary()
        ref = Ref(
            role="rank", rank=owner.rank, incarnation=owner.incarnation, generation=owner.store.generation,
            number=number, memory="", endpoints={}, nbytes=UNIT, rows=None, lengths=None, method="make", about="",
        )  # fmt: skip
        if self._arrives(holder, owner):
            self.after(self.within(self.late), partial(self.on, holder, partial(self._answered, holder, call, ref)))

    def _answered(self, holder: Holder, call: int, ref: Ref) -> None:
        claim = holder.calls.pop(call, None)
        if claim is not None:
            holder.book.bind([ref], claim)
            holder.refs.append((ref, claim.number))
            holder.take(claim.number)
            holder.drop(claim.number)

    def _given_up(self, holder: Holder, call: int) -> None:
        claim = holder.calls.pop(call, None)
        if claim is not None:
            self.covered["keeping", "calls given up"] += 1
            holder.drop(claim.number)

    def _give_up(self) -> None:
        holder = self.rng.choice(self.holders)
        if holder.calls and holder.stopped_until <= self.now:
            self._given_up(holder, self.rng.choice(list(holder.calls)))

    def _let_go(self, holder: Holder, index: int, *, by_release: bool = False) -> None:
        ref, claim = holder.refs.pop(index)
        holder.drop(claim)
        if by_release:
            holder.book.release(ref)

    def _drop(self, *, by_release: bool = False) -> None:
        holder = self.rng.choice(self.holders)
        if holder.refs and holder.stopped_until <= self.now:
            self._let_go(holder, self.rng.randrange(len(holder.refs)), by_release=by_release)

    def _release(self) -> None:
        self._drop(by_release=True)

    def release(self, owner: Owner, holder: Holder, tell: Tell) -> bool:
        """An owner hears of a holder, and what it lets go."""
        owner.heard[holder] = self.now
        gone = owner.store.release(holder.session, claims=tell.claims, numbers=tell.numbers, now_ns=self.now)
        self._dropped(owner, gone)
        return True

    def unheld(self, holder: Holder, claim: int) -> None:
        """Nothing names a claim any more."""
        for value in self.values.values():
            if value.holder is holder and value.claim == claim:
                value.since = self.now

    def _dropped(self, owner: Owner, gone: Iterable[Held]) -> None:
        """Look whether what is dropped may be dropped, and end its lease."""
        for held in gone:
            kept: Kept = held.value
            value = self.values.pop((owner.store.generation, held.number))
            owner.pool.drop(kept.slot.row, kept.generation)
            if value.since is not None or value.holder.over:
                self.covered["keeping", "gone that nobody held"] += 1
            elif self._was_silent(owner, value.holder):
                self.covered["keeping", "gone for silence"] += 1
            else:
                broken("I15", f"{owner} dropped what {value.holder} holds: {owner.store.gone[held.number]}")

    def _was_silent(self, owner: Owner, holder: Holder) -> bool:
        """Tell whether an owner may take a holder for gone: it listened for a lease, and heard nothing.

        Nor could it have heard anything: there was no long time in which both went on, and nothing was between them.
        """
        heard = owner.heard[holder]
        stood = sum(end - max(begin, heard) for begin, end in owner.stops if end > heard and end - begin > DEAF)
        if self.now - heard - stood <= LEASE - 2 * S:
            return False
        cuts = ((begin, end) for rank, begin, end in holder.cuts if rank == owner.rank)
        at = heard
        for begin, end in sorted((*owner.stops, *holder.stops, *cuts)):
            if begin - at >= _CLEAR:
                return False
            at = max(at, end)
        return self.now - at < _CLEAR

    # -- reading -------------------------------------------------------------------------------------------------------

    def _use(self) -> None:
        """A holder reads what it holds, or has a rank read it; the value is pinned until that is over."""
        holder = self.rng.choice(self.holders)
        if not holder.refs or holder.stopped_until > self.now:
            return
        ref, claim = self.rng.choice(holder.refs)
        truth = self.values.get(ref.key)
        reader = self.rng.choice((holder, *self.owners))
        pinned = [ref.hold]
        ref.hold.pin()
        holder.take(claim)
        ref = ref.with_fields(hold=None, home=None)  # what travels keeps nothing

        def unpin() -> None:
            if pinned:
                pinned.pop().unpin()
                holder.drop(claim)

        self.after(60 * S, partial(self.on, holder, unpin))
        begin = partial(self._ask, reader, ref, truth, lambda: self.after(0, partial(self.on, holder, unpin)))
        self.after(0 if reader is holder else self.within(self.late), partial(self.on, reader, begin))

    def _ask(self, reader: Process, ref: Ref, truth: Value | None, done: Callable[[], None]) -> None:
        """A reader asks where the value of a handle is: whoever has the address of its owner."""
        key = (ref.role, ref.rank, ref.incarnation)

        def told(answer: Any) -> None:
            if isinstance(answer, tuple):
                self._open(reader, ref, truth, answer)
            elif answer is None:
                self.covered["keeping", "asked in vain" if key in self.known else "owners that were gone"] += 1
            else:
                self.covered["keeping", "told that it is gone"] += 1
            done()

        if key not in self.known and self.rng.random() < 0.6:  # else this reader has not seen it yet
            self.covered["keeping", "owners that were gone"] += 1
            done()
            return
        self.request(reader, lambda: self.owners[ref.rank], 30 * S, lambda: self._find(reader, ref), told)

    def _find(self, reader: Process, ref: Ref) -> Any:
        owner = self.owners[ref.rank]
        found = owner.store.find(ref.generation, ref.number)
        if isinstance(found, str):
            if ref.key in self.values and self.values[ref.key].owner is owner:
                broken("I15", f"{owner} says of what it keeps: {found}")
            return found
        kept: Kept = found.value
        kept.slot.readers.add(reader.column)
        return owner, kept.slot.row, kept.slot.birth, kept.generation

    def _open(self, reader: Process, ref: Ref, truth: Value | None, answer: tuple[Owner, int, int, int]) -> None:
        owner, row, birth, generation = answer
        there = owner.alive and ref.key in self.values
        place = reader.places.get(owner.key)
        if place is None:
            place = reader.places[owner.key] = Borrowed(Column(owner, reader.column))
        file = owner.files.get((row, birth)) if owner.alive else None
        if not place.enter(row, generation):
            if there:
                broken("I15", f"{reader} cannot open what {owner} keeps")
            self.covered["keeping", "came too late"] += 1
            return
        if file is None:
            place.leave(row)
            self.covered["keeping", "files that were gone"] += 1
            return
        if truth is None or file[0] != truth.content:
            broken("I15", f"{reader} asked {owner} for value {truth and truth.content} and sees {file[0]}")
        reader.views.append(View(place, row, file, file[0]))
        self.covered["keeping", "opened"] += 1

    def _look_away(self) -> None:
        reader = self.rng.choice([*self.owners, *self.holders])
        if reader.alive and reader.views:
            view = reader.views.pop(self.rng.randrange(len(reader.views)))
            view.place.leave(view.row)

    def _look(self) -> None:
        """Look at every view."""
        for reader in (*self.owners, *self.holders):
            for view in reader.views:
                if reader.alive and view.file[0] != view.content:
                    broken("I15", f"{reader} looks at value {view.content} and sees {view.file[0]}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        for reader in (*self.owners, *self.holders):
            while reader.views:
                view = reader.views.pop()
                view.place.leave(view.row)
        for owner in self.owners:
            owner.pool.collect(self.now)
            self._forget_dead_readers(owner)
            owner.pool.collect(self.now)
            if owner.store.values or owner.store.total:
                broken("I15", f"{owner} keeps {len(owner.store.values)} values in the end, and nobody holds any")
            if owner.pool.lent:
                broken("I15", f"{owner} lends {owner.pool.lent} bytes in the end, and keeps nothing")
        for holder in self.holders:
            if not holder.book.idle:
                broken("I15", f"{holder} has something to tell in the end, and holds nothing")


def keeping(seed: int, covered: dict[object, int]) -> None:
    """Play one schedule; raises ``Violation`` when a kept value is lost, mistaken or forgotten."""
    _Play(seed, covered).run()
