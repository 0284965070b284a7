from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from waiting import scaled, wait_until
from zbus import trace
from zbus.trace.sessions import SessionRecorder


@pytest.fixture(autouse=True)
def _no_tracer_left():
    yield
    trace.set_task_id(None)
    trace.set_session_id(None)
    trace.reset()


def begin(root: Path, **config) -> Path:
    """Configure rollout/1 and return its sessions file."""
    trace.configure({"root": str(root), **config}, role="rollout", rank=1)
    return root / "rollout" / "sessions_1.jsonl"


def records(path: Path) -> list[dict]:
    """Return the session records of a file, which must begin and end as the format page says."""

    def refuse(constant):
        raise AssertionError(constant)

    first, *rest, last = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert set(first) == {"zbus_sessions"}
    assert set(last) == {"zbus_sessions_end"}
    end = last["zbus_sessions_end"]
    assert end["recorded"] == end["written"] + end["pending"] + sum(end["lost"].values())
    return rest


class Hand:
    """A clock that goes when told."""

    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def __call__(self) -> int:
        return self.ns

    def go(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def hand() -> Hand:
    """Give a clock that stands at 5 s."""
    return Hand()


@pytest.fixture
def recorder(hand) -> SessionRecorder:
    """Give the recorder of rollout/1, whose run began at 1 s of that clock."""
    return SessionRecorder("rollout", 1, start=0, now=hand, epoch_ns=1_000_000_000)


def test_a_session_has_the_founding_shape_in_seconds_on_the_run_clock(recorder, hand):
    """A record has ids, rank, role, status, times from the run epoch, phases, counters and reason."""
    task = recorder.register_task({"prompt": 7})
    hand.go(1)
    session = recorder.register_session(task)
    recorder.begin_phase(None, session, "generate", {})
    hand.go(2)
    recorder.end_phase(None, session, "generate", {"tokens": 12})
    recorder.count(None, session, "turns", 3)
    hand.go(0.5)
    recorder.finalize(task, None, "rejected", "too short")
    assert recorder.take() == [
        {
            "task_id": task,
            "session_id": session,
            "rank": 1,
            "role": "rollout",
            "status": "rejected",
            "reason": "too short",
            "submit_ts": 4.0,
            "finalized_ts": 7.5,
            "total_s": 3.5,
            "generate_s": 2.0,
            "generate_sum_s": 2.0,
            "phases": {"generate": [{"start_ts": 5.0, "end_ts": 7.0}]},
            "counters": {"turns": 3},
            "payload": {"prompt": 7, "tokens": 12},
        }
    ]


def test_overlapping_instances_of_a_phase_are_kept_with_their_sum_and_union(recorder, hand):
    """Generate for 0.3 s beside 0.1 s: two whole instances, union 0.3, sum 0.4 (row B64)."""
    session = recorder.register_session(recorder.register_task({}))
    long = recorder.begin_phase(None, session, "generate", {})
    hand.go(0.1)
    short = recorder.begin_phase(None, session, "generate", {})
    hand.go(0.1)
    recorder.end_phase(None, session, "generate", {}, short)
    hand.go(0.1)
    recorder.end_phase(None, session, "generate", {}, long)
    recorder.finalize(None, session, None, None)
    [record] = recorder.take()
    spans = [(round(p["start_ts"] - 4, 6), round(p["end_ts"] - 4, 6)) for p in record["phases"]["generate"]]
    assert spans == [(0, 0.3), (0.1, 0.2)]
    assert (record["generate_s"], record["generate_sum_s"]) == (0.3, 0.4)


@pytest.mark.parametrize("phase", ["execution", "postprocess", "total", "φάση", "a_start_b"])
def test_a_phase_may_have_any_name(recorder, hand, phase):
    """No phase is dropped for its name (row B65), and none hides the session's own total."""
    session = recorder.register_session(recorder.register_task({}))
    recorder.begin_phase(None, session, phase, {})
    hand.go(1)
    recorder.end_phase(None, session, phase, {})
    hand.go(1)
    recorder.finalize(None, session, "accepted", None)
    [record] = recorder.take()
    assert len(record["phases"][phase]) == 1
    assert record["total_s"] == 2.0


def test_an_end_without_a_beginning_and_a_beginning_without_an_end_are_kept(recorder, hand):
    """A phase that never ended has no end; one that never began has no length."""
    session = recorder.register_session(recorder.register_task({}))
    recorder.end_phase(None, session, "reward", {})
    recorder.begin_phase(None, session, "generate", {})
    hand.go(1)
    recorder.finalize(None, session, None, None)
    [record] = recorder.take()
    assert record["phases"]["generate"] == [{"start_ts": 4.0, "end_ts": None}]
    assert record["phases"]["reward"] == [{"start_ts": 4.0, "end_ts": 4.0}]
    assert record["generate_s"] == 0


def test_finalizing_a_task_finalizes_all_its_sessions(recorder):
    """A task fans out to its open sessions; one without any becomes a session of its own."""
    task = recorder.register_task({})
    sessions = [recorder.register_session(task) for _ in range(3)]
    recorder.finalize(None, sessions[0], "failed", None)
    recorder.finalize(task, None, "accepted", None)
    assert [(r["session_id"], r["status"]) for r in recorder.take()] == [
        (sessions[0], "failed"),
        (sessions[1], "accepted"),
        (sessions[2], "accepted"),
    ]
    empty = recorder.register_task({})
    recorder.finalize(empty, None, "dropped", "no capacity")
    assert [(r["task_id"], r["status"]) for r in recorder.take()] == [(empty, "dropped")]


def test_finished_tasks_are_forgotten(recorder):
    """A thousand finished tasks leave nothing behind (row B67)."""
    for _ in range(1000):
        task = recorder.register_task({})
        recorder.register_session(task)
        recorder.finalize(task, None, "accepted", None)
    assert len(recorder.take()) == 1000
    assert recorder.sizes() == (0, 0, 0)


def test_ids_are_never_used_twice(tmp_path):
    """Ids go on after a reset, and a restarted rank has others (rows B67, B75)."""
    seen = set()
    for start in (0, 0, 1, 2):
        trace.configure({"root": str(tmp_path)}, role="rollout", rank=1, start=start)
        seen.update(trace.register_session(trace.register_task()) for _ in range(10))
        trace.reset()
    assert len(seen) == 40


def test_sessions_are_written_while_tracing_is_off(tmp_path):
    """Level off with sessions on writes the sessions file and no trace (row B66)."""
    path = begin(tmp_path, level="off", sessions=True)
    with trace.session_context():
        pass
    trace.reset()
    assert [r["status"] for r in records(path)] == ["accepted"]
    assert not (tmp_path / "rollout" / "traces_1.jsonl").exists()


def test_the_founding_session_config_is_understood():
    """``session_tracer`` of the founding config chooses sessions and their threshold."""
    config = trace.TraceConfig.of(
        {"enabled": False, "session_tracer": {"enabled": True, "flush_threshold": 0}, "profile_steps": [1, 2]}
    )
    assert (config.level, config.wants_sessions, config.session_flush) == ("off", True, 1)
    assert config.profile_steps == (1, 2)
    assert not trace.TraceConfig.of({"enabled": False}).wants_sessions


def test_a_process_that_ends_writes_its_sessions_by_itself(tmp_path):
    """The exit hook writes finished and unfinished sessions, also with the trace off (row B66)."""
    code = """
        import sys
        from zbus import trace
        trace.configure({"root": sys.argv[1], "level": "off", "sessions": True, "flush_period_s": 10},
                        role="rollout", rank=1)
        done, open_ = trace.register_session(), trace.register_session()
        trace.trace_session_event("mark_finalized", session_id=done)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], timeout=scaled(60))
    assert process.returncode == 0
    assert [r["status"] for r in records(tmp_path / "rollout" / "sessions_1.jsonl")] == ["accepted", "pending"]


def test_a_reset_writes_what_is_open(tmp_path):
    """reset() loses nothing: unfinished sessions are written as pending (row B66)."""
    path = begin(tmp_path)
    trace.register_session()
    trace.reset()
    assert [r["status"] for r in records(path)] == ["pending"]


def test_finished_sessions_reach_the_file_within_the_period(tmp_path):
    """A finished session is written in the background, soon, or at once when enough wait."""
    path = begin(tmp_path, flush_period_s=0.05)
    trace.trace_session_event("mark_finalized", session_id=trace.register_session(), status="accepted")
    wait_until(lambda: path.exists() and b"accepted" in path.read_bytes(), what="the session in the file")
    trace.reset()
    other = begin(tmp_path / "b", flush_period_s=10, session_flush=2)
    for _ in range(2):
        trace.trace_session_event("mark_finalized", session_id=trace.register_session())
    wait_until(
        lambda: other.exists() and other.read_bytes().count(b"session_id") == 2, what="two sessions", timeout_s=8
    )


def test_task_and_session_follow_asyncio_tasks(tmp_path):
    """Concurrent episodes keep their own current session, and their phases do not mix."""
    path = begin(tmp_path)

    @trace.trace_session("reward")
    async def reward(seconds):
        await asyncio.sleep(seconds)

    @trace.session_context()
    async def episode(number):
        async with trace.atrace_session_phase("generate", {"number": number}):
            await asyncio.sleep(0.01)
        await reward(0.01)
        trace.trace_session_event("increment_counter", name="turns", value=number)
        return trace.get_session_id()

    async def run(number):
        task = trace.register_task(number=number)
        trace.set_task_id(task)
        sessions = await asyncio.gather(episode(number), episode(number))
        trace.trace_session_event("mark_finalized", task_id=task, status="accepted")
        return task, sessions

    async def main():
        return await asyncio.gather(*(asyncio.ensure_future(run(n)) for n in range(1, 6)))

    expected = {session: (task, n) for n, (task, ids) in enumerate(asyncio.run(main()), 1) for session in ids}
    trace.reset()
    found = records(path)
    assert len(found) == 10
    for record in found:
        task, number = expected[record["session_id"]]
        assert (record["task_id"], record["payload"]["number"]) == (task, number)
        assert {phase: len(i) for phase, i in record["phases"].items()} == {"generate": 1, "reward": 1}
        assert record["counters"] == {"turns": number}
    assert trace.get_session_id() is None


def test_a_phase_closes_and_a_session_fails_on_an_exception(tmp_path):
    """An exception ends the phase, finishes the session as failed with its text, and goes on."""
    path = begin(tmp_path)

    @trace.session_context()
    def episode():
        with trace.trace_session_phase("toolcall"):
            raise ValueError("no tool")

    trace.set_task_id(trace.register_task())
    with pytest.raises(ValueError, match="no tool"):
        episode()
    trace.reset()
    [record] = records(path)
    assert (record["status"], record["reason"]) == ("failed", "ValueError: no tool")
    assert record["phases"]["toolcall"][0]["end_ts"] is not None


def test_a_generator_s_session_and_phase_last_to_its_end(tmp_path):
    """A session or phase of a generator runs from its first step to its end; between steps it is not current."""
    path = begin(tmp_path)
    seen = []

    @trace.session_context()
    def episode():
        """Yield twice, returning what was sent."""
        seen.append(trace.get_session_id())
        got = yield 1
        seen.extend((number, trace.get_session_id()) for number in turns())
        try:
            yield got
        except KeyError:
            yield "thrown"
        return "end"

    @trace.trace_session("turns")
    def turns():
        yield from range(2)

    steps = episode()
    assert episode.__doc__
    assert next(steps) == 1
    assert trace.get_session_id() is None
    assert steps.send("sent") == "sent"
    assert steps.throw(KeyError()) == "thrown"
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "end"
    own = seen[0]
    assert seen == [own, (0, own), (1, own)]
    closed = episode()
    next(closed)
    closed.close()
    with pytest.raises(ZeroDivisionError):
        list(_dividing())
    trace.reset()
    first, second, third = records(path)
    assert [r["status"] for r in (first, second, third)] == ["accepted", "accepted", "failed"]
    assert first["session_id"] == own
    assert len(first["phases"]["turns"]) == 1
    assert first["phases"]["turns"][0]["end_ts"] is not None
    assert "phases" not in second


@trace.session_context()
def _dividing():
    yield 1
    yield 1 / 0


def test_an_async_generator_s_session_lasts_to_its_end(tmp_path):
    """Sessions of interleaved async generators in one task do not mix."""
    path = begin(tmp_path)

    @trace.trace_session("stream")
    @trace.session_context()
    async def episode(number):
        for turn in range(3):
            await asyncio.sleep(0)
            trace.trace_session_event("increment_counter", name=f"of {number}")
            yield turn, trace.get_session_id()

    async def main():
        first, second = episode(1), episode(2)
        ids = []
        for _ in range(3):
            ids.append(((await anext(first))[1], (await anext(second))[1]))
            assert trace.get_session_id() is None
        assert [item async for item in first] == []
        await second.aclose()
        return ids

    ids = asyncio.run(main())
    trace.reset()
    assert len(set(ids)) == 1
    assert {r["session_id"]: r["counters"] for r in records(path)} == {ids[0][0]: {"of 1": 3}, ids[0][1]: {"of 2": 3}}


def test_sessions_and_spans_tell_one_time(tmp_path):
    """A phase and the span around it stand at the same time: both count from the run epoch (row B61)."""
    path = begin(tmp_path)
    with trace.session_context(), trace.span("around"), trace.trace_session_phase("generate"), trace.span("inside"):
        time.sleep(0.01)
    trace.reset()
    [phase] = records(path)[0]["phases"]["generate"]
    lines = path.with_name("traces_1.jsonl").read_text().splitlines()
    spans = {e["name"]: (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in map(json.loads, lines) if e["ph"] == "X"}
    assert spans["around"][0] <= phase["start_ts"] <= spans["inside"][0]
    assert spans["inside"][1] <= phase["end_ts"] <= spans["around"][1]


def test_events_by_name_work_from_any_thread(tmp_path):
    """mark_PHASE_start and _end, counters and the end may be told from elsewhere by session id."""
    path = begin(tmp_path)
    session = trace.register_session()

    def elsewhere():
        for method in ("mark_generate_start", "mark_generate_end", "mark_my_own_start", "mark_my_own_end"):
            trace.trace_session_event(method, session_id=session)
        trace.trace_session_event("mark_finalized", session_id=session, status="rejected", reason="filter")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    trace.reset()
    [record] = records(path)
    assert set(record["phases"]) == {"generate", "my_own"}
    assert (record["status"], record["reason"]) == ("rejected", "filter")


def test_nothing_about_sessions_raises_or_writes_bad_json(tmp_path, caplog):
    """Unknown events, wrong payloads and hostile values are ignored or frozen, and the file stays strict JSON."""
    path = begin(tmp_path)
    session = trace.register_session()
    trace.trace_session_event("mark_nothing", session_id=session)
    trace.trace_session_event("increment_counter", session_id=session)
    trace.trace_session_event("increment_counter", session_id=session, name="x", value="y")
    trace.trace_session_event("mark_a\ud800_start", session_id=session, x=float("nan"), y=object(), z="\udcff")
    trace.trace_session_event("mark_finalized", session_id=12345)
    trace.trace_session_event("mark_finalized", session_id=session, status="\ud801")
    trace.reset()
    [record] = records(path)
    assert record["payload"]["x"] is None


def test_without_a_recorder_everything_is_a_no_op():
    """Where sessions are off the whole API does nothing and costs no state."""
    assert trace.register_task() is None
    assert trace.register_session() is None
    trace.trace_session_event("mark_finalized", session_id=1)
    with trace.session_context(), trace.trace_session_phase("generate"):
        pass

    @trace.trace_session("reward")
    def plain(x):
        return x + 1

    assert plain(1) == 2


def test_a_forked_child_has_its_own_sessions(tmp_path):
    """A child drops its parent's open sessions and writes into a file of its own."""
    path = begin(tmp_path)
    trace.register_session()
    pid = os.fork()
    if not pid:
        with trace.session_context():
            pass
        trace.save_perf_tracer(force=True)
        os._exit(0)
    os.waitpid(pid, 0)
    trace.reset()
    assert [r["status"] for r in records(path)] == ["pending"]
    child = path.with_name(f"sessions_1.fork{pid}.jsonl").read_text().splitlines()
    assert [json.loads(line).get("status") for line in child[1:]] == ["accepted"]


def test_roles_in_one_process_keep_their_own_sessions(tmp_path):
    """Colocated roles have a recorder each (row B79)."""
    for role in ("actor", "rollout"):
        tracer = trace.configure({"root": str(tmp_path)}, role=role, rank=0, default=False)
        with trace.use_tracer(tracer), trace.session_context():
            time.sleep(0)
    trace.reset()
    for role in ("actor", "rollout"):
        assert [r["role"] for r in records(tmp_path / role / "sessions_0.jsonl")] == [role]
