"""Statistics of rollouts: what ended how since the last time, how long it took, how stale it was when handed out."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from controller.rollouts.results import Rollout

if TYPE_CHECKING:
    from controller.rollouts.control import Answers
    from controller.rollouts.driver import Driver
    from zbus.rl.stats import Stats

__all__ = ["Counters"]

_MOST: Final = 4096
"""So many rollouts are noted one by one, then added up."""


class Counters:
    """Records what is handed out; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}
        self._own: Stats | None = None

    def handed_out(self, rollouts: Iterable[Rollout], version: int) -> None:
        """Note rollouts that a caller gets while ``version`` counts."""
        with self._lock:
            for one in rollouts:
                self._times.setdefault("queued_s", []).append(one.queued_s)
                self._times.setdefault("ran_s", []).append(one.ran_s)
                if one.accepted and one.oldest is not None:
                    self._times.setdefault("staleness", []).append(float(version - one.oldest))
            if len(self._times.get("ran_s", ())) >= _MOST:
                self._add_up()

    def export(self, driver: Driver, answers: Answers) -> dict[str, float]:
        """Return statistics since the last time, with those of the ranks merged.

        Raises:
            ValueError: Ranks declare a key differently, or hand over no statistics; key and place are named.
        """
        from zbus.rl.stats import merge, values  # numpy is needed here, not to run rollouts

        with self._lock:
            own, self._own = self._add_up(), None
            before, self._seen = self._seen, dict(driver.tasks.counts)
            counts = {str(name): count - before.get(name, 0) for name, count in self._seen.items()}
        with own.scope("rollout"):
            own.scalar(counts, reduce="sum")
            queued, running, ready = driver.tasks.tally()
            stale = len(driver.routes.stale())
            own.scalar(
                queued=queued, running=running, ready=ready, version=driver.tasks.staleness.version,
                ranks_stale=stale, ranks_missing=len(answers.missing),
            )  # fmt: skip
        return values(merge([own.export(), *answers.values.values()]))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _add_up(self) -> Stats:
        """Add the numbers noted so far to the statistics, which stay small though nobody asks for them; lock held."""
        from zbus.rl.stats import Stats  # see `export`

        own = self._own = self._own or Stats()
        with own.scope("rollout"):
            for name, numbers in self._times.items():
                own.scalars(name, numbers)
        self._times = {}
        return own
