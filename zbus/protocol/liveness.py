"""What a caller knows of one connection to a callee: from connecting to READY, doubt, and the end.

::

    CONNECTING --link up--> HANDSHAKING --WELCOME--> READY
         ^                      |  ^                   |
         +------ link down -----+  +----- link up -----+-- link down --> SUSPECT
    any state --observed exit, lease expiry, refusal--> DEAD (for good: a new incarnation gets a new machine)

A busy, GIL-holding or stopped callee keeps its connection as far as its kernel answers: it is at most SUSPECT, never
DEAD (P9). DEAD is said by whoever saw the exit or the lease run out, and by a refusal that cannot heal (a fenced
incarnation, another protocol version).

Pure: the shell hands in the time.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["LinkMachine", "LinkState"]

_NEVER: Final = 1 << 62
_MS: Final = 1_000_000


class LinkState(enum.Enum):
    """State of a connection."""

    CONNECTING = "connecting"
    HANDSHAKING = "handshaking"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


class LinkMachine:
    """State of one connection. ``hello_due`` tells when a HELLO must be sent (again).

    Args:
        hello_every_ns: How often a HELLO without an answer is repeated.
    """

    __slots__ = ("_every", "_renewed", "evidence", "hello_due", "reason", "since_ns", "state", "up")

    def __init__(self, now: int, *, hello_every_ns: int = 500 * _MS) -> None:
        self._every = hello_every_ns
        self.state = LinkState.CONNECTING
        self.since_ns = now
        self.up = False
        self.hello_due = _NEVER
        self._renewed = False
        self.reason = ""
        self.evidence = "not connected yet"

    def link_up(self, now: int) -> None:
        """The transport handshake succeeded: say HELLO now."""
        if self.state is LinkState.DEAD:
            return
        self.up = True
        if self.state is LinkState.CONNECTING:
            self._to(LinkState.HANDSHAKING, now)
        elif self.state is LinkState.READY:  # the last connection was lost unnoticed, with what was on its way
            self._renewed = True
        self.hello_due = now

    def link_down(self, now: int, why: str) -> None:
        """The connection is gone; libzmq tries again by itself."""
        if self.state is LinkState.DEAD:
            return
        self.up = False
        self.hello_due = _NEVER
        self.evidence = why
        self._to(LinkState.SUSPECT if self.state in (LinkState.READY, LinkState.SUSPECT) else LinkState.CONNECTING, now)

    def hello_sent(self, now: int) -> None:
        """A HELLO left; repeat it if no answer comes."""
        self.hello_due = now + self._every

    def welcomed(self, now: int) -> bool:
        """A WELCOME came. True if the lanes must resume: it made the link READY, or a new connection is behind it."""
        if self.state is LinkState.DEAD:
            return False
        self.up = True
        self.hello_due = _NEVER
        self.evidence = ""
        renewed, self._renewed = self._renewed, False
        if self.state is LinkState.READY:
            return renewed
        self._to(LinkState.READY, now)
        return True

    def session_lost(self, now: int) -> None:
        """The callee does not know our session (any more): say HELLO again."""
        if self.state is not LinkState.DEAD:
            self.hello_due = now

    def dead(self, now: int, reason: str, evidence: str) -> bool:
        """The end. True if it is news."""
        if self.state is LinkState.DEAD:
            return False
        self.reason, self.evidence = reason, evidence
        self.hello_due = _NEVER
        self._to(LinkState.DEAD, now)
        return True

    def _to(self, state: LinkState, now: int) -> None:
        if state is not self.state:
            self.state = state
            self.since_ns = now
