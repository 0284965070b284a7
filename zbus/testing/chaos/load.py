"""The callers of the soak: threads and one event loop that call in every way and write down what they were answered."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from controller import Controller
from controller.futures import BatchFuture
from controller.group import Group
from zbus.errors import CallError, RefLostError, ZbusError
from zbus.testing.chaos.history import Answer, History, Op
from zbus.testing.chaos.keeping import Keeping
from zbus.testing.chaos.subject import Payload, sum_of

__all__ = ["GRACE_S", "Load"]

log = logging.getLogger("zbus.soak")

GRACE_S: Final = 8.0
"""Seconds beyond a call's deadline by which all its outcomes must be there."""

_DEADLINE_S: Final = 20.0
_SIZES: Final = (0, 0, 0, 10, 100, 1000, 20_000, 100_000)
_BIG: Final = 3_000_000
_ARRAY_FROM: Final = 1 << 16
_LOOK_S: Final = 0.003
_HELD: Final = 6
"""How many payloads that came back a caller holds."""


class _Caller:
    """One caller: its own random choices, its own rising call ids."""

    def __init__(self, name: str, group: Group, history: History, seed: str) -> None:
        self.name = name
        self.group = group
        self.history = history
        self.chance = random.Random(seed)  # noqa: S311  # a workload, not secrets
        self._numbers = itertools.count()
        self._data = self.chance.randbytes(_BIG + 16)
        self._held: deque[tuple[Payload, int]] = deque()

    # -- choices -----------------------------------------------------------------------------------------------------

    def payload(self) -> Payload:
        """Return some bytes, seldom many; of many, half as an array, which goes through shared memory in place."""
        size = _BIG if self.chance.random() < 0.005 else self.chance.choice(_SIZES)
        start = self.chance.randrange(16)
        data = self._data[start : start + size]
        return np.frombuffer(data, np.uint8) if size >= _ARRAY_FROM and self.chance.random() < 0.5 else data

    def seconds(self) -> float:
        """Return how long a method takes: mostly nothing."""
        return self.chance.choice((0.0, 0.0, 0.0, 0.0, 0.001, 0.005, 0.02))

    def rank(self) -> int:
        """Return a rank."""
        return self.chance.randrange(len(self.group))

    def op(self, shape: str, effect: str, deadline_s: float = _DEADLINE_S, **fields: Any) -> Op:
        """Begin a record."""
        number = next(self._numbers)
        return Op(
            call=f"{self.name}.{number}",
            shape=shape,
            effect=effect,
            thread=self.name,
            number=number,
            began=time.monotonic(),
            ended=0.0,
            limit_s=deadline_s + GRACE_S,
            answers=[],
            **fields,
        )

    # -- submitting --------------------------------------------------------------------------------------------------

    def submit(self, op: Op, start: Callable[[], BatchFuture[Any]], ranks: Sequence[int]) -> BatchFuture[Any] | None:
        """Submit a call; a refusal is its outcome."""
        try:
            return start()
        except CallError as error:
            self.refused(op, error, ranks)
            return None

    def refused(self, op: Op, error: CallError, ranks: Sequence[int]) -> None:
        """Record that nothing was sent."""
        op.answers = [Answer(rank, error.outcome or "", f"refused: {error}") for rank in ranks]
        self.write(op)

    def write(self, op: Op) -> None:
        """End a record."""
        op.ended = time.monotonic()
        self.history.add(op)

    def record(self, op: Op, future: BatchFuture[Any], value: object, *, any_one: bool = False) -> None:
        """Record what a settled future, or one that hangs, says of each rank."""
        results: Mapping[int, Any] = future.results()
        op.answers = [
            Answer(
                rank=-1 if any_one else one.rank,
                outcome=one.outcome or "",
                cause="" if one.outcome == "OK" else one.state,
                right=one.outcome != "OK" or self._is(results.get(one.rank), value),
            )
            for one in future.outcomes()
        ]
        self.write(op)

    def _is(self, result: object, value: object) -> bool:
        """Tell whether a result, or its sum, is ``value``; arrays are held a while, to see that nobody writes there.

        Their ranks may have died since, and their memory may have been lent again.
        """
        if not isinstance(result, bytes | np.ndarray):
            return result == value
        found = sum_of(result)
        self._held.append((result, found))
        kept, was = self._held.popleft() if len(self._held) > _HELD else (result, found)
        return found == value and sum_of(kept) == was

    def settle(self, op: Op, future: BatchFuture[Any], value: object, *, any_one: bool = False) -> None:
        """Wait for all outcomes, at most until the limit, and record them."""
        until = op.began + op.limit_s
        try:
            future.exception(max(0.01, until - time.monotonic()))
        except CallError as error:  # the time is over: the record shows what is missing
            op.note = str(error)
        while not future.done() and time.monotonic() < until:
            time.sleep(_LOOK_S)  # a call that failed on one rank is told at once, and its other ranks end later
        self.record(op, future, value, any_one=any_one)


