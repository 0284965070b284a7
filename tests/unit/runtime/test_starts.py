"""When calls whose arguments come from elsewhere begin, and that they do not where nobody wants them any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import zbus
from waiting import scaled, wait_until
from zbus.codec import Ref, encode
from zbus.data.desk import refs_in
from zbus.engine import endpoints_of
from zbus.errors import CodecError, RefLostError
from zbus.protocol.messages import Buffers, CancelRunning, Execute, Kind, Status
from zbus.runtime.async_lanes import AsyncLanes
from zbus.runtime.executor import Executor
from zbus.runtime.stopping import stop_if_cancelled

SESSION = b"session-16-bytes"
NS = 1_000_000_000


class Answers:
    """Takes answers, and keeps what each call was told."""

    def __init__(self) -> None:
        self.told: dict[int, str] = {}

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        assert request.seq + index not in self.told, "each call is answered once"
        self.told[request.seq + index] = Status(status).name

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        raise AssertionError


class SlowRefs:
    """Values that come when the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.checked_on: list[str] = []
        self.gone = False

    def fill(self, value: Any, deadline_ns: int | None) -> Any:
        self.asked.set()
        if self.gone and list(refs_in(value)):
            raise RefLostError("actor/1 no longer has it")
        if self.gone:
            return value
        assert self.gate.wait(scaled(20))
        return [["weights"], {}]

    def check(self) -> None:
        self.checked_on.append(threading.current_thread().name)

    def keep(self, value: Any, session: bytes, claim: int, method: str) -> Any:
        return None


class Works(zbus.Engine):
    """Writes down what begins."""

    def __init__(self) -> None:
        self.began: list[Any] = []
        self.gate = threading.Event()

    @zbus.endpoint(lane="rollout")
    def occupy(self) -> None:
        self.began.append("occupy")
        assert self.gate.wait(scaled(20))

    @zbus.endpoint(lane="rollout")
    async def load(self, what: Any) -> None:
        self.began.append(what)

    @zbus.endpoint(lane="rollout")
    def load_beside(self, what: Any) -> None:
        self.began.append(what)

    @zbus.endpoint(lane="aside", concurrency=64)
    async def to_thread(self, what: Any) -> None:
        self.began.append(what)
        await asyncio.to_thread(self.gate.wait, scaled(20))

    @zbus.endpoint()
    def load_main(self, what: Any) -> None:
        self.began.append(what)


