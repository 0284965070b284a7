"""Rounds of random harm to traced processes, a trial and its sidecar, and the account of every record afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar_kit import TrialFiles, sidecar, traced
from traceview.merge import MergeReport, merge
from waiting import scaled, wait_until, within

__all__ = ["PERIOD_S", "STEADY", "Account", "process_round", "recorded", "small_disk", "trial_round", "until_ready"]

HERE = Path(__file__).parent
PERIOD_S = 0.1

# Records numbered ticks until there is a file ``stop``; the number of the last one is on its board before anything else
# is known of it.
STEADY = """
    import os, select
    on_sidecar()
    print("ready", flush=True)
    board = os.open(sys.argv[1] + f"/last.{tracer.rank}", os.O_RDWR | os.O_CREAT, 0o600)
    stop = Path(sys.argv[1]) / "stop"
    n = 0
    while not stop.exists():
        for _ in range(20):
            trace.instant("tick", n=n, at=time.monotonic_ns())
            os.pwrite(board, b"%12d" % n, 0)
            n += 1
        time.sleep(0.005)
    trace.shutdown()
    print(n, flush=True)
"""


@dataclass
class Account:
    """What became of the records of some rounds.

    Attributes:
        rounds: How many.
        harmed: What was done, by kind.
        recorded, read, counted: Records made, found in the files, and counted as lost.
        killed: Processes killed.
        missing: Records of killed processes that are in no file and that nobody could count.
        lag_s: How old the newest record in the files was when its process was killed, for each of them whose disk was
            not full.
        merged: Merges that did not fail.
    """

    rounds: int = 0
    harmed: Counter[str] = field(default_factory=Counter)
    recorded: int = 0
    read: int = 0
    counted: int = 0
    killed: int = 0
    missing: int = 0
    lag_s: list[float] = field(default_factory=list)
    merged: int = 0

    def __str__(self) -> str:
        lag = sorted(self.lag_s) or [0.0]
        return (
            f"{self.rounds} rounds, {dict(self.harmed)}: {self.recorded} recorded = {self.read} read + {self.counted} "
            f"counted as lost + {self.missing} of {self.killed} killed processes, whose newest record was "
            f"{lag[len(lag) // 2] * 1e3:.0f} ms old (median; at most {lag[-1] * 1e3:.0f} ms, period "
            f"{PERIOD_S * 1e3:.0f} ms); {self.merged} merges"
        )


def until_ready(process: subprocess.Popen[str]) -> None:
    """Wait until a traced process has found the sidecar."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def recorded(trial: Path, rank: int = 0) -> int:
    """Return how many ticks a process has recorded, also one that was killed."""
    try:
        return int((trial / f"last.{rank}").read_bytes()) + 1
    except (OSError, ValueError):
        return 0


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Put a small file system there, if that may be done here; says whether."""
    options = ["-o", "size=6m,mode=700"]
    here = (
        os.geteuid() == 0
        and not subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", path], check=False).returncode
    )
    try:
        yield here
    finally:
        if here:
            subprocess.run(["umount", "-l", path], check=True)


def fill(trial: Path) -> None:
    """Fill the disk of a trial."""
    with (trial / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def process_round(trial: Path, rng: random.Random, account: Account, *, ranks: int = 3) -> None:
    """Kill ranks and sidecar, stop the sidecar, fill the disk and free it, at random; then account for every record."""
    with small_disk(trial) as may_fill:
        (trial / "registry").mkdir(mode=0o700)
        _one_process_round(trial, rng, account, ranks, may_fill=may_fill)


def _one_process_round(trial: Path, rng: random.Random, account: Account, ranks: int, *, may_fill: bool) -> None:
    acts = ["sidecar", "sidecar", "stop", "stop", *range(ranks), *(["fill"] if may_fill else [])]
    filled: list[tuple[float, float]] = []
    killed: dict[int, float] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(sidecar(trial))]
        processes = [stack.enter_context(traced(trial, STEADY, rank=r, flush_period_s=PERIOD_S)) for r in range(ranks)]
        for process in processes:
            until_ready(process)
        began = time.monotonic()
        for _ in range(rng.randint(1, 4)):
            time.sleep(rng.random() * 0.3)
            act = rng.choice(acts)
            if act == "sidecar":
                servers[-1].kill()
                servers[-1].wait()
                if rng.random() < 0.7:
                    servers.append(stack.enter_context(sidecar(trial)))
            elif act == "stop" and servers[-1].poll() is None:
                stopped(servers[-1], rng.random() * 0.4)
            elif act == "fill":
                begin = time.monotonic()
                fill(trial)
                time.sleep(rng.random() * 0.5)
                (trial / "filler").unlink()
                filled.append((begin, time.monotonic()))
            elif isinstance(act, int) and act not in killed:
                processes[act].kill()
                killed[act] = time.monotonic()
                processes[act].wait()
            account.harmed["rank" if isinstance(act, int) else act] += 1
        time.sleep(rng.random() * 0.3)
        (trial / "stop").touch()
        said = [process.communicate(timeout=scaled(60)) for process in processes]
    for rank, process in enumerate(processes):
        assert (process.returncode == 0) == (rank not in killed), said[rank]
        full = any(begin - 1.0 < killed.get(rank, 0.0) < end + 1.0 for begin, end in filled)
        check_rank(trial, rank, account, began=began, killed_at=killed.get(rank), full=full)
    report = check_merge(trial, account)
    assert report.problems.get("no_end", 0) == len(killed)
    assert report.incomplete == bool(killed or report.problems.get("lost")), report.problems
    account.rounds += 1


def stopped(server: subprocess.Popen[str], seconds: float) -> None:
    """Stop a sidecar for a while."""
    import signal

    server.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    server.send_signal(signal.SIGCONT)


def check_rank(trial: Path, rank: int, account: Account, *, began: float, killed_at: float | None, full: bool) -> None:
    """Recorded = written + lost by reason; of a killed rank at most the last flush period is missing."""
    files, total = TrialFiles(trial, rank=rank), recorded(trial, rank)
    numbers = files.numbers
    assert len(numbers) == len(set(numbers)), f"rank {rank}: doubled"
    assert max(files.blocks.values(), default=0) <= 1
    counted = sum(event["args"]["lost"] for event in files.named("zbus_loss"))
    if killed_at is None:
        [end] = {json.dumps(event["args"]) for event in files.named("zbus_end")}
        told = json.loads(end)
        counted = sum(told["lost"].values())
        assert told["recorded"] == total == told["written"] + told["pending"] + counted
        assert told["pending"] == 0
        assert len(numbers) == told["written"]
    else:
        assert files.named("zbus_end") == []
        if not counted and not full:
            assert numbers == list(range(len(numbers))), f"rank {rank}: holes"
            newest = max((event["args"]["at"] / 1e9 for event in files.named("tick")), default=began)
            account.lag_s.append(killed_at - newest)
            assert account.lag_s[-1] < PERIOD_S + within(0.5), f"rank {rank} lost more than a period"
        account.killed += 1
        account.missing += max(0, total - len(numbers) - counted)
        total = max(total, len(numbers) + counted)
    account.recorded += total
    account.read += len(numbers)
    account.counted += counted


def check_merge(trial: Path, account: Account) -> MergeReport:
    """Merge; what the files hold is in the output once, and nothing is missing that nobody names."""
    output = trial.parent / f"{trial.name}.merged.json"
    try:
        report = merge([str(trial)], output)
        events = json.loads(output.read_text())["traceEvents"]
    finally:
        output.unlink(missing_ok=True)
    account.merged += 1
    roots = (trial / "traces").glob("actor/traces_*.jsonl")
    ranks = {int(path.name.split("_")[1].split(".")[0]) for path in roots}
    ticks = Counter((event["pid"], event["args"]["n"]) for event in events if event["name"] == "tick")
    assert not ticks or max(ticks.values()) == 1
    assert len(ticks) == sum(len(TrialFiles(trial, rank=rank).numbers) for rank in ranks)
    return report


# -- a whole trial -------------------------------------------------------------------------------------------------

DRIVER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from launching import probes
    from controller import Controller
    from zbus.config import Config
    from zbus.config.schema import TraceConfig
    from zbus.errors import CallError

    config = Config(trace=TraceConfig(sidecar=True))
    roles = {"actor": probes(2, restart="one", max_restarts=100, restart_window_s=1.0)}
    with Controller.launch("exp", roles, trial="t", root=sys.argv[1], config=config) as bus:
        stop = Path(sys.argv[1]) / "stop"
        actor = bus.group("actor")
        number = 0
        while not stop.exists():
            try:
                actor.echo.submit(number).result(5.0)
                print("ok", number, flush=True)
            except (CallError, ExceptionGroup):
                pass
            number += 1
"""


