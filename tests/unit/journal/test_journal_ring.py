from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbus.protocol.caller import CallerLane
from zbus.protocol.journal import (
    RING,
    Fate,
    JournalError,
    JournalReport,
    LaneHistory,
    LaneRing,
    fingerprint,
    history,
    shortened,
)

SESSION = bytes(range(16))


class Store(list[int]):
    """Memory that stops after so many stores, as a killed process does."""

    def __init__(self, budget: Iterator[int]) -> None:
        super().__init__([0] * RING)
        self.budget = budget

    def __setitem__(self, index, value) -> None:
        if next(self.budget) <= 0:
            raise Killed
        super().__setitem__(index, value)


class Killed(BaseException):
    """The process is gone."""


class Life:
    """A lane whose calls are run, skipped and overtaken, with the truth kept beside the ring."""

    def __init__(self, stores: int) -> None:
        budget = iter(range(stores, -1, -1))
        self.marks = Store(budget)
        self.ring = LaneRing(self.marks, Store(budget))
        self.truth: dict[int, Fate] = {}

    def begin(self, seq: int) -> None:
        self.ring.begin(seq)
        self.truth[seq] = Fate.BEGAN

    def end(self, seq: int, *, raises: bool, answers: bool) -> None:
        if raises:
            self.ring.raised(seq)
        else:
            self.ring.end(seq)
        self.truth[seq] = Fate.RAISED if raises else Fate.ENDED
        if answers and not raises:
            self.ring.answered(seq, (b"reply",))


def told(marks: list[int]) -> LaneHistory:
    """Return the history that these marks tell."""
    return history(SESSION, "main", marks)


def live(seed: int, stores: int) -> tuple[Life, int, int]:
    """Live the life of ``seed`` until so many stores: (life, first seq, seq after the last)."""
    dice = random.Random(seed)
    first = dice.choice([0, 1, RING - 3, 5 * RING + 7, (1 << 40) - 2])
    count = dice.randint(1, 24)
    width = dice.randint(1, 6)
    life = Life(stores)
    running: list[int] = []
    waiting = [first + n for n in range(count) if dice.random() < 0.7]  # the others are skipped places
    try:
        while waiting or running:
            if waiting and len(running) < width and dice.random() < 0.6:
                seq = waiting.pop(min(dice.randint(0, 2), len(waiting) - 1))  # threads overtake each other
                life.begin(seq)
                running.append(seq)
            elif running:
                seq = running.pop(dice.randrange(len(running)))
                life.end(seq, raises=dice.random() < 0.3, answers=dice.random() < 0.7)
    except Killed:
        pass
    return life, first, first + count


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_whenever_the_process_is_killed_each_call_is_told_as_it_was(seed: int) -> None:
    """A life cut off between any two stores is told exactly, with skipped places and calls that overtake others."""
    for stores in range(4 * 24):
        life, first, after = live(seed, stores)
        found = told(life.marks)
        for seq in range(first, after + 3):
            assert found.fate(seq) is life.truth.get(seq, Fate.NEVER_STARTED), (stores, seq)


@given(st.integers(0, 1 << 32), st.integers(0, 60), st.integers(0, 20))
@settings(deadline=None)
def test_a_shortened_history_says_less_but_nothing_else(seed: int, stores: int, weight: int) -> None:
    """What is left of a history that was cut to size is what it said before; the rest is not told."""
    life, first, after = live(seed, stores)
    whole = told(life.marks)
    short = shortened(whole, weight)
    assert short.weight <= weight
    for seq in range(first, after):
        assert short.fate(seq) in (whole.fate(seq), Fate.UNTOLD)
        if seq >= short.since:
            assert short.fate(seq) is whole.fate(seq)


