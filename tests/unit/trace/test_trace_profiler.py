from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from zbus import trace

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's profiler warns of its own future


@pytest.fixture(autouse=True)
def _no_tracer_left():
    yield
    trace.reset()


def begin(root: Path, *steps: int) -> Path:
    """Configure actor/0 to profile these steps; return its file."""
    trace.configure({"root": str(root), "profile_steps": list(steps)}, role="actor", rank=0)
    return root / "actor" / "traces_0.jsonl"


def events(path: Path) -> list[dict]:
    """Write everything and return the events of the file."""
    trace.reset()
    return [json.loads(line) for line in path.read_text().splitlines()]


def work() -> None:
    """Do something the profiler sees."""
    with torch.profiler.record_function("user_op"):
        torch.mm(torch.ones(32, 32), torch.ones(32, 32))


def test_a_listed_step_is_profiled_on_the_trace_s_clock(tmp_path: Path):
    """Profiler events lie inside the span they ran in, on rows of their own; other steps have none."""
    path = begin(tmp_path, 1)
    for step in range(3):
        with trace.trace_scope("train", "compute", {"global_step": step}, enable_profiler=True), trace.span("inner"):
            work()
            time.sleep(0.002)
    found = events(path)
    spans = [e for e in found if e["name"] == "train"]
    assert [e["args"].get("profiled", 0) > 0 for e in spans] == [False, True, False]
    assert spans[1]["args"]["profiler_clock_bound_ns"] < 200_000
    inner = [e for e in found if e["name"] == "inner"][1]
    ops = [e for e in found if e["ph"] == "X" and e["name"] in ("aten::mm", "user_op")]
    assert {e["name"] for e in ops} == {"aten::mm", "user_op"}
    slack = spans[1]["args"]["profiler_clock_bound_ns"] / 1000 + 1
    for op in ops:
        assert inner["ts"] - slack <= op["ts"]
        assert op["ts"] + op["dur"] <= inner["ts"] + inner["dur"] + slack
    rows = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert all(rows[op["tid"]].startswith("profiler: thread") for op in ops)
    assert not any(e["name"] == "zbus.clock" for e in found)


def test_the_step_may_stand_at_an_enclosing_scope(tmp_path: Path):
    """A scope without a step of its own is profiled at the step of the scope around it."""
    path = begin(tmp_path, 5)
    for step in (4, 5):
        outer = trace.trace_scope("step", None, {"global_step": step})
        with outer, trace.trace_scope("forward", enable_profiler=True):
            work()
    profiled = [e["args"].get("profiled", 0) > 0 for e in events(path) if e["name"] == "forward" and "args" in e]
    assert profiled == [True]


def test_two_scopes_at_once_never_profile_at_once(tmp_path: Path):
    """Threads, tasks and nested scopes at once: one has the profiler, the others are noted as skipped (row B63)."""
    path = begin(tmp_path, 0)
    inside = threading.Barrier(3, timeout=30)

    def thread() -> None:
        with trace.trace_scope("threads", None, {"global_step": 0}, enable_profiler=True):
            inside.wait()
            work()
            inside.wait()

    threads = [threading.Thread(target=thread) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    async def task() -> None:
        async with trace.atrace_scope("tasks", None, {"global_step": 0}, enable_profiler=True):
            await asyncio.sleep(0.01)
            work()

    async def main() -> None:
        await asyncio.gather(task(), task())

    asyncio.run(main())
    outer = trace.trace_scope("outer", None, {"global_step": 0}, enable_profiler=True)
    with outer, trace.trace_scope("nested", enable_profiler=True):
        work()
    found = events(path)
    for name, count in (("threads", 3), ("tasks", 2)):
        scopes = [e["args"] for e in found if e["name"] == name]
        assert len(scopes) == count
        assert sum("profiled" in args for args in scopes) == 1
        assert sum("profiler_skipped" in args for args in scopes) == count - 1
    assert "outer" in next(e for e in found if e["name"] == "nested")["args"]["profiler_skipped"]
    assert len([e for e in found if e["name"] == "profiler skipped"]) == 4


def test_a_profiler_that_fails_costs_only_its_window(tmp_path: Path):
    """Wrong profiler arguments and exceptions in the block are noted; the next window works."""
    path = begin(tmp_path, 0)
    with trace.trace_scope("bad", None, {"global_step": 0}, enable_profiler=True, profiler_args={"nonsense": 1}):
        work()
    raising = trace.trace_scope("raises", None, {"global_step": 0}, enable_profiler=True)
    with pytest.raises(ZeroDivisionError), raising:
        1 / 0  # noqa: B018
    with trace.trace_scope("good", None, {"global_step": 0}, enable_profiler=True):
        work()
    found = {e["name"]: e["args"] for e in events(path) if e["name"] in ("bad", "raises", "good")}
    assert "nonsense" in found["bad"]["profiler_skipped"]
    assert found["raises"]["error"] == "ZeroDivisionError"
    assert found["good"]["profiled"] > 0
