"""From ``launch`` to the first answered call, what idle processes weigh, and how soon a death is told.

    python benchmarks/startup.py --json                     # one JSON line per result
    python benchmarks/startup.py --only startup_4 --stations
    python benchmarks/startup.py --only rss_,kill_

All systems take turns in each round, with ``--peers`` rivals too. Modules are compiled once, into a directory of the
run's own, for all but the rivals.

``startup_4``, ``startup_16``
    Seconds from ``Controller.launch`` until every rank has answered a call, made by a fresh process, whose own imports
    are not counted. ``raw``: as many fresh interpreters, each a pyzmq ROUTER that echoes, started together and asked
    by DEALERs. No process imports more than its bus. ``limit`` is the ratio to as many bare interpreters, started
    together and ended. ``zbus-cpu`` is what all processes of the launch burnt until it was closed, beside the same of
    ``raw``; ``zbus-close`` is the time of ``close``.
``startup_numpy_4``, ``startup_numpy_16``
    The same with workers that import numpy, as nearly every engine does; the role preloads it.
``startup_torch_4``
    The same with torch, beside rivals whose environment has it. ``raw`` imports it in each process (the limit of 0.5 is
    for the ratio to that).
``rss_worker_idle``, ``rss_agent``
    Resident megabytes of a worker that has answered a call, and of its agent (``zbus``); of the same that is not shared
    with another process (``zbus-own``). ``raw`` is the echo, the limit a bare interpreter.
``kill_to_error``
    Milliseconds from ``kill -9`` of a rank that runs a call until the caller has the error, which must name the rank.
    ``raw`` is a monitored DEALER's word that its peer is gone. The limit is the pidfd of a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peers import Rivals, add_options
from rounds import Figures, environment, parser, printer, wanted

RAW = """
import sys
import zmq
for name in sys.argv[2:]:
    __import__(name)
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    socket.send_multipart(socket.recv_multipart())
"""
SETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "startup_4": (4, ()),
    "startup_16": (16, ()),
    "startup_numpy_4": (4, ("numpy",)),
    "startup_numpy_16": (16, ("numpy",)),
    "startup_torch_4": (4, ("torch",)),
}
KILLS = 5
LONG_S = 600.0


# -- zbus, in a fresh process ----------------------------------------------------------------------------------------


def drive(what: str, root: str, workers: int, modules: Sequence[str]) -> dict[str, Any]:
    """Launch ``workers`` ranks, look at ``what``, close, and return what was found. In a process of its own."""
    from controller import Controller, Role
    from zbus.config import load_config

    config = load_config(data={"trace": {"level": "off", "merge": False}}).config
    engine = "plain_engine:Torch" if "torch" in modules else "plain_engine:Plain"
    roles = {"w": Role(engine, replicas=workers, preload=list(modules))}
    wall, began = time.time(), time.perf_counter()
    with Controller.launch("startup", roles, root=root, config=config, startup_timeout=LONG_S) as bus:
        launched = time.perf_counter()
        assert bus.group("w").echo(1) == [1] * workers
        answered = time.perf_counter()
        found: dict[str, Any] = {"launch": launched - began, "answered": answered - began}
        if what == "start":
            found["stations"] = stations(bus.trial.registry, wall)
        else:
            found |= weights(bus) if what == "weigh" else {"kills": kills(bus)}
        closing = time.perf_counter()
    found["close"] = time.perf_counter() - closing
    return found


def stations(registry: Path, since: float) -> dict[str, float]:
    """Return when each part of the registry was last written, in seconds since the launch."""
    return {
        path.relative_to(registry).parts[0]: path.stat().st_mtime - since
        for path in sorted(registry.rglob("*"), key=lambda path: path.stat().st_mtime)
        if path.is_file()
    }


def weights(bus: Any) -> dict[str, Any]:
    """Return resident and own megabytes of the workers and of their agent."""
    pids = [status["pid"] for status in bus.statuses().values()]
    status = Path(f"/proc/{pids[0]}/status").read_text(encoding="ascii")
    agent = int(re.findall(r"^PPid:\t(\d+)", status, re.MULTILINE)[0])
    return {"workers": [memory_mb(pid) for pid in pids], "agent": memory_mb(agent)}


def kills(bus: Any) -> list[float]:
    """Kill one rank after the other in a call and return the milliseconds until each error, which must name it."""
    from zbus.errors import WorkerLost
    from zbus.ids import WorkerName

    found = []
    group = bus.group("w")
    pids = {name.rank: status["pid"] for name, status in bus.statuses().items()}
    for rank, pid in sorted(pids.items()):
        future = group[rank].hang.submit(LONG_S)
        while bus.statuses()[WorkerName("w", rank)]["call"] is None:
            time.sleep(0.005)
        lost: WorkerLost | None = None
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            future.result()
        except WorkerLost as error:
            found.append((time.perf_counter() - began) * 1e3)
            lost = error
        assert lost is not None, f"a call of rank {rank}, which was killed, returned"
        assert (lost.role, lost.rank, lost.method) == ("w", rank, "hang"), lost
    return found


def zbus(what: str, directory: str, workers: int, modules: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``drive`` found in a fresh process, with the processor seconds of all."""
    code = f"import json, startup; print(json.dumps(startup.drive({what!r}, {directory!r}, {workers}, {[*modules]!r})))"
    before = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, env=environment(f"{directory}/pyc")
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["cpu"] = children_cpu_s() - before
    return found


