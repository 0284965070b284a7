"""Tests of the test: each hand-made fault of the machines must be found within a bounded number of seeds."""

from __future__ import annotations

import pytest

from zbus.protocol.callee import Callee, RunState
from zbus.protocol.caller import CallerLane
from zbus.protocol.messages import Finish, Kind, Outcome, OutcomeKind, SendTo, Status
from zbus.testing.simulation import run_seeds
from zbus.testing.simulation.ledger import Ledger

MUTANTS = {}
LIMIT = 20_000


def mutant(*rules):
    """Register a function that breaks a machine, and the rules that may notice."""

    def register(function):
        MUTANTS[function.__name__] = (function, rules)
        return function

    return register


def wrap(patch, owner, name):
    """Replace a method by one that gets the original first."""

    def decorate(function):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *arguments, **named: function(original, *arguments, **named))
        return function

    return decorate


@mutant("I2")
def no_dedup(patch):
    """A request that comes again is run again."""

    @wrap(patch, Callee, "_on_request")
    def on_request(original, self, header, buffers, session, lane, now, effects):
        if header.kind == Kind.REQ and header.seq < lane.arrival_next:
            lane.runs.pop(header.seq, None)
            lane.arrival_next, lane.floor, lane.running = header.seq, 0, 0
        original(self, header, buffers, session, lane, now, effects)


@mutant("I2")
def no_dedup_while_running(patch):
    """A request that comes again while it runs is run again."""

    @wrap(patch, Callee, "_on_request")
    def on_request(original, self, header, buffers, session, lane, now, effects):
        known = lane.runs.get(header.seq)
        if known is not None and known.state is RunState.RUNNING:
            known.state = RunState.QUEUED
            lane.running -= 1
            known.buffers = buffers
            lane.queue.appendleft(known)
            self._start(header.session, session, lane, now, effects)
        original(self, header, buffers, session, lane, now, effects)


@mutant("I7")
def epoch_ignored(patch):
    """A lower epoch is obeyed."""
    patch.setattr(Ledger, "check_orphans", lambda *arguments: None)  # which notices as well

    @wrap(patch, Callee, "hello")
    def hello(original, self, header, now):
        self.max_epoch = 0
        return original(self, header._replace(epoch=min(header.epoch, 1)), now)


@mutant("I7")
def queue_of_the_old_epoch_kept(patch):
    """What the replaced controller had queued still runs."""
    patch.setattr(Ledger, "check_orphans", lambda *arguments: None)  # which notices as well

    @wrap(patch, Callee, "_retire")
    def retire(original, self, session_id, session, effects):
        return None


@mutant("I4", "KeyError", "I2")
def incarnation_ignored(patch):
    """A request meant for another incarnation is run."""

    @wrap(patch, Callee, "receive")
    def receive(original, self, header, buffers, peer, now):
        return original(self, header._replace(incarnation=self._incarnation), buffers, peer, now)

    @wrap(patch, Callee, "hello")
    def hello(original, self, header, now):
        return original(self, header._replace(incarnation=0), now)


@mutant("I6")
def floor_off_by_one(patch):
    """The reply of the first call above the floor is forgotten."""

    @wrap(patch, Callee, "_advance_floor")
    def advance(original, self, lane, floor):
        original(self, lane, floor + 1)
        lane.floor = floor


@mutant("I6")
def reply_not_cached(patch):
    """A reply is forgotten once it is sent."""

    @wrap(patch, Callee, "finished")
    def finished(original, self, session_id, lane_name, seq, *rest, **named):
        effects = original(self, session_id, lane_name, seq, *rest, **named)
        session = self._sessions.get(session_id)
        lane = session and session.lanes.get(lane_name)
        if lane and seq in lane.runs and lane.runs[seq].state is RunState.DONE:
            del lane.runs[seq]
        return effects


@mutant("validate")
def no_window(patch):
    """The caller sends as much as it likes."""
    patch.setattr(CallerLane, "_has_credit", lambda self, request: True)


@mutant("I4", "I3")
def silence_answered_by_a_new_seq(patch):
    """Silence makes the caller place the payload once more."""

    def probe(self, request, now, effects):
        header = self._header(Kind.REQ, request)._replace(seq=self._next_seq)
        effects.append(SendTo(header, request.buffers))
        self._set_probe(request, now + self.timing.probe_first)

    patch.setattr(CallerLane, "_probe", probe)


@mutant("I4", "I1", "I5")
def reply_to_the_wrong_seq(patch):
    """An answer carries the number of the next call."""

    @wrap(patch, Callee, "_reply_header")
    def reply(original, self, *arguments, **named):
        header = original(self, *arguments, **named)
        return header._replace(seq=header.seq + 1)


@mutant("I5")
def not_executed_of_sent_calls(patch):
    """A dead worker makes every open call NOT_EXECUTED."""

    @wrap(patch, CallerLane, "on_dead")
    def on_dead(original, self, reason, evidence, history):
        effects = original(self, reason, evidence, history)
        outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, evidence)
        return [Finish(e.lane, e.seq, outcome) if type(e) is Finish else e for e in effects]


