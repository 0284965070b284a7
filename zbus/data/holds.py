"""The holder's side of ``refstore``: what it holds of each owner, what it has let go, and when it must be heard. Pure.

An owner is told everything at least once: what was let go stays on the list until the owner has acknowledged it, and
telling it twice does no harm. While anything of an owner is held, it hears of the holder at least every ``renew_ns``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Holds", "Tell"]

_MOST: Final = 1024
"""Most claims and numbers in one message; the rest follows when it is acknowledged."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell an owner what is let go; with nothing in it, that the holder lives.

    Attributes:
        owner: Whom.
        claims, numbers: What.
    """

    owner: Hashable
    claims: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(slots=True)
class _Owner:
    held: int = 0
    claims: dict[int, None] = field(default_factory=dict)  # let go and not acknowledged, in order
    numbers: dict[int, None] = field(default_factory=dict)
    telling: Tell | None = None
    told_ns: int = 0


class Holds:
    """What one holder holds. One mutator at a time.

    Args:
        renew_ns: How often an owner must hear of the holder.
    """

    def __init__(self, renew_ns: int) -> None:
        self.renew_ns = renew_ns
        self._owners: dict[Hashable, _Owner] = {}

    def take(self, owner: Hashable, now_ns: int) -> None:
        """Something more of an owner may be held: a call was placed there, or a handle came from there."""
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = _Owner(told_ns=now_ns)
        known.held += 1

    def let_go(self, owner: Hashable, *, claim: int = 0, number: int = 0) -> None:
        """What a call made there is not held any more, or one value is not: one of what was taken."""
        known = self._owners.get(owner)
        if known is None:
            return
        known.held -= 1
        if claim:
            known.claims[claim] = None
        if number:
            known.numbers[number] = None

    def due(self, now_ns: int) -> list[Tell]:
        """Return what must be told now; each is answered by ``told`` or ``failed``."""
        tells = []
        for owner, known in self._owners.items():
            if known.telling is None and (
                known.claims or known.numbers or (known.held and now_ns - known.told_ns >= self.renew_ns)
            ):
                claims = tuple(known.claims)[:_MOST]
                known.telling = Tell(owner, claims, tuple(known.numbers)[: _MOST - len(claims)])
                tells.append(known.telling)
        return tells

    def told(self, tell: Tell, now_ns: int) -> None:
        """An owner has acknowledged."""
        known = self._owners.get(tell.owner)
        if known is None or known.telling is not tell:
            return
        known.telling = None
        known.told_ns = now_ns
        for claim in tell.claims:
            known.claims.pop(claim, None)
        for number in tell.numbers:
            known.numbers.pop(number, None)
        if not known.held and not known.claims and not known.numbers:
            del self._owners[tell.owner]

    def failed(self, tell: Tell) -> None:
        """It is not known that an owner heard: it is told again."""
        known = self._owners.get(tell.owner)
        if known is not None and known.telling is tell:
            known.telling = None

    def dead(self, owner: Hashable) -> None:
        """An owner is gone, with all that it kept."""
        self._owners.pop(owner, None)

    def owes(self, owner: Hashable) -> bool:
        """Tell whether an owner must be told at once what is let go."""
        known = self._owners.get(owner)
        return known is not None and known.telling is None and bool(known.claims or known.numbers)

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing has to be told."""
        return not self._owners

    @property
    def owners(self) -> tuple[Hashable, ...]:
        """Those of whom anything is held or to be told."""
        return tuple(self._owners)
