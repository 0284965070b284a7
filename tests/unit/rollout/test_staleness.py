from __future__ import annotations

import pytest

from controller.rollouts.staleness import Limits, Staleness
from zbus.errors import ConfigError


def counters(batch=4, concurrent=16, stale: int | None = 1) -> Staleness:
    """Make counters under limits."""
    return Staleness(Limits(batch, concurrent, stale))


def run(staleness: Staleness, count: int, *, accepted=True) -> None:
    """Start so many and end them."""
    for _ in range(count):
        staleness.started(counts=True)
    for _ in range(count):
        staleness.ended(counts=True, accepted=accepted)


@pytest.mark.parametrize("version", [0, 1, 5])
@pytest.mark.parametrize("stale", [0, 1, 3])
@pytest.mark.parametrize("running", [0, 3, 20])
def test_capacity_is_the_less_of_two_limits(version, stale, running):
    """min(most at once - running, (staleness + version + 1) batches - (accepted + running))."""
    staleness = counters(batch=4, concurrent=16, stale=stale)
    staleness.version, staleness.accepted, staleness.running = version, 4 * version, running
    assert staleness.capacity() == min(16 - running, (stale + version + 1) * 4 - (4 * version + running))


def test_on_policy_runs_one_batch_per_version():
    """Staleness 0: after a batch was accepted nothing starts until a new version counts."""
    staleness = counters(batch=4, stale=0)
    run(staleness, 4)
    assert staleness.capacity() == 0
    staleness.advance(1, waiting=0)
    assert staleness.capacity() == 4


def test_rejected_rollouts_give_their_place_back():
    """Only what was accepted is held against the versions."""
    staleness = counters(batch=4, stale=0)
    run(staleness, 3, accepted=False)
    assert staleness.capacity() == 4


def test_capacity_may_be_negative():
    """More accepted than a version allows is no error: nothing starts."""
    staleness = counters(batch=1, stale=0)
    staleness.accepted = 3
    assert staleness.capacity() == -2


def test_without_a_limit_only_concurrency_counts():
    """max_staleness=None."""
    staleness = counters(concurrent=3, stale=None)
    run(staleness, 100)
    assert staleness.capacity() == 3
    assert not staleness.is_stale(-50)


def test_what_does_not_count_takes_a_place_and_no_credit():
    """A rollout that is waited for at once is held against concurrency alone."""
    staleness = counters(batch=1, concurrent=2, stale=0)
    staleness.started(counts=True)
    assert staleness.capacity() == 0
    assert staleness.capacity(counts=False) == 1
    staleness.started(counts=False)
    assert staleness.capacity(counts=False) == 0
    staleness.ended(counts=False, accepted=True)
    assert (staleness.accepted, staleness.free) == (0, 0)


def test_after_a_recovery_the_earlier_versions_are_used_up():
    """A job that goes on at version 100 may run as much ahead as at version 0, and no more."""
    fresh, resumed = counters(), counters()
    resumed.recovered(100)
    assert resumed.capacity() == fresh.capacity() == 8
    run(resumed, 8)
    assert resumed.capacity() == 0


def test_steps_that_used_less_than_a_batch_earn_no_credit():
    """Ten versions without a rollout leave room for as many as one version does: none would become stale unseen."""
    staleness = counters(batch=4, stale=1)
    staleness.advance(10, waiting=0)
    assert staleness.capacity() == 8
    run(staleness, 5)
    staleness.advance(11, waiting=5)
    assert staleness.capacity() == 3


def test_what_is_dropped_makes_room():
    """A rollout that became stale before it was taken may be replaced."""
    staleness = counters(batch=1, stale=0)
    run(staleness, 1)
    assert staleness.capacity() == 0
    staleness.dropped()
    assert staleness.capacity() == 1


def test_stale_is_older_than_the_limit():
    """A rollout may be as many versions old as the limit says, and what has no version is never stale."""
    staleness = counters(stale=2)
    staleness.advance(5, waiting=0)
    assert [staleness.is_stale(version) for version in (2, 3, 5, None)] == [True, False, False, False]


def test_versions_only_rise():
    """An older version is refused, the same one again is not."""
    staleness = counters()
    staleness.advance(3, waiting=0)
    staleness.advance(3, waiting=0)
    with pytest.raises(ConfigError, match="version 2 is older than version 3"):
        staleness.advance(2, waiting=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0}, {"max_concurrent": 0}, {"max_staleness": -1}, {"queue": 0}, {"results": 0},
        {"batch_size": 1.5}, {"max_concurrent": True}, {"batch_size": 8, "results": 4, "max_staleness": 0},
    ],
)  # fmt: skip
def test_limits_under_which_nothing_could_run_are_refused(wrong):
    """A configuration that never yields capacity is an error at the start, not a hang."""
    with pytest.raises(ConfigError, match=next(iter(wrong)) if len(wrong) == 1 else "results=4"):
        Limits(**wrong)
