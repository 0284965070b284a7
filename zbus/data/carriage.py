"""Kept values for processes that share no memory with their owner: the bytes that are wanted, pulled where they are.

The owner answers with ranges of its own buffers, so that some rows of an array cost no copy there and no byte too much
on the way. What the ranges name stays offered as long as the value is kept; what had to be copied for one reader (rows
picked one by one) until a minute after it was last asked for. Copies count against the bound of all copies of this
process; where there is no room the reader is told so, and asks again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zbus.codec import Ref
from zbus.codec.refs import lost
from zbus.data.lease import SHARED_FROM
from zbus.errors import TransportError
from zbus.protocol.messages import Buffer, Buffers, nbytes_of
from zbus.transport.bulk import Pull, PullFailed, Range

if TYPE_CHECKING:
    from zbus.data.offer import Offer
    from zbus.data.porter import Porter

__all__ = ["BulkCarriage", "NoRoom", "Offers"]

_COPIES_NS: Final = 60_000_000_000
_LOOK_S: Final = 0.1


class NoRoom(Exception):  # an answer of the carriage, told to the reader by the desk
    """There is no room for the copies that a reader needs.

    Attributes:
        for_now: Whether there will be, once other readers have what they asked for.
    """

    def __init__(self, message: str, *, for_now: bool) -> None:
        super().__init__(message)
        self.for_now = for_now


class _Copy(msgspec.Struct, frozen=True):
    offer: Offer
    since_ns: int


class Offers:
    """What is offered of one value. Dropped with it, and with it all that is offered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # several readers may ask for one value at once
        self.buffers: dict[int, Offer] = {}  # by number: the value's own
        self.copies: list[_Copy] = []
        self.small: Offer | None = None  # of the copies, the one with all small buffers of the value


def _span(buffer: Buffer) -> tuple[int, int]:
    import numpy as np

    view = np.frombuffer(buffer, np.uint8)
    start = int(view.__array_interface__["data"][0])
    return start, start + view.nbytes


