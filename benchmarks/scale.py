"""Up to 1,000 simulated workers join one controller, then broadcasts and gathers: both should grow as their number.

    python benchmarks/scale.py --json                  # one JSON line per result
    python benchmarks/scale.py --sizes 64,256 --rounds 3

The controller is the product's own, in a fresh process for each size and round, with agents of scheduler ``external``;
the workers are ``crowd.py``: whole callees, 64 in a process, with sockets, protocol, registry records and hints.

``join_W``
    Seconds from ``Controller.launch`` until all W are ready, and processor seconds of the controller (``zbus-cpu``).
    ``ratio`` is that of the seconds per worker to those with the smallest W: 1 is linear, above is worse.
``fanout_W``
    Microseconds of one broadcast with an ordered gather; ``raw``: the same number of bare ROUTER echoes and DEALERs.
    ``zbus-cpu``: processor microseconds of the controller for each worker and broadcast; ``ratio`` as of ``join_W``.
``descriptors_W``, ``sockets_W``, ``memory_W``
    What the controller holds for each worker: file descriptors, ZeroMQ sockets, KB of its own memory.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from crowd import crowd
from rounds import Figures, environment, parser, printer, wanted
from startup import memory_mb

SIZES = (16, 64, 256, 1000)
STEPS = 2000
LONG_S = 600.0


def drive(root: str, workers: int) -> dict[str, Any]:
    """Launch a trial of ``workers`` that join by themselves, measure, close. In a process of its own."""
    from controller import Controller, Role
    from zbus.config import load_config

    config = load_config(data={"trace": {"level": "off", "merge": False}}).config
    roles = {"w": Role("plain_engine:Plain", replicas=workers)}
    options: dict[str, Any] = {"trial": "t", "root": root, "scheduler": "external", "startup_timeout": LONG_S}
    gc.collect()
    before = open_descriptors(), memory_mb(os.getpid())[1]
    began, cpu = time.perf_counter(), time.process_time()
    with Controller.launch("scale", roles, config=config, **options) as bus:
        found: dict[str, Any] = {"join": time.perf_counter() - began, "join_cpu": time.process_time() - cpu}
        group = bus.group("w")
        count = max(5, STEPS // workers)
        assert group.echo(7) == [7] * workers
        times, cpus = [], []
        for _ in range(count):
            began, cpu = time.perf_counter(), time.process_time()
            group.echo(1)
            cpus.append(time.process_time() - cpu)
            times.append(time.perf_counter() - began)
        found["fanout"] = statistics.median(times)
        found["fanout_cpu"] = statistics.median(cpus)
        found["descriptors"] = (open_descriptors() - before[0]) / workers
        found["memory"] = (memory_mb(os.getpid())[1] - before[1]) * 1e3 / workers
        assert bus._session.client is not None  # noqa: SLF001  # the house's own look at how many sockets there are
        sockets = bus._session.client.factory.open_sockets  # noqa: SLF001  # as above
        # A monitor is a second socket inside libzmq, which nobody here counts.
        found["sockets"] = (sum(sockets.values()) + sockets.get("monitor", 0)) / workers
        closing = time.perf_counter()
    found["close"] = time.perf_counter() - closing
    return found


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def zbus(workers: int) -> dict[str, Any]:
    """Return what ``drive`` found in a fresh process, with workers of its own."""
    with tempfile.TemporaryDirectory(prefix="zb-scale-", dir="/tmp") as directory:  # ipc paths are short
        env = environment(f"{directory}/pyc")
        with crowd(Path(directory, "scale", "t"), "w", workers, directory, env):
            code = f"import json, scale; print(json.dumps(scale.drive({directory!r}, {workers})))"
            done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, env=env)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def raw_us(workers: int) -> float:
    """Return microseconds of a broadcast and gather over bare echoes."""
    from layout import Farm, RawDriver, median_us

    with tempfile.TemporaryDirectory(prefix="zb-raw-", dir="/tmp") as directory:
        farm = Farm(directory, "raw", workers)
        driver = RawDriver(farm.endpoints)
        try:
            return median_us(driver.fanout, max(5, STEPS // workers))
        finally:
            driver.close()
            farm.close()


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of workers, the smallest first")
    options = made.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    asked = wanted(options.only)
    figures = Figures(options.rounds, printer(as_json=options.json))
    for _ in range(options.rounds):
        first: dict[str, float] = {}
        for size in sizes:
            found = zbus(size)
            if asked(f"join_{size}"):
                for system, key in (("zbus", "join"), ("zbus-cpu", "join_cpu")):
                    per_worker = first.setdefault(key, found[key] / size)
                    figures.add(f"join_{size}", system, "s", found[key], per_worker * size)
                figures.add(f"join_{size}", "zbus-close", "s", found["close"])
            if asked(f"fanout_{size}"):
                base = raw_us(size)
                figures.add(f"fanout_{size}", "raw", "us", base, base)
                figures.add(f"fanout_{size}", "zbus", "us", found["fanout"] * 1e6, base)
                each = found["fanout_cpu"] * 1e6 / size
                figures.add(f"fanout_{size}", "zbus-cpu", "us", each, first.setdefault("fanout", each))
            for name, unit in (("descriptors", "each"), ("sockets", "each"), ("memory", "KB")):
                if asked(f"{name}_{size}"):
                    figures.add(f"{name}_{size}", "zbus", unit, found[name])
    figures.finish()


if __name__ == "__main__":
    main()
