from __future__ import annotations

import json
from pathlib import Path

import pytest

from waiting import wait_until
from zbus import trace
from zbus.errors import ConfigError
from zbus.trace.events import ROW_BASE, row_id

SESSION = bytes(range(16))


@pytest.fixture(autouse=True)
def _no_tracer_left():
    yield
    trace.reset()


def begin(root: Path, **config) -> Path:
    """Configure the controller's tracer at level rpc and return its file."""
    trace.configure({"root": str(root), "level": "rpc", **config}, role="controller", rank=0)
    return root / "controller" / "traces_0.jsonl"


def lines(path: Path) -> list[dict]:
    """Return the events of a file; the last line may still be in the making."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_a_batch_is_one_span_with_its_calls_and_the_merge_of_their_results(tmp_path: Path):
    """The caller's batch has lane, number, members and calls; each call names its batch; the merge is shown."""
    path = begin(tmp_path)
    tracer = trace.get_tracer()
    at = tracer.now()
    batch = tracer.next_batch()
    for rank in range(2):
        ids = (SESSION, f"actor/{rank}", 7, "main", 3, 1, "train")
        tracer.bus_client(*ids, at, at + 1000, at + 2000, at + 9000, at + 9500, 10, 20, "OK", batch)
    tracer.bus_batch("train", batch, "main", 2, 1, at, at + 10_000, at + 12_000, "OK")
    trace.reset()
    events = lines(path)
    whole = next(e for e in events if e["name"] == "batch train")
    assert whole["args"] == {
        "kind": "batch", "batch": batch, "method": "train", "lane": "main", "members": 2, "calls": 1, "outcome": "OK",
    }  # fmt: skip
    assert whole["dur"] == 12.0
    merge = next(e for e in events if e["name"] == "merge train")
    assert (merge["dur"], merge["args"]) == (2.0, {"kind": "merge", "batch": batch})
    assert merge["ts"] + merge["dur"] == pytest.approx(whole["ts"] + whole["dur"])
    assert [e["args"]["batch"] for e in events if e["name"] == "call train"] == [batch, batch]


def test_an_answer_taken_late_makes_no_batch_longer(tmp_path: Path):
    """Decoding and merging are shown when they happen; a batch ends with its last outcome if nobody waited for it."""
    path = begin(tmp_path)
    tracer = trace.get_tracer()
    at = tracer.now()
    waited, late = at + 10_000, at + 5_000_000_000
    for number, taken in enumerate((waited, late), 1):
        tracer.bus_batch(
            "train", number, "main", 2, 1, at, at + 9000, taken + 7000, "OK", taken, taken + 3000
        )  # fmt: skip
    trace.reset()
    events = lines(path)
    assert [e["dur"] for e in events if e["name"] == "batch train"] == [17.0, 9.0]
    for kind, dur in (("decode_results", 3.0), ("merge", 4.0)):
        assert [e["dur"] for e in events if e.get("args", {}).get("kind") == kind] == [dur, dur]
    merge = [e for e in events if e["name"] == "merge train"][1]
    whole = [e for e in events if e["name"] == "batch train"][1]
    assert merge["ts"] - whole["ts"] == pytest.approx(5_000_003.0)


def test_numbers_of_batches_are_never_used_twice(tmp_path: Path):
    """Every batch of a tracer has a number of its own, from 1."""
    begin(tmp_path)
    assert [trace.get_tracer().next_batch() for _ in range(3)] == [1, 2, 3]


def test_a_batch_that_failed_shows_no_merge(tmp_path: Path):
    """Without a merged value the batch ends with its last outcome."""
    path = begin(tmp_path)
    tracer = trace.get_tracer()
    at = tracer.now()
    tracer.bus_batch("train", 1, "main", 2, 1, at, at + 5000, 0, "UNKNOWN")
    trace.reset()
    events = lines(path)
    assert next(e for e in events if e["name"] == "batch train")["dur"] == 5.0
    assert not any(e["name"] == "merge train" for e in events)


