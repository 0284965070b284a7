"""What a directory knows and what it must do next. Pure: no thread, clock, socket or file; ``now_ns`` is handed in.

Truth comes only from looks at the registry. Hints say where to look at once; a gap in them says to look everywhere.
Every duty has a time, so nothing is remembered for ever by a flag: a failed look, a missing record and an unheard probe
all come due again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zbus.discovery.hints import Hint, HintKind
from zbus.ids import WorkerName
from zbus.protocol.redial import Redial
from zbus.registry.lease import LeaseObserver, LeaseState
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Lease, WorkerRecord
from zbus.transport.pubsub import Delivery

__all__ = [
    "AgentGone",
    "AgentSeen",
    "DirectoryState",
    "Due",
    "EpochSeen",
    "Event",
    "HintPath",
    "LeaseExpired",
    "LeaseLate",
    "LeaseRenewed",
    "RegistryTrouble",
    "Settings",
    "Snapshot",
    "View",
    "WorkerExited",
    "WorkerGone",
    "WorkerHint",
    "WorkerReplaced",
    "WorkerSeen",
]

_NS: Final = 1_000_000_000
_LOOK_AGAIN_NS: Final = (20_000_000, 80_000_000, 320_000_000)
_MAX_LOOKS: Final = 10_000
_UNSEEN_LEASE_S: Final = 10.0
"""How long an agent's lease may take to be seen: it is written before its record, but names lag on some disks."""


Incarnated = tuple[str, int, int]
"""(role, rank, incarnation)."""


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker's record is there: it can be connected to. Once per incarnation."""

    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """A newer incarnation of a worker is there although nobody has seen the older one end."""

    old: WorkerRecord
    new: WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """An incarnation has ended; its agent saw it. Once per incarnation, also for one never seen alive."""

    record: ExitRecord


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker withdrew its record; its exit has not been seen."""

    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerHint:
    """A worker said something that is not in the registry: what it is doing, or goodbye. Unproved."""

    hint: Hint


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent's record is there, or has changed."""

    record: AgentRecord


@dataclass(frozen=True, slots=True)
class AgentGone:
    """An agent withdrew its record in good order."""

    record: AgentRecord


@dataclass(frozen=True, slots=True)
class LeaseLate:
    """Two renewals of a lease are overdue. No reason yet to act."""

    holder: str
    silence_s: float


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """A lease was silent for its whole time while this directory kept looking."""

    holder: str
    silence_s: float


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A lease that was late or expired moves again."""

    holder: str


@dataclass(frozen=True, slots=True)
class EpochSeen:
    """A newer epoch record is there."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class HintPath:
    """Whether this directory hears itself through the hub; while it does not, it reads the registry more often."""

    up: bool


@dataclass(frozen=True, slots=True)
class RegistryTrouble:
    """The registry cannot be read (``error``), or can again (empty)."""

    error: str


Event = (
    WorkerSeen
    | WorkerReplaced
    | WorkerExited
    | WorkerGone
    | WorkerHint
    | AgentSeen
    | AgentGone
    | LeaseLate
    | LeaseExpired
    | LeaseRenewed
    | EpochSeen
    | HintPath
    | RegistryTrouble
)


# -- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """How often to do what, in seconds.

    Attributes:
        reconcile_s: Between looks at everything, in peace.
        launch_s: The same while ranks are expected to appear.
        blind_s: The same while the hint path is down.
        probe_s: Between two probes that were heard.
        probe_again_s: Between probes until one is heard.
        probe_limit_s: Without an echo for so long, the hint path is down.
        spacing_s: Least time between two looks at everything, whatever asks for them.
        redial_s: While the hint path is down, the hub is connected to anew after so long, then less and less often.
    """

    reconcile_s: float = 2.0
    launch_s: float = 0.1
    blind_s: float = 0.5
    probe_s: float = 5.0
    probe_again_s: float = 0.1
    probe_limit_s: float = 2.0
    spacing_s: float = 0.02
    redial_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at everything."""

    workers: Iterable[WorkerRecord] = ()
    exits: Iterable[ExitRecord] = ()
    agents: Iterable[AgentRecord] = ()
    leases: Mapping[str, Lease] = field(default_factory=dict)
    epoch: EpochRecord | None = None


