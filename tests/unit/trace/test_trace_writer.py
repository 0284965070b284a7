from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from waiting import scaled, wait_until, within
from zbus import trace
from zbus.clock import boot_id
from zbus.errors import ConfigError
from zbus.trace.blocks import ClockLine, decode_block, marker
from zbus.trace.control import writer_of
from zbus.trace.events import bus_flow_ids, call_id
from zbus.trace.session_file import SessionWriter
from zbus.trace.tracer import PROFILE, Tracer, span_records
from zbus.trace.writer import TraceWriter, trace_path

GOLDEN = Path(__file__).parents[2] / "golden" / "trace"


@pytest.fixture(autouse=True)
def _no_tracer_left():
    yield
    trace.reset()


class StepClock:
    """A clock that goes on by one microsecond with each look."""

    def __init__(self, mono: int = 1_000_000_000, wall: int = 1_796_000_000_000_000_000) -> None:
        self.mono, self.wall = mono, wall

    def monotonic_ns(self) -> int:
        self.mono += 1000
        return self.mono

    def wall_ns(self) -> int:
        return self.wall + self.mono


def lines(path: Path) -> list[dict]:
    """Return the lines of a trace file, which must be strict JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def named(path: Path, name: str) -> list[dict]:
    """Return the events of that name."""
    return [event for event in lines(path) if event["name"] == name]


def begin(root: Path, **config) -> tuple[Tracer, Path]:
    """Configure actor/0 and return its tracer and file."""
    tracer = trace.configure({"root": str(root), **config}, role="actor", rank=0)
    return tracer, root / "actor" / "traces_0.jsonl"


def test_files_are_named_by_role_rank_and_start():
    """Start 0 has the founding name; a restarted rank never shares a file with its predecessor (row B75)."""
    assert trace_path("r", "actor", 3) == Path("r/actor/traces_3.jsonl")
    assert trace_path("r", "actor", 3, 2) == Path("r/actor/traces_3.2.jsonl")


@pytest.mark.parametrize("role", ["..", "a/b", "", "a b"])
def test_a_role_cannot_leave_the_root(role, tmp_path):
    """A role that is no plain name is refused."""
    with pytest.raises(ConfigError):
        trace.configure({"root": str(tmp_path)}, role=role, rank=0)


def test_a_closed_file_says_how_much_was_recorded(tmp_path):
    """The file opens with who and when, and ends with counts that add up."""
    _, path = begin(tmp_path, run="e/t")
    with trace.span("work", step=1):
        pass
    trace.reset()
    first, *_, last = lines(path)
    assert first["name"] == "zbus_meta"
    assert (first["args"]["role"], first["args"]["rank"], first["args"]["run"]) == ("actor", 0, "e/t")
    assert first["args"]["boot_id"] == boot_id()
    assert (last["name"], last["args"]) == (
        "zbus_end",
        {"recorded": 1, "written": 1, "pending": 0, "lost": {}, "by": "process"},
    )


def test_process_and_thread_names_carry_role_and_rank(tmp_path):
    """Metadata name the process and each thread, with role and rank (row B71)."""
    _, path = begin(tmp_path)

    def work():
        trace.instant("here")

    thread = threading.Thread(target=work, name="EngineWorker")
    thread.start()
    thread.join()
    trace.reset()
    [name] = named(path, "thread_name")
    assert name["args"] == {"name": "EngineWorker", "role": "actor", "rank": 0}
    assert name["tid"] == named(path, "here")[0]["tid"]


def test_every_line_is_strict_json_whatever_was_recorded(tmp_path):
    """NaN, infinities, huge integers, lone surrogates and odd names are written as valid JSON (rows B62, B81)."""
    _, path = begin(tmp_path)
    with trace.span("a\ud800", x=math.nan, y=-math.inf, z=1 << 80, s="\udcff", k={("t", 1): object()}):
        pass
    trace.counter("c", math.nan)
    trace.counter("d", value=1.5, bad=math.inf)
    with trace.span("good"):
        pass
    trace.reset()
    odd = next(event for event in lines(path) if event["ph"] == "X")
    assert (odd["args"]["x"], odd["args"]["y"], odd["args"]["z"]) == (None, None, str(1 << 80))
    assert named(path, "c") == []
    assert named(path, "d")[0]["args"] == {"value": 1.5}
    assert len(named(path, "good")) == 1


def test_what_is_set_on_a_span_that_has_ended_costs_no_line(tmp_path):
    """A span that is told things after its end is written in some form, and its neighbours as they are."""
    _, path = begin(tmp_path, flush_period_s=10)
    with trace.span("before", n=1):
        pass
    with trace.span("late") as span:
        pass
    span.set(odd=object(), more={"deep": [object(), {1, 2}]}, blob=b"xyz", key={("a", 1): "\ud800"})
    with trace.span("after", n=2):
        pass
    trace.reset()
    before, late, after = (event for event in lines(path) if event["ph"] == "X")
    assert (before["args"], after["args"]) == ({"n": 1}, {"n": 2})
    assert late["args"]["odd"] == "<builtins.object>"
    assert late["args"]["blob"] == "<bytes, 3 bytes>"
    assert named(path, "zbus_end")[0]["args"]["lost"] == {}


class Unprintable:
    def __str__(self) -> str:
        msg = "no text"
        raise RuntimeError(msg)

    __repr__ = __str__


@pytest.mark.parametrize("odd", ["\ud800", b"bytes", ("a", 1), object(), Unprintable(), None], ids=type)
def test_odd_names_cost_no_line(odd, tmp_path):
    """A name, category, scope or direction that is no proper text is written in some form, its neighbours as ever."""
    _, path = begin(tmp_path, flush_period_s=10)
    with trace.span("before"), trace.span(odd, category=odd):
        trace.instant(odd, category=odd, scope=odd, key={odd: odd})
        trace.counter(odd, 1)
        trace.flow("key", odd)
    trace.reset()
    assert len(named(path, "before")) == 1
    assert named(path, "zbus_end")[0]["args"] == {
        "recorded": 5, "written": 5, "pending": 0, "lost": {}, "by": "process",
    }  # fmt: skip


def test_a_record_nobody_can_read_costs_only_itself(tmp_path):
    """Malformed records among good ones are counted as lost, spans and others alike."""
    tracer, path = begin(tmp_path, flush_period_s=10)
    with trace.span("first"):
        pass
    [ring] = tracer.rings()
    ring.spans += ("broken", "misc", "no time", 1, None, None)
    tracer.append((99, "what is this"))
    with trace.span("last"):
        pass
    trace.reset()
    assert [e["name"] for e in lines(path) if e["ph"] == "X"] == ["first", "last"]
    assert named(path, "zbus_end")[0]["args"]["lost"] == {"malformed": 2}


def test_large_blocks_reach_an_outlet_in_parts(tmp_path):
    """What is larger than a message may be is handed over in halves, a span that alone is too large is counted."""
    tracer, _ = begin(tmp_path, flush_period_s=10)
    writer = writer_of(tracer)

    class Taken:
        blocks: list = []  # noqa: RUF012  # one instance

        def offer(self, payload, records):
            self.blocks.append((len(payload), records, decode_block(payload)))

        def settle(self):
            pass

        def close(self, counts):
            pass

        def counts(self):
            return sum(records for _, records, _ in self.blocks), 0, {}

    writer._outlet = Taken()
    text = {f"key{n}": "x" * 4000 for n in range(30)}
    for number in range(100):
        with trace.span("wide", number=number, **text):
            trace.instant("beside", number=number)
    tracer.append((2, "huge", 1, {"x" * (5 << 20): 1}))
    writer.flush()
    blocks = Taken.blocks
    assert all(size <= 4 << 20 for size, _, _ in blocks)
    assert len(blocks) > 1
    assert sum(records for _, records, _ in blocks) == 200
    assert writer.counts() == {"recorded": 201, "written": 200, "pending": 0, "lost": {"too_large": 1}}
    seen = sorted(
        record[-2]["number"]
        for _, _, block in blocks
        for part in block.threads
        for record in [*part.records, *span_records(part.spans)]
        if record[1] in ("wide", "beside")
    )
    assert seen == sorted([*range(100), *range(100)])


def test_a_time_is_microseconds_with_nanosecond_decimals(tmp_path):
    """Ts and dur keep nanoseconds, counted from the run epoch."""
    tracer = Tracer("actor", 0, clock=StepClock())
    config = trace.TraceConfig(root=str(tmp_path))
    writer = TraceWriter(tracer, config, clock=StepClock())
    tracer.set_level("full")
    writer.open()
    epoch = named(writer.path, "zbus_meta")[0]["args"]["epoch_mono_ns"]
    tracer.append((0, "x", "misc", epoch + 1_234_567, epoch + 1_234_667, None, None))
    writer.close()
    assert [(e["ts"], e["dur"]) for e in named(writer.path, "x")] == [(1234.567, 0.1)]


def test_one_boot_shares_the_controllers_clock(tmp_path):
    """With the controller's boot id, ts counts exactly from its run epoch; else by the wall anchor."""
    clock = StepClock()
    shared = trace.TraceConfig(
        root=str(tmp_path), run_epoch_wall_ns=1, run_epoch_mono_ns=123_000, clock_boot_id=boot_id()
    )
    other = trace.TraceConfig(
        root=str(tmp_path),
        run_epoch_wall_ns=clock.wall + 400_000_000,
        run_epoch_mono_ns=123_000,
        clock_boot_id="another machine",
    )
    metas = []
    for rank, config in enumerate((shared, other)):
        writer = TraceWriter(Tracer("actor", rank), config, clock=clock)
        writer.open()
        writer.close()
        metas.append(named(writer.path, "zbus_meta")[0]["args"])
    assert (metas[0]["epoch_clock"], metas[0]["epoch_mono_ns"]) == ("shared", 123_000)
    assert (metas[1]["epoch_clock"], metas[1]["epoch_mono_ns"]) == ("wall", 400_000_000)


