"""The handle of a value that stays where it was made, and how it travels: metadata only, never the value.

A handle is made by the owner of the value. On the wire it is a marked array (``Kind.REF``) of

======================= =======================================================================================
operand                 meaning
======================= =======================================================================================
role, rank              who keeps the value: ``controller`` with rank 0, or a worker
incarnation             which start of it (a controller: its epoch)
generation              which store of it: 63 random bits, new with each; a handle of another is stale
number                  which value of that store; never used again
memory                  the owner's directory of shared memory, empty without
endpoints               ``[[link, [address, …]], …]``: where the owner answers
nbytes, rows            size of the chosen part in bytes (about, where rows differ) and in rows; rows nil without
lengths                 token count of each chosen row, four bytes each, little endian; nil where none was declared
method, about           what made it, and its types and shapes in words
chosen                  nil for all rows, ``[start, stop]``, or row numbers, four bytes each
======================= =======================================================================================

A value whose owner sends the message itself (``Controller.put``) goes along instead (``Kind.KEPT``): ``chosen``, the
body of its own frames, the numbers of their buffers. In shared memory these are the frames that name its slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from zbus.codec.decoder import BUILD, Decoder, decode, exactly
from zbus.codec.encoder import PREPARE, Encoder, encode
from zbus.codec.exceptions import register_exception
from zbus.codec.rows import packed, take, unpacked
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError, ConfigError, RefLimitError, RefLostError

if TYPE_CHECKING:
    from zbus.protocol.messages import Buffers

__all__ = ["Home", "Kept", "Ref", "install", "lost", "rows_from_wire", "rows_to_wire", "size_text"]

_REF: Final = marker(Kind.REF)
_KEPT: Final = marker(Kind.KEPT)
_NUMBER: Final = 1 << 63
_MAX_TEXT: Final = 1024
_MAX_ENDPOINTS: Final = 64


class Home(Protocol):
    """What a handle asks where it is used: the controller, or the context of an engine."""

    def get(self, ref: Ref) -> Any:
        """Return its value."""

    def release(self, ref: Ref) -> None:
        """Let its value go."""


class Kept(Protocol):
    """The value of a handle, in the process that owns it.

    Rows are cut by the reader out of the whole, which costs nothing where it maps the whole: a value that is ``lent``,
    to readers of a ``keep`` with a true ``all_map`` (see ``encode``). Otherwise they are cut here, and nothing else is
    sent.
    """

    @property
    def lent(self) -> bool:
        """Whether nearly all of it is in shared memory.

        Raises:
            RefLostError: It was released.
        """
        ...

    @property
    def frames(self) -> Buffers:
        """Its frames.

        Raises:
            RefLostError: It was released.
        """
        ...

    def taken(self, chosen: Sequence[int]) -> Any:
        """Return the value's chosen rows: views of its arrays, or copies; they stay as they are while they live.

        Raises:
            RefLostError: It was released.
        """
        ...


class Ref:
    """A handle of a value that stays with the process that made it. Immutable; any thread.

    Pass it as an argument, alone or inside lists, tuples and dicts: the rank that is called gets the value itself,
    straight from its owner. ``Split`` gives each rank its rows. ``ref[8:16]`` is a handle of some rows.

    Attributes:
        owner: ``role/rank`` of the process that keeps the value.
        nbytes: Size of the value, bytes.
        rows: Number of rows, or None where it has none that could be split.
        lengths: Token count of each row where the value declares them, else None.
        method: What made it: an endpoint, ``bus.put`` or ``ctx.put``.
        about: Its types and shapes, in words.
    """

    __slots__ = (
        "__weakref__", "about", "chosen", "endpoints", "generation", "hold", "home", "incarnation", "kept", "lengths",
        "memory", "method", "nbytes", "number", "rank", "role", "rows",
    )  # fmt: skip

    role: str
    rank: int
    incarnation: int
    generation: int
    number: int
    memory: str
    endpoints: dict[str, list[str]]
    nbytes: int
    rows: int | None
    lengths: Sequence[int] | None
    method: str
    about: str
    chosen: Sequence[int] | None
    home: Home | None  # who is asked by ``get`` and ``release``; not part of the value
    hold: Any  # keeps the value from being freed, in the controller
    kept: Kept | None  # the value, in the process that owns it

    def __init__(self, **fields: Any) -> None:
        """Make a handle; only owners do."""
        for name in ("hold", "home", "kept", "chosen"):
            object.__setattr__(self, name, None)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        msg = "a Ref cannot be changed"
        raise AttributeError(msg)

    def __delattr__(self, name: str) -> None:
        msg = "a Ref cannot be changed"
        raise AttributeError(msg)

    @property
    def owner(self) -> str:
        """Who keeps the value."""
        return "controller" if self.role == "controller" else f"{self.role}/{self.rank}"

    @property
    def key(self) -> tuple[int, int]:
        """Store and number: equal for all handles of one value."""
        return self.generation, self.number

    def get(self) -> Any:
        """Return the value, or the chosen rows of it: mapped where its owner is on this host, else pulled. Blocks.

        numpy arrays that are mapped are read-only.

        Raises:
            RefLostError: Its owner is gone, or it was released.
            ConfigError: This handle belongs to no controller or engine of this process.
        """
        return self._home().get(self)

    def release(self) -> None:
        """Let the value go now instead of with the last handle of it. Calls under way still get it. Idempotent."""
        self._home().release(self)

    def _home(self) -> Home:
        if self.home is None:
            msg = f"{self!r} is not bound to a controller here"
            raise ConfigError(msg, hint="bus.get(ref), or ctx.get(ref) in an engine")
        return self.home

    def take(self, rows: Sequence[int]) -> Ref:
        """Return a handle of some rows, by their numbers within this one.

        Raises:
            IndexError: There is no such row.
            ConfigError: The value has no rows.
        """
        if self.rows is None:
            msg = f"{self!r} has no rows to take"
            raise ConfigError(msg, hint="rows are the items of lists and arrays, and of dicts whose columns agree")
        if len(rows) and not (min(rows) >= 0 and max(rows) < self.rows):
            msg = f"{self!r} has rows 0..{self.rows - 1}"
            raise IndexError(msg)
        if isinstance(rows, range) and rows.step == 1 and len(rows) == self.rows:
            return self
        chosen: Sequence[int]
        if self.chosen is None:
            chosen = rows
        elif isinstance(rows, range) and rows.step == 1:
            chosen = self.chosen[rows.start : rows.stop]
        else:
            chosen = [self.chosen[row] for row in rows]
        if not (isinstance(chosen, range) and chosen.step == 1):
            chosen = _compact(chosen)
        return self.with_fields(
            chosen=chosen,
            rows=len(rows),
            nbytes=self.nbytes * len(rows) // max(1, self.rows),
            lengths=None if self.lengths is None else [self.lengths[row] for row in rows],
        )

    def with_fields(self, **changes: Any) -> Ref:
        """Return a copy with other fields."""
        names = [name for name in self.__slots__ if name != "__weakref__"]
        return Ref(**{**{name: getattr(self, name) for name in names}, **changes})

    def bind(self, home: Home, hold: Any = None) -> None:
        """Say who is asked by ``get`` and ``release``, and what keeps the value; not part of what the handle says."""
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "hold", hold)

    def __len__(self) -> int:
        if self.rows is None:
            msg = f"{self!r} has no rows"
            raise TypeError(msg)
        return self.rows

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, rows: slice) -> Ref:
        """Return a handle of some rows; a single row is ``ref[3:4]``."""
        given: object = rows
        if not isinstance(given, slice):
            msg = f"take rows of a Ref by a slice, not by {type(rows).__name__}; its value is ref.get()"
            raise TypeError(msg)
        return self.take(range(*rows.indices(len(self))))

    __iter__ = None  # a Ref has a length, but its rows are elsewhere

    def _identity(self) -> tuple[Any, ...]:
        chosen = self.chosen
        return (*self.key, chosen if chosen is None or isinstance(chosen, range) else tuple(chosen))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows} rows"
        if self.chosen is not None and isinstance(self.chosen, range):
            rows = f", rows {self.chosen.start}..{self.chosen.stop - 1}" if self.chosen else ", no rows"
        return f"<Ref {self.owner} {self.method}: {self.about}, {size_text(self.nbytes)}{rows}>"

    def __reduce__(self) -> Any:
        msg = "a Ref is a handle within one run; keep its value (ref.get()) instead"
        raise TypeError(msg)


def size_text(nbytes: float) -> str:
    """Return a size as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError(nbytes)