def trial_round(root: Path, rng: random.Random, account: Account) -> None:
    """Kill a worker, the controller and the sidecar of a real trial at random; then account for every record."""
    trial = root / "exp" / "t"
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(root), str(HERE)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        handed = [trial / "traces" / name for name in ("controller/traces_0.jsonl", "actor/traces_0.jsonl")]
        while not all(path.exists() and b'"zbus_block"' in path.read_bytes() for path in handed):
            assert driver.stdout.readline(), "the trial ended"
        acts = rng.sample(["worker", "sidecar", "controller", "stop"], rng.randint(1, 3))
        acts.sort(key=lambda act: act == "controller")  # nothing is left to kill after it
        with contextlib.ExitStack() as stack:
            for act in acts:
                time.sleep(rng.random() * 0.3)
                _harm_trial(trial, act, driver, rng, stack)
                account.harmed[act] += 1
            time.sleep(rng.random() * 0.3)
        (root / "stop").touch()
        driver.stdout.read()
    wait_until(lambda: not list(_processes_of(root)), what="the end of all processes of the trial", timeout_s=20)
    _check_trial(trial, acts, driver.returncode, account)
    account.rounds += 1


def _harm_trial(
    trial: Path, act: str, driver: subprocess.Popen[str], rng: random.Random, stack: contextlib.ExitStack
) -> None:
    import signal

    from zbus.registry.file import FileRegistry
    from zbus.registry.records import Records
    from zbus.trace.export import sidecar_record

    if act == "controller":
        driver.kill()
        return
    if act == "worker":
        registry = FileRegistry(trial / "registry", create=False)
        workers = Records(registry).workers("actor")
        registry.close()
        pid = rng.choice(workers).pid
    else:
        record = sidecar_record(trial / "registry")
        if record is None:
            return
        pid = record.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if act == "stop" else signal.SIGKILL)
        if act == "stop":
            stack.callback(_go_on, pid)


