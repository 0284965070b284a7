"""What exact delivery costs a small call: processor time of caller and worker, two checkouts in turn.

    python benchmarks/delivery_cost.py BEFORE AFTER --rounds 9          # two checkouts of this repository
    python benchmarks/delivery_cost.py . . --after no-journal           # this one, with a part of it off
    python benchmarks/delivery_cost.py BEFORE AFTER --instructions      # counted by valgrind's callgrind: slow, exact

A call is ``group[0].echo(b"x")``: blocking, one rank, ipc, a real worker process. Each round measures both checkouts
anew, one right after the other and in changing order; the ratio is the median of the rounds' ratios, so the drift of a
machine that others use cancels out. Processor time is that of all threads of the process that calls and of the worker.

Variants: ``plain`` (tracing off), ``traced`` (tracing at ``rpc``), ``no-journal`` (no call of the worker is marked
in its crash journal).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
VARIANTS = ("plain", "traced", "no-journal")


# -- the driver, in a process of its own: what it imports is the checkout's -------------------------------------------


def cpu_ns(pid: int) -> int:
    """Return the processor time of all threads of a process that live."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total


def drive(calls: int, variant: str, folder: str) -> dict[str, Any]:
    """Launch one worker, make the calls, and return what one call cost."""
    from controller import Controller, Role
    from zbus.config import load_config

    level = "rpc" if variant == "traced" else "off"
    config = load_config(data={"trace": {"level": level, "merge": False}}).config
    engine = "cost_engine:Unkept" if variant == "no-journal" else "cost_engine:Cost"
    role = Role(engine, replicas=1, sys_path=[str(HERE.parent)])
    with Controller.launch("cost", {"w": role}, root=folder, config=config, startup_timeout=900) as bus:
        rank = bus.group("w")[0]
        worker = rank.pid()
        for _ in range(min(500, calls)):
            rank.echo(b"x")
        before = cpu_ns(os.getpid()), cpu_ns(worker)
        for _ in range(calls):
            rank.echo(b"x")
        after = cpu_ns(os.getpid()), cpu_ns(worker)
    caller, worker_ns = (b - a for a, b in zip(before, after, strict=True))
    return {"caller": caller / calls / 1e3, "worker": worker_ns / calls / 1e3, "pids": [os.getpid(), worker]}


# -- the rounds -----------------------------------------------------------------------------------------------------


def measure(checkout: Path, variant: str, calls: int, tool: list[str] | None = None) -> dict[str, Any]:
    """Run the driver with a checkout's code and return what it printed."""
    code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import delivery_cost as d, json, tempfile\n"
    code += "with tempfile.TemporaryDirectory() as folder:\n"
    code += f"    print(json.dumps(d.drive({calls}, {variant!r}, folder)))"
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [*(tool or ()), sys.executable, "-c", code], cwd=checkout, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        msg = f"{checkout}, {variant}: {done.stderr}"
        raise SystemExit(msg)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def count(checkout: Path, variant: str, calls: int) -> dict[str, Any]:
    """Count the instructions of ``calls`` calls and all that is around them, in each process."""
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--tool=callgrind", "--trace-children=yes", f"--callgrind-out-file={folder}/%p"]
        told = measure(checkout, variant, calls, tool)
        found = []
        for pid in told["pids"]:
            text = (Path(folder) / str(pid)).read_text(errors="replace")
            match = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            found.append(int(match[1]) if match else 0)
    return {"caller": found[0], "worker": found[1]}


def per_call(checkout: Path, variant: str, few: int, many: int) -> dict[str, float]:
    """Return the instructions of one call: what more calls take, so that start and end cancel out."""
    less, more = count(checkout, variant, few), count(checkout, variant, many)
    return {side: (more[side] - less[side]) / (many - few) for side in less}


def main() -> None:
    """Measure and print one JSON line per side and one with the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="before and after")
    parser.add_argument("--before", choices=VARIANTS, default="plain", help="variant of the first")
    parser.add_argument("--after", choices=VARIANTS, default="plain", help="variant of the second")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=4_000, help="calls in each round")
    parser.add_argument("--instructions", action="store_true", help="count instructions instead, once")
    options = parser.parse_args()
    first, second = (path.resolve() for path in options.checkouts)
    sides = [(first, options.before), (second, options.after)]
    rounds: list[list[dict[str, Any]]] = []
    for number in range(1 if options.instructions else options.rounds):
        turn = [0, 1] if number % 2 == 0 else [1, 0]
        told: dict[int, dict[str, Any]] = {}
        for side in turn:
            checkout, variant = sides[side]
            told[side] = (
                per_call(checkout, variant, 200, 1_200)
                if options.instructions
                else measure(checkout, variant, options.calls)
            )
        rounds.append([told[0], told[1]])
    unit = "instructions" if options.instructions else "cpu_us"
    for side, (checkout, variant) in enumerate(sides):
        medians = {
            f"{what}_{unit}": round(statistics.median(one[side][what] for one in rounds), 1)
            for what in ("caller", "worker")
        }
        print(json.dumps({"checkout": str(checkout), "variant": variant, "rounds": len(rounds), **medians}))
    ratios = {}
    for name, parts in (("caller", ("caller",)), ("worker", ("worker",)), ("both", ("caller", "worker"))):
        ratios[name] = round(
            statistics.median(sum(b[p] for p in parts) / sum(a[p] for p in parts) for a, b in rounds), 3
        )
    print(json.dumps({"after_over_before": ratios}))


if __name__ == "__main__":
    main()
