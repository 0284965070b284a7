"""What is said about updates of weights before, and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["Limits", "Listener", "UpdateReport", "Way"]

Way = Literal["memory", "disk", "group"]
"""How weights go: mapped or pulled, as files, by broadcast."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of the phases of an update, in seconds.

    Attributes:
        pause: For every rank to stand still; with ``pause="wait"`` running requests end within it.
        publish: For the training ranks to gather the weights; as much again for rank 0 to write them, by disk.
        join: For the members of a new group to meet.
        transfer: For every rank to take the weights over, hash included.
        version: For the training ranks to name them.
        resume: For every rank to go on.
    """

    pause: float = 60.0
    publish: float = 600.0
    join: float = 60.0
    transfer: float = 600.0
    version: float = 30.0
    resume: float = 30.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        version: The version that counts now.
        digest: Of all weights, the same at the trainer and at every rank of ``ranks``.
        path: How they went.
        nbytes: Bytes that were published.
        full: Whether these were all tensors.
        ranks: Ranks that have them.
        stale: By rank, why the others have not; they get no work until they are refreshed.
        seconds: By phase.
    """

    version: int
    digest: str
    path: Way
    nbytes: int
    full: bool
    ranks: tuple[int, ...]
    stale: dict[int, str]
    seconds: dict[str, float] = field(default_factory=dict)


class Listener(Protocol):
    """Who routes work by what the ranks hold. Called from the thread that updates."""

    def mark_stale(self, rank: int, why: str) -> None:
        """Give a rank no work."""
        ...

    def mark_current(self, rank: int, version: int, incarnation: int) -> None:
        """A rank holds a version now, in this start of it."""
        ...

    def advance(self, version: int) -> None:
        """This version counts from now on."""
        ...
