"""A worker's large arrays apart from its messages: lent to whoever asked, opened where a request names some."""

from __future__ import annotations

from collections.abc import Callable

from zbus.codec import Keep
from zbus.data.courier import Courier
from zbus.protocol.messages import Buffers

__all__ = ["SessionArrays"]


class SessionArrays:
    """Knows sessions where ``Courier`` knows processes. Any thread may call.

    Args:
        courier: This process's.
        memory_of: Returns what the process of a session said of its memory.
    """

    def __init__(self, courier: Courier, memory_of: Callable[[bytes], str]) -> None:
        self._courier = courier
        self._memory_of = memory_of

    def opened(self, frames: Buffers, session: bytes) -> Buffers:
        """Return a request's frames with the arrays in their places.

        Raises:
            CodecError: What they name is not there.
        """
        return self._courier.opened(frames, self._memory_of(session))

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""
        return self._courier.keeper_for(self._memory_of(session))
