"""Simulated workers, many in a process: whole callees with real sockets, records and hints; only the engine is none.

Each has the product's ``Server`` with its two threads, speaks the protocol, and stands in the registry like any rank.
One process plays an agent for its share of the ranks: it publishes itself, keeps a lease and hints at its ranks.

    python benchmarks/crowd.py TRIAL ROLE FIRST COUNT WORLD SOCKETS   # says "bound", then joins TRIAL
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plain_engine import Plain
from rounds import HERE

PER_PROCESS = 64
TTL_S = 5.0


class Crowd:
    """The ranks of one process."""

    def __init__(self, trial: Path, role: str, ranks: range, world: int, sockets: str) -> None:
        from zbus.engine import endpoints_of, table_to_wire
        from zbus.ids import WorkerName, new_incarnation
        from zbus.runtime.loader import digest_of
        from zbus.transport.server import Server
        from zbus.transport.sockets import SocketFactory

        self.trial, self.role, self.world, self.sockets = trial, role, world, sockets
        self.agent = f"{role}.crowd.{os.urandom(4).hex()}"
        self.engine = {"endpoints": table_to_wire(endpoints_of(Plain)), "digest": digest_of(Plain), "mesh": {}}
        self.factory = SocketFactory(max_sockets=4 * len(ranks) + 64)
        self.left = set(ranks)
        self.over = threading.Event()
        self.servers: dict[int, Any] = {}
        for rank in ranks:
            server = self.servers[rank] = Server(
                name=WorkerName(role, rank),
                incarnation=new_incarnation(0),
                factory=self.factory,
                lanes={"main": 1, "ctl": 16},
                dispatch=lambda request, rank=rank: self.answer(rank, request),  # type: ignore[misc]
                describe=lambda: {"pid": os.getpid(), "host": socket.gethostname()},
                guest_lanes=None,
            )
            for link in ("main", "ctl"):
                server.bind(link, self.endpoint(link, rank))
            server.start()
            run = lambda request, rank=rank: self.answer(rank, request)  # noqa: E731
            threading.Thread(target=server.run, args=(run,), daemon=True).start()

    def endpoint(self, link: str, rank: int) -> str:
        return f"ipc://{self.sockets}/{link}.{rank}"

    def answer(self, rank: int, request: Any) -> None:
        """Answer each call of a request."""
        from zbus.codec import decode, encode
        from zbus.protocol.messages import Kind, Status

        for index, (method, args, _) in enumerate(decode(request.buffers)):
            value: Any = args[0] if args else None
            if method == "zbus.create_engine":
                value = self.engine
            self.servers[rank].finish(request, index, Kind.RESULT, Status.OK, encode(value))
            if method == "zbus.stop":
                self.left.discard(rank)
                if not self.left:
                    self.over.set()

    def join(self) -> None:
        """Wait for the trial, publish everything, keep the lease until all ranks were told to stop, then withdraw."""
        from zbus.discovery.announcer import Announcer
        from zbus.registry.file import FileRegistry
        from zbus.registry.identity import pid_space
        from zbus.registry.lease import LeaseRenewer
        from zbus.registry.records import AgentRecord, Records, WorkerRecord
        from zbus.runtime.processes import start_time

        while not (self.trial / "registry" / "jobs").is_dir():
            time.sleep(0.005)
        records = Records(FileRegistry(self.trial / "registry", create=False))
        while records.job(self.role) is None:
            time.sleep(0.005)
        me: dict[str, Any] = {
            "agent": self.agent, "role": self.role, "host": socket.gethostname(), "pid_space": pid_space(),
            "pid": os.getpid(), "pid_start": start_time(os.getpid()) or 0,
        }  # fmt: skip
        renewer = LeaseRenewer(self.agent, TTL_S)
        lease = renewer.next(time.monotonic_ns())
        records.renew_lease(lease)
        renewer.renewed()
        agent = AgentRecord(**me, ranks=sorted(self.servers), epoch=1)
        records.publish_agent(agent)
        announcer = Announcer(self.factory, int.from_bytes(os.urandom(8), "big"), records=records)
        for rank, server in self.servers.items():
            record = WorkerRecord(
                **me,
                rank=rank,
                world_size=self.world,
                incarnation=server.incarnation,
                main=[self.endpoint("main", rank)],
                ctl=[self.endpoint("ctl", rank)],
            )
            records.publish_worker(record)
            announcer.joined(record)
        while not self.over.wait(renewer.wait_s(time.monotonic_ns())):
            lease = renewer.next(time.monotonic_ns())
            records.renew_lease(lease)
            renewer.renewed()
        announcer.close()
        records.withdraw_agent(agent)
        records.release_lease(lease)


@contextmanager
def crowd(
    trial: Path, role: str, world: int, sockets: str, env: dict[str, str] | None = None
) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Run ``world`` simulated workers in a few processes inside the block; they join ``trial`` when it is there."""
    with ExitStack() as stack:
        processes = []
        for first in range(0, world, PER_PROCESS):
            count = min(PER_PROCESS, world - first)
            command = [sys.executable, str(HERE / "crowd.py"), str(trial), role, str(first), str(count), str(world)]
            process = subprocess.Popen(
                [*command, sockets], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env
            )
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "bound\n", "a process of simulated workers did not start"
        yield processes


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    trial, role, first, count, world, sockets = sys.argv[1:]
    made = Crowd(Path(trial), role, range(int(first), int(first) + int(count)), int(world), sockets)
    print("bound", flush=True)
    made.join()
    threading.Event().wait()  # to be killed: connections that stay say nothing of lost workers meanwhile


if __name__ == "__main__":  # started by scale.py: no benchmark of its own
    main()