def _compact(rows: Sequence[int]) -> Sequence[int]:
    """Return consecutive numbers as a range."""
    if len(rows) and all(after - before == 1 for before, after in itertools.pairwise(rows)):
        return range(rows[0], rows[-1] + 1)
    return list(rows) if len(rows) else range(0)


# -- to the wire ---------------------------------------------------------------------------------------------------


def rows_to_wire(chosen: Sequence[int] | None) -> Any:
    """Return chosen rows as plain data."""
    if chosen is None:
        return None
    return [chosen.start, chosen.stop] if isinstance(chosen, range) else packed(chosen)


def _prepare(value: Ref, state: Encoder) -> Any:
    if state.refs is not None:
        state.refs.append(value)
    if value.kept is not None:
        return _prepare_kept(value, value.kept, state)
    return [
        _REF, value.role, value.rank, value.incarnation, value.generation, value.number, value.memory,
        [[link, list(addresses)] for link, addresses in value.endpoints.items()], value.nbytes, value.rows,
        None if value.lengths is None else packed(value.lengths), value.method, value.about,
        rows_to_wire(value.chosen),
    ]  # fmt: skip


def _prepare_kept(value: Ref, kept: Kept, state: Encoder) -> Any:
    chosen = value.chosen
    if chosen is None or (getattr(state.keep, "all_map", False) and kept.lent):
        frames = kept.frames
    else:
        frames = encode(kept.taken(chosen), limits=state.limits, keep=state.keep)
        chosen = None
    first = len(state.buffers)
    if first + len(frames) > state.limits.buffers:
        msg = f"more than {state.limits.buffers:,} arrays in one value"
        raise CodecError(msg, hint="stack them into fewer arrays")
    state.buffers += frames[1:]
    body = bytes(frames[0])
    return [_KEPT, rows_to_wire(chosen), body, *range(first, len(state.buffers))]


