"""Where a process keeps values for others and opens what others keep: ``RefStore`` with real memory behind it.

A value that is kept is encoded once, its large arrays into shared memory, and stays encoded. Whoever wants it asks its
owner on ``ctl`` (a small message, answered while the engine runs) and gets told where it is: on the same host the names
of the slots, which it maps; anything else is pulled. So a lost owner, a released value and a stale handle are told
apart, and a slot is never read after it was given to something else.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.codec import JoinedRef, Ref, decode, encode
from zbus.codec.refs import lost, rows_from_wire, rows_to_wire
from zbus.codec.rows import describe, lengths_of, rows_of, take
from zbus.data.carriage import NoRoom, Offers
from zbus.data.lease import SHARED_FROM, Lease
from zbus.data.porter import Porter
from zbus.data.refstore import OWN, Full, Holding, RefStore
from zbus.errors import CodecError, RefLimitError, RefLostError, ZbusError
from zbus.protocol.messages import Buffer, Buffers, nbytes_of

__all__ = ["LEASE_S", "Ask", "Carriage", "Desk", "Owner", "fill", "refs_in"]

LEASE_S: Final = 60.0
"""How long a silent holder keeps what it has, where the config does not say."""

_GENERATION_BITS: Final = 63
_DEAF_NS: Final = 5_000_000_000
"""As ``RefStore`` has it; the thread that ticks does so once a second."""

_AT_ONCE: Final = 256
"""Most values that one question to an owner is about."""

_BUSY_S: Final = 0.2
"""How soon an owner is asked again that had no room for copies."""


class Owner(msgspec.Struct, frozen=True):
    """Who a process is, as it stands in the handles that it makes.

    Attributes:
        role, rank: Its name; a controller's is ``controller`` with rank 0.
        incarnation: Which start of it.
        endpoints: Where it answers, by link; may be filled in until the first value is kept.
    """

    role: str
    rank: int
    incarnation: int
    endpoints: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def __str__(self) -> str:
        return self.role if self.role == "controller" else f"{self.role}/{self.rank}"


Ask = Callable[[Ref, Sequence[Sequence[Any]], int], Sequence[Mapping[str, Any]]]
"""Asks the owner of a handle questions, until a deadline (monotonic ns), and returns its answers (``Desk.answers``).

