from __future__ import annotations

import asyncio
import gc
import json
import math
import pathlib
import subprocess
import sys
import threading
import weakref

import pytest

from waiting import wait_until
from zbus import trace
from zbus.trace.args import freeze
from zbus.trace.tracer import COUNTER, FLOW, INSTANT, SPAN, Tracer, set_default_tracer, span_records


@pytest.fixture
def tracer():
    """Give a tracer that records everything and writes nothing."""
    tracer = Tracer("actor", 0)
    tracer.set_level("full")
    with trace.use_tracer(tracer):
        yield tracer


def records(tracer: Tracer) -> list[tuple]:
    """Return all records of a tracer."""
    return [record for ring in tracer.rings() for record in [*span_records(ring.spans), *ring.items]]


def spans(tracer: Tracer) -> list[str]:
    """Return the names of its spans."""
    return [record[1] for record in records(tracer) if record[0] == SPAN]


class Unprintable:
    def __repr__(self) -> str:
        msg = "no repr"
        raise RuntimeError(msg)


def test_a_span_records_its_time_its_category_and_its_args(tracer):
    """A span holds start, end, category and args, with what was set inside."""
    before = tracer.now()
    with trace.span("forward", "compute", step=3) as span:
        span.set(loss=0.5)
    after = tracer.now()
    [(kind, name, category, start, end, args, task)] = records(tracer)
    assert (kind, name, category, args, task) == (SPAN, "forward", "compute", {"step": 3, "loss": 0.5}, None)
    assert before <= start <= end <= after


def test_an_exception_is_noted_and_goes_on(tracer):
    """A span that an exception leaves is recorded with the exception's type, and the exception goes on."""
    with pytest.raises(ValueError), trace.span("step"):
        raise ValueError
    assert records(tracer)[0][5] == {"error": "ValueError"}


@pytest.mark.parametrize("level", ["off", "rpc"])
def test_below_full_nothing_of_the_user_is_recorded(tracer, level):
    """At the levels off and rpc, user spans, instants, counters and flows leave no record."""
    tracer.set_level(level)
    with trace.span("a", x=1) as span:
        span.set(y=2)
    trace.instant("b")
    trace.counter("c", 1)
    trace.flow("d")
    assert records(tracer) == []


def test_a_span_that_is_not_recorded_is_a_span_to_its_user(tracer):
    """Switched off, a span can still be named, told things and left by an exception, also asynchronously."""
    tracer.set_level("off")

    async def work():
        async with trace.span("a") as span:
            span.set(x=1)
            raise KeyError

    with trace.span("b", y=2) as span:
        span.set(x=1)
    assert isinstance(span, trace.Span)
    with pytest.raises(ValueError), trace.span("c"):
        raise ValueError
    with pytest.raises(KeyError):
        asyncio.run(work())
    tracer.set_level("full")
    assert records(tracer) == []


def test_the_tracer_of_the_context_decides_whatever_the_default_does():
    """A context's tracer that is off records nothing while the default records, and the other way round."""
    default, own = Tracer("actor", 0), Tracer("critic", 0)
    set_default_tracer(default)
    try:
        for default_level, own_level in (("full", "off"), ("off", "full"), ("off", "off"), ("full", "full")):
            default.set_level(default_level)
            own.set_level(own_level)
            name = f"{default_level} {own_level}"
            with trace.span(name):
                pass
            with trace.use_tracer(own), trace.span(name):
                pass
        assert spans(default) == ["full off", "full full"]
        assert spans(own) == ["off full", "full full"]
    finally:
        set_default_tracer(None)