# -- from the wire -------------------------------------------------------------------------------------------------


def rows_from_wire(data: Any) -> Sequence[int] | None:
    """Return chosen rows from plain data.

    Raises:
        CodecError: They are none.
    """
    if data is None:
        return None
    if type(data) is list:
        start, stop = exactly(data, int, int)
        if 0 <= start <= stop < _NUMBER:
            return range(start, stop)
    elif type(data) is bytes and len(data) % 4 == 0:
        return unpacked(data)
    msg = "a Ref came with rows that are none"
    raise CodecError(msg)


def _refuse(message: str) -> Any:
    raise CodecError(message)


def _build(items: list[Any], state: Decoder) -> Ref:
    made = _checked(items)
    if state.refs is not None:
        state.refs.append(made)
    return made


def _checked(items: list[Any]) -> Ref:
    role, rank, incarnation, generation, number, memory, endpoints, nbytes, rows, lengths, method, about, chosen = (
        exactly(
            items, str, int, int, int, int, str, list, int, (int, type(None)), (bytes, type(None)), str, str,
            (list, bytes, type(None)),
        )
    )  # fmt: skip
    if max(map(len, (role, memory, method, about))) > _MAX_TEXT or len(endpoints) > _MAX_ENDPOINTS:
        _refuse("a Ref came that is too long to be one")
    counts = (rank, incarnation, generation, number, nbytes, rows or 0)
    if min(counts) < 0 or max(counts) > 2 * _NUMBER - 1:
        _refuse("a Ref came with a number that is none")
    picked = rows_from_wire(chosen)
    counted = None if lengths is None else rows_from_wire(lengths)
    if rows is None and (picked is not None or counted is not None):
        _refuse("a Ref came with rows of nothing")
    if (picked is not None and len(picked) != rows) or (counted is not None and len(counted) != rows):
        _refuse("a Ref came whose rows are not as many as it says")
    return Ref(
        role=role, rank=rank, incarnation=incarnation, generation=generation, number=number, memory=memory,
        endpoints=_endpoints(endpoints), nbytes=nbytes, rows=rows, lengths=counted, method=method, about=about,
        chosen=picked,
    )  # fmt: skip


def _endpoints(listed: list[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in listed:
        link, addresses = exactly(entry if type(entry) is list else [], str, list)
        if len(addresses) > _MAX_ENDPOINTS:
            _refuse("a Ref came with too many addresses")
        found[link] = exactly(addresses, *([str] * len(addresses)))
    return found


def _build_kept(items: list[Any], state: Decoder) -> Any:
    if len(items) < 2 or type(items[1]) is not bytes:
        _refuse("a kept value came without a body")
    chosen = rows_from_wire(items[0])
    value = decode([items[1], *map(state.raw_buffer, items[2:])], limits=state.limits)
    return value if chosen is None else take(value, chosen)


def install() -> None:
    """Add handles to the tables of the codec; safe to repeat."""
    register_exception(RefLostError)
    register_exception(RefLimitError)
    PREPARE[Ref] = _prepare
    BUILD[Kind.REF] = _build
    BUILD[Kind.KEPT] = _build_kept


def lost(ref: Ref, why: str, *, hint: str | None = None) -> RefLostError:
    """Return the error for a handle whose value cannot be had any more."""
    return RefLostError(
        f"{ref.owner} no longer has {_about(ref)}: {why}",
        owner_role=ref.role, owner_rank=ref.rank, made_by=ref.method, nbytes=ref.nbytes,
        hint=hint or f"make it again by `{ref.method}`, or keep a copy with ref.get()",
    )  # fmt: skip


def _about(ref: Ref) -> str:
    return f"what `{ref.method}` made ({ref.about}, {size_text(ref.nbytes)})"