class BulkCarriage:
    """Offers and fetches over the ``data`` sockets of this process. Any thread may call.

    Args:
        porter: What has them.
        gone: Says in words why the owner of a handle is gone; empty while it may be there.
        now: Returns monotonic ns, by the clock of the porter's ``bulk``.
        look: Called now and then by whoever waits; what it raises ends the wait.
    """

    def __init__(
        self,
        porter: Porter,
        gone: Callable[[Ref], str],
        *,
        now: Callable[[], int] = time.monotonic_ns,
        look: Callable[[], object] = bool,
    ) -> None:
        self._porter = porter
        self._gone = gone
        self._now = now
        self._look = look
        self._lock = threading.Lock()
        self._copied: weakref.WeakSet[Offers] = weakref.WeakSet()  # of which there may be copies

    # -- the owner's side ----------------------------------------------------------------------------------------------

    def offer(self, offers: Offers, whole: Sequence[Buffer], parts: Sequence[Buffer]) -> Any:
        """Make parts of buffers available and return plain data that says where.

        Args:
            offers: What is offered of the value so far.
            whole: All buffers of the value.
            parts: What is wanted: views of them, or copies.

        Raises:
            NoRoom: Copies are needed, and there is no room for them; nothing more is offered than before.
        """
        spans = [_span(buffer) for buffer in whole]
        with offers.lock:
            self._expire(offers)
            before = list(offers.copies)
            try:
                told: list[Any] = [None if nbytes_of(part) < SHARED_FROM else self._place(offers, whole, spans, part)
                                   for part in parts]  # fmt: skip
                return [told, self._small(offers, whole, parts)]
            except NoRoom:
                offers.copies = before
                raise

    def tick(self) -> None:
        """Drop copies that nobody asks for any more."""
        with self._lock:
            some = list(self._copied)
        for offers in some:
            with offers.lock:
                self._expire(offers)
                if not offers.copies:
                    self._copied.discard(offers)

    def _expire(self, offers: Offers) -> None:
        """Drop the copies of a value that were not asked for lately."""
        if not offers.copies:
            return
        bulk = self._porter.bulk
        assert bulk is not None  # noqa: S101  # it offers them
        oldest = self._now() - _COPIES_NS
        offers.copies = [
            copy for copy in offers.copies if max(copy.since_ns, bulk.asked_ns(copy.offer.key) or 0) >= oldest
        ]
        if not any(copy.offer is offers.small for copy in offers.copies):
            offers.small = None

    def _small(self, offers: Offers, whole: Sequence[Buffer], parts: Sequence[Buffer]) -> Any:
        """Return the small buffers of what is wanted as one: the bytes, or where they are."""
        is_whole = len(whole) == len(parts) and all(one is other for one, other in zip(whole, parts, strict=True))
        if is_whole and offers.small is not None:
            return [offers.small.key, offers.small.nbytes, 0, offers.small.nbytes]
        small = b"".join(bytes(part) for part in parts if nbytes_of(part) < SHARED_FROM)
        if len(small) < SHARED_FROM:
            return small
        told = self._copy(offers, small)
        if is_whole:
            offers.small = offers.copies[-1].offer
        return told

    def _place(
        self, offers: Offers, whole: Sequence[Buffer], spans: Sequence[tuple[int, int]], part: Buffer
    ) -> list[Any]:
        start, end = _span(part)
        for number, (first, last) in enumerate(spans):
            if first <= start and end <= last:
                offer = offers.buffers.get(number)
                if offer is None:
                    offer = offers.buffers[number] = self._porter.offer(memoryview(whole[number]))
                return [offer.key, offer.nbytes, start - first, end - start]
        return self._copy(offers, part)

    def _copy(self, offers: Offers, part: Buffer) -> list[Any]:
        offer = self._porter.offer_copy(memoryview(part).cast("B"))
        if offer is None:
            most, nbytes = self._porter.most_copied, nbytes_of(part)
            msg = f"no room for a copy of {nbytes:,} bytes: copies for readers may take {most:,} bytes of this host"
            raise NoRoom(msg, for_now=nbytes <= most)
        offers.copies.append(_Copy(offer, self._now()))
        with self._lock:
            self._copied.add(offers)
        return [offer.key, offer.nbytes, 0, offer.nbytes]

    # -- the reader's side ---------------------------------------------------------------------------------------------

    def fetch(self, ref: Ref, sizes: Sequence[int], offered: Any, deadline_ns: int) -> Buffers:
        """Get what the owner of a handle offers, in memory that is this process's own.

        Args:
            ref: The handle.
            sizes: Bytes of each buffer.
            offered: What the owner said.
            deadline_ns: Until when (monotonic).

        Raises:
            RefLostError: It did not come: its owner is gone, or silent.
        """
        told, small = offered
        pulls: list[Pull] = []
        try:
            frames: list[Any] = [None if one is None else self._pull(ref, one, deadline_ns, pulls) for one in told]
            rest = small if isinstance(small, bytes) else self._pull(ref, small, deadline_ns, pulls)
            for pull in pulls:
                self._await(ref, pull)
        except (TransportError, ValueError, MemoryError, OSError) as error:
            raise lost(ref, f"it could not be pulled: {error}") from error
        finally:
            for pull in pulls:
                if pull.how is None:
                    pull.cancel()
        at = 0
        for number, (frame, size) in enumerate(zip(frames, sizes, strict=True)):
            if frame is None:
                frames[number] = bytes(rest[at : at + size])
                at += size
        return frames

    def _pull(self, ref: Ref, one: Sequence[Any], deadline_ns: int, pulls: list[Pull]) -> memoryview:
        key, total, offset, nbytes = one
        memory = self._porter.memory(nbytes)
        bulk = self._porter.bulk
        if bulk is None:
            raise lost(ref, "this process pulls nothing")
        left_s = max(0.001, (deadline_ns - self._now()) / 1e9)
        wanted = Range(0, offset, nbytes, total)
        pulls.append(
            bulk.pull(ref.endpoints.get("data", ()), key, [wanted], [memory.data.cast("B")], deadline_s=left_s)
        )
        return memory.data

    def _await(self, ref: Ref, pull: Pull) -> None:
        while not pull.wait(_LOOK_S):
            self._look()
            if why := self._gone(ref):
                raise lost(ref, why)
        try:
            pull.check()
        except PullFailed as error:
            raise lost(ref, self._gone(ref) or f"it did not come: {error.message}") from error
