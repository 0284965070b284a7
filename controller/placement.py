"""One placed batch: its slots, its second executions, who waits for it. The futures of its calls read it."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from controller.background import shared
from controller.order import Order
from controller.outcomes import AT, Origin, error_of, unavailable
from controller.placer import (
    Placed,
    is_crowded,
    is_dead,
    is_ready,
    is_suspect,
    loop_driver,
    send_soon,
    wake,
    whereabouts,
)
from zbus.errors import CallError, Unavailable
from zbus.protocol.batch import BatchSlots
from zbus.protocol.messages import Buffers, Outcome, OutcomeKind, nbytes_of
from zbus.trace.tracer import Tracer, get_tracer

__all__ = ["PUT", "Placement"]

_PATIENCE_S: Final = 30.0
"""How long a call that may wait waits for a member to become ready."""

_VERDICT_S: Final = 3.0
"""How long a call waits to learn whether a worker whose connection was lost is dead or comes back."""

_ECHO_S: Final = 0.3
"""How long the other ranks of a call have to answer after a worker was lost, before the caller hears of it."""

_SETTLE_S: Final = 0.5
"""The same after a rank's engine raised."""
_CREDIT_STEP: Final = 8
_CREDIT_BYTES: Final = 1 << 20
"""Credit of a stream is given each so many items, or each so many bytes."""
_OK: Final = OutcomeKind.OK
PUT: Final = b"ctx.put"
"""Stands in each answer with a handle that ``ctx.put`` made."""

_PUTS: Final = re.compile(re.escape(PUT))
_GONE: Final = ("worker_exit", "lease", "fenced", "disconnected")
_LOST: Final = (OutcomeKind.UNKNOWN, OutcomeKind.NOT_EXECUTED)
"""With such a reason: the worker is lost, whether or not its part is proved not to have begun."""


