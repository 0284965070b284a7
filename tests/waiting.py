"""Waiting for conditions instead of sleeping: the one clock-dependent helper of the tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["PAUSE_S", "TIME_SCALE", "scaled", "wait_until", "within"]

T = TypeVar("T")

TIME_SCALE: Final = float(os.environ.get("ZBUS_TEST_TIME_SCALE", "1"))
"""Factor on every deadline of the tests: set it above 1 on a loaded or slow machine."""


PAUSE_S: Final = 3.0
"""Seconds for which a shared machine may stand still as a whole, at any moment: no test may fail for that."""


def scaled(seconds: float) -> float:
    """Return a deadline in seconds, scaled for this machine by ``ZBUS_TEST_TIME_SCALE``."""
    return seconds * TIME_SCALE


def within(seconds: float) -> float:
    """Return the bar in seconds for what took time once: ``seconds``, scaled, and a pause of the machine.

    It tells "at once" from a time limit of many seconds; a figure of speed is a benchmark's.
    """
    return scaled(seconds) + PAUSE_S


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, what: str = "the condition") -> T:
    """Poll until ``predicate`` returns something true, and return that.

    Args:
        predicate: Called again and again from this thread; an exception it raises ends the wait.
        timeout_s: Deadline in seconds before scaling, to which a pause of the machine is added; generous, because a
            passing test never spends it.
        what: What is awaited, for the message.

    Raises:
        AssertionError: The deadline passed; the message names ``what`` and the last value seen.
    """
    limit = within(timeout_s)
    deadline = time.monotonic() + limit
    pause = 0.001
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            msg = f"{what} did not come true within {limit:g} s; last value: {value!r}"
            raise AssertionError(msg)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
