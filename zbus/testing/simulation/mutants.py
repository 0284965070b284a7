"""Hand-made faults of the machines: the simulation must notice each one, or it proves nothing.

A mutant is a function that breaks a machine through a ``Patch``; ``MUTANTS`` names them all with the rules that may
notice. ``run_mutants`` plays seeds against each until a rule breaks.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202, ARG001, ARG005, SLF001  # each wraps a method of the machines and has its parameters
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from zbus.protocol.callee import Callee, RunState
from zbus.protocol.callee_state import Kept
from zbus.protocol.caller import CallerLane
from zbus.protocol.gang import Gang, Step
from zbus.protocol.journal import LaneHistory, LaneRing
from zbus.protocol.liveness import LinkMachine
from zbus.protocol.messages import Chunk, Finish, Kind, Outcome, OutcomeKind, SendTo, Status
from zbus.registry import FileRegistry, lease
from zbus.registry.lease import LeaseObserver, LeaseState
from zbus.testing.simulation.ledger import Ledger
from zbus.testing.simulation.rough import SimShelf
from zbus.testing.simulation.runner import Failure, Report, run_seeds

__all__ = ["MUTANTS", "Mutant", "Patch", "Verdict", "applied", "run_mutant", "run_mutants"]

LIMIT: Final = 20_000
"""Small seeds played against a mutant before it counts as alive, and a twentieth as many large ones."""


_INHERITED: Final = object()


class Patch:
    """Replaced attributes, put back by ``undo``."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []  # owner, name, what it had itself or _INHERITED

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put all back, the last first."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One hand-made fault.

    Attributes:
        name: What it is called.
        doc: What is wrong.
        apply: Puts it in.
        rules: Which rules may notice it.
        registry: Only claims and leases can notice it.
    """

    name: str
    doc: str
    apply: Callable[[Patch], None]
    rules: tuple[str, ...]
    registry: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mutant fell, after how many runs, and to what."""

    name: str
    failure: Failure | None
    runs: int
    expected: bool

    @property
    def killed(self) -> bool:
        """Whether a rule that is meant for it noticed it."""
        return self.failure is not None and self.expected


MUTANTS: Final[dict[str, Mutant]] = {}


