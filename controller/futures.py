"""Answers on their way: ``BatchFuture`` of one call to a group, ``Stream`` of one call's items.

Values are decoded on the thread that asks for them, never under the bus's lock. A waiting thread drives the bus
itself; an ``await`` belongs to the caller's own running loop; ``asyncio.run`` is never used, so a blocking call works
in notebooks and inside a running loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

from controller.background import Background, callbacks, shared
from controller.outcomes import WaitTimeout, batch_error, is_echo
from controller.placement import Placement
from zbus.codec import NOT_PLAIN, decode, decode_plain
from zbus.errors import BatchError, CallTimeout, ZbusError
from zbus.protocol.batch import Failure, causes
from zbus.protocol.messages import Outcome, OutcomeKind

__all__ = ["BatchFuture", "RankOutcome", "RankResult", "Stream", "first", "wait_future_ordered"]

_OURS = (ZbusError, BatchError)
"""Errors that say all there is to say, without the frames of this module."""

T = TypeVar("T")

first: Callable[[Sequence[Any]], Any] = operator.itemgetter(0)
"""Merges the values of one rank, which come bare."""

_CAUSE_S = 1.0
"""How much longer the cause is waited for while all that has failed looks like the echo of it."""

_STACKS_S = 0.5
"""How long the stacks of ranks that are not waited for are waited for."""


class RankResult(NamedTuple):
    """One rank's answer as it comes: its value, or its error in the value's place."""

    rank: int
    value: Any

    @property
    def failed(self) -> bool:
        """Whether ``value`` is the error of the rank."""
        return isinstance(self.value, Exception)


class RankOutcome(NamedTuple):
    """What is known of one rank's part of a call.

    Attributes:
        rank: The rank.
        outcome: ``OK``, ``APP_ERROR``, ``CANCELLED``, ``NOT_EXECUTED``, ``UNKNOWN``; None while it is open.
        state: In words: ``answered``, ``running``, ``arrived, not started``, ``sent, not confirmed``, ``dead``…
        attempts: How many times the request was transmitted.
    """

    rank: int
    outcome: str | None
    state: str
    attempts: int


class BatchFuture(Generic[T]):
    """The answer of one call to a group. Methods may be called from any thread.

    Args:
        placement: What it reads.
        call: Which call of the placed batch.
        merge: Turns the members' values, in rank order, into the answer.
    """

    # Defaults stand in the class: a batch makes many of these, and most are asked once, for a plain value.
    _guard: threading.RLock | None = None
    _values: dict[int, Any] | None = None
    _answer: tuple[T] | None = None
    _error: Exception | None = None

    def __init__(self, placement: Placement, call: int, merge: Callable[[Sequence[Any]], T]) -> None:
        self._placement = placement
        self._call = call
        self._merge = merge

    def __repr__(self) -> str:
        order = self._placement.order
        slots = self._placement.slots
        total = len(order.ranks)
        answered = total - len(slots.missing(self._call))
        return f"<BatchFuture {order.roster.role}.{order.methods[self._call]}: {answered}/{total} answered>"

    # -- asking --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Tell whether every rank's outcome is known."""
        return self._placement.slots.settled(self._call)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer and return it, merged as declared.

        Args:
            timeout: Seconds to wait; None: the call's own deadline decides. The call goes on when it runs out.

        Raises:
            RemoteError: The engine raised (also an instance of the original builtin class); only if one rank was
                called. NotExecuted, CallTimeout, WorkerLost, OutcomeUnknown, CallCancelled likewise.
            BatchError: One or more of several ranks failed; the good results are kept. After the first failure the
                others are waited for only a moment: they may wait for the failed rank in a collective. ``late`` says
                how far each of those is; ``outcomes`` tells later how they ended. After the loss of a worker, what
                the others had not started is cancelled.
            CallTimeout: ``timeout`` ran out (it is also a ``TimeoutError``); names who is late and how far each is.
        """
        answer = self._answer or self._plain()
        if answer is not None:
            return answer[0]
        self._wait(timeout)
        answer = self._plain()
        try:
            return self._conclude() if answer is None else answer[0]
        finally:
            del self  # the error that is raised keeps this frame, and would keep itself and the call's arrays by it

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait and return the error that ``result`` would raise, or None.

        Raises:
            CallTimeout: ``timeout`` ran out.
        """
        self._wait(timeout)
        try:
            self._conclude()
        except Exception as error:  # noqa: BLE001  # it is what was asked for
            return error
        finally:
            del self  # as in ``result``
        return None

    def outcomes(self) -> list[RankOutcome]:
        """Return what is known of each rank now, in rank order; never waits, never raises for a failed rank."""
        placement = self._placement
        late = placement.late(self._call)
        known = []
        for member, rank in enumerate(placement.order.ranks):
            outcome = placement.slots.outcome(member, self._call)
            if outcome is None:
                known.append(RankOutcome(rank, None, late.get(rank, "no answer yet"), 0))
            else:
                state = "answered" if outcome.kind in _ANSWERED else outcome.evidence or outcome.reason
                known.append(RankOutcome(rank, outcome.kind.value, state, outcome.attempts))
        return known

    def results(self) -> dict[int, Any]:
        """Return the good results that are here now, by rank."""
        placement = self._placement
        found = {}
        for member, rank in enumerate(placement.order.ranks):
            outcome = placement.slots.outcome(member, self._call)
            if outcome is not None and outcome.kind is OutcomeKind.OK:
                found[rank] = self._value(member, outcome)
        return found

    def as_completed(self, timeout: float | None = None) -> Iterator[RankResult]:
        """Yield each rank's answer as it comes; a failed rank yields its error as the value.

        Args:
            timeout: Seconds for all of them together.

        Raises:
            CallTimeout: ``timeout`` ran out.
        """
        until = None if timeout is None else time.monotonic() + timeout
        seen = 0
        while True:
            for position, member in list(self._placement.slots.arrivals(self._call, seen)):
                seen = position + 1
                yield self._rank_result(member)
            if self.done() and not any(True for _ in self._placement.slots.arrivals(self._call, seen)):
                return
            remaining = None if until is None else until - time.monotonic()
            if not self._placement.wait(self._newer(seen), remaining):
                raise self._timeout(timeout)

    def _newer(self, seen: int) -> Callable[[], bool]:
        slots = self._placement.slots
        return lambda: slots.settled(self._call) or any(True for _ in slots.arrivals(self._call, seen))

    async def _arriving(self) -> AsyncIterator[RankResult]:
        seen = 0
        while True:
            for position, member in list(self._placement.slots.arrivals(self._call, seen)):
                seen = position + 1
                yield self._rank_result(member)
            if self.done() and not any(True for _ in self._placement.slots.arrivals(self._call, seen)):
                return
            await self._until(self._newer(seen))

    def __aiter__(self) -> AsyncIterator[RankResult]:
        """As ``as_completed``, on the running loop."""
        return self._arriving()

    # -- acting --------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask that what has not started should not run; a running method is told, not killed.

        Every rank still gets an outcome; ``result`` then raises ``CallCancelled`` where nothing ran. In a batch, this
        cancels the whole batch.
        """
        self._placement.cancel()

    def add_done_callback(self, fn: Callable[[BatchFuture[T]], object]) -> None:
        """Call ``fn(self)`` when every rank's outcome is known, on a thread for callbacks; at once if it is already."""
        if self.done():
            fn(self)
        else:
            self._when_done(lambda: fn(self), callbacks())

    def when_done(self, job: Callable[[], None]) -> None:
        """Run the bus's own ``job`` on its helper thread once every rank's outcome is known; never runs it inline."""
        self._when_done(job, shared())

    def _when_done(self, job: Callable[[], object], where: Background) -> None:
        watch = _Watch(self._placement, self.done, job, where)
        self._placement.watch(watch.notice)
        watch.notice()

    def __await__(self) -> Generator[Any, None, T]:
        """Wait on the running loop; cancelling the await cancels the call."""
        return self._answer_async().__await__()

    @staticmethod
    def attach(futures: Sequence[BatchFuture[Any]], placement: Placement) -> None:
        """Let these read another placement: the batch that was only collected so far is on its way now."""
        for future in futures:
            future._placement = placement  # noqa: SLF001  # of this class

    async def wait_async(self) -> None:
        """Wait on the running loop until there is an answer or an error; cancelling it cancels the call."""
        await self._until(self._decided)
        for enough, patience_s in self._patience():
            try:
                async with asyncio.timeout(patience_s):  # within it a cancel may be its own
                    await self._placement.wait_async(enough)
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._placement.is_late(self._call):  # their stacks are waited for here, where that blocks no loop
            await asyncio.to_thread(self._placement.find, self._call, _STACKS_S)

    async def _answer_async(self) -> T:
        await self.wait_async()
        try:
            return self._conclude()
        finally:
            del self  # as in ``result``

    async def _until(self, done: Callable[[], bool]) -> None:
        try:
            await self._placement.wait_async(done)
        except asyncio.CancelledError:
            self.cancel()
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _lock(self) -> threading.RLock:
        return self._guard or self.__dict__.setdefault("_guard", threading.RLock())

    def _plain(self) -> tuple[T] | None:
        """Return the answer in one step where it is one rank's short value; else None."""
        body = self._placement.slots.row[self._call]
        if type(body) is not bytes:  # it did not come with others
            body = None if body is None else self._placement.plain_body(body)
        if body is None or self._merge is not first:
            return None
        value = decode_plain(body)
        if value is NOT_PLAIN:
            return None
        answer: tuple[T] = self.__dict__.setdefault("_answer", (value,))  # the first of two that ask at once stands
        return answer

    def _decided(self) -> bool:
        return self.done() or self._placement.failed(self._call)

    def _wait(self, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        if not self._placement.wait(self._decided, timeout):
            raise self._timeout(timeout)
        for enough, patience_s in self._patience():
            remaining = patience_s if until is None else until - time.monotonic()
            if not self._placement.wait(enough, min(patience_s, remaining)) and remaining < patience_s:
                raise self._timeout(timeout)

    def _patience(self) -> Iterator[tuple[Callable[[], bool], float]]:
        """Yield what to wait for, and how long, once a call has failed on some rank; nothing if all have answered."""
        if self.done():
            return
        placement, call = self._placement, self._call
        yield self.done, placement.patience_s(call)
        if self.done() or not self._only_echoes():
            return
        known = len(placement.slots.failures(call))
        yield (lambda: placement.lost() or len(placement.slots.failures(call)) > known), _CAUSE_S
        if not self.done():
            yield self.done, placement.patience_s(call)

    def _only_echoes(self) -> bool:
        """Tell whether all that failed so far looks like the consequence of another rank's failure, not heard yet."""
        placement = self._placement
        failures = placement.slots.failures(self._call)
        return not placement.lost() and all(is_echo(placement.error(f.member, f.call, f.outcome)) for f in failures)

    def _timeout(self, timeout: float | None) -> CallTimeout:
        order = self._placement.order
        late = self._placement.late(self._call)
        told = "; ".join(f"rank {rank} {state}" for rank, state in late.items())
        method = order.methods[self._call]
        limit = "before the bus closed" if timeout is None else f"within {timeout:g} s"
        return WaitTimeout(
            f"{order.roster.role}.{method}: {len(late)} of {len(order.ranks)} ranks not answered {limit}: {told}",
            results=self.results(),
            late=late,
            role=order.roster.role,
            rank=next(iter(late), None),
            method=method,
            outcome=OutcomeKind.UNKNOWN.value,
            reason="wait",
            facts={f"rank {rank}": state for rank, state in late.items()},
            hint="the call goes on; wait longer with result(timeout=...), or cancel() it",
        )

    def _conclude(self) -> T:
        with self._lock:
            if not self.done():
                raise self._given_up()
            if self._answer is None and self._error is None:
                self._placement.asked()
                try:
                    self.__dict__.setdefault("_answer", (self._merged(),))
                except Exception as error:  # noqa: BLE001  # kept, so that every asker gets the same
                    self._error = error.with_traceback(None) if isinstance(error, _OURS) else error
                self._placement.concluded(self._call, self._error is None)
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    del self  # as in ``result``
            assert self._answer is not None  # noqa: S101  # one of the two is set above
            return self._answer[0]

    def _given_up(self) -> Exception:
        """Make the error of a call that failed while others have not answered. Made anew each time: they may yet.

        After the loss of a worker, what the others have not started is cancelled.
        """
        placement = self._placement
        late = placement.whereabouts(self._call, _STACKS_S)
        if placement.lost():
            placement.cancel()
        failures = placement.slots.failures(self._call) or placement.slots.failures()
        return self._failure(failures, late)

    def _merged(self) -> T:
        placement = self._placement
        failures = placement.slots.failures(self._call)
        if failures:
            raise self._failure(failures)
        outcomes = [placement.slots.outcome(m, self._call) for m in range(len(placement.order.ranks))]
        values = [self._value(member, outcome) for member, outcome in enumerate(outcomes) if outcome]
        placement.decoded()
        return self._merge(values)

    def _failure(self, failures: Sequence[Failure], late: Mapping[int, str] | None = None) -> Exception:
        order = self._placement.order
        if self._placement.refused is not None:
            return self._placement.refused
        made = {one.member: self._placement.error(one.member, one.call, one.outcome) for one in failures}
        if len(order.ranks) == 1:
            return made[failures[0].member]
        ordered = causes(failures, lambda failure: is_echo(made[failure.member]))
        errors = [(order.ranks[failure.member], made[failure.member]) for failure in ordered]
        method, role = order.methods[self._call], order.roster.role
        return batch_error(
            method, role, errors, self.results(), len(order.ranks), late, again=sorted(self._placement.again)
        )

    def _rank_result(self, member: int) -> RankResult:
        outcome = self._placement.slots.outcome(member, self._call)
        rank = self._placement.order.ranks[member]
        if outcome is not None and outcome.kind is OutcomeKind.OK:
            return RankResult(rank, self._value(member, outcome))
        return RankResult(rank, self._placement.error(member, self._call, outcome) if outcome else None)

    def _value(self, member: int, outcome: Outcome) -> Any:
        with self._lock:
            values = self._values
            if values is None:
                values = self._values = {}
            if member not in values:
                values[member] = self._decode(outcome)
            return values[member]

    def _decode(self, outcome: Outcome) -> Any:
        order = self._placement.order
        if order.streams:
            return [decode(item) for item in self._placement.chunks]
        found: list[Any] = []
        value = decode(outcome.payload or (), refs=found)
        if found and order.refs is not None:
            order.refs.bind(found, order.claims[self._call] if order.claims else None)
        return value


class _Watch:
    """Has a job run once, when a call is over. Nothing in it points in a circle: with the job the future goes too."""

    __slots__ = ("_done", "_job", "_placement", "_told", "_where")

    def __init__(
        self, placement: Placement, done: Callable[[], bool], job: Callable[[], object], where: Background
    ) -> None:
        self._placement = placement
        self._done = done
        self._job = job
        self._where = where
        self._told = threading.Lock()

    def notice(self) -> None:
        if self._done() and self._told.acquire(blocking=False):
            self._where.call(self._tell)

    def _tell(self) -> None:
        self._placement.unwatch(self.notice)
        self._job()


_ANSWERED = (OutcomeKind.OK, OutcomeKind.APP_ERROR)


class Stream(Generic[T]):
    """The items of one call, in order, as they come. Iterate it once, with ``for`` or ``async for``.

    ``close`` (or ``with``) stops the worker's generator; so does dropping the stream.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._taken = 0
        self._stopped = False

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        placement = getattr(self, "_placement", None)
        if placement is not None and not placement.slots.settled():
            shared().call(placement.cancel)  # any thread may be here, with any lock

    def close(self) -> None:
        """Ask the worker to stop if it has not ended."""
        self._stopped = True
        if not self._placement.slots.settled():
            self._placement.cancel()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stopped:
            raise StopIteration
        self._placement.wait(self._ready, None)
        if self._placement.chunks:
            return self._take()
        self._end()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._stopped:
            raise StopAsyncIteration
        try:
            await self._placement.wait_async(self._ready)
        except asyncio.CancelledError:
            self._placement.cancel()
            raise
        if self._placement.chunks:
            return self._take()
        self._end()
        raise StopAsyncIteration

    def _ready(self) -> bool:
        return bool(self._placement.chunks) or self._placement.slots.settled()

    def _take(self) -> T:
        item = self._placement.chunks.popleft()
        value: T = decode(item)
        self._taken += 1
        if not self._placement.slots.settled():
            self._placement.taken(self._taken, sum(memoryview(frame).nbytes for frame in item))
        return value

    def _end(self) -> None:
        self._stopped = True
        outcome = self._placement.slots.outcome(0, 0)
        if outcome is not None and outcome.kind is not OutcomeKind.OK:
            error = self._placement.error(0, 0, outcome)
            error.facts["delivered"] = f"{self._taken} items"
            raise error


Waitable = BatchFuture[Any] | concurrent.futures.Future[Any]


@overload
def wait_future_ordered(
    futures: Sequence[BatchFuture[T]], timeout: float | None = None, *, exit_on_exception: bool = False
) -> list[T]: ...
@overload
def wait_future_ordered(
    futures: Sequence[Waitable], timeout: float | None = None, *, exit_on_exception: bool = False
) -> list[Any]: ...
def wait_future_ordered(
    futures: Sequence[Waitable], timeout: float | None = None, *, exit_on_exception: bool = False
) -> list[Any]:
    """Wait for several calls and return their answers in the order of the futures, whatever order they end in.

    Args:
        futures: What ``submit`` returned; ``concurrent.futures`` ones are fine too.
        timeout: Seconds for all together; None: each call's own deadline decides.
        exit_on_exception: Raise at the first failure, in order, cancelling the rest; otherwise wait for all first.

    Raises:
        CallTimeout: The time ran out.
        BatchError: Several calls failed; ``results`` holds the good answers by position.
        Exception: The one error, if one call failed.
    """
    until = None if timeout is None else time.monotonic() + timeout
    answers: dict[int, Any] = {}
    errors: list[tuple[int, Exception]] = []
    for position, future in enumerate(futures):
        try:
            answers[position] = future.result(None if until is None else max(0.0, until - time.monotonic()))
        except Exception as error:
            if exit_on_exception or isinstance(error, WaitTimeout | concurrent.futures.TimeoutError):
                for other in futures[position + 1 :]:
                    if exit_on_exception:
                        other.cancel()
                raise
            errors.append((position, error))
    if len(errors) == 1:
        raise errors[0][1]
    if errors:
        raise batch_error(wait_future_ordered.__name__, "calls", errors, answers, len(futures))
    return [answers[position] for position in range(len(futures))]