def test_rows_have_the_same_id_whoever_writes_them():
    """A row's id is a hash of its name, above every thread id, so process, spill and sidecar agree on it."""
    assert row_id("queue main") == row_id("queue main")
    assert row_id("queue main") != row_id("queue gen")
    ids = {row_id(f"→ actor/{rank} main") for rank in range(256)}
    assert len(ids) == 256
    assert min(ids) >= ROW_BASE


def test_gauges_are_sampled_as_counters_without_being_asked(tmp_path: Path):
    """Queue depth and credit given as gauges, and memory, appear as counters; one that fails shows nothing."""
    path = begin(tmp_path, gauge_period_s=0.05, flush_period_s=0.05)
    tracer = trace.get_tracer()
    depth = iter(range(10**6))
    remove = tracer.add_gauge("bus", lambda: {"queued": next(depth), "credit": 5})
    tracer.add_gauge("broken", lambda: {"x": 1 / 0})
    wait_until(lambda: sum(e["name"] == "bus" for e in lines(path)) >= 3, what="three samples")
    remove()
    trace.save_perf_tracer()
    count = sum(e["name"] == "bus" for e in lines(path))
    wait_until(lambda: sum(e["name"] == "memory" for e in lines(path)) >= count + 3, what="samples without it")
    trace.reset()
    events = lines(path)
    samples = [e for e in events if e["name"] == "bus"]
    assert [e["args"]["queued"] for e in samples] == list(range(len(samples)))
    assert {e["ph"] for e in samples} == {"C"}
    assert len(samples) <= count + 1
    assert all(e["args"]["rss_mib"] > 1 for e in events if e["name"] == "memory")
    assert not any(e["name"] == "broken" for e in events)


def test_a_tracer_that_is_off_samples_nothing(tmp_path: Path):
    """Gauges cost nothing while the level is off."""
    begin(tmp_path)
    tracer = trace.get_tracer()
    asked: list[int] = []

    def read() -> dict[str, float]:
        asked.append(1)
        return {"x": 1.0}

    tracer.add_gauge("x", read)
    trace.config_perf_tracer(None)
    tracer.sample_gauges()
    assert asked == []


def test_steps_are_marked_where_they_end(tmp_path: Path):
    """save_perf_tracer(step) and mark_step(step) leave a mark, also at level rpc and at steps that are not due."""
    path = begin(tmp_path, save_interval=10)
    for step in range(3):
        trace.save_perf_tracer(step)
    trace.mark_step(3)
    trace.save_perf_tracer(force=True)
    marks = [e for e in lines(path) if e["name"] == "zbus_step"]
    assert [(e["ph"], e["cat"], e["args"]["step"]) for e in marks] == [("i", "instr", step) for step in range(4)]


def test_chosen_steps_are_captured_at_the_full_level(tmp_path: Path):
    """Outside of capture_steps the level is one lower, by the step marks; all steps are marked (row B81)."""
    path = begin(tmp_path, level="full", capture_steps=[0, 2])
    levels = []
    for step in range(4):
        levels.append(trace.get_tracer().level.name)
        with trace.span("work", step=step):
            pass
        trace.save_perf_tracer(step)
    trace.reset()
    assert levels == ["FULL", "RPC", "FULL", "RPC"]
    events = lines(path)
    assert [e["args"]["step"] for e in events if e["name"] == "work"] == [0, 2]
    assert [e["args"]["step"] for e in events if e["name"] == "zbus_step"] == [0, 1, 2, 3]


def test_steps_are_marked_also_where_a_capture_leaves_nothing_else(tmp_path: Path):
    """At level rpc the steps outside the capture are off, and still marked; bad step lists are refused."""
    path = begin(tmp_path, capture_steps=[1])
    for step in range(3):
        trace.save_perf_tracer(step)
    trace.save_perf_tracer(force=True)
    assert [e["args"]["step"] for e in lines(path) if e["name"] == "zbus_step"] == [0, 1, 2]
    trace.config_perf_tracer(None)
    trace.save_perf_tracer(0)
    assert trace.get_tracer().level.name == "OFF"
    for bad in (["x"], "12", [True]):
        with pytest.raises(ConfigError, match="step numbers"):
            trace.config_perf_tracer({"capture_steps": bad})
