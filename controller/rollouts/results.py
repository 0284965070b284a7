"""What becomes of a rollout, and the errors of those that make none."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from zbus.errors import CallTimeout, RolloutError

__all__ = ["Outcome", "Rollout", "RolloutTimeout", "error_of"]


class Outcome(enum.StrEnum):
    """How a rollout ended; each has exactly one.

    ``ACCEPTED``: there is a value. ``REJECTED``: its workflow or the filter wants none of it. ``FAILED``: its workflow,
    its engine or the filter raised. ``LOST``: workers died under it as often as it may be tried, or none is left.
    ``STALE``: it was accepted, and the weights that began it are too old by now. ``CANCELLED``: by its caller.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"
    LOST = "lost"
    STALE = "stale"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One finished rollout.

    Attributes:
        task: Its number, in order of submission.
        outcome: How it ended.
        data: What was submitted.
        value: What the workflow made; None unless ``outcome`` is ACCEPTED, REJECTED by the filter, or STALE.
        error: Why it failed or was lost, else None.
        oldest: Oldest version of the weights that may have made a part of it; None where that is not known.
        newest: Newest version that may have; None where that is not known.
        rank: The rank that ran it, or was asked last by it; None where none was.
        attempts: How many times it, or its calls together, went to a rank.
        queued_s: Seconds from submission to start.
        ran_s: Seconds from start to end; 0 if it never started.
    """

    task: int
    outcome: Outcome
    data: Any = field(repr=False)
    value: Any = field(default=None, repr=False)
    error: BaseException | None = None
    oldest: int | None = None
    newest: int | None = None
    rank: int | None = None
    attempts: int = 0
    queued_s: float = 0.0
    ran_s: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether there is a value to use."""
        return self.outcome is Outcome.ACCEPTED

    def result(self) -> Any:
        """Return the value of an accepted rollout.

        Raises:
            RolloutError: It ended otherwise; its own error is the cause.
        """
        if self.outcome is Outcome.ACCEPTED:
            return self.value
        raise error_of(self) from self.error


def error_of(rollout: Rollout, *, hint: str | None = None) -> RolloutError:
    """Make the error of a rollout that was not accepted; its own error should be the cause."""
    where = "" if rollout.rank is None else f" on rank {rollout.rank}"
    why = "" if rollout.error is None else f": {type(rollout.error).__name__}: {rollout.error}"
    error = RolloutError(f"rollout {rollout.task} was {rollout.outcome}{where}{why}", hint=hint)
    error.rollout = rollout
    return error


class RolloutTimeout(CallTimeout, TimeoutError):
    """Rollouts did not finish in time; they go on, and what is finished waits for the next call."""
