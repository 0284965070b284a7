from __future__ import annotations

import json
import resource
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from sidecar_kit import TrialFiles, sidecar, traced
from waiting import scaled, wait_until

TICKS = """
    on_sidecar()
    for n in range(int(sys.argv[2])):
        trace.instant("tick", n=n)
        if n % 100 == 0:
            time.sleep(0.002)
"""


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a traced process to end in order; return what it printed."""
    out, err = process.communicate(timeout=scaled(60))
    assert (process.returncode, err) == (0, "")
    return out


def test_records_go_through_the_sidecar_into_the_rank_s_own_file(short_dir: Path):
    """Every record of several processes is in its file once, with who, names and an end that adds up."""
    with sidecar(short_dir) as server, ExitStack() as stack:
        ranks = [traced(short_dir, TICKS, 2000, rank=rank, flush_period_s=0.05) for rank in range(3)]
        for process in [stack.enter_context(rank) for rank in ranks]:
            finish(process)
        server.send_signal(signal.SIGTERM)
        ledger = json.loads(server.communicate(timeout=scaled(20))[0])
    for rank in range(3):
        files = TrialFiles(short_dir, rank=rank)
        assert files.numbers == list(range(2000))
        assert files.torn == files.doubled == 0
        assert len(files.named("zbus_meta")) == 1
        assert [e["args"] for e in files.named("zbus_end")] == [
            {"recorded": 2000, "written": 2000, "pending": 0, "lost": {}, "by": "process"}
        ]
        assert not files.spill.exists()
        assert max(files.blocks.values()) == 1
    assert ledger["complete"]
    assert [(row["rank"], row["records"], row["ended"]) for row in ledger["sources"]] == [
        (0, 2000, True),
        (1, 2000, True),
        (2, 2000, True),
    ]
    assert not (short_dir / "traces" / "spool").exists()
    assert not (short_dir / "registry" / "trace" / "sidecar").exists()


STEPS = """
    config.update(run_epoch_wall_ns=time.time_ns(), run_epoch_mono_ns=time.monotonic_ns())
    from zbus.clock import boot_id
    tracers = [
        trace.configure({**config, "clock_boot_id": boot_id()}, role="rollout", rank=rank, default=False)
        for rank in range(2)
    ]
    while not all(writer_of(tracer)._outlet for tracer in tracers):
        time.sleep(0.005)
    for step in range(3):
        begin = tracers[0].now()
        time.sleep(0.1)
        for rank, tracer in enumerate(tracers):
            end = begin + 20_000_000 * (1 + 4 * rank)
            ids = (bytes(16), f"rollout/{rank}", 1, "main", step, 1, "train")
            tracer.bus_server(*ids, begin, begin, begin, end, end, "OK")
        with trace.use_tracer(tracers[0]):
            trace.mark_step(step)
"""


def follow(trial: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``traceview tail``."""
    command = [sys.executable, "-m", "traceview.tail", str(trial), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(30))


def test_tail_shows_finished_steps_and_names_slow_ranks(short_dir: Path):
    """One line per step with the slowest rank and an alarm; as JSON lines; and a clear message without a sidecar."""
    with sidecar(short_dir), traced(short_dir, STEPS, flush_period_s=0.05) as process:
        finish(process)
        wait_until(lambda: "step 2" in follow(short_dir, "--once").stdout, what="the last step in tail")
        text = follow(short_dir, "--once").stdout.splitlines()
        objects = [json.loads(line) for line in follow(short_dir, "--once", "--json").stdout.splitlines()]
        bad = follow(short_dir, "--slow", "fast")
    assert len(text) == 3
    assert "SLOW: rollout/1 5.0x" in text[1]
    assert [(o["schema"], o["step"], o["slowest"][0]["who"]) for o in objects] == [
        ("zbus.traceview.tail/1", step, "rollout/1") for step in range(3)
    ]
    assert bad.returncode == 2
    alone = follow(short_dir)
    assert (alone.returncode, "traceview collect" in alone.stderr) == (alone.returncode or 1, True)


