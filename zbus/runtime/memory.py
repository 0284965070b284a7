"""A worker's large arrays apart from its messages: given to whoever asked, opened where a request names some."""

from __future__ import annotations

from collections.abc import Callable

from zbus.codec import Keep
from zbus.data.porter import Porter
from zbus.protocol.messages import Buffers
from zbus.transport.carrier import Reach

__all__ = ["SessionArrays"]


class SessionArrays:
    """Knows sessions where ``Porter`` knows processes. Any thread may call.

    Args:
        porter: This process's.
        reach_of: Returns what the process of a session said of where its arrays are.
    """

    def __init__(self, porter: Porter, reach_of: Callable[[bytes], Reach]) -> None:
        self._porter = porter
        self._reach_of = reach_of

    def must_pull(self, frames: Buffers) -> bool:
        """Tell whether ``opened`` would have to wait for data."""
        return self._porter.must_pull(frames)

    def opened(self, frames: Buffers, session: bytes, deadline_s: float | None = None) -> Buffers:
        """Return a request's frames with the arrays in their places; waits for those that are pulled.

        Raises:
            CodecError: What they name is not there, or did not come in time.
        """
        return self._porter.opened(frames, self._reach_of(session), deadline_s)

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""
        return self._porter.keeper_for(self._reach_of(session))
