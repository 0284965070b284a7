"""Who takes part where values are kept, in the simulation: their owners, their holders, and what is true of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from controller.refs import Claim, RefBook
from zbus.clock import Clock
from zbus.codec import Ref
from zbus.data.borrowed import Borrowed
from zbus.data.holds import Tell
from zbus.data.pool import Pool, Slot
from zbus.data.refstore import RefStore

__all__ = [
    "DEAF", "LEASE", "RENEW", "TELL", "UNIT", "Column", "Holder", "Kept", "Name", "Owner", "Peer", "Process", "S",
    "Value", "View",
]  # fmt: skip

S: Final = 1_000_000_000
LEASE: Final = 60 * S
RENEW: Final = 15 * S
DEAF: Final = 5 * S
TELL: Final = 10 * S
UNIT: Final = 1 << 16
_ROWS: Final = 12


class Play(Clock, Protocol):
    """What processes need of the run they are in."""

    rng: Random
    known: dict[Hashable, Owner]

    def column(self) -> int:
        """Return a column that no other process has."""
        ...

    def job(self, process: Process, job: Callable[[], None], delay_s: float = 0.0) -> None:
        """Do a background job of a process."""
        ...

    def request(
        self,
        process: Process,
        to: Callable[[], Owner],
        limit: int,
        serve: Callable[[], Any],
        done: Callable[[Any], None],
    ) -> None:
        """Ask until there is an answer."""
        ...

    def release(self, owner: Owner, holder: Holder, tell: Tell) -> bool:
        """Serve what a holder tells."""
        ...

    def unheld(self, holder: Holder, claim: int) -> None:
        """Nothing names a claim any more."""
        ...


@dataclass(eq=False)
class Value:
    """What is true of one value, outside the machines.

    Attributes:
        holder: For whom it is kept.
        claim: Which call of it made it.
        content: What it is.
        owner: Who keeps it.
        since: Since when nobody holds it, or None.
        kept_ns: Since when it is kept.
    """

    holder: Holder
    claim: int
    content: int
    owner: Owner
    since: int | None
    kept_ns: int


@dataclass(eq=False)
class Kept:
    """A value as its owner has it: a slot, leased for as long as this is kept."""

    truth: Value
    slot: Slot
    generation: int


@dataclass(eq=False)
class View:
    """What a reader looks at."""

    place: Borrowed
    row: int
    file: list[int]
    content: int


class Process:
    """What lives, stands still, reads, and ends."""

    def __init__(self, name: str, column: int) -> None:
        self.name = name
        self.column = column  # of every table
        self.alive = True
        self.stopped_until = 0
        self.stops: list[tuple[int, int]] = []
        self.views: list[View] = []
        self.places: dict[Hashable, Borrowed] = {}

    def __repr__(self) -> str:
        return self.name


class Owner(Process):
    """One start of a rank: it keeps and lends."""

    def __init__(self, play: Play, rank: int, incarnation: int) -> None:
        super().__init__(f"rank {rank} start {incarnation}", play.column())
        self.rank = rank
        self.incarnation = incarnation
        self.key = ("rank", rank, incarnation)
        self.store = RefStore(play.rng.getrandbits(63), 1 << 40, LEASE, DEAF)
        self.words: dict[int, int] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.files: dict[tuple[int, int], list[int]] = {}
        self.pool = Pool(_ROWS * UNIT, _ROWS, self)
        self.heard: dict[Holder, int] = {}

    # -- ``Table`` -----------------------------------------------------------------------------------------------------

    def cell(self, row: int, column: int) -> int:
        """Return what a reader wrote last."""
        return self.cells.get((row, column), 0)

    def close(self, row: int) -> None:
        """Let nobody open a row."""
        self.words[row] = 0

    def wipe(self, row: int, column: int) -> None:
        """Forget what a dead reader wrote."""
        self.cells.pop((row, column), None)


class Column:
    """A reader's column of an owner's table."""

    def __init__(self, owner: Owner, column: int) -> None:
        self._owner = owner
        self._column = column

    def mark(self, row: int, value: int) -> None:
        """Write our cell of a row."""
        self._owner.cells[row, self._column] = value

    def word(self, row: int) -> int:
        """Return the generation of a row that may be opened."""
        return self._owner.words.get(row, 0)


class Name(NamedTuple):
    """Of a rank."""

    role: str
    rank: int


class Peer(NamedTuple):
    """What a claim asks of the one that its call is sent to."""

    name: Name
    incarnation: int


class Desk:
    """Of a desk what a book needs whose process puts nothing."""

    @staticmethod
    def is_mine(_ref: Ref) -> bool:
        return False


class Holder(Process):
    """One controller or guest: its handles, its calls, and how it reaches owners."""

    def __init__(self, play: Play, session: int) -> None:
        super().__init__(f"session {session}", play.column())
        self.session = b"%d" % session
        self.over = False  # whoever looks can see that it has ended, or was replaced
        self.calls: dict[int, Claim] = {}
        self.refs: list[tuple[Ref, int]] = []  # handles, and the claims of their calls
        self.held: dict[int, int] = {}  # by claim: how many handles, waiting calls and pins name it
        self.cuts: list[tuple[int, int, int]] = []  # rank, from, to: no message goes either way
        self._play = play
        desk: Any = Desk()
        self.book = RefBook(desk, self, renew_s=RENEW / S, clock=play, jobs=partial(play.job, self))

    def be_over(self) -> None:
        """Whoever looks sees from now on that it has ended."""
        self.over = True

    def cut_off(self, rank: int, now: int) -> bool:
        """Tell whether no message goes to a rank, or comes from it."""
        return any(one == rank and begin <= now < end for one, begin, end in self.cuts)

    def take(self, claim: int) -> None:
        """Something more names a claim."""
        self.held[claim] = self.held.get(claim, 0) + 1

    def drop(self, claim: int) -> None:
        """Something less does."""
        self.held[claim] -= 1
        if not self.held[claim]:
            del self.held[claim]
            self._play.unheld(self, claim)

    # -- ``Link`` ------------------------------------------------------------------------------------------------------

    def ask(self, ref: Ref, questions: Sequence[Any], deadline_ns: int) -> Sequence[Any]:
        """Nobody may wait here: the play does it."""
        raise NotImplementedError

    def tell(self, tell: Tell, done: Callable[[bool | None], None]) -> None:
        """Tell an owner what is let go."""
        owner = self._play.known.get(tell.owner)
        if owner is None:  # its end has been seen
            done(None)
            return
        known = owner
        serve = partial(self._play.release, known, self, tell)
        self._play.request(self, lambda: known, TELL, serve, lambda heard: done(heard is True))
