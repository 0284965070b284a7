"""Answers whose arrays are still on their way: each waits for them, and what comes behind it for its call waits too.

Pure of sockets and threads: whoever owns it calls it under one lock and starts the pulls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from zbus.protocol.messages import Buffers, Header, Kind
from zbus.transport.carrier import Opening

__all__ = ["Arrivals"]

_WORDS: Final = frozenset(map(int, (Kind.RESULT, Kind.FAILURE, Kind.CHUNK, Kind.END)))


class _Waiting:
    """What has come for one call and is not delivered. The first message's arrays are on their way."""

    __slots__ = ("messages", "opening")

    def __init__(self) -> None:
        self.messages: deque[tuple[Header, Buffers]] = deque()
        self.opening: Opening | None = None


class Arrivals:
    """Of one lane. False while nothing waits.

    Args:
        must_pull: Tells whether the arrays of a message have to be pulled.
        begin: Begins to pull those of the first message that waits for a call, and calls ``arrived`` later, never at
            once; None if that cannot be, which it has reported.
        deliver: Takes a message with its arrays.
    """

    __slots__ = ("_begin", "_deliver", "_must_pull", "_waiting")

    def __init__(
        self,
        must_pull: Callable[[Buffers], bool],
        begin: Callable[[int, Buffers], Opening | None],
        deliver: Callable[[Header, Buffers], None],
    ) -> None:
        self._must_pull = must_pull
        self._begin = begin
        self._deliver = deliver
        self._waiting: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def keeps(self, header: Header, buffers: Buffers) -> bool:
        """Keep a message that cannot be delivered yet; False: it can."""
        waiting = self._waiting.get(header.seq)
        if waiting is not None:
            if header.kind not in _WORDS:  # how far the call is: no word that has to keep its place
                return False
            if all(_word(header) != _word(known) for known, _ in waiting.messages):  # else it was sent again
                waiting.messages.append((header, buffers))
            return True
        if header.calls > 1 or len(buffers) < 2 or not self._must_pull(buffers):
            return False
        waiting = self._waiting[header.seq] = _Waiting()
        waiting.messages.append((header, buffers))
        self._go_on(header.seq, waiting)
        return True

    def arrived(self, seq: int, opening: Opening, buffers: Buffers | None) -> None:
        """Deliver the first message that waits for a call, and go on to the next.

        Args:
            seq: Of the call.
            opening: What ``begin`` returned.
            buffers: The message's frames with its arrays; None: they did not come, and the message counts as lost.
        """
        waiting = self._waiting.get(seq)
        if waiting is None or waiting.opening is not opening:
            return
        waiting.opening = None
        header, _ = waiting.messages.popleft()
        if buffers is not None:
            self._deliver(header, buffers)
        if self._waiting.get(seq) is waiting:  # else its call is over
            self._go_on(seq, waiting)

    def over(self, seq: int) -> Opening | None:
        """Forget what waits for a call that is over; return what was on its way, no longer wanted, or None."""
        waiting = self._waiting.pop(seq, None)
        return None if waiting is None else waiting.opening

    def _go_on(self, seq: int, waiting: _Waiting) -> None:
        while waiting.messages:
            header, buffers = waiting.messages[0]
            if len(buffers) > 1 and self._must_pull(buffers):
                waiting.opening = self._begin(seq, buffers)
                if waiting.opening is not None:
                    return
                waiting.messages.popleft()
                continue
            waiting.messages.popleft()
            self._deliver(header, buffers)
            if self._waiting.get(seq) is not waiting:
                return
        del self._waiting[seq]


def _word(header: Header) -> tuple[int, int]:
    """Return what tells one message about a call from another of it, but not from a copy."""
    return header.kind, header.floor if header.kind == Kind.CHUNK else 0
