"""What schedulers are: they place and start agents, tell when one ends, and stop them. Calls are never theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

from zbus import names
from zbus.errors import ConfigError, StartupError
from zbus.registry.records import ExitRecord, JobRecord, Records, WorkerRecord
from zbus.runtime.processes import describe_exit

__all__ = ["AgentExit", "Job", "ScheduleStrategy", "Scheduler", "Scheduling", "Worker", "live_workers", "wait_workers"]

_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What one rank needs.

    Attributes:
        cpu: CPU cores; sets the thread defaults of numeric libraries where the environment does not.
        gpu: Accelerators; a fraction below 1 shares one among ranks of the role.
        mem: Bytes of memory, for schedulers that can reserve it (0: no claim).
        port_count: Extra ports, bound and held by the agent (``ctx.ports``).
        cmd: Command that starts the agent in place of the default; the options follow it.
        env_vars: Environment of the rank. Values may hold any character; the user's value wins over every default.
    """

    cpu: float = 0
    gpu: float = 0
    mem: int = 0
    port_count: int = 0
    cmd: Sequence[str] | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cpu", "gpu", "mem", "port_count"):
            value = getattr(self, name)
            if value < 0:
                msg = f"scheduling {name} is {value}, which is negative"
                raise ConfigError(msg)
        if self.gpu > 1 and self.gpu != int(self.gpu):
            msg = f"scheduling gpu is {self.gpu}: only a part of one accelerator or whole ones can be given to a rank"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class ScheduleStrategy:
    """Where a role goes in relation to another.

    Attributes:
        type: ``separation``: accelerators of its own. ``colocation``: rank by rank on those of ``target``.
        target: The other role, for ``colocation``.
        fork: Whether a colocated role runs in processes of its own. Only True is supported.
    """

    type: Literal["separation", "colocation"] = "separation"
    target: str | None = None
    fork: bool = True

    def __post_init__(self) -> None:
        if self.type not in ("separation", "colocation"):
            msg = f"schedule strategy {self.type!r} is not known"
            raise ConfigError(msg, hint="use separation or colocation")
        if (self.type == "colocation") != (self.target is not None):
            msg = f"schedule strategy {self.type} {'needs' if self.target is None else 'takes no'} target role"
            raise ConfigError(msg)
        if not self.fork:
            msg = "colocation in the processes of the target role (fork=False) is not supported"
            raise ConfigError(msg, hint="leave fork at True: the ranks share accelerators, not processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One role to run.

    Attributes:
        role: Name.
        replicas: World size.
        engine: ``module:Class``.
        tasks: What ranks need: one entry for all of them, or one for each.
        strategy: Where the role goes.
        mesh: Axis sizes by name; their product is ``replicas``. Empty for none.
        env: Environment of all ranks; ``Scheduling.env_vars`` come on top.
        preload: Modules the template imports before it forks ranks.
        restart, max_restarts, restart_window_s: Restart policy, see ``JobRecord``.
        cwd, sys_path: Working directory and first entries of the import path of ranks.
        trace: ``off``, ``rpc`` or ``full``.
        orphans: What ranks do without a controller: ``exit`` or ``wait``.
        shared_memory, refs, ref_lease_s: See ``JobRecord``.
        digest: Digest of the engine's declarations, if known.
    """

    role: str
    replicas: int
    engine: str
    tasks: Sequence[Scheduling] = (Scheduling(),)
    strategy: ScheduleStrategy = ScheduleStrategy()
    mesh: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    preload: Sequence[str] = ()
    restart: Literal["never", "one", "all"] = "never"
    max_restarts: int = 3
    restart_window_s: float = 300.0
    cwd: str | None = None
    sys_path: Sequence[str] = ()
    trace: str = "rpc"
    orphans: Literal["exit", "wait"] = "exit"
    shared_memory: int | None = None
    refs: int | None = None
    ref_lease_s: float = 60.0
    digest: str = ""

    def __post_init__(self) -> None:
        names.check(self.role, "role")
        if self.replicas < 1:
            msg = f"role {self.role} has {self.replicas} replicas; at least 1 is needed"
            raise ConfigError(msg)
        if len(self.tasks) not in (1, self.replicas):
            msg = f"role {self.role} has {self.replicas} replicas but {len(self.tasks)} scheduling entries"
            raise ConfigError(msg, hint="give one entry for all ranks, or one for each")
        first = self.tasks[0]
        for rank, task in enumerate(self.tasks):
            if (task.port_count, dict(task.env_vars), task.cmd) != (first.port_count, dict(first.env_vars), first.cmd):
                msg = f"role {self.role}: rank {rank} differs from rank 0 in ports, environment or command"
                raise ConfigError(msg, hint="make it a role of its own; within a role only gpu, cpu and mem may differ")

    def task(self, rank: int) -> Scheduling:
        """Return what one rank needs."""
        return self.tasks[rank if len(self.tasks) > 1 else 0]

    def to_record(self, epoch: int) -> JobRecord:
        """Return the registry record that tells agents what to run."""
        first = self.tasks[0]
        env = {**self.env, **first.env_vars}
        if first.cpu >= 1:
            env.setdefault("OMP_NUM_THREADS", str(int(first.cpu)))
        return JobRecord(
            role=self.role,
            epoch=epoch,
            engine=self.engine,
            world_size=self.replicas,
            mesh=dict(self.mesh),
            env=env,
            preload=list(self.preload),
            port_count=first.port_count,
            restart=self.restart,
            max_restarts=self.max_restarts,
            restart_window_s=self.restart_window_s,
            cwd=self.cwd,
            sys_path=list(self.sys_path),
            trace=self.trace,
            orphans=self.orphans,
            shared_memory=self.shared_memory,
            refs=self.refs,
            ref_lease_s=self.ref_lease_s,
            digest=self.digest,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """One running rank, as a scheduler shows it.

    Attributes:
        id: ``role/rank``.
        ip: Address of its host for tcp; ``127.0.0.1`` where it is reached by ipc.
        serve_port: Port of its main socket; 0 where it is reached by ipc.
        extra_ports: Ports held for its engine.
    """

    id: str
    ip: str
    serve_port: int
    extra_ports: tuple[int, ...] = ()

    @classmethod
    def from_record(cls, record: WorkerRecord) -> Worker:
        """Make it from a registry record."""
        for endpoint in record.main:
            if endpoint.startswith("tcp://"):
                parts = urlsplit(endpoint)
                return cls(f"{record.role}/{record.rank}", parts.hostname or "", parts.port or 0, tuple(record.ports))
        return cls(f"{record.role}/{record.rank}", "127.0.0.1", 0, tuple(record.ports))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExit:
    """An agent that ended.

    Attributes:
        role: Its role.
        host, pid: Where.
        exit_code, signal: One of both.
        asked: It had been told to stop.
        log, log_tail: Its log, and the last lines, oldest first.
    """

    role: str
    host: str
    pid: int
    exit_code: int | None
    signal: int | None
    asked: bool
    log: str = ""
    log_tail: tuple[str, ...] = ()

    def cause(self) -> str:
        """Say how it ended."""
        return describe_exit(self.exit_code, self.signal)


class Scheduler(Protocol):
    """Places and starts agents. Methods may be called from any thread, one at a time."""

    def start(self, job: Job) -> None:
        """Start the agents of a role; does not wait for ranks. The job's record must stand in the registry soon.

        Raises:
            ConfigError: The job cannot be placed: a role twice, not enough accelerators, no such target.
            StartupError: The agent's process could not be made.
        """
        ...

    def poll(self) -> list[AgentExit]:
        """Return agents that ended since the last poll. Never waits."""
        ...

    def workers(self, role: str, timeout_s: float) -> list[Worker]:
        """Wait until all ranks of a role have published themselves, and return them in rank order.

        Raises:
            StartupError: A rank or its agent ended, or the time is over; each missing rank is named with its last
                state and log tail.
        """
        ...

    def missing(self) -> list[str]:
        """Say, one line each, what started roles still lack; empty when all ranks are there."""
        ...

    def stop(self, role: str | None = None, *, grace_s: float) -> list[AgentExit]:
        """End the agents of a role, or all, in order, then harder; return how they ended. Bounded.

        Nothing is signalled but processes this scheduler started.
        """
        ...

    def close(self) -> None:
        """Stop everything that still runs and let go of all resources. May be repeated."""
        ...


def live_workers(records: Records, role: str, epoch: int | None = None) -> dict[int, WorkerRecord]:
    """Return the newest incarnation of each rank of a role that has no exit record.

    Args:
        records: The registry.
        role: The role.
        epoch: Only ranks whose agent obeys this epoch, if given.
    """
    ended = {record.incarnation for record in records.exits()}
    agents = {record.agent for record in records.agents(role) if epoch is None or record.epoch == epoch}
    found: dict[int, WorkerRecord] = {}
    for record in records.workers(role):
        if record.incarnation not in ended and record.agent in agents:
            found[record.rank] = record
    return found


def _newest_exits(records: Records, role: str) -> dict[int, ExitRecord]:
    found: dict[int, ExitRecord] = {}
    for record in records.exits():
        if record.role == role and record.start >= (found[record.rank].start if record.rank in found else 0):
            found[record.rank] = record
    return found


def missing_lines(records: Records, role: str, world_size: int, absent: str) -> list[str]:
    """Say what each rank that is not there lacks; ``absent`` is said of ranks nobody has started."""
    live = live_workers(records, role)
    exits = _newest_exits(records, role)
    claimed = {claim.rank: claim for claim in records.rank_claims(role)}
    lines = []
    for rank in range(world_size):
        if rank in live:
            continue
        name = f"{role}/{rank}"
        claim, ended = claimed.get(rank), exits.get(rank)
        if ended is not None and (claim is None or claim.start <= ended.start):
            lines.append(f"{name}: {ended.reason or describe_exit(ended.exit_code, ended.signal)}; log {ended.log}")
        elif claim is not None and records.agent(claim.agent) is not None:
            lines.append(f"{name}: started on {claim.host}, has not published itself yet")
        else:
            lines.append(f"{name}: {absent}")
    return lines


def wait_workers(
    records: Records,
    role: str,
    world_size: int,
    timeout_s: float,
    *,
    absent: str,
    failed: Callable[[], StartupError | None] = lambda: None,
) -> list[Worker]:
    """Wait for all ranks of a role; the engine of every scheduler's ``workers``.

    Args:
        records: The registry.
        role: The role.
        world_size: How many ranks.
        timeout_s: Seconds to wait.
        absent: Said of ranks that nobody has started.
        failed: Tells at once that waiting is in vain, or None.

    Raises:
        StartupError: See ``Scheduler.workers``.
    """
    deadline = time.monotonic() + timeout_s
    while len(live := live_workers(records, role)) < world_size:
        if (error := failed()) is not None:
            raise error
        if time.monotonic() >= deadline:
            lines = missing_lines(records, role, world_size, absent)
            msg = f"{len(lines)} of {world_size} ranks of {role} are not there after {timeout_s:g} s"
            facts = dict(line.split(": ", 1) for line in lines)
            raise StartupError(msg, facts=facts, hint="look at the logs named above, or raise the startup timeout")
        time.sleep(_POLL_S)
    return [Worker.from_record(live[rank]) for rank in sorted(live)]
