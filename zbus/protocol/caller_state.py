"""One request as its caller knows it, and when its silence is asked about. State only: ``caller`` has the theory."""

from __future__ import annotations

import enum
from typing import Final

from zbus.protocol.messages import Buffers

__all__ = ["HOLDS", "MS", "NEVER", "RELEASED", "Request", "RequestState", "Timing"]

NEVER: Final = 1 << 62
"""A time that does not come, in nanoseconds."""
MS: Final = 1_000_000


class Timing:
    """When silence is asked about. All in nanoseconds.

    Attributes:
        probe_first: Silence after a transmission before the first PROBE, while no round trip has been measured.
        probe_least: The same at least, once some have been: four deviations beyond a round trip; None: ``probe_first``.
        probe_received: Silence after the callee said it has the request (it may run for hours).
        probe_max: Ceiling of the exponential back-off.
        cancel_grace: How long an expired call waits for the callee's word on whether it started.
        stop_grace: How long, of that, it waits for a running method that was told to stop.
        jitter: Share by which a pause is stretched or shrunk at random, so that lanes do not ask all at once.
    """

    __slots__ = ("cancel_grace", "jitter", "probe_first", "probe_least", "probe_max", "probe_received", "stop_grace")

    def __init__(
        self,
        *,
        probe_first: int = 1_000 * MS,
        probe_received: int = 5_000 * MS,
        probe_max: int = 30_000 * MS,
        cancel_grace: int = 1_000 * MS,
        stop_grace: int = 200 * MS,
        probe_least: int | None = 200 * MS,
        jitter: float = 0.25,
    ) -> None:
        self.probe_first = probe_first
        self.probe_received = probe_received
        self.probe_max = probe_max
        self.cancel_grace = cancel_grace
        self.stop_grace = stop_grace
        self.probe_least = probe_least
        self.jitter = jitter


class RequestState(enum.Enum):
    """Where a request is, as far as the caller knows."""

    WAITING = "waiting for credit or connection"
    SENT = "sent, not confirmed"
    RECEIVED = "arrived"
    DONE = "done"


_WAITING: Final = RequestState.WAITING


class Request:
    """One message's worth of calls, and what is known of it."""

    # Defaults stand in the class: most requests are answered before any of these is set.
    skip = False  # nobody wants it any more: whenever it goes out (again), it goes out as SKIP
    cancelled = False  # the user (not the deadline) asked
    give_up_ns = NEVER  # end of the grace after an expired deadline
    remote = 0  # last Status word of the callee about it: HELD, QUEUED, RUNNING
    remote_since_ns = 0
    finished: set[int] | None = None  # seqs that have their Finish, for calls > 1
    replied = 0  # calls whose final word from the callee has come
    expected_chunk = 0
    acked = 0  # items of a stream that the user has taken
    gap_until_ns = 0  # a reported gap has been answered; further reports of it are ignored until then
    state = _WAITING
    attempts = 0
    probe_ns = NEVER
    probe_gap = 0
    asked_ns = 0  # when the one PROBE that has no answer yet was sent; 0: there is none; -1: more than one
    told = False  # the callee said that it runs, after it was asked to stop it
    together = 0  # 0: starts when it arrives; else see HOLDS and RELEASED
    group = -1  # first seq of those it left with, in one message

    def __init__(  # private, hot path
        self, seq: int, calls: int, buffers: Buffers, nbytes: int, deadline_ns: int, trace: int, strict: bool  # noqa: FBT001
    ) -> None:  # fmt: skip
        self.seq = seq
        self.calls = calls
        self.buffers = buffers
        self.nbytes = nbytes
        self.deadline_ns = deadline_ns
        self.trace = trace
        self.strict = strict
        self.open_calls = calls  # calls without a Finish


HOLDS: Final = 1
"""``Request.together``: the callee may not start it."""

RELEASED: Final = 2
"""``Request.together``: GO was said."""
