"""What one controller of a trial has opened: sockets, records, members; how they find each other and how they close."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from controller.asking import ask
from controller.clocks import ClockWatch
from controller.group import DEFAULT_DEADLINE_S
from controller.late import Patience
from controller.lease import ControllerLease
from controller.members import Members
from controller.refs import ClientLink, RefBook
from controller.scheduling.api import Scheduler
from controller.stacks import Stacks, Told, ask_agents, ask_ranks
from zbus.clock import SYSTEM_CLOCK, boot_id, clock_id, time_namespace
from zbus.codec import Ref
from zbus.config import Config, TrialDir
from zbus.data.carriage import BulkCarriage
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner
from zbus.data.porter import Porter
from zbus.discovery.directory import Directory
from zbus.errors import ZbusError
from zbus.ids import WorkerName, new_session
from zbus.protocol.journal import JournalReport
from zbus.protocol.messages import Header
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space, same_kernel
from zbus.registry.records import EpochRecord, JobRecord, Records, WorkerRecord
from zbus.runtime.journal import journal_file, read_journal
from zbus.runtime.processes import start_time
from zbus.trace import control
from zbus.trace.config import TraceConfig
from zbus.trace.tracer import Tracer
from zbus.transport.bulk import Bulk
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.endpoints import RuntimeDir, Transport, bind_endpoints
from zbus.transport.profile import check_limits
from zbus.transport.pubsub import Hub
from zbus.transport.security import ProcessKeys
from zbus.transport.sockets import SocketFactory

__all__ = ["ACK_S", "RESTART_S", "Entry", "Session"]

log = logging.getLogger("zbus.controller")

ACK_S: Final = 2.0
"""How long a rank or an agent has to answer one of the bus's own methods."""

RESTART_S: Final = 120.0

Entry = tuple[JobRecord, Sequence[Any], Mapping[str, Any]]
"""A role's job with the engine's arguments."""