class Bench:
    """An executor whose handles are filled slowly."""

    def __init__(self) -> None:
        self.answers, self.refs, self.engine = Answers(), SlowRefs(), Works()
        self.executor = Executor(name="actor/0", incarnation=1, answers=self.answers, builtins={}, refs=self.refs)
        self.executor.install(self.engine, endpoints_of(Works))

    @property
    def lanes(self) -> AsyncLanes:
        assert self.executor.async_lanes is not None
        return self.executor.async_lanes

    def request(self, seq: int, *calls: list[Any], lane: str = "rollout", deadline_ns: int | None = None) -> Execute:
        return Execute(SESSION, lane, seq, len(calls), encode(list(calls)), deadline_ns, 0, False, 1, 0, 1)

    def told(self, calls: int) -> list[str]:
        """Wait until so many calls are answered, and return what they were told, by seq."""
        wait_until(lambda: len(self.answers.told) == calls, what="the answers")
        return [self.answers.told[seq] for seq in sorted(self.answers.told)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Give one."""
    made = Bench()
    yield made
    made.refs.gate.set()
    made.executor.close()


def ref() -> Ref:
    """Return a handle of a value elsewhere."""
    return Ref(
        role="actor", rank=1, incarnation=1, generation=1, number=1, memory="", endpoints={}, nbytes=8, rows=None,
        lengths=None, method="make", about="",
    )  # fmt: skip


@pytest.mark.parametrize("method", ["load", "load_beside"])
def test_on_an_async_lane_calls_begin_in_order_though_the_first_waits_for_its_arguments(
    bench: Bench, method: str
) -> None:
    """``load(ref)`` and then ``load(1)``: the second does not overtake the first; a third neither."""
    bench.executor.dispatch(bench.request(0, [method, [ref()], {}]))
    bench.executor.dispatch(bench.request(1, ["load", ["second"], {}]))
    bench.executor.dispatch(bench.request(2, ["load", [ref()], {}], ["load", ["third"], {}]))
    bench.executor.dispatch(bench.request(4, ["missing", [ref()], {}]))
    assert bench.refs.asked.wait(scaled(20))
    loop = bench.lanes.loop
    for _ in range(5):  # rounds of the loop in which the second could begin
        passed = threading.Event()
        loop.call_soon_threadsafe(passed.set)
        assert passed.wait(scaled(20))
    assert bench.engine.began == []
    bench.refs.gate.set()
    assert bench.told(5) == ["OK", "OK", "OK", "OK", "NOT_STARTED"]
    wait_until(lambda: len(bench.engine.began) == 4)
    if method == "load":  # a thread's first step may come late
        assert bench.engine.began[:2] == ["weights", "second"]
    assert not bench.lanes.behind


def test_a_call_that_is_cancelled_while_its_arguments_come_has_not_begun(bench: Bench) -> None:
    """On an async lane it is told at once, and lets those behind it begin."""
    bench.executor.dispatch(bench.request(0, ["load", [ref()], {}]))
    bench.executor.dispatch(bench.request(1, ["load", ["second"], {}]))
    assert bench.refs.asked.wait(scaled(20))
    bench.executor.cancel(CancelRunning(SESSION, "rollout", 0))
    assert bench.told(2) == ["CANCELLED", "OK"]
    bench.refs.gate.set()
    assert bench.engine.began == ["second"]


@pytest.mark.parametrize("why", ["CANCELLED", "EXPIRED"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_call_of_the_main_lane_that_nobody_wants_when_its_arguments_are_there_does_not_begin(
    bench: Bench, why: str, calls: int
) -> None:
    """Cancelled or too late meanwhile, alone and in a batch."""
    deadline_ns = time.monotonic_ns() + NS // 2 if why == "EXPIRED" else None
    request = bench.request(0, *[["load_main", [ref()], {}]] * calls, lane="main", deadline_ns=deadline_ns)
    thread = threading.Thread(target=bench.executor.run_main, args=(request,))
    thread.start()
    wait_until(lambda: bench.refs.asked.is_set() or bench.answers.told, what="the first call to want its arguments")
    if deadline_ns is None:
        bench.executor.cancel(CancelRunning(SESSION, "main", 0))
    else:
        wait_until(lambda: time.monotonic_ns() > deadline_ns, what="the deadline")
    bench.refs.gate.set()
    thread.join(scaled(20))
    assert bench.told(calls) == [why] * calls
    assert bench.engine.began == []
    assert not bench.executor._answering.unwanted


def test_an_async_call_whose_arguments_come_too_late_does_not_begin(bench: Bench) -> None:
    """Its deadline passes meanwhile."""
    deadline_ns = time.monotonic_ns() + NS // 2
    bench.executor.dispatch(bench.request(0, ["load", [ref()], {}], deadline_ns=deadline_ns))
    wait_until(lambda: time.monotonic_ns() > deadline_ns, what="the deadline")
    bench.refs.gate.set()
    assert bench.told(1) == ["EXPIRED"]
    assert bench.engine.began == []


def test_a_call_whose_result_is_kept_and_has_no_handles_changes_no_thread(bench: Bench) -> None:
    """Whether there is room is asked on the loop."""
    bench.executor.dispatch(bench.request(0, ["load", [1], {}, {"keep": 1}]))
    assert bench.told(1) == ["OK"]
    assert bench.refs.checked_on == ["zbus-async"]


@pytest.mark.parametrize("method", ["load_main", "load", "load_beside"])
def test_a_call_whose_handle_is_lost_was_not_started_and_says_so(bench: Bench, method: str) -> None:
    """NOT_STARTED on every kind of lane, alone and within a batch, whose other calls go on."""
    bench.refs.gone = True
    lane = "main" if method == "load_main" else "rollout"
    run = bench.executor.run_main if lane == "main" else bench.executor.dispatch
    run(bench.request(0, [method, [ref()], {}], lane=lane))
    run(bench.request(1, [method, [ref()], {}], [method, ["free"], {}], lane=lane))
    assert bench.told(3) == ["NOT_STARTED", "NOT_STARTED", "OK"]
    assert bench.engine.began == ["free"]


class NoArrays:
    """Arrays that never come."""

    def must_pull(self, frames: Buffers) -> bool:
        return True

    def opened(self, frames: Buffers, session: bytes, deadline_s: float | None, begun: Any) -> Buffers:
        raise CodecError("8 bytes could not be pulled from tcp://10.0.0.1:9")

    def keeper(self, session: bytes) -> None:
        return None


@pytest.mark.parametrize("method", ["load_main", "load"])
def test_calls_whose_arrays_do_not_come_were_not_started_and_say_so(bench: Bench, method: str) -> None:
    """All calls of the request: none of them can be read."""
    bench.executor._intake._arrays = NoArrays()
    lane = "main" if method == "load_main" else "rollout"
    (body,) = encode([[method, [1], {}]] * 2)
    request = Execute(SESSION, lane, 0, 2, [body, b"x" * 600], None, 0, False, 1, 0, 1)
    (bench.executor.run_main if lane == "main" else bench.executor.dispatch)(request)
    assert bench.told(2) == ["NOT_STARTED", "NOT_STARTED"]
    assert bench.engine.began == []


def occupied(bench: Bench) -> int:
    """Have every thread for sync endpoints of async lanes busy; return how many calls that took."""
    pool = bench.executor.pools.of("zbus.beside")
    for seq in range(pool._max_workers):
        bench.executor.dispatch(bench.request(seq, ["occupy", [], {}]))
    wait_until(lambda: len(bench.engine.began) == pool._max_workers, what="all threads to be busy")
    return pool._max_workers


def test_a_sync_call_of_an_async_lane_that_is_cancelled_while_no_thread_is_free_does_not_begin(bench: Bench) -> None:
    """It is told at once; the calls behind it in its batch likewise."""
    busy = occupied(bench)
    bench.executor.dispatch(bench.request(busy, ["load_beside", [1], {}], ["load_beside", [2], {}]))
    wait_until(lambda: (SESSION, "rollout", busy) in bench.lanes.tasks, what="the call to wait for a thread")
    wait_until(lambda: bench.executor.pools.made["zbus.beside"]._work_queue.qsize() == 1)
    bench.executor.cancel(CancelRunning(SESSION, "rollout", busy))
    assert bench.told(2) == ["CANCELLED", "CANCELLED"]
    bench.engine.gate.set()
    assert bench.told(busy + 2)[:busy] == ["OK"] * busy
    assert bench.engine.began == ["occupy"] * busy


def test_a_sync_call_of_an_async_lane_whose_deadline_passes_while_no_thread_is_free_does_not_begin(
    bench: Bench,
) -> None:
    """What expires in a queue is never started."""
    busy = occupied(bench)
    deadline_ns = time.monotonic_ns() + NS // 5
    bench.executor.dispatch(bench.request(busy, ["load_beside", [1], {}], deadline_ns=deadline_ns))
    wait_until(lambda: time.monotonic_ns() > deadline_ns, what="the deadline")
    bench.engine.gate.set()
    assert bench.told(busy + 1) == ["OK"] * busy + ["EXPIRED"]
    assert bench.engine.began == ["occupy"] * busy


class Patient:
    """Waits for a value for ever, as for an owner that is stopped, and looks up now and then."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.ended = threading.Event()

    def fill(self, value: Any, deadline_ns: int | None) -> Any:
        self.asked.set()
        try:
            while True:
                stop_if_cancelled()
                time.sleep(0.001)  # as a look at sockets that bring nothing
        finally:
            self.ended.set()

    def check(self) -> None: ...

    def keep(self, value: Any, session: bytes, claim: int, method: str) -> Any: ...


@pytest.mark.parametrize("method", ["load_main", "load", "load_beside"])
def test_a_cancel_ends_the_wait_for_a_value(bench: Bench, method: str) -> None:
    """The call is CANCELLED, not begun, and no thread goes on waiting; what is behind it begins."""
    refs = bench.executor._steps.refs = Patient()
    lane = "main" if method == "load_main" else "rollout"
    request = bench.request(0, [method, [ref()], {}], lane=lane)
    behind = bench.request(1, [method, ["free"], {}], lane=lane)

    def serve() -> None:
        for one in (request, behind):
            (bench.executor.run_main if lane == "main" else bench.executor.dispatch)(one)

    thread = threading.Thread(target=serve)
    thread.start()
    assert refs.asked.wait(scaled(20))
    bench.executor.cancel(CancelRunning(SESSION, lane, 0))
    assert bench.told(2) == ["CANCELLED", "OK"]
    assert refs.ended.wait(scaled(20))
    thread.join(scaled(20))
    assert bench.engine.began == ["free"]


def test_an_engine_whose_own_threads_are_all_busy_gets_its_arguments(bench: Bench) -> None:
    """What waits for handles takes no thread of ``asyncio.to_thread``, and waits for none."""
    for seq in range(64):  # more than the loop's pool has
        bench.executor.dispatch(bench.request(seq, ["to_thread", [seq], {}], lane="aside"))
    wait_until(lambda: len(bench.engine.began) == 64, what="the engine's threads to be taken")
    bench.executor.dispatch(bench.request(100, ["load", [ref()], {}]))
    assert bench.refs.asked.wait(scaled(20)), "it waits for a thread of the engine's"
    bench.refs.gate.set()
    wait_until(lambda: bench.answers.told == {100: "OK"}, what="the call to run")
    bench.engine.gate.set()
    wait_until(lambda: len(bench.answers.told) == 65, what="the engine's calls to end")
