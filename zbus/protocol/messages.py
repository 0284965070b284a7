"""The words the protocol speaks: message kinds, headers, outcomes, and what the pure machines ask for.

Pure: no sockets, clocks, threads or randomness. ``frames`` turns these into bytes and back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = [
    "PROTOCOL_VERSION",
    "Buffer",
    "Buffers",
    "CancelRunning",
    "Chunk",
    "Effect",
    "Execute",
    "Finish",
    "Header",
    "Kind",
    "Outcome",
    "OutcomeKind",
    "Poised",
    "Results",
    "SendTo",
    "Status",
    "StreamCredit",
    "nbytes_of",
]

PROTOCOL_VERSION: Final = 1

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]
"""Frames that follow a header: ``[body, buffer 0, …]``, each contiguous. Empty where a message has no body."""


def nbytes_of(frame: Buffer) -> int:
    """Return the bytes of a frame, or of what stands elsewhere if the frame only names it."""
    return len(frame) if type(frame) is bytes or type(frame) is bytearray else frame.nbytes  # type: ignore[union-attr]  # the name of an array is bytes that know the array's size


class Kind(enum.IntEnum):
    """Message kinds; numbers are wire format."""

    HELLO = 1
    WELCOME = 2
    REQ = 3
    SKIP = 4
    RESULT = 5
    FAILURE = 6
    CHUNK = 7
    END = 8
    PROGRESS = 9
    PROBE = 10
    CANCEL = 11
    NACK = 12
    ACK = 13
    PING = 14
    PONG = 15
    BYE = 16
    GO = 17


class Status(enum.IntEnum):
    """The small number that qualifies a message (``Header.status``); meaning depends on the kind."""

    NONE = 0
    # REQ: a failed call makes its successors in the same request NOT_EXECUTED
    STRICT = 1
    # REQ: it is not started before its GO; a bit, so that it goes with STRICT
    TOGETHER = 32
    TOGETHER_STRICT = 33
    # REQ: each of its calls is a request of its own; they only travel together
    JOINED = 64
    # FAILURE and END: how the call ended
    OK = 2
    APP_ERROR = 3
    CANCELLED = 4
    EXPIRED = 5
    PREDECESSOR = 6
    EVICTED = 7
    SHUTDOWN = 8
    STOPPED = 9
    # FAILURE and END: it ran to its end, and its reply was not kept for lack of room
    NOT_KEPT = 14
    # FAILURE: its method could not be started; the body describes the error that kept it from that
    NOT_STARTED = 15
    # PROGRESS: where the call is
    HELD = 10
    QUEUED = 11
    RUNNING = 12
    POISED = 13
    # NACK: why a message was refused
    GAP = 20
    WINDOW = 21
    FENCED_EPOCH = 22
    FENCED_INCARNATION = 23
    VERSION = 24
    UNKNOWN_LANE = 25
    MISMATCH = 26
    NO_SESSION = 27
    DRAINING = 28


class Header(NamedTuple):
    """One message header; see ``frames`` for the byte layout.

    ``seq`` is the first of ``calls`` consecutive calls. ``floor`` is the lowest seq whose outcome the caller has not
    taken: below it the callee forgets. ``budget_ms`` is the remaining time of the call (0: none stated).
    ``trace`` is the caller's span id (0: none).
    """

    kind: int
    session: bytes
    epoch: int
    incarnation: int
    lane: str
    seq: int = 0
    calls: int = 1
    attempt: int = 1
    floor: int = 0
    budget_ms: int = 0
    status: int = 0
    trace: int = 0


class OutcomeKind(enum.Enum):
    """What is known of a call once it has ended."""

    OK = "OK"
    APP_ERROR = "APP_ERROR"
    CANCELLED = "CANCELLED"
    NOT_EXECUTED = "NOT_EXECUTED"
    UNKNOWN = "UNKNOWN"


class Outcome(NamedTuple):
    """The one outcome of a call.

    Attributes:
        kind: See ``OutcomeKind``.
        payload: Encoded result (OK) or encoded exception description (APP_ERROR; ``refused``); None otherwise.
        reason: Why, for the other kinds (and for an APP_ERROR that ``cancelled`` or ``deadline`` brought about at a
            checkpoint): ``deadline``, ``worker_exit``, ``lease``, ``predecessor``, ``fenced``,
            ``evicted``, ``cancelled``, ``shutdown``, ``protocol``, ``not_sent``, ``gang`` (another rank of a call
            that starts together was lost before the start), ``refused`` (the worker could not start it).
        evidence: One plain sentence for a person, such as "began, no end".
        attempts: How many times the request was transmitted.
    """

    kind: OutcomeKind
    payload: Buffers | None = None
    reason: str = ""
    evidence: str = ""
    attempts: int = 1

    @property
    def is_error(self) -> bool:
        """Whether the payload describes an exception: the method's, or one that kept it from starting."""
        return self.kind is OutcomeKind.APP_ERROR or self.reason == "refused"


# -- effects: what a pure machine asks its shell to do. NamedTuples: immutable, and three times cheaper to make than a
# frozen dataclass, on a path where a whole call has some 40 us -------------------------------------------------------


class SendTo(NamedTuple):
    """Send a message. ``peer`` is the opaque routing key of the connection (None on a caller's own DEALER)."""

    header: Header
    buffers: Buffers = ()
    peer: bytes | None = None


class Execute(NamedTuple):
    """Start one queued request now: calls ``seq .. seq+calls-1`` in order. Emitted once per request, ever.

    Attributes:
        session, lane, seq, calls: Which calls.
        buffers: The request's body and buffers as received.
        deadline_ns: Callee's monotonic deadline, or None.
        trace: Caller's span id.
        strict: True if a failed call makes its successors in this request NOT_EXECUTED.
        attempt: Transmission number of the request that was admitted.
        arrived_ns: When it was admitted (callee's monotonic clock).
        epoch: Epoch of the caller; 0 for a guest.
    """

    session: bytes
    lane: str
    seq: int
    calls: int
    buffers: Buffers
    deadline_ns: int | None
    trace: int
    strict: bool
    attempt: int
    arrived_ns: int
    epoch: int = 1


class CancelRunning(NamedTuple):
    """The caller no longer wants a request that has started: set its cooperative cancel flag."""

    session: bytes
    lane: str
    seq: int


class StreamCredit(NamedTuple):
    """The caller took chunks below ``acked``; the stream may run ``window`` chunks beyond it."""

    session: bytes
    lane: str
    seq: int
    acked: int


class Finish(NamedTuple):
    """Deliver an outcome to the user of the caller. Exactly one per call, ever (or its part of a ``Results``)."""

    lane: str
    seq: int
    outcome: Outcome


class Results(NamedTuple):
    """Deliver OK to consecutive calls of one request: what a ``Finish`` for each would say.

    Attributes:
        lane, seq: The first of them.
        bodies: Encoded result of each, one frame without buffers.
        attempts: How many times their request was transmitted.
    """

    lane: str
    seq: int
    bodies: Sequence[bytes]
    attempts: int


class Poised(NamedTuple):
    """The callee holds a request that starts together, its turn has come, and it waits for GO. May be said again."""

    lane: str
    seq: int


class Chunk(NamedTuple):
    """Deliver one item of a stream, in order, each number once."""

    lane: str
    seq: int
    number: int
    buffers: Buffers


Effect = SendTo | Execute | CancelRunning | StreamCredit | Finish | Results | Chunk | Poised
