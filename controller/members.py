"""Who is in each role now: connects every incarnation the directory sees, creates its engine, ends what died.

One thread (``zbus-members``) takes events from the directory and state changes from the client, in order, and is the
only one that changes a member. Readers take whole lists.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from controller.late import Late, Patience
from controller.placer import WorkerFacts
from controller.restarting import ask_restart
from controller.scheduling.api import AgentExit
from controller.stacks import Stacks
from zbus import __version__
from zbus.codec import decode, encode
from zbus.codec.exceptions import rebuild_exception
from zbus.discovery.state import Event, LeaseExpired, LeaseRenewed, WorkerExited, WorkerReplaced, WorkerSeen
from zbus.engine import EndpointSpec, Mesh, table_from_wire
from zbus.errors import EngineLoadError, RegistryError, StartupError, WorkerLost, ZbusError
from zbus.ids import WorkerName
from zbus.protocol.journal import JournalReport
from zbus.protocol.messages import PROTOCOL_VERSION, Outcome, OutcomeKind
from zbus.registry.identity import pid_space
from zbus.registry.records import ExitRecord, JobRecord, Records, WorkerRecord
from zbus.runtime.processes import describe_exit, is_alive
from zbus.runtime.watchdog import Handler, Watchdog
from zbus.transport.carrier import Reach
from zbus.transport.client import Client, Peer, PeerState

__all__ = ["Member", "Members", "RoleMembers"]

log = logging.getLogger("zbus.members")

_LOOK_S: Final = 0.01
_EXIT_PATIENCE_S: Final = 1.0
_LAST_WORD_S: Final = 0.1
"""How long an exit record may take to be seen after the agent that wrote it has ended."""

_IDLE_S: Final = 0.5
_MOST_JOBS: Final = 64
"""Events handled before readers see what came of them: a burst of a thousand ranks must not wake them for each."""

_FENCED: Final = 11


class Phase:
    """How far a rank has come; shown in start-up errors."""

    WAITING = "no process has registered"
    CONNECTING = "registered, not connected"
    CREATING = "creating its engine"
    READY = "ready"
    FAILED = "failed"
    DEAD = "dead"


class _Absent:
    """Stands in a roster for a rank that cannot be called now."""

    reason = "not_ready"
    lanes: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: WorkerName, state: PeerState, evidence: str, welcome: Mapping[str, Any]) -> None:
        self.name = name
        self.incarnation = 0
        self.state = state
        self.evidence = evidence
        self.welcome = dict(welcome)
        self.reach = Reach.told(welcome)


@dataclass
class Member:
    """One rank of one role. Changed by the members thread only.

    Attributes:
        moved: Where it puts itself down when its phase changes, for its roster to look at it.
    """

    name: WorkerName
    moved: list[Member] = field(default_factory=list, repr=False, compare=False)
    record: WorkerRecord | None = None
    peer: Peer | None = None
    phase: str = Phase.WAITING
    since: float = field(default_factory=time.monotonic)
    error: Exception | None = None
    suspect_since: float | None = None
    lost_from: str = ""
    exited: ExitRecord | None = None
    digest: str = ""

    def to(self, phase: str) -> None:
        """Enter a phase. What the roster shows of a member (peer, error) changes only together with its phase."""
        self.phase = phase
        self.since = time.monotonic()
        self.moved.append(self)


class RoleMembers:
    """The roster of one role; see ``controller.placer.Roster``. Any thread may read it."""

    def __init__(
        self, job: JobRecord, arguments: tuple[Sequence[Any], Mapping[str, Any]], exits: Callable[[int], Any]
    ) -> None:
        self.job = job
        self.role = job.role
        self.mesh = Mesh.of(job.mesh or None, job.world_size)
        self._moved: list[Member] = []
        self.members = [Member(WorkerName(job.role, rank), self._moved) for rank in range(job.world_size)]
        self.arguments = arguments
        self.table: dict[str, EndpointSpec] = {}
        self.restarted: set[int] = set()  # starts whose failure has had the other agents restart theirs
        self._exit_of = exits
        self.agent_end: str = ""
        self.late: Late | None = None
        self._digests: Counter[str] = Counter()
        self._unready = set(range(job.world_size))
        self._failed: set[int] = set()
        self._peers: list[Any] = [self._current(member) for member in self.members]

    def peers(self) -> Sequence[Any]:
        """Return the current incarnation of each rank, in rank order."""
        return self._peers

    def endpoints(self) -> Mapping[str, EndpointSpec]:
        """Return the endpoint table of the role's engine."""
        return self.table

    def facts(self, peer: Any) -> WorkerFacts:
        """Return what is known of one incarnation; may read a record."""
        welcome = getattr(peer, "welcome", {})
        ended: ExitRecord | None = self._exit_of(peer.incarnation) if peer.incarnation else None
        if ended is None:
            return WorkerFacts(host=welcome.get("host"), pid=welcome.get("pid"))
        hint = None
        if ended.oom:
            hint = f"raise roles.{ended.role}.mem or lower its batch"
        elif self.job.restart == "never":
            hint = f"restart it by policy with roles.{ended.role}.restart=one"
        elif self.agent_end:
            limit = f"roles.{ended.role}.max_restarts={self.job.max_restarts}"
            hint = f"its agent has given up ({limit}); its logs and crash files tell each start's end"
        return WorkerFacts(
            host=ended.host or welcome.get("host"),
            pid=ended.pid or welcome.get("pid"),
            exit_code=ended.exit_code,
            signal=ended.signal,
            log_tail=ended.log_tail,
            crash_file=ended.crash_file or None,
            facts=_exit_facts(ended),
            hint=hint,
        )

    def record_of(self, peer: Any) -> WorkerRecord | None:
        """Return the registry record of one incarnation while it is in the role."""
        record = self.members[peer.name.rank].record
        return record if record is not None and record.incarnation == peer.incarnation else None

    def will_return(self, peer: Any) -> bool:
        """Tell whether a rank that is gone will be started again by policy."""
        member = self.members[peer.name.rank]
        if getattr(peer, "reason", "") == "superseded":
            return False  # it lives, and obeys another controller
        return self.job.restart != "never" and member.error is None and not self.agent_end

    @property
    def ready(self) -> int:
        """Number of ranks that can be called."""
        return len(self.members) - len(self._unready)

    @property
    def failed(self) -> list[Member]:
        """Members with an error, in rank order."""
        return [self.members[rank] for rank in sorted(self._failed)]

    def refresh(self) -> None:
        """Bring the list that readers take up to date with the members that have moved; on the members thread."""
        if not self._moved:
            return
        moved = self._moved.copy()
        self._moved.clear()
        peers = self._peers.copy()  # whoever holds the old one keeps a whole list
        for member in moved:
            rank = member.name.rank
            peers[rank] = self._current(member)
            (self._unready.discard if member.phase == Phase.READY else self._unready.add)(rank)
            (self._failed.discard if member.error is None else self._failed.add)(rank)
        self._peers = peers

    def differing(self, member: Member, digest: str) -> Member | None:
        """Note the digest of a member's engine; return another member whose engine is not the same, or None."""
        if member.digest:
            self._digests[member.digest] -= 1
        member.digest = digest
        self._digests[digest] += 1
        if self._digests[digest] == sum(self._digests.values()):
            return None
        return next(other for other in self.members if other.digest and other.digest != digest)

    def _current(self, member: Member) -> Any:
        if member.peer is not None and member.phase in (Phase.READY, Phase.DEAD):
            return member.peer
        state = PeerState.DEAD if member.phase in (Phase.DEAD, Phase.FAILED) else PeerState.CONNECTING
        welcome = {} if member.peer is None else member.peer.welcome
        return _Absent(member.name, state, str(member.error or member.phase), welcome)


