"""What is to be placed: one call or batch, on whom, how, and what may be done when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.line import Line
from controller.placer import Placer, Roster
from zbus.engine import Effect
from zbus.protocol.messages import Buffers
from zbus.retry import RetryPolicy, TokenBucket

if TYPE_CHECKING:
    from controller.refs import Claim, Pins, RefBook

__all__ = ["Order"]


@dataclass
class Order:
    """What is to be placed.

    Attributes:
        placer: Carries it.
        roster: The role that is called.
        ranks: Rank of each member.
        lane: Which ordered stream.
        payloads: Encoded calls for each member; the same object may stand several times.
        methods: Endpoint name of each call.
        deadline_s: Seconds from the start, or None.
        strict: A failed call stops the later ones.
        together: It begins on no member until all hold it.
        retry: How often a call may run again; only ever applied to single calls, on each member by itself.
        effect: See ``zbus.engine.Effect``.
        streams: The one call's items come one by one.
        collects: All of them are wanted, as one list: nobody takes them one by one.
        choose: Picks a rank anew for a call that any rank may run.
        bucket: Limits second executions of the whole group.
        released: Told the rank of a member when its last call has ended.
        number: Number of the batch among those of its group, from 1.
        submitted_ns: When the caller asked (monotonic), for the trace.
        encoded_ns: When its payloads were ready.
        line: Where calls of the role wait for ranks that are not ready.
        claims: For each call whose results stay with the ranks, what holds them; empty where none does.
        refs: What handles in the answers are tied to.
        pins: Keep the values of the handles among the arguments, until all calls have ended.
    """

    placer: Placer
    roster: Roster
    ranks: list[int]
    lane: str
    payloads: Sequence[Buffers]
    methods: Sequence[str]
    deadline_s: float | None
    strict: bool = False
    together: bool = False
    retry: RetryPolicy | None = None
    effect: Effect = "once"
    streams: bool = False
    collects: bool = False
    choose: Callable[[], int] | None = None
    bucket: TokenBucket | None = None
    released: Callable[[int], None] | None = None
    number: int | None = None
    submitted_ns: int = 0
    encoded_ns: int = 0
    trace: int = 0
    line: Line = field(default_factory=Line)
    claims: Sequence[Claim | None] = ()
    refs: RefBook | None = None
    pins: Pins | None = None
    peers: list[Any] = field(default_factory=list)
