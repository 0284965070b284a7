"""What a callee keeps: sessions, lanes, each request from arrival to reply. State only; ``callee`` has the theory."""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, NamedTuple, Protocol

from zbus.protocol.messages import Buffers, Header, Status

__all__ = ["MS", "NEVER", "Kept", "Lane", "Left", "Orphan", "Replies", "Run", "RunState", "SessionState", "Shelf"]

MS: Final = 1_000_000
NEVER: Final = 1 << 62
"""A time that does not come, in nanoseconds."""


class RunState(enum.Enum):
    """Where a request is on the callee's side."""

    HELD = "held"
    QUEUED = "queued"
    POISED = "poised"
    RUNNING = "running"
    DONE = "done"


class Shelf(Protocol):
    """Where large replies go when memory is short: files, in a worker."""

    def put(self, buffers: Buffers) -> object | None:
        """Keep a reply and return a token for it; None if there is no room."""

    def get(self, token: object) -> Buffers | None:
        """Return what was kept; None if it cannot be read."""

    def drop(self, token: object) -> None:
        """Forget it."""


class Kept:
    """A large reply until its caller has it: in memory, on a shelf (``token``), or neither: not kept."""

    __slots__ = ("buffers", "nbytes", "token")

    def __init__(self, buffers: Buffers, nbytes: int) -> None:
        self.buffers: Buffers | None = buffers
        self.nbytes = nbytes
        self.token: object | None = None


Replies = tuple[tuple[Header, "Buffers | Kept"], ...] | list[tuple[Header, "Buffers | Kept"]]
"""The last words about a request's calls, as they are said again when asked; one of them may be of several calls."""


class Run:
    """One request as the callee knows it."""

    # Defaults stand in the class: most requests start, end with one reply, and need none of these.
    replies: Replies = ()
    large = False  # some reply is a ``Kept``
    chunks: deque[tuple[Header, Buffers]] | None = None  # sent, not yet acknowledged by the caller: oldest first
    acked = 0
    state = RunState.HELD
    strict = False  # a failed call makes its successors NOT_EXECUTED
    together = False

    def __init__(self, header: Header, buffers: Buffers, now: int) -> None:
        _, _, _, _, _, self.seq, calls, self.attempt, _, budget_ms, status, self.trace = header
        self.calls = calls
        self.buffers = buffers
        self.deadline_ns = now + budget_ms * MS if budget_ms else NEVER
        if status:
            self.strict = status in (Status.STRICT, Status.TOGETHER_STRICT)
            self.together = status in (Status.TOGETHER, Status.TOGETHER_STRICT)
        self.arrived_ns = now
        self.open_calls = calls


class Lane:
    """One lane of one session."""

    __slots__ = ("arrival_next", "concurrency", "floor", "joins", "name", "peer", "poised", "queue", "running", "runs")

    #: every seq below was admitted or skipped; contiguous
    arrival_next: int
    #: the caller's floor: runs wholly below it are forgotten once done
    floor: int
    #: all runs known, by first seq: HELD, QUEUED, RUNNING, DONE
    runs: dict[int, Run]
    #: QUEUED runs in seq order
    queue: deque[Run]
    #: number of RUNNING and POISED runs, at most ``concurrency``
    running: int
    #: the POISED run, if there is one; the queue waits behind it
    poised: Run | None
    #: the caller sends requests joined, so it takes their results joined, too
    joins: bool

    def __init__(self, name: str, concurrency: int, peer: bytes) -> None:
        self.name = name
        self.concurrency = concurrency
        self.peer = peer
        self.arrival_next = 0
        self.floor = 0
        self.runs = {}
        self.queue = deque()
        self.running = 0
        self.poised = None
        self.joins = False


class SessionState:
    """One caller's session."""

    __slots__ = ("epoch", "lanes", "retired", "superseded")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.lanes: dict[str, Lane] = {}
        self.retired = False  # superseded by a higher epoch, or said BYE: starts nothing any more
        self.superseded = False  # by a higher epoch: what it ran is kept for the successor


class Left(NamedTuple):
    """An orphan as it is kept: its caller's epoch, its calls, and the words about them."""

    epoch: int
    calls: int
    replies: Replies


class Orphan(NamedTuple):
    """What is left of a request whose controller was superseded: a successor may list and adopt it.

    Attributes:
        session, epoch: Whose it was.
        lane, seq: Which request.
        calls: Calls in it.
        replies: The words that would have gone to the caller, in call order; fewer than ``calls`` while it runs.
    """

    session: bytes
    epoch: int
    lane: str
    seq: int
    calls: int
    replies: tuple[tuple[Header, Buffers], ...]

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return len(self.replies) < self.calls
