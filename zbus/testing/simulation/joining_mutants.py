"""Hand-made faults of requests that travel together; see ``mutants``, whose list they join on import."""

# ruff: noqa: ANN001, ANN202, ARG001  # each wraps a method of the machines and has its parameters
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

from zbus.protocol.callee import Callee, RunState
from zbus.protocol.caller import CallerLane
from zbus.protocol.messages import Results, Status
from zbus.testing.simulation.mutants import Patch, mutant, wrap

__all__: list[str] = []


@mutant("I1")
def a_cancelled_request_takes_its_neighbour_with_it(patch: Patch) -> None:
    """The cancel of a request drops the one behind it, too, if they came together."""

    @wrap(patch, Callee, "_on_cancel")
    def on_cancel(original, self, header, session, lane, now, effects):
        original(self, header, session, lane, now, effects)
        behind = lane.runs.get(header.seq + 1)
        if lane.joins and behind is not None and behind.state is RunState.QUEUED:
            lane.queue.remove(behind)
            self._end_unstarted(header.session, session, lane, behind, Status.CANCELLED, effects)


@mutant("I1")
def joined_results_fill_what_was_answered(patch: Patch) -> None:
    """Results that come together are told of all their calls, also of those that have their outcome."""

    def take(self, header, bodies, now, effects):
        effects.append(Results(self.lane, header.seq, bodies, 1))
        for seq in range(header.seq, header.seq + header.calls):
            request = self._requests.get(seq)
            if request is not None:
                request.open_calls = 0
                self._retire(request)

    patch.setattr(CallerLane, "_take_results_of_several", take)


@mutant("I4")
def joined_results_in_another_order(patch: Patch) -> None:
    """Results that come together are told of each other's calls."""

    @wrap(patch, CallerLane, "_take_results_of_several")
    def take(original, self, header, bodies, now, effects):
        original(self, header, bodies[::-1], now, effects)


@mutant("I2", "I4", "I3")
def a_joined_message_that_comes_again_is_run_again(patch: Patch) -> None:
    """What came together is not looked up when it comes again."""

    @wrap(patch, Callee, "_on_joined")
    def on_joined(original, self, header, buffers, session, lane, now, effects):
        if header.seq < lane.arrival_next:
            for seq in range(header.seq, header.seq + header.calls):
                run = lane.runs.get(seq)
                if run is not None and run.state is RunState.DONE:
                    del lane.runs[seq]
            lane.arrival_next = lane.floor = header.seq
        original(self, header, buffers, session, lane, now, effects)


@mutant("I1", "I5", "I6")
def the_deadline_of_one_is_that_of_all(patch: Patch) -> None:
    """Requests that leave together all expire with the first that does."""

    @wrap(patch, CallerLane, "place_joined")
    def place_joined(original, self, payloads, deadlines, now):
        earliest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return original(self, payloads, [earliest] * len(payloads), now)
