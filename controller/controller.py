"""The driver's handle on a trial: launch or attach, call groups, close; nothing is left behind.

``Controller.launch`` goes through these stations, each with the launch's one deadline: trial directory and lock,
sockets and hub, epoch (the fencing number), job records, agents by the scheduler, workers by the directory, engines.
A failure in any of them undoes what was started and names who is missing and how far it came.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import structs

from controller.clocks import ClockWatch
from controller.context import current_run
from controller.group import DEFAULT_DEADLINE_S, Group
from controller.late import Patience
from controller.members import Members
from controller.patience import wait_reminding
from controller.refs import ClientLink, RefBook, Scope
from controller.restarting import ask_restart
from controller.role import Role
from controller.scheduling.api import AgentExit, Job, Scheduler
from controller.stacks import Stacks, Told, ask_agents, ask_ranks
from controller.startup import agent_error, missing_error
from controller.takeover import OrphanResult, arguments_of, refuse_living, with_arguments
from zbus.clock import SYSTEM_CLOCK, boot_id, clock_id, time_namespace
from zbus.codec import Ref, decode, encode
from zbus.config import Config, RoleConfig, TrialDir
from zbus.data.carriage import BulkCarriage
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner
from zbus.data.porter import Porter
from zbus.discovery.directory import Directory
from zbus.errors import ConfigError, StartupError, TrialError, Unavailable, ZbusError
from zbus.ids import WorkerName, new_session
from zbus.protocol.journal import JournalReport
from zbus.protocol.messages import Header, Outcome, OutcomeKind
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space, same_kernel
from zbus.registry.lease import LeaseRenewer
from zbus.registry.records import EpochRecord, JobRecord, Records, WorkerRecord
from zbus.runtime.journal import journal_file, read_journal
from zbus.runtime.processes import is_alive, start_time
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

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Controller", "Role"]

log = logging.getLogger("zbus.controller")

_STOP_ACK_S: Final = 2.0
_GUEST_S: Final = 5.0
_RESTART_S: Final = 120.0
_PREDECESSORS_S: Final = 15.0
_LOOK_S: Final = 0.02

Entry = tuple[JobRecord, Sequence[Any], Mapping[str, Any]]
"""A role's job with the engine's arguments."""


class Controller:
    """A running trial. Use it as a context manager; ``close`` may be called again.

    Attributes:
        trial: Paths of the trial directory.
        epoch: This controller's fencing number, 0 for a guest.
    """

    def __init__(self, trial: TrialDir, epoch: int) -> None:
        self.trial = trial
        self.epoch = epoch
        self._groups: dict[str, Group] = {}
        self._closers = contextlib.ExitStack()
        self._closed = False
        self._close_lock = threading.Lock()
        self._placer: Any = None
        self._rosters: Mapping[str, Any] = {}
        self._deadline_s = DEFAULT_DEADLINE_S
        self._startup_timeout = _RESTART_S
        self._client: Client | None = None
        self._members: Members | None = None
        self._refs: RefBook | None = None
        self._tracer: Tracer | None = None
        self._trace_rank = 0
        self._began = time.monotonic()

    # -- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def launch(
        cls,
        experiment: str | None = None,
        roles: Mapping[str, Role] | None = None,
        *,
        trial: str | None = None,
        root: str | os.PathLike[str] | None = None,
        scheduler: str | None = None,
        startup_timeout: float | None = None,
        resume: bool = False,
        overwrite: bool = False,
        config: Config | None = None,
    ) -> Controller:
        """Start a trial and return when every rank of every role is ready.

        What ``zbus-controller run`` was told (trial, scheduler, ``roles.actor.replicas=8``, …) wins over these
        arguments, so a script need not parse anything.

        Args:
            experiment: Name of the experiment; the config's, or ``default``.
            roles: Roles by name; the config's where not given.
            trial: Name of the trial; a new one where not given.
            root: Directory of all experiments; ``zbus-runs`` where not given.
            scheduler: ``local`` (processes on this host), ``inline`` (this process and thread, for pdb) or
                ``external`` (agents started by hand).
            startup_timeout: Seconds until all ranks must be ready.
            resume: Go on in an existing trial.
            overwrite: Replace an existing trial.
            config: A whole config; the other arguments win over it.

        Raises:
            ConfigError: The arguments cannot work.
            TrialError: The trial exists or is in use.
            StartupError: Ranks are missing at the deadline; each is named with its phase.
            WorkerLost: A rank died while starting.
            RemoteError: An engine's constructor or ``setup`` raised.
        """
        plan = _Plan.of(experiment, roles, trial, root, scheduler, startup_timeout, resume, overwrite, config)
        self = cls(plan.trial, 0)
        try:
            if plan.scheduler == "inline":
                self._launch_inline(plan)
            else:
                self._launch(plan)
        except BaseException:
            self.close()
            raise
        if plan.run is not None:
            plan.run.launched.append(self)
        return self

    @classmethod
    def attach(cls, trial: TrialDir | str | os.PathLike[str], *, timeout: float = _GUEST_S) -> Controller:
        """Join a running trial as a guest: a session of its own, ``ctl`` and ``pure`` calls only.

        Closing a guest leaves the trial as it is.

        Args:
            trial: The trial directory.
            timeout: Seconds to reach the workers.

        Raises:
            TrialError: Not a trial directory, or no controller has run in it.
            StartupError: Workers cannot be reached.
        """
        opened = trial if isinstance(trial, TrialDir) else TrialDir.open(trial)
        self = cls(opened, 0)
        try:
            self._attach(timeout)
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def takeover(
        cls, trial: TrialDir | str | os.PathLike[str], *, config: Config | None = None, timeout: float = 30.0
    ) -> Controller:
        """Claim the next epoch of a trial whose controller is gone, and adopt its running workers.

        Workers outlive their controller where their role says ``orphans="wait"``. From the moment a worker accepts the
        new epoch, nothing of the old session starts there any more: what was queued is cancelled, what runs may end,
        and its result waits in ``orphans()``.

        Args:
            trial: The trial directory.
            config: Timeouts and tracing; defaults where not given.
            timeout: Seconds to reach every rank.

        Raises:
            TrialError: Its controller is alive, or no controller has run in it.
            StartupError: Ranks cannot be reached.
        """
        opened = trial if isinstance(trial, TrialDir) else TrialDir.open(trial)
        opened.lock()
        self = cls(opened, 0)
        try:
            self._take_over(config or Config(), timeout)
        except BaseException:
            self.close()
            raise
        return self

    def orphans(self) -> list[OrphanResult]:
        """Return what earlier controllers of this trial left on the workers: calls that ran, or still run.

        An ended one can be adopted once, by ``result()``.
        """
        found: list[OrphanResult] = []
        for role in self.roles:
            for name, listed in self._ask(role, "zbus.orphans").items():
                found += [OrphanResult(name, entry, self._adopt) for entry in listed]
        return found

    # -- using it ------------------------------------------------------------------------------------------------

    def group(self, role: str) -> Group:
        """Return the group of a role: all its ranks, with its endpoints as methods.

        Raises:
            ConfigError: No such role.
        """
        found = self._groups.get(role)
        if found is None:
            roster = self._rosters.get(role)
            if roster is None:
                known = ", ".join(self._rosters) or "none"
                msg = f"trial {self.trial.name} has no role {role!r}"
                raise ConfigError(msg, hint=f"its roles are: {known}")
            found = self._groups[role] = Group(roster, self._placer, deadline_s=self._deadline_s, refs=self._refs)
        return found

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles."""
        return tuple(self._rosters)

    def empty(self, shape: Sequence[int] | int, dtype: Any = "float32") -> np.ndarray[Any, Any]:
        """Return an uninitialised array in shared memory: sent from there without a copy.

        Fill it, send it, and take a new one for the next call: the memory of this one is used again when you and all
        its readers have let go of it. Do not change it once it is sent; ranks of this host read it in place. Below
        64 KiB, or where there is no shared memory (or no room left), it is an ordinary array. Any thread.

        Args:
            shape: Sizes of the dimensions.
            dtype: numpy dtype, not of objects.
        """
        import numpy as np

        carrier = None if self._client is None else self._client.carrier
        if carrier is None:
            return np.empty(shape, dtype)
        made: np.ndarray[Any, Any] = carrier.empty(shape, dtype)
        return made

    def put(self, value: Any) -> Ref:
        """Keep a value in this process and return its handle; ranks that are given it get it from here.

        Arrays are copied once, into shared memory where there is some (those of ``empty`` are not copied), so that
        any number of calls with the handle copy them no more. It is kept as long as a handle of it lives, at most to
        the end of the ``scope`` around. Any thread.

        Args:
            value: What a call could take as an argument.

        Raises:
            CodecError: It cannot be carried.
            RefLimitError: This process keeps as much as it may (``data.refs``), or the scope does.
        """
        return self._book().put(value)

    def get(self, value: Any, timeout: float | None = None) -> Any:
        """Return the value of a ``Ref``, or a list, tuple or dict with values in place of its Refs. Blocks.

        Arrays of this host are mapped and read-only.

        Args:
            value: The handle, or what holds some.
            timeout: Seconds to reach the owners.

        Raises:
            RefLostError: An owner is gone or does not answer, or a value was released.
        """
        return self._book().get(value, timeout)

    def scope(self, limit: int | None = None) -> AbstractContextManager[Scope]:
        """Own what is kept in a ``with`` block, by ``put`` and by calls that leave their results with the ranks.

        At its end all of it is let go, however many handles live; calls under way still get their arguments. What was
        made before the block, and is only read in it, stays. Scopes nest, and belong to the thread or task that entered
        them.

        Args:
            limit: Most bytes it may hold; beyond, ``RefLimitError`` is raised where the next value comes.
        """
        return self._book().scope(limit)

    def _book(self) -> RefBook:
        if self._refs is None:
            msg = f"{self.trial.name} is not running"
            raise ConfigError(msg)
        return self._refs

    def config_perf_tracer(self, config: Mapping[str, Any] | None, role: str | None = None) -> None:
        """Switch tracing of a role's workers (all roles by default) and of this process; None switches it off."""
        control.config_perf_tracer(config, "controller", self._trace_rank)
        for name in self.roles if role is None else (role,):
            if self._client is not None:
                self._ask(name, "zbus.config_perf_tracer", config, name)
            elif any(tracer.role == name for tracer in control.tracers()):  # ranks in this process
                control.config_perf_tracer(config, name)

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # founding spelling  # noqa: FBT001, FBT002
        """Have every process write its trace now, if ``step`` is due. No call is made where nothing is traced."""
        tracer = self._tracer
        if not force and (tracer is None or not (tracer.rpc or tracer.sessions is not None)):
            return
        control.save_perf_tracer(step, force)
        for name in self.roles:
            self._ask(name, "zbus.save_perf_tracer", step, force)

    def statuses(self, timeout: float = 2.0) -> dict[WorkerName, dict[str, Any]]:
        """Return ``zbus.status`` of every rank that answers; asked on ``ctl``, so busy ranks answer too."""
        found: dict[WorkerName, dict[str, Any]] = {}
        for role in self.roles:
            found.update(self._ask(role, "zbus.status", timeout=timeout))
        return found

    def restart(self, role: str, timeout: float | None = None) -> None:
        """Give every rank of a role a fresh process and engine, and return when all are ready again.

        For a group that is stuck: ranks that sit in a collective whose peer has failed are ended, by force after their
        grace, and nothing waits for the collective's own timeout. Calls that are out end with what is known of them;
        engines are told by ``recover``.

        Args:
            role: Which.
            timeout: Seconds until all ranks must be ready; the launch's limit where not given.

        Raises:
            ConfigError: No such role, or one without agents (inline).
            StartupError: No agent of the role answers, or ranks are missing at the deadline.
        """
        members, client = self._members, self._client
        self.group(role)
        if members is None or client is None:
            msg = f"the ranks of {role} have no processes of their own to restart"
            raise ConfigError(msg, hint="restart needs scheduler local or external, and not a guest")
        limit = self._startup_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        before = {one.name.rank: one.record.start for one in members.roles[role].members if one.record is not None}
        records = Records(FileRegistry(self.trial.registry, create=False))
        try:
            agreed = ask_restart(client, records, members.roles[role].job)
        finally:
            records.close()
        if not agreed:
            msg = f"no agent of {role} answers, so its ranks cannot be restarted"
            raise StartupError(msg, hint="zbus-controller status shows what runs")

        def done() -> bool:
            return members.first_error() is not None or all(
                one.phase == "ready" and one.record is not None and one.record.start > before.get(one.name.rank, -1)
                for one in members.roles[role].members
            )

        if not members.wait(done, max(0.0, deadline - time.monotonic())):
            late = ", ".join(f"{one.name}: {one.phase}" for one in members.roles[role].members if one.phase != "ready")
            msg = f"{role} was not ready again within {limit:g} s"
            raise StartupError(msg, facts={"late": late or "ranks of the start before are still there"})
        if (error := members.first_error()) is not None:
            raise error

    def report(self) -> dict[str, Any]:
        """Return figures of this session: wall seconds, roles, calls, retransmissions, probes, shared memory."""
        stats = {} if self._client is None else self._client.statistics()
        carrier = None if self._client is None else self._client.carrier
        memory = carrier.statistics() if carrier is not None else {}
        facts = {} if self._refs is None else self._refs.desk.statistics()
        kept: dict[str, Any] = {name: facts[name] for name in ("refs", "refs_bytes") if name in facts}
        return {
            "wall_s": round(time.monotonic() - self._began, 3),
            "roles": {name: len(roster.peers()) for name, roster in self._rosters.items()},
            **stats,
            **memory,
            **kept,
        }

    def close(self) -> None:
        """Stop all workers in order and free everything. A guest only leaves. Any thread; idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._closers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "guest" if not self.epoch else f"epoch {self.epoch}"
        return f"<Controller {self.trial.name}: {state}, roles {', '.join(self._rosters) or 'none'}>"

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, plan: _Plan) -> None:
        self._startup_timeout = plan.startup_timeout
        deadline = time.monotonic() + plan.startup_timeout
        if not plan.keeps_lock:
            self._closers.callback(self.trial.unlock)
        config = plan.config
        jobs = {name: role.to_job(name, config.trace.level, config.data) for name, role in plan.roles.items()}
        records = self._open_records()

        def entries(epoch: int) -> dict[str, Entry]:
            return {
                name: (with_arguments(jobs[name].to_record(epoch), role.args, role.kwargs), role.args, role.kwargs)
                for name, role in plan.roles.items()
            }

        world = sum(role.world_size for role in plan.roles.values())
        if plan.scheduler != "external":
            _await_predecessors(records, min(_PREDECESSORS_S, plan.startup_timeout / 2))
        leftovers = _leftovers(records, starts_all=plan.scheduler != "external")
        members, directory = self._open_bus(plan.config, records, world, entries, leftovers)
        scheduler, failures = self._schedule(plan)
        self._closers.callback(self._stop_workers, scheduler, plan.config.scheduler.stop_grace)
        for job in jobs.values():
            scheduler.start(job)
        self._await_ready(members, scheduler, failures, records, deadline, plan.startup_timeout)
        directory.launching(active=False)

    def _take_over(self, config: Config, timeout: float) -> None:
        from controller.scheduling.external import ExternalScheduler

        deadline = time.monotonic() + timeout
        self._closers.callback(self.trial.unlock)
        records = self._open_records()
        holder = records.current_epoch()
        jobs = [job for job in records.jobs() if holder is not None and job.epoch == holder.epoch]
        if holder is None or not jobs:
            msg = f"no controller has run in {self.trial.name} yet"
            raise TrialError(msg, hint="start one with Controller.launch")
        refuse_living(records, holder)

        def entries(epoch: int) -> dict[str, Entry]:
            return {job.role: (structs.replace(job, epoch=epoch), *arguments_of(job)) for job in jobs}

        members, directory = self._open_bus(config, records, sum(job.world_size for job in jobs), entries)
        scheduler = ExternalScheduler(self.trial, ask_stop=self._ask_agents)
        self._closers.callback(scheduler.close)
        self._closers.callback(self._stop_workers, scheduler, config.scheduler.stop_grace)
        for job in jobs:
            scheduler.start(Job(role=job.role, replicas=job.world_size, engine=job.engine))
        self._await_ready(members, scheduler, [], records, deadline, timeout)
        directory.launching(active=False)

    def _open_records(self) -> Records:
        records = Records(FileRegistry(self.trial.registry))
        self._closers.callback(records.close)
        return records

    def _open_bus(
        self,
        config: Config,
        records: Records,
        world: int,
        entries: Callable[[int], dict[str, Entry]],
        leftovers: Iterable[int] = (),
    ) -> tuple[Members, Directory]:
        """Make sockets and hub, claim the epoch, and begin to watch who is there; ``world`` counts all ranks."""
        closers = self._closers
        self._deadline_s = config.rpc.timeout
        runtime = RuntimeDir.create(self.trial.path)
        closers.callback(runtime.remove)
        factory = SocketFactory(max_sockets=check_limits(world).max_sockets)
        closers.callback(factory.close)
        hub = _open_hub(config, factory, runtime)
        closers.callback(hub.stop)
        epoch = self._claim(records, hub, runtime)
        closers.callback(_Lease(records, epoch, config.rpc.lease).stop)
        self._trace(config, epoch)
        session = bytes.fromhex(epoch.session)
        bulk = _open_bulk(config, factory, runtime)
        closers.callback(bulk.close)
        porter = Porter(Courier.enter(config.data.shared_memory), bulk)
        closers.callback(porter.leave)
        client = self._client = Client(session=session, epoch=epoch.epoch, factory=factory, carrier=porter)  # type: ignore[arg-type]  # a NewType of bytes
        closers.callback(client.close)
        self._keep_refs(client, porter, config, epoch.epoch)
        self._watch_calls(client)
        self._watch_clocks(client)
        made = entries(epoch.epoch)
        members = self._members = Members(
            client,
            records,
            made,
            create_timeout_s=config.rpc.create_timeout,
            read_journal=self._read_journal,
            stacks=Stacks(self.trial, self._threads_of, lambda ranks: ask_agents(client, records, ranks)),
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
        self._placer, self._rosters = client, members.roles
        return members, directory

    def _keep_refs(self, client: Client, porter: Porter, config: Config, incarnation: int) -> None:
        desk = Desk(
            Owner("controller", 0, incarnation), porter,
            limit=config.data.refs, lease_s=config.data.ref_lease, inlines=True,
            carriage=BulkCarriage(porter, self._owner_is_gone),
        )  # fmt: skip
        self._refs = RefBook(desk, ClientLink(client, self._peer_of), renew_s=config.data.ref_lease / 4)
        self._closers.callback(self._refs.close)

    def _peer_of(self, owner: tuple[str, int, int]) -> Any:
        """Return the connection to a start of a rank; None if another start has taken its place."""
        role, rank, incarnation = owner
        roster = self._rosters.get(role)
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

    def _schedule(self, plan: _Plan) -> tuple[Scheduler, list[AgentExit]]:
        failures: list[AgentExit] = []
        settings = plan.config.scheduler
        if plan.scheduler == "external":
            from controller.scheduling.external import ExternalScheduler

            external = ExternalScheduler(self.trial, ask_stop=self._ask_agents)
            self._closers.callback(external.close)
            for name, role in plan.roles.items():
                log.info("waiting for %s/0-%d: zbus-worker start --role %s", name, role.world_size - 1, name)
            return external, failures
        from controller.scheduling.local import LocalScheduler

        def agent_ended(ended: AgentExit) -> None:
            failures.append(ended)
            if self._members is not None:
                self._members.on_agent_exit(ended)

        local = LocalScheduler(
            self.trial,
            gpus=settings.gpus,
            transport=settings.transport,
            bind_host=settings.bind,
            wait_controller_s=plan.startup_timeout,
            stop_grace_s=settings.stop_grace,
            on_agent_exit=agent_ended,
        )
        self._closers.callback(local.close)
        return local, failures

    def _await_ready(
        self,
        members: Members,
        scheduler: Scheduler,
        failures: list[AgentExit],
        records: Records,
        deadline: float,
        limit_s: float,
    ) -> None:
        """Wait until every rank is ready; the first failure ends the wait, so does the deadline."""

        def settled() -> bool:
            return members.all_ready() or members.first_error() is not None or bool(failures)

        wait_reminding(members, scheduler, settled, deadline)
        if failures and members.first_error() is None and not members.all_ready():
            members.wait(lambda: members.first_error() is not None, 0.3)  # an exit record tells more than its agent
        error = members.first_error()
        if error is not None:
            raise error
        if members.all_ready():
            return
        if failures:
            raise members.gave_up(failures[0].role) or agent_error(failures[0])
        raise missing_error(members, scheduler, self.trial, limit_s, self._stacks(members), records.root_id())

    def _stacks(self, members: Members) -> dict[WorkerName, str]:
        """Ask ranks that answer but are not ready where they are."""
        peers = [member.peer for member, _ in members.missing() if member.peer is not None]
        ready = [peer for peer in peers if peer.state is PeerState.READY]
        return {} if self._client is None else _ask(self._client, ready, "zbus.stacks", (), 0.5)

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

    def _trace(self, config: Config, epoch: EpochRecord | None = None) -> TraceConfig:
        """Trace this process as ``controller/0``, or the next number where another trial's controller lives here."""
        taken = {tracer.rank for tracer in control.tracers() if tracer.role == "controller"}
        self._trace_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
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
        if config.trace.sidecar:
            from zbus.trace.launch import Sidecar

            host = None if config.scheduler.transport == "ipc" else config.scheduler.bind
            self._closers.callback(Sidecar.start(self.trial.path, host=host).stop)
        self._tracer = control.configure(
            settings, role="controller", rank=self._trace_rank, start=0 if epoch is None else epoch.epoch - 1
        )
        self._closers.callback(control.reset, "controller", self._trace_rank)
        return settings

    def _watch_clocks(self, client: Client) -> None:
        """Measure the clocks of other hosts while anything is traced."""
        tracer = self._tracer
        writer = control.writer_of(tracer) if tracer is not None else None
        if tracer is not None and writer is not None:
            watch = ClockWatch(client, clock_id(), lambda: tracer.rpc and writer.opened, writer.note_clock)
            self._closers.callback(watch.close)

    def _watch_calls(self, client: Client) -> None:
        """Have the trace show what is under way to the workers, and each request that leaves late or again."""
        tracer = self._tracer
        if tracer is None:
            return

        def sent(peer: Peer, header: Header) -> None:
            if tracer.rpc:
                name, incarnation = str(peer.name), peer.incarnation
                tracer.bus_sent(
                    client.session, name, incarnation, header.lane, header.seq, header.calls, header.attempt
                )

        client.on_sent = sent
        self._closers.callback(tracer.add_gauge("calls", client.load))

    def _launch_inline(self, plan: _Plan) -> None:
        from controller.scheduling.inline import InlineRuntime

        if not plan.keeps_lock:
            self._closers.callback(self.trial.unlock)
        self._deadline_s = plan.config.rpc.timeout
        runtime = InlineRuntime(trace=self._trace(plan.config))
        self._closers.callback(runtime.close)
        rosters = {}
        for name, role in plan.roles.items():
            rosters[name] = runtime.add_role(
                name,
                role.engine_path,
                replicas=role.world_size,
                mesh=role.mesh,
                args=role.args,
                kwargs=role.kwargs,
                trial_dir=self.trial.path,
            )
        self._placer, self._rosters = runtime, rosters
        self._refs = RefBook(runtime.desk, runtime.link, renew_s=plan.config.data.ref_lease / 4)
        self._closers.callback(self._refs.close)

    # -- a guest -------------------------------------------------------------------------------------------------

    def _attach(self, timeout: float) -> None:
        from controller.guests import GuestRoster

        records = Records(FileRegistry(self.trial.registry, create=False))
        self._closers.callback(records.close)
        if records.current_epoch() is None:
            msg = f"no controller has run in {self.trial.name} yet"
            raise TrialError(msg, hint="zbus-controller status shows what runs")
        factory = SocketFactory()
        self._closers.callback(factory.close)
        bulk = Bulk(factory)
        self._closers.callback(bulk.close)
        porter = Porter(Courier.enter(), bulk)
        self._closers.callback(porter.leave)
        client = self._client = Client(session=new_session(), epoch=0, factory=factory, name="guest", carrier=porter)
        self._closers.callback(client.close)
        self._placer = client
        self._rosters = GuestRoster.connect(client, records, timeout)
        self._keep_refs(client, porter, Config(), 0)

    # -- talking to processes ------------------------------------------------------------------------------------

    def _ask(self, role: str, method: str, *args: Any, timeout: float = _STOP_ACK_S) -> dict[WorkerName, Any]:
        """Call one of the bus's own methods on ``ctl`` of every ready rank; those that fail are left out."""
        client = self._client
        if client is None:
            return {}
        ready = [peer for peer in self._rosters[role].peers() if peer.state is PeerState.READY]
        return _ask(client, ready, method, args, timeout)

    def _threads_of(self, records: Sequence[WorkerRecord]) -> tuple[Mapping[int, Told], set[int]]:
        """Ask ranks for the stacks of all their threads; see ``controller.stacks``."""
        client, members = self._client, self._members
        if client is None or members is None:
            return {}, set()
        found = {record.incarnation: members.peer_of(record) for record in records}
        return ask_ranks(client, {incarnation: peer for incarnation, peer in found.items() if peer is not None})

    def _adopt(self, name: WorkerName, session: bytes, lane: str, seq: int) -> Any:
        client = self._client
        if client is None:
            return None
        peer = self._rosters[name.role].peers()[name.rank]
        return _ask(client, [peer], "zbus.adopt", (session, lane, seq), _STOP_ACK_S).get(name)

    def _ask_agents(self, role: str, grace_s: float) -> bool:
        """Ask the agents of a role to stop; True if all acknowledged."""
        if self._client is None:
            return False
        records = Records(FileRegistry(self.trial.registry, create=False))
        try:
            agents = records.agents(role)
        finally:
            records.close()
        # A session of its own: an agent remembers the places of a session, and this may be asked more than once.
        client = Client(session=new_session(), epoch=self.epoch, factory=self._client.factory)
        try:
            peers = [
                client.connect(WorkerName(record.agent, 0), 0, {"ctl": record.ctl}) for record in agents if record.ctl
            ]
            client.wait(lambda: all(peer.state is PeerState.READY for peer in peers), _STOP_ACK_S)
            ready = [peer for peer in peers if peer.state is PeerState.READY]
            answers = _ask(client, ready, "zbus.stop", (grace_s,), _STOP_ACK_S)
        finally:
            client.close()
        return bool(agents) and len(answers) == len(agents)

    def _stop_workers(self, scheduler: Scheduler, grace_s: float) -> None:
        """Tell every worker to end, acknowledged; then have the scheduler see to it."""
        if self._members is not None:
            self._members.ending()
        try:
            for role in self.roles:
                self._ask(role, "zbus.stop", grace_s)
        except ZbusError as error:
            log.debug("while asking workers to stop: %s", error)
        scheduler.stop(grace_s=grace_s)


