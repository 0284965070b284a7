"""When silence is asked about: it follows the round trips measured, doubles, is bounded, and differs between lanes."""

from __future__ import annotations

import itertools

import pytest

from protocol_kit import EPOCH, INCARNATION, MS, SESSION, reply, words
from zbus.protocol.caller import CallerLane, Timing
from zbus.protocol.messages import Kind, Status


def lane(session: bytes = SESSION, **options) -> CallerLane:
    """Return a connected lane with the timers of the product, but for ``options``."""
    machine = CallerLane(session, EPOCH, INCARNATION, "main", timing=Timing(**options))
    machine.on_connected(0, 0)
    return machine


def probes(machine: CallerLane, count: int) -> list[int]:
    """Place a call, answer nothing, and return when it is asked about (ms)."""
    machine.place((b"x",), 1, 1, None, 0)
    times = []
    now = 0
    while len(times) < count:
        now = machine.due_ns
        times += [now // MS] * words(machine.on_timer(now)).count("PROBE 0")
    return times


def test_before_anything_is_measured_silence_lasts_its_first_time():
    """One second, then twice as long each time, up to the ceiling."""
    assert probes(lane(jitter=0.0), 7) == [1_000, 3_000, 7_000, 15_000, 31_000, 61_000, 91_000]


@pytest.mark.parametrize(("trip_ms", "first_ms"), [(0.1, 200), (50, 200), (100, 300), (3_000, 9_000), (60_000, 30_000)])
def test_the_first_question_waits_for_a_round_trip_and_its_spread(trip_ms, first_ms):
    """A near worker is asked after 0.2 s, a far one not before it could have answered; never later than the ceiling."""
    machine = lane(jitter=0.0)
    machine.round_trip(int(trip_ms * MS))
    assert probes(machine, 1) == [first_ms]


def test_a_steady_link_is_trusted_more_with_each_round_trip():
    """The deviation shrinks with what is measured; one slow answer widens it again."""
    machine = lane(jitter=0.0)
    patience = []
    for _ in range(12):
        machine.round_trip(400 * MS)
        patience.append(machine.patience)
    assert patience == sorted(patience, reverse=True)
    assert patience[-1] < 500 * MS
    machine.round_trip(4_000 * MS)
    assert machine.patience > 3_000 * MS


def test_only_an_answer_to_a_single_question_counts():
    """After two questions it is open which one was answered."""
    machine = lane(jitter=0.0)
    machine.place((b"x",), 1, 1, None, 0)
    machine.on_timer(1_000 * MS)
    machine.receive(reply(Kind.PROGRESS, 0, Status.RUNNING), (), 1_120 * MS)
    assert machine.patience == 120 * MS + 4 * 60 * MS
    asked = 0
    while asked < 3:
        now = machine.due_ns
        asked += words(machine.on_timer(now)).count("PROBE 0")
    machine.receive(reply(Kind.PROGRESS, 0, Status.RUNNING), (), now)
    assert machine.patience == 360 * MS


def test_lanes_that_fall_silent_together_do_not_ask_together():
    """A hundred sessions whose worker stops at once: their second questions are spread over half of the pause."""
    seconds = [probes(lane(n.to_bytes(8, "big") * 2), 2)[1] for n in range(100)]
    assert 2_400 <= min(seconds) < 2_700
    assert 3_300 < max(seconds) <= 3_500
    assert len(set(seconds)) > 80
    assert probes(lane(), 5) == probes(lane(), 5), "the same lane with the same history asks at the same times"


def test_pauses_grow_whatever_the_jitter():
    """Each silence is longer than the one before until the ceiling."""
    for n in range(50):
        gaps = [b - a for a, b in itertools.pairwise([0, *probes(lane(n.to_bytes(16, "big")), 5)])]
        assert gaps == sorted(gaps)
