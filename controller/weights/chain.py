"""What makes a version of the weights out of nothing: one publication of all tensors, and the changes after it. Pure.

A rank that has the version before takes the last piece alone; one that missed any, or was started anew, takes all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Chain", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One publication.

    Attributes:
        source: The ``Ref`` that keeps it, or the path of its directory.
        names: Names of its tensors.
        nbytes: Their size.
        full: Whether these are all of the model.
    """

    source: Any
    names: frozenset[str]
    nbytes: int
    full: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """A version and its pieces, oldest first; the first is full.

    Attributes:
        version: What the weights are called.
        digest: Of all tensors.
        on_disk: Whether the pieces are directories.
        pieces: At least one.
    """

    version: int
    digest: str
    on_disk: bool
    pieces: tuple[Piece, ...]

    @property
    def last(self) -> Piece:
        """The change from the version before."""
        return self.pieces[-1]

    @property
    def is_long(self) -> bool:
        """Whether the changes are as large as the whole, so that publishing all again costs less than keeping them."""
        return sum(piece.nbytes for piece in self.pieces[1:]) >= max(1, self.pieces[0].nbytes)

    @classmethod
    def after(cls, before: Chain | None, version: int, digest: str, piece: Piece, *, on_disk: bool) -> Chain:
        """Add a publication; changes that it repeats in full are left out.

        Raises:
            ValueError: It is of changes only, and there is nothing that they change.
        """
        if piece.full:
            return cls(version, digest, on_disk, (piece,))
        if before is None or before.on_disk != on_disk:
            msg = "changed tensors were published, and not what they change"
            raise ValueError(msg)
        kept = [one for one in before.pieces[1:] if not one.names <= piece.names]
        return cls(version, digest, on_disk, (before.pieces[0], *kept, piece))
