"""Which slot may be used again: never one that somebody can still read, and always one that nobody can."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zbus.data.pool import Pool, let_go, opened, size_class

KIB = 1 << 10


class Cells:
    """The table, and what the owner lets be opened."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], int] = {}
        self.open: dict[int, int] = {}

    def cell(self, row, column):
        """Return what a reader wrote."""
        return self.cells.get((row, column), 0)

    def wipe(self, row, column):
        """Forget what a dead reader wrote."""
        self.cells.pop((row, column), None)

    def close(self, row):
        """Nobody may open it any more."""
        self.open[row] = 0


def test_a_slot_is_used_again_only_when_its_leases_and_its_readers_are_gone():
    """A lease keeps it, an open reader keeps it; one that never opened it does not."""
    cells = Cells()
    pool = Pool(1 << 30, 8, cells)
    _, slot = pool.grow(100 * KIB)
    slot.readers |= {1, 2}
    assert pool.take(100 * KIB, 0) is None, "it is leased"
    cells.cells[slot.row, 1] = opened(slot.generation)
    pool.drop(slot.row, slot.generation)
    assert pool.take(100 * KIB, 0) is None, "reader 1 has it open"
    assert cells.open[slot.row] == 0, "reader 2 may not open it any more"
    cells.cells[slot.row, 1] = let_go(slot.generation)
    assert pool.take(100 * KIB, 0) is slot


def test_a_dead_reader_keeps_nothing():
    """What a reader that died had open is free once that is told."""
    cells = Cells()
    pool = Pool(1 << 30, 8, cells)
    _, slot = pool.grow(100 * KIB)
    slot.readers.add(7)
    cells.cells[slot.row, 7] = opened(slot.generation)
    pool.drop(slot.row, slot.generation)
    pool.collect(0)
    assert pool.awaited() == {7}
    pool.died(7)
    assert pool.take(100 * KIB, 0) is slot


def test_a_dead_reader_does_not_speak_for_the_next_one_in_its_column():
    """A rank that takes the place of a killed one, and never opens what that one had open, keeps nothing."""
    cells = Cells()
    pool = Pool(1 << 30, 8, cells)
    _, slot = pool.grow(100 * KIB)
    slot.readers.add(7)
    cells.cells[slot.row, 7] = opened(slot.generation)
    pool.died(7)
    slot.readers.add(7)
    pool.drop(slot.row, slot.generation)
    assert pool.take(100 * KIB, 0) is slot


def test_the_limit_holds_and_free_slots_make_room():
    """Slots of a size nobody wants go before a request is refused; those in use never go."""
    pool = Pool(size_class(1 << 20) * 2, 8, Cells())
    _, first = pool.grow(1 << 20)
    _, second = pool.grow(1 << 20)
    assert pool.grow(1 << 20) == ([], None)
    pool.drop(first.row, first.generation)
    pool.collect(1)
    gone, third = pool.grow(900 * KIB)
    assert gone == [first]
    assert third is not None
    assert pool.total == second.size + third.size <= pool.limit


def test_a_slot_without_memory_leaves_no_trace():
    """Its cells are not touched, since there may be no memory for them either; limit and row are free again."""

    class Untouched(Cells):
        def close(self, row):
            raise AssertionError(row)

    pool = Pool(1 << 20, 1, Untouched())
    _, slot = pool.grow(1 << 20)
    pool.undo(slot)
    assert (pool.total, pool.lent, pool.slots) == (0, 0, {})
    assert pool.grow(1 << 20)[1] is not None


def test_a_size_class_wastes_at_most_an_eighth():
    """And never less than what is asked for."""
    for nbytes in (1, 65_536, 65_537, 10**6, 2**20, 2**20 + 1, 10**8, 2**28, 2**28 + 1):
        size = size_class(nbytes)
        assert nbytes <= size <= max(1 << 16, nbytes * 9 / 8 + (1 << 16))


class Lending(RuleBasedStateMachine):
    """One owner and three readers that open, let go, die and come late, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells()
        self.pool = Pool(3 << 20, 3, self.cells)
        self.leases: list[tuple[int, int]] = []
        self.views: dict[tuple[int, int, int], int] = {}  # (row, generation, reader) -> views
        self.sent: list[tuple[int, int, int]] = []
        self.now = 0

    @rule(size=st.sampled_from([70 * KIB, 100 * KIB, 1 << 20]), readers=st.sets(st.sampled_from([1, 2, 3])))
    def lend(self, size, readers):
        """Lend to some."""
        self.now += 1
        slot = self.pool.take(size, self.now)
        if slot is None:
            _, slot = self.pool.grow(size)
        if slot is None:
            return
        assert slot.size >= size
        for (row, generation, _), views in self.views.items():
            assert not views or row != slot.row, f"generation {generation} of row {row} is still read"
        assert not any(row == slot.row for row, _ in self.leases), "it is still leased"
        slot.readers |= readers
        self.cells.open[slot.row] = slot.generation
        self.leases.append((slot.row, slot.generation))
        self.sent += [(slot.row, slot.generation, reader) for reader in readers]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def drop(self, data):
        """The call is over."""
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.pool.drop(*lease)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def open(self, data):
        """A reader opens what was sent to it, perhaps late, perhaps again."""
        row, generation, reader = data.draw(st.sampled_from(self.sent))
        current = self.current(row, reader)
        if current is not None:
            if current == generation:
                self.views[row, generation, reader] += 1
            return
        self.cells.cells[row, reader] = opened(generation)
        if self.cells.open.get(row) != generation:
            self.cells.cells[row, reader] = let_go(generation)
        else:
            self.views[row, generation, reader] = 1

    def current(self, row, reader):
        """Return the generation of a row that a reader has open."""
        return next((g for (r, g, one), views in self.views.items() if views and (r, one) == (row, reader)), None)

    @precondition(lambda self: any(self.views.values()))
    @rule(data=st.data())
    def let_go(self, data):
        """The last view is gone."""
        key = data.draw(st.sampled_from([key for key, views in self.views.items() if views]))
        self.views[key] -= 1
        row, generation, reader = key
        if not self.views[key]:
            self.cells.cells[row, reader] = let_go(generation)

    @rule(reader=st.sampled_from([1, 2, 3]))
    def die(self, reader):
        """A reader dies with all its views."""
        for key in self.views:
            if key[2] == reader:
                self.views[key] = 0
        self.sent = [one for one in self.sent if one[2] != reader]
        self.pool.died(reader)

    @rule()
    def collect(self):
        """The owner looks around."""
        self.now += 1
        self.pool.collect(self.now)

    @invariant()
    def limit(self):
        """The books agree."""
        assert self.pool.total == sum(slot.size for slot in self.pool.slots.values()) <= self.pool.limit

    def teardown(self):
        """When all is let go and every lease is gone, everything is free."""
        for lease in self.leases:
            self.pool.drop(*lease)
        for (row, generation, reader), views in self.views.items():
            if views:
                self.cells.cells[row, reader] = let_go(generation)
        self.pool.collect(self.now)
        assert len(self.pool.free()) == len(self.pool.slots)


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
