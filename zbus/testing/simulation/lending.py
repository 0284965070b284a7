"""Shared memory in the simulation: owners that lend slots, readers that open them, let go, come late and die.

The pure halves are the real ones (``Pool``, ``Borrowed``); files, tables and the arena's glue are played. Owner and
readers take steps between any two accesses of the table. Messages come late, twice, in any order, or to a reader that
has opened another generation of the slot meanwhile.

I14: the bytes that a live view shows never change; a message opens what it names or nothing; and when all views and
leases are gone, every slot is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from zbus.data.borrowed import Borrowed
from zbus.data.pool import Pool, Slot
from zbus.testing.simulation.ledger import broken

__all__ = ["lending"]

_SALT: Final = 0x5A3ED
_STEPS: Final = 400
_UNIT: Final = 1 << 16
_ROWS: Final = 4
_COLUMNS: Final = 4
_GIVEN_BACK: Final = -1
"""What a file shows whose memory was given back: a view of it would be the end of its reader."""


@dataclass(slots=True)
class _Message:
    """A descriptor on its way, and what it names."""

    owner: _Owner
    row: int
    birth: int
    generation: int
    content: int


@dataclass(slots=True)
class _View:
    """What a reader holds: the mapped file, and what it showed when it was opened."""

    owner: _Owner
    row: int
    file: list[int]
    content: int


@dataclass(slots=True)
class _Lease:
    slot: Slot
    generation: int
    content: int


class _Reader:
    """One process that opens, from its start to its end."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.inbox: list[_Message] = []
        self.views: list[_View] = []
        self.places: dict[int, Borrowed] = {}  # by id of the owner
        self.files: dict[tuple[int, int], tuple[int, list[int]]] = {}  # (owner, row): birth, the mapping


class _Marks:
    """A reader's column; others run between its accesses."""

    def __init__(self, owner: _Owner, column: int) -> None:
        self._owner = owner
        self._column = column

    def mark(self, row: int, value: int) -> None:
        self._owner.between()
        self._owner.cells[row, self._column] = value
        self._owner.between()

    def word(self, row: int) -> int:
        return self._owner.words.get(row, 0)