def test_a_switch_of_level_holds_at_once_in_every_thread(tracer):
    """The level may change while threads record: before and after it, exactly what it allows is recorded."""
    on, off, stop = threading.Event(), threading.Event(), threading.Event()
    counts: list[int] = []

    def work():
        with trace.use_tracer(tracer), trace.span("before"):
            on.set()
            off.wait(30)
        with trace.span("while off"):
            pass
        counts.append(1)
        stop.wait(30)
        with trace.use_tracer(tracer), trace.span("after"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    on.wait(30)
    tracer.set_level("rpc")
    off.set()
    wait_until(lambda: counts, what="the thread past its second span")
    tracer.set_level("full")
    stop.set()
    thread.join()
    assert spans(tracer) == ["before", "after"]


def test_instants_counters_and_flows_are_records_of_their_own(tracer):
    """Each kind of mark is one record with what it was given."""
    trace.instant("ready", scope="p", batch=7)
    trace.counter("queue", 3)
    trace.counter("memory", used=1, free=2)
    trace.flow("batch-7", "in")
    assert [r[0] for r in records(tracer)] == [INSTANT, COUNTER, COUNTER, FLOW]
    assert records(tracer)[0][4:6] == ("p", {"batch": 7})
    assert [r[3] for r in records(tracer)[1:3]] == [{"value": 3}, {"used": 1, "free": 2}]
    assert records(tracer)[3][1:3] == ("batch-7", "in")


def test_a_full_ring_drops_the_newest_and_counts_them():
    """Beyond the ring's size records are dropped and counted, the older ones stay."""
    tracer = Tracer("actor", 0, ring_size=16)
    tracer.set_level("full")
    with trace.use_tracer(tracer):
        for number in range(20):
            trace.instant(str(number))
    [ring] = tracer.rings()
    assert [r[1] for r in ring.items] == [str(n) for n in range(16)]
    assert ring.lost == 4


def test_recording_never_raises_whatever_the_argument(tracer):
    """Arguments of any kind, also those that cannot be printed, are recorded in some form."""
    with trace.span("odd", a=Unprintable(), b={"x": Unprintable()}, c=object(), d={1, 2}, e=b"\0" * 10, f=1 << 70):
        pass
    args = records(tracer)[0][5]
    assert "not printable" in args["a"]
    assert "not printable" in args["b"]["x"]
    assert args["e"] == "<bytes, 10 bytes>"
    assert args["f"] == str(1 << 70)


class Lying:
    """Says all the wrong things when asked."""

    shape = property(lambda self: 1 / 0)
    dtype = "float?"
    __class__ = property(lambda self: 1 / 0)

    def __len__(self) -> int:
        return -1  # noqa: PLE0303  # that is the lie

    def __iter__(self):
        return iter(int, 1)  # for ever

    def __getattr__(self, name):
        raise MemoryError


class Bottomless(dict):
    def __len__(self) -> int:
        return 10**9

    def items(self):
        return ((number, self) for number in iter(int, 1))


class Wordy:
    def __repr__(self) -> str:
        return "word " * 1_000_000


def test_arguments_of_any_kind_are_recorded_and_written(tmp_path):
    """Whatever a span is given, it is written in some short form, and its neighbours too (row B62)."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    values = [
        Lying(), Bottomless(x=1), Wordy(), deep, numpy.float64("nan"), numpy.datetime64("2026-01-01"),
        numpy.zeros((3, 0)), numpy.array([Unprintable()], object), torch.ones(2, requires_grad=True),
        torch.empty(10**6, device="meta"), torch.bfloat16, torch.Size([1, 2]), 10**5000, -(1 << 63) - 1, b"\xff" * 99,
        bytearray(5), memoryview(b"abc"), range(10**9), {"a": {"b": {"c": {"d": {"e": 1}}}}}, {1, 2}, KeyError(1),
        [[[["x"] * 99] * 99] * 99] * 99, pathlib.Path("/x"), "x" * 10**6, "\ud800", lambda: 1, print, ..., 1j, True,
        NotImplemented, threading.Lock(),
    ]  # fmt: skip
    trace.configure({"root": str(tmp_path), "flush_period_s": 10}, role="actor", rank=0)
    try:
        for number, value in enumerate(values):
            with trace.span("odd", number=number, value=value) as span:
                span.set(again=value)
            trace.instant("odd too", number=number, value=value)
            trace.counter("number", value)
        with trace.span("after"):
            pass
    finally:
        trace.reset()
    text = (tmp_path / "actor" / "traces_0.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    seen = [line["args"]["number"] for line in lines if line["name"].startswith("odd")]
    assert sorted(seen) == sorted([*range(len(values)), *range(len(values))])
    assert any(line["name"] == "after" for line in lines)
    assert lines[-1]["args"]["lost"] == {}
    assert max(map(len, text.splitlines())) < 30_000


def test_an_argument_is_taken_as_it_is_now_and_not_kept_alive(tracer):
    """A list changed later shows what it was, and an object is not held by the trace."""

    class Big:
        pass

    items, big = [1, 2], Big()
    gone = weakref.ref(big)
    with trace.span("a", items=items, big=big):
        pass
    items.append(3)
    del big
    gc.collect()
    assert records(tracer)[0][5]["items"] == [1, 2]
    assert gone() is None


def test_arrays_and_numpy_scalars_become_texts_and_numbers():
    """A numpy scalar is its number; an array is its dtype and shape, its data unread."""
    numpy = pytest.importorskip("numpy")
    assert freeze(numpy.float32(0.5)) == 0.5
    assert freeze(numpy.int64(7)) == 7
    assert freeze(numpy.zeros((2, 3), "f4")) == "ndarray(float32, [2, 3])"
    assert math.isnan(freeze(float("nan")))


def test_frozen_containers_are_bounded_in_width_and_depth():
    """A deep or wide value is cut, also one that contains itself."""
    loop: list = []
    loop.append(loop)
    assert "[...]" in str(freeze(loop))
    assert freeze(list(range(100)))[-1] == "… 68 more"
    assert len(freeze({n: n for n in range(100)})) == 33
    assert len(freeze("x" * 100_000)) < 5000


def test_traced_keeps_the_result_and_the_name(tracer):
    """A traced function is a span per call, named after it or as told."""

    @trace.traced
    def plain(x):
        return x + 1

    @trace.traced("own name", category="io")
    def named():
        return 5

    assert (plain(1), named()) == (2, 5)
    assert plain.__name__ == "plain"
    assert [name.rpartition(".")[2] for name in spans(tracer)] == ["plain", "own name"]


def test_a_traced_coroutine_is_measured_to_its_end(tracer):
    """The span of a coroutine ends when the awaited work has ended."""
    done = []

    @trace.traced("work")
    async def work():
        await asyncio.sleep(0)
        done.append(len(records(tracer)))
        return 3

    assert asyncio.run(work()) == 3
    assert done == [0]
    assert spans(tracer) == ["work"]


def test_a_traced_generator_is_measured_from_first_step_to_exhaustion(tracer):
    """Creating a generator records nothing; the span ends with its last step (row B69)."""

    @trace.traced("gen")
    def gen():
        got = yield 1
        yield got
        return "end"

    steps = gen()
    assert next(steps) == 1
    assert steps.send("sent") == "sent"
    assert spans(tracer) == []
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "end"
    assert spans(tracer) == ["gen"]


def test_a_closed_generator_ends_its_span(tracer):
    """Closing a traced generator early ends its span and runs its cleanup."""
    cleaned = []

    @trace.traced("gen")
    def gen():
        try:
            yield 1
        finally:
            cleaned.append(True)

    steps = gen()
    next(steps)
    steps.close()
    assert cleaned == [True]
    assert spans(tracer) == ["gen"]


def test_a_traced_async_generator_passes_values_errors_and_close(tracer):
    """An async generator behaves as untraced: asend, athrow, aclose; its span covers its life."""
    seen = []

    @trace.traced("agen")
    async def agen():
        try:
            seen.append((yield 1))
            try:
                yield 2
            except KeyError:
                seen.append("thrown")
            yield 3
        finally:
            seen.append("closed")

    async def use():
        steps = agen()
        assert await anext(steps) == 1
        assert await steps.asend("sent") == 2
        assert await steps.athrow(KeyError()) == 3
        assert spans(tracer) == []
        await steps.aclose()
        return [item async for item in agen()]

    assert asyncio.run(use()) == [1, 2, 3]
    assert seen[:3] == ["sent", "thrown", "closed"]
    assert spans(tracer) == ["agen", "agen"]


def test_concurrent_tasks_are_told_apart(tracer):
    """Spans of concurrent asyncio tasks carry their task, so that viewers need not guess (row B70)."""

    async def work(n):
        async with trace.span(f"work {n}"):
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(*(asyncio.create_task(work(n), name=f"T{n}") for n in range(2)))

    asyncio.run(both())
    assert {(r[1], r[6]) for r in records(tracer)} == {("work 0", "T0"), ("work 1", "T1")}


def test_two_roles_in_one_process_keep_their_own_spans():
    """Colocated roles record into their own tracers, each with its own level (row B79)."""
    actor, critic = Tracer("actor", 0), Tracer("critic", 0)
    actor.set_level("full")
    critic.set_level("full")
    with trace.use_tracer(actor), trace.span("outer"), trace.use_tracer(critic), trace.span("inner"):
        pass
    assert (spans(actor), spans(critic)) == (["outer"], ["inner"])


def test_threads_record_without_losing_each_others_spans(tracer):
    """Four threads that record at once lose nothing."""
    trace_default = trace.get_tracer()

    def work():
        with trace.use_tracer(trace_default):
            for _ in range(2000):
                with trace.span("x", n=1):
                    pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans(tracer)) == 8000


def test_the_founding_spellings_record_the_same(tracer):
    """trace_scope, atrace_scope and trace_perf are span and traced under their old names."""

    async def scope():
        async with trace.atrace_scope("b", "io", {"y": 2}):
            pass

    @trace.trace_perf("c", category="comm")
    def function():
        pass

    with trace.trace_scope("a", category="compute", args={"x": 1}):
        pass
    asyncio.run(scope())
    function()
    assert [r[1:3] for r in records(tracer)] == [("a", "compute"), ("b", "io"), ("c", "comm")]
    assert [r[5] for r in records(tracer)] == [{"x": 1}, {"y": 2}, {}]
    trace.instant("d", "io", {"z": 3}, w=4)
    trace.instant("e", category=None, args={"z": 5})
    assert [(r[1], r[2], r[5]) for r in records(tracer)[3:]] == [("d", "io", {"z": 3, "w": 4}), ("e", "misc", {"z": 5})]


def test_the_founding_spellings_of_control(tmp_path):
    """``is_configured``, ``save`` and ``reset`` do what they did."""
    assert not trace.is_configured()
    trace.save()
    trace.configure({"root": str(tmp_path), "flush_period_s": 10, "save_interval": 2}, role="actor", rank=0)
    try:
        assert trace.is_configured()
        trace.instant("x")
        path = tmp_path / "actor" / "traces_0.jsonl"
        trace.save(step=0)
        assert '"x"' not in path.read_text()
        trace.save(step=0, force=True)
        assert '"x"' in path.read_text()
    finally:
        trace.reset()
    assert not trace.is_configured()


def test_importing_the_span_api_loads_nothing_heavy():
    """Tracing costs no import of msgspec, numpy, torch or asyncio until it is configured."""
    code = (
        "import sys, zbus.trace; zbus.trace.span('x');"
        "print([m for m in ('msgspec', 'numpy', 'torch', 'asyncio', 'zmq') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
