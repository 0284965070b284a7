from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from waiting import wait_until

RANK = textwrap.dedent(
    """
    import sys, time
    from zbus import trace
    root, role, rank, epoch_wall, epoch_mono, boot = sys.argv[1:]
    config = trace.TraceConfig(root=root, run="e/t", flush_period_s=0.05, run_epoch_wall_ns=int(epoch_wall),
                               run_epoch_mono_ns=int(epoch_mono), clock_boot_id=boot)
    tracer = trace.configure(config, role=role, rank=int(rank), incarnation=int(rank))
    session, n = b"s" * 16, 0
    while True:
        n += 1
        with trace.span("step", n=n):
            at = tracer.now()
            for worker in range(2) if role == "controller" else (int(rank),):
                ids = (session, f"actor/{worker}", worker, "main", n, 1, "train")
                if role == "controller":
                    tracer.bus_client(*ids, at, at + 10, at + 20, at + 80, at + 90, 1, 1, "OK")
                else:
                    tracer.bus_server(*ids, at + 30, at + 40, at + 50, at + 60, at + 70, "OK")
        print(n, flush=True)
        if not sys.stdin.readline():
            break
    """
)


def start(root: Path, role: str, rank: int) -> subprocess.Popen[str]:
    """Start one traced process that makes a step per line of its input."""
    import time

    from zbus.clock import boot_id

    epoch = (str(time.time_ns()), str(time.monotonic_ns()), boot_id())
    args = [sys.executable, "-c", RANK, str(root), role, str(rank), *epoch]
    return subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def step(process: subprocess.Popen[str]) -> None:
    """Make the process do one step more."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_run_with_a_killed_rank_merges_into_one_joined_timeline(tmp_path):
    """Three processes, one killed mid-write: all their rows, exact clocks, joined arrows, the crash named."""
    traces = tmp_path / "traces"
    ranks = [("controller", 0), ("actor", 0), ("actor", 1)]
    processes = [start(traces, *rank) for rank in ranks]
    killed = traces / "actor" / "traces_1.jsonl"
    try:
        for _ in range(5):
            for process in processes:
                step(process)
        wait_until(lambda: killed.exists() and killed.read_bytes().count(b'"run train"') >= 5, what="five steps")
        processes[2].send_signal(signal.SIGKILL)
        processes[2].wait()
        with killed.open("ab") as file:  # what a kill in the middle of a write leaves
            file.write(b'{"name":"run train","ph":"X","ts":12')
    finally:
        for process in processes:
            process.communicate(timeout=60)
    command = [sys.executable, "-m", "traceview", "merge", str(tmp_path), "-o", str(tmp_path / "out.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == {"no_end": 1, "truncated_tail": 1}
    assert [p["complete"] for p in report["processes"]] == [True, True, False]
    assert [p["clock"] for p in report["processes"]] == ["reference", "shared", "shared"]
    assert report["arrows"]["joined"] >= 2 * 2 * 5
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"step", "call train", "queue train", "run train"}
    strict = subprocess.run([*command, "--strict"], capture_output=True, text=True, timeout=60)
    assert strict.returncode == 7
