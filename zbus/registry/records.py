"""The typed records of a trial, and ``Records``: a typed view over any registry.

Records travel as JSON. A reader ignores fields it does not know, so versions may add fields; it refuses values of the
wrong type, so what it returns is what was written, type for type.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from zbus import names
from zbus.errors import ConfigError, RegistryError
from zbus.protocol.journal import JournalReport
from zbus.registry.base import MAX_VALUE_BYTES, ROOT_ID_KEY, JunkRecord, Registry

__all__ = [
    "AgentRecord",
    "EpochRecord",
    "ExitRecord",
    "JobRecord",
    "Lease",
    "RankClaim",
    "Records",
    "WorkerRecord",
]

_EPOCH_ATTEMPTS: Final = 10_000
_KEPT_LOG_LINES: Final = 5


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One controller's claim to the trial, with what others need to find it.

    Attributes:
        epoch: Fencing number, from 1; ``claim_epoch`` sets it.
        session: Session id, hex.
        host, pid_space, pid, pid_start: The controller process; the start is in clock ticks since boot. Pid and start
            mean something only to processes whose ``zbus.registry.identity.pid_space`` is the same.
        hub_pub: Endpoints publishers connect to (the hub's XSUB).
        hub_sub: Endpoints subscribers connect to (the hub's XPUB).
        public_key: The controller's public key (Z85).
        run_epoch_wall_ns: Wall time of the run's time zero, for display only.
        run_epoch_mono_ns: The same instant on the reference clock (CLOCK_MONOTONIC of ``clock_boot_id``).
        clock_boot_id, clock_time_ns: Boot and time namespace whose monotonic clock is the run's reference clock.
        version: zbus version of the controller.
        runtime_dir: Directory of the ipc sockets.
    """

    epoch: int = 0
    session: str
    host: str = ""
    pid_space: str = ""
    pid: int = 0
    pid_start: int = 0
    hub_pub: list[str] = msgspec.field(default_factory=list)
    hub_sub: list[str] = msgspec.field(default_factory=list)
    public_key: str = ""
    run_epoch_wall_ns: int = 0
    run_epoch_mono_ns: int = 0
    clock_boot_id: str = ""
    clock_time_ns: int = 0
    version: str = ""
    runtime_dir: str = ""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a role runs.

    Attributes:
        role: Name of the role.
        epoch: Epoch of the controller that wrote it.
        engine: Engine class as ``module:Class``.
        world_size: Number of ranks.
        mesh: Axis sizes by name, row-major.
        env: Extra environment of the ranks.
        preload: Modules the template imports before it forks ranks.
        port_count: Ports bound and held for each rank.
        restart: ``never``, ``one`` or ``all``.
        max_restarts, restart_window_s: Intensity limit: so many restarts within so many seconds.
        cwd: Working directory of the ranks, or None for the agent's.
        sys_path: Entries put in front of ``sys.path``.
        trace: ``off``, ``rpc`` or ``full``.
        orphans: What ranks do without a controller: ``exit`` or ``wait``.
        shared_memory: Most bytes of shared memory a rank lends; None for its own default, 0 for none.
        refs: Most bytes a rank keeps for Refs; None for its own default.
        ref_lease_s: How long it keeps those of a holder that is silent.
        digest: Digest of the job, to notice that two sides mean different ones.
        arguments: The engine's arguments, codec-encoded, base64: what a successor of this controller needs to create
            an engine anew. Empty where they hold arrays or are long; such ranks cannot be restarted after a takeover.
    """

    role: str
    epoch: int = 0
    engine: str
    world_size: int
    mesh: dict[str, int] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    preload: list[str] = msgspec.field(default_factory=list)
    port_count: int = 0
    restart: str = "never"
    max_restarts: int = 0
    restart_window_s: float = 300.0
    cwd: str | None = None
    sys_path: list[str] = msgspec.field(default_factory=list)
    trace: str = "rpc"
    orphans: str = "exit"
    shared_memory: int | None = None
    refs: int | None = None
    ref_lease_s: float = 60.0
    digest: str = ""
    arguments: str = ""


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One agent: the supervisor of a role's ranks on one host.

    Attributes:
        agent: Unique id of this agent process.
        role: The role it serves.
        host, pid_space, pid, pid_start: The agent process.
        ctl: Endpoints of its ``ctl`` socket.
        public_key: Its public key (Z85).
        ranks: The ranks it runs.
        epoch: Controller epoch it obeys.
    """

    agent: str
    role: str
    host: str = ""
    pid_space: str = ""
    pid: int = 0
    pid_start: int = 0
    ctl: list[str] = msgspec.field(default_factory=list)
    public_key: str = ""
    ranks: list[int] = msgspec.field(default_factory=list)
    epoch: int = 0


class RankClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Who starts ``role/rank`` for the ``start``-th time: claimed before the process exists."""

    role: str
    rank: int
    start: int
    agent: str
    host: str = ""
    pid: int = 0


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a rank, with every endpoint it has bound.

    Attributes:
        role, rank, world_size, local_rank: Its place.
        start: 0 for the first start of this rank, then 1, 2, …
        incarnation: uint64 that names this process on the wire.
        agent: Id of the agent that started it.
        host, pid_space, pid, pid_start: The process.
        main, ctl, data: Bound endpoints by socket, best first.
        public_key: Its public key (Z85); a peer without the private half is not this worker.
        engine_digest: Digest of the engine's declarations.
        protocol, version: Wire protocol and zbus version.
        ports: Extra ports held for the engine.
        log: Path of its log, relative to the trial directory.
    """

    role: str
    rank: int
    world_size: int = 1
    local_rank: int = 0
    start: int = 0
    incarnation: int
    agent: str = ""
    host: str = ""
    pid_space: str = ""
    pid: int = 0
    pid_start: int = 0
    main: list[str] = msgspec.field(default_factory=list)
    ctl: list[str] = msgspec.field(default_factory=list)
    data: list[str] = msgspec.field(default_factory=list)
    public_key: str = ""
    engine_digest: str = ""
    protocol: int = 1
    version: str = ""
    ports: list[int] = msgspec.field(default_factory=list)
    log: str = ""


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one incarnation ended; written once, by its agent.

    Attributes:
        role, rank, start, incarnation, agent, host, pid: Who ended.
        exit_code: Exit code, or None when a signal ended it.
        signal: Signal number, or None when it exited.
        oom: Killed for memory; ``oom_evidence`` says what shows it.
        reason: One plain sentence.
        started_wall_ns, ended_wall_ns: For display only.
        log: Path of the log; ``log_tail`` its last lines, oldest first.
        crash_file: Path of the crash report, or empty.
        stacks: Path of its stack dumps, or empty where none was taken.
        stopped: It had been asked to stop.
        journal: What its crash journal tells of its calls, or None where there is none.
    """

    role: str
    rank: int
    start: int = 0
    incarnation: int
    agent: str = ""
    host: str = ""
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    oom: bool = False
    oom_evidence: str = ""
    reason: str = ""
    started_wall_ns: int = 0
    ended_wall_ns: int = 0
    log: str = ""
    log_tail: list[str] = msgspec.field(default_factory=list)
    crash_file: str = ""
    stacks: str = ""
    stopped: bool = False
    journal: JournalReport | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life: the holder raises ``counter`` well within every ``ttl_s`` seconds."""

    holder: str
    counter: int
    ttl_s: float