@mutant("I5")
def a_gap_is_proof(patch):
    """A gap that the callee reports is taken as proof that a later place never arrived."""

    @wrap(patch, CallerLane, "_on_gap")
    def on_gap(original, self, callee_next, now, effects):
        for request in self._order:
            if request.seq >= callee_next and request.attempts and (request.cancelled or request.give_up_ns < 1 << 62):
                self._finish_all(request, Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", "unseen"), effects)
        original(self, callee_next, now, effects)


@mutant("I6")
def journal_unread(patch):
    """The crash journal of a dead worker is not asked."""

    @wrap(patch, CallerLane, "on_dead")
    def on_dead(original, self, reason, evidence, history):
        return original(self, reason, evidence)


@mutant("I5", "validate")
def cancelled_but_queued(patch):
    """A cancelled request is answered and stays in the queue."""

    @wrap(patch, Callee, "_on_cancel")
    def on_cancel(original, self, header, session, lane, effects):
        run = lane.runs.get(header.seq)
        if run is None or run.state is not RunState.QUEUED:
            original(self, header, session, lane, effects)
            return
        buffers = run.buffers
        self._end_unstarted(header.session, session, lane, run, Status.CANCELLED, effects)
        run.state, run.buffers, run.open_calls = RunState.QUEUED, buffers, run.calls


@mutant("I7")
def drain_ignored(patch):
    """A draining worker starts what comes."""

    @wrap(patch, Callee, "_start")
    def start(original, self, *arguments):
        draining, self.draining = self.draining, False
        original(self, *arguments)
        self.draining = draining

    @wrap(patch, Callee, "_admit")
    def admit(original, self, *arguments):
        draining, self.draining = self.draining, False
        original(self, *arguments)
        self.draining = draining


@mutant("I7")
def guests_may_do_all(patch):
    """A guest may use every lane."""
    patch.setattr(Callee, "_may_use", lambda self, session, lane: True)


@mutant("P8")
def orphans_lost(patch):
    """What a superseded controller had not taken is thrown away."""
    patch.setattr(Callee, "_add_orphan", lambda self, session_id, session, lane, run: None)


@mutant("I1")
def credit_said_once(patch):
    """A lost stream credit is not said again."""

    @wrap(patch, CallerLane, "_probe")
    def probe(original, self, request, now, effects):
        acked, request.acked = request.acked, 0
        original(self, request, now, effects)
        request.acked = acked


@mutant("I1")
def silence_is_borne(patch):
    """The caller never asks."""
    patch.setattr(CallerLane, "_probe", lambda self, request, now, effects: self._set_probe(request, 1 << 61))


@mutant("I1")
def batch_replies_counted_twice(patch):
    """A reply of a batch that comes again fills a slot again."""

    @wrap(patch, CallerLane, "_on_reply")
    def on_reply(original, self, header, *rest):
        request = self._find(header.seq)
        if request is not None and request.finished:
            request.finished.discard(header.seq)
        original(self, header, *rest)


@mutant("I3")
def last_in_first_out(patch):
    """The youngest request starts first."""

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        lane.queue.reverse()
        original(self, session_id, session, lane, now, effects)
        lane.queue.reverse()


@mutant("I3", "validate")
def concurrency_ignored(patch):
    """A lane runs as many requests as it has."""

    @wrap(patch, Callee, "_admit")
    def admit(original, self, session_id, session, lane, run, effects, kind):
        original(self, session_id, session, lane, run, effects, kind)
        concurrency, lane.concurrency = lane.concurrency, 1000
        self._start(session_id, session, lane, run.arrived_ns, effects)
        lane.concurrency = concurrency


@mutant("I1")
def deadline_of_the_caller_ignored(patch):
    """A deadline passes and nobody is told."""

    def expire(self, request, now, effects):
        request.deadline_ns = 1 << 62

    patch.setattr(CallerLane, "_expire", expire)


@mutant("P6")
def deadline_of_the_callee_ignored(patch):
    """A request that expired in the queue is run."""
    patch.setattr(Callee, "expire", lambda self, now: [])

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        original(self, session_id, session, lane, 0, effects)


@mutant("I4")
def errors_are_results(patch):
    """An application error is delivered as a result."""
    table = {**CallerLane._FAILURES, Status.APP_ERROR: (OutcomeKind.OK, "", "")}
    patch.setattr(CallerLane, "_FAILURES", table)


@mutant("I4")
def items_out_of_order(patch):
    """Items of a stream are delivered as they come."""

    @wrap(patch, CallerLane, "_on_chunk")
    def on_chunk(original, self, header, buffers, now, effects):
        request = self._find(header.seq)
        if request is not None:
            request.expected_chunk = header.floor
        original(self, header, buffers, now, effects)


@mutant("I10")
def impatient(patch):
    """The payload is sent again although nothing says it was lost."""

    @wrap(patch, CallerLane, "_on_progress")
    def on_progress(original, self, header, now, effects):
        original(self, header, now, effects)
        for request in self._order:
            if request.seq == header.seq and request.attempts == 1:
                self._transmit(request, now, effects)

    @wrap(patch, CallerLane, "place")
    def place(original, self, *arguments, **named):
        seq, effects = original(self, *arguments, **named)
        return seq, [*effects, *(e for e in effects if type(e) is SendTo)]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_falls(name, monkeypatch):
    """The simulation notices this fault."""
    function, rules = MUTANTS[name]
    function(monkeypatch)
    small = run_seeds(range(LIMIT))
    failures = small.failures or run_seeds(range(LIMIT // 20), "large").failures
    assert failures, f"{name} lives: {function.__doc__}"
    assert failures[0].rule in rules, failures[0]


def test_there_are_enough_mutants():
    """A simulation is worth what it finds."""
    assert len(MUTANTS) >= 25
