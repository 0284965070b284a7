from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from sidecar_kit import TrialFiles, sidecar, traced
from trace_rounds import PERIOD_S, STEADY, recorded, until_ready
from waiting import scaled, wait_until, within


def end(trial: Path, process: subprocess.Popen[str]) -> int:
    """Let a traced process end in order; return how many ticks it recorded."""
    (trial / "stop").touch()
    out, err = process.communicate(timeout=scaled(60))
    assert (process.returncode, err) == (0, "")
    return int(out)


def go_on(trial: Path, more: int = 300) -> None:
    """Wait until the process has recorded more."""
    goal = recorded(trial) + more
    wait_until(lambda: recorded(trial) >= goal, what=f"{more} more records")


def test_a_stopped_sidecar_costs_nothing_but_a_spill_that_goes_again(short_dir: Path):
    """While the sidecar is stopped blocks go to the spill; once it goes on it has them all, and the spill is gone."""
    with sidecar(short_dir) as server, traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
        until_ready(process)
        go_on(short_dir)
        server.send_signal(signal.SIGSTOP)
        spill = TrialFiles(short_dir).spill
        wait_until(lambda: spill.exists() and b"tick" in spill.read_bytes(), what="a block in the spill")
        go_on(short_dir)
        server.send_signal(signal.SIGCONT)
        wait_until(lambda: not spill.exists(), what="the spill to be taken by the sidecar")
        total = end(short_dir, process)
    files = TrialFiles(short_dir)
    assert files.numbers == list(range(total))
    assert files.torn == files.doubled == 0
    assert files.named("zbus_end")[0]["args"]["recorded"] == total


def test_without_its_sidecar_a_process_ends_in_its_spill(short_dir: Path):
    """The sidecar is killed for good: main file, spool and spill together hold every record once, and the end."""
    with sidecar(short_dir) as server, traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
        until_ready(process)
        go_on(short_dir)
        server.kill()
        server.wait()
        go_on(short_dir)
        total = end(short_dir, process)
    files = TrialFiles(short_dir)
    assert files.numbers == list(range(total))
    assert files.named("zbus_end")[0]["args"] == {
        "recorded": total, "written": total, "pending": 0, "lost": {}, "by": "process",
    }  # fmt: skip


def test_a_restarted_sidecar_goes_on_without_doubling(short_dir: Path):
    """Kill the sidecar, start another: it finishes what the first one took, takes the spill, and doubles nothing."""
    with traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
        with sidecar(short_dir) as first:
            until_ready(process)
            go_on(short_dir)
            first.kill()
            first.wait()
        go_on(short_dir)
        spill = TrialFiles(short_dir).spill
        with sidecar(short_dir):
            wait_until(lambda: not spill.exists(), what="the spill to be taken by the second sidecar")
            go_on(short_dir)
            total = end(short_dir, process)
    files = TrialFiles(short_dir)
    assert files.numbers == list(range(total))
    assert set(files.blocks.values()) == {1}
    assert files.torn == 0
    assert len(files.named("zbus_end")) == 1
    assert not (short_dir / "traces" / "spool").exists()


IDLE = """
    on_sidecar()
    trace.instant("tick", n=0)
    print("ready", flush=True)
    sys.stdin.readline()
    trace.shutdown()
"""


def test_an_idle_process_ends_with_a_sidecar_that_was_restarted(short_dir: Path):
    """It had nothing to say since, so it did not miss the old one: at its end it looks, and the new one has its end."""
    with traced(short_dir, IDLE, flush_period_s=PERIOD_S, stdin=subprocess.PIPE) as process:
        with sidecar(short_dir) as first:
            until_ready(process)
            wait_until(lambda: TrialFiles(short_dir).numbers == [0], what="the tick")
            first.kill()
            first.wait()
        with sidecar(short_dir):
            _, said = process.communicate("end\n", timeout=scaled(30))
    assert (process.returncode, said) == (0, "")
    files = TrialFiles(short_dir)
    assert files.numbers == [0]
    assert b'"zbus_end"' in files.main.read_bytes()
    assert not files.spill.exists()


