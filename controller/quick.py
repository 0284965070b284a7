"""The short way of a plain call that is waited for: what ``Placement`` and ``BatchFuture`` do while all goes well.

A call without handles among its arguments, to one rank or the same to several, blocking or awaited. It is
left as soon as anything but a plain answer comes, or the answer takes a while: a call that fails, or that the bus was
closed on, or that somebody may have to be told of as stuck, is handed to a ``Placement`` with all that is known of it,
which decides about second executions, watches over it and makes the error.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from controller.futures import BatchFuture
from controller.placer import loop_driver
from zbus.codec import NOT_PLAIN, decode, decode_plain
from zbus.protocol.messages import Buffers, Outcome, OutcomeKind

if TYPE_CHECKING:
    from controller.placement import Placement
    from controller.placer import Placed, Placer
    from controller.refs import RefBook

__all__ = ["QuickCall"]

_OK: Final = OutcomeKind.OK

_SHORT_S: Final = 0.2
"""A call that takes longer is no matter of microseconds any more."""


class QuickCall:
    """One call, waited for by the thread or task that makes it.

    Args:
        placer: Carries it.
        peers: Who is called.
        payload: The encoded call, the same for all.
        refs: What handles in the answers are tied to.
    """

    __slots__ = (
        "_bad", "_came", "_left", "_peers", "_placement", "_placer", "_refs", "_waiter", "began_ns", "payload",
        "placed",
    )  # fmt: skip

    def __init__(self, placer: Placer, peers: Sequence[Any], payload: Buffers, refs: RefBook | None = None) -> None:
        self._placer = placer
        self._refs = refs
        self._peers = peers
        self.payload = payload
        # What came, in that order. Whoever takes an outcome out hands it on, so none is handed on twice.
        self._came: deque[tuple[int, Outcome]] = deque()
        self._left = len(peers)
        self._bad = False
        self._placement: Placement | None = None
        self._waiter: Callable[[], None] | None = None
        self.began_ns = time.monotonic_ns()
        self.placed: Placed = None

    def place(self, lane: str, deadline_s: float | None, *, strict: bool) -> None:
        """Send it.

        Raises:
            Unavailable: A rank is not ready; nothing was sent.
        """
        peers = self._peers
        self.placed = self._placer.place(
            peers, lane, (self.payload,) * len(peers), 1, deadline_s=deadline_s, sink=self._deliver, strict=strict
        )

    def result(self, merge: Callable[[Sequence[Any]], Any], recover: Callable[[QuickCall], BatchFuture[Any]]) -> Any:
        """Wait for the answer and return it.

        Args:
            merge: Turns the values, in the order of the peers, into the answer.
            recover: Makes the future of a call that did not end well, or not soon; its answer is returned, or its
                error raised.
        """
        if self._placer.wait(self._done, _SHORT_S) and not self._bad:
            return merge(self._values())
        return recover(self).result()

    async def answer(
        self, merge: Callable[[Sequence[Any]], Any], recover: Callable[[QuickCall], BatchFuture[Any]]
    ) -> Any:
        """As ``result``, on the running loop; cancelling it cancels the call."""
        try:
            if not self._done():
                await self._wait()
            if self._done() and not self._bad:
                return merge(self._values())
        except asyncio.CancelledError:
            self._placer.cancel(self.placed)
            raise
        return await recover(self)

    def hand_over(self, placement: Placement) -> None:
        """Let ``placement`` go on with this call: as if it had made it, and with the outcomes that came since."""
        placement.adopt(list(self._peers), self.placed, self.began_ns / 1e9)
        self._placement = placement
        self._hand_on(placement)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait on the running loop until it is done, or has taken a while."""
        loop = asyncio.get_running_loop()
        changed = loop.create_future()
        here = threading.get_ident()

        def end() -> None:
            if not changed.done():
                changed.set_result(None)

        def notice() -> None:
            if threading.get_ident() == here:  # the loop drives the bus itself: no need to wake it
                end()
                return
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:  # the loop was closed while the call was out; nobody waits there any more
                return

        driver = loop_driver(self._placer)
        self._waiter = notice
        if driver is not None:
            driver.attach_loop(loop)
        timer = loop.call_later(_SHORT_S, end)
        try:
            if not self._done():  # it may have come before there was a waiter
                await changed
        finally:
            self._waiter = None
            timer.cancel()
            if driver is not None:
                driver.detach_loop(loop)

    def _done(self) -> bool:
        return self._left == 0 or self._bad

    def _values(self) -> list[Any]:
        came = self._came
        if len(came) == 1:
            return [self._value(came[0][1])]
        return [self._value(outcome) for _, outcome in sorted(came, key=_member)]

    def _value(self, outcome: Outcome) -> Any:
        payload = outcome.payload or ()
        if len(payload) == 1 and type(payload[0]) is bytes:
            plain = decode_plain(payload[0])
            if plain is not NOT_PLAIN:
                return plain
        found: list[Any] = []
        value = decode(payload, refs=found)
        if found and self._refs is not None:
            self._refs.bind(found, None)
        return value

    def _deliver(self, member: int, _call: int, outcome: Outcome) -> None:
        self._came.append((member, outcome))
        if self._placement is not None:
            self._hand_on(self._placement)
            return
        self._left -= 1
        if outcome.kind is not _OK:
            self._bad = True
        if self._waiter is not None and (self._left == 0 or self._bad):
            self._waiter()

    def _hand_on(self, placement: Placement) -> None:
        came = self._came
        while came:
            try:
                member, outcome = came.popleft()
            except IndexError:  # another thread has taken it
                return
            placement.deliver(member, 0, outcome)


def _member(one: tuple[int, Outcome]) -> int:
    return one[0]
