"""What one run is made of: drawn from its seed, each fault on or off and at its own rate (swarm testing).

A run in which every fault happens all the time explores little: most of its calls die the same way. So each run
switches faults on and off at random, and about one run in twelve has none at all (invariant I10 looks at those).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

__all__ = ["MS", "Knobs", "draw"]

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """One run's size and faults. Times in nanoseconds, rates between 0 and 1, counts per run.

    Attributes:
        workers: Worker names.
        requests: Placements that the program tries.
        span: Placements and faults happen in the first ``span``; afterwards the network is whole.
        delay: Shortest time of a message on its way.
        jitter: What is added to it at most.
        loss: Share of messages that vanish on a living connection (harsher than TCP).
        duplicate: Share of messages that come again, later, even after their connection is gone.
        ghost: Share of messages in flight that arrive although their connection broke.
        coalesce: Share of breaks that the caller notices only by the new connection.
        breaks: Broken connections.
        crashes: Workers killed at a random time.
        crash_effects: Workers killed after a random effect.
        partitions: Workers cut off, in one or both directions.
        leases: Of these, how many last until the lease runs out.
        pauses: Processes stopped for a while.
        takeovers: Controllers replaced by one with a higher epoch.
        zombie: Share of replaced controllers that go on talking instead of dying.
        farewell: Share of the others that say BYE instead of dying.
        guests: Guests (epoch 0) that make calls of their own and then say BYE.
        drains: Workers told to stop after what runs.
        cancel: Share of requests cancelled at a random time.
        deadline: Share of requests with a deadline that may pass.
        batch: Share of requests with several calls.
        strict: Share of batches that are strict.
        app_error: Share of calls that raise.
        refuses: Share of calls whose method cannot be started.
        stream: Share of requests that stream.
        group: Share of requests that go to more than one worker.
        lanes: Lanes in use.
        window_calls: The caller's window.
        window_bytes: Its window in bytes.
        callee_window: The callee's window.
        run: Longest ordinary run time of a call.
        slow: Share of calls that run ten times longer.
        same_address: A new incarnation answers at the address of the old one.
        wire: Messages pass through their bytes.
        journal: Workers keep a crash journal, which is read after their death.
        together: Share of requests to several workers that start together.
        crash_sends: Controllers that die between two of their messages.
        cooperative: Running calls end when they are cancelled.
        unreplaced: Share of leases that run out and no replacement starts; else one does.
        holds: Workers that start nothing for a while, because they may have been replaced.
        adaptive: Callers ask about silence by the round trips they measured, jittered.
        fills: Connections whose queue of outgoing messages is full for a while (HWM).
        pace: Longest time that some processes take for each message.
        wrong_clocks: Each process's clock goes at a rate between 0.5 and 2.
        clock_jumps: Clocks that jump forward.
        moves: Share of deaths with which the host is lost too: no crash journal can be read.
        crash_marks: Workers killed between a call's start or end and its mark in the crash journal.
        lies: Share of one worker's messages that are made up.
        keep_bytes: Bytes of large replies that a worker keeps in memory.
        joined: Share of requests placed as several of one call each that leave in one message.
        shelf_room: Share of further ones that its shelf has room for.
        garbled: Share of lost connections, and of handshakes by half, after which the transport does not try again.
        tracing: Workers trace through a sidecar; the rest is about that, see ``tracing``.
        trace_period: Flush period.
        trace_blocks: Blocks of a flush are fewer.
        trace_backlog: Bytes that a process holds in memory at most.
        trace_pace: Time between two steps of the sidecar.
        trace_ends: Share of flushes after which a process ends its trace in order.
        trace_loss: Share of messages that vanish.
        trace_duplicate: Share of messages that come twice.
        trace_reorder: Share of messages that come late, after those sent later.
        trace_crashes: Sidecars killed at a random time.
        trace_crash_effects: Sidecars killed at a random effect, or in the middle of a write.
        trace_kill_effects: Share of workers killed so by their tracing.
        trace_pauses: How often the sidecar is stopped for a while.
        trace_fills: How often the disk is full for a while.
        trace_same_address: A restarted sidecar answers at the address of the old one.
    """

    workers: int
    requests: int
    span: int
    delay: int
    jitter: int
    loss: float
    duplicate: float
    ghost: float
    coalesce: float
    breaks: int
    crashes: int
    crash_effects: int
    partitions: int
    leases: int
    pauses: int
    takeovers: int
    zombie: float
    farewell: float
    guests: int
    drains: int
    cancel: float
    deadline: float
    batch: float
    strict: float
    app_error: float
    stream: float
    group: float
    lanes: tuple[str, ...]
    window_calls: int
    window_bytes: int
    callee_window: int
    run: int
    slow: float
    same_address: bool
    wire: bool
    journal: bool
    together: float
    crash_sends: int
    cooperative: bool
    garbled: float
    unreplaced: float
    holds: int
    refuses: float = 0.0
    adaptive: bool = False
    fills: int = 0
    pace: int = 0
    wrong_clocks: bool = False
    clock_jumps: int = 0
    moves: float = 0.0
    crash_marks: int = 0
    lies: float = 0.0
    keep_bytes: int = 1 << 40
    shelf_room: float = 1.0
    joined: float = 0.0
    tracing: bool = False
    trace_period: int = 40 * MS
    trace_blocks: int = 4
    trace_backlog: int = 1 << 20
    trace_pace: int = MS // 2
    trace_ends: float = 0.0
    trace_loss: float = 0.0
    trace_duplicate: float = 0.0
    trace_reorder: float = 0.0
    trace_crashes: int = 0
    trace_crash_effects: int = 0
    trace_kill_effects: float = 0.0
    trace_pauses: int = 0
    trace_fills: int = 0
    trace_same_address: bool = False

    @property
    def faultless(self) -> bool:
        """Whether nothing disturbs the run, so that nothing may be sent twice."""
        return not (
            self.loss
            or self.duplicate
            or self.breaks
            or self.crashes
            or self.crash_effects
            or self.partitions
            or self.pauses
            or self.takeovers
            or self.crash_sends
            or self.drains
            or self.garbled
            or self.holds
            or self.trace_kill_effects
            or self.fills
            or self.pace
            or self.wrong_clocks
            or self.clock_jumps
            or self.crash_marks
            or self.lies
            or self.callee_window < self.window_calls
        )


_LANES: Final = (("main",), ("main",), ("main", "side"), ("main", "ctl"), ("main", "side", "ctl"))


_REQUESTS: Final = {"small": 3, "large": 40, "trace": 1}


def draw(
    rng: Random,
    later: Random,
    latest: Random,
    newest: Random,
    size: str = "small",
    *,
    tracing: dict[str, Any] | None = None,
    rough: dict[str, Any] | None = None,
    joined: float = 0.0,
) -> Knobs:
    """Draw the knobs of one run.

    Args:
        rng: The run's generator.
        later: Another one, for what was added later: so the runs of old seeds stay what they were where it is off.
        latest: As ``later``, for what was added after that.
        newest: As ``latest``, for what was added after that.
        size: ``small`` (a few calls, for millions of schedules), ``large`` (deep histories), or ``trace`` (as small,
            with one call: for the traces).
        tracing: What ``trace_knobs`` draws.
        joined: As the knob.
        rough: What ``rough`` draws; not used in a calm run.
    """
    r = rng.random
    large = size == "large"
    scale = 4 if large else 1
    calm = r() < 0.08
    on = 0.0 if calm else 0.35

    def rate(top: float, share: float = 1.0) -> float:
        return r() * top if r() < on * share else 0.0

    def count(top: int, share: float = 1.0) -> int:
        return 1 + int(r() * top * scale) if r() < on * share else 0

    partitions = count(2, 0.6)
    more, even_more, unready = later.random, latest.random, newest.random
    window = (2, 4, 8, 64)[int(r() * 4)]
    return Knobs(
        workers=1 + int(r() * (4 if large else 2.5)),
        requests=1 + int(r() * _REQUESTS[size]),
        span=int((60 + r() * 300) * MS) * (3 if large else 1),
        delay=int((0.05 + r() * 4) * MS),
        jitter=int(r() * r() * 40 * MS),
        loss=rate(0.4),
        duplicate=rate(0.5),
        ghost=r(),
        coalesce=rate(0.7),
        breaks=count(3),
        crashes=count(1, 0.8),
        crash_effects=count(1, 0.5),
        partitions=partitions,
        leases=int(r() * (partitions + 1)),
        pauses=count(2, 0.6),
        takeovers=count(1, 0.5),
        zombie=r(),
        farewell=r(),
        guests=int(r() < 0.25),
        drains=count(1, 0.25),
        cancel=rate(0.6, 2.0) if not calm else r() * 0.2,
        deadline=rate(0.8, 2.0) if not calm else 0.0,
        batch=r() * 0.7,
        strict=r(),
        app_error=r() * 0.4,
        stream=r() * 0.5 if r() < 0.3 else 0.0,
        group=r(),
        lanes=_LANES[int(r() * len(_LANES))],
        window_calls=window,
        window_bytes=(40, 400, 1 << 30)[int(r() * 3)],
        callee_window=window if r() < 0.85 or calm else max(1, window // 2),
        run=int(r() * r() * 120 * MS),
        slow=rate(0.3),
        same_address=r() < 0.5,
        wire=r() < 0.1,
        journal=r() < 0.5,
        together=more() if more() < 0.25 else 0.0,
        crash_sends=int(not calm and more() < 0.05),
        cooperative=more() < 0.12,
        garbled=even_more() if not calm and even_more() < 0.12 else 0.0,
        unreplaced=even_more() if even_more() < 0.4 else 0.0,
        holds=1 + int(even_more() * 2) if not calm and even_more() < 0.12 else 0,
        refuses=unready() * 0.5 if unready() < 0.12 else 0.0,
        joined=joined,
        **(tracing or {}),
        **({} if calm else rough or {}),
    )
