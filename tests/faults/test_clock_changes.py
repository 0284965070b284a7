"""Clocks that jump, run fast or slow, or stand still for minutes: no deadline, lease or death fires wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from disk_kit import ELSEWHERE, external, needs_root, worker
from launching import probes
from preload_kit import Clocks, needs_compiler
from waiting import scaled, wait_until, within
from zbus.config import TrialDir
from zbus.errors import CallTimeout
from zbus.runtime.processes import children_of

pytestmark = [pytest.mark.ci, pytest.mark.alone, needs_compiler]

DRIVER = Path(__file__).parent / "drivers" / "clock_driver.py"
HOUR_S = 3600.0


class Trial:
    """A trial in processes of its own, whose clocks the test sets."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self._log = root / "driver.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._guard = threading.Timer(scaled(60), self.kill)
        self._guard.start()

    @property
    def said(self) -> str:
        """What its processes have logged."""
        return self._log.read_text()

    def ready(self, rounds: int) -> None:
        """Wait until calls are answered."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.said[-3000:]
        self.answered(rounds)

    def effects(self) -> Counter[str]:
        """Return how often each call ran."""
        return Counter((self.root / "effects").read_text().split())

    def answered(self, more: int) -> None:
        """Wait until so many more rounds of calls have begun: each one ends the one before it."""
        rounds = len([name for name in self.effects() if name.startswith("slow")])
        wait_until(
            lambda: len([name for name in self.effects() if name.startswith("slow")]) >= rounds + more,
            timeout_s=30.0,
            what=f"{more} more rounds of calls",
        )

    def everyone(self) -> list[int]:
        """Return the pids of all its processes."""
        found, front = [], [self.process.pid]
        while front:
            found.append(front.pop())
            front.extend(children_of(found[-1]))
        return found

    def end(self) -> dict[str, Any]:
        """End it in order, and return what it tells."""
        out, _ = self.process.communicate("end\n", timeout=scaled(60))
        assert self.process.returncode == 0, self.said[-3000:]
        return json.loads(out)  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End it at once."""
        self._guard.cancel()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def trial(root: Path, environment: dict[str, str], rounds: int = 3, longest_s: float | None = None) -> Iterator[Trial]:
    """Run a trial, and see that nothing fired wrongly: every call ran once and is OK, nobody died or was left."""
    made = Trial(root, environment)
    try:
        made.ready(rounds)
        yield made
        told = made.end()
    finally:
        made.kill()
    said = made.said
    assert set(told["outcomes"]) == {"OK"}, said[-3000:]
    assert told["starts"] == [0, 0]
    assert told["codes"] == [0, 0]
    effects = made.effects()
    assert {count for name, count in effects.items() if name.startswith("c")} == {1}
    assert {count for name, count in effects.items() if not name.startswith("c")} == {2}
    assert len(effects) - 1 == told["outcomes"]["OK"]
    for word in ("died", "controller is gone", "was replaced", "stuck", "could not be renewed", "Traceback"):
        assert word not in said, said[-3000:]
    if longest_s is not None:
        check_trace(root / "clock" / "trial", longest_s)


