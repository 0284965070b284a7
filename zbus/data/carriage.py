"""Kept values for processes that share no memory with their owner: the bytes that are wanted, pulled where they are.

The owner answers with ranges of its own buffers, so that some rows of an array cost no copy there and no byte too much
on the way. What the ranges name stays offered as long as the value is kept; what had to be copied for one reader (rows
picked one by one) for a minute.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from zbus.codec import Ref
from zbus.codec.refs import lost
from zbus.data.lease import SHARED_FROM
from zbus.errors import TransportError
from zbus.protocol.messages import Buffer, Buffers, nbytes_of
from zbus.transport.bulk import Pull, PullFailed, Range

if TYPE_CHECKING:
    from zbus.data.offer import Offer
    from zbus.data.porter import Porter

__all__ = ["BulkCarriage", "Offers"]

_COPIES_NS: Final = 60_000_000_000
_LOOK_S: Final = 0.1


class Offers:
    """What is offered of one value. Dropped with it, and with it all that is offered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # several readers may ask for one value at once
        self.buffers: dict[int, Offer] = {}  # by number: the value's own
        self.copies: deque[tuple[int, Offer]] = deque()  # and since when


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
    """

    def __init__(self, porter: Porter, gone: Callable[[Ref], str]) -> None:
        self._porter = porter
        self._gone = gone

    # -- the owner's side ----------------------------------------------------------------------------------------------

    def offer(self, offers: Offers, whole: Sequence[Buffer], parts: Sequence[Buffer]) -> Any:
        """Make parts of buffers available and return plain data that says where.

        Args:
            offers: What is offered of the value so far.
            whole: All buffers of the value.
            parts: What is wanted: views of them, or copies.
        """
        now = time.monotonic_ns()
        spans = [_span(buffer) for buffer in whole]
        small = b"".join(bytes(part) for part in parts if nbytes_of(part) < SHARED_FROM)
        with offers.lock:
            while offers.copies and now - offers.copies[0][0] > _COPIES_NS:
                offers.copies.popleft()
            told: list[Any] = [None if nbytes_of(part) < SHARED_FROM else self._place(offers, whole, spans, part, now)
                               for part in parts]  # fmt: skip
            return [told, small if len(small) < SHARED_FROM else self._copy(offers, small, now)]

    def _place(
        self, offers: Offers, whole: Sequence[Buffer], spans: Sequence[tuple[int, int]], part: Buffer, now: int
    ) -> list[Any]:
        start, end = _span(part)
        for number, (first, last) in enumerate(spans):
            if first <= start and end <= last:
                offer = offers.buffers.get(number)
                if offer is None:
                    offer = offers.buffers[number] = self._porter.offer(memoryview(whole[number]))
                return [offer.key, offer.nbytes, start - first, end - start]
        return self._copy(offers, part, now)

    def _copy(self, offers: Offers, part: Buffer, now: int) -> list[Any]:
        offer = self._porter.offer(memoryview(part))
        offers.copies.append((now, offer))
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
        left_s = max(0.001, (deadline_ns - time.monotonic_ns()) / 1e9)
        wanted = Range(0, offset, nbytes, total)
        pulls.append(
            bulk.pull(ref.endpoints.get("data", ()), key, [wanted], [memory.data.cast("B")], deadline_s=left_s)
        )
        return memory.data

    def _await(self, ref: Ref, pull: Pull) -> None:
        while not pull.wait(_LOOK_S):
            if why := self._gone(ref):
                raise lost(ref, why)
        try:
            pull.check()
        except PullFailed as error:
            raise lost(ref, self._gone(ref) or f"it did not come: {error.message}") from error
