from __future__ import annotations

import pytest

import waiting
from waiting import wait_until


def test_the_value_that_ended_the_wait_is_returned():
    """A predicate that gives something true gives it to the caller."""
    answers = iter([None, 0, "", "there"])

    assert wait_until(lambda: next(answers)) == "there"


def test_a_deadline_names_what_was_awaited_and_the_last_value(monkeypatch):
    """The message is enough to know what did not happen."""
    monkeypatch.setattr(waiting, "TIME_SCALE", 1.0)
    monkeypatch.setattr(waiting, "PAUSE_S", 0.0)

    with pytest.raises(AssertionError, match=r"three workers did not come true within 0\.01 s; last value: 0"):
        wait_until(lambda: 0, timeout_s=0.01, what="three workers")


def test_an_error_of_the_predicate_ends_the_wait():
    """A predicate that fails is a failure, not a reason to wait longer."""
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0)
