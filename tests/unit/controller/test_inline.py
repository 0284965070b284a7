from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import zbus
from controller import Controller
from controller.group import Group
from controller.outcomes import WaitTimeout
from controller.role import Role
from controller.scheduling.inline import InlineRuntime
from waiting import wait_until
from zbus import trace
from zbus.config import load_config
from zbus.engine import AnyOne, Concat, RankZero, Split
from zbus.errors import (
    BatchError,
    CallCancelled,
    CallTimeout,
    ConfigError,
    EngineLoadError,
    NotExecuted,
    OutcomeUnknown,
    RemoteError,
    TransportError,
    ZbusError,
)

log: list[object] = []


class Actor(zbus.Engine):
    def __init__(self, scale=1, fail=""):
        if fail == "init":
            raise ValueError("bad scale")
        self.scale = scale
        self.fail = fail
        self.gate = None

    def setup(self, ctx):
        if self.fail == "setup" and ctx.rank == 1:
            raise OSError(2, "no such file")
        self.ctx = ctx

    def teardown(self):
        log.append(("teardown", self.ctx.rank))

    @zbus.endpoint(Split("dp"), collect=Concat())
    def scaled(self, batch):
        return [item * self.scale for item in batch]

    @zbus.endpoint()
    def note(self, what):
        log.append((self.ctx.rank, what, threading.current_thread().name))
        return self.ctx.rank

    @zbus.endpoint()
    def grow(self, array):
        array += 1
        return array

    @zbus.endpoint()
    def bad(self, kind="ValueError"):
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "exit":
            raise SystemExit(3)
        raise ValueError("bad")

    @zbus.endpoint()
    def unsendable(self):
        return object()

    @zbus.endpoint()
    def where(self):
        return (self.ctx.role, self.ctx.rank, self.ctx.world_size, self.ctx.coords, self.ctx.env.get("COLOUR"))

    @zbus.endpoint(RankZero())
    def count(self, n):
        yield from range(n)

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=3)
    async def generate(self, prompt):
        self.running = getattr(self, "running", 0) + 1
        peak = self.running
        await asyncio.sleep(0.005)
        self.running -= 1
        return prompt, peak, threading.current_thread().name

    @zbus.endpoint(AnyOne(), lane="gen")
    async def forever(self):
        await asyncio.Event().wait()

    @zbus.endpoint(AnyOne(), lane="gen")
    async def tokens(self, n, fail_at=-1):
        for number in range(n):
            if number == fail_at:
                raise ValueError("broken")
            yield number


@pytest.fixture
def bus():
    """An inline runtime, closed after the test."""
    log.clear()
    runtime = InlineRuntime()
    yield runtime
    runtime.close()


def group_of(runtime, **options) -> Group:
    """Start a role of Actor and return its group."""
    return Group(runtime.add("actor", Role(Actor, **{"replicas": 2, **options})), runtime)


def test_sync_endpoints_run_on_the_callers_thread_in_rank_order(bus):
    """A breakpoint in an endpoint stops the program's own thread."""
    group = group_of(bus)
    me = threading.current_thread().name
    assert group.note("x") == [0, 1]
    assert log == [(0, "x", me), (1, "x", me)]


def test_the_context_is_as_on_a_worker(bus):
    """Role, rank, world size, mesh and environment are there."""
    group = group_of(bus, replicas=4, mesh={"dp": 2, "tp": 2}, env={"COLOUR": "red"})
    assert group[3].where() == ("actor", 3, 4, {"dp": 1, "tp": 1}, "red")
    assert "COLOUR" not in os.environ


def test_arguments_and_answers_are_copies(bus):
    """An engine that changes its argument does not change the caller's, as with a real worker."""
    group = group_of(bus)
    array = np.zeros(1000)
    answers = group.grow(array)
    assert array.sum() == 0
    assert [answer.sum() for answer in answers] == [1000, 1000]


def test_what_cannot_be_carried_fails_inline_too(bus):
    """A value the codec refuses is refused in one process as well, both ways."""
    group = group_of(bus)
    with pytest.raises(zbus.CodecError):
        group.note(object())
    with pytest.raises(RemoteError, match="CodecError"):
        group[0].unsendable()


