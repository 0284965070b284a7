"""Tests of the test: each hand-made fault of the machines must be found within a bounded number of seeds."""

from __future__ import annotations

import pytest

from zbus.testing.simulation import joining_mutants, keeping_mutants, lending_mutants, run_seeds, trace_mutants  # noqa: F401  # these join the list
from zbus.testing.simulation.mutants import MUTANTS, applied, run_mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_falls(name):
    """The simulation notices this fault, by a rule that is meant for it."""
    verdict = run_mutant(name)
    assert verdict.failure is not None, f"{name} lives: {MUTANTS[name].doc}"
    assert verdict.killed, verdict.failure


def test_there_are_enough_mutants():
    """A simulation is worth what it finds."""
    assert len(MUTANTS) >= 25


def test_a_mutant_is_taken_out_again():
    """After a mutant the machines are whole."""
    with applied("no_dedup"):
        assert run_seeds(range(2_000)).failures
    assert not run_seeds(range(200)).failures