def _go_on(pid: int) -> None:
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _processes_of(root: Path) -> Iterator[int]:
    mark = os.fsencode(root)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark in (entry / "cmdline").read_bytes():
                    yield int(entry.name)


def _check_trial(trial: Path, acts: list[str], code: int, account: Account) -> None:
    """Each stream that ended adds up; one that did not is a killed process; the merge holds all of it."""
    output = trial / "merged.json"
    report = merge([str(trial)], output)
    account.merged += 1
    ended = killed = 0
    for path in sorted((trial / "traces").glob("*/traces_*.jsonl")):
        if path.name.endswith(".spill.jsonl"):
            continue
        files = TrialFiles.of(trial, path)
        assert max(files.blocks.values(), default=0) <= 1
        ends: list[dict[str, Any]] = [event["args"] for event in files.named("zbus_end")]
        if not ends:
            killed += 1
            continue
        ended += 1
        for end in ends:
            lost = sum(end["lost"].values())
            assert end["recorded"] == end["written"] + end["pending"] + lost
            assert end["pending"] == 0
            account.recorded += end["recorded"]
            account.read += end["written"]
            account.counted += lost
    may_die = ("worker" in acts) + ("controller" in acts) * 3
    assert killed <= may_die, (acts, killed)
    if not may_die:
        assert code == 0
        assert not report.incomplete, report.problems
    else:
        assert set(report.problems) <= {"no_end", "spool_read", "unfinished_span", "truncated_tail"}, report.problems
    account.killed += killed
