"""Lanes with async endpoints: their requests run as tasks of one event loop, in a thread of its own.

Requests of a lane begin in the order in which they came, though one may have to wait for its arguments first; from
then on they run side by side. A sync endpoint of such a lane runs on a thread beside the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from zbus.protocol.messages import Execute
from zbus.runtime.gil import name_thread
from zbus.runtime.intake import Intake
from zbus.runtime.pools import Pools
from zbus.runtime.served import Served
from zbus.runtime.specials import SpecialCalls
from zbus.runtime.steps import Step, Steps
from zbus.runtime.stopping import NotBegun, Wanted, running, task_call

__all__ = ["AsyncLanes"]

_LOOP_END_S: Final = 1.0
"""How long async calls that still run have to end when the loop does."""

_PULLS: Final = 8
"""Async calls whose data may be on its way at once; more wait."""


class AsyncLanes:
    """The loop and what runs on it. Methods without a word about it: any thread.

    Args:
        served: Tells which endpoints are sync.
        intake: Reads requests.
        steps: Runs and answers calls.
        pools: Threads for what must not hold up the loop.
        within: What each request, and each sync endpoint on its thread, runs within.
    """

    def __init__(
        self,
        served: Served,
        intake: Intake,
        steps: Steps,
        pools: Pools,
        within: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self._served = served
        self._intake = intake
        self._steps = steps
        self._answering = steps.answering
        self._pools = pools
        self._within = within
        self.tasks: dict[tuple[bytes, str, int], asyncio.Task[None]] = {}  # those that have begun
        self._waiting: set[asyncio.Task[None]] = set()  # all: a loop keeps only weak references
        self.behind: dict[str, asyncio.Future[None]] = {}  # by lane: done when the last one to wait can begin
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="zbus-async", daemon=True).start()

    def dispatch(self, request: Execute) -> None:
        """Have a request run; nothing once the loop is closed."""
        self._soon(self._start_task, request)

    def cancel(self, key: tuple[bytes, str, int]) -> None:
        """Have what of a request runs cancelled; what has not begun looks at ``unwanted`` first."""
        self._soon(self._cancel_task, key)

    def close(self) -> None:
        """Stop the loop without waiting for what still runs; it is cancelled there."""
        self._soon(self.loop.stop)

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *args)

    def _run_loop(self) -> None:
        loop = self.loop
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

    # -- on the loop ---------------------------------------------------------------------------------------------

    def _start_task(self, request: Execute) -> None:
        task = self.loop.create_task(self._run(request), name=f"{request.lane}.{request.seq}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _cancel_task(self, key: tuple[bytes, str, int]) -> None:
        task = self.tasks.get(key)
        if task is not None:
            task.cancel()

    async def _run(self, request: Execute) -> None:
        key = (request.session, request.lane, request.seq)
        task = asyncio.current_task()
        if task is not None:  # from here on a cancel reaches code that answers it; before, the task would just vanish
            self.tasks[key] = task
        try:
            with self._within():
                await self._run_calls(request)
        finally:
            self.tasks.pop(key, None)
            self._answering.over(request)

    async def _run_calls(self, request: Execute) -> None:
        started = time.monotonic_ns()
        turn = _Turn(self.behind, request.lane)
        try:
            calls = await self._calls(request, turn)
            if calls is None:
                return
            if type(calls) is SpecialCalls and any(special.fills for special in calls.specials.values()):
                turn.take()  # its first call begins later
            else:
                turn.end()
            for step in self._steps.of(request, calls, started):
                await self._run_one(step, turn)
                turn.end()
        finally:
            turn.end()

    async def _calls(self, request: Execute, turn: _Turn) -> list[Any] | None:
        """Read a request, off the loop where data has to come first; calls behind it in the lane begin after it."""
        pulls = self._intake.must_pull(request)
        before = self.behind.get(request.lane)
        if before is None and not pulls:
            return self._intake.calls(request)
        turn.take()
        pulled = None
        if pulls:
            pulled = self.loop.run_in_executor(self._pools.of("zbus.pull", _PULLS), self._intake.calls, request)
        if before is not None:
            await self._outlast(before)
        return self._intake.calls(request) if pulled is None else await self._outlast(pulled)

    async def _outlast(self, ended: asyncio.Future[Any]) -> Any:
        """Wait for what goes on whatever becomes of its call; a cancel of that is answered where it may begin."""
        while True:
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                if self._answering.closed or ended.cancelled():
                    raise

    async def _run_one(self, step: Step, turn: _Turn) -> None:
        task_call.set(step.call)
        with step:
            step.find()
            if step.special is not None:
                if step.special.fills:
                    await self._prepare_beside(step)
                else:
                    step.prepare()
                if step.is_refused():  # meanwhile
                    return
                turn.end()
            if self._served.is_sync(step.method):
                step.begin_apart()
                await self._run_beside(step)
            else:
                step.begin()
                step.value = step.function(*step.args, **step.kwargs)
                if inspect.isasyncgen(step.value):
                    await self._stream(step, step.value)
                    return
                step.value = await step.value
                step.end()
            step.encode()

    async def _stream(self, step: Step, items: AsyncGenerator[Any, Any]) -> None:
        stream = step.stream(self.loop)
        async with contextlib.aclosing(items):
            async for item in items:
                await stream.wait_async()
                stream.send(item)
        step.end()

    # -- beside it -----------------------------------------------------------------------------------------------

    async def _prepare_beside(self, step: Step) -> None:
        """Prepare a call on a thread, which waits no longer than this does."""
        wanted = Wanted(self._answering)

        def prepare() -> None:
            key = threading.get_ident()
            running[key] = step.call._replace(owner=wanted)
            try:
                step.prepare()
            finally:
                running.pop(key, None)

        try:
            await self.loop.run_in_executor(self._pools.of("zbus.pull", _PULLS), prepare)
        finally:
            wanted.over = True

    async def _run_beside(self, step: Step) -> None:
        """Run a sync endpoint on a thread, and wait for its end even when cancelled.

        A thread cannot be ended: it sees the cancel at its next ``checkpoint``, and until then it does run.

        Raises:
            NotBegun: It was cancelled, or its deadline passed, before a thread was free.
        """
        job = self._pools.of("zbus.beside").submit(self._run_in_pool, step)
        ended = asyncio.wrap_future(job)
        while True:
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                if job.cancel():
                    raise NotBegun from None
                if self._answering.closed or job.cancelled():
                    raise

    def _run_in_pool(self, step: Step) -> None:
        """Run a sync endpoint, on a pool's thread."""
        request = step.request
        late = request.deadline_ns is not None and time.monotonic_ns() >= request.deadline_ns
        if late or self._answering.is_stopped(request):
            raise NotBegun
        key = threading.get_ident()
        running[key] = step.call
        try:
            with self._within():
                step.run_apart()
        finally:
            running.pop(key, None)


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
            self._mine = self._last[self._lane] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Let those behind begin; nothing if none was to wait."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.set_result(None)
            if self._last.get(self._lane) is mine:
                del self._last[self._lane]
