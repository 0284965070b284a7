"""What a process offers to those who share no memory with it. Pure: the bytes are the shell's."""

from __future__ import annotations

from collections.abc import Sequence

from zbus.protocol.messages import Buffer
from zbus.protocol.parts import KEY_BYTES, MAX_RANGE, PartHeader, Status

__all__ = ["Stock"]


class Stock:
    """Buffers by key. One mutator at a time.

    Nothing is kept of who asks: whether a key may be read is decided by knowing it, so keys are not to be guessed.

    Attributes:
        refused: How many ASKs were refused, by reason.
        nbytes: Bytes of all that is offered.
    """

    def __init__(self) -> None:
        self._offers: dict[bytes, tuple[memoryview, ...]] = {}
        self._asked_ns: dict[bytes, int] = {}
        self.refused: dict[str, int] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Offer buffers, each contiguous, under a key that is not in use. They stay as they are until ``withdraw``.

        Raises:
            ValueError: The key is in use, or has not ``KEY_BYTES`` bytes.
            TypeError: A buffer is not contiguous.
        """
        if len(key) != KEY_BYTES or key in self._offers:
            msg = f"key {key.hex()} is in use" if len(key) == KEY_BYTES else f"a key has {KEY_BYTES} bytes"
            raise ValueError(msg)
        views = tuple(memoryview(buffer).cast("B").toreadonly() for buffer in buffers)
        self._offers[bytes(key)] = views
        self.nbytes += sum(view.nbytes for view in views)

    def withdraw(self, key: bytes) -> bool:
        """Offer it no more; False if it was not offered. What has left may still arrive."""
        views = self._offers.pop(key, None)
        if views is None:
            return False
        self._asked_ns.pop(key, None)
        self.nbytes -= sum(view.nbytes for view in views)
        return True

    def asked_ns(self, key: bytes) -> int | None:
        """Return when bytes under a key were last asked for and given; None: never, or it is not offered."""
        return self._asked_ns.get(key)

    def answer(self, ask: PartHeader, now: int = 0) -> tuple[Status, memoryview | None]:
        """Return the bytes that are asked for now (ns), or why they are not given; a refusal is counted."""
        status, view = self._find(ask)
        if view is None:
            reason = f"ask_{status.name.lower()}"
            self.refused[reason] = self.refused.get(reason, 0) + 1
        else:
            self._asked_ns[ask.key] = now
        return status, view

    def _find(self, ask: PartHeader) -> tuple[Status, memoryview | None]:
        views = self._offers.get(ask.key)
        if views is None:
            return Status.UNKNOWN_KEY, None
        if ask.buffer >= len(views):
            return Status.UNKNOWN_BUFFER, None
        view = views[ask.buffer]
        if ask.total != view.nbytes:
            return Status.OTHER_SIZE, None
        if ask.nbytes > MAX_RANGE:
            return Status.TOO_MUCH, None
        if not ask.nbytes or ask.offset + ask.nbytes > view.nbytes:
            return Status.OUT_OF_RANGE, None
        return Status.NONE, view[ask.offset : ask.offset + ask.nbytes]