class Placement:
    """A batch on its way. Methods may be called from any thread; ``deliver`` runs under the placer's lock."""

    # Defaults stand in the class: most calls are answered before any of these is set.
    cancelled = False
    refused: Unavailable | None = None  # why nothing was sent to anyone, after waiting
    _placed: Placed = None
    _executions = 1
    _attempts = 0  # transmissions in the executions before
    _last: Outcome | None = None  # what the execution before a pause ended with
    _pausing = False  # not placed, and to be placed later
    _not_before = 0.0  # when the pause before the next execution ends
    _may_have_run: Outcome | None = None  # the UNKNOWN end of an earlier execution
    _consumed = 0
    _consumed_bytes = 0
    _streaming = False  # an item has come
    _items = 0  # so many have come
    _queued = False  # it waited for room before it was placed
    _lost_at: float | None = None
    _tracer: Tracer | None = None
    _batch = 0
    _sent_ns = 0
    _last_ns = 0
    _taken_ns = 0
    _decoded_ns = 0
    _puts: tuple[Any, ...] = ()  # keep what engines put of which its answers tell, read or not

    def __init__(self, order: Order) -> None:
        self.order = order
        self.slots = BatchSlots(len(order.ranks), len(order.methods))
        self.chunks: deque[Buffers] = deque()
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []
        self._began = time.monotonic()
        self._parts: dict[int, Placement] = {}  # members of several whose call runs once more, each by itself
        self.again: set[int] = set()  # ranks of several whose call was to run once more
        self._failed_at: dict[int, float] = {}
        tracer = get_tracer()
        if tracer.rpc:
            self._tracer = tracer
            self._batch = tracer.next_batch()
        self._untraced: list[tuple[int, int, Outcome, int, int]] = []  # what came before ``place`` returned
        self._late = getattr(order.roster, "late", None)  # who watches calls that take too long

    def start(self) -> None:
        """Place the batch; waits while the window of a member is full, until the deadline of the call at most.

        Raises:
            Unavailable: A member is not ready and nothing says that waiting helps; nothing was sent.
        """
        send_soon(self.order.placer)
        if self._crowded():
            self._queued = True
            if not self.order.placer.wait(self._has_room, self.order.deadline_s):
                self._give_up_queue()
                return
        self._start()

    async def start_async(self) -> None:
        """As ``start``, waiting on the running loop."""
        send_soon(self.order.placer)
        if self._crowded():
            self._queued = True
            placer: Any = self.order.placer
            try:
                async with asyncio.timeout(self.order.deadline_s):
                    await self._wait_for(self._has_room, placer.watch_room, placer.unwatch_room)
            except TimeoutError:
                self._give_up_queue()
                return
        self._start()

    def _crowded(self) -> bool:
        order = self.order
        everyone = order.roster.peers()
        return is_crowded(order.placer, [everyone[rank] for rank in order.ranks], order.lane)

    def _has_room(self) -> bool:
        return self.cancelled or not self._crowded()

    def _give_up_queue(self) -> None:
        order = self.order
        order.peers = [order.roster.peers()[rank] for rank in order.ranks]
        words = "expired before it was sent: earlier calls fill the window"
        self._settle_all(Outcome(OutcomeKind.NOT_EXECUTED, None, "deadline", words, 0))

    def _start(self) -> None:
        line = self.order.line
        if line and line.blocks(self):
            self.wait_in_line("waits behind earlier calls")
            return
        try:
            self._place()
        except Unavailable as error:
            if not self._may_wait():
                raise self._refusal(error) from None
            self.wait_in_line(str(error))

    def wait_in_line(self, why: str) -> None:
        """Be placed later, when the ranks are ready, or refused: in ``why``, what keeps it from being placed now."""
        self._last = Outcome(OutcomeKind.NOT_EXECUTED, reason="not_ready", evidence=why, attempts=0)
        self._pausing = True
        self.order.line.join(self)

    def _refusal(self, error: Unavailable) -> Unavailable:
        """Say of a refused call who died, if that is why."""
        order = self.order
        dead = [member for member, peer in enumerate(order.peers) if is_dead(peer)]
        if not dead:
            return error
        names = ", ".join(str(order.peers[member].name) for member in dead)
        return unavailable(error, self._origin(dead[0], 0), names)

    def _place(self) -> None:
        order = self.order
        self._placed = None
        everyone = order.roster.peers()
        order.peers = [everyone[rank] for rank in order.ranks]
        if self._tracer is not None:  # before: a request may have arrived by the time that ``place`` returns
            self._sent_ns = time.monotonic_ns()
        for claim in order.claims:
            if claim is not None:
                claim.placed_on(order.ranks, order.peers)
        self._placed = order.placer.place(
            order.peers,
            order.lane,
            order.payloads,
            len(order.methods),
            deadline_s=self._remaining_s(),
            sink=self.deliver,
            results_sink=self.deliver_together if self._tracer is None else None,
            chunk_sink=self._take_chunk if order.streams else None,
            trace=order.trace,
            strict=order.strict,
            together=order.together,
        )
        if self.order.collects and self._items:  # they came before ``place`` returned
            self._take_all()
        if self._late is not None:
            self._late.began(self)
            if self.slots.settled():  # before it was told that it began
                self._late.ended(self)
        if self._tracer is not None:
            with self._lock:
                early, self._untraced = self._untraced, []
            for one in early:
                self._record(*one)

    def _remaining_s(self) -> float | None:
        deadline_s = self.order.deadline_s
        if deadline_s is None or (self._executions == 1 and self._last is None and not self._queued):
            return deadline_s
        return max(0.001, deadline_s - (time.monotonic() - self._began))

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def adopt(self, peers: list[Any], placed: Placed, began_s: float) -> None:
        """Take over a batch that was placed already, in place of ``start``.

        Args:
            peers: Who was called.
            placed: What the placer returned.
            began_s: When (monotonic seconds).
        """
        self.order.peers = peers
        self._placed = placed
        self._began = began_s
        if self._late is not None:
            self._late.began(self)

    def deliver(self, member: int, call: int, outcome: Outcome) -> None:
        """Take the outcome of one slot: what the placer is given as its sink."""
        if self._tracer is not None:
            self._last_ns = now_ns = time.monotonic_ns()
            if self._placed is None:
                self._untraced.append((member, call, outcome, now_ns, self._answered(outcome)))
            else:
                self._record(member, call, outcome, now_ns, self._answered(outcome))
        if outcome.kind is not _OK:
            if self.order.retry is not None and self._run_again(member, outcome):
                return
            outcome = self._whole(outcome)
        self._settle(member, call, outcome)

    def deliver_together(self, member: int, call: int, bodies: Sequence[bytes], attempts: int) -> None:
        """Take the results of consecutive calls, OK each: what the placer is given as its sink of several."""
        with self._lock:
            taken = self.slots.fill_together(member, call, bodies, attempts)
            watchers = tuple(self._watchers) if self._watchers else ()
        if not taken:  # some have their outcome: each for itself
            for one, body in enumerate(bodies, call):
                self._settle(member, one, Outcome(_OK, (body,), attempts=attempts))
            return
        if PUT in b"".join(bodies):
            for body in bodies:
                self._hold_puts((body,))
        if self._late is not None and self.slots.settled():
            self._late.ended(self)
        if self.order.pins is not None and self.slots.settled():
            self.order.pins.close()
        released = self.order.released
        if released is not None and call + len(bodies) == len(self.order.methods):
            released(self.order.ranks[member])
        for watcher in watchers:
            watcher()

    def _whole(self, outcome: Outcome) -> Outcome:
        """Return what is to be said of all executions when the last one ended so: one that may have run still may."""
        if self._attempts:
            outcome = outcome._replace(attempts=outcome.attempts + self._attempts)
        earlier = self._may_have_run
        if earlier is None or outcome.kind not in (OutcomeKind.NOT_EXECUTED, OutcomeKind.CANCELLED):
            return outcome
        why = outcome.evidence or outcome.reason
        return earlier._replace(evidence=f"{earlier.evidence}; then not run again: {why}", attempts=outcome.attempts)

    def _settle(self, member: int, call: int, outcome: Outcome) -> None:
        with self._lock:
            if not self.slots.fill(member, call, outcome):
                return
            if outcome.kind is _OK:
                self._hold_puts(outcome.payload)
            elif outcome.kind in _LOST and outcome.reason in _GONE:
                self._lost_at = self._lost_at or time.monotonic()
            elif outcome.is_error:
                self._failed_at.setdefault(call, time.monotonic())
            watchers = tuple(self._watchers) if self._watchers else ()
            parts = list(self._parts.values()) if outcome.kind is not _OK else ()
        for part in parts:  # what failed here may be the echo of what they ended with
            part.give_up_pause("the call failed on another rank")
        if self._late is not None:
            if outcome.reason == "deadline":
                self._late.ask(self.order.peers[member])
            if self.slots.settled():
                self._late.ended(self)
        if self.order.pins is not None and self.slots.settled():
            self.order.pins.close()
        released = self.order.released
        if released is not None and call == len(self.order.methods) - 1:
            released(self.order.ranks[member])
        for watcher in watchers:
            watcher()

    def _hold_puts(self, payload: Buffers | None) -> None:
        """Keep what engines put for as long as this answer can be read: if nobody does, it is let go with it."""
        if not payload or self.order.refs is None:
            return
        body = payload[0]
        if PUT in body if type(body) is bytes else _PUTS.search(body):
            shared().call(partial(self._hold_puts_of, payload))

    def _hold_puts_of(self, payload: Buffers) -> None:
        refs = self.order.refs
        if refs is not None:
            self._puts += tuple(refs.unread(payload))

    def _answered(self, outcome: Outcome) -> int:
        """Return the attempt that the reply being delivered names, or 0 where the outcome is no reply of the method."""
        if outcome.kind is _OK or outcome.kind is OutcomeKind.APP_ERROR:
            return getattr(self.order.placer, "answering", 1)
        return 0

    def _record(self, member: int, call: int, outcome: Outcome, done_ns: int, answered: int) -> None:
        """Record the caller's side of one call in the trace."""
        order, tracer = self.order, self._tracer
        if tracer is None:
            return
        peer = order.peers[member]
        tracer.bus_client(
            getattr(order.placer, "session", b""),
            str(peer.name),
            peer.incarnation,
            order.lane,
            self._placed.seqs[member] + call,
            answered or outcome.attempts,
            order.methods[call],
            order.submitted_ns,
            order.encoded_ns,
            min(self._sent_to(member) or done_ns, done_ns) if outcome.attempts else 0,
            done_ns if answered else 0,
            done_ns,
            sum(map(nbytes_of, order.payloads[member])),
            sum(map(nbytes_of, outcome.payload or ())),
            outcome.kind.value,
            self._batch,
            outcome.attempts,
        )

    def _sent_to(self, member: int) -> int:
        """Return when a member's request was about to leave: a later one of many waits until the others are sent."""
        sent = getattr(self._placed, "sent_ns", ())
        return sent[member] if sent else self._sent_ns

    def asked(self) -> None:
        """Note for the trace that somebody takes an answer now."""
        if self._tracer is not None:
            self._taken_ns, self._decoded_ns = time.monotonic_ns(), 0

    def decoded(self) -> None:
        """Note for the trace that the parts of the answer being taken are decoded, and merged from now on."""
        if self._tracer is not None:
            self._decoded_ns = time.monotonic_ns()

    def concluded(self, call: int, merged: bool) -> None:  # noqa: FBT001  # one caller
        """Record in the trace that the answer of one call was made now, or (not ``merged``) could not be."""
        order, tracer = self.order, self._tracer
        if tracer is not None:
            now_ns = time.monotonic_ns()
            tracer.bus_batch(
                order.methods[call], self._batch, order.lane, len(order.ranks), len(order.methods),
                order.submitted_ns, self._last_ns or now_ns, now_ns if merged else 0, "OK" if merged else "FAILED",
                self._taken_ns, self._decoded_ns,
            )  # fmt: skip

    def _take_chunk(self, _member: int, _number: int, item: Buffers) -> None:
        with self._lock:
            self._streaming = True
            self.chunks.append(item)
            self._items += 1
            watchers = tuple(self._watchers)
        if self.order.collects:
            shared().call(self._take_all)
        for watcher in watchers:
            watcher()

    def _take_all(self) -> None:
        """Give credit for all items that have come: they are wanted together. Not under the placer's lock."""
        if self._placed is not None and self._items > self._consumed and not self.slots.settled():
            self._consumed = self._items
            self.order.placer.consumed(self._placed, self._items)

    def taken(self, items: int, nbytes: int) -> None:
        """Give the worker credit for a stream's items below ``items``, now and then; the last one has ``nbytes``."""
        self._consumed_bytes += nbytes
        if items - self._consumed >= _CREDIT_STEP or self._consumed_bytes >= _CREDIT_BYTES:
            self._consumed, self._consumed_bytes = items, 0
            self.order.placer.consumed(self._placed, items)

    # -- second executions ---------------------------------------------------------------------------------------------

    def _run_again(self, member: int, outcome: Outcome) -> bool:
        """Schedule another execution if the rules allow one. Under the placer's lock."""
        order = self.order
        if order.retry is None or self.cancelled or len(order.methods) > 1:
            return False
        if len(order.ranks) > 1:
            return self._run_part_again(member, outcome)
        if self._streaming:  # the caller has seen items of this execution; another one would give others, or again
            return False
        if outcome.kind is OutcomeKind.NOT_EXECUTED:
            allowed = outcome.reason in _GONE or outcome.reason in ("not_sent", "not_ready")
        else:
            allowed = outcome.kind is OutcomeKind.UNKNOWN and outcome.reason in _GONE and order.effect != "once"
        if not allowed or not self._may_find_another(outcome):
            return False
        now_ns = time.monotonic_ns()
        pause = order.retry.pause_s(self._executions, time.monotonic() - self._began, random.random)
        if pause is None:
            return False
        second = outcome.kind is OutcomeKind.UNKNOWN  # what was proved not to run is not run again by being sent again
        if second and order.bucket is not None and not order.bucket.take(now_ns):
            return False
        self._executions += 1
        self._attempts += outcome.attempts
        self._last = outcome
        if outcome.kind is OutcomeKind.UNKNOWN:
            self._may_have_run = outcome
        self._pausing = True
        self._not_before = time.monotonic() + pause
        order.line.join(self)  # now, not after the pause: later calls to the rank stay behind it
        order.line.hurry(pause)
        return True

    def _run_part_again(self, member: int, outcome: Outcome) -> bool:
        """Run one member's part of a call once more, by itself: as declared, its run needs no other rank.

        Not where members start together: they need each other. Nor after a failure of another one: the caller is about
        to hear of it, and it may be the echo of this one's end.
        """
        order = self.order
        if order.together or self.slots.failed:
            return False
        part = Placement(
            replace(
                order, ranks=[order.ranks[member]], payloads=[order.payloads[member]], peers=[order.peers[member]],
                released=None,
            )
        )  # fmt: skip
        part._began = self._began
        part.watch(lambda: self._take_part(member, part))
        self._parts[member] = part
        if part._run_again(0, outcome):
            self.again.add(order.ranks[member])
            return True
        del self._parts[member]
        part._watchers.clear()  # it would keep itself, and the arrays of the call, by what it tells
        return False

    def _take_part(self, member: int, part: Placement) -> None:
        """Take over what became of one member's part that ran once more."""
        outcome = part.slots.outcome(0, 0)
        if outcome is not None and self._parts.pop(member, None) is not None:
            part._watchers.clear()  # as above
            self.order.peers[member] = part.order.peers[0]
            self._settle(member, 0, outcome)

    def give_up_pause(self, why: str) -> None:
        """End a call that waits for its next execution with how the last one ended. Any thread."""
        last = self._last
        if last is not None and self._take_pause():
            evidence = f"{last.evidence}; not run again: {why}"
            self._settle_all(self._whole(last._replace(evidence=evidence, attempts=0)))

    def _take_pause(self) -> bool:
        """End the pause, if there is one; one thread alone gets True."""
        with self._lock:
            pausing, self._pausing = self._pausing, False
            return pausing

    def _may_find_another(self, outcome: Outcome) -> bool:
        """Tell whether someone else may run the call, or the same rank will be back."""
        order = self.order
        moves = order.effect == "pure" or outcome.kind is OutcomeKind.NOT_EXECUTED
        if order.choose is not None and moves and any(is_ready(peer) for peer in order.roster.peers()):
            return True
        rank = order.ranks[0]
        current = order.roster.peers()[rank]
        return not is_dead(current) or order.roster.will_return(current)

    def _may_wait(self) -> bool:
        """Tell whether a call that was not sent waits: ranks come back by policy, or what became of one is not clear.

        Waiting runs nothing twice, so it needs no leave to retry.
        """
        order = self.order
        if order.retry is not None and order.retry.budget_s == 0:
            return False
        waited_s = time.monotonic() - self._began
        if waited_s > (order.deadline_s or _PATIENCE_S):
            return False
        everyone = order.roster.peers()
        absent = [everyone[rank] for rank in order.ranks if not is_ready(everyone[rank])]
        if any(is_dead(peer) and not order.roster.will_return(peer) for peer in absent):
            return False
        if all(order.roster.will_return(peer) for peer in absent):
            return True
        if all(is_suspect(peer) or order.roster.will_return(peer) for peer in absent):
            return waited_s < _VERDICT_S
        return order.retry is not None and order.retry.attempts > 1 and waited_s < _PATIENCE_S

    @property
    def place_in(self) -> tuple[str, Sequence[int]] | None:
        """Which places of which ranks it takes; None if any rank will do."""
        return None if self.order.choose is not None else (self.order.lane, self.order.ranks)

    def look_again(self, *, free: bool) -> bool:
        """Place once more if it is free to; return whether it still waits. On the background thread."""
        order, last = self.order, self._last
        if not self._pausing or last is None:
            return False
        if self._was_cancelled():
            if self._take_pause():
                told = Outcome(OutcomeKind.CANCELLED, None, "cancelled", "cancelled before a retry", 0)
                self._settle_all(self._whole(told))
            return False
        if time.monotonic() < self._not_before:
            return True
        if not free:
            return self._go_on_waiting(last, None)
        if order.choose is not None and (order.effect == "pure" or last.kind is OutcomeKind.NOT_EXECUTED):
            if order.released is not None:
                order.released(order.ranks[0])
            order.ranks[0] = order.choose()
        if not self._take_pause():
            return False
        try:
            self._place()
        except Unavailable as error:
            self._pausing = True
            return self._go_on_waiting(last, error)
        except Exception as error:  # noqa: BLE001  # the bus was closed meanwhile: the caller must hear of it
            self._settle_all(Outcome(last.kind, reason=last.reason, evidence=f"{last.evidence}; then {error}"))
            return False
        if self._was_cancelled():  # by another thread meanwhile, which could not know that it was being placed
            order.placer.cancel(self._placed)
        return False

    def _was_cancelled(self) -> bool:
        return self.cancelled

    def _go_on_waiting(self, last: Outcome, error: Unavailable | None) -> bool:
        if self._may_wait():
            return True
        if not self._take_pause():
            return False
        self._give_up(last, error or Unavailable(f"nothing was sent: {last.evidence}", reason=last.reason))
        return False

    def _give_up(self, last: Outcome, error: Unavailable) -> None:
        """End a call that waited in vain. Not under a lock: the error reads the worker's facts."""
        if last.reason == "not_ready":
            self.refused = self._refusal(error)
        self._settle_all(self._whole(last._replace(attempts=0)))  # they were counted when it ended

    def _settle_all(self, outcome: Outcome) -> None:
        for call in range(len(self.order.methods)):
            for member in self.slots.missing(call):
                self._settle(member, call, outcome)
        wake(self.order.placer)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until ``done()``, driving the placer; False when the time ran out first."""
        return done() or self.order.placer.wait(done, timeout_s)

    async def wait_async(self, done: Callable[[], bool]) -> None:
        """Wait on the running loop until ``done()``."""
        await self._wait_for(done, self.watch, self.unwatch)

    async def _wait_for(
        self,
        done: Callable[[], bool],
        watch: Callable[[Callable[[], None]], None],
        unwatch: Callable[[Callable[[], None]], None],
    ) -> None:
        if done():
            return
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        here = threading.get_ident()

        def notice() -> None:
            if threading.get_ident() == here:  # the loop drives the bus itself: no need to wake it
                changed.set()
                return
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop was closed while the call was out; nobody waits there any more
                return

        driver = loop_driver(self.order.placer)
        watch(notice)
        if driver is not None:
            driver.attach_loop(loop)
        try:
            while not done():
                await changed.wait()
                changed.clear()
        finally:
            unwatch(notice)
            if driver is not None:
                driver.detach_loop(loop)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` after each change, under the placer's lock: it must be quick and must not raise."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Undo ``watch``."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def cancel(self) -> None:
        """Ask that what has not started should not run; every call still gets one outcome."""
        self.cancelled = True
        if self.slots.settled():
            return
        if self._placed is not None:
            self.order.placer.cancel(self._placed)
        for part in list(self._parts.values()):
            part.cancel()
        if self._pausing:
            self.order.line.hurry()
            shared().call(self._if_cancelled)
        wake(self.order.placer)

    def _if_cancelled(self) -> None:
        """End a pause between two executions; those in line are asked by the line. On the background thread."""
        if self._pausing:
            self.look_again(free=True)

    def decided(self) -> bool:
        """Tell whether every call has its outcome, or one has failed."""
        return self.slots.settled() or self.slots.failed

    def went_well(self) -> bool:
        """Tell whether every call has a good outcome."""
        return self.slots.settled() and not self.slots.failed

    def lost(self) -> bool:
        """Tell whether a worker was lost with one of the calls: the others may wait for it for ever."""
        return self._lost_at is not None

    def failed(self, call: int) -> bool:
        """Tell whether a call has failed on some rank, whatever the others do."""
        return self._lost_at is not None or call in self._failed_at

    def patience_s(self, call: int) -> float:
        """Return how many seconds the others still have to answer a call after it failed on some rank."""
        ends = [self._lost_at + _ECHO_S] if self._lost_at is not None else []
        ends += [self._failed_at[call] + _SETTLE_S] if call in self._failed_at else []
        return max(0.0, min(ends) - time.monotonic()) if ends else 0.0

    # -- reading -------------------------------------------------------------------------------------------------------

    def plain_body(self, outcome: Any) -> bytes | None:
        """Return the encoded value of an outcome, if it is a short one and nobody but the caller looks at it."""
        payload = outcome.payload
        if outcome.kind is not _OK or not payload or len(payload) != 1 or type(payload[0]) is not bytes:
            return None
        return None if self._tracer is not None or self.order.streams else payload[0]

    def error(self, member: int, call: int, outcome: Outcome) -> CallError:
        """Make the error of one slot. Not under a lock."""
        return error_of(outcome, self._origin(member, call))

    def _origin(self, member: int, call: int) -> Origin:
        order = self.order
        return Origin(order.roster, order.peers[member], order.methods[call], order.deadline_s, order.number)

    def is_late(self, call: int) -> bool:
        """Tell whether the error of a call says where ranks are that have not answered."""
        return self._late is not None and (not self.slots.settled(call) or bool(self._timed_out(call)))

    def find(self, call: int, timeout_s: float) -> None:
        """Have the stacks of late ranks at hand when the error is made; waits up to ``timeout_s``. Not under a lock."""
        if self._late is not None:
            late = [*self.slots.missing(call), *self._timed_out(call)]
            self._late.where({member: self.order.peers[member] for member in late if self.order.peers}, timeout_s)

    def _timed_out(self, call: int) -> list[int]:
        return [one.member for one in self.slots.failures(call) if one.outcome.reason == "deadline"]

    def whereabouts(self, call: int, timeout_s: float) -> dict[int, str]:
        """As ``late``, with where the engine of each is; waits up to ``timeout_s`` for that. Not under a lock."""
        states = self.late(call)
        if self._late is None or not states:
            return states
        order = self.order
        open_ = {
            rank: peer
            for rank, peer in zip(order.ranks, order.peers, strict=False)
            if rank in states and not is_dead(peer)
        }
        for rank, dump in self._late.where(open_, timeout_s).items():
            states[rank] = f"{states[rank]}{AT}{dump.place}"
        return states

    def late(self, call: int) -> dict[int, str]:
        """Return what is known of each rank that has not answered a call."""
        order = self.order
        states: dict[int, str] = {}
        for member in self.slots.missing(call):
            part = self._parts.get(member)
            if part is not None:
                states |= part.late(0)
                continue
            peer = order.peers[member] if order.peers else None
            if self._pausing and self._executions > 1:
                state = "waits to be run again"
            elif peer is None or self._placed is None:
                state = "not sent"
            elif is_dead(peer):
                state = f"dead: {peer.evidence}".rstrip(": ")
            else:
                state = whereabouts(self._placed, member, call) or "no answer yet"
                if not is_ready(peer):
                    state = f"{state}, worker {peer.state.value}"
            states[order.ranks[member]] = state
        return states
