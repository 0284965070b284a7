"""One call per item, spread over a group: at most so many out at once, refilled as answers come."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence, Sized
from typing import Any, Final, Generic, Literal, TypeVar

from controller.futures import BatchFuture
from controller.outcomes import WaitTimeout, batch_error
from controller.placer import Placer, loop_driver, wake
from zbus.errors import ConfigError

__all__ = ["MapFuture", "columns"]

T = TypeVar("T")

_END: Final[Any] = object()
_READ_AHEAD: Final = 4
"""How many times the limit is read ahead of the reader when the items have no known end."""


def columns(method: str, given: Sequence[Iterable[Any]]) -> Iterable[tuple[Any, ...]]:
    """Return the arguments of each call of a map; of a known number where all that is given has one.

    Raises:
        ConfigError: What is given differs in length.
    """
    lengths = [len(column) for column in given if isinstance(column, Sized)]
    if len(set(lengths)) > 1:
        msg = f"`{method}.map` got {' and '.join(map(str, lengths))} items, which make no calls together"
        raise ConfigError(msg, hint="give one item of each per call, or itertools.repeat(value)")
    rows = zip(*given, strict=False)
    return list(rows) if len(lengths) == len(given) else rows


class MapFuture(Generic[T]):
    """The answers of a map. Calls start at once and go on while nobody looks. Thread-safe; take each answer once.

    Iterate it (``for`` or ``async for``), ``await`` it, or ask ``result()`` for the list of all.

    Args:
        start: Places the call of one item.
        items: What to call with, such as of ``columns``; read only as far as calls are started.
        placer: What carries the calls.
        order: ``"input"`` or ``"done"``.
        errors: ``"raise"`` or ``"return"``.
        limit: Most calls out at once.
    """

    def __init__(
        self,
        start: Callable[[Any], BatchFuture[T]],
        items: Iterable[Any],
        *,
        placer: Placer,
        order: Literal["input", "done"],
        errors: Literal["raise", "return"],
        limit: int,
    ) -> None:
        if order not in ("input", "done") or errors not in ("raise", "return"):
            msg = f'map takes order "input" or "done" and errors "raise" or "return", not {order!r} and {errors!r}'
            raise ValueError(msg)
        self._start = start
        self._context = contextvars.copy_context()  # of whoever maps: later calls belong to the same scope and span
        self._items = iter(items)
        self._ahead = 1 << 62 if isinstance(items, Sized) else _READ_AHEAD * limit
        self._placer = placer
        self._order = order
        self._errors = errors
        self._limit = limit
        self._lock = threading.RLock()
        self._ended: dict[int, BatchFuture[T] | Exception] = {}
        self._out: dict[int, BatchFuture[T]] = {}
        self._ended_order: deque[int] = deque()
        self._started = 0
        self._taken = 0
        self._exhausted = False
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._fill()

    def __repr__(self) -> str:
        more = "" if self._exhausted else ", more to start"
        return f"<MapFuture: {self._started} started, {len(self._out)} out, {self._taken} taken{more}>"

    # -- filling -------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start calls up to the limit. Never under the bus's lock."""
        with self._lock:
            while not self._exhausted and len(self._out) < self._limit and self._started - self._taken < self._ahead:
                try:
                    item = next(self._items, _END)
                except Exception as error:  # noqa: BLE001  # the user's iterator failed: its error is the next answer
                    self._exhausted = True
                    self._end(self._started, error)
                    self._started += 1
                    return
                if item is _END:
                    self._exhausted = True
                    return
                self._started += 1
                self._start_one(self._started - 1, item)

    def _start_one(self, number: int, item: Any) -> None:
        try:
            future = self._context.copy().run(self._start, item)
        except Exception as error:  # noqa: BLE001  # it belongs to this item; the others go on
            self._end(number, error)
            return
        self._out[number] = future
        future.when_done(lambda: self._on_done(number, future))

    def _on_done(self, number: int, future: BatchFuture[T]) -> None:
        with self._lock:
            if self._out.pop(number, None) is not None:
                self._end(number, future)
        self._fill()
        wake(self._placer)
        for loop, changed in list(self._loops):
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # that loop was closed; nobody waits there any more
                continue

    def _end(self, number: int, answer: BatchFuture[T] | Exception) -> None:
        self._ended[number] = answer
        self._ended_order.append(number)

    # -- taking --------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Tell whether every call has ended."""
        return self._exhausted and not self._out

    def cancel(self) -> None:
        """Start no more calls and cancel those that are out."""
        with self._lock:
            self._exhausted = True
            out = list(self._out.values())
        for future in out:
            future.cancel()

    def result(self, timeout: float | None = None) -> list[T]:
        """Wait for all calls and return the answers not taken yet, in the order asked for.

        Raises:
            BatchError: Some calls failed; ``results`` holds the good answers by item number.
            CallTimeout: ``timeout`` seconds ran out; the calls go on.
        """
        self._read_all()
        if not self._placer.wait(self.done, timeout):
            msg = f"map: {len(self._out)} of {self._started} calls not answered within {timeout} s"
            raise WaitTimeout(msg, results={}, late={}, outcome="UNKNOWN", reason="wait")
        return self._conclude()

    def __await__(self) -> Generator[Any, None, list[T]]:
        """As ``result``, on the running loop; cancelling it cancels the calls."""
        return self._all_async().__await__()

    async def _all_async(self) -> list[T]:
        self._read_all()
        await self._until(self.done)
        return self._conclude()

    def _read_all(self) -> None:
        self._ahead = 1 << 62
        self._fill()

    def _conclude(self) -> list[T]:
        answers: dict[int, Any] = {}
        errors: list[tuple[int, Exception]] = []
        for number in sorted(self._ended) if self._order == "input" else list(self._ended_order):
            try:
                answers[number] = self._value(number)
            except Exception as error:  # noqa: BLE001  # collected, and raised below
                errors.append((number, error))
        if errors:
            try:
                raise batch_error(map.__name__, "items", errors, answers, self._started)
            finally:
                del errors  # each of them keeps this frame; see ``BatchFuture.result``
        return list(answers.values())

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._placer.wait(self._ready, None)
        return self._take(StopIteration)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        await self._until(self._ready)
        return self._take(StopAsyncIteration)

    def _ready(self) -> bool:
        if self._order == "done":
            return bool(self._ended_order) or self.done()
        return self._taken in self._ended or (self._exhausted and self._taken >= self._started)

    def _take(self, stop: type[Exception]) -> T:
        with self._lock:
            if self._order == "done":
                number = self._ended_order.popleft() if self._ended_order else -1
            else:
                number = self._taken
            if number not in self._ended:
                raise stop
            self._taken += 1
        self._fill()
        try:
            value: T = self._value(number)
        except Exception:
            self.cancel()
            raise
        return value

    def _value(self, number: int) -> Any:
        answer = self._ended.pop(number)
        if not isinstance(answer, Exception):
            try:
                return answer.result() if self._errors == "raise" else answer.exception() or answer.result()
            finally:
                del answer  # the error that is raised keeps this frame; see ``BatchFuture.result``
        if self._errors == "return":
            return answer
        raise answer

    async def _until(self, done: Callable[[], bool]) -> None:
        if done():
            return
        loop = asyncio.get_running_loop()
        mine = (loop, asyncio.Event())
        driver = loop_driver(self._placer)
        self._loops.append(mine)
        if driver is not None:
            driver.attach_loop(loop)
        try:
            while not done():
                await mine[1].wait()
                mine[1].clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._loops.remove(mine)
            if driver is not None:
                driver.detach_loop(loop)