class Due(NamedTuple):
    """What to do now.

    Attributes:
        everything: Read all areas and call ``snapshot`` (or ``failed``).
        leases: Read the leases and call ``leases``; never together with ``everything``.
        looks: Read the records that these hints name and call ``found`` for each.
        probe: Send a probe.
        redial: Connect to the hub anew: nothing comes through the connection there is.
    """

    everything: bool
    leases: bool
    looks: tuple[Hint, ...]
    probe: bool
    redial: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What is known at one moment. Never changes; a newer one replaces it.

    Attributes:
        workers: The newest incarnation by name, unless its end has been seen.
        exits: Every end seen.
        agents: Agents by id.
        leases: State by holder.
        epoch: The highest epoch.
        hints_up: Whether hints arrive; None until proved either way, or without a hub.
        trouble: Why the registry cannot be read; empty when it can.
        complete: Whether the registry has been read whole at least once.
    """

    workers: Mapping[WorkerName, WorkerRecord] = field(default_factory=dict)
    exits: Mapping[Incarnated, ExitRecord] = field(default_factory=dict)
    agents: Mapping[str, AgentRecord] = field(default_factory=dict)
    leases: Mapping[str, LeaseState] = field(default_factory=dict)
    epoch: EpochRecord | None = None
    hints_up: bool | None = None
    trouble: str = ""
    complete: bool = False

    def ranks(self, role: str) -> dict[int, WorkerRecord]:
        """Return a role's workers by rank, in rank order."""
        return {name.rank: self.workers[name] for name in sorted(self.workers) if name.role == role}


