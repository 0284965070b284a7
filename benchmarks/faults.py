"""What callers are told, and what really ran, when faults strike: zbus beside its rivals.

    python benchmarks/faults.py --json                               # zbus and the HTTP stand-in; rivals are skipped
    python benchmarks/faults.py --peers all --json                   # installs each rival into a venv of its own
    python benchmarks/faults.py --peers zbus,ray --venvs /var/tmp/v  # keeps those venvs there for the next time

One workload: a method that must run once leaves a mark in a file, takes 0.2 s and answers; three calls at a time go to
one of two workers. Faults, each while the first call runs: ``cut`` resets every TCP connection of the worker;
``reply`` lets nothing out of them until all three calls are over, and then resets them, so that replies that were sent
are lost; ``kill`` is SIGKILL; ``stall`` stops the worker by SIGSTOP for 2.5 s while callers give a call 1 s. Each
system runs in a network and process namespace of its own with nothing but loopback, so nothing listens outside and
nothing outlives a run. No system is told of the faults, or set up for them, except as its line in ``fault_peers.py``
says.

Counted per fault: ``calls``; verdicts ``ok``, ``late`` (ok, asked again after a time-out), ``not_executed`` and
``unknown`` where the system itself says so, ``untold`` (an error or a time-out that does not say whether the call ran)
and ``hangs`` (no verdict at all within 20 s); and by the marks: ``duplicates`` (second runs), ``lost`` (answered, never
ran), ``wrong`` (a wrong answer, or said not to have run but did). ``rebuilt``: a worker, or all of the system, had to
be made anew by hand afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fault_peers import PEERS, Peer, Verdict
from fault_work import Truth

HERE: Final = Path(__file__).resolve().parent
FAULTS: Final = ("cut", "reply", "kill", "stall")
WORK_S: Final = 0.2
PATIENCE_S: Final = 1.0
STALL_S: Final = 2.5
BOUND_S: Final = 20.0
CALLS: Final = 3
COLUMNS: Final = (
    "calls", "ok", "late", "not_executed", "unknown", "untold", "hangs", "duplicates", "lost", "wrong", "rebuilt",
)  # fmt: skip


# -- faults ----------------------------------------------------------------------------------------------------------


def connections(pid: int) -> list[tuple[int, int]]:
    """Return (local port, remote port) of the TCP connections of a process."""
    mine = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                mine.add(str(fd.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and f"socket:[{words[9]}]" in mine:  # established
                found.append((int(words[1].rpartition(":")[2], 16), int(words[2].rpartition(":")[2], 16)))
    return found


def lose_replies(pid: int) -> int:
    """Let no byte leave the connections of a process while its calls end, then reset them; return how many."""
    pairs = connections(pid)
    rules = [
        ["OUTPUT", "-p", "tcp", "--sport", str(local), "--dport", str(remote), "-j", "DROP"] for local, remote in pairs
    ]
    for rule in rules:
        subprocess.run(["iptables", "-A", *rule], check=True)
    time.sleep(CALLS * WORK_S + 0.3)
    cut(pid, pairs)
    for rule in rules:
        subprocess.run(["iptables", "-D", *rule], check=True)
    return len(pairs)


def cut(pid: int, pairs: list[tuple[int, int]] | None = None) -> int:
    """Reset every TCP connection of a process, or those given; return how many."""
    pairs = connections(pid) if pairs is None else pairs
    # Both ends, since the reset of one may be among what is held back.
    for here, there in [*pairs, *((remote, local) for local, remote in pairs)]:
        command = ["ss", "-K", "-t", "sport", "=", f":{here}", "and", "dport", "=", f":{there}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return len(pairs)


def strike(fault: str, pid: int) -> None:
    """Let a fault happen to a worker; a stall lasts until SIGCONT."""
    if fault in ("cut", "reply"):
        if not (cut if fault == "cut" else lose_replies)(pid):
            msg = f"worker {pid} has no TCP connection to cut"
            raise RuntimeError(msg)
    elif fault == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGSTOP)


Verdicts = dict[int, tuple[Verdict, bool]]
"""Verdict, and whether it came late, by call number."""


# -- one system, in its namespace ------------------------------------------------------------------------------------


def play(peer: Peer, fault: str, rounds: int, truth: Truth, first: int) -> tuple[Verdicts, int]:
    """Play one fault several times; return the verdicts, and how often a worker had to be made anew from outside."""
    verdicts: Verdicts = {}
    rebuilt = 0
    for turn in range(rounds):
        rank = turn % 2
        pid = peer.pid(rank)
        numbers = range(first + turn * CALLS, first + (turn + 1) * CALLS)
        handles = {number: peer.submit(rank, number, WORK_S) for number in numbers}
        if not truth.wait(numbers[0], BOUND_S):
            msg = f"call {numbers[0]} did not begin"
            raise RuntimeError(msg)
        strike(fault, pid)
        began = time.monotonic()
        if fault == "stall":
            threading.Timer(STALL_S, os.kill, (pid, signal.SIGCONT)).start()
        for number, handle in handles.items():
            verdict = peer.wait(handle, max(0.1, BOUND_S - (time.monotonic() - began)))
            late = verdict.kind == "timeout" and (again := peer.later(handle, BOUND_S)).kind != "timeout"
            verdicts[number] = (again, True) if late else (verdict, False)
        truth.settle(1.0 if fault != "stall" else 3.0, 15.0)
        rebuilt += peer.replace(rank)
    return verdicts, rebuilt


def count(verdicts: Verdicts, runs: dict[int, int]) -> dict[str, Any]:
    """Compare what callers were told with what ran."""
    table: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
    table |= {"untold_ran": 0, "untold_not": 0, "errors": {}, "said": {}}
    for number, (verdict, late) in verdicts.items():
        ran = runs.get(number, 0)
        table["calls"] += 1
        table["duplicates"] += max(0, ran - 1)
        kind = {"error": "untold", "timeout": "untold", "hang": "hangs"}.get(verdict.kind, verdict.kind)
        table["late" if late and kind == "ok" else kind] += 1
        table["lost"] += kind == "ok" and ran == 0
        table["wrong"] += (kind == "ok" and verdict.value != number * number) or (kind == "not_executed" and ran > 0)
        if kind == "untold":
            table["untold_ran" if ran else "untold_not"] += 1
        if verdict.text:
            name = verdict.text.partition(":")[0]
            table["errors"][name] = table["errors"].get(name, 0) + 1
            table["said"].setdefault(name, verdict.text)
    return table


def versions(packages: tuple[str, ...]) -> str:
    """Return name and version of what was compared."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) or "this repository"


