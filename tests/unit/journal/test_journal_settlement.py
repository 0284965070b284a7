from __future__ import annotations

import pytest

from zbus.protocol.caller import CallerLane
from zbus.protocol.journal import LaneHistory
from zbus.protocol.messages import Finish, Header, Kind, Outcome, OutcomeKind, Status

SESSION = bytes(range(16))
HOW = "killed by SIGKILL"
NOW = 10**12


def _lane(**fields) -> CallerLane:
    lane = CallerLane(SESSION, 1, 7, "main", **fields)
    lane.on_connected(0, NOW)
    return lane


def _reply(kind: Kind, seq: int, status: Status = Status.OK, floor: int = 0) -> Header:
    return Header(kind, SESSION, 1, 7, "main", seq, 1, 1, floor, 0, status)


def _history(**fields) -> LaneHistory:
    return LaneHistory(session=SESSION.hex(), lane="main", **fields)


def _settled(lane: CallerLane, history: LaneHistory | None) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    for effect in lane.on_dead("worker_exit", HOW, history):
        assert isinstance(effect, Finish)
        assert effect.seq not in outcomes
        outcomes[effect.seq] = effect.outcome
    lane.validate()
    assert lane.outstanding == 0
    return outcomes


def test_each_call_is_settled_by_what_the_journal_tells() -> None:
    """Executed, begun and never started calls end differently, each with its evidence."""
    lane = _lane()
    for _ in range(5):
        lane.place((b"x",), 1, 1, None, NOW)
    lane.receive(_reply(Kind.RESULT, 0), (b"r",), NOW)
    outcomes = _settled(lane, _history(upto=4, ended=[(0, 2)], raised=[2], began=[3]))
    assert {seq: (o.kind, o.reason, o.evidence) for seq, o in outcomes.items()} == {
        1: (OutcomeKind.UNKNOWN, "worker_exit", f"{HOW}; the call was executed, reply lost"),
        2: (OutcomeKind.UNKNOWN, "worker_exit", f"{HOW}; the call was executed, reply lost (it raised)"),
        3: (OutcomeKind.UNKNOWN, "worker_exit", f"{HOW}; the call was running: began, no end"),
        4: (OutcomeKind.NOT_EXECUTED, "worker_exit", f"{HOW}; the call was not started: the worker died before"),
    }


def test_the_calls_of_a_batch_are_settled_one_by_one() -> None:
    """A batch that died in its middle has calls of every kind; those that were answered keep their answer."""
    lane = _lane()
    lane.place((b"x",), 5, 1, None, NOW)
    lane.receive(_reply(Kind.RESULT, 0), (b"r",), NOW)
    outcomes = _settled(lane, _history(upto=3, ended=[(0, 1)], began=[2]))
    kinds = {seq: outcome.kind for seq, outcome in outcomes.items()}
    assert kinds == {
        1: OutcomeKind.UNKNOWN,
        2: OutcomeKind.UNKNOWN,
        3: OutcomeKind.NOT_EXECUTED,
        4: OutcomeKind.NOT_EXECUTED,
    }


def test_what_was_never_sent_did_not_run_whatever_the_journal_says() -> None:
    """The caller's own knowledge comes first."""
    lane = CallerLane(SESSION, 1, 7, "main")
    lane.place((b"x",), 1, 1, None, NOW)
    (outcome,) = _settled(lane, _history(upto=1, began=[0])).values()
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.NOT_EXECUTED, 0)


def test_without_a_journal_whatever_was_sent_is_unknown() -> None:
    """No journal proves nothing."""
    lane = _lane()
    lane.place((b"x",), 2, 1, None, NOW)
    assert {outcome.kind for outcome in _settled(lane, None).values()} == {OutcomeKind.UNKNOWN}


def test_places_that_the_journal_no_longer_tells_are_unknown() -> None:
    """A place that was used again is not taken for one that never started."""
    lane = _lane()
    lane.place((b"x",), 3, 1, None, NOW)
    outcomes = _settled(lane, _history(since=2, upto=4, ended=[(0, 1)]))
    assert [outcomes[seq].kind for seq in range(3)] == [OutcomeKind.UNKNOWN] * 3
    assert "used again" in outcomes[0].evidence
    assert "executed" in outcomes[2].evidence


def test_a_cancelled_call_that_never_started_was_cancelled() -> None:
    """The user asked for it, and the journal proves that it worked; one that began is unknown all the same."""
    lane = _lane()
    for seq in range(2):
        lane.place((b"x",), 1, 1, None, NOW)
        lane.cancel(seq, NOW)
    outcomes = _settled(lane, _history(upto=1, began=[0]))
    assert (outcomes[0].kind, outcomes[1].kind) == (OutcomeKind.UNKNOWN, OutcomeKind.CANCELLED)
    assert outcomes[1].reason == "cancelled"


def test_a_call_that_had_its_outcome_gets_no_other() -> None:
    """A deadline's word stands; the end of the worker only frees the place."""
    lane = _lane()
    lane.place((b"x",), 1, 1, NOW + 1, NOW)
    lane.receive(_reply(Kind.PROGRESS, 0, Status.RUNNING), (), NOW)
    effects = [*lane.on_timer(NOW + 2), *lane.receive(_reply(Kind.PROGRESS, 0, Status.RUNNING), (), NOW + 3)]
    effects += lane.on_timer(NOW + 3 + lane.timing.stop_grace)
    assert [effect for effect in effects if isinstance(effect, Finish)]
    assert _settled(lane, _history(upto=1, ended=[(0, 0)])) == {}


@pytest.mark.parametrize(("ended", "words"), [([], "began, no end after 2 items"), ([(0, 0)], "lost after 2 items")])
def test_a_stream_tells_how_many_items_came(ended, words) -> None:
    """An unknown end of a stream says how much of it was delivered."""
    lane = _lane()
    lane.place((b"x",), 1, 1, None, NOW)
    for number in range(2):
        lane.receive(_reply(Kind.CHUNK, 0, floor=number), (b"i",), NOW)
    (outcome,) = _settled(lane, _history(upto=1, ended=ended, began=[] if ended else [0])).values()
    assert outcome.kind is OutcomeKind.UNKNOWN
    assert words in outcome.evidence


def test_calls_placed_after_the_end_are_refused_as_before() -> None:
    """The journal speaks of the past alone."""
    lane = _lane()
    _settled(lane, _history())
    _, effects = lane.place((b"x",), 1, 1, None, NOW)
    (effect,) = effects
    assert isinstance(effect, Finish)
    assert effect.outcome.kind is OutcomeKind.NOT_EXECUTED
