"""Hand-made faults of the halves that share memory; see ``mutants``, whose list they join on import."""

# ruff: noqa: ANN001, ANN202, ARG005  # each replaces a method of the machines and has its parameters
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

from zbus.data.borrowed import Borrowed
from zbus.data.pool import Pool, let_go, opened
from zbus.testing.simulation.lending import _Owner
from zbus.testing.simulation.mutants import Patch, mutant

__all__: list[str] = []


@mutant("I14", registry=True)
def open_slots_are_used_again(patch: Patch) -> None:
    """An owner does not look who has a slot open."""
    patch.setattr(Pool, "_open_columns", lambda self, slot: set())


@mutant("I14", registry=True)
def looked_at_before_it_is_closed(patch: Patch) -> None:
    """An owner looks at the readers' marks first, and then lets nobody open the slot."""

    def collect(self, now_ns):
        for slot in list(self._busy.values()):
            if slot.leases <= 0 and not self._open_columns(slot):
                self._table.close(slot.row)
                slot.closed = True
                del self._busy[slot.row]
                slot.idle_since = now_ns

    patch.setattr(Pool, "collect", collect)


@mutant("I14", registry=True)
def generations_of_a_slot_are_alike(patch: Patch) -> None:
    """A slot that is lent again has the generation it had."""

    def lend(self, slot):
        slot.generation = slot.row + 1
        slot.leases, slot.closed = 1, False
        slot.readers.clear()
        self._busy[slot.row] = slot
        return slot

    patch.setattr(Pool, "_lend", lend)


@mutant("I14", registry=True)
def the_dead_are_waited_for(patch: Patch) -> None:
    """A reader that is gone keeps what it had open."""
    patch.setattr(Pool, "died", lambda self, column: None)


@mutant("I14", registry=True)
def the_dead_speak_for_their_successors(patch: Patch) -> None:
    """What a dead reader wrote stands in the column of the next."""
    patch.setattr(_Owner, "wipe", lambda self, row, column: None)


@mutant("I14", registry=True)
def opened_without_a_look(patch: Patch) -> None:
    """A reader opens whatever a message names."""

    def enter(self, row, generation):
        self._open.setdefault(row, [generation, 0])[1] += 1
        self._marks.mark(row, opened(generation))
        return True

    patch.setattr(Borrowed, "enter", enter)


@mutant("I14", registry=True)
def looked_at_before_it_is_marked(patch: Patch) -> None:
    """A reader looks whether a slot may be opened, and then says that it has opened it."""

    def enter(self, row, generation):
        known = self._open.get(row)
        if known is None:
            if self._marks.word(row) != generation:
                return False
            self._marks.mark(row, opened(generation))
            known = self._open[row] = [generation, 0]
        known[1] += known[0] == generation
        return known[0] == generation

    patch.setattr(Borrowed, "enter", enter)


@mutant("I14", registry=True)
def a_late_copy_gives_away_what_is_open(patch: Patch) -> None:
    """A message of an earlier generation overwrites the mark of the one that is open."""

    def enter(self, row, generation):
        known = self._open.get(row)
        if known is not None and known[0] == generation:
            known[1] += 1
            return True
        self._marks.mark(row, opened(generation))
        if self._marks.word(row) != generation:
            self._marks.mark(row, let_go(generation))
            return False
        self._open[row] = [generation, 1]
        return True

    patch.setattr(Borrowed, "enter", enter)


@mutant("I14", registry=True)
def the_first_view_lets_go_for_all(patch: Patch) -> None:
    """Of several views of a slot the first one that goes gives it back."""

    def leave(self, row):
        known = self._open[row]
        known[1] -= 1
        self._marks.mark(row, let_go(known[0]))
        if not known[1]:
            del self._open[row]

    patch.setattr(Borrowed, "leave", leave)