def test_ranks_in_one_process_keep_their_own_traces(tmp_path):
    """Each rank records under its own role and rank, on one clock; levels switch per role (founding case B79)."""
    here = {"sys_path": [str(Path(__file__).parents[2])]}
    roles = {
        "actor": Role("traced_engine:Recording", replicas=2, **here),
        "critic": Role("traced_engine:Recording", **here),
    }
    config = load_config(data={"trace": {"level": "full", "merge": False}}).config
    with Controller.launch("test", roles, root=tmp_path, scheduler="inline", config=config) as bus:
        with trace.span("controller's own"):
            assert bus.group("actor").work(1) == [True, True]
        bus.group("critic").work(1)
        bus.group("critic").later()
        bus.group("critic").beside()
        bus.config_perf_tracer({"level": "off"}, role="critic")
        bus.group("critic").work(2)
        bus.group("actor").work(2)
        bus.save_perf_tracer(2)
        root = bus.trial.traces
    assert trace.tracers() == []
    files = ["controller/traces_0", "actor/traces_0", "actor/traces_1", "critic/traces_0"]
    events = {name: [json.loads(line) for line in (root / f"{name}.jsonl").read_text().splitlines()] for name in files}
    spans = {
        name: sorted(
            f"{e['name']} {e.get('args', {}).get('step', '')}".strip() for e in found if e.get("cat") == "misc"
        )
        for name, found in events.items()
    }
    assert spans == {
        "controller/traces_0": ["controller's own"],
        "actor/traces_0": ["inner 1", "inner 2", "set up"],
        "actor/traces_1": ["inner 1", "inner 2", "set up"],
        "critic/traces_0": ["async", "beside", "inner 1", "set up"],
    }
    for name, found in events.items():
        runs = {e["name"] for e in found if e.get("args", {}).get("kind") == "run"}
        assert ("run work" in runs) == (not name.startswith("controller"))
    metas = [found[0]["args"] for found in events.values()]
    assert len({meta["epoch_mono_ns"] for meta in metas}) == 1
    sessions = (root / "actor" / "sessions_1.jsonl").read_text().splitlines()[1:-1]
    assert [(r["role"], r["rank"]) for r in map(json.loads, sessions)] == [("actor", 1)] * 2


def test_split_and_concat_work_inline(bus):
    """The same declarations hold."""
    assert group_of(bus, args=(10,)).scaled([1, 2, 3]) == [10, 20, 30]


def test_errors_are_those_of_a_worker(bus, capsys):
    """Dual class, rank, remote traceback; several ranks give a BatchError; the traceback is in the log."""
    group = group_of(bus)
    with pytest.raises(ValueError, match="bad") as caught:
        group[1].bad()
    assert isinstance(caught.value, RemoteError)
    assert (caught.value.rank, caught.value.pid) == (1, os.getpid())
    with pytest.raises(BatchError):
        group.bad()
    assert "raise ValueError" in capsys.readouterr().err


def test_system_exit_in_an_endpoint_is_an_answer(bus, capsys):
    """An endpoint cannot end the program by accident."""
    with pytest.raises(RemoteError, match="SystemExit"):
        group_of(bus)[0].bad("exit")


def test_ctrl_c_in_an_endpoint_reaches_the_program(bus, capsys):
    """KeyboardInterrupt is the user's: it is raised where the call was made."""
    group = group_of(bus)
    with pytest.raises(KeyboardInterrupt):
        group[0].bad("interrupt")
    assert group.note("after") == [0, 1]


def test_a_strict_batch_stops_at_the_first_failure(bus, capsys):
    """Calls after the failed one do not run; without strict they do."""
    group = group_of(bus)
    b = group[0].batch(strict=True)
    first, later = b.bad(), b.note("later")
    b.submit()
    assert isinstance(first.exception(), ValueError)
    assert isinstance(later.exception(), NotExecuted)
    assert log == []
    b = group[0].batch()
    first, later = b.bad(), b.note("later")
    b.submit()
    assert isinstance(first.exception(), ValueError)
    assert later.result() == 0


def test_async_endpoints_share_one_loop_and_keep_their_concurrency(bus):
    """No more calls of a lane run at once on a rank than declared; all on its loop thread."""
    group = group_of(bus)
    answers = list(group[0].generate.map(range(9), max_in_flight=9))
    assert [prompt for prompt, *_ in answers] == list(range(9))
    assert max(peak for _, peak, _ in answers) == 3
    assert {name for *_, name in answers} == {"zbus-async"}


