"""What a caller knows of one connection to a callee: from connecting to READY, doubt, and the end.

::

    CONNECTING --link up--> HANDSHAKING --WELCOME--> READY
         ^                      |  ^                   |
         +------ link down -----+  +----- link up -----+-- link down --> SUSPECT
    any state --observed exit, lease expiry, refusal--> DEAD (for good: a new incarnation gets a new machine)

A busy, GIL-holding or stopped callee keeps its connection as far as its kernel answers: it is at most SUSPECT, never
DEAD (P9). DEAD is said by whoever saw the exit or the lease run out, and by a refusal that cannot heal (a fenced
incarnation, another protocol version).

The transport tries again by itself after a lost connection, but not after bytes that are no protocol of its own
(another service on a reused port, a mangled frame): it then gives up without a word. So unless it says soon after a
loss that it tries again, this machine has the shell dial anew, later each time until a WELCOME comes.

Pure: the shell hands in the time and its randomness.
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


_REDIAL: Final = 200 * _MS
_REDIAL_MAX: Final = 5_000 * _MS
_REDIAL_DOUBLINGS: Final = 5


class LinkMachine:
    """State of one connection. ``hello_due`` tells when a HELLO must be sent (again), ``redial_due`` when to dial anew.

    Args:
        hello_every_ns: How often a HELLO without an answer is repeated.
        jitter: Between 0 and 1, another one for each link, so that many do not dial in step.

    Attributes:
        redials: How often the shell dialled anew since the last WELCOME.
    """

    __slots__ = (
        "_every", "_jitter", "_renewed", "evidence", "hello_due", "reason", "redial_due", "redials", "since_ns",
        "state", "up",
    )  # fmt: skip

    def __init__(self, now: int, *, hello_every_ns: int = 500 * _MS, jitter: float = 1.0) -> None:
        self._every = hello_every_ns
        self._jitter = jitter
        self.redial_due = _NEVER
        self.redials = 0
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
        self.redial_due = _NEVER
        if self.state is LinkState.CONNECTING:
            self._to(LinkState.HANDSHAKING, now)
        elif self.state is LinkState.READY:  # the last connection was lost unnoticed, with what was on its way
            self._renewed = True
        self.hello_due = now

    def link_down(self, now: int, why: str) -> None:
        """The connection is gone. The transport tries again, or else ``redial_due`` comes."""
        if self.state is LinkState.DEAD:
            return
        self.up = False
        self.hello_due = _NEVER
        self._redial_later(now)
        self.evidence = why
        self._to(LinkState.SUSPECT if self.state in (LinkState.READY, LinkState.SUSPECT) else LinkState.CONNECTING, now)

    def retrying(self) -> None:
        """The transport tries again by itself."""
        self.redial_due = _NEVER

    def redialled(self) -> None:
        """The shell has dialled anew."""
        self.redials += 1
        self.redial_due = _NEVER

    def redial_failed(self, now: int) -> None:
        """The shell could not dial: again later."""
        self.redials += 1
        self._redial_later(now)

    def _redial_later(self, now: int) -> None:
        pause = min(_REDIAL << min(self.redials, _REDIAL_DOUBLINGS), _REDIAL_MAX)
        self.redial_due = now + int(pause * (0.5 + 0.5 * self._jitter))

    def hello_sent(self, now: int) -> None:
        """A HELLO left; repeat it if no answer comes."""
        self.hello_due = now + self._every

    def welcomed(self, now: int) -> bool:
        """A WELCOME came. True if the lanes must resume: it made the link READY, or a new connection is behind it.

        One that comes while there is no connection is an old one's and means nothing.
        """
        if self.state is LinkState.DEAD or not self.up:
            return False
        self.hello_due = self.redial_due = _NEVER
        self.redials = 0
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
        self.hello_due = self.redial_due = _NEVER
        self._to(LinkState.DEAD, now)
        return True

    def _to(self, state: LinkState, now: int) -> None:
        if state is not self.state:
            self.state = state
            self.since_ns = now
