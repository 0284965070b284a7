"""The parts of one rollout controller, which its blocking and its awaited face share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from controller.group import Group
from controller.rollouts.driver import Driver, Work
from controller.rollouts.feed import Feed
from controller.rollouts.loop import OwnLoop
from controller.rollouts.operations import Operations
from controller.rollouts.ranks import Ranks
from controller.rollouts.results import Outcome, Rollout
from controller.rollouts.staleness import Limits
from controller.rollouts.statistics import Counters
from controller.rollouts.tasks import Task
from zbus.errors import ConfigError
from zbus.trace import trace_session_event

if TYPE_CHECKING:
    from zbus.rl.rewards import RewardPool

__all__ = ["Parts"]


class Parts:
    """Driver, loop and what callers' threads keep. Methods may be called from any thread.

    Args:
        group: The role.
        ranks: Its ranks.
        limits: What bounds rollouts.
        endpoint: What a rollout without a workflow calls.
        rewards: What workflows here may call; closed with it.
        attempts, ordered, tolerate: As ``RolloutController``.
    """

    def __init__(
        self,
        group: Group,
        ranks: Ranks,
        limits: Limits,
        endpoint: str,
        *,
        rewards: RewardPool | None,
        attempts: int,
        ordered: bool,
        tolerate: int,
    ) -> None:
        self.driver = Driver(ranks, limits, attempts=attempts, ordered=ordered, ended=_ended)
        self.operations = Operations(self.driver, group, endpoint, tolerate, rewards)
        self.loop = OwnLoop(f"zbus-rollout-{group.role}")
        self.counters = Counters()
        self.limits = limits
        self._feed: Feed | None = None
        self._resumed: tuple[int, int, list[Any]] = (0, 0, [])
        self._preparing = threading.Lock()

    def close(self) -> None:
        """End the loop, its thread and the reward processes. Idempotent."""
        self.loop.close(self.driver.close)
        if self.operations.rewards is not None:
            self.operations.rewards.close()

    # -- results -------------------------------------------------------------------------------------------------------

    def handed_out(self, tasks: Iterable[Task]) -> list[Rollout]:
        """Return what tasks that a caller has taken came to."""
        return self.counted([self.driver.rollout(task) for task in tasks])

    def counted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Note rollouts that a caller gets."""
        self.counters.handed_out(rollouts, self.driver.tasks.staleness.version)
        return rollouts

    def put_back(self, found: list[Task] | int) -> None:
        """Undo a take whose caller has gone. On the loop."""
        if not isinstance(found, int):
            self.driver.put_back(found)

    # -- the data of prepare_batch -------------------------------------------------------------------------------------

    def batch_size(self, asked: int | None) -> int:
        """Return how large a batch is.

        Raises:
            ConfigError: It could never become full.
        """
        size = self.limits.batch_size if asked is None else asked
        if size < 1 or size > self.limits.results:
            msg = f"batch_size={size!r} is no batch: between 1 and results={self.limits.results}"
            raise ConfigError(msg)
        if self.limits.max_staleness is not None and size > self.limits.batch_size:
            msg = (
                f"a batch of {size} could never become full: staleness is counted in batches of "
                f"{self.limits.batch_size} between two versions"
            )
            raise ConfigError(msg, hint=f"RolloutController(batch_size={size}, ...)")
        return size

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Refuse a second ``prepare_batch`` at the same time: both would take items of one source."""
        if not self._preparing.acquire(blocking=False):
            msg = "prepare_batch is called while another call of it is not over"
            raise ConfigError(msg, hint="call it from one thread or task")
        try:
            yield
        finally:
            self._preparing.release()

    def feed_of(self, source: Iterable[Any], *, batched: bool) -> Feed:
        """Return the feed of a source: the one so far if it is the same, else a new one, after what was fetched."""
        feed = self._feed
        if feed is not None and feed.source is source and feed.batched == batched:
            return feed
        if feed is None:
            epoch, position, pending = self._resumed
            new = Feed(source, batched=batched, fetched=pending)
            new.skip(epoch, position)
        else:
            new = Feed(source, batched=batched, fetched=feed.fetched)
        self._feed = new
        return new

    def standing(self, pending: list[Any]) -> dict[str, Any]:
        """Return how far the data has come; ``pending`` is in flight."""
        feed = self._feed
        epoch, position, fetched = self._resumed if feed is None else (feed.epoch, feed.position, list(feed.fetched))
        version = self.driver.tasks.staleness.version
        return {"version": version, "epoch": epoch, "position": position, "pending": [*pending, *fetched]}

    def restore(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Begin where ``standing`` was; returns what is to be done on the loop.

        Raises:
            ConfigError: Too late, or no such state.
        """
        if self._feed is not None:
            msg = "rollouts were prepared already, so this controller cannot go on from another run's state"
            raise ConfigError(msg, hint="restore before the first prepare_batch")
        missing = {"version", "epoch", "position", "pending"} - set(state)
        if missing:
            msg = f"this is no state of a rollout controller: it lacks {', '.join(sorted(missing))}"
            raise ConfigError(msg, hint="restore what state() returned")
        version = int(state["version"])
        self._resumed = (int(state["epoch"]), int(state["position"]), list(state["pending"]))
        return lambda: self.driver.recovered(version)

    @staticmethod
    def countdown(timeout_s: float | None) -> Callable[[], float | None]:
        """Return what tells how much of a timeout is left, in seconds, 0 at least; None of None."""
        if timeout_s is None:
            return lambda: None
        until = time.monotonic() + timeout_s
        return lambda: max(0.0, until - time.monotonic())


def _ended(work: Work, outcome: Outcome, error: BaseException | None) -> None:
    """Finish a rollout's task in the trace."""
    if work.trace is not None:
        reason = None if error is None else f"{type(error).__name__}: {error}"
        trace_session_event("mark_finalized", task_id=work.trace, status=outcome, reason=reason)
