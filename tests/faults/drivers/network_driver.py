"""A controller with two tcp workers in a network namespace of its own; breaks the way to rank 0 and counts answers.

``unshare --net python network_driver.py FAULT DIRECTORY``: prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from controller import Controller, Role
from zbus.config import Config
from zbus.errors import CallError
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records

HERE = Path(__file__).parent


def command(*words: str) -> None:
    """Run a command as it would be typed."""
    subprocess.run(words, check=True, capture_output=True)


TBF = "root tbf rate 8mbit burst 64k latency 1s"
RULES = {
    "drop": ("ds", ("-j", "DROP")),
    "drop_requests": ("d", ("-j", "DROP")),
    "drop_replies": ("s", ("-j", "DROP")),
    "reset": ("d", ("-j", "REJECT", "--reject-with", "tcp-reset")),
    "loss": ("ds", ("-m", "statistic", "--mode", "random", "--probability", "0.3", "-j", "DROP")),
}


class Network:
    """Faults of this namespace's loopback, by the ports of one worker."""

    def __init__(self, ports: list[str]) -> None:
        self.ports = ports

    def rules(self, verb: str, sides: str, *what: str) -> None:
        """Add (``-A``) or delete (``-D``) rules for packets to (``d``) and from (``s``) the ports."""
        for port in self.ports:
            for side in sides:
                command("iptables", verb, "INPUT", "-i", "lo", "-p", "tcp", f"--{side}port", port, *what)

    @contextmanager
    def broken(self, fault: str) -> Iterator[None]:
        """Break the network for a block."""
        sides, what = RULES.get(fault, ("", ()))
        before = {"link_down": "ip link set lo down", "slow": f"tc qdisc add dev lo {TBF}"}
        after = {"link_down": "ip link set lo up", "slow": "tc qdisc del dev lo root"}
        command(*before[fault].split()) if fault in before else self.rules("-A", sides, *what)
        try:
            yield
        finally:
            command(*after[fault].split()) if fault in after else self.rules("-D", sides, *what)


def main(fault: str, directory: Path) -> None:
    """Run one fault and tell what came of it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    command("ip", "link", "set", "lo", "up")
    config = Config()
    config = msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, transport="tcp"),
        data=msgspec.structs.replace(config.data, shared_memory=0),  # what is large shall cross the network
    )
    role = Role(f"{HERE}/network_engines.py:Counting", replicas=2, args=[str(directory / "effects")], restart="one")
    with Controller.launch("net", {"actor": role}, root=directory, config=config, startup_timeout=60) as bus:
        records = Records(FileRegistry(bus.trial.registry, create=False))
        ports = [
            endpoint.rpartition(":")[2]
            for record in records.workers("actor")
            if record.rank == 0
            for endpoint in (*record.main, *record.ctl)
        ]
        records.close()
        actor = bus.group("actor")
        futures = [actor.add.submit(f"before{number}") for number in range(50)]
        for future in futures:
            future.result(60)
        began = time.monotonic()
        with Network(ports).broken(fault):
            during = [actor[0].add.submit(f"during{number}") for number in range(20)]
            if fault == "slow":
                during += [actor[0].mirror.submit(f"big{number}", bytes(3_000_000)) for number in range(2)]
            peer = actor[1].add.submit("peer")
            time.sleep(4.0)  # the fault has a length
            open_at_heal = sum(not future.done() for future in during)
            peer_answered = peer.done()
        futures += [*during, peer]
        futures += [actor[0].add.submit(f"after{number}") for number in range(20)]
        outcomes = Counter()
        for future in futures:
            try:
                future.result(60)
            except CallError as error:
                outcomes[f"{error.outcome} {error.reason}: {error}"] += 1
            else:
                outcomes["OK"] += 1
        took = time.monotonic() - began
        starts = [one["start"] for one in actor.who.options(retries=5)()]
        report = bus.report()
    effects = Counter((directory / "effects").read_text().split())
    told = {
        "outcomes": outcomes,
        "starts": starts,
        "effects": {name: count for name, count in effects.items() if count != (2 if name.startswith("before") else 1)},
        "names": len(effects),
        "calls": len(futures),
        "took": took,
        "open_at_heal": open_at_heal,
        "peer_answered": peer_answered,
        "report": report,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
