"""Where the start and end of each call are marked: a ring of the crash journal, with fail-points around or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zbus import failpoints
from zbus.protocol.journal import LaneRing
from zbus.protocol.messages import Buffers, Execute

__all__ = ["Marks", "Rings"]


class Marks(Protocol):
    """The marks of one lane of one session."""

    def begin(self, seq: int) -> None:
        """Right before the method is called."""

    def end(self, seq: int) -> None:
        """Right after it returned."""

    def raised(self, seq: int) -> None:
        """Right after it raised."""

    def answered(self, seq: int, frames: Buffers) -> None:
        """Its reply is encoded."""


class _TrappedMarks:
    """Marks with a fail-point before and behind each; what one raises is the method's own error."""

    def __init__(self, ring: LaneRing, trap: Callable[[str], None]) -> None:
        self._ring = ring
        self._trap = trap
        self.raised = ring.raised
        self.answered = ring.answered

    def begin(self, seq: int) -> None:
        self._trap("before_exec")
        self._ring.begin(seq)
        self._inside("after_start", seq)

    def end(self, seq: int) -> None:
        self._inside("before_end", seq)
        self._ring.end(seq)
        self._trap("after_exec")

    def _inside(self, point: str, seq: int) -> None:
        try:
            self._trap(point)
        except BaseException:
            self._ring.raised(seq)
            raise


class Rings:
    """Gives each request its marks. Any thread.

    Args:
        kept: The crash journal's ring of a session's lane; None where there is no journal.
    """

    def __init__(self, kept: Callable[[bytes, str], LaneRing] | None) -> None:
        self.kept = kept
        self._unkept = LaneRing.unkept()

    def ring(self, request: Execute) -> LaneRing:
        """Return the ring of a request's lane, whatever fail-points there are."""
        return self._unkept if self.kept is None else self.kept(request.session, request.lane)

    def marks(self, request: Execute) -> Marks:
        """Return where a request's calls are marked; ``ctl`` has no journal and no fail-points."""
        if request.lane == "ctl":
            return self._unkept
        ring = self._unkept if self.kept is None else self.kept(request.session, request.lane)
        return ring if failpoints.active is None else _TrappedMarks(ring, failpoints.active)