class _Lease:
    """Renews the controller's lease on a thread of its own until stopped."""

    def __init__(self, records: Records, epoch: EpochRecord, ttl_s: float) -> None:
        self._records = records
        self._renewer = LeaseRenewer(f"controller.{epoch.epoch}", ttl_s)
        self._stop = threading.Event()
        self._lease: Any = None
        self._thread = threading.Thread(target=self._run, name="zbus-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Release the lease."""
        self._stop.set()
        self._thread.join(2.0)
        if self._lease is not None:
            with contextlib.suppress(ZbusError):  # a sick registry must not keep a run from ending
                self._records.release_lease(self._lease)

    def _run(self) -> None:
        while not self._stop.is_set():
            now = SYSTEM_CLOCK.monotonic_ns()
            if self._renewer.due(now):
                lease = self._renewer.next(now)
                try:
                    self._records.renew_lease(lease)
                except ZbusError as error:
                    if self._renewer.failures == 0:
                        log.warning("the controller's lease could not be renewed: %s", error)
                    self._renewer.failed()
                else:
                    self._lease = lease
                    self._renewer.renewed()
            self._stop.wait(max(0.01, self._renewer.wait_s(SYSTEM_CLOCK.monotonic_ns())))


class _Plan:
    """What a launch is asked to do, after config, arguments and command line are put together."""

    def __init__(self, config: Config, roles: dict[str, Role], trial: TrialDir, run: Any) -> None:
        self.config = config
        self.roles = roles
        self.trial = trial
        self.run = run
        self.scheduler = config.scheduler.type
        self.startup_timeout = config.scheduler.startup_timeout

    @property
    def keeps_lock(self) -> bool:
        """Whether the run, not this controller, holds the trial's lock."""
        return self.run is not None

    @classmethod
    def of(  # private, one caller  # noqa: PLR0917
        cls,
        experiment: str | None,
        roles: Mapping[str, Role] | None,
        trial: str | None,
        root: str | os.PathLike[str] | None,
        scheduler: str | None,
        startup_timeout: float | None,
        resume: bool,  # noqa: FBT001  # private, one caller
        overwrite: bool,  # noqa: FBT001  # private, one caller
        config: Config | None,
    ) -> _Plan:
        import msgspec

        run = current_run()
        base = config if config is not None else run.config if run is not None else Config()
        settings = base.scheduler
        if scheduler is not None and not (run is not None and run.was_set("scheduler.type")):
            if scheduler not in ("inline", "local", "external"):
                msg = f"scheduler {scheduler!r} is not known"
                raise ConfigError(msg, hint="one of local, inline, external")
            settings = msgspec.structs.replace(settings, type=scheduler)
        if startup_timeout is not None and not (run is not None and run.was_set("scheduler.startup_timeout")):
            settings = msgspec.structs.replace(settings, startup_timeout=float(startup_timeout))
        base = msgspec.structs.replace(base, scheduler=settings)
        chosen = dict(roles) if roles is not None else _config_roles(base.roles)
        if run is not None and roles is not None:
            chosen = {name: role.with_changes(run.role_overrides(name)) for name, role in chosen.items()}
        if not chosen:
            msg = "a trial needs at least one role"
            raise ConfigError(msg, hint='for example roles={"actor": Role("engines:Actor", replicas=2)}')
        for name, role in chosen.items():
            role.to_job(name, base.trace.level)  # refuse what cannot be placed before anything is made
        if run is not None:
            directory = run.make_trial(experiment or base.experiment or "default")
        else:
            directory = TrialDir.create(
                root if root is not None else base.root,
                experiment or base.experiment or "default",
                trial or base.trial or None,
                resume=resume,
                overwrite=overwrite,
            )
        return cls(base, chosen, directory, run)


def _config_roles(roles: Mapping[str, RoleConfig]) -> dict[str, Role]:
    found = {}
    for name, role in roles.items():
        if not role.engine:
            msg = f"role {name} names no engine"
            raise ConfigError(msg, hint=f"set roles.{name}.engine=package.module:Class")
        found[name] = Role.of(role)
    return found


def _await_predecessors(records: Records, limit_s: float) -> None:
    """Wait until the agents of a controller that was killed have ended, as they do once they see that it is gone.

    While they live they hold their ranks, and what they write down of their end would be taken for one of this run.
    """
    waiting = {job.role for job in records.jobs() if job.orphans == "wait"}
    here = pid_space()
    old = [agent for agent in records.agents() if agent.role not in waiting and agent.pid_space == here]
    until = time.monotonic() + limit_s
    while living := [agent for agent in old if is_alive(agent.pid, agent.pid_start)]:
        if time.monotonic() > until:
            log.warning("%d agents of the run before still live, such as %s", len(living), living[0].agent)
            return
        time.sleep(_LOOK_S)


def _leftovers(records: Records, *, starts_all: bool) -> list[int]:
    """Return the incarnations that stand in the registry and cannot be meant by a launch.

    A killed agent leaves no word of how its ranks ended. Their records would be taken for ranks of this run, and their
    silence for a death of it. Where agents are started by hand a rank may stand there already: only what is seen to be
    gone is left out then.
    """
    here = pid_space()
    return [
        record.incarnation
        for record in records.workers()
        if starts_all or (record.pid_space == here and not is_alive(record.pid, record.pid_start))
    ]


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


def _ask(
    client: Client, peers: Sequence[Peer], method: str, args: Sequence[Any], timeout_s: float
) -> dict[WorkerName, Any]:
    """Call a method on ``ctl`` of each peer and return the good answers by name."""
    if not peers:
        return {}
    outcomes: dict[int, Outcome] = {}

    def sink(member: int, _call: int, outcome: Outcome) -> None:
        outcomes[member] = outcome

    frames = encode([[method, tuple(args), {}]])
    try:
        client.place(peers, "ctl", [frames] * len(peers), 1, deadline_s=timeout_s, sink=sink)
    except Unavailable:  # one of them went meanwhile: ask the others one by one
        if len(peers) == 1:
            return {}
        return {
            name: answer for peer in peers for name, answer in _ask(client, [peer], method, args, timeout_s).items()
        }
    client.wait(lambda: len(outcomes) == len(peers), timeout_s + 1.0)
    return {
        peers[member].name: decode(outcome.payload)
        for member, outcome in outcomes.items()
        if outcome.kind is OutcomeKind.OK and outcome.payload is not None
    }


def _version() -> str:
    import zbus

    return zbus.__version__
