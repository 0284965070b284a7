"""Arrows of other tools: ``s``/``t``/``f`` events become ``bind_id`` on the spans that they belong to.

Viewers bind an ``s`` or ``f`` event to whichever span encloses it, which is often the wrong one where calls overlap; a
``bind_id`` on the span itself cannot go wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["ArrowEnd", "Arrows", "arrow_number"]


def arrow_number(*parts: str) -> int:
    """Return a stable 64-bit number of these texts."""
    text = "\0".join(parts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class ArrowEnd:
    """One ``s``, ``t`` or ``f`` event: ``key`` is (category, name, id)."""

    event: int
    phase: str
    key: tuple[str, str, str]
    at_ns: int


@dataclass(slots=True)
class Arrows:
    """The arrows of one file, found span by span.

    Attributes:
        file: Mixed into the numbers of arrows that begin and end in this file: other files count from 1 too.
        bound: Event number of a span to its arrow ends, as (number, out, in).
        alone: Events of ends that no span could take.
        kept: Events of ends that stay as they are, with their new id: their span already has an arrow.
    """

    file: str
    ends: list[ArrowEnd] = field(default_factory=list)
    bound: dict[int, list[tuple[int, bool, bool]]] = field(default_factory=dict)
    alone: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    _numbers: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _places: list[tuple[ArrowEnd, int]] = field(default_factory=list)

    def place(self, end: ArrowEnd, open_spans: Sequence[int], args: Callable[[int], bytes]) -> None:
        """Give an end to one of the spans open at its time, innermost last: the one that names the call, if any."""
        if not open_spans:
            self.alone.append(end.event)
            return
        span = open_spans[-1]
        if len(open_spans) > 1:
            marks = (f'"call":"{end.key[2]}"'.encode(), f'"call": "{end.key[2]}"'.encode())
            span = next((s for s in reversed(open_spans) if any(mark in args(s) for mark in marks)), span)
        self._places.append((end, span))

    def settle(self, *, several: bool, taken: Callable[[int], bool]) -> None:
        """Decide once all ends are placed.

        Args:
            several: Whether the output lets a span have several arrows.
            taken: Whether a span already has an arrow of its own.
        """
        out = {end.key for end, _ in self._places if end.phase == "s"}
        local = out & {end.key for end, _ in self._places if end.phase == "f"}
        crowded: set[tuple[str, str, str]] = set()
        if not several:
            used: dict[int, tuple[str, str, str]] = {}
            for end, span in self._places:
                if taken(span) or used.setdefault(span, end.key) != end.key:
                    crowded.add(end.key)
        for end, span in self._places:
            number = self._number(end.key, local=end.key in local)
            if end.key in crowded:
                self.kept[end.event] = number
            else:
                self.bound.setdefault(span, []).append((number, end.phase in "st", end.phase in "tf"))
        self._places = []

    def _number(self, key: tuple[str, str, str], *, local: bool) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = arrow_number("arrow", self.file if local else "", *key)
        return found