LIVE = """
    config.update(run_epoch_wall_ns=time.time_ns(), run_epoch_mono_ns=time.monotonic_ns())
    from zbus.clock import boot_id
    tracers = [
        trace.configure({**config, "clock_boot_id": boot_id()}, role="rollout", rank=rank, default=False)
        for rank in range(3)
    ]
    while not all(writer_of(tracer)._outlet for tracer in tracers):
        time.sleep(0.005)
    for step, line in enumerate(sys.stdin):
        begin = tracers[0].now()
        time.sleep(0.1)
        for rank, tracer in enumerate(tracers):
            end = begin + 20_000_000 * (1 + 4 * (rank == step % 3))
            ids = (bytes(16), f"rollout/{rank}", 1, "main", step, 1, "train")
            tracer.bus_server(*ids, begin, begin, begin, end, end, "OK")
        with trace.use_tracer(tracers[0]):
            trace.mark_step(step)
        for tracer in tracers:  # later than the mark, so that the step can be closed
            with trace.use_tracer(tracer), trace.span("later"):
                pass
"""


def test_tail_follows_a_running_trial_over_a_restart_of_its_sidecar(short_dir: Path):
    """Each step is told with its slow rank while the run goes on, also after the sidecar was killed and restarted."""
    command = [sys.executable, "-m", "traceview.tail", str(short_dir), "--json"]
    with ExitStack() as stack:
        first = stack.enter_context(sidecar(short_dir))
        process = stack.enter_context(traced(short_dir, LIVE, rank=9, flush_period_s=0.05, stdin=subprocess.PIPE))
        assert process.stdin is not None
        follower = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stack.enter_context(follower)
        stack.callback(follower.kill)
        assert follower.stdout is not None
        slow = []
        for step in range(4):
            process.stdin.write("step\n")
            process.stdin.flush()
            line = json.loads(follower.stdout.readline())
            slow.append((line["step"], line["slowest"][0]["who"]))
            if step == 1:
                first.kill()
                first.wait()
                stack.enter_context(sidecar(short_dir))
    assert slow == [(0, "rollout/0"), (1, "rollout/1"), (2, "rollout/2"), (3, "rollout/0")]


LEFT = """
    n = 0
    for line in sys.stdin:
        if n:
            on_sidecar()
        for n in range(n, n + int(line)):
            trace.instant("tick", n=n)
        n += 1
        writer.flush()
        while writer._outlet is not None and writer._outlet.counts()[1]:  # until the sidecar has it all
            time.sleep(0.005)
        print(writer.path.stat().st_size, flush=True)
    trace.shutdown()
"""


def test_what_a_killed_sidecar_left_is_read_and_can_be_finished(short_dir: Path):
    """A sidecar that could not write lines is killed, the trial ends: merge has all; collect --finish writes it."""
    spool = short_dir / "traces" / "spool"

    def record(number: int) -> int:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    with traced(short_dir, LEFT, flush_period_s=0.2, stdin=subprocess.PIPE) as process:
        size = record(20_000)
        with sidecar(short_dir) as server:
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, size))  # the file is full, the spool is not
            record(10_000)
            wait_until(lambda: sum(path.stat().st_size for path in spool.glob("*.spool")) > 300_000, what="the blocks")
            server.kill()
            server.wait()
        process.stdin.close()
        process.wait(timeout=scaled(30))
    assert (short_dir / "traces" / "actor" / "traces_0.jsonl").stat().st_size == size
    assert TrialFiles(short_dir).numbers == list(range(30_000))
    assert merged_ticks(short_dir) == (list(range(30_000)), True)
    command = [sys.executable, "-m", "traceview", "collect", str(short_dir), "--finish", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=True).stdout)
    assert told["complete"]
    assert not spool.exists()
    assert merged_ticks(short_dir) == (list(range(30_000)), False)


