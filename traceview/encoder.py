"""What a merge asks of an output format: events are encoded when they are read, and put on rows when these are known.

So each event is decoded and encoded once, and between the two only its bytes are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from traceview.event import Event

__all__ = ["NO_ARROWS", "Encoder", "Placed", "SpanArrows"]

Ints = NDArray[np.int64]


class SpanArrows(NamedTuple):
    """Arrows that some spans get beyond those of their own, in parallel lists.

    Attributes:
        places: Of the spans among the events; a span that has several is there several times, one after the other.
        numbers: 64 bits each.
        out, into: Whether it leaves here, and whether it arrives here.
    """

    places: list[int]
    numbers: list[int]
    out: list[bool]
    into: list[bool]


NO_ARROWS: Final = SpanArrows([], [], [], [])


@dataclass(slots=True)
class Placed:
    """Some encoded events in order of time, with their rows.

    Attributes:
        bodies: As ``Encoder.bodies`` made them, each ``Encoder.trim``-med; may be changed.
        pids, tids: Of the output.
        starts, ends: In ns.
        arrows: Of the spans among them.
        kept: By place: the number of an arrow's end that stays an event of its own.
    """

    bodies: list[bytes]
    pids: Ints
    tids: NDArray[np.int32]
    starts: Ints
    ends: Ints
    arrows: SpanArrows = NO_ARROWS
    kept: dict[int, int] = field(default_factory=dict)


class Encoder(Protocol):
    """Makes bytes of the output's format; one per part of the output."""

    @property
    def several_arrows(self) -> bool:
        """Whether a span can have several arrows."""

    @property
    def trim(self) -> tuple[int, int]:
        """How many bytes before and after each body only separate it from others."""

    def bodies(
        self, events: list[Event], pids: Ints, starts: Ints, ends: Ints, spans: NDArray[np.bool_]
    ) -> tuple[bytes, NDArray[np.int32]]:
        """Return events encoded one behind the other, and the size of each; the events may be changed.

        Args:
            events: In order of the file.
            pids: Of the output.
            starts: In ns.
            ends: In ns.
            spans: Which are spans.
        """

    def place(self, placed: Placed) -> bytes:
        """Return the bytes of events in order of time, from one call to the next too."""

    def calls(self, bodies: list[bytes]) -> list[bytes]:
        """Return the text of ``call`` in the args of spans, empty where there is none."""

    def finish(self) -> bytes:
        """Return the bytes that end the part."""
