"""One handle for what several ranks keep parts of: its rows are those of the parts, in the order of the input.

On the wire it is a marked array (``Kind.REF_JOINED``) of the order (nil where the rows stand as the parts do, else four
bytes for each row: its place among the rows of all parts, one behind the other) and the parts.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from zbus.codec.decoder import BUILD, Decoder
from zbus.codec.encoder import PREPARE, Encoder
from zbus.codec.refs import Ref, rows_from_wire, rows_to_wire, size_text
from zbus.codec.rows import join, take
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError, ConfigError

__all__ = ["JoinedRef", "install"]

_JOINED: Final = marker(Kind.REF_JOINED)


class JoinedRef:
    """A handle of a value whose parts are kept by several ranks: what ``Concat`` makes of kept results. Immutable.

    It is used as a ``Ref`` is: as an argument, with ``Split``, by rows. Whoever gets it takes from each rank what it
    needs, and joins that.

    Attributes:
        parts: Handles of the parts.
        order: Where each row stands among the rows of all parts; None: as they come.
    """

    __slots__ = ("__weakref__", "_ends", "order", "parts")

    parts: tuple[Ref, ...]
    order: Sequence[int] | None
    _ends: list[int]

    def __init__(self, parts: Sequence[Ref], order: Sequence[int] | None = None) -> None:
        if not parts or any(part.rows is None for part in parts):
            msg = "values without rows cannot be joined"
            raise ConfigError(msg, hint="declare collect=PerRank()")
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "_ends", list(itertools.accumulate(part.rows or 0 for part in parts)))

    def __setattr__(self, name: str, value: object) -> None:
        msg = "a JoinedRef cannot be changed"
        raise AttributeError(msg)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._ends[-1]

    @property
    def nbytes(self) -> int:
        """Size of all parts, bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def lengths(self) -> Sequence[int] | None:
        """Token count of each row, where all parts declare them; else None."""
        lengths: list[int] = []
        for part in self.parts:
            if part.lengths is None:
                return None
            lengths += part.lengths
        return lengths if self.order is None else [lengths[place] for place in self.order]

    def get(self) -> Any:
        """Return the value: that of each part from its owner, joined in this process. Blocks.

        Raises:
            RefLostError: An owner is gone, or a part was released.
            ConfigError: The parts belong to no controller or engine of this process, or do not fit together.
        """
        return self.made(Ref.get)

    def made(self, get: Callable[[Ref], Any]) -> Any:
        """Return the value, given how that of a part is got.

        Raises:
            ConfigError: The parts do not fit together.
        """
        values = [get(part) for part in self.parts]
        try:
            joined = join(values)
        except ValueError as error:
            msg = f"{self!r} cannot be joined: {error}"
            raise ConfigError(msg, hint="declare collect=PerRank(), and pass the list") from error
        return joined if self.order is None else take(joined, self.order)

    def release(self) -> None:
        """Let all parts go."""
        for part in self.parts:
            part.release()

    def take(self, rows: Sequence[int]) -> Ref | JoinedRef:
        """Return a handle of some rows: of those parts only that have any of them.

        Raises:
            IndexError: There is no such row.
        """
        if len(rows) and (min(rows) < 0 or max(rows) >= self.rows):
            msg = f"{self!r} has rows 0..{self.rows - 1}"
            raise IndexError(msg)
        if not len(rows):
            return self.parts[0].take(range(0))
        chosen: dict[int, list[int]] = {}
        wanted = []
        for row in rows:
            place = row if self.order is None else self.order[row]
            part = bisect.bisect_right(self._ends, place)
            local = chosen.setdefault(part, [])
            wanted.append((part, len(local)))
            local.append(place - (self._ends[part - 1] if part else 0))
        numbers = sorted(chosen)
        parts = [self.parts[part].take(_run(chosen[part])) for part in numbers]
        if len(parts) == 1:
            return parts[0]
        first = dict(
            zip(numbers, itertools.accumulate((len(chosen[part]) for part in numbers), initial=0), strict=False)
        )
        order = [first[part] + place for part, place in wanted]
        return JoinedRef(parts, None if order == list(range(len(order))) else order)

    def __len__(self) -> int:
        return self.rows

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, rows: slice) -> Ref | JoinedRef:
        given: object = rows
        if not isinstance(given, slice):
            msg = f"take rows of a JoinedRef by a slice, not by {type(rows).__name__}; its value is ref.get()"
            raise TypeError(msg)
        return self.take(range(*rows.indices(len(self))))

    __iter__ = None  # as of a Ref

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JoinedRef):
            return False
        return self.parts == other.parts and _listed(self.order) == _listed(other.order)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        owners = ", ".join(dict.fromkeys(part.owner for part in self.parts))
        return f"<JoinedRef {owners} {self.parts[0].method}: {size_text(self.nbytes)}, {self.rows} rows>"

    def __reduce__(self) -> Any:
        msg = "a JoinedRef is a handle within one run; keep its value (ref.get()) instead"
        raise TypeError(msg)


def _listed(order: Sequence[int] | None) -> list[int] | None:
    return None if order is None else list(order)


def _run(rows: list[int]) -> Sequence[int]:
    """Return consecutive numbers as a range."""
    consecutive = all(after - before == 1 for before, after in itertools.pairwise(rows))
    return range(rows[0], rows[-1] + 1) if consecutive else rows


def _prepare(value: JoinedRef, state: Encoder) -> list[Any]:
    state.enter(len(value.parts))
    prepared = [_JOINED, rows_to_wire(_listed(value.order)), *map(state.prepare, value.parts)]
    state.depth -= 1
    return prepared


def _build(items: list[Any], _state: Decoder) -> JoinedRef:
    order = rows_from_wire(items[0]) if items else None
    parts = items[1:]
    if not parts or any(type(part) is not Ref or part.rows is None for part in parts):
        msg = "a JoinedRef came whose parts are none"
        raise CodecError(msg)
    total = sum(part.rows for part in parts)
    if order is not None and (len(order) != total or sorted(order) != list(range(total))):
        msg = "a JoinedRef came whose rows are not those of its parts"
        raise CodecError(msg)
    return JoinedRef(parts, order)


def install() -> None:
    """Add joined handles to the tables of the codec; safe to repeat."""
    PREPARE[JoinedRef] = _prepare
    BUILD[Kind.REF_JOINED] = _build