def test_a_ring_that_came_round_tells_the_last_places_and_no_others() -> None:
    """Places more than a ring behind the newest are not told; all others are."""
    life = Life(10 * RING)
    last = 3 * RING + 11
    for seq in range(last + 1):
        life.begin(seq)
        life.end(seq, raises=False, answers=False)
    found = told(life.marks)
    assert found.fate(last - RING) is Fate.UNTOLD
    assert {found.fate(seq) for seq in range(last - RING + 1, last + 1)} == {Fate.ENDED}
    assert found.fate(last + 1) is Fate.NEVER_STARTED
    assert found.weight == 1


def test_every_open_call_of_a_caller_has_a_place_of_its_own() -> None:
    """A ring holds twice what a caller may keep open, so batches up to a whole window are told exactly."""
    assert CallerLane(SESSION, 1, 1, "main").window_calls * 2 <= RING


def test_an_empty_ring_says_that_nothing_started() -> None:
    """Fresh memory is a history without calls."""
    assert told([0] * RING).fate(0) is Fate.NEVER_STARTED


@pytest.mark.parametrize(
    "mark", [5 << 8 | 1, 3 << 8, 3 << 8 | 0xF1, 255], ids=["foreign place", "no state", "unknown state", "no seq"]
)
def test_marks_that_no_ring_can_hold_are_refused(mark) -> None:
    """Memory that was scribbled over is not read as a history."""
    marks = [0] * RING
    marks[3] = mark
    with pytest.raises(JournalError):
        told(marks)


def test_a_lane_without_an_entry_never_started_only_if_the_report_is_complete() -> None:
    """Absence proves something only where every lane has had its ring."""
    entry = LaneHistory(session=SESSION.hex(), lane="main", upto=1, ended=[(0, 0)])
    complete = JournalReport(complete=True, lanes=[entry]).lane(SESSION, "gen")
    assert complete is not None
    assert complete.fate(0) is Fate.NEVER_STARTED
    assert JournalReport(complete=False, lanes=[entry]).lane(SESSION, "gen") is None
    assert JournalReport(complete=False, lanes=[entry]).lane(SESSION, "main") is entry
    assert JournalReport(complete=False, lanes=[entry]).lane(bytes(16), "main") is None


def test_fingerprints_tell_replies_apart() -> None:
    """Size and content count; the container of a buffer does not."""
    replies = [(b"",), (b"a",), (b"b",), (b"a", b"b"), (b"a", bytes(9)), (bytes(5000),)]
    for one, other in itertools.combinations(replies, 2):
        assert fingerprint(one) != fingerprint(other)
    assert fingerprint((bytearray(b"abc"), memoryview(b"d"))) == fingerprint((b"abc", b"d"))


@pytest.mark.parametrize("frames", [(b"",), (b"abc",), (bytes(3000),), (b"abc", memoryview(bytes(70_000)))])
def test_the_fingerprint_of_a_reply_is_kept(frames) -> None:
    """Short replies take a shorter way to the same print."""
    prints = [0] * RING
    marks = [0] * RING
    ring = LaneRing(marks, prints)
    ring.begin(RING + 1)
    ring.end(RING + 1)
    ring.answered(RING + 1, frames)
    assert prints[1] == fingerprint(frames)
    assert told(marks).fate(RING + 1) is Fate.ENDED


@pytest.mark.parametrize("first", [0, 5, RING - 2, 3 * RING - 1])
def test_replies_that_leave_together_are_marked_as_each_would_be(first: int) -> None:
    """Also where the ring comes round between them."""
    bodies = [b"a", b"", bytes(700), b"last"]
    rings = [([0] * RING, [0] * RING) for _ in range(2)]
    each, together = (LaneRing(*words) for words in rings)
    for seq in range(first, first + 4):
        assert not each.has_begun(seq)
        each.begin(seq)
        assert each.has_begun(seq)
        each.end(seq)
        assert not each.has_begun(seq)
    for seq, body in enumerate(bodies, first):
        each.answered(seq, (body,))
    together.answered_together(first, bodies)
    assert rings[0] == rings[1]