class _ThreadCaller(_Caller):
    """Calls that block."""

    def __init__(self, name: str, bus: Controller, group: Group, history: History, seed: str) -> None:
        super().__init__(name, group, history, seed)
        self._keeping = Keeping(bus, group, self.chance, self.take, _DEADLINE_S)

    def step(self) -> None:
        """Make one call, or a few that belong together."""
        steps = (
            *(self.blocking, self.single, self.pipeline, self.everyone, self.batch),
            *(self.any, self.stream, self.cancel, self.late, self.chance.choice(self._keeping.steps)),
        )
        self.chance.choices(steps, (3, 2, 2, 3, 2, 3, 1, 1, 1, 3))[0]()

    def blocking(self) -> None:
        """One rank, by a plain call that waits: its outcome is its value or its error."""
        effect = self.chance.choice(("once", "idempotent"))
        op, payload, rank = self.op("blocking", effect, ordered=True), self.payload(), self.rank()
        method = getattr(self.group[rank], effect).options(deadline=_DEADLINE_S)
        try:
            value = method(op.call, self.seconds(), payload)
        except CallError as error:
            op.answers = [Answer(rank, error.outcome or "", f"{error.reason}: {error}")]
        else:
            op.answers = [Answer(rank, "OK", right=value == sum_of(payload))]
        self.write(op)

    def single(self) -> None:
        """One rank, ``once`` or ``idempotent``."""
        effect = self.chance.choice(("once", "idempotent"))
        op = self.op("single", effect, ordered=True)
        payload, rank, seconds = self.payload(), self.rank(), self.seconds()
        method = getattr(self.group[rank], effect).options(deadline=_DEADLINE_S)
        future = self.submit(op, lambda: method.submit(op.call, seconds, payload), [rank])
        if future is not None:
            self.settle(op, future, sum_of(payload))

    def pipeline(self) -> None:
        """Many calls to one rank, none waited for before all are submitted."""
        rank = self.rank()
        method = self.group[rank].once.options(deadline=_DEADLINE_S)
        out = []
        for _ in range(self.chance.randrange(4, 48)):
            op, payload, seconds = self.op("pipeline", "once", ordered=True), self.payload(), self.seconds()
            fail = self.chance.random() < 0.05
            future = self.submit(op, lambda c=op.call, s=seconds, p=payload, f=fail: method.submit(c, s, p, f), [rank])  # type: ignore[misc]
            if future is not None:
                out.append((op, future, payload))
        for op, future, payload in out:
            self.settle(op, future, sum_of(payload))

    def everyone(self) -> None:
        """All ranks."""
        op = self.op("everyone", "once", wanted=len(self.group), ordered=True)
        payload, seconds, fail = self.payload(), self.seconds(), self.chance.random() < 0.03
        method = self.group.once.options(deadline=_DEADLINE_S)
        future = self.submit(op, lambda: method.submit(op.call, seconds, payload, fail), self.group.ranks)
        if future is not None:
            self.settle(op, future, sum_of(payload))

    def batch(self) -> None:
        """Several calls to all ranks or one, placed at once; sometimes strict, sometimes with one that fails."""
        one = self.chance.random() < 0.4
        group = self.group[[self.rank()]] if one else self.group
        strict = self.chance.random() < 0.5
        batch = group.batch(strict=strict, deadline=_DEADLINE_S)
        size = self.chance.randrange(2, 9)
        bad = self.chance.randrange(size) if self.chance.random() < 0.2 else -1
        ops = []
        for number in range(size):
            op = self.op("strict" if strict else "batch", "once", wanted=len(group), ordered=True)
            payload = self.payload()
            batch.once(op.call, self.seconds(), payload, number == bad)
            ops.append((op, payload))
        try:
            futures = batch.submit()
        except CallError as error:
            for op, _ in ops:
                self.refused(op, error, group.ranks)
            return
        for (op, payload), future in zip(ops, futures, strict=True):
            self.settle(op, future, sum_of(payload))

    def any(self) -> None:
        """Several calls that any rank may run, also another one."""
        out = []
        endpoint = self.group.echo if self.chance.random() < 0.4 else self.group.pure
        method = endpoint.options(deadline=_DEADLINE_S, retries=self.chance.choice((0, 2, 5)))
        for _ in range(self.chance.randrange(1, 24)):
            op, payload, seconds = self.op("any", "pure"), self.payload(), self.seconds()
            future = self.submit(op, lambda c=op.call, s=seconds, p=payload: method.submit(c, s, p), [-1])  # type: ignore[misc]
            if future is not None:
                out.append((op, future, payload))
        for op, future, payload in out:
            self.settle(op, future, sum_of(payload), any_one=True)

    def stream(self) -> None:
        """The items of one call."""
        op, upto, got = self.op("stream", "pure"), self.chance.randrange(1, 200), []
        outcome, cause = "OK", ""
        try:
            for item in self.group.items.options(deadline=_DEADLINE_S).stream(op.call, upto):
                got.append(item)  # noqa: PERF402  # what came before an error counts too
        except CallError as error:
            outcome, cause = error.outcome or "", f"{error.reason}: {error}"
        right = got == list(range(upto if outcome == "OK" else len(got)))
        op.answers = [
            Answer(-1, outcome, cause if right else f"{outcome}: {len(got)} items of {upto}: {got}"[:500], right)
        ]
        self.write(op)

    def cancel(self) -> None:
        """Calls that are cancelled while they wait or run."""
        rank = self.rank()
        method = self.group[rank].once.options(deadline=_DEADLINE_S)
        out = []
        for _ in range(6):
            op = self.op("cancel", "once", ordered=True)
            future = self.submit(op, lambda c=op.call: method.submit(c, 0.01, b""), [rank])  # type: ignore[misc]
            if future is not None:
                out.append((op, future))
        time.sleep(self.chance.random() * 0.03)
        for _, future in out:
            future.cancel()
        for op, future in out:
            self.settle(op, future, sum_of(b""))

    def take(self, rank: int, given: Any, value: Any) -> None:
        """Give a rank what others keep: whoever kept it may have died, and then the call did not start."""
        op = self.op("kept", "once", ordered=True)
        method = self.group[rank].once.options(deadline=_DEADLINE_S)
        try:
            found = method(op.call, self.seconds(), given)
        except (CallError, RefLostError) as error:
            outcome, reason = getattr(error, "outcome", ""), getattr(error, "reason", "lost")
            op.answers = [Answer(rank, outcome or "", f"{reason}: {error}")]
        else:
            op.answers = [Answer(rank, "OK", right=found == sum_of(value))]
        self.write(op)

    def late(self) -> None:
        """A call whose deadline may pass before it starts, or while it runs."""
        deadline_s = self.chance.choice((0.01, 0.05, 0.2))
        op = self.op("late", "once", deadline_s, ordered=True)
        rank, seconds = self.rank(), self.chance.choice((0.0, 0.05, 0.1))
        method = self.group[rank].once.options(deadline=deadline_s)
        future = self.submit(op, lambda: method.submit(op.call, seconds, b""), [rank])
        if future is not None:
            self.settle(op, future, sum_of(b""))


