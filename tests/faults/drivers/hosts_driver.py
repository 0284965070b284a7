"""A controller whose ranks run on other hosts, one of which is cut off; tells what came of the calls as JSON.

``unshare --net --mount python hosts_driver.py SCENARIO DIRECTORY``
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from hosts import Host, Hosts, wait_for

from controller import Controller, Role
from zbus.config import Config
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records

HERE = Path(__file__).parent
LEASE = ("--lease", "2s")


class Scene:
    """Hosts, a trial with one rank per host, and what is asked of it."""

    def __init__(self, hosts: Hosts, bus: Controller, directory: Path) -> None:
        self.hosts = hosts
        self.bus = bus
        self.directory = directory
        self.registry = Path(bus.trial.registry)
        self.actor = bus.group("actor")
        self.agents: dict[str, Any] = {}

    def start(self, host: Host, rank: int) -> None:
        """Start the agent of a rank on a host."""
        log = self.directory / f"{host.name}.log"
        self.agents[host.name] = host.worker(Path(self.bus.trial.path), "actor", rank, log, *LEASE)

    def ended(self, host: Host) -> int:
        """Wait for the end of a host's agent and return its exit code."""
        process = self.agents[host.name]
        return int(wait_for(lambda: process.poll() is not None and (process.returncode,), "the agent's end", 30)[0])

    def told(self, host: Host) -> str:
        """Return what a host's agent has said."""
        return (self.directory / f"{host.name}.log").read_text()

    def effects(self) -> Counter[str]:
        """Return how often each side effect happened."""
        file = self.directory / "effects"
        return Counter(file.read_text().split() if file.exists() else ())

    def outcome(self, future: Any) -> str:
        """Return the outcome of a call of one rank, with its reason."""
        error = future.exception(60)
        return "OK" if error is None else f"{error.outcome} {error.reason}"

    def start_of(self, rank: int) -> int:
        """Return which start of a rank answers."""
        return int(self.actor[rank].who.options(retries=5, deadline=30)()["start"])


@contextmanager
def scene(directory: Path, others: int, ranks: int, **role: Any) -> Iterator[Scene]:
    """Make hosts and a trial with one rank on each of the first ``ranks``."""
    config = Config()
    with Hosts(others, directory) as hosts:
        scheduler = msgspec.structs.replace(
            config.scheduler, type="external", transport="tcp", bind=hosts.address, startup_timeout=60.0
        )
        config = msgspec.structs.replace(config, scheduler=scheduler)
        engine = Role(
            f"{HERE}/network_engines.py:Counting", replicas=ranks, args=[str(directory / "effects")], orphans="wait",
            **role,
        )  # fmt: skip
        trial = directory / "net" / "t"
        agents: dict[str, Any] = {}

        def start_agents() -> None:
            registry = trial / "registry"
            wait_for(lambda: (registry / "epochs").is_dir() or list(registry.glob("*epoch*")), "the registry")
            for rank, host in enumerate(hosts.others):
                host.share(registry)
                if rank < ranks:
                    agents[host.name] = host.worker(trial, "actor", rank, directory / f"{host.name}.log", *LEASE)

        starter = threading.Thread(target=start_agents)
        starter.start()
        with Controller.launch("net", {"actor": engine}, trial="t", root=directory, config=config) as bus:
            starter.join()
            made = Scene(hosts, bus, directory)
            made.agents = agents
            yield made


def replaced(directory: Path) -> dict[str, Any]:
    """Cut off a host for longer than its lease, have another take its rank, and heal it."""
    with scene(directory, 3, 2, restart="one") as on:
        cut, _, spare = on.hosts.others
        actor = on.actor
        assert actor[0].add("before") == 1
        running = actor[0].add.submit("running", 6.0)
        wait_for(lambda: on.effects()["running"], "the start of the call")
        queued = [actor[0].add.submit(f"queued{number}") for number in range(5)]
        began = time.monotonic()
        cut.cut(on.registry)
        outcomes = [on.outcome(future) for future in (running, *queued)]
        declared = time.monotonic() - began
        on.start(spare, 0)
        start = on.start_of(0)
        moved = time.monotonic() - began
        after = [actor[0].add(f"after{number}") for number in range(5)]
        assert actor[1].add("peer") == 1
        at_heal = sum(on.effects().values())
        cut.heal(on.registry)
        code = on.ended(cut)
        more = [actor[0].add(f"more{number}") for number in range(5)]
        records = Records(FileRegistry(on.registry, create=False))
        living = [(one.rank, one.start) for one in records.workers("actor")]
        exits = [(one.rank, one.start, one.exit_code, one.signal) for one in records.exits()]
        records.close()
        return {
            "outcomes": outcomes, "declared": declared, "moved": moved, "start": start, "after": after, "more": more,
            "code": code, "told": on.told(cut), "effects": on.effects(), "at_heal": at_heal, "living": living,
            "exits": exits, "report": on.bus.report(),
        }  # fmt: skip


def healed(directory: Path) -> dict[str, Any]:
    """Cut off a host for longer than its lease and heal it before anybody takes its rank."""
    with scene(directory, 1, 1, restart="one") as on:
        cut = on.hosts.others[0]
        actor = on.actor
        assert actor[0].add("before") == 1
        running = actor[0].add.submit("running", 5.0)
        wait_for(lambda: on.effects()["running"], "the start of the call")
        queued = [actor[0].add.submit(f"queued{number}") for number in range(5)]
        cut.cut(on.registry)
        outcomes = [on.outcome(future) for future in (running, *queued)]
        state = actor.ready
        cut.heal(on.registry)
        began = time.monotonic()
        start = on.start_of(0)
        back = time.monotonic() - began
        after = actor[0].add("after")
        return {
            "outcomes": outcomes, "ready_while_cut": state, "start": start, "back": back, "after": after,
            "effects": on.effects(), "running": on.agents[cut.name].poll() is None, "told": on.told(cut),
        }  # fmt: skip


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {"replaced": replaced, "healed": healed}


def main(scenario: str, directory: Path) -> None:
    """Play one scenario and tell what came of it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")
    print(json.dumps(SCENARIOS[scenario](directory)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
