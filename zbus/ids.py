"""Identities that appear on the wire and in the registry.

Every id is a plain int, str or bytes behind a ``NewType``: cheap on the wire, told apart by mypy.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple, NewType

__all__ = [
    "Epoch",
    "Incarnation",
    "Session",
    "WorkerName",
    "incarnation_start",
    "new_incarnation",
    "new_session",
]

Session = NewType("Session", bytes)
"""128 random bits naming one controller process (or guest)."""

Epoch = NewType("Epoch", int)
"""Fencing number of a controller: claimed in the registry, strictly rising, from 1. A guest's is 0."""

Incarnation = NewType("Incarnation", int)
"""One start of one rank: the start counter in the top 16 bits, 48 random bits below (one msgpack uint64)."""

_RANDOM_BITS: Final = 48


class WorkerName(NamedTuple):
    """The stable name of a worker: several incarnations may bear it, one is current."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role}/{self.rank}"


def new_session() -> Session:
    """Return a fresh random session id (16 bytes)."""
    return Session(os.urandom(16))


def new_incarnation(start: int) -> Incarnation:
    """Return a fresh incarnation for start number ``start`` (0, 1, … 65535).

    Raises:
        ValueError: ``start`` does not fit 16 bits.
    """
    if not 0 <= start < 1 << 16:
        msg = f"start counter {start} is outside 0..65535"
        raise ValueError(msg)
    return Incarnation(start << _RANDOM_BITS | int.from_bytes(os.urandom(6), "big"))


def incarnation_start(incarnation: int) -> int:
    """Return the start counter (0, 1, …) inside an incarnation."""
    return incarnation >> _RANDOM_BITS
