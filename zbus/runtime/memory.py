"""A worker's large arrays apart from its messages: given to whoever asked, opened where a request names some."""

from __future__ import annotations

from collections.abc import Callable

from zbus.codec import Keep
from zbus.data.porter import Opening, Porter
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

    def opened(
        self, frames: Buffers, session: bytes, deadline_s: float | None, begun: Callable[[Opening], None]
    ) -> Buffers:
        """Return a request's frames with the arrays in their places; waits for those that are pulled.

        Args:
            frames: As received.
            session: Of the caller.
            deadline_s: Seconds from now in which all must be there; None: as long as they come.
            begun: Given what ends the wait early, if there is one.

        Raises:
            CodecError: What they name is not there, or did not come in time.
        """
        return self._porter.opened(frames, self._reach_of(session), deadline_s, begun)

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""
        return self._porter.keeper_for(self._reach_of(session))