class DirectoryState:
    """The machine. Not thread-safe: one thread owns it.

    Args:
        settings: Periods.
        has_hub: Whether there is a hint path at all.
        now_ns: The owner's monotonic clock.
        jitter: Between 0 and 1, see ``Redial``.

    Attributes:
        gaps, duplicates: Gaps and second copies seen in hints.
    """

    def __init__(self, settings: Settings, *, has_hub: bool, now_ns: int, jitter: float = 1.0) -> None:
        self._settings = settings
        self._redial = Redial(first_s=settings.redial_s, jitter=jitter)
        self._has_hub = has_hub
        self._launching = False
        self._workers: dict[WorkerName, WorkerRecord] = {}
        self._seen: set[Incarnated] = set()
        self._exits: dict[Incarnated, ExitRecord] = {}
        self._agents: dict[str, AgentRecord] = {}
        self._epoch: EpochRecord | None = None
        self._trouble = ""
        self._complete = False
        self._observer = LeaseObserver()
        self._lease_states: dict[str, LeaseState] = {}
        self._lease_period_ns: int | None = None
        self._hints_up: bool | None = None
        self._heard_ns = now_ns
        self._next_probe_ns = now_ns
        self._last_full_ns: int | None = None
        self._next_full_ns = now_ns
        self._next_leases_ns = now_ns
        self._looks: dict[Hint, tuple[int, int]] = {}  # by hint: when to look, looks so far
        self._absent: set[Incarnated] = set()
        self._absent_agents: set[str] = set()
        self._cost_ns = 0
        self.gaps = 0
        self.duplicates = 0

    @property
    def redials(self) -> int:
        """How often the hub was connected to anew because nothing came."""
        return self._redial.count

    # -- what to do

    def due(self, now_ns: int) -> Due:
        """Return what is due, and plan it again: what the caller does not manage to do comes back by itself."""
        everything = now_ns >= self._next_full_ns
        leases = not everything and now_ns >= self._next_leases_ns
        if everything:
            self._next_full_ns = now_ns + self._period_ns()
            self._last_full_ns = now_ns
        if everything or leases:
            self._next_leases_ns = now_ns + self._lease_look_ns()
        looks = () if everything else tuple(look for look, (when, _) in self._looks.items() if now_ns >= when)
        for look in looks:
            self._plan_again(look, now_ns)
        probe = self._has_hub and now_ns >= self._next_probe_ns
        if probe:
            again_s = self._settings.probe_again_s if self._hints_up is not False else self._settings.probe_limit_s / 2
            self._next_probe_ns = now_ns + int(again_s * _NS)
        redial = self._has_hub and self._hints_up is False and self._redial.silent(now_ns)
        return Due(everything, leases, looks, probe, redial)

    def next_ns(self) -> int:
        """Return when something is due next."""
        times = [self._next_full_ns, self._next_leases_ns, *(when for when, _ in self._looks.values())]
        if self._has_hub:
            times.append(self._next_probe_ns)
            if self._redial.due_ns is not None:
                times.append(self._redial.due_ns)
        return min(times)

    def refresh(self, now_ns: int) -> None:
        """Look at everything as soon as the spacing allows."""
        soonest = now_ns
        if self._last_full_ns is not None:
            soonest = max(now_ns, self._last_full_ns + self._spacing_ns())
        self._next_full_ns = min(self._next_full_ns, soonest)

    def launching(self, *, active: bool, now_ns: int) -> None:
        """Say whether ranks are expected to appear, so that looks come more often."""
        self._launching = active
        if active:
            self.refresh(now_ns)

    # -- hints

    def hint(self, hint: Hint, delivery: Delivery, now_ns: int) -> list[Event]:
        """Take one hint."""
        if delivery is Delivery.OLD:
            self.duplicates += 1
            return []
        if delivery is Delivery.GAP:
            self.missed(now_ns)
        if hint.kind in (HintKind.STATE, HintKind.LEAVE):
            return [WorkerHint(hint)]
        if hint.kind is HintKind.AGENT and hint.text in self._agents:
            self.refresh(now_ns)  # changed or withdrawn
        elif not self._knows(hint) and len(self._looks) < _MAX_LOOKS:
            self._looks.setdefault(hint, (now_ns, 0))
        return []

    def missed(self, now_ns: int) -> None:
        """Hints were missed (a gap, a beat that counts more than was heard)."""
        self.gaps += 1
        self.refresh(now_ns)

    def echo(self, now_ns: int) -> list[Event]:
        """The own probe came back."""
        self._redial.heard()
        self._heard_ns = now_ns
        self._next_probe_ns = now_ns + int(self._settings.probe_s * _NS)
        if self._hints_up:
            return []
        self._hints_up = True
        self.refresh(now_ns)  # whatever was announced before the subscription worked
        self._next_full_ns = min(self._next_full_ns, now_ns + self._period_ns())
        return [HintPath(up=True)]

    def tick(self, now_ns: int) -> list[Event]:
        """Notice that the probe has not come back for too long."""
        silent = now_ns - self._heard_ns
        limit = self._settings.probe_limit_s + (self._settings.probe_s if self._hints_up else 0.0)
        if not self._has_hub or self._hints_up is False or silent < limit * _NS:
            return []
        self._hints_up = False
        self._next_full_ns = min(self._next_full_ns, now_ns + self._period_ns())
        return [HintPath(up=False)]

    def moved(self, *, has_hub: bool, now_ns: int) -> None:
        """The directory listens to another hub, or to none."""
        self._has_hub = has_hub
        self._redial.heard()
        self._hints_up = None
        self._heard_ns = self._next_probe_ns = now_ns
        self.refresh(now_ns)

    # -- looks

    def snapshot(self, look: Snapshot, now_ns: int, cost_ns: int = 0) -> list[Event]:
        """Take one look at everything.

        Args:
            look: What was read.
            now_ns: When it had been read.
            cost_ns: How long it took: looks are spaced so that they fill at most a fifth of the time.
        """
        events: list[Event] = self._readable()
        self._complete = True
        self._cost_ns = cost_ns
        if look.epoch is not None:
            events += self._take_epoch(look.epoch)
        events += self._take_agents(look.agents)
        for exited in look.exits:
            events += self._take_exit(exited)
        workers = sorted(look.workers, key=lambda record: record.incarnation)
        for worker in workers:
            events += self._take_worker(worker)
        events += self._drop_withdrawn(workers)
        self._looks = {hint: plan for hint, plan in self._looks.items() if not self._knows(hint)}
        events += self.leases(look.leases, now_ns)
        return events

    def leases(self, leases: Mapping[str, Lease], now_ns: int) -> list[Event]:
        """Take one look at the leases. An agent without one is silent from the first look at it."""
        for agent in self._agents.keys() - leases.keys():
            self._observer.expect(agent, _UNSEEN_LEASE_S, now_ns)
        self._observer.observe(leases, now_ns)
        shortest = min((lease.ttl_s for lease in leases.values()), default=None)
        self._lease_period_ns = None if shortest is None else int(shortest * _NS / 3)
        self._next_leases_ns = min(self._next_leases_ns, now_ns + self._lease_look_ns())
        events: list[Event] = []
        for holder in leases.keys() | self._lease_states.keys() | self._agents.keys():
            events += self._judge(holder)
        return events

    def found(self, hint: Hint, record: WorkerRecord | ExitRecord | AgentRecord | EpochRecord | None) -> list[Event]:
        """Take the answer to one look; None (not there yet, or unreadable) is looked for again a few times."""
        if record is None:
            return []
        self._looks.pop(hint, None)
        if isinstance(record, WorkerRecord):
            return self._take_worker(record)
        if isinstance(record, ExitRecord):
            return self._take_exit(record)
        if isinstance(record, AgentRecord):
            return self._take_agent(record)
        return self._take_epoch(record)

    def failed(self, error: str) -> list[Event]:
        """The registry could not be read. Nothing known is forgotten, no lease ages; the next look is planned."""
        if self._trouble:
            self._trouble = error
            return []
        self._trouble = error
        return [RegistryTrouble(error)]

    def view(self) -> View:
        """Return what is known now."""
        return View(
            workers=dict(self._workers),
            exits=dict(self._exits),
            agents=dict(self._agents),
            leases=dict(self._lease_states),
            epoch=self._epoch,
            hints_up=self._hints_up,
            trouble=self._trouble,
            complete=self._complete,
        )

    # -- inside

    def _period_ns(self) -> int:
        periods = [self._settings.reconcile_s]
        if self._launching:
            periods.append(self._settings.launch_s)
        if self._hints_up is False:
            periods.append(self._settings.blind_s)
        return max(int(min(periods) * _NS), self._spacing_ns())

    def _spacing_ns(self) -> int:
        return max(int(self._settings.spacing_s * _NS), 5 * self._cost_ns)

    def _lease_look_ns(self) -> int:
        return self._lease_period_ns if self._lease_period_ns is not None else int(self._settings.reconcile_s * _NS)

    def _plan_again(self, hint: Hint, now_ns: int) -> None:
        """A record just announced may not be visible yet; after a few looks the reconcile will have to find it."""
        _, tries = self._looks[hint]
        if tries >= len(_LOOK_AGAIN_NS):
            del self._looks[hint]
        else:
            self._looks[hint] = (now_ns + _LOOK_AGAIN_NS[tries], tries + 1)

    def _knows(self, hint: Hint) -> bool:
        key = (hint.role, hint.rank, hint.incarnation)
        if hint.kind is HintKind.JOIN:
            return key in self._seen or key in self._exits
        if hint.kind is HintKind.EXIT:
            return key in self._exits
        if hint.kind is HintKind.EPOCH:
            return self._epoch is not None and self._epoch.epoch >= hint.incarnation
        return hint.text in self._agents

    def _readable(self) -> list[Event]:
        if not self._trouble:
            return []
        self._trouble = ""
        return [RegistryTrouble("")]

    def _take_worker(self, record: WorkerRecord) -> list[Event]:
        key = (record.role, record.rank, record.incarnation)
        if key in self._seen or key in self._exits:
            return []
        self._seen.add(key)
        name = WorkerName(record.role, record.rank)
        old = self._workers.get(name)
        if old is not None and old.incarnation > record.incarnation:
            return []
        self._workers[name] = record
        return [WorkerReplaced(old, record), WorkerSeen(record)] if old is not None else [WorkerSeen(record)]

    def _take_exit(self, record: ExitRecord) -> list[Event]:
        key = (record.role, record.rank, record.incarnation)
        if key in self._exits:
            return []
        self._exits[key] = record
        name = WorkerName(record.role, record.rank)
        current = self._workers.get(name)
        if current is not None and current.incarnation == record.incarnation:
            del self._workers[name]
        return [WorkerExited(record)]

    def _drop_withdrawn(self, workers: Iterable[WorkerRecord]) -> list[Event]:
        """Forget workers whose records are gone in two looks running: one listing may lag behind."""
        present = {(record.role, record.rank, record.incarnation) for record in workers}
        missing = {(*name, record.incarnation): record for name, record in self._workers.items()}
        missing = {key: record for key, record in missing.items() if key not in present}
        events: list[Event] = []
        for key, record in missing.items():
            if key in self._absent:
                del self._workers[WorkerName(record.role, record.rank)]
                self._seen.discard(key)
                events.append(WorkerGone(record))
        self._absent = set(missing)
        return events

    def _take_agents(self, records: Iterable[AgentRecord]) -> list[Event]:
        """Take a whole listing of agents; one that is gone in two looks running left in good order."""
        events: list[Event] = []
        present = set()
        for record in records:
            present.add(record.agent)
            events += self._take_agent(record)
        missing = self._agents.keys() - present
        for agent in missing & self._absent_agents:
            events.append(AgentGone(self._agents.pop(agent)))
            self._observer.forget(agent)  # its lease says nothing any more
            self._lease_states.pop(agent, None)
        self._absent_agents = missing
        return events

    def _take_agent(self, record: AgentRecord) -> list[Event]:
        if self._agents.get(record.agent) == record:
            return []
        self._agents[record.agent] = record
        return [AgentSeen(record)]

    def _take_epoch(self, record: EpochRecord) -> list[Event]:
        if self._epoch is not None and record.epoch <= self._epoch.epoch:
            return []
        self._epoch = record
        return [EpochSeen(record)]

    def _judge(self, holder: str) -> list[Event]:
        before = self._lease_states.get(holder, LeaseState.LIVE)
        after = self._observer.state(holder)
        if after is LeaseState.UNKNOWN:
            self._lease_states.pop(holder, None)
            return []
        self._lease_states[holder] = after
        if after is before:
            return []
        silence = self._observer.silence_s(holder)
        if after is LeaseState.LATE:
            return [LeaseLate(holder, silence)]
        if after is LeaseState.EXPIRED:
            return [LeaseExpired(holder, silence)]
        return [LeaseRenewed(holder)]
