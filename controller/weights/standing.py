"""Which rank has which weights, as far as the controller knows. Pure: events in, no effect but what it then tells.

A rank is *current* when it has acknowledged the digest of the version that counts, *stale* when it missed that or may
hold something else, *unknown* before it was ever told anything. A rank that was started anew is stale whatever it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Standings"]


@dataclass(slots=True)
class _Rank:
    incarnation: int = 0
    version: int | None = None
    stale: str = ""


class Standings:
    """Of all ranks of a role. One mutator at a time; reading is free.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._ranks = [_Rank() for _ in range(size)]

    # -- events ------------------------------------------------------------------------------------------------------

    def seen(self, rank: int, incarnation: int) -> None:
        """A rank runs as this incarnation now."""
        known = self._ranks[rank]
        if known.incarnation and known.incarnation != incarnation and (known.version is not None or known.stale):
            known.stale, known.version = "it was started anew", None
        known.incarnation = incarnation

    def updated(self, rank: int, incarnation: int, version: int) -> None:
        """An incarnation acknowledged the digest of a version."""
        known = self._ranks[rank]
        if known.incarnation == incarnation:
            known.version, known.stale = version, ""

    def restored(self, rank: int, version: int | None) -> None:
        """A rank says that it is as it was: of this version, or as it was made."""
        self._ranks[rank].version, self._ranks[rank].stale = version, ""

    def missed(self, rank: int, why: str) -> None:
        """A rank missed an update, or it is not known what it holds."""
        self._ranks[rank].stale = why

    # -- looking -----------------------------------------------------------------------------------------------------

    def incarnation(self, rank: int) -> int:
        """Return the incarnation that was seen last."""
        return self._ranks[rank].incarnation

    def version(self, rank: int) -> int | None:
        """Return the version that a rank acknowledged, None where it never did."""
        return self._ranks[rank].version

    def has(self, rank: int, version: int | None) -> bool:
        """Tell whether a rank holds just this version."""
        known = self._ranks[rank]
        return not known.stale and version is not None and known.version == version

    def stale(self) -> dict[int, str]:
        """Return why ranks are stale."""
        return {rank: one.stale for rank, one in enumerate(self._ranks) if one.stale}

    def not_stale(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks that are not."""
        return [rank for rank in ranks if not self._ranks[rank].stale]