class _LoopCaller(_Caller):
    """Calls that are awaited, several at a time."""

    async def run(self, stop: threading.Event) -> None:
        """Call until told to stop."""
        while not stop.is_set():
            await asyncio.gather(*(self.one() for _ in range(self.chance.randrange(1, 8))))
            await asyncio.sleep(self.chance.random() * 0.01)

    async def one(self) -> None:
        """One call of any kind."""
        effect = self.chance.choice(("once", "idempotent", "pure"))
        op, payload, seconds = self.op("await", effect), self.payload(), self.seconds()
        rank = -1 if effect == "pure" else self.rank()
        target = self.group if rank < 0 else self.group[rank]
        method = getattr(target, effect).options(deadline=_DEADLINE_S)
        future = self.submit(op, lambda: method.submit(op.call, seconds, payload), [rank])
        if future is None:
            return
        until = op.began + op.limit_s
        try:
            async with asyncio.timeout(op.limit_s):
                await future
        except (CallError, TimeoutError, ValueError) as error:  # the record tells
            op.note = type(error).__name__
        while not future.done() and time.monotonic() < until:  # noqa: ASYNC110  # nothing signals the last rank's end
            await asyncio.sleep(_LOOK_S)
        self.record(op, future, sum_of(payload), any_one=rank < 0)


class Load:
    """All callers. ``start`` them, ``stop`` them; ``errors`` holds what a caller died of, which must be nothing.

    Args:
        bus: Whose callers they are.
        group: The role of subjects.
        history: Where they write.
        seed: Of their choices.
        threads: Callers that block; one more awaits.
    """

    def __init__(self, bus: Controller, group: Group, history: History, seed: int, *, threads: int = 5) -> None:
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(f"soak-t{number}", job), name=f"soak-t{number}", daemon=True)
            for number, job in enumerate(
                [
                    *(
                        self._blocking(_ThreadCaller(f"t{number}", bus, group, history, f"{seed}.t{number}"))
                        for number in range(threads)
                    ),
                    self._awaiting(_LoopCaller("a0", group, history, f"{seed}.a0")),
                ]
            )
        ]

    def start(self) -> None:
        """Let them call."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> list[str]:
        """Let them finish what they are at; return the names of those that did not within ``timeout_s``."""
        self._stop.set()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _guard(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a caller that dies must fail the run, not thin it out
            log.exception("caller %s died", name)
            told = error.args[0] if isinstance(error, ZbusError) and error.args else error
            self.errors.append(f"{name}: {type(error).__name__}: {told}")

    def _blocking(self, caller: _ThreadCaller) -> Callable[[], None]:
        def run() -> None:
            while not self._stop.is_set():
                caller.step()
                time.sleep(caller.chance.random() * 0.004)

        return run

    def _awaiting(self, caller: _LoopCaller) -> Callable[[], None]:
        return lambda: asyncio.run(caller.run(self._stop))
