"""From ``launch`` to the first answered call, beside raw pyzmq workers started in the same rounds.

    python benchmarks/startup.py --json              # one JSON line per result
    python benchmarks/startup.py --workers 16 --stations

Each launch is made by a fresh process, imports excluded: from the call of ``Controller.launch`` until every rank has
answered. ``raw`` starts as many fresh interpreters, each with one ROUTER echo, and waits for an answer of each.
``interpreter`` is a bare Python, started and ended. ``zbus_cpu`` is what all processes of the launch burnt until the
trial was closed: it hardly depends on what else the machine does. ``--stations`` shows when each was reached.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

LAUNCH = """
import json, os, resource, sys, time
from controller import Controller, Role
from zbus.config import load_config

root, workers = sys.argv[1], int(sys.argv[2])
config = load_config(data={"trace": {"level": "off", "merge": False}}).config
roles = {"w": Role("bench_engines:Echo", replicas=workers)}
wall, began = time.time(), time.perf_counter()
bus = Controller.launch("startup", roles, root=root, config=config, startup_timeout=120)
launched = time.perf_counter()
bus.group("w").echo(1)
answered = time.perf_counter()
seen = {}
for path in bus.trial.registry.rglob("*"):
    if path.is_file():
        seen[path.relative_to(bus.trial.registry).parts[0]] = path.stat().st_mtime - wall
bus.close()
print(json.dumps({
    "launch": launched - began, "answered": answered - began, "close": time.perf_counter() - answered, "stations": seen,
}))
"""

RAW = """
import sys
import zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    socket.send_multipart(socket.recv_multipart())
"""


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def interpreter_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return time.perf_counter() - began


def raw_s(directory: str, workers: int) -> float:
    """Return seconds until ``workers`` fresh raw echo processes have answered."""
    import zmq

    began = time.perf_counter()
    processes = []
    context = zmq.Context()
    sockets = []
    try:
        for number in range(workers):
            endpoint = f"ipc://{directory}/raw{number}"
            processes.append(subprocess.Popen([sys.executable, "-c", RAW, endpoint]))
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RECONNECT_IVL, 5)
            socket.connect(endpoint)
            socket.send(b"x")
            sockets.append(socket)
        for socket in sockets:
            socket.recv()
        return time.perf_counter() - began
    finally:
        context.destroy(0)
        for process in processes:
            process.kill()
            process.wait()


def launch(directory: str, workers: int) -> dict[str, Any]:
    """Launch once in a fresh process and return its figures."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    before = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, directory, str(workers)],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    found["cpu"] = children_cpu_s() - before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stations", action="store_true", help="show when each part of the registry was last written")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    stations: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="zb-start-") as directory:
        launch(directory, options.workers)  # compiles, and fills the page cache
        for _ in range(options.rounds):
            figures.setdefault("interpreter", []).append(interpreter_s())
            figures.setdefault("raw", []).append(raw_s(directory, options.workers))
            found = launch(directory, options.workers)
            figures.setdefault("zbus", []).append(found["answered"])
            figures.setdefault("zbus_close", []).append(found["close"])
            figures.setdefault("zbus_cpu", []).append(found["cpu"])
            for name, value in found["stations"].items():
                stations.setdefault(name, []).append(value)
    if not options.json:
        print(f"{'system':<14}{'median s':>10}{'best s':>10}{'x raw':>8}")
    for system, values in figures.items():
        ratio = statistics.median(value / raw for value, raw in zip(values, figures["raw"], strict=True))
        line = {
            "workload": f"startup_{options.workers}",
            "system": system,
            "median": round(statistics.median(values), 3),
            "best": round(min(values), 3),
            "unit": "s",
            "ratio": round(ratio, 3),
            "rounds": options.rounds,
        }
        if options.json:
            print(json.dumps(line), flush=True)
        else:
            print(f"{system:<14}{line['median']:>10.3f}{line['best']:>10.3f}{ratio:>8.2f}")
    if options.stations:
        for name, values in sorted(stations.items(), key=lambda item: min(item[1])):
            print(f"{min(values) * 1e3:8.1f} ms  {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