def children_cpu_s() -> float:
    """Return the processor seconds of all children that have been waited for, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory_mb(pid: int) -> tuple[float, float]:
    """Return resident megabytes of a process, and those that it shares with nobody."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text("ascii"), re.MULTILINE))
    return int(found["Rss"]) / 1e3, (int(found["Private_Clean"]) + int(found["Private_Dirty"])) / 1e3


# -- the references --------------------------------------------------------------------------------------------------


def bare_s(directory: str, workers: int) -> float:
    """Return the seconds of as many bare interpreters, started together."""
    began = time.perf_counter()
    env = environment(f"{directory}/pyc")
    command = [sys.executable, "-c", ""]
    processes = [subprocess.Popen(command, env=env, start_new_session=True) for _ in range(workers)]
    for process in processes:
        process.wait()
    return time.perf_counter() - began


@contextlib.contextmanager
def raw(directory: str, workers: int, modules: Sequence[str] = ()) -> Iterator[tuple[list[int], list[Any], float]]:
    """Give pids of echo processes that all have answered, a DEALER to each, and how long it took."""
    import zmq

    began = time.perf_counter()
    processes = []
    context = zmq.Context()
    sockets = []
    env = environment(f"{directory}/pyc")
    try:
        for number in range(workers):
            endpoint = f"ipc://{directory}/raw{number}"
            command = [sys.executable, "-c", RAW, endpoint, *modules]
            # A session each, as agents and ranks have: some schedulers share the processor out among sessions first.
            processes.append(subprocess.Popen(command, env=env, start_new_session=True))
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RECONNECT_IVL, 5)
            socket.connect(endpoint)
            socket.send(b"x")
            sockets.append(socket)
        for socket in sockets:
            socket.recv()
        yield [process.pid for process in processes], sockets, time.perf_counter() - began
    finally:
        context.destroy(0)
        for process in processes:
            process.kill()
            process.wait()


def raw_s(directory: str, workers: int, modules: Sequence[str]) -> tuple[float, float]:
    """Return seconds, and processor seconds, of as many echo processes until all have answered."""
    before = children_cpu_s()
    with raw(directory, workers, modules) as (_, _, seconds):
        pass
    return seconds, children_cpu_s() - before


def raw_kill_ms(directory: str) -> float:
    """Return the milliseconds from the kill of an echo process until the monitor of a DEALER tells it."""
    import zmq

    with raw(directory, 1) as (pids, sockets, _):
        monitor = sockets[0].get_monitor_socket(zmq.EVENT_DISCONNECTED)
        began = time.perf_counter()
        os.kill(pids[0], signal.SIGKILL)
        assert monitor.poll(10_000)
        took = time.perf_counter() - began
        sockets[0].disable_monitor()
    return took * 1e3