def test_the_background_writes_without_being_asked(tmp_path):
    """A span reaches the file within the flush period while the process goes on."""
    _, path = begin(tmp_path, flush_period_s=0.05)
    with trace.span("soon"):
        pass
    wait_until(lambda: named(path, "soon"), what="the span in the file")


def test_a_live_switch_changes_level_and_nothing_else(tmp_path):
    """config_perf_tracer turns recording off and on; None is off and no error, also unconfigured (row B59)."""
    trace.config_perf_tracer(None)
    trace.config_perf_tracer(None, role="actor")
    tracer, path = begin(tmp_path)
    trace.instant("one")
    trace.config_perf_tracer(None, role="actor")
    trace.instant("two")
    trace.config_perf_tracer({"level": "full"}, role="actor", rank=0)
    trace.instant("three")
    assert trace.get_tracer() is tracer
    trace.reset()
    assert [e["name"] for e in lines(path) if e["ph"] == "i"] == ["one", "three"]


def test_a_tracer_begun_off_makes_no_file_until_switched_on(tmp_path):
    """Level off writes nothing at all; a later config begins the file."""
    _, path = begin(tmp_path, level="off")
    trace.save_perf_tracer(force=True)
    assert not path.exists()
    trace.config_perf_tracer({"level": "rpc"})
    assert path.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [({"levle": "full"}, "unknown trace config key"), ({"level": "loud"}, "not one of"), ({"run": 3}, "wants str")],
)
def test_a_bad_config_is_refused_by_name(config, message, tmp_path):
    """A key or value that cannot be used is an error, never ignored."""
    with pytest.raises(ConfigError, match=message):
        trace.configure({"root": str(tmp_path), **config}, role="actor", rank=0)
    with pytest.raises(ConfigError):
        trace.config_perf_tracer("full")  # type: ignore[arg-type]