class Members:
    """All roles of a trial. ``on_event`` and ``on_state`` may be called from any thread and return at once.

    Args:
        client: Carries calls.
        records: The registry.
        jobs: Job record and engine arguments by role.
        create_timeout_s: Limit of one engine creation.
        read_journal: Reads the crash journal of a worker, for want of an agent's word; None unless it ran on this host
            and is gone.
        stacks: Takes the stacks of ranks that are late; None: nobody does.
        patience: When a rank is stuck.
        leftovers: Incarnations of an earlier run whose end nobody wrote down; like those with an exit record, they are
            of no interest now.
    """

    def __init__(
        self,
        client: Client,
        records: Records,
        jobs: Mapping[str, tuple[JobRecord, Sequence[Any], Mapping[str, Any]]],
        *,
        create_timeout_s: float,
        read_journal: Callable[[WorkerRecord], JournalReport | None] = lambda _: None,
        stacks: Stacks | None = None,
        patience: Patience | None = None,
        leftovers: Iterable[int] = (),
    ) -> None:
        self._client = client
        self._records = records
        self._create_timeout_s = create_timeout_s
        self._read_journal = read_journal
        self._exits: dict[int, ExitRecord] = {}
        self._earlier = frozenset([*(ended.incarnation for ended in records.exits()), *leftovers])
        self.roles = {
            name: RoleMembers(job, (args, kwargs), self._exits.get) for name, (job, args, kwargs) in jobs.items()
        }
        self._late = None if stacks is None else Late(stacks, patience or Patience(), self._record_of, self._unwatched)
        for role in self.roles.values():
            role.late = self._late
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._by_peer: dict[Peer, Member] = {}
        self._silent: dict[str, tuple[float, float]] = {}  # agents whose lease ran out: how long silent, as of when
        self._changed = threading.Condition()
        self._closing = False
        self._ending = False
        self.strangers: list[str] = []
        self._watchdog = Watchdog(look_s=2 * _IDLE_S)
        self._watchdog.watch(self._bus_handler)
        client.on_state = self.on_state
        self._thread = threading.Thread(target=self._run, name="zbus-members", daemon=True)
        self._thread.start()

    # -- from outside --------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Take an event of the directory."""
        if isinstance(event, WorkerSeen):
            self._inbox.put(lambda: self._seen(event.record))
        elif isinstance(event, WorkerReplaced):
            self._inbox.put(lambda: self._replaced(event.old, event.new))
        elif isinstance(event, WorkerExited):
            self._inbox.put(lambda: self._exited(event.record))
        elif isinstance(event, LeaseExpired):
            self._inbox.put(lambda: self._lease_expired(event.holder, event.silence_s))
        elif isinstance(event, LeaseRenewed):
            self._inbox.put(lambda: self._lease_renewed(event.holder))

    def on_agent_exit(self, ended: AgentExit) -> None:
        """Take the end of a role's agent, which its ranks do not outlive."""
        self._inbox.put(lambda: self._agent_ended(ended))

    def on_state(self, peer: Peer, state: PeerState) -> None:
        """Take a state change of the client. Under its lock."""
        self._inbox.put(lambda: self._state(peer, state))

    def peer_of(self, record: WorkerRecord) -> Peer | None:
        """Return the connection to one start of a rank while it is the current one and answers. Any thread."""
        role = self.roles.get(record.role)
        member = None if role is None or record.rank >= len(role.members) else role.members[record.rank]
        peer = None if member is None or member.record is None else member.peer
        there = peer is not None and peer.incarnation == record.incarnation and peer.state is PeerState.READY
        return peer if there else None

    def phase_of(self, name: str) -> str:
        """Return the phase of ``role/rank``."""
        role, _, rank = name.rpartition("/")
        return self.roles[role].members[int(rank)].phase

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``done()``, asked after each change; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(done, timeout_s)

    def all_ready(self) -> bool:
        """Tell whether every rank of every role is ready. Any thread."""
        return all(role.ready == len(role.members) for role in self.roles.values())

    def missing(self) -> list[tuple[Member, str]]:
        """Return the ranks that are not ready, each with what is known of it."""
        return [
            (member, _standing(member))
            for role in self.roles.values()
            for member in role.members
            if member.phase != Phase.READY
        ]

    def first_error(self) -> Exception | None:
        """Return the earliest start-up failure, or None."""
        failed = [member for role in self.roles.values() for member in role.failed]
        return min(failed, key=lambda m: m.since).error if failed else None

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join(5.0)
        if self._late is not None:
            self._late.close()

    # -- the members thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            suspects = [m for m in self._by_peer.values() if m.suspect_since is not None and m.phase != Phase.DEAD]
            try:
                job = self._inbox.get(timeout=_LOOK_S if suspects else _IDLE_S)
            except queue.Empty:
                job = None
            jobs = 0
            try:
                while job is not None:
                    jobs += 1
                    job()
                    job = self._next() if jobs < _MOST_JOBS else None
                for member in suspects:
                    self._look_into(member)
                if self._late is not None:
                    self._late.look()
                self._watchdog.look()
            except Exception:
                log.exception("a membership event could not be handled")
            if jobs or suspects:
                for role in self.roles.values():
                    role.refresh()
                with self._changed:
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _bus_handler(self) -> list[Handler]:
        busy = self._client.reactor.round_since()
        return [] if busy is None else [Handler("a handler of the controller's sockets", *busy)]

    def _member(self, role: str, rank: int) -> Member | None:
        members = self.roles.get(role)
        if members is None or not 0 <= rank < len(members.members):
            self.strangers.append(f"{role}/{rank}")
            return None
        return members.members[rank]

    def _record_of(self, peer: Any) -> WorkerRecord | None:
        role = self.roles.get(peer.name.role)
        return None if role is None else role.record_of(peer)

    def _seen(self, record: WorkerRecord) -> None:
        member = self._member(record.role, record.rank)
        if member is None or record.incarnation in self._exits or record.incarnation in self._earlier:
            return
        if member.record is not None and record.incarnation <= member.record.incarnation:
            return
        if member.record is not None and member.record.agent != record.agent:
            self._restart_others(self.roles[record.role], record.agent, member.record.start)
        if member.peer is not None and member.peer.state is not PeerState.DEAD:
            self._replace(member, record)
        if member.peer is not None:
            self._by_peer.pop(member.peer, None)
            self._client.disconnect(member.peer)
        member.record, member.exited, member.error, member.suspect_since = record, None, None, None
        member.lost_from = ""
        if record.protocol != PROTOCOL_VERSION:
            member.peer, member.error = None, _version_error(member.name, record)
            member.to(Phase.FAILED)
            return
        member.to(Phase.CONNECTING)
        member.peer = self._client.connect(member.name, record.incarnation, {"main": record.main, "ctl": record.ctl})
        self._by_peer[member.peer] = member
        if member.peer.state is PeerState.READY:
            self._create(member, member.peer)

    def _replaced(self, old: WorkerRecord, new: WorkerRecord) -> None:
        member = self._member(old.role, old.rank)
        if member is not None and member.record is not None and member.record.incarnation == old.incarnation:
            self._replace(member, new)
        self._seen(new)

    def _state(self, peer: Peer, state: PeerState) -> None:
        member = self._by_peer.get(peer)
        if member is None or member.peer is not peer:
            return
        if state is PeerState.READY:
            member.suspect_since = None
            if member.lost_from:
                self._returned(member, peer)
            elif member.phase == Phase.CONNECTING:
                self._create(member, peer)
        elif state is PeerState.SUSPECT:
            if member.suspect_since is None:
                member.suspect_since = time.monotonic()
            self._look_into(member)
        elif state is PeerState.DEAD and member.phase != Phase.DEAD:
            self._settle_dead(member, peer.reason, peer.evidence)

    def _create(self, member: Member, peer: Peer) -> None:
        role = self.roles[member.name.role]
        member.to(Phase.CREATING)
        args, kwargs = role.arguments
        frames = encode([["zbus.create_engine", (), {"args": tuple(args), "kwargs": dict(kwargs)}]])

        def created(_member: int, _call: int, outcome: Outcome) -> None:
            self._inbox.put(lambda: self._created(member, peer, outcome))

        self._client.place([peer], "main", [frames], 1, deadline_s=self._create_timeout_s, sink=created)

    def _created(self, member: Member, peer: Peer, outcome: Outcome) -> None:
        if member.peer is not peer or member.phase == Phase.DEAD:
            return
        if outcome.kind is OutcomeKind.OK:
            self._installed(member, decode(outcome.payload or ()))
            return
        if outcome.is_error:
            member.error = rebuild_exception(
                decode(outcome.payload or ()),
                role=member.name.role,
                rank=member.name.rank,
                host=peer.welcome.get("host"),
                pid=peer.welcome.get("pid"),
                method="setup",
                attempts=outcome.attempts,
            )
            if isinstance(member.error, TypeError) and "__init__() " in str(member.error):
                member.error.hint = f"compare roles.{member.name.role}.args and .kwargs with the class's __init__"
            member.to(Phase.FAILED)
        elif outcome.reason == "deadline":
            member.error = StartupError(
                f"{member.name} did not finish its setup within {self._create_timeout_s:g} s",
                hint="raise rpc.create_timeout, or look at its log for what it waits for",
                facts={"where": _where(member)},
            )
            member.to(Phase.FAILED)

    def _installed(self, member: Member, facts: Mapping[str, Any]) -> None:
        if "load_error" in facts:
            told = facts["load_error"]
            member.error = EngineLoadError(
                f"{member.name}: {told['message']}", hint=told["hint"], facts={"where": _where(member), **told["facts"]}
            )
            member.to(Phase.FAILED)
            return
        role = self.roles[member.name.role]
        table = table_from_wire(facts["endpoints"])
        other = role.differing(member, str(facts["digest"]))
        if other is not None:
            member.error = StartupError(
                f"{member.name} and {other.name} run different code of engine {role.job.engine}",
                hint="install the same version on every host",
                facts={str(member.name): member.digest, str(other.name): other.digest},
            )
            member.to(Phase.FAILED)
            return
        role.table.update(table)
        member.to(Phase.READY)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _exited(self, record: ExitRecord) -> None:
        if record.incarnation in self._earlier:
            return
        self._exits[record.incarnation] = record
        member = self._member(record.role, record.rank)
        if member is None:
            return
        if member.record is not None and record.incarnation < member.record.incarnation:
            return  # the end of an earlier start
        member.exited = record
        if not record.stopped and record.exit_code not in (0, _FENCED):
            self._restart_others(self.roles[record.role], record.agent, record.start)
        if member.peer is not None and member.peer.incarnation == record.incarnation:
            self._end(member, "worker_exit", _how(record), record.journal)
        else:
            self._settle_dead(member, "worker_exit", _how(record))

    def _agent_ended(self, ended: AgentExit) -> None:
        role = self.roles.get(ended.role)
        if role is None or ended.asked:
            return
        role.agent_end = f"its agent (pid {ended.pid}) {_was(ended.cause())}"
        log.warning("the agent of %s (pid %d) %s; log %s", ended.role, ended.pid, ended.cause(), ended.log)
        for member in role.members:
            if member.suspect_since is None and member.phase not in (Phase.WAITING, Phase.DEAD):
                member.suspect_since = time.monotonic()

    def _restart_others(self, role: RoleMembers, agent: str, start: int) -> None:
        """Under ``restart="all"`` have the other agents of a role restart too: a collective is one whole.

        Each agent does so for its own ranks; of those of other hosts it knows nothing.
        """
        if role.job.restart != "all" or start in role.restarted or self._ending:
            return
        role.restarted.add(start)

        def ask() -> None:
            try:
                agreed = ask_restart(self._client, self._records, role.job, but=agent)
            except ZbusError as error:
                log.warning("the other ranks of %s could not be restarted: %s", role.role, error)
            else:
                for other in agreed:
                    log.info("agent %s restarts its ranks of %s: a rank elsewhere failed", other, role.role)

        threading.Thread(target=ask, name="zbus-restart", daemon=True).start()

    def gave_up(self, role: str) -> Exception | None:
        """Return the error of a rank that died again and again while starting, once its agent has given up."""
        deaths = [end for end in self._exits.copy().values() if end.role == role and not end.stopped]
        if not deaths:
            return None
        last = max(deaths, key=lambda end: end.ended_wall_ns)
        member = self.roles[role].members[last.rank]
        times = sum(end.rank == last.rank for end in deaths)
        return self._start_failure(member, "worker_exit", _how(last), last, times)

    def _unwatched(self, age_s: float) -> list[Any]:
        """Return the calls that nobody has waited for so far, out for longer than ``age_s`` seconds."""
        return list(self._client.soon.older_than(int(age_s * 1e9)))

    def _look_into(self, member: Member) -> None:
        """Find out what became of a worker whose connection was lost."""
        peer, record, since = member.peer, member.record, member.suspect_since
        if peer is None or record is None or since is None:
            return
        try:
            ended = self._records.exit(record.role, record.rank, record.incarnation)
        except RegistryError:
            ended = None  # R8: a sick registry is no proof of death
        if ended is not None:
            self._exited(ended)
            return
        agent_end = self.roles[member.name.role].agent_end
        patience = _LAST_WORD_S if agent_end else _EXIT_PATIENCE_S
        silent = self._silent.get(record.agent)
        if silent is not None and peer.state is PeerState.SUSPECT:  # it ran out while the connection still lived
            self._lost(member, record, silent[0] + time.monotonic() - silent[1])
            return
        if (
            record.pid_space == pid_space()
            and time.monotonic() - since > patience
            and not is_alive(record.pid, record.pid_start)
        ):
            words = agent_end or "its agent has not said how it ended"
            self._end(member, "worker_exit", f"its process is gone; {words}", self._read_journal(record))

    def _lease_expired(self, holder: str, silence_s: float) -> None:
        self._silent[holder] = (silence_s, time.monotonic())
        for role in self.roles.values():
            for member in role.members:
                record, peer = member.record, member.peer
                if record is None or peer is None or record.agent != holder:
                    continue
                if peer.state not in (PeerState.READY, PeerState.DEAD):
                    # Where the transport is alive, a disk that cannot be written is no death (R8).
                    self._lost(member, record, silence_s)

    def _lease_renewed(self, holder: str) -> None:
        self._silent.pop(holder, None)

    def _lost(self, member: Member, record: WorkerRecord, silence_s: float) -> None:
        """Take a rank for dead for its agent's silence alone; it may come back before another takes its place (P9)."""
        words = f"its agent on {record.host} was silent for {silence_s:.1f} s"
        journal = self._read_journal(record)
        if journal is not None or member.peer is None:  # it ran here, and it is gone
            self._end(member, "lease", words, journal)
            return
        phase = member.phase
        if self._client.lose(member.peer, reason="lease", evidence=words):
            self._settle_dead(member, "lease", words)
            member.lost_from = phase

    def _returned(self, member: Member, peer: Peer) -> None:
        """Go on with a rank that was taken for dead and has answered."""
        phase, member.lost_from, member.error = member.lost_from, "", None
        log.warning("%s is back, and nothing has taken its place; %s", member.name, _where(member))
        if phase == Phase.READY:
            member.to(Phase.READY)
        else:  # what it was told then may not have arrived; to create what exists is safe
            self._create(member, peer)

    def _replace(self, member: Member, new: WorkerRecord) -> None:
        """End an incarnation whose end nobody has told yet, because its successor is here."""
        words = f"start {new.start} of {member.name} has replaced it"
        self._end(member, "fenced", words, None if member.record is None else self._read_journal(member.record))

    def _end(self, member: Member, reason: str, evidence: str, journal: JournalReport | None = None) -> None:
        peer = member.peer
        if peer is not None:
            self._client.declare_dead(peer, reason=reason, evidence=evidence, journal=journal)
        self._settle_dead(member, reason, evidence)

    def _settle_dead(self, member: Member, reason: str, evidence: str) -> None:
        if member.phase == Phase.DEAD:
            return
        self._tell(member, reason, evidence)
        if member.peer is not None:
            self._client.forget_memory(member.peer)
        starting = member.phase != Phase.READY
        member.suspect_since = None
        if starting and member.error is None and self.roles[member.name.role].job.restart == "never":
            member.error = self._start_failure(member, reason, evidence)
        member.to(Phase.DEAD)

    def _tell(self, member: Member, reason: str, evidence: str) -> None:
        """Log an end that nobody asked for; as a warning if no call will tell of it."""
        if self._ending or (member.exited is not None and member.exited.stopped):
            return
        if reason == "superseded":
            log.warning("%s is no longer this controller's: %s", member.name, evidence)
            return
        starting = member.phase != Phase.READY
        told_by_call = starting or (member.peer is not None and member.peer.had_calls)
        place = f"; {_where(member)}" if member.record is not None else ""
        log.log(
            logging.INFO if told_by_call else logging.WARNING,
            "%s died %s: %s (%s)%s",
            member.name,
            f"while {_doing(member.phase)}" if starting else "in a call" if told_by_call else "outside any call",
            evidence,
            reason,
            place,
        )

    def ending(self) -> None:
        """From now on workers are asked to end: their ends are no news. Any thread."""
        self._ending = True

    def _start_failure(
        self, member: Member, reason: str, evidence: str, ended: ExitRecord | None = None, times: int = 1
    ) -> Exception:
        ended = ended or member.exited
        doing = _doing(member.phase) if times == 1 else f"starting, {times} times"
        return WorkerLost(
            f"{member.name} died while {doing}",
            role=member.name.role,
            rank=member.name.rank,
            host=None if ended is None else ended.host,
            pid=None if ended is None else ended.pid,
            method="setup",
            reason=reason,
            exit_code_of_worker=None if ended is None else ended.exit_code,
            signal_of_worker=None if ended is None else ended.signal,
            log_tail=() if ended is None else ended.log_tail,
            crash_file=None if ended is None else ended.crash_file or None,
            facts={
                "exit" if reason == "worker_exit" else "evidence": evidence,
                **_exit_facts(ended),
                **_restart_facts(self.roles[member.name.role].job, times),
            },
        )