def one(name: str, faults: list[str], rounds: int) -> None:
    """Run one system through the faults and print a line for each; in the namespace, under its own interpreter."""
    first = 1
    for fault in [fault for fault in faults if fault in PEERS[name].faults]:
        with tempfile.TemporaryDirectory(prefix="zf", ignore_cleanup_errors=True) as directory:
            peer, truth = PEERS[name](directory), Truth(directory)
            peer.start(PATIENCE_S if fault == "stall" else None)
            began = time.monotonic()
            try:
                verdicts, rebuilt = play(peer, fault, rounds, truth, first)
            finally:
                with contextlib.suppress(Exception):
                    peer.stop()
            line = {"peer": name, "fault": fault, "versions": versions(peer.packages), **count(verdicts, truth.runs())}
            line["rebuilt"] = rebuilt
            print("RESULT " + json.dumps({**line, "wall_s": round(time.monotonic() - began, 1)}), flush=True)
        first += 10_000


# -- all of them -----------------------------------------------------------------------------------------------------


def interpreter(name: str, venvs: Path) -> str:
    """Return an interpreter that has a system, installing it into a virtual environment of its own."""
    packages = PEERS[name].packages
    if not packages:
        return sys.executable
    home = venvs / packages[0]
    python = str(home / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    if subprocess.run([python, "-c", f"import {packages[0]}"], check=False, stderr=subprocess.DEVNULL).returncode:
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def run(name: str, args: argparse.Namespace, venvs: Path) -> list[dict[str, Any]]:
    """Run one system in a namespace; return its lines, or one that says why it was skipped."""
    try:
        python = interpreter(name, venvs)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().rpartition("\n")[2]
        return [{"peer": name, "skipped": f"cannot be installed: {last}"}]
    inner = f"ip link set lo up && exec {python} {__file__} --one {name} --faults {args.faults} --rounds {args.rounds}"
    command = ["unshare", "-r", "-n", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", inner]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=args.limit)
        text, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        text, err = (error.stdout or b"").decode(), f"cut off after {args.limit:g} s"
    lines = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
    seen = {line["fault"] for line in lines}
    why = err.strip().rpartition("\n")[2][-300:]
    missing = [fault for fault in args.faults.split(",") if fault in PEERS[name].faults and fault not in seen]
    lines += [{"peer": name, "fault": fault, "skipped": why} for fault in missing]
    return lines


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", default="zbus,zbus-wait,http-retry", help="comma-separated, or all: " + ", ".join(PEERS)
    )
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--rounds", type=int, default=4, help="rounds of three calls for each fault")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one system")
    parser.add_argument("--venvs", type=Path, help="where rivals are installed; a temporary place if not given")
    parser.add_argument("--json", action="store_true", help="one JSON line per result")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.faults.split(","), args.rounds)
        return
    wanted = list(PEERS) if args.peers == "all" else args.peers.split(",")
    if unknown := [name for name in wanted if name not in PEERS]:
        parser.error(f"no such peer: {', '.join(unknown)}; known: {', '.join(PEERS)}")
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("ss") is None:
        sys.exit("faults.py needs unshare, ip and ss (util-linux, iproute2)")
    for name in PEERS:
        if name not in wanted:
            print(f"skipped {name}: ask for it with --peers", file=sys.stderr)
    today = datetime.now(UTC).date().isoformat()
    with tempfile.TemporaryDirectory(prefix="zbus-rivals-") as temporary:
        for name in wanted:
            for line in run(name, args, args.venvs or Path(temporary)):
                if args.json:
                    print(json.dumps({"benchmark": "faults", "date": today, **line}), flush=True)
                elif "skipped" in line:
                    print(f"{name:12} {line.get('fault', ''):6} skipped: {line['skipped']}", flush=True)
                else:
                    figures = "  ".join(f"{key} {line[key]}" for key in COLUMNS)
                    print(f"{name:12} {line['fault']:6} {figures}", flush=True)


if __name__ == "__main__":
    main()
