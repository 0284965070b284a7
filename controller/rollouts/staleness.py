"""How many rollouts may run: by concurrency, and by how old their weights may be when they are used. Pure.

The one place in a job that applies the limit; workers apply none.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbus.errors import ConfigError

__all__ = ["Limits", "Staleness"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds rollouts.

    Attributes:
        batch_size: Rollouts that are used up between two versions of the weights.
        max_concurrent: Most rollouts that run at once.
        max_staleness: Most versions that pass between the weights that began a rollout and those it is used to change;
            0 is on-policy, None sets no limit.
        queue: Most rollouts that wait to be started, for each kind of caller; who submits more waits.
        results: Most rollouts that run or are finished and not taken, for each kind of caller; beyond, none is started.
    """

    batch_size: int = 1
    max_concurrent: int = 64
    max_staleness: int | None = None
    queue: int = 1024
    results: int = 4096

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could ever run.

        Raises:
            ConfigError: Such limits, or no whole numbers.
        """
        least = {"batch_size": 1, "max_concurrent": 1, "max_staleness": 0, "queue": 1, "results": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name == "max_staleness":
                continue
            if type(value) is not int or value < lowest:  # True is no number of rollouts
                msg = f"{name}={value!r}: no rollout could ever run"
                raise ConfigError(msg, hint=f"give a whole number, at least {lowest}")
        if self.max_staleness is not None and self.results < self.batch_size:
            msg = f"results={self.results} holds no batch of {self.batch_size}, so none could ever be taken whole"
            raise ConfigError(msg, hint=f"results={self.batch_size} or more")


class Staleness:
    """Counts rollouts against the limits. Not thread-safe.

    A rollout that does not count (it is waited for at once, such as one of an evaluation) takes a place among those
    that run, and is not held against the versions.

    Attributes:
        limits: What bounds it.
        version: Version of the weights that count.
        running: Rollouts that run and count.
        free: Rollouts that run and do not count.
        accepted: Rollouts that counted and were accepted, since version 0.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.version = 0
        self.running = 0
        self.free = 0
        self.accepted = 0

    def capacity(self, *, counts: bool = True) -> int:
        """Return how many more may start now; may be negative after a limit was lowered by events."""
        limits = self.limits
        room = limits.max_concurrent - self.running - self.free
        if not counts or limits.max_staleness is None:
            return room
        usable = (limits.max_staleness + self.version + 1) * limits.batch_size
        return min(room, usable - (self.accepted + self.running))

    def started(self, *, counts: bool) -> None:
        """One began."""
        if counts:
            self.running += 1
        else:
            self.free += 1

    def ended(self, *, counts: bool, accepted: bool) -> None:
        """One that ran has ended."""
        if counts:
            self.running -= 1
            self.accepted += accepted
        else:
            self.free -= 1

    def dropped(self) -> None:
        """One that was accepted became too old before it was taken, or was forgotten: another may take its place."""
        self.accepted -= 1

    def advance(self, version: int, waiting: int) -> None:
        """A new version counts.

        Args:
            version: Not below the one before.
            waiting: Accepted rollouts that nobody has taken.

        Raises:
            ConfigError: An older version.
        """
        if version < self.version:
            msg = f"version {version} is older than version {self.version}, which counts already"
            raise ConfigError(msg, hint="versions only rise; after a resume use recovered()")
        self.version = version
        used = version * self.limits.batch_size
        self.accepted = max(self.accepted, used + waiting)  # steps that used fewer than a batch earn no credit

    def recovered(self, version: int, waiting: int = 0) -> None:
        """A run goes on at ``version``: its earlier versions have used what they could."""
        self.version = version
        self.accepted = version * self.limits.batch_size + waiting

    def is_stale(self, oldest: int | None) -> bool:
        """Tell whether a rollout with tokens of version ``oldest`` is too old to be used now."""
        limit = self.limits.max_staleness
        return limit is not None and oldest is not None and self.version - oldest > limit