def test_streams_flow_with_credit(bus):
    """More items than the window arrive in order, from async and sync generators."""
    group = group_of(bus)
    assert list(group.tokens.stream(200)) == list(range(200))
    assert list(group.count.stream(200)) == list(range(200))
    assert group.tokens(3) == [0, 1, 2]
    assert group.count(3) == [0, 1, 2]


def test_a_stream_that_breaks_delivers_first(bus, capsys):
    """Items before the error arrive, then the error."""
    stream = group_of(bus).tokens.stream(5, fail_at=2)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(stream)


def test_calls_from_a_running_loop(bus):
    """Sync, aio, stream and map calls work inside a running loop (B46)."""
    group = group_of(bus)

    async def main():
        sync = group.note("sync")
        streamed = [item async for item in group.tokens.stream(100)]
        mapped = [prompt for prompt, *_ in await group.generate.map(range(4))]
        return sync, await group.note.aio("aio"), streamed == list(range(100)), mapped

    assert asyncio.run(main()) == ([0, 1], [0, 1], True, [0, 1, 2, 3])


def test_deadlines_hold_for_async_calls(bus):
    """A call that never ends is settled at its deadline, also when nobody waits."""
    future = group_of(bus).forever.options(deadline=0.05).submit()
    wait_until(future.done, what="the deadline")
    with pytest.raises(CallTimeout, match="it may have run"):
        future.result()


def test_waiting_names_what_runs(bus):
    """A wait that runs out tells where the call is."""
    future = group_of(bus).forever.submit()
    with pytest.raises(WaitTimeout, match=r"rank [01] running"):
        future.result(timeout=0.05)
    assert future.outcomes()[0].state == "running"


def test_cancel_drops_what_waits_and_tells_what_runs(bus, capsys):
    """A queued call never runs; a running one is cancelled on its loop."""
    one = group_of(bus)[0]
    running = [one.forever.submit() for _ in range(3)]
    queued = one.forever.submit()
    queued.cancel()
    assert isinstance(queued.exception(timeout=10), CallCancelled)
    for future in running:
        future.cancel()
    assert all(isinstance(future.exception(timeout=10), CallCancelled) for future in running)
    assert one.generate("x")[0] == "x"


def test_calls_from_two_threads_keep_their_order(bus):
    """Each thread's calls run in its order."""
    group = group_of(bus)

    def caller(name: str) -> None:
        for number in range(50):
            group.note((name, number))

    threads = [threading.Thread(target=caller, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in (0, 1):
        for name in "ab":
            assert [w[1] for r, w, _ in log if r == rank and w[0] == name] == list(range(50))


@pytest.mark.parametrize(("fail", "cls"), [("init", ValueError), ("setup", OSError)])
def test_a_failing_engine_names_its_rank(bus, fail, cls):
    """Constructor and setup errors are raised as from a worker, with the original as cause."""
    with pytest.raises(cls) as caught:
        group_of(bus, kwargs={"fail": fail})
    assert isinstance(caught.value, RemoteError)
    assert caught.value.method == "setup"
    assert isinstance(caught.value.__cause__, cls)


def test_a_missing_engine_is_explained(bus):
    """A path without an engine is an EngineLoadError, a bad mesh a ConfigError."""
    with pytest.raises(EngineLoadError):
        bus.add("actor", Role("no_such_module:Actor"))
    with pytest.raises(ConfigError):
        group_of(bus, replicas=3, mesh={"dp": 2})


def test_close_tears_down_in_reverse_and_settles_what_is_open():
    """Engines end last-made first; open calls get an outcome; later calls are refused."""
    log.clear()
    runtime = InlineRuntime()
    group = group_of(runtime)
    open_call = group.forever.submit()
    runtime.close()
    runtime.close()
    assert log == [("teardown", 1), ("teardown", 0)]
    assert isinstance(open_call.exception(timeout=10), OutcomeUnknown)
    with pytest.raises(TransportError, match="closed"):
        group.note("x")
    assert isinstance(open_call.exception(), ZbusError)
