"""Traces in the simulation: whatever befalls processes, sidecar, messages and disk, every record is accounted for."""

from __future__ import annotations

from random import Random

import pytest

from coverage_kit import must_have_happened
from zbus.testing.simulation import run_seeds, trace_mutants
from zbus.testing.simulation.knobs import draw
from zbus.testing.simulation.mutants import MUTANTS, applied
from zbus.testing.simulation.shrink import shrink
from zbus.testing.simulation.trace_knobs import draw_tracing

MUST_HAPPEN = """
a block is dropped and counted · a calm trace · a harmed trace · a killed process · a loss is said
a message comes twice · a message is lost · a message overtakes · a socket takes no more
a traced process dies at an effect · an end in the spill · disk full: all · disk full: file · disk full: spill
disk full: spool · lines wait in the spool · sent from the spill · sent to nobody · the sidecar dies at an effect
the sidecar is killed · the sidecar is stopped
"""


def test_every_record_is_accounted_for():
    """I12 holds in 1,200 runs of traced workers, in which each fault occurs."""
    report = run_seeds(range(1_200), "trace")
    assert not report.failures, report.failures[0]
    must_have_happened(MUST_HAPPEN, 3, report, prefix="trace: ")


@pytest.mark.ci
def test_every_record_is_accounted_for_in_many_runs():
    """I12 holds in 10,000 further runs."""
    report = run_seeds(range(1_000_000, 1_010_000), "trace")
    assert not report.failures, report.failures[0]
    must_have_happened(MUST_HAPPEN, 30, report, prefix="trace: ")


def test_a_run_is_the_same_with_and_without_tracing():
    """What tracing is like is drawn apart: seeds that were found before it still play what they played."""
    for seed in range(50):
        traced = draw_tracing(Random(seed), "trace")
        with_it = draw(Random(seed), Random(1), Random(2), Random(3), tracing=traced)
        without = draw(Random(seed), Random(1), Random(2), Random(3))
        assert with_it.tracing
        assert {n: getattr(with_it, n) for n in without.__slots__ if n not in traced} == {
            n: getattr(without, n) for n in without.__slots__ if n not in traced
        }


def test_tracing_has_mutants_of_its_own():
    """At least eight ways to lose or double a record, each noticed by the rule about records."""
    mine = [name for name, one in MUTANTS.items() if one.apply.__module__ == trace_mutants.__name__]
    assert len(mine) >= 8
    assert all("I12" in MUTANTS[name].rules for name in mine)


def test_a_failing_trace_is_made_small():
    """The shrinker turns off what is not needed to lose a record: one worker, and few of the faults."""
    with applied("a_trace_block_acknowledged_before_it_is_stored"):
        failure = run_seeds(range(1000), "trace").failures[0]
        shrunk = shrink(failure.seed, "trace")
    assert shrunk.failure.rule == "I12"
    assert shrunk.knobs.workers == 1
    assert shrunk.knobs.trace_fills == 1
    assert shrunk.knobs.trace_loss == shrunk.knobs.trace_crashes == shrunk.knobs.trace_pauses == 0
