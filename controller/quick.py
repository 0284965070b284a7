"""The short way of a blocking call to one rank: what ``Placement`` and ``BatchFuture`` would do while all goes well.

It is left as soon as anything but a plain answer comes: a call that fails, or that the bus was closed on, is handed to
a ``Placement`` with all that is known of it, which decides about second executions and makes the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controller.futures import BatchFuture
from zbus.codec import decode
from zbus.protocol.messages import Buffers, Outcome, OutcomeKind

if TYPE_CHECKING:
    from controller.placement import Placement
    from controller.placer import Placed, Placer
    from controller.refs import RefBook

__all__ = ["QuickCall"]

_OK = OutcomeKind.OK


class QuickCall:
    """One call of one rank, waited for by the thread that makes it.

    Args:
        placer: Carries it.
        peer: Who is called.
        payload: The encoded call.
        refs: What handles in the answer are tied to.
    """

    __slots__ = ("_outcome", "_peer", "_placement", "_placer", "_refs", "began_ns", "payload", "placed")

    def __init__(self, placer: Placer, peer: Any, payload: Buffers, refs: RefBook | None = None) -> None:
        self._placer = placer
        self._refs = refs
        self._peer = peer
        self.payload = payload
        self._outcome: Outcome | None = None
        self._placement: Placement | None = None
        self.began_ns = time.monotonic_ns()
        self.placed: Placed = None

    def place(self, lane: str, deadline_s: float | None, *, strict: bool) -> None:
        """Send it.

        Raises:
            Unavailable: The rank is not ready; nothing was sent.
        """
        self.placed = self._placer.place(
            (self._peer,), lane, (self.payload,), 1, deadline_s=deadline_s, sink=self._deliver, strict=strict
        )

    def result(self, recover: Callable[[QuickCall], BatchFuture[Any]]) -> Any:
        """Wait for the answer and return it.

        Args:
            recover: Makes the future of a call that did not end well, or not at all; its error is raised.
        """
        self._placer.wait(self._done, None)
        outcome = self._outcome
        if outcome is not None and outcome.kind is _OK:
            found: list[Any] = []
            value = decode(outcome.payload or (), refs=found)
            if found and self._refs is not None:
                self._refs.bind(found, None)
            return value
        return recover(self).result()

    def hand_over(self, placement: Placement) -> None:
        """Let ``placement`` go on with this call: as if it had made it, and with the outcome that came since."""
        placement.adopt([self._peer], self.placed, self.began_ns / 1e9)
        self._placement = placement
        if self._outcome is not None:
            placement.deliver(0, 0, self._outcome)

    def _done(self) -> bool:
        return self._outcome is not None

    def _deliver(self, member: int, call: int, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._placement is not None:
            self._placement.deliver(member, call, outcome)
