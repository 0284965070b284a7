"""Hand-made faults of those who keep values and hold them; see ``mutants``, whose list they join on import."""

# ruff: noqa: ANN001, ANN202, ARG001, ARG005  # each replaces a method of the machines and has its parameters
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

from controller.refs import Hold
from zbus.data.borrowed import Borrowed
from zbus.data.holds import Holds
from zbus.data.refstore import RefStore
from zbus.testing.simulation.mutants import Patch, mutant, wrap

__all__: list[str] = []


@mutant("I15")
def stores_are_alike(patch: Patch) -> None:
    """An owner takes a number of its predecessor's for one of its own."""

    @wrap(patch, RefStore, "find")
    def find(original, self, generation, number):
        return original(self, self.generation, number)


@mutant("I15")
def claims_of_other_holders(patch: Patch) -> None:
    """Letting go of a claim ends what other holders have under the same number."""

    @wrap(patch, RefStore, "release")
    def release(original, self, holder, *, claims=(), numbers=(), now_ns):
        gone = list(original(self, holder, claims=claims, numbers=numbers, now_ns=now_ns))
        others = [number for number, held in self.values.items() if held.claim in claims]
        return [*gone, *self.release_any(others)]


@mutant("I15")
def what_comes_late_is_kept(patch: Patch) -> None:
    """A claim that was let go before its value came is not remembered."""

    @wrap(patch, RefStore, "release")
    def release(original, self, holder, *, claims=(), numbers=(), now_ns):
        gone = original(self, holder, claims=claims, numbers=numbers, now_ns=now_ns)
        known = self.holders.get(holder)
        if known is not None:
            known.early.clear()
            if not known.numbers:
                del self.holders[holder]
        return gone


@mutant("I15")
def silence_ends_what_is_remembered(patch: Patch) -> None:
    """With a holder's silence its claims that were let go early are forgotten."""

    @wrap(patch, RefStore, "tick")
    def tick(original, self, now_ns, is_over=lambda _: False):
        silent = {one for one, known in self.holders.items() if now_ns - known.heard_ns > self.lease_ns}
        gone = original(self, now_ns, is_over)
        for holder in silent & self.holders.keys():
            self.over(holder)
        return gone


@mutant("I15")
def silence_is_forgiven(patch: Patch) -> None:
    """A holder that is never heard again keeps what it had for ever."""

    @wrap(patch, RefStore, "tick")
    def tick(original, self, now_ns, is_over=lambda _: False):
        for known in self.holders.values():
            known.heard_ns = now_ns
        return original(self, now_ns, is_over)


@mutant("I15")
def time_in_which_nobody_listened_is_silence(patch: Patch) -> None:
    """An owner that stood still drops what holders could not tell it to keep."""

    @wrap(patch, RefStore, "tick")
    def tick(original, self, now_ns, is_over=lambda _: False):
        self.deaf_ns = None
        return original(self, now_ns, is_over)


@mutant("I15")
def silence_before_anything_was_kept_counts(patch: Patch) -> None:
    """A holder that had nothing here and said nothing is silent when something is kept for it."""

    @wrap(patch, RefStore, "put")
    def put(original, self, holder, claim, nbytes, value, method, now_ns):
        known = self.holders.get(holder)
        heard = now_ns if known is None else known.heard_ns
        done = original(self, holder, claim, nbytes, value, method, now_ns)
        if holder in self.holders:
            self.holders[holder].heard_ns = heard
        return done


@mutant("I15")
def one_that_ends_ends_all(patch: Patch) -> None:
    """With one holder that is over go the values of all."""

    @wrap(patch, RefStore, "over")
    def over(original, self, holder):
        return [*original(self, holder), *self.release_any(list(self.values))]


@mutant("I15")
def a_holder_says_nothing_while_it_holds(patch: Patch) -> None:
    """Owners hear of a holder only when it lets something go."""

    @wrap(patch, Holds, "due")
    def due(original, self, now_ns):
        for known in self._owners.values():
            known.told_ns = now_ns
        return original(self, now_ns)


@mutant("I15")
def an_answer_is_for_all_that_was_said_since(patch: Patch) -> None:
    """An acknowledgement ends also what was let go after its message was sent."""

    @wrap(patch, Holds, "told")
    def told(original, self, tell, now_ns):
        known = self._owners.get(tell.owner)
        if known is not None and known.telling is tell:
            known.claims.clear()
        original(self, tell, now_ns)


@mutant("I15")
def said_once_is_said(patch: Patch) -> None:
    """What an owner did not acknowledge is not told again."""
    patch.setattr(Holds, "failed", lambda self, tell: self.told(tell, 0))


@mutant("I15")
def calls_under_way_keep_nothing(patch: Patch) -> None:
    """A value goes with its last handle, though a call that needs it is under way."""

    @wrap(patch, Hold, "pin")
    def pin(original, self):
        pass

    @wrap(patch, Hold, "unpin")
    def unpin(original, self):
        pass


@mutant("I15")
def the_last_handle_lets_go_of_nothing(patch: Patch) -> None:
    """A handle that is dropped, and was not released, keeps its value."""
    patch.setattr(Hold, "__del__", lambda self: None)


@mutant("I15")
def a_call_that_is_given_up_keeps_its_values(patch: Patch) -> None:
    """Only what a call was sent to first is let go, not where it ran again."""

    @wrap(patch, Hold, "placed_on")
    def placed_on(original, self, owner):
        if not self._owners:
            original(self, owner)


@mutant("I15")
def a_place_is_opened_whatever_is_in_it(patch: Patch) -> None:
    """A reader does not look whether the slot that it was told of still has the value."""

    def enter(self, row, generation):
        self._open.setdefault(row, [generation, 0])[1] += 1
        return True

    patch.setattr(Borrowed, "enter", enter)
