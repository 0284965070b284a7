"""Arrows of other tools: ``s``/``t``/``f`` events become ``bind_id`` on the spans that they belong to.

Viewers bind an ``s`` or ``f`` event to whichever span encloses it, which is often the wrong one where calls overlap; a
``bind_id`` on the span itself cannot go wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from traceview.event import Event

__all__ = ["Arrows", "arrow_number"]

_SPREAD: Final = 0x9E3779B97F4A7C15  # odd, so different ids of one group stay different
_MASK: Final = (1 << 64) - 1


def arrow_number(*parts: str) -> int:
    """Return a stable 64-bit number of these texts."""
    text = "\0".join(parts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Arrows:
    """The arrows of one file, found span by span.

    Args:
        file: Mixed into the numbers of arrows that begin and end in this file: other files count from 1 too.

    Attributes:
        ends: Event number of an ``s``, ``t`` or ``f`` to (its phase, the number of its arrow, its id as text).
        bound: Event number of a span to its arrow ends, as (number, out, in).
        alone: How many ends no span could take.
        kept: Event number of ends that stay as they are, with their new id: their span already has an arrow.
    """

    def __init__(self, file: str) -> None:
        self.ends: dict[int, tuple[str, int, str]] = {}
        self.bound: dict[int, list[tuple[int, bool, bool]]] = {}
        self.alone = 0
        self.kept: dict[int, int] = {}
        self._file = arrow_number("file", file)
        self._groups: dict[tuple[str, str], int] = {}
        self._places: list[tuple[int, str, int, int]] = []  # event, phase, arrow, span

    def note(self, number: int, event: Event) -> None:
        """Take an ``s``, ``t`` or ``f`` event."""
        base = self._groups.get((event.cat, event.name))
        if base is None:
            base = self._groups[event.cat, event.name] = arrow_number("arrow", event.cat, event.name)
        ident = event.id
        if isinstance(ident, str):
            try:
                value = int(ident, 16)
            except ValueError:
                value = arrow_number(ident)
            self.ends[number] = event.ph, (base + value * _SPREAD) & _MASK, ident
        else:
            self.ends[number] = event.ph, (base + ident * _SPREAD) & _MASK, str(ident)

    def find(self, events: Iterable[tuple[int, int, int, bool]], args: Callable[[int], bytes]) -> None:
        """Give each end of one thread to a span that is open at its time: the one that names the call, else the inner.

        Args:
            events: (number, start, end, whether a span) of all events of the thread, in order of time.
            args: Returns the args of an event by number.
        """
        opened: list[tuple[int, int]] = []
        ends, places = self.ends, self._places
        for number, start, end, is_span in events:
            if is_span:
                opened.append((end, number))
                continue
            if number not in ends:
                continue
            opened = [pair for pair in opened if pair[0] >= start]
            if not opened:
                self.alone += 1
                continue
            phase, arrow, ident = ends[number]
            span = opened[-1][1]
            if len(opened) > 1:  # overlapping or nested: if one names the call, time does not tell
                marks = (f'"call":"{ident}"'.encode(), f'"call": "{ident}"'.encode())
                span = next((n for _, n in reversed(opened) if any(mark in args(n) for mark in marks)), span)
            places.append((number, phase, arrow, span))

    def take(self, numbers: list[int], spans: list[int]) -> None:
        """Give ends to these spans."""
        ends = self.ends
        self._places.extend((n, ends[n][0], ends[n][1], s) for n, s in zip(numbers, spans, strict=True))

    def settle(self, *, several: bool, taken: Callable[[list[int]], set[int]]) -> tuple[list[int], list[int]]:
        """Decide once all ends are placed; return the numbers that leave, and those that arrive.

        Args:
            several: Whether the output lets a span have several arrows.
            taken: Returns which of some spans already have an arrow of their own.
        """
        places, self._places = self._places, []
        local = {arrow for _, phase, arrow, _ in places if phase == "s"}
        local.intersection_update([arrow for _, phase, arrow, _ in places if phase == "f"])
        crowded: set[int] = set()
        if not several:
            used: dict[int, int] = {}
            own = taken(sorted({span for _, _, _, span in places}))
            for _, _, arrow, span in places:
                if used.setdefault(span, arrow) != arrow or span in own:
                    crowded.add(arrow)
        bound = self.bound
        out: list[int] = []
        into: list[int] = []
        for event, phase, arrow, span in places:
            number = arrow ^ self._file if arrow in local else arrow
            if phase != "f":
                out.append(number)
            if phase != "s":
                into.append(number)
            if arrow in crowded:
                self.kept[event] = number
            else:
                end = (number, phase != "f", phase != "s")
                before = bound.get(span)
                if before is None:
                    bound[span] = [end]
                else:
                    before.append(end)
        return out, into
