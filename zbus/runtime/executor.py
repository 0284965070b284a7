"""Runs requests: finds the method, decodes, runs, encodes, answers, records the span. Knows no sockets.

Where a request runs is declared by its lane, never guessed from its arguments: ``main`` on the worker's main thread,
lanes with async endpoints on one event loop in a second thread, other lanes on a pool of their own, ``ctl`` on a small
pool that runs only the bus's own methods.

An exception of a method, whatever it is (``SystemExit``, one whose ``repr`` raises), becomes the call's outcome; the
worker lives on.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import operator
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from zbus import failpoints
from zbus.codec import Keep, decode_calls, encode, encode_plain
from zbus.codec.exceptions import describe_exception
from zbus.engine import EndpointSpec, Engine
from zbus.errors import CallStopped, CodecError, RefLimitError, RefLostError
from zbus.protocol.journal import LaneRing
from zbus.protocol.messages import Buffer, Buffers, CancelRunning, Execute, Kind, Status, StreamCredit
from zbus.runtime.batches import Holding, refuse_stream, run_batch
from zbus.runtime.gil import name_thread
from zbus.runtime.specials import Refs, Special, SpecialCalls, with_specials
from zbus.runtime.stopping import CurrentCall, NotBegun, Wanted, running, task_call
from zbus.runtime.streams import RunningStream
from zbus.runtime.watchdog import Handler
from zbus.trace.tracer import get_tracer

if TYPE_CHECKING:  # an agent starts with this module, runs nothing async, and importing it takes a sixth of its start
    import asyncio

__all__ = ["Answers", "Builtin", "Executor"]

_LOOP_END_S: Final = 1.0
"""How long async calls that still run have to end when the loop does."""

_METHOD: Final = operator.itemgetter(0)
_PARTS: Final = {3}
_TEXT: Final = {str}
_UNKNOWN: Final = ("?",)
_NOTHING: Final = (None, ())

_PULLS: Final = 8
"""Async calls whose data may be on its way at once; more wait."""

Builtin = Callable[..., Any]


class Answers(Protocol):
    """Where answers go: ``transport.server.Server``, or a stand-in."""

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        """Answer call number ``index`` of a request."""

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        """Send one item of a stream."""


class Opening(Protocol):
    """Arrays of a request on their way."""

    @property
    def total(self) -> int:
        """Bytes to come."""
        ...

    def give_up(self) -> None:
        """Want them no more: ``opened`` raises."""


class Arrays(Protocol):
    """Large arrays apart from the messages, by the session they come from or go to."""

    def must_pull(self, frames: Buffers) -> bool:
        """Tell whether ``opened`` would have to wait for data."""

    def opened(
        self, frames: Buffers, session: bytes, deadline_s: float | None, begun: Callable[[Opening], None]
    ) -> Buffers:
        """Return a request's frames with the arrays in their places; waits for those that are pulled."""

    def keeper(self, session: bytes) -> Keep | None:
        """Return what makes the frames of an answer's arrays; None for copies of them."""


class Marks(Protocol):
    """Where the start and end of each call are marked: a ring of the crash journal, with fail-points around or not."""

    def begin(self, seq: int) -> None:
        """Right before the method is called."""

    def end(self, seq: int) -> None:
        """Right after it returned."""

    def raised(self, seq: int) -> None:
        """Right after it raised."""

    def answered(self, seq: int, frames: Buffers) -> None:
        """Its reply is encoded."""


class _TrappedMarks:
    """Marks with a fail-point before and behind each; what one raises is the method's own error."""

    def __init__(self, ring: LaneRing, trap: Callable[[str], None]) -> None:
        self._ring = ring
        self._trap = trap
        self.raised = ring.raised
        self.answered = ring.answered

    def begin(self, seq: int) -> None:
        self._trap("before_exec")
        self._ring.begin(seq)
        self._inside("after_start", seq)

    def end(self, seq: int) -> None:
        self._inside("before_end", seq)
        self._ring.end(seq)
        self._trap("after_exec")

    def _inside(self, point: str, seq: int) -> None:
        try:
            self._trap(point)
        except BaseException:
            self._ring.raised(seq)
            raise