def test_an_enabled_flag_is_understood():
    """The founding config's ``enabled`` chooses full or off."""
    assert trace.TraceConfig.of({"enabled": True}).level == "full"
    assert trace.TraceConfig.of({"enabled": False}).level == "off"


def test_save_writes_at_due_steps_only(tmp_path):
    """save_perf_tracer writes at the last step of each interval, or when forced."""
    _, path = begin(tmp_path, save_interval=3, flush_period_s=10)
    trace.instant("early")
    trace.save_perf_tracer(0)
    trace.save_perf_tracer(1)
    assert named(path, "early") == []
    trace.save_perf_tracer(2)
    assert len(named(path, "early")) == 1
    trace.instant("late")
    trace.save_perf_tracer(3, force=True)
    assert len(named(path, "late")) == 1


def test_a_full_disk_costs_spans_but_never_the_run(tmp_path, monkeypatch, caplog):
    """While writes fail, records are counted as lost, warned of once, and said in the file afterwards."""
    tracer, path = begin(tmp_path, flush_period_s=10)
    writer = writer_of(tracer)
    real, full = os.write, True

    def write(fd, data):
        if fd == writer._file.fd and full:
            real(fd, bytes(data)[:10])  # what fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for _ in range(2):
        trace.instant("lost")
        writer.flush()
    full = False
    trace.instant("kept")
    counts = writer.counts()
    assert counts["recorded"] == counts["written"] + counts["pending"] + sum(counts["lost"].values()) == 3
    trace.reset()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert named(path, "lost") == []
    assert len(named(path, "kept")) == 1
    assert named(path, "zbus_loss")[0]["args"]["lost"] == 2
    assert named(path, "zbus_end")[0]["args"] == {
        "recorded": 3,
        "written": 1,
        "pending": 0,
        "lost": {"write_error": 2},
        "by": "process",
    }