def mutant(*rules: str, registry: bool = False) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a function that breaks a machine, and the rules that may notice."""

    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        doc = (function.__doc__ or "").strip()
        MUTANTS[function.__name__] = Mutant(function.__name__, doc, function, rules, registry)
        return function

    return register


@contextmanager
def applied(name: str) -> Iterator[Mutant]:
    """Break a machine for the length of a ``with`` block."""
    patch = Patch()
    found = MUTANTS[name]
    try:
        found.apply(patch)
        yield found
    finally:
        patch.undo()


def run_mutant(name: str, *, limit: int = LIMIT) -> Verdict:
    """Play seeds against one mutant until a rule breaks or the limit is reached."""
    with applied(name) as found:
        if "I12" in found.rules:
            report = run_seeds(range(limit // 4), "trace")
            return _verdict(found, report, report.runs)
        if "I15" in found.rules:
            report = run_seeds(range(limit // 20), "keeping")
            return _verdict(found, report, report.runs)
        runs = 0
        deep = limit // 20
        stages = [
            (range(500), "small"),
            (range(400), "large"),
            (range(500, limit), "small"),
            (range(400, deep), "large"),
        ]
        for seeds, size in [*([] if found.registry else stages), (range(limit // 50), "registry")]:
            report = run_seeds(seeds, size)
            runs += report.runs
            if report.failures:
                break
        return _verdict(found, report, runs)


def _verdict(found: Mutant, report: Report, runs: int) -> Verdict:
    failure = report.failures[0] if report.failures else None
    return Verdict(found.name, failure, runs, failure is not None and failure.rule in found.rules)


def run_mutants(names: Iterable[str] | None = None) -> list[Verdict]:
    """Play seeds against all mutants, or some."""
    return [run_mutant(name) for name in (MUTANTS if names is None else names)]


def wrap(patch: Patch, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a method by one that gets the original first."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *arguments, **named: function(original, *arguments, **named))
        return function

    return decorate


@mutant("I2")
def no_dedup(patch: Patch) -> None:
    """A request that comes again is run again."""

    @wrap(patch, Callee, "_on_request")
    def on_request(original, self, header, buffers, session, lane, now, effects):
        if header.kind == Kind.REQ and header.seq < lane.arrival_next:
            lane.runs.pop(header.seq, None)
            lane.arrival_next, lane.floor, lane.running = header.seq, 0, 0
        original(self, header, buffers, session, lane, now, effects)


@mutant("I2")
def no_dedup_while_running(patch: Patch) -> None:
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
def epoch_ignored(patch: Patch) -> None:
    """A lower epoch is obeyed."""
    patch.setattr(Ledger, "check_orphans", lambda *arguments: None)  # which notices as well

    @wrap(patch, Callee, "hello")
    def hello(original, self, header, now):
        self.max_epoch = 0
        return original(self, header._replace(epoch=min(header.epoch, 1)), now)


@mutant("I7")
def queue_of_the_old_epoch_kept(patch: Patch) -> None:
    """What the replaced controller had queued still runs."""
    patch.setattr(Ledger, "check_orphans", lambda *arguments: None)  # which notices as well

    @wrap(patch, Callee, "_retire")
    def retire(original, self, session_id, session, effects):
        return None


@mutant("I4", "KeyError", "I2")
def incarnation_ignored(patch: Patch) -> None:
    """A request meant for another incarnation is run."""

    @wrap(patch, Callee, "receive")
    def receive(original, self, header, buffers, peer, now):
        return original(self, header._replace(incarnation=self._incarnation), buffers, peer, now)

    @wrap(patch, Callee, "hello")
    def hello(original, self, header, now):
        return original(self, header._replace(incarnation=0), now)


@mutant("I6")
def floor_off_by_one(patch: Patch) -> None:
    """The reply of the first call above the floor is forgotten."""

    @wrap(patch, Callee, "_advance_floor")
    def advance(original, self, lane, floor):
        original(self, lane, floor + 1)
        lane.floor = floor


@mutant("I6", "P8")
def reply_not_cached(patch: Patch) -> None:
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
def no_window(patch: Patch) -> None:
    """The caller sends as much as it likes."""
    patch.setattr(CallerLane, "_has_credit", lambda self, request: True)


@mutant("I4", "I3")
def silence_answered_by_a_new_seq(patch: Patch) -> None:
    """Silence makes the caller place the payload once more."""

    def probe(self, request, now, effects):
        header = self._header(Kind.REQ, request)._replace(seq=self._next_seq)
        effects.append(SendTo(header, request.buffers))
        self._set_probe(request, now + self.timing.probe_first)

    patch.setattr(CallerLane, "_probe", probe)


@mutant("I4", "I1", "I5")
def reply_to_the_wrong_seq(patch: Patch) -> None:
    """An answer carries the number of the next call."""

    @wrap(patch, Callee, "_reply_header")
    def reply(original, self, *arguments, **named):
        header = original(self, *arguments, **named)
        return header._replace(seq=header.seq + 1)


@mutant("I5")
def not_executed_of_sent_calls(patch: Patch) -> None:
    """A dead worker makes every open call NOT_EXECUTED."""

    @wrap(patch, CallerLane, "on_dead")
    def on_dead(original, self, reason, evidence, history):
        effects = original(self, reason, evidence, history)
        outcome = Outcome(OutcomeKind.NOT_EXECUTED, None, reason, evidence)
        return [Finish(e.lane, e.seq, outcome) if type(e) is Finish else e for e in effects]


@mutant("I1", "I5")
def a_gap_is_proof(patch: Patch) -> None:
    """A gap that the callee reports is taken as proof that a later place never arrived."""

    @wrap(patch, CallerLane, "_on_gap")
    def on_gap(original, self, callee_next, now, effects):
        for request in self._order:
            if request.seq >= callee_next and request.attempts and (request.cancelled or request.give_up_ns < 1 << 62):
                self._finish_all(request, Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", "unseen"), effects)
        original(self, callee_next, now, effects)


@mutant("I6")
def journal_unread(patch: Patch) -> None:
    """The crash journal of a dead worker is not asked."""

    @wrap(patch, CallerLane, "on_dead")
    def on_dead(original, self, reason, evidence, history):
        return original(self, reason, evidence)


@mutant("I5", "validate")
def cancelled_but_queued(patch: Patch) -> None:
    """A cancelled request is answered and stays in the queue."""

    @wrap(patch, Callee, "_on_cancel")
    def on_cancel(original, self, header, session, lane, now, effects):
        run = lane.runs.get(header.seq)
        if run is None or run.state is not RunState.QUEUED:
            original(self, header, session, lane, now, effects)
            return
        buffers = run.buffers
        self._end_unstarted(header.session, session, lane, run, Status.CANCELLED, effects)
        run.state, run.buffers, run.open_calls = RunState.QUEUED, buffers, run.calls


@mutant("I7")
def drain_ignored(patch: Patch) -> None:
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
def guests_may_do_all(patch: Patch) -> None:
    """A guest may use every lane."""
    patch.setattr(Callee, "_may_use", lambda self, session, lane: True)


@mutant("P8")
def orphans_lost(patch: Patch) -> None:
    """What a superseded controller had not taken is thrown away."""
    patch.setattr(Callee, "_add_orphan", lambda self, session_id, session, lane, run: None)


@mutant("I1")
def credit_said_once(patch: Patch) -> None:
    """A lost stream credit is not said again."""

    @wrap(patch, CallerLane, "_probe")
    def probe(original, self, request, now, effects):
        acked, request.acked = request.acked, 0
        original(self, request, now, effects)
        request.acked = acked


@mutant("I1")
def silence_is_borne(patch: Patch) -> None:
    """The caller never asks."""
    patch.setattr(CallerLane, "_probe", lambda self, request, now, effects: self._set_probe(request, 1 << 61))


@mutant("I1")
def batch_replies_counted_twice(patch: Patch) -> None:
    """A reply of a batch that comes again fills a slot again."""

    @wrap(patch, CallerLane, "_on_reply")
    def on_reply(original, self, header, *rest):
        request = self._find(header.seq)
        if request is not None and request.finished:
            request.finished.discard(header.seq)
        original(self, header, *rest)


@mutant("I3")
def last_in_first_out(patch: Patch) -> None:
    """The youngest request starts first."""

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        lane.queue.reverse()
        original(self, session_id, session, lane, now, effects)
        lane.queue.reverse()


@mutant("I3", "validate")
def concurrency_ignored(patch: Patch) -> None:
    """A lane runs as many requests as it has."""

    @wrap(patch, Callee, "_admit")
    def admit(original, self, session_id, session, lane, run, effects, kind):
        original(self, session_id, session, lane, run, effects, kind)
        concurrency, lane.concurrency = lane.concurrency, 1000
        self._start(session_id, session, lane, run.arrived_ns, effects)
        lane.concurrency = concurrency


@mutant("I1")
def deadline_of_the_caller_ignored(patch: Patch) -> None:
    """A deadline passes and nobody is told."""

    def expire(self, request, now, effects):
        request.deadline_ns = 1 << 62

    patch.setattr(CallerLane, "_expire", expire)


@mutant("P6")
def deadline_of_the_callee_ignored(patch: Patch) -> None:
    """A request that expired in the queue is run."""
    patch.setattr(Callee, "expire", lambda self, now: [])

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        original(self, session_id, session, lane, 0, effects)


@mutant("I4")
def errors_are_results(patch: Patch) -> None:
    """An application error is delivered as a result."""
    table = {**CallerLane._FAILURES, Status.APP_ERROR: (OutcomeKind.OK, "", "")}
    patch.setattr(CallerLane, "_FAILURES", table)


@mutant("I4")
def refusals_are_errors(patch: Patch) -> None:
    """A call that could not be started is told as one that raised."""
    table = {**CallerLane._FAILURES, Status.NOT_STARTED: (OutcomeKind.APP_ERROR, "", "")}
    patch.setattr(CallerLane, "_FAILURES", table)


@mutant("I4")
def items_out_of_order(patch: Patch) -> None:
    """Items of a stream are delivered as they come."""

    @wrap(patch, CallerLane, "_on_chunk")
    def on_chunk(original, self, header, buffers, now, effects):
        request = self._find(header.seq)
        if request is not None:
            request.expected_chunk = header.floor
        original(self, header, buffers, now, effects)


@mutant("I10")
def impatient(patch: Patch) -> None:
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


@mutant("P4")
def go_before_all_hold(patch: Patch) -> None:
    """A call that starts together starts when the first member holds it."""

    @wrap(patch, Gang, "poised")
    def poised(original, self, member, now):
        self._poised.update(range(len(self._lanes)))
        return original(self, member, now)


@mutant("P4")
def together_ignored_by_the_worker(patch: Patch) -> None:
    """A worker starts what it should hold."""

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        for run in lane.queue:
            run.together = False
        original(self, session_id, session, lane, now, effects)


@mutant("P4", "I5", "I1")
def lost_member_not_told(patch: Patch) -> None:
    """A member is lost before the start, and the others go on waiting."""
    patch.setattr(Gang, "ended", lambda self, member, outcome, now: [])


@mutant("P4", "I5")
def go_after_a_member_was_lost(patch: Patch) -> None:
    """A lost member counts as one that holds the call."""

    def ended(self, member, outcome, now):
        self._poised.add(member)
        return []

    patch.setattr(Gang, "ended", ended)
    original = Gang.poised

    def poised(self, member, now):
        living = [lane for lane in self._lanes if lane.dead is None]
        if len(living) < len(self._lanes) and len(self._poised | {member}) == len(self._lanes) and not self.released:
            self.released = True
            steps = [
                (i, lane.release(seq, now)) for i, (lane, seq) in enumerate(zip(self._lanes, self._seqs, strict=True))
            ]
            return [Step(*step) for step in steps]
        return original(self, member, now)

    patch.setattr(Gang, "poised", poised)


@mutant("P4", "P6")
def go_after_the_deadline(patch: Patch) -> None:
    """GO is said although the deadline has passed."""

    @wrap(patch, Gang, "poised")
    def poised(original, self, member, now):
        return original(self, member, min(now, self._deadline_ns - 1))

    @wrap(patch, CallerLane, "on_timer")
    def on_timer(original, self, now):
        late = [r for r in self._order if r.together == 1 and r.remote == Status.POISED and r.deadline_ns <= now]
        for request in late:
            request.deadline_ns += 30_000_000
        return original(self, now)


@mutant("I1", "P4")
def a_poised_request_expires(patch: Patch) -> None:
    """A worker drops by itself what it told its caller it would hold."""

    @wrap(patch, Callee, "receive")
    def receive(original, self, header, buffers, peer, now):
        effects: list[Any] = []
        for session_id, session in self._sessions.items():
            for lane in session.lanes.values():
                run = lane.poised
                if run is not None and run.arrived_ns + 30_000_000 <= now:
                    lane.poised = None
                    lane.running -= 1
                    self._end_unstarted(session_id, session, lane, run, Status.EXPIRED, effects)
        return [*effects, *original(self, header, buffers, peer, now)]


@mutant("P4", "I1", "I11")
def go_said_once(patch: Patch) -> None:
    """A lost GO is not said again."""

    @wrap(patch, CallerLane, "_probe")
    def probe(original, self, request, now, effects):
        together, request.together = request.together, 0
        original(self, request, now, effects)
        request.together = together


@mutant("I3", "validate")
def overtaken_while_poised(patch: Patch) -> None:
    """What stands behind a request that waits for GO starts before it."""

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        poised, lane.poised = lane.poised, None
        original(self, session_id, session, lane, now, effects)
        if poised is not None:
            lane.poised = poised


@mutant("I8", registry=True)
def a_claim_looks_then_renames(patch: Patch) -> None:
    """A claim replaces what another client wrote meanwhile."""

    def link(self, directory, name, value):
        self._replace(directory, name, value, durable=True)
        return value

    patch.setattr(FileRegistry, "_link", link)


@mutant("I8", registry=True)
def a_claim_judged_by_the_reply_of_link(patch: Patch) -> None:
    """Told EEXIST by a repeated link, the winner calls itself a loser."""

    def link(self, directory, name, value):
        temp = self._write_temp(directory, value, durable=True)
        try:
            directory.link(temp, name)
        except FileExistsError:
            standing = self._read(directory, name, absent_is_proof=False)
            return b"somebody else" if standing in (None, value) else standing
        else:
            return value
        finally:
            self._discard(directory, temp)

    patch.setattr(FileRegistry, "_link", link)


@mutant("I1", "I11")
def a_lost_connection_is_left_to_the_transport(patch: Patch) -> None:
    """A link whose transport has given up is never dialled again."""

    @wrap(patch, LinkMachine, "link_down")
    def link_down(original, self, now, why):
        original(self, now, why)
        self.redial_due = 1 << 62


@mutant("I1", "I5", "I6", "I2", "I4", "validate")
def given_up_calls_are_sent_later(patch: Patch) -> None:
    """What was settled while the callee was silent goes out when it is back."""

    @wrap(patch, CallerLane, "give_up")
    def give_up(original, self, reason, evidence, now):
        kept = {request.seq: request.buffers for request in self._order}
        effects = original(self, reason, evidence, now)
        for request in self._order:
            if kept[request.seq]:  # what was given up before has nothing left to send
                request.skip, request.buffers = False, kept[request.seq]
        return effects


@mutant("I7", "I1", "I3")
def holding_off_is_forgotten(patch: Patch) -> None:
    """A callee that may have been replaced goes on starting what is queued."""

    @wrap(patch, Callee, "_start")
    def start(original, self, session_id, session, lane, now, effects):
        held, self.held_off = self.held_off, False
        original(self, session_id, session, lane, now, effects)
        self.held_off = held


@mutant("I5")
def not_kept_taken_for_not_run(patch: Patch) -> None:
    """That a reply was not kept is taken for proof that its call did not run."""
    table = {**CallerLane._FAILURES, Status.NOT_KEPT: (OutcomeKind.NOT_EXECUTED, "evicted", "")}
    patch.setattr(CallerLane, "_FAILURES", table)


@mutant("I2", "I4", "I6", "validate")
def a_reply_without_room_is_run_again(patch: Patch) -> None:
    """A call whose reply was not kept is forgotten, so that it runs when it comes again."""

    @wrap(patch, Callee, "_on_request")
    def on_request(original, self, header, buffers, session, lane, now, effects):
        run = lane.runs.get(header.seq)
        replies = run.replies if run is not None and run.state is RunState.DONE else ()
        if any(type(reply) is Kept and reply.buffers is None and reply.token is None for _, reply in replies):
            run.state, run.open_calls, run.replies = RunState.QUEUED, run.calls, ()
            run.buffers, run.large = buffers, False
            lane.queue.appendleft(run)
            self._start(header.session, session, lane, now, effects)
            return
        original(self, header, buffers, session, lane, now, effects)


@mutant("I4", "P8")
def the_shelf_hands_out_another_reply(patch: Patch) -> None:
    """A reply from the shelf is that of another call."""

    def get(self, token):
        return self._kept[max(self._kept)] if max(self._kept) != token else self._kept[min(self._kept)]

    patch.setattr(SimShelf, "get", get)


@mutant("validate")
def large_replies_without_bound(patch: Patch) -> None:
    """Large replies stay in memory, however many they are."""

    def keep(self, buffers, nbytes):
        kept = Kept(buffers, nbytes)
        self._kept[id(kept)] = kept
        self._kept_bytes += nbytes
        return kept

    patch.setattr(Callee, "_keep", keep)


@mutant("I5")
def a_missing_journal_is_taken_for_an_empty_one(patch: Patch) -> None:
    """Where no crash journal can be read, nothing is thought to have started."""

    @wrap(patch, CallerLane, "on_dead")
    def on_dead(original, self, reason, evidence, history):
        return original(self, reason, evidence, LaneHistory(session="", lane=self.lane) if history is None else history)


@mutant("I5")
def the_start_is_marked_late(patch: Patch) -> None:
    """The crash journal hears of a call only at its end."""
    patch.setattr(LaneRing, "begin", lambda self, seq: None)


@mutant("I6")
def the_end_is_marked_early(patch: Patch) -> None:
    """The crash journal is told that a call ended when it begins."""
    patch.setattr(LaneRing, "begin", lambda self, seq: self.end(seq))


@mutant("I1", "I4")
def items_of_a_batch(patch: Patch) -> None:
    """An item that a lying worker sends for one call of a batch is delivered."""

    @wrap(patch, CallerLane, "_on_chunk")
    def on_chunk(original, self, header, buffers, now, effects):
        request = self._find(header.seq)
        if request is not None and request.calls > 1 and request.open_calls:
            effects.append(Chunk(self.lane, header.seq, header.floor, buffers))
        original(self, header, buffers, now, effects)


@mutant("I9")
def no_patience_after_a_quick_answer(patch: Patch) -> None:
    """A measured round trip is all the time that an answer gets, and questions do not become rarer."""

    @wrap(patch, CallerLane, "_probe")
    def probe(original, self, request, now, effects):
        original(self, request, now, effects)
        if self.timing.probe_least is not None:
            self._set_probe(request, now + 1_000)


@mutant("I13", registry=True)
def own_pause_counts_as_silence(patch: Patch) -> None:
    """An observer that was stopped takes its own absence for the holder's silence."""

    def age(watched, now_ns):
        watched.silent_ns += max(0, now_ns - watched.looked_ns)
        watched.looked_ns = max(watched.looked_ns, now_ns)

    patch.setattr(lease, "_age", age)


@mutant("I13", registry=True)
def late_is_expired(patch: Patch) -> None:
    """Two renewals that are overdue count as the end."""

    @wrap(patch, LeaseObserver, "state")
    def state(original, self, holder):
        found = original(self, holder)
        return LeaseState.EXPIRED if found is LeaseState.LATE else found


@mutant("P9", registry=True)
def a_holder_without_margin(patch: Patch) -> None:
    """A holder trusts its lease beyond the time of its observers."""
    patch.setattr(lease, "HOLDER_MARGIN", 1.6)


@mutant("I11", registry=True)
def silence_never_ends_a_lease(patch: Patch) -> None:
    """An observer forgives every silence."""
    patch.setattr(lease, "_age", lambda watched, now_ns: None)
