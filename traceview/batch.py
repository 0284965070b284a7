"""Some events of one file in file order, with the columns that are looked at when they are read and used later."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from traceview.event import BAD_JSON, Event, decode_event, has_long_number

__all__ = ["FAST_PHASES", "Batch", "plain_event"]

FAST_PHASES: Final = frozenset("XMCiIBEbenstf")
"""Phases that the merger handles; others take the slow path once, to be named or dropped."""

_FAST: Final = np.isin(np.arange(256), [ord(phase) for phase in FAST_PHASES])
_METADATA: Final = ord("M")


@dataclass(slots=True, eq=False)
class Batch:
    """Events with what all of them have.

    Attributes:
        events: In file order.
        phases: Of each, one letter each.
        phase: The same as numbers, uint8.
        ts: In µs as the file has it, float64; NaN where there is none.
    """

    events: list[Event]
    phases: str
    phase: NDArray[np.uint8]
    ts: NDArray[np.float64]

    @classmethod
    def of(cls, events: list[Event]) -> Self:
        """Return a batch of events whose phases are one letter each, as of repaired ones."""
        phases = "".join([event.ph for event in events])
        ts = np.array([event.ts for event in events], dtype=np.float64)
        return cls(events, phases, np.frombuffer(phases.encode("latin-1", "replace"), dtype=np.uint8), ts)

    @classmethod
    def of_plain(cls, events: list[Event]) -> Self | None:
        """Return a batch of events as they were decoded; None if one has no phase of ``FAST_PHASES``, or no time."""
        letters = [event.ph for event in events]
        phases = "".join(letters)
        if len(phases) != len(letters) or not all(letters) or not phases.isascii():
            return None
        phase = np.frombuffer(phases.encode(), dtype=np.uint8)
        if not _FAST[phase].all():
            return None
        ts = np.array([event.ts for event in events], dtype=np.float64)
        if (missing := np.isnan(ts)).any() and (phase[missing] != _METADATA).any():
            return None
        return cls(events, phases, phase, ts)

    def __len__(self) -> int:
        return len(self.events)

    def only(self, kept: NDArray[np.bool_]) -> Batch:
        """Return those of the events that are kept."""
        if kept.all():
            return self
        phase = self.phase[kept]
        events = list(compress(self.events, kept.tolist()))
        return Batch(events, phase.tobytes().decode("latin-1"), phase, self.ts[kept])


def plain_event(line: bytes) -> Event | None:
    """Return the event of a good line, or None: then it needs a closer look."""
    if has_long_number(line):
        return None
    try:
        event = decode_event(line)
        if not line.isascii():
            line.decode()
    except BAD_JSON:
        return None
    phase = event.ph
    return event if phase in FAST_PHASES and (event.ts is not None or phase == "M") else None