def test_a_second_sidecar_is_refused(short_dir: Path):
    """Two sidecars of one trial would write the same files: the second one says who is there and ends."""
    import sys

    with sidecar(short_dir):
        command = [sys.executable, "-m", "traceview.collect", str(short_dir)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=scaled(30))
    assert second.returncode != 0
    assert "already collects into" in second.stderr


def test_a_killed_rank_loses_at_most_a_flush_period(short_dir: Path):
    """After SIGKILL of a rank its file is a whole beginning of what it recorded, up to one period before the kill."""
    with sidecar(short_dir), traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
        until_ready(process)
        go_on(short_dir)
        process.kill()
        killed_ns = time.monotonic_ns()
        process.wait()
    files = TrialFiles(short_dir)
    numbers = files.numbers
    assert numbers == list(range(len(numbers)))
    assert files.named("zbus_end") == []
    last = max(event["args"]["at"] for event in files.named("tick"))
    assert killed_ns - last < within(1.0) * 1e9  # ten periods: machines stall


BUSY = """
    on_sidecar()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - begin < 0.5:
            for n in range(20):
                with trace.span("work", step=n, loss=0.5):
                    pass
            time.sleep(0.01)
        print((time.process_time() - cpu) / (time.monotonic() - begin), flush=True)
"""


@pytest.mark.ci
@pytest.mark.alone
def test_a_stopped_sidecar_costs_a_worker_at_most_2_percent(short_dir: Path):
    """2,000 spans a second: in turns with a sidecar that runs and one that is stopped, CPU differs by 2 % at most."""
    shares: dict[str, list[float]] = {"runs": [], "stopped": []}
    with sidecar(short_dir) as server, traced(short_dir, BUSY, flush_period_s=0.25, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        until_ready(process)
        spill = TrialFiles(short_dir).spill
        for _ in range(10):
            for state, number in (("runs", signal.SIGCONT), ("stopped", signal.SIGSTOP)):
                server.send_signal(number)
                if state == "runs":
                    wait_until(lambda: not spill.exists(), what="the end of the spill")
                process.stdin.write("go\n")
                process.stdin.flush()
                shares[state].append(float(process.stdout.readline()))
            assert b'"work"' in spill.read_bytes()
    more = [stopped - runs for runs, stopped in zip(shares["runs"], shares["stopped"], strict=True)]
    told = {state: f"{statistics.median(values):.2%}" for state, values in shares.items()}
    print(f"CPU of one core, medians: {told}; paired difference {statistics.median(more):.2%}")
    assert statistics.median(more) <= 0.02


def test_a_stopped_sidecar_does_not_hold_up_the_end(short_dir: Path):
    """A process that ends while the sidecar is stopped waits for its answer two seconds at most, and loses nothing."""
    with sidecar(short_dir) as server, traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
        until_ready(process)
        go_on(short_dir)
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        total = end(short_dir, process)
        assert time.monotonic() - began < 2.0 + within(2.0)
        files = TrialFiles(short_dir)
        assert files.numbers == list(range(total))
        [told] = files.named("zbus_end")
        assert told["args"]["recorded"] == told["args"]["written"] == total
    assert TrialFiles(short_dir).numbers == list(range(total))


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_that_is_freed_loses_only_what_is_counted(short_dir: Path):
    """The whole trial on a small file system, filled and freed: the run goes on, and all records are accounted for."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", short_dir], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (short_dir / "registry").mkdir(mode=0o700)
        with sidecar(short_dir), traced(short_dir, STEADY, flush_period_s=PERIOD_S) as process:
            until_ready(process)
            go_on(short_dir)
            filler = short_dir / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            go_on(short_dir, 3000)
            filler.unlink()
            go_on(short_dir, 3000)
            (short_dir / "stop").touch()
            out, said = process.communicate(timeout=scaled(60))
            total = int(out)
        assert said.count("the run goes on, losses are counted") == said.count("\n") <= 1
        files = TrialFiles(short_dir)
        [last] = files.named("zbus_end")
        assert last["args"]["recorded"] == total == last["args"]["written"] + sum(last["args"]["lost"].values())
        assert len(files.numbers) == len(set(files.numbers)) == last["args"]["written"]
        assert files.torn == 0
    finally:
        subprocess.run(["umount", "-l", short_dir], check=True)
