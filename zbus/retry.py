"""When to try again: a retry policy and a token bucket, both pure.

A *retry* here is a second execution, never a retransmission (the transport retransmits on its own and a worker knows
a doubled request). It is allowed only where a second run can do no harm: the method did not start (proved), or its
endpoint is declared ``idempotent`` or ``pure``. An error raised by the engine is never retried.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from zbus.errors import ConfigError

__all__ = ["DEFAULT_RETRY", "NO_RETRY", "RetryPolicy", "TokenBucket", "deadline_seconds", "duration_s"]

MAX_DEADLINE_S: Final = 1e8
"""Some three years: far beyond any call, and within what clocks and timers of any kind can count."""

_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


def duration_s(value: float | str, what: str = "duration") -> float:
    """Return ``value`` in seconds.

    Args:
        value: A number of seconds, or text such as ``"250ms"``, ``"30s"``, ``"2m"``, ``"1.5h"``.
        what: What it sets, for the message.

    Raises:
        ConfigError: Not a number or known text, negative, NaN or infinite.
    """
    seconds = -1.0
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        unit = _UNITS.get(match[2] or "s") if match else None
        if match and unit:
            seconds = float(match[1]) * unit
    elif not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < float("inf"):
        msg = f"{what} {value!r} is not a duration"
        raise ConfigError(msg, hint='give seconds as a number, or text such as "250ms", "30s", "2m", "1h"')
    return seconds


def deadline_seconds(value: float | str, what: str = "deadline") -> float:
    """Return a deadline in seconds: a duration that some call could meet and a clock can count.

    Raises:
        ConfigError: Not a duration, not above zero, or of years.
    """
    seconds = duration_s(value, what)
    if not 0 < seconds <= MAX_DEADLINE_S:
        msg = f"{what} {value!r} is not between 0 and {MAX_DEADLINE_S:g} seconds"
        raise ConfigError(msg, hint='give seconds as a number above 0, or text such as "30s", "2m", "1h"')
    return seconds


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a call may run again.

    Attributes:
        attempts: Executions in all, the first included (1: never again).
        backoff_s: Pause before the second execution, in seconds.
        factor: What each further pause is multiplied by.
        max_backoff_s: Longest pause, in seconds.
        jitter: Share of a pause that is random: 0 is none, 0.5 draws from 50 % to 100 % of it.
        budget_s: Time for all executions together, in seconds; None: the call's deadline alone. 0: now or not at all,
            so that a call does not wait for a rank to come back either.
    """

    attempts: int = 3
    backoff_s: float = 0.1
    factor: float = 2.0
    max_backoff_s: float = 5.0
    jitter: float = 0.5
    budget_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.attempts < 1 or self.backoff_s < 0 or self.factor < 1 or not 0 <= self.jitter <= 1:
            msg = f"{self!r} is not a retry policy"
            raise ConfigError(msg, hint="attempts >= 1, backoff_s >= 0, factor >= 1, 0 <= jitter <= 1")

    def pause_s(self, executions: int, spent_s: float, random: Callable[[], float]) -> float | None:
        """Return how long to wait before the next execution, or None when there shall be none.

        Args:
            executions: How many there were (at least 1).
            spent_s: Seconds since the first began.
            random: Source of numbers in [0, 1), injected so that a test can hand in its own.
        """
        if executions >= self.attempts:
            return None
        full = min(self.max_backoff_s, self.backoff_s * self.factor ** (executions - 1))
        pause = full * (1 - self.jitter * random())
        if self.budget_s is not None and spent_s + pause >= self.budget_s:
            return None
        return pause


NO_RETRY: Final = RetryPolicy(attempts=1)
"""Run once."""

DEFAULT_RETRY: Final = RetryPolicy()
"""What ``idempotent`` and ``pure`` endpoints get when nothing else is said."""


class TokenBucket:
    """Limits second executions of a whole group, so that a failing role is not stormed.

    Not thread-safe: guard it with the owner's lock.

    Args:
        capacity: Most tokens it holds; it starts full.
        refill_per_s: Tokens that come back per second.
    """

    def __init__(self, capacity: float = 20.0, refill_per_s: float = 2.0) -> None:
        self._capacity = capacity
        self._refill_per_ns = refill_per_s / 1e9
        self._tokens = capacity
        self._seen_ns: int | None = None

    def take(self, now_ns: int) -> bool:
        """Take one token if there is one; ``now_ns`` is a monotonic time."""
        if self._seen_ns is not None:
            self._tokens = min(self._capacity, self._tokens + (now_ns - self._seen_ns) * self._refill_per_ns)
        self._seen_ns = now_ns
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
