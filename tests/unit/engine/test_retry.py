from __future__ import annotations

import pytest

from zbus.errors import ConfigError
from zbus.retry import NO_RETRY, RetryPolicy, TokenBucket, deadline_seconds, duration_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(30, 30.0), (0.5, 0.5), ("250ms", 0.25), ("30s", 30.0), ("2m", 120.0), ("1.5 h", 5400.0), ("7", 7.0)],
)
def test_durations_are_numbers_or_text_with_a_unit(value, seconds):
    """A duration is seconds, or text that names its unit."""
    assert duration_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "-1s", -1, float("nan"), float("inf"), True, "5 weeks"])
def test_what_is_no_duration_is_refused(value):
    """Neither negative, infinite nor unknown durations pass."""
    with pytest.raises(ConfigError, match="is not a duration"):
        duration_s(value)


def test_pauses_grow_up_to_a_ceiling():
    """Each pause is the last one times the factor, never above the maximum."""
    policy = RetryPolicy(attempts=6, backoff_s=1, factor=2, max_backoff_s=5, jitter=0)
    assert [policy.pause_s(n, 0, lambda: 0.5) for n in range(1, 7)] == [1, 2, 4, 5, 5, None]


def test_jitter_only_shortens():
    """A random share of the pause is taken off, so that callers do not come back together."""
    policy = RetryPolicy(attempts=2, backoff_s=1, jitter=0.5)
    assert policy.pause_s(1, 0, lambda: 0.0) == 1
    assert policy.pause_s(1, 0, lambda: 0.999) == pytest.approx(0.5, abs=0.01)


def test_the_budget_ends_retries():
    """No execution starts after the budget."""
    policy = RetryPolicy(attempts=9, backoff_s=1, jitter=0, budget_s=3)
    assert policy.pause_s(1, 1.9, lambda: 0) == 1
    assert policy.pause_s(1, 2.0, lambda: 0) is None


def test_no_retry_never_runs_again():
    """One execution is the last one."""
    assert NO_RETRY.pause_s(1, 0, lambda: 0) is None


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"factor": 0.5}, {"jitter": 2}, {"backoff_s": -1}])
def test_a_policy_without_meaning_is_refused(fields):
    """Values outside their range are refused when the policy is made."""
    with pytest.raises(ConfigError, match="is not a retry policy"):
        RetryPolicy(**fields)


def test_the_bucket_limits_and_refills():
    """A token comes back with time, never beyond the capacity."""
    bucket = TokenBucket(capacity=2, refill_per_s=1)
    assert [bucket.take(0) for _ in range(3)] == [True, True, False]
    assert bucket.take(500_000_000) is False
    assert bucket.take(1_000_000_000) is True
    assert [bucket.take(100_000_000_000) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("value", [0, "0s", -1, 1e300, "100000000d", float("inf")])
def test_a_deadline_that_no_call_can_have_is_refused(value):
    """Zero is no deadline and is never taken for "none"; an endless one would break a clock."""
    with pytest.raises(ConfigError, match="deadline"):
        deadline_seconds(value)


def test_a_tight_or_a_long_deadline_is_one():
    """A microsecond and a year are deadlines."""
    assert deadline_seconds("1us") == pytest.approx(1e-6)
    assert deadline_seconds("365d") == pytest.approx(365 * 86400)