def check_trace(trial_dir: Path, longest_s: float) -> None:
    """Neither in the files nor merged has a span a negative length, or lies before the run or long after it."""
    files = list((trial_dir / "traces").glob("actor/traces_*.jsonl"))
    assert len(files) == 2
    for file in files:
        check_spans([json.loads(line) for line in file.read_text().splitlines()], longest_s)
    merged = trial_dir / "merged.json"
    command = [sys.executable, "-m", "traceview", "merge", str(trial_dir), "-o", str(merged)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    events = json.loads(merged.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert len([name for name in names if name.startswith("actor")]) == 2, names
    check_spans(events, longest_s)


def check_spans(events: list[dict[str, Any]], longest_s: float) -> None:
    """Check the times of all spans."""
    spans = [event for event in events if event.get("ph") == "X"]
    assert len(spans) > 20
    assert min(event["dur"] for event in spans) >= 0
    assert 0 <= min(event["ts"] for event in spans) <= max(event["ts"] for event in spans) < longest_s * 1e6


def environment_of(clocks: Clocks, workers: Clocks | None = None) -> dict[str, str]:
    """Return the environment of a driver with these clocks, whose workers have others or the same.

    The workers are strangers to the controller's pid, so that both watch each other by leases.
    """
    words = {"ZT_WORKER_PREFIX": json.dumps(ELSEWHERE), **clocks.environment}
    return words if workers is None else {**words, "ZT_CLOCK_OF_WORKERS": json.dumps(workers.environment)}


def set_for(running: Trial) -> int:
    """Return how many processes of a trial have the clocks of the test."""
    return sum("fakeclock.so" in Path(f"/proc/{pid}/maps").read_text() for pid in running.everyone())


@pytest.fixture(autouse=True)
def _short_sockets(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))


def test_the_clocks_of_a_process_are_what_a_test_sets(tmp_path):
    """The tool of this file: jumps are seen at once, waits end when they are due by the clocks that were set."""
    clocks = Clocks(tmp_path / "clocks", rate=10.0)
    program = """if True:
        import threading, time
        def now(): return time.monotonic(), time.time(), time.clock_gettime(11)  # the last one is not touched
        print("ready", *now(), flush=True)
        input()
        print(*now(), flush=True)
        threading.Event().wait(2)
        print(*now(), flush=True)
        threading.Timer(0.1, print, ("waits", ), {"flush": True}).start()
        threading.Event().wait(3000)
        print(*now(), flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clocks.environment},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def told() -> list[float]:
            return [float(word) for word in process.stdout.readline().split()[-3:]]

        first = told()
        clocks.set(jump=600.0, wall=-HOUR_S)
        process.stdin.write("\n")
        process.stdin.flush()
        second, third = told(), told()
        assert process.stdout.readline() == "waits\n"
        clocks.set(jump=4000.0, wall=-HOUR_S)
        last = told()
    mono, wall, real = (b - a for a, b in zip(first, second, strict=True))
    assert mono == pytest.approx(600.0 + 10 * real, abs=0.5)
    assert wall == pytest.approx(mono - HOUR_S, abs=0.5)
    mono, _, real = (b - a for a, b in zip(second, third, strict=True))
    assert mono == pytest.approx(10 * real, abs=0.2)
    assert 0.19 < real < within(1)
    mono, _, real = (b - a for a, b in zip(third, last, strict=True))
    assert mono > 3000
    assert real < within(5)


@needs_root
def test_a_wall_clock_that_jumps_an_hour_changes_nothing(tmp_path):
    """Row 55: an hour ahead, then an hour back, while calls run and leases are watched."""
    clocks = Clocks(tmp_path / "clocks")
    with trial(tmp_path, environment_of(clocks), longest_s=scaled(60)) as running:
        assert set_for(running) >= 7  # the driver, its sidecar, two agents, two templates or helpers, two ranks
        for wall in (HOUR_S, -HOUR_S, 0.0):
            clocks.set(wall=wall)
            running.answered(5)


@needs_root
@pytest.mark.parametrize(("controller", "workers"), [(10.0, 0.1), (0.1, 10.0)])
def test_one_side_whose_clock_runs_wrongly_kills_nobody(tmp_path, controller, workers):
    """Row 56: ten times too fast here and too slow there: leases look expired, and what is connected is not dead."""
    clocks = Clocks(tmp_path / "clocks", controller), Clocks(tmp_path / "clocks_of_workers", workers)
    lease = {"ZT_LEASE_S": "5"}  # a rank is dialled within it, by a fast clock: a tenth
    with trial(tmp_path, {**environment_of(*clocks), **lease}) as running:
        assert set_for(running) >= 7
        began = time.monotonic()
        while time.monotonic() - began < 3.0:  # more than any lease, by every clock but the slow one
            running.answered(1)


@needs_root
def test_ten_minutes_of_suspend_cost_nothing_but_time(tmp_path):
    """Row 58: all processes are stopped in a long call, ten minutes pass on all their clocks, and all go on."""
    clocks = Clocks(tmp_path / "clocks")
    long = {"ZT_SLOW_S": "1.5"}
    with trial(tmp_path, {**environment_of(clocks), **long}, 1, longest_s=2000.0) as running:
        for number in (1, 2):
            everyone = running.everyone()
            for pid in everyone:
                os.kill(pid, signal.SIGSTOP)
            clocks.set(jump=number * 600.0, wall=number * 600.0)
            for pid in reversed(everyone):
                os.kill(pid, signal.SIGCONT)
            running.answered(2)


@needs_root
def test_monotonic_clocks_of_two_hosts_are_never_compared(tmp_path):
    """Row 57: rank 0 is a day and more ahead of rank 1: deadlines hold on both, and traces fit."""
    place = TrialDir.at(tmp_path, "clock", "trial")
    with ExitStack() as stack:
        for rank, prefix in enumerate((ELSEWHERE, ())):
            stack.enter_context(
                worker(place.path, "actor", "--rank", str(rank), log=tmp_path / f"log{rank}", prefix=prefix)
            )
        bus = stack.enter_context(external(place, {"actor": probes()}))
        actor = bus.group("actor")
        ahead = [one - time.monotonic() for one in actor.monotonic()]
        assert ahead[0] > 90_000
        assert abs(ahead[1]) < within(1)
        for rank in (0, 1):
            slow = actor[rank].sleep.submit(1.0)
            began = time.monotonic()
            with pytest.raises(CallTimeout, match="did not run"):
                actor[rank].sleep.options(deadline=0.3)(0.0)
            assert 0.3 <= time.monotonic() - began < within(3.0)
            assert actor[rank].sleep.options(deadline=scaled(20))(0.0) == 0.0
            assert slow.result() == 1.0
        for _ in range(20):
            actor.echo(0)
    check_trace(place.path, scaled(60))