@dataclass(eq=False)
class _Owner:
    """One process that lends, with its files and its table."""

    limit: int
    between: Callable[[], None]
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    words: dict[int, int] = field(default_factory=dict)
    files: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    columns: dict[int, int] = field(default_factory=dict)  # by reader
    free_columns: list[int] = field(default_factory=lambda: list(range(1, _COLUMNS)))
    leases: list[_Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool(self.limit, _ROWS, self)

    def cell(self, row: int, column: int) -> int:
        """Return what a reader wrote last."""
        self.between()
        return self.cells.get((row, column), 0)

    def close(self, row: int) -> None:
        """Let nobody open a row."""
        self.between()
        self.words[row] = 0
        self.between()

    def wipe(self, row: int, column: int) -> None:
        """Forget what a dead reader wrote."""
        self.cells.pop((row, column), None)


class _Play:
    """One run."""

    def __init__(self, seed: int, covered: dict[object, int]) -> None:
        self.rng = Random(seed ^ _SALT)  # noqa: S311  # a schedule, not a secret
        self.covered = covered
        self.now = 0
        self.contents = 0
        self.nested = False
        self.busy: object = None
        self.names = 0
        self.readers = [self._reader() for _ in range(1 + int(self.rng.random() * 3))]
        self.dead: list[_Reader] = []
        self.owner = self._owner()
        self.gone: list[_Owner] = []
        self.interleave = self.rng.random() * 0.5

    def _reader(self) -> _Reader:
        self.names += 1
        return _Reader(self.names)

    def _owner(self) -> _Owner:
        return _Owner(_UNIT * (2 + int(self.rng.random() * 6)), self._between)

    def _between(self) -> None:
        """Let somebody else take a step between two accesses of the table."""
        if not self.nested and self.rng.random() < self.interleave:
            self.nested = True
            self.rng.choice((self._lend, self._drop, self._let_go, self._open_one, self._die))()
            self.nested = False
            self.covered["lending", "steps between two accesses"] += 1

    def _begin(self, who: _Owner | _Reader) -> bool:
        """Tell whether a process may take a step now: it does one thing at a time."""
        if not self.nested:
            self.busy = who
        return not self.nested or self.busy is not who

    def run(self) -> None:
        """Play all steps, and see that nothing is left."""
        steps = (
            *(self._lend,) * 5,
            *(self._open_one,) * 6,
            *(self._let_go,) * 5,
            *(self._drop,) * 5,
            *(self._again,) * 2,
            self._die,
            self._idle,
            self._owner_dies,
        )
        for _ in range(_STEPS):
            self.now += 1
            self.rng.choice(steps)()
            self.check()
        self._end()

    def check(self) -> None:
        """Look at every view."""
        for reader in self.readers:
            for view in reader.views:
                if view.file[0] != view.content:
                    broken("I14", f"reader {reader.name} sees bytes of another array in row {view.row}")
        pool = self.owner.pool
        if not pool.total == sum(slot.size for slot in pool.slots.values()) <= pool.limit:
            broken("I14", f"slots of {pool.total} bytes are held, the limit is {pool.limit}")

    # -- the owner -----------------------------------------------------------------------------------------------------

    def _lend(self) -> None:
        """Lend to some readers, as the arena does it."""
        owner = self.owner
        if not self._begin(owner):
            return
        nbytes = _UNIT * self.rng.choice((1, 1, 1, 2, 3))
        slot = owner.pool.take(nbytes, self.now)
        if slot is None and self._bury(owner.pool.awaited()):
            slot = owner.pool.take(nbytes, self.now)
        if slot is None:
            forgotten, slot = owner.pool.grow(nbytes)
            for old in forgotten:
                owner.files.pop((old.row, old.birth))[0] = _GIVEN_BACK
            if slot is not None:
                owner.files[slot.row, slot.birth] = [0]
        if slot is None:
            self.covered["lending", "no room"] += 1
            return
        self.contents += 1
        owner.words[slot.row] = slot.generation
        owner.files[slot.row, slot.birth][0] = self.contents
        self.check()
        lease = _Lease(slot, slot.generation, self.contents)
        owner.leases.append(lease)
        for reader in self.readers:
            if self.rng.random() < 0.7:
                self._send(lease, reader)
        self.covered["lending", "lent"] += 1

    def _send(self, lease: _Lease, reader: _Reader) -> None:
        owner, slot = self.owner, lease.slot
        if reader.name not in owner.columns:
            if not owner.free_columns:
                self._bury(set(owner.columns.values()))
            if not owner.free_columns:
                return
            owner.columns[reader.name] = owner.free_columns.pop()
        slot.readers.add(owner.columns[reader.name])
        message = _Message(owner, slot.row, slot.birth, lease.generation, lease.content)
        reader.inbox += [message] * (2 if self.rng.random() < 0.2 else 1)

    def _again(self) -> None:
        """Send again what is still leased, perhaps to somebody else: a retransmission, or a call that moves."""
        if self.owner.leases:
            self._send(self.rng.choice(self.owner.leases), self.rng.choice(self.readers))

    def _drop(self) -> None:
        if self.owner.leases and self._begin(self.owner):
            lease = self.owner.leases.pop(int(self.rng.random() * len(self.owner.leases)))
            self.owner.pool.drop(lease.slot.row, lease.generation)

    def _bury(self, columns: set[int]) -> bool:
        """Forget readers that are gone, among those of some columns."""
        owner = self.owner
        living = {reader.name for reader in self.readers}
        gone = [name for name, column in owner.columns.items() if column in columns and name not in living]
        for name in gone:
            column = owner.columns.pop(name)
            owner.pool.died(column)
            owner.free_columns.append(column)
            self.covered["lending", "dead readers forgotten"] += 1
        return bool(gone)

    def _idle(self) -> None:
        """Give back what nobody has used for a while."""
        for slot in self.owner.pool.idle(self.now - 20):
            self.owner.pool.forget(slot)
            self.owner.files.pop((slot.row, slot.birth))[0] = _GIVEN_BACK
            self.covered["lending", "slots given back"] += 1

    def _owner_dies(self) -> None:
        """Its files go; what readers have mapped stays, and messages of it may still come."""
        if self.rng.random() < 0.1:
            self.owner.files.clear()
            self.gone.append(self.owner)
            self.owner = self._owner()
            self.covered["lending", "owners that died"] += 1

    # -- the readers ---------------------------------------------------------------------------------------------------

    def _open_one(self) -> None:
        """Open a message that came, in any order; it may stay and come again."""
        reader = self.rng.choice(self.readers)
        if not reader.inbox or not self._begin(reader):
            return
        number = int(self.rng.random() * len(reader.inbox))
        message = reader.inbox[number] if self.rng.random() < 0.2 else reader.inbox.pop(number)
        owner = message.owner
        key = id(owner)
        place = reader.places.get(key)
        if place is None:
            column = owner.columns.get(reader.name)
            if column is None:
                return
            place = reader.places[key] = Borrowed(_Marks(owner, column))
        if not place.enter(message.row, message.generation):
            self.covered["lending", "late messages refused"] += 1
            return
        if reader not in self.readers:  # it died in the middle of it
            return
        known = reader.files.get((key, message.row))
        if known is None or known[0] != message.birth:
            file = owner.files.get((message.row, message.birth))
            if file is None:  # the owner has died: its directory is gone
                place.leave(message.row)
                self.covered["lending", "files that are gone"] += 1
                return
            known = reader.files[key, message.row] = (message.birth, file)
        if known[1][0] != message.content:
            broken("I14", f"a message opened other bytes than it names in row {message.row}")
        reader.views.append(_View(owner, message.row, known[1], message.content))
        self.covered["lending", "opened"] += 1

    def _let_go(self) -> None:
        reader = self.rng.choice(self.readers)
        if reader.views and self._begin(reader):
            view = reader.views.pop(int(self.rng.random() * len(reader.views)))
            reader.places[id(view.owner)].leave(view.row)

    def _die(self) -> None:
        """A reader ends as it stands; another process takes its part."""
        if self.rng.random() < 0.1:
            number = int(self.rng.random() * len(self.readers))
            self.dead.append(self.readers[number])
            self.readers[number] = self._reader()
            self.covered["lending", "readers that died"] += 1

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.interleave = 0.0
        while self.owner.leases:
            self._drop()
        while any(reader.views for reader in self.readers):
            self._let_go()
        pool = self.owner.pool
        pool.collect(self.now)
        self._bury(pool.awaited())
        pool.collect(self.now)
        if pool.lent or len(pool.free()) != len(pool.slots):
            broken("I14", f"{pool.lent} bytes are still lent, and nobody holds any")


def lending(seed: int, covered: dict[object, int]) -> None:
    """Play one schedule; raises ``Violation`` when shared memory shows what it must not, or is not given back."""
    _Play(seed, covered).run()
