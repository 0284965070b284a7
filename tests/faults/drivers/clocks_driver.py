"""A traced trial whose ranks have monotonic clocks of their own: other hosts, other time namespaces, a slow way back.

``unshare --net --mount python clocks_driver.py DIRECTORY`` prints the trial's directory. Rank 0 runs on another host;
rank 1 on another host whose monotonic clock is a day ahead, behind a link that is narrow one way and loaded; rank 2 on
the controller's host, in a time namespace that is 5000 s ahead; rank 3 beside the controller, on its clock.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from hosts import Hosts, command, wait_for

from controller import Controller, Role
from zbus.config import Config

HERE = Path(__file__).parent
AHEAD_S = {1: 86_400, 2: 5_000}
STEPS = 60


def agent(rank: int, trial: Path, address: str) -> list[str]:
    """Return the command of the agent of a rank, in its time namespace."""
    ahead = AHEAD_S.get(rank)
    space = ["unshare", "--time", "--monotonic", str(ahead), "--fork", "--kill-child"] if ahead else []
    words = [sys.executable, "-m", "workers", "start", "--trial-dir", str(trial), "--role", "actor"]
    return [*space, *words, "--rank", str(rank), "--transport", "tcp", "--bind", address, "--grace", "2s"]


def main() -> None:
    """Run the trial."""
    directory = Path(sys.argv[1])
    with Hosts(2, directory) as hosts:
        config = Config()
        scheduler = msgspec.structs.replace(
            config.scheduler, type="external", transport="tcp", bind=hosts.address, startup_timeout=60.0
        )
        trace = msgspec.structs.replace(config.trace, level="full")
        config = msgspec.structs.replace(config, scheduler=scheduler, trace=trace)
        role = Role(f"{HERE}/clock_engines.py:Working", replicas=4)
        trial = directory / "clocks" / "t"
        narrow = ("rate", "4mbit", "burst", "3000", "latency", "400ms")
        command("tc", "qdisc", "add", "dev", hosts.others[1].link, "root", "tbf", *narrow)
        agents: list[Any] = []

        def start_agents() -> None:
            wait_for(lambda: list((trial / "registry").glob("*epoch*")), "the registry")
            for rank in range(4):
                address = hosts.others[rank].address if rank < 2 else hosts.address
                start = hosts.others[rank].popen if rank < 2 else subprocess.Popen
                log = (directory / f"agent{rank}.log").open("w")
                agents.append(start(*_words(agent(rank, trial, address), rank), stdin=-3, stdout=log, stderr=log))

        starter = threading.Thread(target=start_agents)
        starter.start()
        with Controller.launch("clocks", {"actor": role}, trial="t", root=directory, config=config) as bus:
            starter.join()
            actor = bus.group("actor")
            for step in range(STEPS):
                actor.train(step, bytes(3000))
                bus.save_perf_tracer(step)
                time.sleep(0.02)
        for one in agents:
            one.wait(20)
    print(trial)


def _words(words: list[str], rank: int) -> tuple[Any, ...]:
    return tuple(words) if rank < 2 else (words,)


if __name__ == "__main__":
    main()