class Executor:
    """Runs requests for one engine. ``run_main`` belongs to the main thread; the rest may come from any thread.

    Args:
        name: ``role/rank``, for spans and messages.
        incarnation: Of this worker.
        answers: Where answers go.
        builtins: The bus's own methods by full name (``zbus.ping`` …).
        rings: Gives the crash journal's ring of a session's lane; None where there is no journal. Any thread.
        arrays: Opens and makes frames of large arrays; None where they travel in the messages.
        refs: Opens handles and keeps results; None: neither can be.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        answers: Answers,
        builtins: Mapping[str, Builtin],
        rings: Callable[[bytes, str], LaneRing] | None = None,
        arrays: Arrays | None = None,
        refs: Refs | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self._answers = answers
        self._holding: Holding | None = cast("Holding", answers) if hasattr(answers, "hold") else None
        self._rings = rings
        self._arrays = arrays
        self._refs = refs
        self._unkept = LaneRing.unkept()
        self._builtins = dict(builtins)
        self._engine: Engine | None = None
        self._table: dict[str, EndpointSpec] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._async_lanes: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pools: dict[str, ThreadPoolExecutor] = {"ctl": _pool("ctl", 4)}
        self._tasks: dict[tuple[bytes, str, int], asyncio.Task[None]] = {}  # those that have begun
        self._waiting: set[asyncio.Task[None]] = set()  # all: a loop keeps only weak references
        self._behind: dict[str, asyncio.Future[None]] = {}  # by async lane: done when the last one to wait can begin
        self._pulls: dict[tuple[bytes, str, int], Opening] = {}
        self._streams: dict[tuple[bytes, str, int], RunningStream] = {}
        self.unwanted: set[tuple[bytes, str, int]] = set()  # requests that are not to go on; gone with their end
        self._closed = False
        # What the main thread runs, and its calls once they are read: None in place of those that have begun.
        self._at_work: tuple[Execute | None, Sequence[Any]] = _NOTHING
        # First seq, lane, session and methods of the last requests.
        self._recent: deque[tuple[int, str, bytes, Sequence[str]]] = deque(maxlen=512)
        self.done = 0
        self.failed = 0

    # -- the engine ----------------------------------------------------------------------------------------------

    def install(self, engine: Engine, table: Mapping[str, EndpointSpec]) -> None:
        """Serve ``engine`` from now on. Main thread."""
        self._table = dict(table)
        self._async_lanes = frozenset(spec.lane for spec in table.values() if spec.is_async)
        if self._async_lanes and self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, name="zbus-async", daemon=True).start()
        self._functions = {name: getattr(engine, name) for name in table}
        self._engine = engine

    def remove(self) -> Engine | None:
        """Serve no engine any more and return the one that was. Main thread."""
        engine, self._engine = self._engine, None
        self._table = {}
        return engine

    @property
    def engine(self) -> Engine | None:
        """The engine served now."""
        return self._engine

    def method_of(self, session: bytes, lane: str, seq: int) -> str:
        """Return the method of a call that ran here lately, or an empty text."""
        return next(
            (
                methods[seq - first]
                for first, of, whose, methods in reversed(self._recent)
                if of == lane and whose == session and first <= seq < first + len(methods)
            ),
            "",
        )

    def current_calls(self) -> list[dict[str, Any]]:
        """Return what runs now: method, lane, seq, age in seconds; oldest first."""
        now = time.monotonic_ns()
        mine = {id(call): call for call in running.copy().values() if call.owner is self}
        calls = sorted(mine.values(), key=lambda call: call.since_ns)
        return [
            {"method": c.method, "lane": c.request.lane, "seq": c.seq, "age_s": round((now - c.since_ns) / 1e9, 3)}
            for c in calls
        ]

    def ctl_handlers(self) -> list[Handler]:
        """Return the bus's own methods that run now, which must be quick. Any thread."""
        calls = running.copy().items()
        return [
            Handler(f"ctl method {call.method}", call.since_ns, thread)
            for thread, call in calls
            if call.owner is self and call.request.lane == "ctl"
        ]

    # -- where requests arrive -----------------------------------------------------------------------------------

    def run_main(self, request: Execute) -> None:
        """Run a request of the main lane to its end."""
        self._run(request)
        self._at_work = _NOTHING

    def give_up(self, request: Execute, error: BaseException) -> None:
        """Answer what of a request has no answer: a signal handler raised, not in a method, and ended its run.

        Main thread. The calls that had not begun are told so.
        """
        if self._holding is None:
            return
        at_work, calls = self._at_work
        self._at_work = _NOTHING
        now = time.monotonic_ns()
        for index in self._holding.unanswered(request):
            call = calls[index] if at_work is request else _UNKNOWN
            method = "?" if call is None else call[0]
            self.fail(request, index, method, error, now, now, begun=call is None)
        self.unwanted.discard((request.session, request.lane, request.seq))

    def dispatch(self, request: Execute) -> None:
        """Hand a request of another lane to where it runs. Quick; called under the server's lock."""
        lane = request.lane
        if lane in self._async_lanes and self._loop is not None:
            self._soon(self._start_task, request)
            return
        pool = self._pools.get(lane)
        if pool is None:
            widest = max((s.concurrency or 1 for s in self._table.values() if s.lane == lane), default=1)
            pool = self._pool_of(lane, widest)
        pool.submit(self._run, request)

    def _pool_of(self, name: str, threads: int | None = None) -> ThreadPoolExecutor:
        """Return a pool of threads by the name of its lane, or of what is done there (``zbus.…``); made when needed."""
        return self._pools.get(name) or self._pools.setdefault(name, _pool(name.removeprefix("zbus."), threads))

    def cancel(self, effect: CancelRunning) -> None:
        """Stop a request where it allows it: async at its ``await``, sync at ``zbus.checkpoint``.

        What of it has not begun here will not begin. Called while the callee has it as running, so before its end.
        """
        key = (effect.session, effect.lane, effect.seq)
        self.unwanted.add(key)
        if effect.lane in self._async_lanes:
            self._soon(self._cancel_task, key)
        opening = self._pulls.get(key)
        if opening is not None:
            opening.give_up()
        stream = self._streams.get(key)
        if stream is not None:
            stream.grant(stream.acked)  # it may wait for credit

    @property
    def pulling(self) -> int:
        """Bytes of arguments that requests wait for. Any thread."""
        return sum(opening.total for opening in tuple(self._pulls.values()))

    def is_stopped(self, request: Execute) -> bool:
        """Tell whether the caller of a request no longer wants it. Any thread."""
        return bool(self.unwanted) and (request.session, request.lane, request.seq) in self.unwanted

    def credit(self, effect: StreamCredit) -> None:
        """Let a stream run on."""
        stream = self._streams.get((effect.session, effect.lane, effect.seq))
        if stream is not None:
            stream.grant(effect.acked)

    def close(self) -> None:
        """Stop the pools and the loop without waiting for what still runs."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        if self._loop is not None:
            self._soon(self._loop.stop)

    # -- running, sync -------------------------------------------------------------------------------------------

    def _run(self, request: Execute) -> None:
        started = time.monotonic_ns()
        calls = self._decode(request)
        if calls is None:
            return
        if request.lane == "main":
            self._at_work = (request, calls)
        decoded = time.monotonic_ns()
        if request.calls == 1:
            deadline_ns = request.deadline_ns
            self.note(request, (calls[0][0],))
            late = self.unwanted or (deadline_ns is not None and decoded >= deadline_ns)
            if not late or not self.refused(request, 0, decoded):
                self._run_one(request, 0, calls, started, decoded)
        else:
            self._run_batch(request, calls, started)
        if self.unwanted:
            self.unwanted.discard((request.session, request.lane, request.seq))

    def _run_batch(self, request: Execute, calls: list[Any], started: int) -> None:
        holding = self._holding
        plain = type(calls) is not SpecialCalls
        if plain and holding is not None and request.lane == "main" and failpoints.active is None:
            ring = self._unkept if self._rings is None else self._rings(request.session, request.lane)
            run_batch(self, holding, request, calls, ring, started, traced=get_tracer().rpc)
            return
        decoded = time.monotonic_ns()
        self.note(request, list(map(_METHOD, calls)))
        poisoned = False
        for index in range(len(calls)):
            if poisoned:
                self._answers.finish(request, index, Kind.FAILURE, Status.PREDECESSOR, ())
                continue
            if self.refused(request, index, decoded):
                poisoned = request.strict
                continue
            ok = self._run_one(request, index, calls, started, decoded)
            poisoned = request.strict and not ok
            started = decoded = time.monotonic_ns()

    def refused(self, request: Execute, index: int, now: int) -> bool:
        """Answer a call that is not to begin any more, and say so."""
        if self.unwanted and self.is_stopped(request):
            self._answers.finish(request, index, Kind.FAILURE, Status.CANCELLED, ())
            return True
        if request.deadline_ns is not None and now >= request.deadline_ns:
            self._answers.finish(request, index, Kind.FAILURE, Status.EXPIRED, ())
            return True
        return False

    def _run_one(  # private, one caller, hot path
        self, request: Execute, index: int, calls: list[Any], started: int, decoded: int
    ) -> bool:
        seq = request.seq + index
        key = threading.get_ident()
        method, args, kwargs = calls[index]
        calls[index] = None
        running[key] = CurrentCall(self, request, method, seq, decoded)
        marks = self._marks(request)
        begun = False
        try:
            function = self.resolve(request, method)
            special = calls.specials.get(index) if type(calls) is SpecialCalls else None
            if special is not None:
                args, kwargs = self._prepared(request, special, args, kwargs)
                if self.refused(request, index, time.monotonic_ns()):  # meanwhile
                    return False
            begun = True
            marks.begin(seq)
            try:
                value = function(*args, **kwargs)
                if type(value) is GeneratorType:
                    _check_alone(request, method)
                    return self._stream_sync(request, method, value, marks, started, decoded)
            except BaseException:
                marks.raised(seq)
                raise
            marks.end(seq)
            ended = time.monotonic_ns()
            if special is not None:
                value = self._kept(request, special, method, value)
            frames = self.encode_answer(request, value)
            # What it was called with goes before the caller hears of it: memory of this host can be used again at once.
            value = args = kwargs = None
            marks.answered(seq, frames)
        except BaseException as error:  # whatever a method raises is its call's outcome  # noqa: BLE001
            if begun or not self._is_stop(request, error) or not self.refused(request, index, time.monotonic_ns()):
                self.fail(request, index, method, error, started, decoded, begun=begun)
            return False
        finally:
            running.pop(key, None)
        return self._answer(request, index, method, frames, started, decoded, ended)

    def _stream_sync(  # private, one caller
        self, request: Execute, method: str, items: Generator[Any, Any, Any], marks: Marks, started: int, decoded: int
    ) -> bool:
        stream = RunningStream(self._answers, request, None, partial(self.encode_answer, request))
        with self._streaming(stream, request, method, marks, started, decoded), contextlib.closing(items):
            for item in items:
                stream.wait(lambda: self.is_stopped(request), method)
                stream.send(item)
        return stream.well

    # -- running, async ------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        loop = self._loop
        if loop is not None:
            import asyncio

            name_thread("async")
            asyncio.set_event_loop(loop)
            try:
                loop.run_forever()
                tasks = asyncio.all_tasks(loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    loop.run_until_complete(asyncio.wait(tasks, timeout=_LOOP_END_S))
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call on the loop's thread; nothing once the loop is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *args)

    def _start_task(self, request: Execute) -> None:
        if self._loop is not None:
            task = self._loop.create_task(self._run_async(request), name=f"{request.lane}.{request.seq}")
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def _cancel_task(self, key: tuple[bytes, str, int]) -> None:
        """Cancel what has begun; what has not looks at ``unwanted`` first. On the loop."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    async def _run_async(self, request: Execute) -> None:
        import asyncio

        key = (request.session, request.lane, request.seq)
        task = asyncio.current_task()
        if task is not None:  # from here on a cancel reaches code that answers it; before, the task would just vanish
            self._tasks[key] = task
        try:
            await self._run_calls(request)
        finally:
            self._tasks.pop(key, None)
            self.unwanted.discard(key)

    async def _run_calls(self, request: Execute) -> None:
        started = time.monotonic_ns()
        turn = _Turn(self._behind, request.lane)
        try:
            calls = await self._decode_async(request, turn)
            if calls is None:
                return
            if type(calls) is SpecialCalls and any(special.fills for special in calls.specials.values()):
                turn.take()  # its first call begins later
            else:
                turn.end()
            decoded = time.monotonic_ns()
            self.note(request, list(map(_METHOD, calls)))
            poisoned = False
            for index in range(len(calls)):
                if poisoned:
                    self._answers.finish(request, index, Kind.FAILURE, Status.PREDECESSOR, ())
                    continue
                if self.refused(request, index, decoded):
                    poisoned = request.strict
                    continue
                ok = await self._run_one_async(request, index, calls, started, decoded, turn)
                turn.end()
                poisoned = request.strict and not ok
                started = decoded = time.monotonic_ns()
        finally:
            turn.end()

    async def _decode_async(self, request: Execute, turn: _Turn) -> list[Any] | None:
        """As ``_decode``, off the loop where data has to come first; calls behind it in the lane begin after it."""
        import asyncio

        pulls = self._arrays is not None and len(request.buffers) > 1 and self._arrays.must_pull(request.buffers)
        before = self._behind.get(request.lane)
        if before is None and not pulls:
            return self._decode(request)
        turn.take()
        pulled = None
        if pulls:
            pool = self._pool_of("zbus.pull", _PULLS)
            pulled = asyncio.get_running_loop().run_in_executor(pool, self._decode, request)
        if before is not None:
            await self._outlast(before)
        return self._decode(request) if pulled is None else await self._outlast(pulled)

    async def _outlast(self, ended: asyncio.Future[Any]) -> Any:
        """Wait for what goes on whatever becomes of its call; a cancel of that is answered where it may begin."""
        import asyncio

        while True:
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                if self._closed or ended.cancelled():
                    raise

    async def _run_one_async(  # private, one caller
        self, request: Execute, index: int, calls: list[Any], started: int, decoded: int, turn: _Turn
    ) -> bool:
        seq = request.seq + index
        method, args, kwargs = calls[index]
        calls[index] = None
        call = CurrentCall(self, request, method, seq, decoded)
        running[id(call)] = call
        task_call.set(call)
        marks = self._marks(request)
        begun = False
        try:
            function = self.resolve(request, method)
            special = calls.specials.get(index) if type(calls) is SpecialCalls else None
            if special is not None:
                if special.fills:
                    args, kwargs = await self._prepared_beside(request, call, special, args, kwargs)
                else:
                    args, kwargs = self._prepared(request, special, args, kwargs)
                if self.refused(request, index, time.monotonic_ns()):  # meanwhile
                    return False
                turn.end()
            begun = True
            spec = self._table.get(method)
            if spec is not None and not spec.is_async:
                value = await self._run_beside(request, call, function, args, kwargs)
            else:
                marks.begin(seq)
                try:
                    value = function(*args, **kwargs)
                    if inspect.isasyncgen(value):
                        _check_alone(request, method)
                        return await self._stream_async(request, method, value, marks, started, decoded)
                    value = await value
                except BaseException:
                    marks.raised(seq)
                    raise
                marks.end(seq)
            ended = time.monotonic_ns()
            if special is not None:
                value = self._kept(request, special, method, value)
            frames = self.encode_answer(request, value)
            value = args = kwargs = None  # as in _run_one
            marks.answered(seq, frames)
        except BaseException as error:  # as in _run_one; a cancel is an outcome too  # noqa: BLE001
            begun = begun and type(error) is not NotBegun
            stopped = not begun and not self._closed and self._is_stop(request, error)
            if not stopped or not self.refused(request, index, time.monotonic_ns()):
                self.fail(request, index, method, error, started, decoded, begun=begun)
            return False
        finally:
            running.pop(id(call), None)
        return self._answer(request, index, method, frames, started, decoded, ended)

    async def _prepared_beside(
        self, request: Execute, call: CurrentCall, special: Special, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """As ``_prepared``, on a thread, which waits no longer than this does."""
        import asyncio

        wanted = Wanted(self)

        def prepared() -> tuple[Any, Any]:
            key = threading.get_ident()
            running[key] = call._replace(owner=wanted)
            try:
                return self._prepared(request, special, args, kwargs)
            finally:
                running.pop(key, None)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool_of("zbus.pull", _PULLS), prepared)
        finally:
            wanted.over = True

    async def _run_beside(
        self, request: Execute, call: CurrentCall, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a sync endpoint of an async lane on a thread, and wait for its end even when cancelled.

        A thread cannot be ended: it sees the cancel at its next ``checkpoint``, and until then it does run.

        Raises:
            NotBegun: It was cancelled, or its deadline passed, before a thread was free.
        """
        import asyncio

        job = self._pool_of("zbus.beside").submit(self._run_in_pool, request, call, function, args, kwargs)
        ended = asyncio.wrap_future(job)
        while True:
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                if job.cancel():
                    raise NotBegun from None
                if self._closed or job.cancelled():
                    raise

    def _run_in_pool(
        self, request: Execute, call: CurrentCall, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a sync endpoint of an async lane, on a pool's thread."""
        deadline_ns = request.deadline_ns
        if self.is_stopped(request) or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns):
            raise NotBegun
        seq, key = call.seq, threading.get_ident()
        running[key] = call
        marks = self._marks(request)
        try:
            marks.begin(seq)
            try:
                value = function(*args, **kwargs)
            except BaseException:
                marks.raised(seq)
                raise
            marks.end(seq)
            return value
        finally:
            running.pop(key, None)

    async def _stream_async(  # private, one caller
        self, request: Execute, method: str, items: AsyncGenerator[Any, Any], marks: Marks, started: int, decoded: int
    ) -> bool:
        stream = RunningStream(self._answers, request, self._loop, partial(self.encode_answer, request))
        with self._streaming(stream, request, method, marks, started, decoded):
            async with contextlib.aclosing(items):
                async for item in items:
                    await stream.wait_async()
                    stream.send(item)
        return stream.well

    # -- shared --------------------------------------------------------------------------------------------------

    def _answer(  # private, hot path
        self, request: Execute, index: int, method: str, frames: Buffers, started: int, decoded: int, ended: int
    ) -> bool:
        """Answer a call that returned."""
        encoded = time.monotonic_ns()
        self._answers.finish(request, index, Kind.RESULT, Status.OK, frames)
        self.record(request, request.seq + index, method, started, decoded, ended, "OK", encoded)
        self.done += 1
        return True

    def _decode(self, request: Execute) -> list[Any] | None:
        """Return the calls of a request, or answer all of them with the reason why it cannot be read."""
        try:
            frames = request.buffers
            if len(frames) > 1 and self._arrays is not None:
                left_ns = None if request.deadline_ns is None else request.deadline_ns - time.monotonic_ns()
                left_s = None if left_ns is None else left_ns / 1e9
                frames = self._arrays.opened(frames, request.session, left_s, partial(self._pull_begun, request))
            refs: list[Any] = []
            calls = decode_calls(frames, refs)
            if type(calls) is not list or len(calls) != request.calls:
                msg = f"a request of {request.calls} calls holds {len(calls)}"  # or none: [[method, args, kwargs], …]
                raise ValueError(msg)
            if refs or set(map(len, calls)) != _PARTS:
                return with_specials(calls, fills=bool(refs))
        except Exception as error:  # a body that is not one: the caller's fault, told to the caller  # noqa: BLE001
            now = time.monotonic_ns()
            stopped = self.is_stopped(request)
            self.unwanted.discard((request.session, request.lane, request.seq))
            if stopped or (request.deadline_ns is not None and now >= request.deadline_ns):
                words = str(error.message if isinstance(error, CodecError) else error).encode()
                status = Status.CANCELLED if stopped else Status.EXPIRED
                for index in range(request.calls):
                    self._answers.finish(request, index, Kind.FAILURE, status, (words,))
                return None
            for index in range(request.calls):
                self.fail(request, index, "?", error, now, 0, begun=False)
            return None
        finally:
            self._pulls.pop((request.session, request.lane, request.seq), None)
        return calls

    def _pull_begun(self, request: Execute, opening: Opening) -> None:
        key = (request.session, request.lane, request.seq)
        self._pulls[key] = opening
        if key in self.unwanted:  # else whoever adds it there looks here after it
            opening.give_up()

    def _prepared(self, request: Execute, special: Special, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a special call; what fails here fails before the method starts."""
        refs = self._refs
        if refs is None:
            msg = f"{self.name} takes and keeps no Refs"
            raise TypeError(msg)
        try:
            if special.claim is not None:
                refs.check()
            return refs.fill((args, kwargs), request.deadline_ns) if special.fills else (args, kwargs)
        except (RefLimitError, RefLostError) as error:
            error.started = False
            raise

    def _kept(self, request: Execute, special: Special, method: str, value: Any) -> Any:
        """Return the handle of a result that stays here, or the result itself."""
        if special.claim is None or self._refs is None:
            return value
        return self._refs.keep(value, request.session, special.claim, method)

    def encode_answer(self, request: Execute, value: Any) -> list[Buffer]:
        """Return the frames of an answer; arrays in it may change afterwards."""
        plain = encode_plain(value)
        if plain is not None:
            return [plain]
        keep = None if self._arrays is None or request.lane == "ctl" else self._arrays.keeper(request.session)
        return encode(value, snapshot=True, keep=keep)

    def _marks(self, request: Execute) -> Marks:
        """Return where the start and end of a request's calls are marked; ``ctl`` has no journal and no fail-points."""
        if request.lane == "ctl":
            return self._unkept
        ring = self._unkept if self._rings is None else self._rings(request.session, request.lane)
        return ring if failpoints.active is None else _TrappedMarks(ring, failpoints.active)

    @contextlib.contextmanager
    def _streaming(  # private
        self, stream: RunningStream, request: Execute, method: str, marks: Marks, started: int, decoded: int
    ) -> Iterator[None]:
        """Let a stream have credit for the length of a ``with`` block, and answer its call as the block ends.

        What the block raises is the call's outcome, and goes no further.
        """
        self._streams[stream.key] = stream
        try:
            yield
            marks.end(request.seq)
            stream.well = True
        except BaseException as error:  # as in _run_one  # noqa: BLE001
            marks.raised(request.seq)
            self.fail(request, 0, method, error, started, decoded, chunks=stream.sent, kind=Kind.END)
            return
        finally:
            del self._streams[stream.key]
        ended = time.monotonic_ns()
        self._answers.finish(request, 0, Kind.END, Status.OK, encode(None), chunks=stream.sent)
        self.record(request, request.seq, method, started, decoded, ended, "OK")
        self.done += 1

    def resolve(self, request: Execute, method: Any) -> Callable[..., Any]:
        """Return what a request calls by a name.

        Raises:
            AttributeError: There is no such method on its lane.
            PermissionError: It is not for a guest.
            TypeError: A name is text.
        """
        lane = request.lane
        if request.epoch and type(method) is str:
            spec = self._table.get(method)
            if spec is not None and spec.lane == lane:
                return self._functions[method]
        if type(method) is not str:
            msg = f"a method name is text, not {type(method).__name__}"
            raise TypeError(msg)
        if method.startswith("zbus."):
            builtin = self._builtins.get(f"{lane}:{method}")
            if builtin is None or (lane != "ctl" and request.epoch == 0):
                msg = f"{self.name} has no method {method!r} on lane {lane!r}"
                raise AttributeError(msg)
            return builtin
        spec = self._table.get(method)
        if spec is None or spec.lane != lane:
            raise AttributeError(self._missing(method, spec, lane))
        if spec.effect != "pure" and request.epoch == 0:
            msg = f"endpoint {method!r} of {self.name} is declared {spec.effect!r}; a guest may only make pure calls"
            raise PermissionError(msg)
        return self._functions[method]

    def _missing(self, method: str, spec: EndpointSpec | None, lane: str) -> str:
        if spec is not None:
            return f"endpoint {method!r} of {self.name} is on lane {spec.lane!r}, not {lane!r}"
        if self._engine is None:
            return f"{self.name} has no engine yet"
        near = difflib.get_close_matches(method, self._table, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"engine {type(self._engine).__name__} of {self.name} has no endpoint {method!r}{hint}"

    def fail(
        self,
        request: Execute,
        index: int,
        method: Any,
        error: BaseException,
        started: int,
        decoded: int,
        *,
        begun: bool = True,
        chunks: int = 0,
        kind: Kind = Kind.FAILURE,
    ) -> None:
        """Answer a call that raised, and say so in the log, as far as the log takes it: its disk may be full.

        ``begun``: its method was started; else that is what failed.
        """
        if self._closed:
            return  # nobody takes answers any more
        ended = time.monotonic_ns()
        self.failed += 1
        stopped = self._is_stop(request, error)
        frames = encode(describe_exception(error))
        encoded = time.monotonic_ns()
        status = Status.STOPPED if stopped else Status.APP_ERROR if begun else Status.NOT_STARTED
        outcome = "APP_ERROR" if begun else "NOT_EXECUTED"
        self._answers.finish(request, index, kind, status, frames, chunks=chunks)
        self.record(request, request.seq + index, str(method), started, decoded, ended, outcome, encoded)
        if stopped:
            with contextlib.suppress(Exception):
                print(f"zbus: {self.name} {method!r} was stopped before its end", file=sys.stderr)  # the log  # noqa: T201
            return
        try:
            what = "raised" if begun else "was not started"
            print(f"zbus: {self.name} {method!r} {what}:", file=sys.stderr)  # stderr is the worker's log  # noqa: T201
            traceback.print_exception(error)
        except BaseException:  # a repr or str that raises: the log has what was written so far  # noqa: BLE001
            with contextlib.suppress(Exception):
                print("  (its text cannot be shown)", file=sys.stderr)  # as above  # noqa: T201

    def _is_stop(self, request: Execute, error: BaseException) -> bool:
        """Tell whether an error is how a method followed its caller's wish to end."""
        if isinstance(error, CallStopped | NotBegun):
            return True
        return type(error).__name__ == "CancelledError" and self.is_stopped(request)

    def note(self, request: Execute, methods: Sequence[Any]) -> None:
        """Remember which methods the calls of a request name, for ``method_of``."""
        if len(methods) == 1:
            methods = methods if type(methods[0]) is str else _UNKNOWN
        elif set(map(type, methods)) != _TEXT:
            methods = [method if type(method) is str else "?" for method in methods]
        self._recent.append((request.seq, request.lane, request.session, methods))

    def record(  # hot path
        self, request: Execute, seq: int, method: str, started: int, decoded: int, ended: int, outcome: str,
        encoded: int = 0,
    ) -> None:  # fmt: skip
        """Record a call in the trace, if that is on."""
        tracer = get_tracer()
        if tracer.rpc:
            tracer.bus_server(
                request.session, self.name, self.incarnation, request.lane, seq, request.attempt, method,
                request.arrived_ns, started, decoded, ended, encoded or ended, outcome, time.monotonic_ns(),
            )  # fmt: skip


class _Turn:
    """A request's place among those of its async lane: none behind it begins before it has ended. On the loop.

    Args:
        last: By lane: done when the last request that has taken its turn there has ended it.
        lane: Its lane.
    """

    __slots__ = ("_lane", "_last", "_mine")

    def __init__(self, last: dict[str, asyncio.Future[None]], lane: str) -> None:
        self._last = last
        self._lane = lane
        self._mine: asyncio.Future[None] | None = None

    def take(self) -> None:
        """Have those behind wait from now on; nothing if they do."""
        if self._mine is None:
            import asyncio

            self._mine = self._last[self._lane] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Let those behind begin; nothing if none was to wait."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.set_result(None)
            if self._last.get(self._lane) is mine:
                del self._last[self._lane]


def _pool(lane: str, threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, f"zbus-{lane}", initializer=name_thread, initargs=(lane,))


def _check_alone(request: Execute, method: str) -> None:
    if request.calls > 1:
        refuse_stream(method)
