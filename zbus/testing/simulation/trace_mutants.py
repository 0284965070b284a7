"""Hand-made faults of the machines that bring traces to safety; see ``mutants``, whose list they join on import."""

# ruff: noqa: ANN001, ANN202  # each wraps a method of the machines and has its parameters
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

from zbus.testing.simulation.mutants import Patch, mutant, wrap
from zbus.testing.simulation.trace_disk import SimFiles
from zbus.trace import wire
from zbus.trace.intake import Intake, SeqSet
from zbus.trace.outbox import Outbox

__all__: list[str] = []


@mutant("I12")
def a_trace_block_counted_at_every_answer(patch: Patch) -> None:
    """Each acknowledgement counts, also of a block that was spilled or acknowledged before."""

    @wrap(patch, Outbox, "_on_ack")
    def on_ack(original, self, ack):
        original(self, ack)
        if ack.ok:
            self._written += 1


@mutant("I12")
def a_trace_block_acknowledged_before_it_is_stored(patch: Patch) -> None:
    """The sidecar says that it has a block which its spool did not take."""

    @wrap(patch, Intake, "_on_data")
    def on_data(original, self, message, raw, payload):
        answer = original(self, message, raw, payload)
        return wire.Ack(answer.source, answer.seq) if isinstance(answer, wire.Ack) else answer


@mutant("I12")
def a_trace_block_stored_as_often_as_it_comes(patch: Patch) -> None:
    """Neither spool nor file is asked whether a block is there."""

    @wrap(patch, SeqSet, "__contains__")
    def contains(_original, _self, _seq):
        return False


@mutant("I12")
def a_restarted_sidecar_trusts_no_file(patch: Patch) -> None:
    """It writes again what its predecessor wrote."""

    @wrap(patch, SimFiles, "learn")
    def learn(original, self, message):
        original(self, message)
        return SeqSet()


@mutant("I12")
def a_frame_taken_from_the_spool_before_it_is_lines(patch: Patch) -> None:
    """A sidecar that dies, or finds the disk full, has neither."""

    @wrap(patch, Intake, "_to_file")
    def to_file(original, self, message, payload):
        original(self, message, payload)
        return True


@mutant("I12")
def dropped_records_uncounted(patch: Patch) -> None:
    """What finds no place any more is forgotten."""

    @wrap(patch, Outbox, "_drop")
    def drop(original, self, entry):
        original(self, entry)
        self._lost.clear()


@mutant("I12")
def the_number_of_a_dropped_block_given_again(patch: Patch) -> None:
    """Also one that the sidecar may know."""

    @wrap(patch, Outbox, "_drop")
    def drop(original, self, entry):
        entry.told = False
        original(self, entry)


@mutant("I12")
def unacknowledged_blocks_kept_in_memory(patch: Patch) -> None:
    """A process waits for the sidecar as long as it takes, and when it is killed all that is gone."""

    @wrap(patch, Outbox, "secure")
    def secure(original, self):
        if not self.alive and self._held_bytes > 40:
            original(self)


@mutant("I12")
def a_spill_removed_with_the_first_answer(patch: Patch) -> None:
    """The other blocks in it count as safe and are nowhere."""

    @wrap(patch, Outbox, "_on_ack")
    def on_ack(original, self, ack):
        if ack.seq in self._spill.waiting:
            for seq in list(self._spill.waiting):
                self._spill.done(seq)
        original(self, ack)


@mutant("I11", "I12")
def a_silent_sidecar_believed_alive(patch: Patch) -> None:
    """A process whose spill waits for a sidecar that was restarted elsewhere never looks for it."""

    @wrap(patch, Outbox, "_silent")
    def silent(_original, _self):
        return False


@mutant("I12")
def the_end_said_before_the_spill_is_sent(patch: Patch) -> None:
    """The sidecar takes a stream for ended whose blocks are still with the process."""

    @wrap(patch, Outbox, "finish")
    def finish(_original, self, end):
        self.secure()
        self._say(wire.End(self.opening.source, self._next, end()), None)
        yield from ()
        self.ended = True