def pidfd_kill_ms() -> float:
    """Return the milliseconds from the kill of a child until its pidfd is readable."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    pidfd = os.pidfd_open(process.pid)
    began = time.perf_counter()
    process.kill()
    select.select([pidfd], [], [])
    took = time.perf_counter() - began
    os.close(pidfd)
    process.communicate()
    return took * 1e3


# -- the rounds ------------------------------------------------------------------------------------------------------


def start_round(figures: Figures, workload: str, directory: str) -> dict[str, float]:
    """Start every system once; return when zbus reached its stations."""
    workers, modules = SETS[workload]
    bare = bare_s(directory, workers)
    base, base_cpu = raw_s(directory, workers, modules)
    figures.add(workload, "bare", "s", bare, base, bare)
    figures.add(workload, "raw", "s", base, base, bare)
    found = zbus("start", directory, workers, modules)
    figures.add(workload, "zbus", "s", found["answered"], base, bare)
    figures.add(workload, "zbus-close", "s", found["close"], base)
    figures.add(workload, "zbus-cpu", "s", found["cpu"], base_cpu)
    return {**found["stations"], "launched": found["launch"], "answered": found["answered"]}


def memory_round(figures: Figures, directory: str) -> None:
    """Weigh a worker and an agent once."""
    bare = bare_memory_mb()
    with raw(directory, 1) as (pids, _, _):
        base = memory_mb(pids[0])
    found = zbus("weigh", directory, 4)
    own = statistics.median(own for _, own in found["workers"])
    figures.add("rss_worker_idle", "raw", "MB", base[0], base[0], bare[0])
    figures.add("rss_worker_idle", "zbus", "MB", max(rss for rss, _ in found["workers"]), base[0], bare[0])
    figures.add("rss_worker_idle", "zbus-own", "MB", own, base[1], bare[1])
    figures.add("rss_agent", "zbus", "MB", found["agent"][0], base[0], bare[0])
    figures.add("rss_agent", "zbus-own", "MB", found["agent"][1], base[1], bare[1])


def bare_memory_mb() -> tuple[float, float]:
    """Return resident and own megabytes of a bare interpreter."""
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = memory_mb(process.pid)
        process.kill()
    return found


def kill_round(figures: Figures, directory: str) -> None:
    """Kill in turn."""
    limits = [pidfd_kill_ms() for _ in range(KILLS)]
    bases = [raw_kill_ms(directory) for _ in range(KILLS)]
    limit, base = statistics.median(limits), statistics.median(bases)
    took = zbus("kill", directory, KILLS)["kills"]
    figures.add("kill_to_error", "pidfd", "ms", limit, base, limit)
    figures.add("kill_to_error", "raw", "ms", base, base, limit)
    figures.add("kill_to_error", "zbus", "ms", statistics.median(took), base, limit)
    figures.add("kill_to_error", "zbus-worst", "ms", max(took), max(bases), max(limits))


def main() -> None:
    made = parser(__doc__)
    add_options(made)
    made.add_argument("--stations", action="store_true", help="show when each part of the registry was last written")
    options = made.parse_args()
    asked = wanted(options.only)
    figures = Figures(options.rounds, printer(as_json=options.json))
    rivals = Rivals(options.peers, options.venvs)
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="zb-start-") as directory:
        zbus("start", directory, 1)  # compiles, and fills the page cache
        for _ in range(options.rounds):
            for workload in SETS:
                if asked(workload):
                    for name, value in start_round(figures, workload, directory).items():
                        seen.setdefault(f"{workload} {name}", []).append(value)
            if asked("rss_worker_idle") or asked("rss_agent"):
                memory_round(figures, directory)
            if asked("kill_to_error"):
                kill_round(figures, directory)
            for workload in ("startup_16", "startup_torch_4", "startup_4"):  # each in processes of its own
                rest = ("rss_worker_idle", "kill_to_error") if workload == "startup_4" else ()
                rivals.measure(figures, (workload, *rest), asked)
    figures.finish()
    if options.stations:
        for name, values in sorted(seen.items(), key=lambda item: (item[0].split()[0], min(item[1]))):
            print(f"{min(values) * 1e3:8.1f} ms  {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
