"""A controller whose ranks run on other hosts, one of which is cut off; tells what came of the calls as JSON.

``unshare --net --mount python hosts_driver.py SCENARIO DIRECTORY``
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from hosts import Host, Hosts, command, wait_for

from controller import Controller, Role
from zbus.config import Config
from zbus.config.schema import DataConfig
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
def scene(directory: Path, others: int, ranks: int, *, memory: int | None = None, **role: Any) -> Iterator[Scene]:
    """Make hosts and a trial with one rank on each of the first ``ranks``; ``memory``: shared, which hosts here do."""
    config = Config(data=DataConfig(shared_memory=memory))
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
    with scene(directory, 3, 2, restart="all") as on:
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
        wait_for(lambda: on.start_of(1) == 1, "the restart of the other ranks of the group")
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


GUEST = """
import json, sys
from controller import Controller
with Controller.attach(sys.argv[1], timeout=30) as guest:
    print(json.dumps(guest.group("actor")[0].who()))
"""


def asymmetric(directory: Path) -> dict[str, Any]:
    """Cut a rank's host from the controller alone: others reach it, and its lease is renewed."""
    with scene(directory, 2, 1, restart="one") as on:
        far, near = on.hosts.others
        actor = on.actor
        assert actor[0].add("before") == 1
        rules = [
            ("INPUT", "-s", on.hosts.address, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"),
            ("OUTPUT", "-d", on.hosts.address, "-p", "tcp", "-j", "DROP"),
        ]
        for rule in rules:
            far.run("iptables", "-A", *rule)
        asleep = actor[0].add.options(deadline=60, retries=5).submit("during")
        wait_for(lambda: not actor.ready, "the loss to be seen")
        guest = near.popen(sys.executable, "-c", GUEST, str(on.bus.trial.path), stdout=subprocess.PIPE)
        rival = near.worker(Path(on.bus.trial.path), "actor", 0, directory / "rival.log", *LEASE)
        seen, _ = guest.communicate(timeout=60)
        refused = wait_for(lambda: rival.poll() is not None and (rival.returncode,), "the rival's end", 30)[0]
        time.sleep(3.0)  # longer than the lease
        during = on.effects()
        for rule in rules:
            far.run("iptables", "-D", *rule)
        outcome = on.outcome(asleep)
        return {
            "guest": json.loads(seen), "refused": refused, "rival": (directory / "rival.log").read_text(),
            "outcome": outcome, "effects": on.effects(), "during": during, "start": on.start_of(0),
        }  # fmt: skip


def moves(directory: Path) -> dict[str, Any]:
    """Give a rank's host another address, under which its agent is started anew."""
    with scene(directory, 1, 1, restart="one") as on:
        host = on.hosts.others[0]
        assert on.actor[0].add("before") == 1
        host.run("ip", "addr", "del", f"{host.address}/24", "dev", "eth0")
        host.address = "127.231.0.77"
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        nsenter = on.agents[host.name].pid
        agent = Path(f"/proc/{nsenter}/task/{nsenter}/children").read_text().split()[0]
        os.kill(int(agent), signal.SIGKILL)
        began = time.monotonic()
        on.start(host, 0)
        start = on.start_of(0)
        took = time.monotonic() - began
        records = Records(FileRegistry(on.registry, create=False))
        endpoints = {one.start: one.main[0] for one in records.workers("actor")}
        records.close()
        return {"start": start, "took": took, "endpoints": endpoints, "after": on.actor[0].add("after")}


def black_hole(directory: Path) -> dict[str, Any]:
    """Drop packets above a size on the way to a rank: what is small passes, what is large does not."""
    with scene(directory, 1, 1, restart="one") as on:
        host = on.hosts.others[0]
        actor = on.actor
        assert actor[0].add("before") == 1
        rule = ("INPUT", "-i", "eth0", "-m", "length", "--length", "1000:65535", "-j", "DROP")
        host.run("iptables", "-A", *rule)
        small = actor[0].add("small")
        big = actor[0].mirror.options(deadline=3).submit("big", bytes(200_000))
        error = big.exception(60)
        status = on.bus.statuses(10)
        host.run("iptables", "-D", *rule)
        after = actor[0].add.options(deadline=60)("after")
        return {
            "small": small, "outcome": f"{error.outcome} {error.reason}", "error": str(error), "ctl": len(status),
            "after": after, "effects": on.effects(), "start": on.start_of(0),
        }  # fmt: skip


def slow_link(directory: Path) -> dict[str, Any]:
    """Send a large payload over one megabit per second, and ask on ``ctl`` meanwhile."""
    with scene(directory, 1, 1, restart="one") as on:
        host = on.hosts.others[0]
        actor = on.actor
        assert actor[0].add("before") == 1
        command(*f"tc qdisc add dev {host.link} root tbf rate 1mbit burst 32k latency 400ms".split())
        payload = bytes(range(256)) * 4096
        began = time.monotonic()
        big = actor[0].mirror.options(deadline=110).submit("big", payload)
        answers = []
        while not big.done():
            asked = time.monotonic()
            answers.append((len(on.bus.statuses(5)), time.monotonic() - asked))
            time.sleep(0.5)  # asked now and then
        took = time.monotonic() - began
        return {
            "whole": big.result(1) == payload, "took": took, "answers": answers, "effects": on.effects(),
            "start": on.start_of(0),
        }  # fmt: skip


def bulk_link(directory: Path) -> dict[str, Any]:
    """Move a gigabyte over 50 MB/s, and a part of it back; ask on ``ctl`` and call on another lane meanwhile."""
    import zlib

    import numpy as np

    with scene(directory, 1, 1, memory=0, restart="one") as on:
        (host,) = on.hosts.others
        actor = on.actor
        assert actor[0].add("before") == 1
        shape = ["root", "tbf", "rate", "400mbit", "burst", "512k", "latency", "100ms"]
        command("tc", "qdisc", "add", "dev", host.link, *shape)
        host.run("tc", "qdisc", "add", "dev", "eth0", *shape)
        array = (np.arange(1 << 27) * 5).view(np.uint8)
        answers, states, seen = [], set(), []
        peer = on.bus._session.rosters["actor"].peers()[0]
        took, right = {}, {}
        for way in ("there", "back"):
            began = time.monotonic()
            big = (
                actor[0].weigh.options(deadline=100).submit("big", array)
                if way == "there"
                else actor[0].give.options(deadline=100).submit(1 << 27)
            )
            while not big.done():
                asked = time.monotonic()
                (status,) = on.bus.statuses(10).values()
                ctl = time.monotonic() - asked
                assert list(actor.count.stream("side", 3)) == [0, 1, 2]
                answers.append((ctl, time.monotonic() - asked - ctl))
                seen.append(status["rss_bytes"])
                states.add(peer.state.value)
                time.sleep(0.2)  # asked now and then
            took[way] = time.monotonic() - began
            value = big.result(1)
            if way == "there":
                right[way] = value == (array.nbytes, zlib.crc32(array))
            else:
                right[way] = bool((value.view(np.int64) == np.arange(1 << 24) * 7).all())
        del big, value
        report = on.bus.report()
        return {
            "took": took, "right": right, "answers": answers, "states": sorted(states), "start": on.start_of(0),
            "report": report, "rss": max(seen), "effects": on.effects()["big"],
        }  # fmt: skip


def ipv6_only(directory: Path) -> dict[str, Any]:
    """Run on a host that has no IPv4 address and whose name nobody knows."""
    command("hostname", "nowhere.invalid")
    command("ip", "link", "set", "lo", "up")
    command("ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
    config = Config()
    scheduler = msgspec.structs.replace(config.scheduler, transport="tcp", bind="::1", startup_timeout=60.0)
    config = msgspec.structs.replace(config, scheduler=scheduler)
    role = Role(f"{HERE}/network_engines.py:Counting", replicas=2, args=[str(directory / "effects")])
    with Controller.launch("net", {"actor": role}, trial="t", root=directory, config=config) as bus:
        records = Records(FileRegistry(bus.trial.registry, create=False))
        endpoints = [endpoint for one in records.workers("actor") for endpoint in (*one.main, *one.ctl)]
        records.close()
        return {"answers": bus.group("actor").add("x"), "endpoints": endpoints}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    one.__name__: one for one in (replaced, healed, asymmetric, moves, black_hole, slow_link, bulk_link, ipv6_only)
}


def main(scenario: str, directory: Path) -> None:
    """Play one scenario and tell what came of it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")
    print(json.dumps(SCENARIOS[scenario](directory)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
