"""The future of a plain call of one rank that nobody waits for yet: what ``Placement`` does while all goes well.

Many of these may be out at once, so there is as little of each as can be. As soon as anything but a plain answer comes,
or is asked for, or the answer takes a while, the call is handed to a ``Placement`` with all that is known of it, as
``QuickCall`` does; from then on it is a future like any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from controller.futures import BatchFuture, first
from controller.placement import PUT, Placement
from zbus.codec import NOT_PLAIN, decode_plain
from zbus.protocol.messages import Buffers, Outcome, OutcomeKind
from zbus.transport.interrupts import gate

if TYPE_CHECKING:
    from controller.calls import Method

__all__ = ["SoonFuture"]

T = TypeVar("T")

_SHORT_S: Final = 0.2
"""A call that takes longer is no matter of microseconds any more."""

_making: Final = threading.RLock()
"""Held while a call is handed over, so that this is done once. Nothing else is waited for under it."""


class SoonFuture(BatchFuture[T]):
    """See the module docstring. ``placed``, ``unplaced``, ``came`` and ``ended`` are the client's to call.

    Args:
        method: What is called, of one rank.
        peer: The rank.
        payload: The encoded call, one frame.
    """

    _body: bytes | None = None
    _attempts = 1
    _seq = -1

    def __init__(self, method: Method[..., T], peer: Any, payload: Buffers) -> None:
        self._method = method
        self._peer = peer
        self._payload = payload
        self._call = 0
        self.began_ns = time.monotonic_ns()

    def __getattr__(self, name: str) -> Placement:
        """Hand the call over when its placement is asked for; there is none before."""
        if name != "_placement":
            raise AttributeError(name)
        if self._seq < 0 and self._body is None:
            self._method.send_soon()
        return self._hand_over()

    @property
    def _merge(self) -> Callable[[Sequence[Any]], T]:  # type: ignore[override]  # it is the method's, the same for all
        return self._method.quick_merge

    # -- what the client tells, under its lock -------------------------------------------------------------------------

    def placed(self, seq: int) -> None:
        """It has its place in the lane."""
        self._seq = seq

    def unplaced(self) -> None:
        """Its worker was not ready when it was to leave: it waits for it, or is refused, as any other."""
        placement = self._hand_over()
        placement.wait_in_line(f"nothing was sent: {self._peer.name} is {self._peer.state.value}")

    def came(self, body: bytes, attempts: int) -> None:
        """It went well."""
        self._attempts = attempts
        self._body = body
        placement = self.__dict__.get("_placement")
        if placement is not None or PUT in body:
            self._hand_over()

    def ended(self, outcome: Outcome) -> None:
        """It did not, or its answer is no short one."""
        self._hand_over().deliver(0, 0, outcome)

    # -- asking --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Tell whether the rank's outcome is known."""
        return self._body is not None or ("_placement" in self.__dict__ and super().done())

    def result(self, timeout: float | None = None) -> T:
        """As ``BatchFuture.result``."""
        answer = self._answer
        if answer is not None:
            return answer[0]
        if self._body is None and "_placement" not in self.__dict__ and (timeout is None or timeout >= _SHORT_S):
            began = time.monotonic()
            self._method.wait(self._is_there, _SHORT_S)
            timeout = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        body = self._body
        if body is not None and "_placement" not in self.__dict__:
            value = decode_plain(body)
            if value is not NOT_PLAIN:
                merge = self._method.quick_merge
                answer = self.__dict__.setdefault("_answer", (value if merge is first else merge([value]),))
                return cast("T", answer[0])
        try:
            return super().result(timeout)
        finally:
            del self  # as there

    def look(self) -> None:
        """Have it watched as a call that takes long. Not under the client's lock."""
        if not self.done():
            self._placement  # noqa: B018  # asking is what hands it over

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        return self._body is not None or "_placement" in self.__dict__

    def _hand_over(self) -> Placement:
        with gate, _making:
            placement: Placement | None = self.__dict__.get("_placement")
            if placement is None:
                placement = self._method.placement_of(self._peer, self._payload, self._seq, self.began_ns)
                self._placement = placement
        body = self._body
        if body is not None:  # came before it, or just now: the second time it is told, nothing happens
            placement.deliver(0, 0, Outcome(OutcomeKind.OK, (body,), attempts=self._attempts))
        return placement