class Session:
    """The open parts of one trial. Parts are None as long as, or where, there is none.

    Attributes:
        trial: Paths of the trial directory.
        epoch: The fencing number, 0 for a guest and inside one process.
        closers: Frees them, in reverse order.
        placer, rosters: Where calls go, and the ranks of each role.
        deadline_s: Of calls that name none, in seconds.
        startup_timeout: Seconds until all ranks must be ready.
        client, members, refs, tracer, trace_rank: As their classes say.
        traced: Roles whose ranks may trace; None: any may.
    """

    def __init__(self, trial: TrialDir) -> None:
        self.trial = trial
        self.epoch = 0
        self.closers = contextlib.ExitStack()
        self.placer: Any = None
        self.rosters: Mapping[str, Any] = {}
        self.deadline_s = DEFAULT_DEADLINE_S
        self.startup_timeout = RESTART_S
        self.client: Client | None = None
        self.members: Members | None = None
        self.refs: RefBook | None = None
        self.tracer: Tracer | None = None
        self.trace_rank = 0
        self.traced: set[str] | None = None

    def open_records(self) -> Records:
        """Open the trial's registry."""
        records = Records(FileRegistry(self.trial.registry))
        self.closers.callback(records.close)
        return records

    def open_bus(
        self,
        config: Config,
        records: Records,
        world: int,
        entries: Callable[[int], dict[str, Entry]],
        leftovers: Iterable[int] = (),
    ) -> tuple[Members, Directory]:
        """Make sockets and hub, claim the epoch, and begin to watch who is there; ``world`` counts all ranks."""
        closers = self.closers
        self.deadline_s = config.rpc.timeout
        runtime = RuntimeDir.create(self.trial.path)
        closers.callback(runtime.remove)
        factory = SocketFactory(max_sockets=check_limits(world).max_sockets)
        closers.callback(factory.close)
        hub = _open_hub(config, factory, runtime)
        closers.callback(hub.stop)
        epoch = self._claim(records, hub, runtime)
        closers.callback(ControllerLease(records, epoch, config.rpc.lease).stop)
        self.trace(config, epoch)
        session = bytes.fromhex(epoch.session)
        bulk = _open_bulk(config, factory, runtime)
        closers.callback(bulk.close)
        porter = Porter(Courier.enter(config.data.shared_memory), bulk)
        closers.callback(porter.leave)
        client = self.client = Client(session=session, epoch=epoch.epoch, factory=factory, carrier=porter)  # type: ignore[arg-type]  # a NewType of bytes
        closers.callback(client.close)
        self.keep_refs(client, porter, config, epoch.epoch)
        self._watch_calls(client)
        self._watch_clocks(client)
        made = entries(epoch.epoch)
        members = self.members = Members(
            client,
            records,
            made,
            create_timeout_s=config.rpc.create_timeout,
            read_journal=self._read_journal,
            stacks=Stacks(self.trial, self.threads_of, lambda ranks: ask_agents(client, records, ranks)),
            patience=Patience(config.rpc.stuck_after, config.rpc.stuck_factor),
            leftovers=leftovers,
        )
        closers.callback(members.close)
        directory = Directory(
            records, factory=factory, hub=(hub.pub_endpoints, hub.sub_endpoints), on_event=members.on_event
        ).start()
        closers.callback(directory.close)
        directory.launching(active=True)
        for record, _, _ in made.values():
            records.publish_job(record)
        self.placer, self.rosters = client, members.roles
        return members, directory

    def keep_refs(self, client: Client, porter: Porter, config: Config, incarnation: int) -> None:
        """Let this process keep values and hand out their handles."""
        desk = Desk(
            Owner("controller", 0, incarnation), porter,
            limit=config.data.refs, lease_s=config.data.ref_lease, inlines=True,
            carriage=BulkCarriage(porter, self._owner_is_gone),
        )  # fmt: skip
        self.refs = RefBook(desk, ClientLink(client, self._peer_of), renew_s=config.data.ref_lease / 4)
        self.closers.callback(self.refs.close)

    def _peer_of(self, owner: tuple[str, int, int]) -> Any:
        """Return the connection to a start of a rank; None if another start has taken its place."""
        role, rank, incarnation = owner
        roster = self.rosters.get(role)
        peers = () if roster is None else roster.peers()
        peer = peers[rank] if rank < len(peers) else None
        known = peer is not None and peer.incarnation in {incarnation, 0}  # 0: nobody is there just now
        return peer if known else None

    def _owner_is_gone(self, ref: Ref) -> str:
        """Say why the owner of a handle is gone; empty while it may be there."""
        peer = self._peer_of((ref.role, ref.rank, ref.incarnation))
        if peer is None:
            return "it has ended since"
        return f"it has ended: {peer.evidence}" if peer.state is PeerState.DEAD else ""

    def _read_journal(self, worker: WorkerRecord) -> JournalReport | None:
        """Read what a worker of this host left, for want of an agent's word; None while it lives."""
        if not same_kernel(worker.pid_space):
            return None
        path = journal_file(self.trial.path, worker.role, worker.rank, worker.start)
        return read_journal(path, worker.incarnation, reaped=False)

    def _claim(self, records: Records, hub: Hub, runtime: RuntimeDir) -> EpochRecord:
        claimed = records.claim_epoch(
            EpochRecord(
                session=new_session().hex(),
                host=socket.gethostname(),
                pid_space=pid_space(),
                pid=os.getpid(),
                pid_start=start_time(os.getpid()) or 0,
                hub_pub=list(hub.pub_endpoints),
                hub_sub=list(hub.sub_endpoints),
                public_key=ProcessKeys.create().public_text,
                run_epoch_wall_ns=SYSTEM_CLOCK.wall_ns(),
                run_epoch_mono_ns=SYSTEM_CLOCK.monotonic_ns(),
                clock_boot_id=boot_id(),
                clock_time_ns=time_namespace(),
                version=_version(),
                runtime_dir=str(runtime.path),
            )
        )
        self.epoch = claimed.epoch
        return claimed

    def trace(self, config: Config, epoch: EpochRecord | None = None) -> TraceConfig:
        """Trace this process as ``controller/0``, or the next number where another trial's controller lives here."""
        taken = {tracer.rank for tracer in control.tracers() if tracer.role == "controller"}
        self.trace_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        settings = TraceConfig(
            root=config.trace.root or str(self.trial.traces), level=config.trace.level, run=self.trial.name
        )
        if epoch is None:
            settings = replace(
                settings,
                run_epoch_wall_ns=SYSTEM_CLOCK.wall_ns(),
                run_epoch_mono_ns=SYSTEM_CLOCK.monotonic_ns(),
                clock_boot_id=boot_id(),
                clock_time_ns=time_namespace(),
            )
        else:
            settings = replace(
                settings,
                run_epoch_wall_ns=epoch.run_epoch_wall_ns,
                run_epoch_mono_ns=epoch.run_epoch_mono_ns,
                clock_boot_id=epoch.clock_boot_id,
                clock_time_ns=epoch.clock_time_ns,
            )
        if config.trace.level == "off" and (
            epoch is None or epoch.epoch == 1
        ):  # else a controller before may have told
            self.traced = set()
        if config.trace.sidecar:
            from zbus.trace.launch import Sidecar

            host = None if config.scheduler.transport == "ipc" else config.scheduler.bind
            self.closers.callback(Sidecar.start(self.trial.path, host=host).stop)
        self.tracer = control.configure(
            settings, role="controller", rank=self.trace_rank, start=0 if epoch is None else epoch.epoch - 1
        )
        self.closers.callback(control.reset, "controller", self.trace_rank)
        return settings

    def _watch_clocks(self, client: Client) -> None:
        """Measure the clocks of other hosts while anything is traced."""
        tracer = self.tracer
        writer = control.writer_of(tracer) if tracer is not None else None
        if tracer is not None and writer is not None:
            watch = ClockWatch(client, clock_id(), lambda: tracer.rpc and writer.opened, writer.note_clock)
            self.closers.callback(watch.close)

    def _watch_calls(self, client: Client) -> None:
        """Have the trace show what is under way to the workers, and each request that leaves late or again."""
        tracer = self.tracer
        if tracer is None:
            return

        def sent(peer: Peer, header: Header) -> None:
            if tracer.rpc:
                name, incarnation = str(peer.name), peer.incarnation
                tracer.bus_sent(
                    client.session, name, incarnation, header.lane, header.seq, header.calls, header.attempt
                )

        client.on_sent = sent
        self.closers.callback(tracer.add_gauge("calls", client.load))

    # -- talking to processes ------------------------------------------------------------------------------------

    def ask(self, role: str, method: str, *args: Any, timeout: float = ACK_S) -> dict[WorkerName, Any]:
        """Call one of the bus's own methods on ``ctl`` of every ready rank; those that fail are left out."""
        client = self.client
        if client is None:
            return {}
        ready = [peer for peer in self.rosters[role].peers() if peer.state is PeerState.READY]
        return ask(client, ready, method, args, timeout)

    def threads_of(self, records: Sequence[WorkerRecord]) -> tuple[Mapping[int, Told], set[int]]:
        """Ask ranks for the stacks of all their threads; see ``controller.stacks``."""
        client, members = self.client, self.members
        if client is None or members is None:
            return {}, set()
        found = {record.incarnation: members.peer_of(record) for record in records}
        return ask_ranks(client, {incarnation: peer for incarnation, peer in found.items() if peer is not None})

    def ask_agents(self, role: str, grace_s: float) -> bool:
        """Ask the agents of a role to stop; True if all acknowledged."""
        if self.client is None:
            return False
        records = Records(FileRegistry(self.trial.registry, create=False))
        try:
            agents = records.agents(role)
        finally:
            records.close()
        # A session of its own: an agent remembers the places of a session, and this may be asked more than once.
        client = Client(session=new_session(), epoch=self.epoch, factory=self.client.factory)
        try:
            peers = [
                client.connect(WorkerName(record.agent, 0), 0, {"ctl": record.ctl}) for record in agents if record.ctl
            ]
            client.wait(lambda: all(peer.state is PeerState.READY for peer in peers), ACK_S)
            ready = [peer for peer in peers if peer.state is PeerState.READY]
            answers = ask(client, ready, "zbus.stop", (grace_s,), ACK_S)
        finally:
            client.close()
        return bool(agents) and len(answers) == len(agents)

    def stop_workers(self, scheduler: Scheduler, grace_s: float) -> None:
        """Tell every worker to end, acknowledged; then have the scheduler see to it."""
        if self.members is not None:
            self.members.ending()
        try:
            for role in self.rosters:
                self.ask(role, "zbus.stop", grace_s)
        except ZbusError as error:
            log.debug("while asking workers to stop: %s", error)
        scheduler.stop(grace_s=grace_s)


def _open_bulk(config: Config, factory: SocketFactory, runtime: RuntimeDir) -> Bulk:
    """Bind where ranks pull large arguments that they cannot map."""
    bulk = Bulk(factory)
    transport: Transport = "both" if config.scheduler.transport == "tcp" else "ipc"
    for endpoint in bind_endpoints(transport, "data", runtime_dir=runtime, host=config.scheduler.bind):
        bulk.bind(endpoint)
    return bulk


def _open_hub(config: Config, factory: SocketFactory, runtime: RuntimeDir) -> Hub:
    transport = "both" if config.scheduler.transport == "tcp" else "ipc"
    host = config.scheduler.bind
    hub = Hub(
        factory,
        pub=bind_endpoints(transport, "hub-pub", runtime_dir=runtime, host=host),  # type: ignore[arg-type]  # a Literal
        sub=bind_endpoints(transport, "hub-sub", runtime_dir=runtime, host=host),  # type: ignore[arg-type]  # a Literal
    )
    hub.start()
    return hub


def _version() -> str:
    import zbus

    return zbus.__version__
