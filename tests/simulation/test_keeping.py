"""Kept values in the simulation: whatever befalls owners, holders and messages, none is lost or left behind."""

from __future__ import annotations

import pytest

from coverage_kit import must_have_happened
from zbus.testing.simulation import keeping_mutants, run_seeds
from zbus.testing.simulation.mutants import MUTANTS

MUST_HAPPEN = """
kept · opened · told that it is gone · owners that were gone · asked in vain · came too late · files that were gone
gone that nobody held · gone for silence · let go before it was there · calls given up · calls that ran again
owners that died · holders that died · holders replaced · deaths between two effects · processes stopped · cut off
no room
"""


def test_what_is_held_is_there_and_what_is_not_goes():
    """I15 holds in 60 runs of ten minutes, in which each fault and each end of a value occurs."""
    report = run_seeds(range(60), "keeping")
    assert not report.failures, report.failures[0]
    must_have_happened(MUST_HAPPEN, 1, report, prefix="keeping: ")


@pytest.mark.ci
def test_what_is_held_is_there_and_what_is_not_goes_in_many_runs():
    """I15 holds in 2,500 further runs."""
    report = run_seeds(range(1_000_000, 1_002_500), "keeping")
    assert not report.failures, report.failures[0]
    must_have_happened(MUST_HAPPEN, 30, report, prefix="keeping: ")


def test_kept_values_have_mutants_of_their_own():
    """At least a dozen ways to lose, mistake or forget a value, each noticed by the rule about kept values."""
    mine = [name for name, one in MUTANTS.items() if one.apply.__module__ == keeping_mutants.__name__]
    assert len(mine) >= 12
    assert all(MUTANTS[name].rules == ("I15",) for name in mine)
