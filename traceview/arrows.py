"""Arrows of other tools: ``s``/``t``/``f`` events become ``bind_id`` on the spans that they belong to.

Viewers bind an ``s`` or ``f`` event to whichever span encloses it, which is often the wrong one where calls overlap; a
``bind_id`` on the span itself cannot go wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.encoder import SpanArrows
from traceview.event import Event

__all__ = ["Arrows", "Bound", "arrow_id", "arrow_number", "call_numbers"]

_SPREAD: Final = 0x9E3779B97F4A7C15  # odd, so different ids of one group stay different
_MASK: Final = (1 << 64) - 1
_NEVER: Final = -(1 << 62)
_MANY: Final = 64
_AT_ONCE: Final = 4096

Ints = NDArray[np.int64]
Numbers = NDArray[np.uint64]
Flags = NDArray[np.bool_]


def arrow_number(*parts: str) -> int:
    """Return a stable 64-bit number of these texts."""
    text = "\0".join(parts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def arrow_id(bind_id: int | str) -> int:
    """Return the 64-bit number of a ``bind_id``, the same in every process."""
    if isinstance(bind_id, str):
        try:
            bind_id = int(bind_id, 0)
        except ValueError:
            return arrow_number(str(bind_id))
    return bind_id & _MASK


@dataclass(slots=True)
class Bound:
    """What was decided of the arrow ends of a segment.

    Attributes:
        first: By event number: the place of a span's first arrow, -1 without any.
        numbers, out, into: The arrows of spans, by place; ``more``: whether the next one is of the same span.
        kept: By event number: the place of an end that stays an event of its own, since its span has another arrow.
        kept_numbers: Their arrows, by place.
        leaving, arriving: The numbers of all ends that found a span.
    """

    first: NDArray[np.int32]
    numbers: Numbers
    out: Flags
    into: Flags
    more: Flags
    kept: NDArray[np.int32] | None
    kept_numbers: Numbers
    leaving: Numbers
    arriving: Numbers

    def of_spans(self, some: Ints) -> SpanArrows:
        """Return the arrows of these events by their place among them."""
        first = self.first[some]
        places = np.flatnonzero(first >= 0)
        at = first[places].astype(np.int64)
        if (further := self.more[at]).any():
            places, at = self._all(places, at, further)
        return SpanArrows(places.tolist(), self.numbers[at].tolist(), self.out[at].tolist(), self.into[at].tolist())

    def _all(self, places: Ints, at: Ints, further: Flags) -> tuple[Ints, Ints]:
        """Return each place as often as its span has arrows."""
        found = [(places, at)]
        while further.any():
            places, at = places[further], at[further] + 1
            found.append((places, at))
            further = self.more[at]
        places, at = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(places, kind="stable")
        return places[order], at[order]

    def of_ends(self, some: Ints) -> dict[int, int]:
        """Return the arrows of those of these events that are kept ends, by their place among them."""
        if self.kept is None:
            return {}
        at = self.kept[some]
        places = np.flatnonzero(at >= 0)
        return dict(zip(places.tolist(), self.kept_numbers[at[places]].tolist(), strict=True))


class Arrows:
    """The arrows of one segment of a file.

    Args:
        file: Mixed into the numbers of arrows that begin and end in this file: other files count from 1 too.
    """

    def __init__(self, file: str) -> None:
        self.alone = 0
        """How many ends no span could take."""
        self._file = arrow_number("file", file)
        self._groups: dict[tuple[str, str], int] = {}
        self._events: list[Ints] = []
        self._numbers: list[Numbers] = []
        self._calls: list[Ints] = []
        self._phases: list[bytes] = []
        self._owners: list[Ints] = []
        self._found: list[tuple[NDArray[np.int32], Ints]] = []

    def __len__(self) -> int:
        return sum(map(len, self._events))

    def note(self, numbers: Ints, events: list[Event]) -> None:
        """Take ``s``, ``t`` and ``f`` events with their numbers."""
        idents = [event.id for event in events]
        names, cats = [event.name for event in events], [event.cat for event in events]
        found = _values(idents) * np.uint64(_SPREAD)
        if names.count(names[0]) == len(names) and cats.count(cats[0]) == len(cats):
            found += np.uint64(self._base((cats[0], names[0])))
        else:
            bases = [self._base(group) for group in zip(cats, names, strict=True)]
            found += np.array(bases, dtype=np.uint64)
        self._events.append(numbers)
        self._numbers.append(found)
        self._calls.append(call_numbers(map(str, idents)))
        self._phases.append("".join([event.ph for event in events]).encode())

    def note_owners(self, numbers: Ints) -> None:
        """Take the numbers of spans that have an arrow of their own."""
        self._owners.append(numbers)

    def slots(self, count: int) -> NDArray[np.int32]:
        """Return for each of ``count`` events which of the ends it is, -1 for none."""
        found = np.full(count, -1, dtype=np.int32)
        if self._events:
            events = np.concatenate(self._events)
            found[events] = np.arange(len(events))
        return found

    def find(
        self,
        numbers: Ints,
        start: Ints,
        end: Ints,
        span: Flags,
        slot: NDArray[np.int32],
        calls: Callable[[Ints], Ints],
    ) -> None:
        """Give each end of one thread to a span that is open at its time: the one that names the call, else the inner.

        Args:
            numbers: The events of one thread in order of time.
            start: Of these events, as ``end``, ``span`` and ``slot``.
            end: In ns too.
            span: Which are spans.
            slot: Which ends they are.
            calls: Returns the ``call_numbers`` of what spans name.
        """
        mine = np.flatnonzero(slot >= 0)
        places = np.where(span, np.arange(len(numbers), dtype=np.int32), np.int32(-1))
        np.maximum.accumulate(places, out=places)
        before = places[mine]
        latest = np.where(span, end, _NEVER)
        np.maximum.accumulate(latest, out=latest)
        opened = (before >= 0) & (end[before] >= start[mine])  # the span begun last is open
        others = (before > 0) & (latest[before - 1] >= start[mine])  # so is one before it
        self.alone += int((~opened & ~others).sum())
        if not others.any():
            self._found.append((slot[mine[opened]], numbers[before[opened]]))
            return
        wanted = np.concatenate(self._calls)[slot[mine]]
        asked = np.flatnonzero(opened & others)
        calls_of = np.zeros(len(numbers), dtype=np.int64)
        known = np.zeros(len(numbers), dtype=bool)
        known[before[asked]] = True
        calls_of[known] = calls(numbers[known])
        doubt = others.copy()
        named = calls_of[before[asked]]
        doubt[asked] = (named != wanted[asked]) | (named == 0)
        sure = opened & ~doubt
        self._found.append((slot[mine[sure]], numbers[before[sure]]))
        if doubt.any():
            rest = span & ~known
            calls_of[rest] = calls(numbers[rest])
            left = np.zeros(len(numbers), dtype=bool)
            left[mine[doubt]] = True
            some = np.flatnonzero(span | left)
            calls_of[left] = wanted[doubt]
            self._look([column[some] for column in (numbers, start, end, left, slot, calls_of)])

    def _look(self, columns: list[NDArray[Any]]) -> None:
        """Give each end to one of several spans that are open."""
        slots: list[int] = []
        spans: list[int] = []
        opened: list[tuple[int, int, int]] = []
        for number, begin, until, is_end, slot, call in _lines(columns):
            if not is_end:
                if len(opened) >= _MANY:
                    opened = [one for one in opened if one[0] >= begin]
                opened.append((until, number, call))
                continue
            opened = [one for one in opened if one[0] >= begin]
            named_so = (span for _, span, one in reversed(opened) if one == call and call)
            slots.append(slot)
            spans.append(next(named_so, opened[-1][1]))
        self._found.append((np.array(slots, dtype=np.int32), np.array(spans, dtype=np.int64)))

    def settle(self, count: int, *, several: bool) -> Bound:
        """Decide once all ends are found.

        Args:
            count: Of all events.
            several: Whether the output lets a span have several arrows.
        """
        found, self._found = self._found, []
        slots, spans = (np.concatenate(column) for column in zip(*found, strict=True))
        numbers = np.concatenate(self._numbers)[slots]
        phases = np.frombuffer(b"".join(self._phases), dtype=np.uint8)[slots]
        events = np.concatenate(self._events)[slots]
        out, into = phases != ord("f"), phases != ord("s")
        if not (into.all() or out.all()):
            local = np.intersect1d(numbers[~into], numbers[~out])
            if len(local):
                numbers = np.where(np.isin(numbers, local), numbers ^ np.uint64(self._file), numbers)
        leaving, arriving = numbers[out], numbers[into]
        kept, kept_numbers = None, numbers[:0]
        order = np.argsort(spans, kind="stable")
        spans, numbers, out, into, events = (one[order] for one in (spans, numbers, out, into, events))
        if not several:
            stay = self._crowded(spans, numbers)
            if stay.any():  # such an arrow stays apart with all its ends
                stay = np.isin(numbers, numbers[stay])
                kept_numbers = numbers[stay]
                kept = np.full(count, -1, dtype=np.int32)
                kept[events[stay]] = np.arange(len(kept_numbers))
                spans, numbers, out, into = (one[~stay] for one in (spans, numbers, out, into))
        begins = np.flatnonzero(_starts(spans) | _starts(numbers))
        if len(begins) < len(spans):  # both ends of one arrow on one span are one
            out, into = np.logical_or.reduceat(out, begins), np.logical_or.reduceat(into, begins)
            spans, numbers = spans[begins], numbers[begins]
        first = np.full(count, -1, dtype=np.int32)
        begins = np.flatnonzero(_starts(spans))
        first[spans[begins]] = begins
        more = np.append(~_starts(spans), False)[1:] if len(spans) else np.zeros(0, dtype=bool)
        return Bound(first, numbers, out, into, more, kept, kept_numbers, leaving, arriving)

    def _crowded(self, spans: Ints, numbers: Numbers) -> Flags:
        """Return which ends, in order of their span, find its place for an arrow taken."""
        first = np.maximum.accumulate(np.where(_starts(spans), np.arange(len(spans)), 0))
        crowded: Flags = numbers != numbers[first]
        if self._owners:
            crowded |= np.isin(spans, np.concatenate(self._owners))
        return crowded

    def _base(self, group: tuple[str, str]) -> int:
        base = self._groups.get(group)
        if base is None:
            base = self._groups[group] = arrow_number("arrow", *group)
        return base


def _starts(values: NDArray[Any]) -> Flags:
    """Return which values differ from the one before."""
    found = np.ones(len(values), dtype=bool)
    found[1:] = values[1:] != values[:-1]
    return found


def _values(idents: list[int | str]) -> Numbers:
    try:
        return np.array(list(map(int, idents, repeat(16))), dtype=np.uint64)  # type: ignore[arg-type]  # else TypeError
    except (TypeError, ValueError, OverflowError):  # not all are hexadecimal texts of 64 bits
        return np.array([_value(ident) & _MASK for ident in idents], dtype=np.uint64)


def _value(ident: int | str) -> int:
    if not isinstance(ident, str):
        return ident
    try:
        return int(ident, 16)
    except ValueError:
        return arrow_number(ident)


def _lines(columns: list[NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield what stands at each place, with few numbers of Python at a time."""
    for at in range(0, len(columns[0]), _AT_ONCE):
        yield from zip(*[column[at : at + _AT_ONCE].tolist() for column in columns], strict=True)


def call_numbers(calls: Iterable[str]) -> Ints:
    """Return numbers that stand for calls within this process; 0 for an empty one."""
    return np.array(list(map(hash, calls)), dtype=np.int64)
