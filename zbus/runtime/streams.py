"""One running stream: its items, numbered and sent, and the credit that lets it run on."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from zbus.errors import CallStopped
from zbus.protocol.messages import Buffers, Execute, nbytes_of

if TYPE_CHECKING:
    import asyncio

__all__ = ["STREAM_BYTES", "STREAM_WINDOW", "Chunks", "RunningStream"]

STREAM_WINDOW: Final = 64
"""Items a stream may run ahead of what its caller has taken."""

STREAM_BYTES: Final = 64 << 20
"""Bytes a stream may run ahead; one item may always be on its way, however large."""

_LOOK_S: Final = 1.0


class Chunks(Protocol):
    """Where items go."""

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        """Send one item of a stream."""


class RunningStream:
    """Sends the items of one request, and waits for credit on the thread or the loop that produces them.

    Args:
        chunks: Where items go.
        request: Whose they are.
        loop: The loop that produces them; None for a thread.
        encode: Makes an item's frames.

    Attributes:
        sent, sent_bytes: Items sent, and their size; the producer's own.
        acked, acked_bytes: Items taken by the caller, and their size; set by whoever hears of it.
        well: It ended without an error.
    """

    __slots__ = (
        "_chunks", "_encode", "_loop", "_loop_event", "_request", "_sizes", "_thread_event", "acked", "acked_bytes",
        "sent", "sent_bytes", "well",
    )  # fmt: skip

    def __init__(
        self,
        chunks: Chunks,
        request: Execute,
        loop: asyncio.AbstractEventLoop | None,
        encode: Callable[[Any], Buffers],
    ) -> None:
        self._chunks = chunks
        self._encode = encode
        self._request = request
        self.sent = self.sent_bytes = 0
        self.acked = self.acked_bytes = 0
        self._sizes: deque[int] = deque()  # of the items between the two
        self.well = False
        self._loop = loop
        self._thread_event = threading.Event()
        self._loop_event: asyncio.Event | None = None
        if loop is not None:
            import asyncio

            self._loop_event = asyncio.Event()

    @property
    def key(self) -> tuple[bytes, str, int]:
        """Session, lane and seq of its request."""
        return self._request.session, self._request.lane, self._request.seq

    def grant(self, acked: int) -> None:
        """Note that the caller took all items below ``acked``; also wakes a producer that is to look around."""
        for _ in range(self.acked, min(acked, self.sent)):
            self.acked_bytes += self._sizes.popleft()
        self.acked = acked
        if self._loop is not None and self._loop_event is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                self._loop.call_soon_threadsafe(self._loop_event.set)
        else:
            self._thread_event.set()

    def send(self, item: Any) -> None:
        """Send the next item; after a wait for credit."""
        frames = self._encode(item)
        size = sum(map(nbytes_of, frames))
        self._sizes.append(size)
        self.sent_bytes += size
        number, self.sent = self.sent, self.sent + 1
        self._chunks.chunk(self._request, number, frames)

    def wait(self, stopped: Callable[[], bool], method: str) -> None:
        """Wait for credit on the producing thread.

        Raises:
            CallStopped: Nobody wants the items any more.
        """
        while True:
            self._thread_event.clear()
            if stopped():
                reason = "cancelled"
                raise CallStopped(reason, method)
            if not self._full():
                return
            self._thread_event.wait(_LOOK_S)

    async def wait_async(self) -> None:
        """Wait for credit on the producing loop; its task is cancelled when nobody wants the items."""
        while self._full() and self._loop_event is not None:
            self._loop_event.clear()
            if self._full():
                await self._loop_event.wait()

    def _full(self) -> bool:
        ahead = self.sent - self.acked
        return ahead >= STREAM_WINDOW or (ahead > 0 and self.sent_bytes - self.acked_bytes >= STREAM_BYTES)
