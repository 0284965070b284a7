"""Knobs of rougher faults: full queues, slow peers, wrong clocks, lost hosts, small caches, workers that lie."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from zbus.protocol.messages import Buffers, Header, Kind, Status
from zbus.testing.simulation.knobs import MS

__all__ = ["LARGE_BYTES", "NOT_BOUNDED", "SimShelf", "draw_rough", "is_rough", "made_up"]

_SALT: Final = 0x6FCC
"""Chosen so that the runs of the corpus have none of these."""

LARGE_BYTES: Final = 40
"""From which size a reply is large in the simulation."""

NOT_BOUNDED: Final = 1 << 40


def is_rough(seed: int, size: str) -> bool:
    """Tell whether a run has some of these; told from its seed without a generator, which most runs need not make."""
    mixed = (seed ^ _SALT) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    drawn = (mixed ^ mixed >> 29) % 100
    return drawn < (40 if size == "large" else 18)


def draw_rough(rng: Random, size: str) -> dict[str, Any]:
    """Draw these knobs for a run that ``is_rough``.

    Args:
        rng: A generator of their own: so the runs of old seeds stay what they were where all are off.
        size: As in ``knobs.draw``.
    """
    r = rng.random
    more = 3 if size == "large" else 1
    return {
        "adaptive": r() < 0.5,
        "fills": 1 + int(r() * 2 * more) if r() < 0.3 else 0,
        "pace": int(r() * 12 * MS) if r() < 0.25 else 0,
        "wrong_clocks": r() < 0.3,
        "clock_jumps": 1 + int(r() * more) if r() < 0.25 else 0,
        "moves": r() if r() < 0.4 else 0.0,
        "crash_marks": 1 if r() < 0.25 else 0,
        "lies": r() * 0.5 if r() < 0.35 else 0.0,
        "keep_bytes": int(45 + r() * 90) if r() < 0.5 else NOT_BOUNDED,
        "shelf_room": r() if r() < 0.7 else 0.0,
    }


class SimShelf:
    """A worker's shelf that has room now and then.

    Args:
        rng: Decides.
        room: Share of replies that it has room for.
    """

    __slots__ = ("_kept", "_number", "_rng", "_room")

    def __init__(self, rng: Random, room: float) -> None:
        self._rng = rng
        self._room = room
        self._number = 0
        self._kept: dict[int, Buffers] = {}

    def put(self, buffers: Buffers) -> int | None:
        """As the real one."""
        if self._rng.random() >= self._room:
            return None
        self._number += 1
        self._kept[self._number] = [bytes(buffer) for buffer in buffers]
        return self._number

    def get(self, token: object) -> Buffers | None:
        """As the real one."""
        return self._kept[token]  # type: ignore[index]  # one of its own

    def drop(self, token: object) -> None:
        """As the real one."""
        del self._kept[token]  # type: ignore[arg-type]  # one of its own


def made_up(rng: Random, header: Header, buffers: Buffers) -> tuple[Header, Buffers]:
    """Return what a worker that lies says instead of this: other kinds, numbers, states; never another caller's."""
    r = rng.random
    changes: dict[str, Any] = {}
    if r() < 0.5:
        changes["kind"] = rng.choice(list(Kind))
    if r() < 0.5:
        changes["status"] = rng.choice(list(Status))
    if r() < 0.4:
        changes["seq"] = max(0, header.seq + int(r() * 5) - 2)
    if r() < 0.2:
        changes["calls"] = 1 + int(r() * 4)
    if r() < 0.3:
        changes["floor"] = int(r() * 6)
    if r() < 0.1:
        changes["incarnation"] = header.incarnation + 1
    if r() < 0.1:
        changes["lane"] = rng.choice(("main", "ctl", "side", "no such lane"))
    if r() < 0.1:
        changes["epoch"] = int(r() * 4)
    body = rng.choice((buffers, (), (b"",), (b"\x93junk", b"more")))
    return header._replace(**changes), body