It raises ``RefLostError`` where the owner is gone, or does not answer in time.
"""


class Carriage(Protocol):
    """Takes bytes to processes that share no memory with this one."""

    def offer(self, offers: Offers, whole: Sequence[Buffer], parts: Sequence[Buffer]) -> Any:
        """Make parts of a value's buffers available and return plain data that says where.

        Args:
            offers: What is offered of the value so far.
            whole: All buffers of the value.
            parts: What is wanted: views of them, or copies.

        Raises:
            NoRoom: Copies are needed, and there is no room for them.
        """
        ...

    def tick(self) -> None:
        """Drop what was copied for readers and is not asked for any more."""
        ...

    def fetch(self, ref: Ref, sizes: Sequence[int], offered: Any, deadline_ns: int) -> Buffers:
        """Get what somebody offers, in memory that nobody else has.

        Raises:
            RefLostError: It cannot be had.
        """
        ...


class _Value:
    """A value as it is kept: its frames, with leases of slots in place of large arrays."""

    def __init__(self, frames: list[Buffer]) -> None:
        self.frames = frames
        self.nbytes = sum(frame.nbytes if type(frame) is Lease else nbytes_of(frame) for frame in frames)
        self._rest: Buffer | None = None
        self._joining = threading.Lock()  # several readers may ask for one value at once
        self.offers = Offers()

        self._private = any(type(frame) is not Lease and nbytes_of(frame) >= SHARED_FROM for frame in frames[1:])

    def rest(self, porter: Porter) -> Buffer | None:
        """Return the buffers that are too small for slots of their own, as one; None where that is none to map."""
        if self._private:  # for want of shared memory: it is pulled where it stands
            return None
        with self._joining:
            if self._rest is None:
                joined = porter.kept(b"".join(bytes(frame) for frame in self.frames[1:] if type(frame) is not Lease))
                if type(joined) is not Lease and nbytes_of(joined) > _INLINE:
                    return None
                self._rest = joined
            return self._rest


class _Mine:
    """The value of a handle that was made here, for messages that take it along."""

    def __init__(self, desk: Desk, number: int) -> None:
        self._desk = desk
        self._number = number
        self.ref: Ref | None = None

    @property
    def frames(self) -> Buffers:
        return self._desk.frames_of(self.ref, self._number)

    @property
    def lent(self) -> bool:
        return sum(nbytes_of(frame) for frame in self.frames[1:] if type(frame) is not Lease) <= _INLINE

    def taken(self, chosen: Sequence[int]) -> Any:
        return self._desk.taken(self.ref, self._number, chosen)


class Desk:
    """What a process keeps, and how it opens what others keep. Any thread may call.

    Args:
        owner: This process.
        porter: Its memory, shared and its own.
        limit: Most bytes kept at once; None for half of what it may lend (a quarter of the memory of the host where
            there is no shared memory).
        lease_s: How long a silent holder keeps what it has.
        is_over: Tells whether a holder has ended.
        carriage: Takes bytes to other hosts; None: nobody is there.
        inlines: Handles made here go along with their value in a message (a controller's).
    """

    def __init__(
        self,
        owner: Owner,
        porter: Porter,
        *,
        limit: int | None = None,
        lease_s: float = LEASE_S,
        is_over: Callable[[bytes], bool] = lambda _: False,
        carriage: Carriage | None = None,
        inlines: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.owner = owner
        self._porter = porter
        self.carriage = carriage
        self._is_over = is_over
        self._inlines = inlines
        self._now = clock.monotonic_ns
        self._lock = threading.Lock()
        most = porter.courier.room() // 2 if limit is None else limit
        self._store = RefStore(random.SystemRandom().getrandbits(_GENERATION_BITS), most, int(lease_s * 1e9), _DEAF_NS)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Make sure that there is any room at all, before the work is done.

        Raises:
            RefLimitError: There is none.
        """
        self._make_room()
        with self._lock:
            try:
                self._store.check(0)
            except Full as full:
                raise self._limit_error(full, "") from None

    def keep(self, value: Any, holder: bytes = OWN, claim: int = 0, method: str = "") -> Ref:
        """Keep a value and return its handle. Arrays are copied now, unless they stand in memory of ``empty``.

        Args:
            value: What the codec carries.
            holder: For whom: a session; this process itself by default.
            claim: Which call of the holder made it.
            method: Its endpoint, or what else made it.

        Raises:
            CodecError: It cannot be carried.
            RefLimitError: This process keeps as much as it may.
        """
        kept = _Value(encode(value, snapshot=True, keep=self._porter.kept))
        self._make_room()
        with self._lock:
            try:
                number, _ = self._store.put(holder, claim, kept.nbytes, kept, method, self._now())
            except Full as full:
                raise self._limit_error(full, method) from None
            generation = self._store.generation
        mine = _Mine(self, number) if self._inlines else None
        ref = Ref(
            role=self.owner.role, rank=self.owner.rank, incarnation=self.owner.incarnation, generation=generation,
            number=number, memory=self._porter.courier.token, endpoints=self.owner.endpoints, nbytes=kept.nbytes,
            rows=rows_of(value), lengths=lengths_of(value), method=method, about=describe(value), kept=mine,
        )  # fmt: skip
        if mine is not None:
            mine.ref = ref.with_fields(kept=None)  # for messages only, so that no handle keeps itself alive
        return ref

    def release(self, holder: bytes, claims: Sequence[int] = (), numbers: Sequence[int] = ()) -> None:
        """Let go of values of a holder; it is heard by this, also if it names none."""
        with self._lock:
            gone = self._store.release(holder, claims=claims, numbers=numbers, now_ns=self._now())
        del gone  # not under the lock: leases end with them

    def drop(self, ref: Ref) -> None:
        """Let go of a value of this process, whoever holds it."""
        if self.is_mine(ref):
            with self._lock:
                gone = self._store.release_any([ref.number])
            del gone

    def tick(self) -> None:
        """Drop what belongs to holders that are over or silent."""
        with self._lock:
            gone = self._store.tick(self._now(), self._is_over)
        del gone
        if self.carriage is not None:
            self.carriage.tick()

    def _make_room(self) -> None:
        """Drop what belongs to holders that are over or silent, as far as can be told: no call fails for it."""
        with contextlib.suppress(ZbusError, OSError):  # the records cannot be read: who looks after holders says so
            self.tick()

    def _limit_error(self, full: Full, method: str) -> RefLimitError:
        what = f"the {full.nbytes:,} bytes that `{method}` made" if method else "more"
        who = "; ".join(_told(holding, self._now()) for holding in full.holdings[:4]) or "nobody holds any"
        return RefLimitError(
            f"{self.owner} cannot keep {what}: it keeps {full.total:,} of at most {full.limit:,} bytes; {who}",
            hint="release Refs (with bus.scope(), ref.release()), or raise data.refs",
            facts={"held": who},
        )

    # -- answering -----------------------------------------------------------------------------------------------------

    def answers(self, questions: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Answer several questions; see ``answer``."""
        return [self.answer(*question) for question in questions]

    def answer(self, generation: int, number: int, rows: Any, reader: str) -> dict[str, Any]:
        """Tell a reader where a value is: its frames in shared memory, or what it may fetch.

        Args:
            generation: Of which store.
            number: Which value.
            rows: Chosen rows, as on the wire; used only where bytes are fetched.
            reader: Token of the reader's process; empty where it shares no memory with this one.

        Returns:
            ``{"gone": why}``, ``{"busy": why}`` where it is to be asked again, or body, sizes and whereabouts of the
            buffers.
        """
        with self._lock:
            held = self._store.find(generation, number)
        if isinstance(held, str):
            return {"gone": held}
        value: _Value = held.value
        if reader:
            near = self._answer_near(value, reader)
            if near is not None:
                return near
        return self._answer_far(value, rows)

    def _answer_near(self, value: _Value, reader: str) -> dict[str, Any] | None:
        frames = value.frames
        leases: list[Buffer] = [frame for frame in frames if type(frame) is Lease]
        rest = value.rest(self._porter)
        if rest is None:
            return None
        named = [*leases, rest] if type(rest) is Lease else leases
        if self._porter.courier.addressed(named, reader) is not named:
            return None
        return {
            "body": bytes(frames[0]),
            "sizes": [0 if type(frame) is Lease else nbytes_of(frame) for frame in frames[1:]],
            "lent": [bytes(lease) for lease in leases],
            "rest": bytes(rest),
        }

    def _answer_far(self, value: _Value, rows: Any) -> dict[str, Any]:
        if self.carriage is None:
            return {"gone": _NO_WAY}
        chosen = rows_from_wire(rows)
        whole = self._porter.courier.in_full(value.frames)
        frames = whole if chosen is None else encode(take(_shown(whole), chosen))
        try:
            offered = self.carriage.offer(value.offers, whole[1:], frames[1:])
        except NoRoom as full:
            return {"busy" if full.for_now else "gone": str(full)}
        return {
            "body": bytes(frames[0]),
            "sizes": [nbytes_of(frame) for frame in frames[1:]],
            "offered": offered,
            "taken": chosen is not None,
        }

    # -- opening -------------------------------------------------------------------------------------------------------

    def is_mine(self, ref: Ref) -> bool:
        """Tell whether a handle's value is kept by this very process."""
        return ref.generation == self._store.generation

    def reader_for(self, ref: Ref) -> str:
        """Return what the owner of a handle is told, so that this process may read its memory; empty if it cannot."""
        return self._porter.courier.token if self._porter.courier.is_near(ref.memory) else ""

    def question(self, ref: Ref) -> tuple[Any, ...]:
        """Return the arguments of ``answer`` for a handle."""
        return ref.generation, ref.number, rows_to_wire(ref.chosen), self.reader_for(ref)

    def open_all(self, refs: Iterable[Ref], ask: Ask, deadline_ns: int) -> dict[Ref, Any]:
        """Return the values of handles, asking each owner once for many of them.

        Args:
            refs: The handles; the same one may come several times.
            ask: How an owner is asked.
            deadline_ns: Until when (monotonic).

        Raises:
            RefLostError: A value is gone.
        """
        found: dict[Ref, Any] = {}
        owners: dict[tuple[str, int, int], list[Ref]] = {}
        for ref in dict.fromkeys(refs):
            if self.is_mine(ref):
                found[ref] = self.local(ref)
            else:
                owners.setdefault((ref.role, ref.rank, ref.incarnation), []).append(ref)
        for listed in owners.values():
            left = listed
            while left:
                some, left = left[:_AT_ONCE], left[_AT_ONCE:]
                answers = ask(some[0], [self.question(ref) for ref in some], deadline_ns)
                opened = len(found)
                for ref, answer in zip(some, answers, strict=True):
                    if "busy" not in answer:
                        found[ref] = self.opened(ref, answer, deadline_ns)
                    elif self._now() < deadline_ns:
                        left.append(ref)
                    else:
                        raise lost(ref, str(answer["busy"]))
                if len(found) == opened:  # the owner has no room until other readers have taken theirs
                    time.sleep(_BUSY_S)
        return found

    def opened(self, ref: Ref, answer: Mapping[str, Any], deadline_ns: int) -> Any:
        """Return the value of a handle from what its owner answered.

        Raises:
            RefLostError: It is gone.
        """
        if "gone" in answer:
            raise lost(ref, str(answer["gone"]))
        try:
            if "lent" in answer:
                value = decode(self._mapped(ref, answer))
                return value if ref.chosen is None else take(value, ref.chosen)
            carriage = self.carriage
            if carriage is None:
                raise lost(ref, _NO_WAY)
            buffers = carriage.fetch(ref, answer["sizes"], answer["offered"], deadline_ns)
            value = decode([answer["body"], *buffers])
            return value if answer["taken"] or ref.chosen is None else take(value, ref.chosen)
        except CodecError as error:
            raise lost(ref, f"it cannot be read: {error.message}") from error

    def _mapped(self, ref: Ref, answer: Mapping[str, Any]) -> list[Buffer]:
        opened = list(self._porter.courier.opened([b"", *answer["lent"], answer["rest"]], ref.memory))
        rest = memoryview(bytes(opened.pop()))
        lent = iter(opened[1:])
        frames: list[Buffer] = [answer["body"]]
        at = 0
        for size in answer["sizes"]:
            if size:
                frames.append(rest[at : at + size])
                at += size
            else:
                frames.append(next(lent))
        return frames

    def local(self, ref: Ref) -> Any:
        """Return the value of a handle that was made here; arrays are read-only, as for any other reader.

        Raises:
            RefLostError: It was released.
        """
        with self._lock:
            held = self._store.find(ref.generation, ref.number)
        if isinstance(held, str):
            raise lost(ref, held)
        near = self._answer_near(held.value, self._porter.courier.token) if self._porter.courier.token else None
        if near is not None:
            return self.opened(ref, near, 0)
        value = _shown(self._porter.courier.in_full(held.value.frames))
        return value if ref.chosen is None else take(value, ref.chosen)

    def frames_of(self, ref: Ref | None, number: int) -> Buffers:
        """Return the frames of a value that was made here.

        Raises:
            RefLostError: It was released.
        """
        with self._lock:
            held = self._store.find(self._store.generation, number)
        if isinstance(held, str):
            raise RefLostError(held) if ref is None else lost(ref, held)
        frames: Buffers = held.value.frames
        return frames

    def taken(self, ref: Ref | None, number: int, chosen: Sequence[int]) -> Any:
        """Return rows of a value that was made here: read-only views of its arrays, or copies of single rows.

        Raises:
            RefLostError: It was released.
        """
        return take(_shown(self._porter.courier.in_full(self.frames_of(ref, number))), chosen)

    # -- looking -------------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return count and bytes of what is kept, the limit, the age of the oldest, and who holds how much."""
        with self._lock:
            now, holdings = self._now(), self._store.holdings()
            total, limit, count = self._store.total, self._store.limit, len(self._store.values)
        oldest = min((holding.oldest_ns for holding in holdings), default=now)
        return {
            "refs": count,
            "refs_bytes": total,
            "refs_limit": limit,
            "refs_oldest_s": round((now - oldest) / 1e9, 3),
            "refs_holders": [
                {
                    "holder": holding.holder.hex()[:8] or str(self.owner),
                    "refs": holding.count,
                    "bytes": holding.nbytes,
                    "oldest_s": round((now - holding.oldest_ns) / 1e9, 3),
                    "methods": dict(holding.methods[:8]),
                }
                for holding in holdings
            ],
        }


_NO_WAY: Final = "it shares no memory with this host, and no way leads there"


def _shown(frames: Buffers) -> Any:
    """Return the value of frames of our own, read-only and uncopied."""
    from zbus.data.views import Shown  # numpy is imported by the first array, not before

    return decode([frames[0], *map(Shown.of, frames[1:])]) if len(frames) > 1 else decode(frames)


_INLINE: Final = 1 << 18
"""What is not in shared memory goes with the answer up to so many bytes; beyond, it is fetched."""


def _told(holding: Holding, now_ns: int) -> str:
    who = f"session {holding.holder.hex()[:8]}" if holding.holder else "this process itself"
    made = ", ".join(f"`{method}` {nbytes:,}" for method, nbytes in holding.methods[:3])
    return f"{who} holds {holding.count} Refs ({made} bytes; the oldest for {(now_ns - holding.oldest_ns) / 1e9:.0f} s)"


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield the handles in a value, through lists, tuples and dicts."""
    if type(value) is Ref:
        yield value
    elif type(value) is JoinedRef:
        yield from value.parts
    elif type(value) is list or type(value) is tuple:
        for item in value:
            yield from refs_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from refs_in(item)


def fill(value: Any, get: Callable[[Ref], Any]) -> Any:
    """Return a value with what ``get`` returns in place of each handle in it, through lists, tuples and dicts."""
    if type(value) is Ref:
        return get(value)
    if type(value) is JoinedRef:
        return value.made(get)
    if type(value) is list:
        return [fill(item, get) for item in value]
    if type(value) is tuple:
        return tuple(fill(item, get) for item in value)
    if type(value) is dict:
        return {key: fill(item, get) for key, item in value.items()}
    return value
