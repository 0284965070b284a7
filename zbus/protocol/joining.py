"""Short results of calls that came in one message leave in one, too: which may, and how they become it.

Pure. The callee has booked each of them as an answer of its own before it comes here, and says it again by itself when
asked; so what is held here and lost is asked for again, like any message.
"""

from __future__ import annotations

from typing import Final

from zbus.protocol.frames import INLINE_BYTES, join_bodies
from zbus.protocol.messages import Kind, SendTo

__all__ = ["JoinedResults"]

_RESULT: Final = int(Kind.RESULT)


class JoinedResults:
    """Results of consecutive calls of one lane that wait for one message. One mutator at a time."""

    __slots__ = ("_bodies", "_first", "_next_seq")

    def __init__(self) -> None:
        self._first: SendTo | None = None
        self._bodies: list[bytes] = []
        self._next_seq = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._bodies)

    def add(self, send: SendTo) -> bool:
        """Keep a result until ``take``; False, and nothing done, where it cannot go with those that wait."""
        header, buffers, peer = send
        if header.kind != _RESULT or header.calls != 1 or len(buffers) != 1:
            return False
        body = buffers[0]
        if type(body) is not bytes or len(body) > INLINE_BYTES:
            return False
        first = self._first
        if first is None:
            self._first = send
        elif (
            header.seq != self._next_seq
            or peer != first.peer
            or header.lane != first.header.lane
            or header.session != first.header.session
            or header.attempt != first.header.attempt
        ):
            return False
        self._bodies.append(body)
        self._next_seq = header.seq + 1
        return True

    def take(self) -> SendTo | None:
        """Return the message of all that wait, and forget them; None if none does."""
        first, bodies = self._first, self._bodies
        self._first, self._bodies = None, []
        if first is None or len(bodies) == 1:
            return first
        return SendTo(first.header._replace(calls=len(bodies)), (join_bodies(bodies),), first.peer)