def test_an_interrupt_of_a_save_leaves_nothing_uncounted(tmp_path, monkeypatch):
    """A KeyboardInterrupt inside a save goes on to the caller, and the records it cost are counted."""
    tracer, _ = begin(tmp_path, flush_period_s=10)
    writer = writer_of(tracer)
    trace.instant("x")

    def interrupt(events):
        raise KeyboardInterrupt

    monkeypatch.setattr("zbus.trace.blocks.encode_events", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trace.save_perf_tracer(force=True)
    monkeypatch.undo()
    assert writer.counts() == {"recorded": 1, "written": 0, "pending": 0, "lost": {"interrupted": 1}}


def test_a_full_ring_is_said_in_the_file(tmp_path):
    """Records dropped because a ring was full appear as a loss with their number."""
    _, path = begin(tmp_path, ring_size=16, flush_period_s=10)
    for _ in range(20):
        trace.instant("x")
    trace.reset()
    assert named(path, "zbus_loss")[0]["args"]["lost"] == 4
    end = named(path, "zbus_end")[0]["args"]
    assert (end["recorded"], end["written"], end["lost"]) == (20, 16, {"ring_full": 4})


def test_a_file_torn_by_a_crash_is_continued_on_a_new_line(tmp_path):
    """A later process that appends to a torn file does not glue its header to the torn line."""
    path = tmp_path / "actor" / "traces_0.jsonl"
    path.parent.mkdir()
    path.write_text('{"name":"b","ph":"X","ts')
    begin(tmp_path)
    trace.reset()
    torn, header, *_ = path.read_text().splitlines()
    assert torn == '{"name":"b","ph":"X","ts'
    assert json.loads(header)["name"] == "zbus_meta"


def test_a_root_that_cannot_be_written_is_a_config_error(tmp_path):
    """A trace root that is a file is refused with the file's name."""
    (tmp_path / "actor").write_text("in the way")
    with pytest.raises(ConfigError, match=r"traces_0\.jsonl cannot be made"):
        begin(tmp_path)


def test_the_root_of_a_live_tracer_is_not_changed_silently(tmp_path):
    """A second root for the same role and rank is refused."""
    begin(tmp_path)
    with pytest.raises(ConfigError, match="already traces into"):
        trace.configure({"root": str(tmp_path / "other")}, role="actor", rank=0)


def run_script(code: str, *args: str, **kwargs) -> subprocess.Popen:
    """Start Python code as a process of its own."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], text=True, **kwargs)


def test_a_forked_child_writes_its_own_events_once_under_its_own_pid(tmp_path):
    """A child drops what its parent recorded, reads its ids anew and uses a file of its own (row B68)."""
    code = """
        import os, sys
        from zbus import trace
        trace.configure({"root": sys.argv[1], "flush_period_s": 10}, role="actor", rank=0)
        trace.instant("parent")
        pid = os.fork()
        if not pid:
            trace.instant("child")
            trace.save_perf_tracer(force=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print(os.getpid(), pid)
    """
    process = run_script(code, str(tmp_path), stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=60)
    parent, child = map(int, out.split())
    own, other = tmp_path / "actor" / "traces_0.jsonl", tmp_path / "actor" / f"traces_0.fork{child}.jsonl"
    assert [(e["name"], e["pid"], e["tid"]) for e in lines(own) if e["ph"] == "i"] == [("parent", parent, parent)]
    assert [(e["name"], e["pid"], e["tid"]) for e in lines(other) if e["ph"] == "i"] == [("child", child, child)]
    epochs = [named(path, "zbus_meta")[0]["args"]["epoch_mono_ns"] for path in (own, other)]
    assert epochs[0] == epochs[1]


def test_a_fork_in_the_middle_of_recording_threads_divides_the_records(tmp_path):
    """Threads record while the process forks: the parent has all of theirs once, the child nothing but its own."""
    code = """
        import os, sys, threading
        from zbus import trace
        trace.configure({"root": sys.argv[1], "flush_period_s": 0.05}, role="actor", rank=0)
        go, stop = threading.Barrier(4), threading.Event()
        counts = []
        def record():
            go.wait()
            number = 0
            while not stop.is_set() or number < 1000:
                with trace.span("work", number=number):
                    number += 1
            counts.append(number)
        threads = [threading.Thread(target=record) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.wait()
        children = []
        for child in range(3):
            pid = os.fork()
            if not pid:
                for _ in range(10):
                    with trace.span("child", number=child):
                        pass
                trace.reset()
                os._exit(0)
            children.append(pid)
        stop.set()
        for thread in threads:
            thread.join()
        for pid in children:
            os.waitpid(pid, 0)
        print(sum(counts), *children)
    """
    process = run_script(code, str(tmp_path), stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=scaled(60))
    total, *children = map(int, out.split())
    assert len(named(tmp_path / "actor" / "traces_0.jsonl", "work")) == total
    for pid in children:
        path = tmp_path / "actor" / f"traces_0.fork{pid}.jsonl"
        assert [e["name"] for e in lines(path) if e["ph"] == "X"] == ["child"] * 10
        assert named(path, "zbus_end")[0]["args"]["recorded"] == 10


def test_a_span_never_leaves_the_one_around_it(tmp_path):
    """Times are kept to the nanosecond, so what was nested is nested in the file, however late in a run (row B82)."""
    tracer = Tracer("actor", 0, clock=StepClock())
    writer = TraceWriter(tracer, trace.TraceConfig(root=str(tmp_path)), clock=StepClock())
    tracer.set_level("full")
    writer.open()
    epoch = named(writer.path, "zbus_meta")[0]["args"]["epoch_mono_ns"]
    chance = random.Random(5)
    wanted = []
    for number in range(2000):
        outer = epoch + chance.randrange(10 ** chance.randrange(3, 16))
        length = chance.randrange(10 ** chance.randrange(1, 13))
        inner = outer + chance.randrange(length + 1)
        times = ((outer, outer + length), (inner, chance.choice((outer + length, inner))))
        wanted += times
        for start, end in times:
            tracer.append((0, "x", "misc", start, end, {"number": number}, None))
    writer.close()
    found = [(round(e["ts"] * 1000) + epoch, round(e["dur"] * 1000)) for e in named(writer.path, "x")]
    assert [(start, start + length) for start, length in found] == wanted


def test_a_killed_process_loses_at_most_a_flush_period(tmp_path):
    """After SIGKILL all that was recorded a flush period before is in the file, in whole lines but the last."""
    code = """
        import sys, time
        from zbus import trace
        trace.configure({"root": sys.argv[1], "flush_period_s": 0.05}, role="actor", rank=0)
        for number in range(10**9):
            trace.instant("tick", n=number, at=time.monotonic_ns())
            if number % 50 == 0:
                time.sleep(0.0005)
                print(time.monotonic_ns(), flush=True)
    """
    process = run_script(code, str(tmp_path), stdout=subprocess.PIPE)
    try:
        path = tmp_path / "actor" / "traces_0.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_size > 100_000, what="a filled trace file")
    finally:
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    last_alive = int(out.rsplit("\n", 2)[-2])
    whole = path.read_bytes().rpartition(b"\n")[0]
    ticks = [json.loads(line) for line in whole.splitlines() if b'"tick"' in line]
    assert [t["args"]["n"] for t in ticks] == list(range(len(ticks)))
    assert last_alive - ticks[-1]["args"]["at"] < within(1.0) * 1e9  # 20 periods: machines stall


def test_an_orderly_exit_writes_the_rest_by_itself(tmp_path):
    """A program that just ends has its last spans and the end event in the file."""
    code = """
        import sys
        from zbus import trace
        trace.configure({"root": sys.argv[1], "flush_period_s": 10}, role="actor", rank=0)
        trace.instant("last")
    """
    assert run_script(code, str(tmp_path)).wait(timeout=60) == 0
    path = tmp_path / "actor" / "traces_0.jsonl"
    assert len(named(path, "last")) == len(named(path, "zbus_end")) == 1


SESSION = bytes(range(16))


def record_call(tracer: Tracer, at: int, *, attempt: int = 1) -> None:
    """Record both sides of one call."""
    ids = (SESSION, "actor/3", 77, "main", 5, attempt, "train")
    tracer.bus_client(*ids, at, at + 1000, at + 2000, at + 9000, at + 10000, 100, 200, "OK")
    tracer.bus_server(*ids, at + 3000, at + 4000, at + 5000, at + 6000, at + 7000, "OK")


def bus_events(path: Path) -> list[dict]:
    """Return the bus's own events."""
    return [event for event in lines(path) if event.get("cat") == "rpc"]


def test_one_record_per_side_becomes_all_phases_of_the_call(tmp_path):
    """A call is shown with its call, encode, send, wire, queue, decode, run and reply spans under one call id."""
    tracer, path = begin(tmp_path, level="rpc")
    record_call(tracer, tracer.now())
    trace.reset()
    events = bus_events(path)
    kinds = ["client", "encode", "send", "wire", "return", "queue", "decode", "run", "reply"]
    assert [e["args"]["kind"] for e in events] == kinds
    assert {e["args"]["call"] for e in events} == {call_id(SESSION, "actor/3", 77, "main", 5)}
    whole = events[0]
    assert (whole["name"], whole["dur"], whole["args"]["bytes_out"]) == ("call train", 10.0, 100)
    for part in events[1:5]:
        assert whole["ts"] <= part["ts"]
        assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1e-6


def test_arrows_join_both_sides_by_a_hash_of_the_ids(tmp_path):
    """Request and reply arrows have an end on each side; every attempt has ids of its own (row B76)."""
    tracer, path = begin(tmp_path, level="rpc")
    record_call(tracer, tracer.now())
    trace.reset()
    out = {e["bind_id"]: e["args"]["kind"] for e in bus_events(path) if e.get("flow_out")}
    into = {e["bind_id"]: e["args"]["kind"] for e in bus_events(path) if e.get("flow_in")}
    request, answer = bus_flow_ids(SESSION, "actor/3", 77, "main", 5, 1)
    assert out == {request: "send", answer: "reply"}
    assert into == {request: "queue", answer: "return"}
    ids = {f for w in "ab" for attempt in range(1, 100) for f in bus_flow_ids(SESSION, w, 77, "main", 5, attempt)}
    assert len(ids) == 2 * 198


def test_the_answer_is_encoded_then_handed_on(tmp_path):
    """The worker's side tells encoding and sending of the answer apart; the reply's arrow leaves with the latter."""
    tracer, path = begin(tmp_path, level="rpc")
    at = tracer.now()
    ids = (SESSION, "actor/3", 77, "main", 5, 1, "train")
    tracer.bus_server(*ids, at, at + 1000, at + 2000, at + 5000, at + 7000, "OK", at + 11_000)
    trace.reset()
    run, encode, reply = bus_events(path)[-3:]
    assert [e["args"]["kind"] for e in (run, encode, reply)] == ["run", "encode_result", "reply"]
    assert [e["dur"] for e in (run, encode, reply)] == [3.0, 2.0, 4.0]
    assert encode["ts"] == pytest.approx(run["ts"] + run["dur"])
    assert reply["ts"] == pytest.approx(encode["ts"] + encode["dur"])
    assert "bind_id" not in encode
    assert reply["flow_out"]


def test_each_attempt_has_an_arrow_of_its_own(tmp_path):
    """The arrow of a lost first attempt arrives nowhere; the second one's joins the run, and so does the reply's."""
    tracer, path = begin(tmp_path, level="rpc")
    at = tracer.now()
    call = (SESSION, "actor/3", 77, "main", 5)
    tracer.bus_sent(*call, 1, 2)
    tracer.bus_client(*call, 2, "train", at, at + 1, at + 2, at + 9, at + 10, 100, 200, "OK", 0, 2)
    tracer.bus_server(*call, 2, "train", at + 5, at + 6, at + 7, at + 8, at + 8, "OK", at + 9)
    trace.reset()
    events = bus_events(path)
    out = {e["bind_id"]: e["name"] for e in events if e.get("flow_out")}
    into = {e["bind_id"]: e["name"] for e in events if e.get("flow_in")}
    first, _ = bus_flow_ids(*call, 1)
    second, answer = bus_flow_ids(*call, 2)
    assert out == {first: "send", second: "sent again", answer: "reply"}
    assert into == {second: "queue train", answer: "decode"}
    assert {e["args"]["attempt"] for e in events if e["args"]["kind"] in ("client", "queue", "run", "reply")} == {2}
    assert next(e for e in events if e["args"]["kind"] == "client")["args"]["attempts"] == 2
    assert {e["args"]["call"] for e in events} == {call_id(*call)}


def test_a_request_that_waited_for_room_shows_when_it_left(tmp_path):
    """A request of several calls that left later than it was placed has a mark for each call, and one arrow each."""
    tracer, path = begin(tmp_path, level="rpc")
    tracer.bus_sent(SESSION, "actor/3", 77, "main", 5, 3, 1)
    trace.reset()
    marks = bus_events(path)
    assert [(e["name"], e["args"]["kind"], e["args"]["attempt"]) for e in marks] == [("sent late", "sent", 1)] * 3
    assert [e["args"]["call"] for e in marks] == [call_id(SESSION, "actor/3", 77, "main", n) for n in (5, 6, 7)]
    assert not any("bind_id" in e for e in marks)


def test_phases_that_never_came_are_left_out(tmp_path):
    """A call that was never sent shows no wire; one without a reply ends its wire with the outcome."""
    tracer, path = begin(tmp_path, level="rpc")
    at = tracer.now()
    ids = (SESSION, "actor/3", 77, "main", 5, 1, "train")
    tracer.bus_client(*ids, at, at + 1, 0, 0, at + 500, 0, 0, "NOT_EXECUTED")
    tracer.bus_client(*ids, at, at + 1, at + 2, 0, at + 500, 0, 0, "UNKNOWN")
    tracer.bus_server(*ids, at, 0, 0, 0, at + 10, "CANCELLED")
    trace.reset()
    kinds = [e["args"]["kind"] for e in bus_events(path)]
    assert kinds == ["client", "encode", "client", "encode", "send", "wire", "queue", "reply"]


@pytest.fixture
def somewhere(monkeypatch):
    """Let this process be on a machine that is always the same."""
    monkeypatch.setattr("zbus.trace.writer.new_source", lambda: "00112233445566aa")
    monkeypatch.setattr("zbus.trace.tracefile.boot_id", lambda: "11111111-2222-3333-4444-555555555555")
    monkeypatch.setattr("zbus.trace.tracefile.time_namespace", lambda: 4026531834)
    monkeypatch.setattr("zbus.trace.tracefile.socket.gethostname", lambda: "host-a")


def is_golden(path: Path, name: str) -> None:
    """Compare a file, with pid and thread id made the same, with a golden one."""
    pid, tid = os.getpid(), threading.get_native_id()
    text = path.read_text().replace(f'"tid":{tid},', '"tid":4712,')
    text = text.replace(f'"pid":{pid},', '"pid":4711,').replace(f"pid {pid})", "pid 4711)")
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


def golden_writer(root: Path, role: str, **config) -> tuple[TraceWriter, StepClock]:
    """Return an open writer with a clock that counts looks."""
    clock = StepClock()
    tracer = Tracer(role, 0, clock=clock, ring_size=config.get("ring_size", 1000))
    settings = trace.TraceConfig(root=str(root), run="exp/trial", flush_period_s=10, **config)
    writer = TraceWriter(tracer, settings, incarnation=(1 << 48) | 7, start=0, clock=clock)
    tracer.set_level("full")
    writer.open()
    return writer, clock


@pytest.mark.usefixtures("somewhere")
def test_the_format_is_the_golden_file(tmp_path):
    """The bytes of a trace file change only on purpose: with the golden file and the format version."""
    writer, clock = golden_writer(tmp_path, "actor")
    tracer = writer.tracer
    with trace.use_tracer(tracer), trace.span("train", "compute", step=1, loss=0.25):
        trace.instant("batch ready", scope="p")
        trace.counter("queue", 3)
        trace.flow("batch-1")
    record_call(tracer, clock.monotonic_ns())
    writer.flush()
    writer.close()
    is_golden(writer.path, "traces_0.jsonl")


@pytest.mark.usefixtures("somewhere")
def test_the_rest_of_the_format_is_the_other_golden_file(tmp_path):
    """So do batches, repeated attempts, steps, losses, clocks, blocks and what torch's profiler saw."""
    writer, clock = golden_writer(tmp_path, "controller", ring_size=16)
    tracer = writer.tracer
    at = clock.monotonic_ns()
    call = (SESSION, "actor/3", 77, "main", 5)
    tracer.bus_sent(*call, 1, 1)
    tracer.bus_sent(*call, 1, 2)
    tracer.bus_client(*call, 2, "train", at, at + 1000, at + 2000, at + 8000, at + 9000, 100, 200, "OK", 1, 2)
    tracer.bus_server(*call, 2, "train", at + 3000, at + 4000, at + 5000, at + 6000, at + 6500, "OK", at + 7000)
    tracer.bus_batch("train", 1, "main", 1, 1, at, at + 9000, at + 12_000, "OK", at + 9500, at + 10_000)
    tracer.append((PROFILE, "profiler: thread 1", [("aten::mm", "profiler", at + 5000, at + 6000, None)]))
    with trace.use_tracer(tracer):
        trace.mark_step(4)

    async def task():
        with trace.span("in a task", odd=float("nan"), huge=1 << 70, most=(1 << 64) - 1):
            pass

    async def run():
        await asyncio.create_task(task(), name="rollout 7")

    with trace.use_tracer(tracer):
        asyncio.run(run())
        for _ in range(20):
            trace.instant("too many")
    writer.note_clock(ClockLine(at, 5_000_000_000, 4000, 7000, 128, -12, "reference's boot", 4026531834))
    writer.flush()
    writer.close()
    with writer.path.open("ab") as file:  # as the sidecar writes it
        file.write(marker(writer.source, 0, 2, 320, os.getpid()))
    is_golden(writer.path, "bus_0.jsonl")


@pytest.mark.usefixtures("somewhere")
def test_sessions_are_written_as_in_their_golden_file(tmp_path, monkeypatch):
    """A session with all it can have, one that failed, one that never ended."""
    monkeypatch.setattr("zbus.trace.session_file.new_source", lambda: "00112233445566aa")
    monkeypatch.setattr("zbus.trace.sessions._ids", itertools.count(1))
    config = trace.TraceConfig(root=str(tmp_path), run="exp/trial", flush_period_s=10)
    writer = SessionWriter("rollout", 1, config, incarnation=7, start=0, clock=StepClock())
    recorder = writer.recorder
    task = recorder.register_task({"prompt": 7})
    first, second = recorder.register_session(task), recorder.register_session(task)
    long = recorder.begin_phase(None, first, "generate", {})
    short = recorder.begin_phase(None, first, "generate", {})
    recorder.end_phase(None, first, "generate", {"tokens": 12}, short)
    recorder.end_phase(None, first, "generate", {}, long)
    recorder.begin_phase(None, first, "reward", {})
    recorder.count(None, first, "turns", 2)
    recorder.finalize(None, first, "accepted", None)
    recorder.finalize(None, second, "failed", "ValueError: no tool")
    recorder.register_session(recorder.register_task({}))
    writer.close()
    is_golden(writer.path, "sessions_1.jsonl")