_R = TypeVar("_R", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode


class Records:
    """Typed records over a registry. Every method may be called from any thread and may block on the store.

    Methods that return many records skip what cannot be decoded, or lies under a key that does not fit its content;
    ``junk`` names it. All raise ``RegistryError`` when the store fails and ``ConfigError`` for an invalid name.

    Args:
        registry: The store; this view does not close it unless ``close`` is called.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._junk_lock = threading.Lock()
        self._junk: dict[str, tuple[str, ...]] = {}

    @property
    def junk(self) -> tuple[str, ...]:
        """What the latest listing of each area skipped, each as ``key: reason``."""
        with self._junk_lock:
            return tuple(line for area in sorted(self._junk) for line in self._junk[area])

    def close(self) -> None:
        """Close the registry below; records stay."""
        self.registry.close()

    def root_id(self) -> str:
        """Return the random id of this store, made on first use.

        Two processes that read different ids look at different directories: the root is not shared.
        """
        return self.registry.claim(ROOT_ID_KEY, os.urandom(16).hex().encode()).decode()

    # -- epochs --------------------------------------------------------------------------------------------------

    def claim_epoch(self, record: EpochRecord) -> EpochRecord:
        """Claim the next epoch for ``record`` (its ``epoch`` is ignored) and return it with its number.

        Numbers strictly rise and are never reused; each has exactly one claimer. The session must be unique.

        Raises:
            RegistryError: The store fails, or no number could be claimed.
        """
        listing = self.registry.list(names.epochs())
        known = [*listing.entries, *(line.partition(":")[0] for line in listing.junk)]
        number = max(map(_epoch_number, known), default=0)
        for _ in range(_EPOCH_ATTEMPTS):
            number += 1
            mine = msgspec.structs.replace(record, epoch=number)
            value = _encode(mine)
            try:
                if self.registry.claim(names.epoch(number), value) == value:
                    return mine
            except JunkRecord:
                continue  # whatever lies there, that number is taken
        msg = f"cannot claim an epoch: {_EPOCH_ATTEMPTS} numbers up to {number} were taken meanwhile"
        raise RegistryError(msg)

    def epochs(self) -> list[EpochRecord]:
        """Return all epochs, lowest first."""
        records = self._list(names.epochs(), EpochRecord, lambda r: names.epoch(r.epoch))
        return sorted(records, key=lambda r: r.epoch)

    def current_epoch(self) -> EpochRecord | None:
        """Return the highest epoch, or None before the first controller."""
        records = self.epochs()
        return records[-1] if records else None

    # -- jobs ----------------------------------------------------------------------------------------------------

    def publish_job(self, record: JobRecord) -> None:
        """Write or replace a role's job."""
        self.registry.put(names.job(record.role), _encode(record))

    def job(self, role: str) -> JobRecord | None:
        """Return a role's job, or None."""
        return self._get(names.job(role), JobRecord)

    def jobs(self) -> list[JobRecord]:
        """Return all jobs, by role."""
        return self._list(names.jobs(), JobRecord, lambda r: names.job(r.role))

    # -- agents, leases and rank claims --------------------------------------------------------------------------

    def publish_agent(self, record: AgentRecord) -> None:
        """Write or replace an agent's record. Not synced to the disk, as that of a worker is not."""
        self.registry.put(names.agent(record.agent), _encode(record), durable=False)

    def agent(self, agent: str) -> AgentRecord | None:
        """Return an agent's record, or None."""
        return self._get(names.agent(agent), AgentRecord)

    def agents(self, role: str | None = None) -> list[AgentRecord]:
        """Return the agents, of one role if given, by id."""
        records = self._list(names.agents(), AgentRecord, lambda r: names.agent(r.agent))
        return [record for record in records if role is None or record.role == role]

    def withdraw_agent(self, record: AgentRecord) -> bool:
        """Remove an agent's record if it still reads exactly so; return whether it did."""
        return self.registry.delete(names.agent(record.agent), _encode(record))

    def claim_rank(self, claim: RankClaim) -> RankClaim:
        """Claim one start of a rank; return the claim that stands (the caller won if it equals its own)."""
        value = _encode(claim)
        key = names.rank_claim(claim.role, claim.rank, claim.start)
        return _decode(key, self.registry.claim(key, value), RankClaim)

    def rank_claim(self, role: str, rank: int, start: int) -> RankClaim | None:
        """Return who claimed one start of a rank, or None."""
        return self._get(names.rank_claim(role, rank, start), RankClaim)

    def rank_claims(self, role: str | None = None) -> list[RankClaim]:
        """Return all rank claims, of one role if given, by role, rank and start."""
        records = self._list(names.rank_claims(), RankClaim, lambda r: names.rank_claim(r.role, r.rank, r.start))
        records.sort(key=lambda r: (r.role, r.rank, r.start))
        return [record for record in records if role is None or record.role == role]

    def renew_lease(self, lease: Lease) -> None:
        """Write a lease. Not synced to the disk: a lease lost in a power cut is renewed, or rightly expires."""
        self.registry.put(names.lease(lease.holder), _encode(lease), durable=False)

    def lease(self, holder: str) -> Lease | None:
        """Return a holder's lease, or None."""
        return self._get(names.lease(holder), Lease)

    def leases(self) -> dict[str, Lease]:
        """Return all leases by holder: what ``LeaseObserver.observe`` takes."""
        return {r.holder: r for r in self._list(names.leases(), Lease, lambda r: names.lease(r.holder))}

    def release_lease(self, lease: Lease) -> bool:
        """Remove a lease at an orderly end if it still reads exactly so; return whether it did."""
        return self.registry.delete(names.lease(lease.holder), _encode(lease))

    # -- workers and exits ---------------------------------------------------------------------------------------

    def publish_worker(self, record: WorkerRecord) -> None:
        """Write a worker's record. Its key holds the incarnation, so no other process writes there.

        Not synced to the disk: no worker outlives the power cut in which its record could be lost, and all ranks of a
        launch would wait for one disk.
        """
        key = names.worker(record.role, record.rank, record.incarnation)
        self.registry.put(key, _encode(record), durable=False)

    def worker(self, role: str, rank: int, incarnation: int) -> WorkerRecord | None:
        """Return one incarnation's record, or None."""
        return self._get(names.worker(role, rank, incarnation), WorkerRecord)

    def vouch(self, role: str, rank: int, incarnation: int) -> bool:
        """Take one incarnation's record into this process's care; return whether it is there (yet).

        A worker writes once; should the registry's directory be made anew, whoever vouched puts the record back.
        """
        record = self.worker(role, rank, incarnation)
        if record is None:
            return False
        self.registry.claim(names.worker(role, rank, incarnation), _encode(record))  # what stands is claimed as it is
        return True

    def workers(self, role: str | None = None) -> list[WorkerRecord]:
        """Return all incarnations ever published, of one role if given, by role, rank and start.

        The last of a rank is its newest; whether it still lives is for exits and leases to say.
        """
        records = self._list(names.workers(), WorkerRecord, lambda r: names.worker(r.role, r.rank, r.incarnation))
        records.sort(key=lambda r: (r.role, r.rank, r.incarnation))
        return [record for record in records if role is None or record.role == role]

    def withdraw_worker(self, record: WorkerRecord) -> bool:
        """Remove a worker's record if it still reads exactly so; return whether it did."""
        return self.registry.delete(names.worker(record.role, record.rank, record.incarnation), _encode(record))

    def publish_exit(self, record: ExitRecord) -> ExitRecord:
        """Write how an incarnation ended; the first word stands and is returned.

        The oldest lines of a log tail that is too long for a record are left out.
        """
        key = names.exit_record(record.role, record.rank, record.incarnation)
        return _decode(key, self.registry.claim(key, _encode_exit(record)), ExitRecord)

    def exit(self, role: str, rank: int, incarnation: int) -> ExitRecord | None:
        """Return how one incarnation ended, or None while nobody has seen it end."""
        return self._get(names.exit_record(role, rank, incarnation), ExitRecord)

    def exits(self, role: str | None = None) -> list[ExitRecord]:
        """Return all exits, of one role if given, by role, rank and start."""
        records = self._list(names.exits(), ExitRecord, lambda r: names.exit_record(r.role, r.rank, r.incarnation))
        records.sort(key=lambda r: (r.role, r.rank, r.incarnation))
        return [record for record in records if role is None or record.role == role]

    # -- shared --------------------------------------------------------------------------------------------------

    def _get(self, key: str, kind: type[_R]) -> _R | None:
        value = self.registry.get(key)
        return None if value is None else _decode(key, value, kind)

    def _list(self, area: str, kind: type[_R], key_of: Callable[[_R], str]) -> list[_R]:
        listing = self.registry.list(area)
        junk = list(listing.junk)
        records = []
        for key, value in listing.entries.items():
            try:
                record = msgspec.json.decode(value, type=kind)
                if key_of(record) == key:
                    records.append(record)
                else:
                    junk.append(f"{key}: holds the record of {key_of(record)}")
            except (msgspec.DecodeError, ConfigError) as error:
                junk.append(f"{key}: {error}")
        with self._junk_lock:
            self._junk[area] = tuple(junk)
        return records


def _epoch_number(key: str) -> int:
    digits = key.rpartition(".")[2]
    return int(digits) if key.startswith("epochs/epoch.") and digits.isascii() and digits.isdigit() else 0


def _decode(key: str, value: bytes, kind: type[_R]) -> _R:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        msg = f"registry record {key} is not a valid {kind.__name__}: {error}"
        raise JunkRecord(msg) from error


def _encode_exit(record: ExitRecord) -> bytes:
    value = _encode(record)
    while len(value) > MAX_VALUE_BYTES and record.log_tail:
        keep = len(record.log_tail) // 2
        tail = record.log_tail[-keep:] if keep else []
        record = msgspec.structs.replace(record, log_tail=tail)
        value = _encode(record)
    return value