def merged_ticks(trial: Path) -> tuple[list[int], bool]:
    """Merge strictly; return the numbers of all ticks, and whether something was read from a spool."""
    output = trial / "merged.json"
    command = [sys.executable, "-m", "traceview", "merge", str(trial), "-o", str(output), "--strict", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert ran.returncode == 0, ran.stderr
    ticks = [e["args"]["n"] for e in json.loads(output.read_text())["traceEvents"] if e["name"] == "tick"]
    return sorted(ticks), "spool_read" in json.loads(ran.stdout)["problems"]


FORKED = """
    import os
    on_sidecar()
    trace.instant("tick", n=0)
    pid = os.fork()
    if not pid:
        trace.instant("tick", n=100)
        while writer._outlet is None:
            time.sleep(0.005)
        trace.instant("tick", n=101)
        trace.shutdown()
        os._exit(0)
    os.waitpid(pid, 0)
    trace.instant("tick", n=1)
    print(pid)
"""


def test_a_forked_child_has_a_stream_of_its_own(short_dir: Path):
    """What parent and child record goes into files of their own, once, and both end in order."""
    with sidecar(short_dir), traced(short_dir, FORKED, flush_period_s=0.05) as process:
        child = int(finish(process))
    parent = TrialFiles(short_dir)
    assert parent.numbers == [0, 1]
    assert len(parent.named("zbus_end")) == 1
    own = (parent.main.with_name(f"traces_0.fork{child}.jsonl")).read_text().splitlines()
    events = [json.loads(line) for line in own]
    assert [e["args"]["n"] for e in events if e["name"] == "tick"] == [100, 101]
    assert {e["pid"] for e in events} == {child}
    assert [e["name"] for e in events].count("zbus_end") == 1
    assert any(e["name"] == "zbus_block" for e in events)


CLOCKS = """
    trace.reset()
    class Skewed:
        base = time.monotonic_ns()
        def monotonic_ns(self):
            real = time.monotonic_ns()
            return real + ahead + round((real - self.base) * drift)
        def wall_ns(self):
            return time.time_ns() + 3_000_000_000
    role, ahead, drift = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    clock = Skewed()
    if ahead:
        import zbus.clock, zbus.trace.tracefile
        zbus.clock.boot_id = zbus.trace.tracefile.boot_id = lambda: "boot of " + role
    from zbus.trace.control import writer_of
    config.update(flush_period_s=0.05, run_epoch_wall_ns=time.time_ns())
    tracer = trace.configure(config, role=role, rank=0, clock=clock)
    writer = writer_of(tracer)
    on_sidecar()
    for n in range(300):
        at = clock.monotonic_ns()
        tracer.append((1, "tick", "misc", at, "t", {"n": n, "real": time.monotonic_ns()}, None))
        time.sleep(0.01)
"""


@pytest.mark.alone
def test_clocks_of_other_hosts_are_matched_in_the_merged_trace(short_dir: Path):
    """Hosts 5 s and 50 ppm apart, their wall clocks 3 s off: merged through the sidecar, moments agree to 50 µs."""
    with sidecar(short_dir), ExitStack() as stack:
        ranks = [("controller", 0, 0), ("trainer", 5_000_000_000, 5e-5), ("critic", -5_000_000_000, -5e-5)]
        for process in [stack.enter_context(traced(short_dir, CLOCKS, *rank)) for rank in ranks]:
            finish(process)
    output = short_dir / "merged.json"
    command = [sys.executable, "-m", "traceview", "merge", str(short_dir), "-o", str(output), "--json"]
    merged = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert merged.returncode == 0, merged.stderr
    report = json.loads(merged.stdout)
    bounds = {p["role"]: p["clock_bound_us"] for p in report["processes"]}
    roles = {p["pid"]: p["role"] for p in report["processes"]}
    ticks = [e for e in json.loads(output.read_text())["traceEvents"] if e["name"] == "tick"]
    apart: dict[str, list[float]] = {}
    for tick in ticks:
        apart.setdefault(roles[tick["pid"]], []).append(tick["ts"] - tick["args"]["real"] / 1000)
    zero = statistics.median(apart["controller"])
    for role in ("trainer", "critic"):
        assert len(apart[role]) == 300
        error = abs(statistics.median(apart[role]) - zero)
        assert error <= bounds[role], f"{role}: {error} µs, stated bound {bounds[role]} µs"
        assert error <= 50 or bounds[role] > 100, f"{role}: {error} µs over an idle link"