def _version_error(name: WorkerName, record: WorkerRecord) -> StartupError:
    return StartupError(
        f"{name} speaks version {record.protocol} of the protocol, this controller version {PROTOCOL_VERSION}",
        hint="install the same version of zbus on every host",
        facts={"its zbus": f"{record.version} on host {record.host}", "this zbus": __version__},
    )


def _exit_facts(ended: ExitRecord | None) -> dict[str, str]:
    if ended is None:
        return {}
    facts = {"exit": _how(ended), "start": str(ended.start), "log": ended.log}
    return {**facts, "stacks": ended.stacks} if ended.stacks else facts


def _restart_facts(job: JobRecord, times: int) -> dict[str, str]:
    if times == 1:
        return {}
    window = f"{job.max_restarts} within {job.restart_window_s:g} s"
    return {"restarts": f"restarted {times - 1} times; the policy allows {window}"}


def _was(how: str) -> str:
    return f"was {how}" if how.startswith("killed") else how


def _how(record: ExitRecord) -> str:
    return record.reason or describe_exit(record.exit_code, record.signal)


def _doing(phase: str) -> str:
    return {
        Phase.WAITING: "starting",
        Phase.CONNECTING: "connecting",
        Phase.CREATING: "creating its engine",
    }.get(phase, "starting")


def _where(member: Member) -> str:
    record = member.record
    if record is None:
        return "not started"
    return f"host {record.host}, pid {record.pid}, start {record.start}, log {record.log}"


def _standing(member: Member) -> str:
    """Say how far a rank has come and for how long, with its place and what its link says."""
    words = f"{member.phase} for {time.monotonic() - member.since:.1f} s"
    if member.peer is not None and member.phase == Phase.CONNECTING:
        words += f" ({member.peer.evidence})"
    return f"{words}; {_where(member)}" if member.record is not None else words
