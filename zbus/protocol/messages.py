"""The words the protocol speaks: message kinds, headers, outcomes, and what the pure machines ask for.

Pure: no sockets, clocks, threads or randomness. ``frames`` turns these into bytes and back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = [
    "PROTOCOL_VERSION",
    "Buffer",
    "Buffers",
    "Execute",
    "Finish",
    "Header",
    "Kind",
    "Outcome",
    "OutcomeKind",
    "SendTo",
    "Status",
]

PROTOCOL_VERSION: Final = 1

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]
"""Frames that follow a header: ``[body, buffer 0, …]``, each contiguous. Empty where a message has no body."""


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


class Status(enum.IntEnum):
    """The small number that qualifies a message (``Header.status``); meaning depends on the kind."""

    NONE = 0
    # FAILURE and END: how the call ended
    OK = 1
    APP_ERROR = 2
    CANCELLED = 3
    EXPIRED = 4
    PREDECESSOR = 5
    EVICTED = 6
    # PROGRESS: where the call is
    HELD = 10
    QUEUED = 11
    RUNNING = 12
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

    ``seq`` is the first of ``count`` consecutive calls. ``floor`` is the lowest seq whose outcome the caller has not
    taken: below it the callee forgets. ``budget_ms`` is the remaining time of the call (0: none stated).
    ``trace`` is the caller's span id (0: none).
    """

    kind: int
    session: bytes
    epoch: int
    incarnation: int
    lane: str
    seq: int = 0
    count: int = 1
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one outcome of a call.

    Attributes:
        kind: See ``OutcomeKind``.
        payload: Encoded result (OK) or encoded exception description (APP_ERROR); None otherwise.
        reason: Why, for the other kinds: ``deadline``, ``worker_exit``, ``lease``, ``predecessor``, ``fenced``,
            ``evicted``, ``cancelled``, ``shutdown``, ``protocol``, ``not_sent``.
        evidence: One plain sentence for a person, such as "began, no end".
        attempts: How many times the request was transmitted.
    """

    kind: OutcomeKind
    payload: Buffers | None = None
    reason: str = ""
    evidence: str = ""
    attempts: int = 1


# -- effects: what a pure machine asks its shell to do -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message. ``peer`` is the opaque routing key of the connection (None on a caller's own DEALER)."""

    header: Header
    buffers: Buffers = ()
    peer: bytes | None = None


@dataclass(frozen=True, slots=True)
class Execute:
    """Start one queued request now: calls ``seq .. seq+count-1`` in order. Sent once per request, ever.

    Attributes:
        session, lane, seq, count: Which calls.
        buffers: The request's body and buffers as received.
        deadline_ns: Callee's monotonic deadline, or None.
        trace: Caller's span id.
    """

    session: bytes
    lane: str
    seq: int
    count: int
    buffers: Buffers
    deadline_ns: int | None
    trace: int
    attempt: int
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Deliver an outcome to the user of the caller. Exactly one per call, ever."""

    lane: str
    seq: int
    outcome: Outcome
