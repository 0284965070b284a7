from __future__ import annotations

import pytest

from zbus.clock import Clock
from zbus.testing import FakeClock


def test_time_stands_still_until_it_is_told_to_pass():
    """Both clocks advance together, by seconds or nanoseconds."""
    clock: Clock = FakeClock(5, wall_ns=1_000)
    assert (clock.monotonic_ns(), clock.monotonic_ns()) == (5, 5)
    assert clock.advance(1.5) == 1_500_000_005
    assert clock.advance(ns=5) == 1_500_000_010
    assert clock.wall_ns() == 1_500_001_005


def test_a_step_of_the_wall_clock_does_not_move_the_monotonic_one():
    """As on a real machine."""
    clock = FakeClock(5)
    clock.set_wall(7)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (5, 7)


def test_time_does_not_go_back():
    """A monotonic clock never does."""
    with pytest.raises(ValueError, match="does not go back"):
        FakeClock().advance(-1)
