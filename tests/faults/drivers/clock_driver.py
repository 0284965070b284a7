"""A trial with calls all the time, until told to end; prints what came of them.

``python clock_driver.py ROOT``: says ``ready`` once calls are answered, goes on until a line comes on stdin, then
prints one JSON object. ``ZT_CLOCK_OF_WORKERS`` is the environment that workers get on top (JSON); ``ZT_WORKER_PREFIX``
are the words in front of each worker's command (JSON), which makes them watch this process by its lease, which is
``ZT_LEASE_S`` long.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from msgspec import structs

from controller import Controller, Role
from zbus.config import Config, TrialDir
from zbus.errors import CallError

HERE = Path(__file__).parent
LEASE_S = float(os.environ.get("ZT_LEASE_S", "1"))


class Calls:
    """Calls from a thread of its own, one after the other, and a slow one beside them."""

    def __init__(self, bus: Controller, slow_s: float) -> None:
        self.actor = bus.group("actor")
        self.slow_s = slow_s
        self.outcomes: Counter[str] = Counter()
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        number = 0
        while not self.ending.is_set():
            slow = self.actor.add.submit(f"slow{number}", self.slow_s)
            for future in (slow, *(self.actor[0].add.submit(f"c{number}.{one}") for one in range(5))):
                try:
                    future.result()
                    self.outcomes["OK"] += 1
                except CallError as error:
                    self.outcomes[f"{error.outcome} {error.reason}: {error}"] += 1
                except Exception as error:  # noqa: BLE001  # told to the test
                    self.outcomes[f"{type(error).__name__}: {error}"] += 1
            number += 1

    def end(self) -> Counter[str]:
        """Let the calls that are out end."""
        self.ending.set()
        self.thread.join()
        return self.outcomes


def worker(trial: Path, rank: int, environment: dict[str, str], prefix: list[str]) -> subprocess.Popen[bytes]:
    """Start the worker of one rank."""
    command = [*prefix, sys.executable, "-m", "workers", "start", "--trial-dir", str(trial), "--role", "actor"]
    command += ["--rank", str(rank), "--lease", f"{LEASE_S}s"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=sys.stderr)


def main(root: Path) -> None:
    """Run until told to end."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(message)s")
    for_workers = json.loads(os.environ.pop("ZT_CLOCK_OF_WORKERS", "{}"))
    prefix = json.loads(os.environ.pop("ZT_WORKER_PREFIX", "[]"))
    config = Config()
    config = structs.replace(
        config,
        rpc=structs.replace(config.rpc, lease=LEASE_S),
        trace=structs.replace(config.trace, level="full", sidecar=True),
    )
    role = Role(f"{HERE}/network_engines.py:Counting", replicas=2, args=[str(root / "effects")], restart="one")
    trial = TrialDir.at(root, "clock", "trial").path
    with ExitStack() as stack:
        workers = [worker(trial, rank, for_workers, prefix) for rank in range(2)]
        bus = stack.enter_context(
            Controller.launch(
                "clock",
                {"actor": role},
                trial="trial",
                root=root,
                scheduler="external",
                config=config,
                startup_timeout=600,
            )
        )
        bus.group("actor").add("first")
        calls = Calls(bus, float(os.environ.get("ZT_SLOW_S", "0.3")))
        print("ready", flush=True)
        sys.stdin.readline()
        outcomes = calls.end()
        starts = [one["start"] for one in bus.group("actor").who()]
    codes = [process.wait() for process in workers]
    print(json.dumps({"outcomes": outcomes, "starts": starts, "codes": codes}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
