"""A controller of the simulation: the same machines as ``zbus.transport.client``, in a shell without sockets.

Whatever the client does between a message and its machines stands here once more, in the same order. When the client
changes, this file changes with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from zbus.protocol.caller import CallerLane
from zbus.protocol.gang import Gang, Step
from zbus.protocol.journal import JournalReport
from zbus.protocol.liveness import LinkMachine, LinkState
from zbus.protocol.messages import (
    Buffers,
    Chunk,
    Effect,
    Finish,
    Header,
    Kind,
    Outcome,
    OutcomeKind,
    Poised,
    Results,
    SendTo,
    Status,
)
from zbus.testing.simulation.clocks import NodeClock
from zbus.testing.simulation.ledger import Call, GangTruth, broken

if TYPE_CHECKING:
    from zbus.testing.simulation.network import Connection
    from zbus.testing.simulation.worker import SimWorker
    from zbus.testing.simulation.world import World

__all__ = ["SimController", "SimLane", "SimLink", "SimPeer"]

_NEVER: Final = 1 << 62
_RANK: Final = {
    LinkState.READY: 0,
    LinkState.HANDSHAKING: 1,
    LinkState.CONNECTING: 2,
    LinkState.SUSPECT: 3,
    LinkState.DEAD: 4,
}
_ROUNDING: Final = 1_000
"""What a clock of another rate may show beyond the time asked for, twice."""
_REFUSALS: Final = (Status.NO_SESSION, Status.FENCED_EPOCH, Status.FENCED_INCARNATION, Status.DRAINING)


class SimGang:
    """A call that starts together, as the client keeps it, and the truth about it."""

    __slots__ = ("lanes", "machine", "truth")

    def __init__(self, machine: Gang, lanes: list[SimLane]) -> None:
        self.machine = machine
        self.lanes = lanes
        self.truth = GangTruth()


class SimLane:
    """One lane of a peer: its machine and the calls that wait for an outcome."""

    __slots__ = ("calls", "gangs", "link", "machine")

    def __init__(self, machine: CallerLane, link: SimLink) -> None:
        self.machine = machine
        self.link = link
        self.calls: dict[int, Call] = {}
        self.gangs: dict[int, tuple[SimGang, int]] = {}


class SimLink:
    """One connection, again and again, to one of a peer's sockets."""

    __slots__ = ("address", "connection", "controller", "lanes", "machine", "name", "peer")

    def __init__(self, controller: SimController, peer: SimPeer, name: str, address: int) -> None:
        self.controller = controller
        self.peer = peer
        self.name = name
        self.address = address
        world = controller.world
        self.machine = LinkMachine(controller.now, hello_every_ns=world.hello_every, jitter=world.seed % 7 / 7)
        self.lanes: dict[str, SimLane] = {}
        self.connection: Connection | None = None

    def on_link_up(self) -> None:
        """As the client's link."""
        if self.machine.state is LinkState.DEAD:
            return
        now = self.controller.now
        self.machine.link_up(now)
        self.say_hello(now)
        self.peer.refresh()

    def on_link_down(self, why: str) -> None:
        """As the client's link."""
        self.machine.link_down(self.controller.now, why)
        self.controller.note_due(self.machine.redial_due)
        for lane in self.lanes.values():
            lane.machine.on_disconnected()
        self.peer.refresh()

    def on_link_retried(self) -> None:
        """As the client's link."""
        self.machine.retrying()

    def redial(self) -> None:
        """As the client's link."""
        self.controller.world.covered["redial"] += 1
        self.controller.world.reconnect(self)
        self.machine.redialled()

    def say_hello(self, now: int) -> None:
        """As the client's link."""
        controller = self.controller
        self.send(Header(Kind.HELLO, controller.session, controller.epoch, self.peer.incarnation, self.name))
        self.machine.hello_sent(now)
        controller.note_due(self.machine.hello_due)

    def send(self, header: Header, buffers: Buffers = ()) -> None:
        """Hand a message to the network; without a connection it is lost, as the cleared outbox of the client."""
        controller = self.controller
        if controller.crash_in >= 0:
            if controller.crash_in == 0:
                controller.world.crash_controller(controller)
            controller.crash_in -= 1
        if controller.alive:
            controller.world.network.send(self.connection, 1, header, buffers)

    def on_message(self, header: Header, buffers: Buffers) -> None:
        """As the client's link."""
        controller = self.controller
        kind = header.kind
        if header.session != controller.session:
            controller.world.covered["foreign session"] += 1
        elif kind == Kind.WELCOME:
            self._on_welcome(buffers)
        elif kind == Kind.PING:
            if header.incarnation == self.peer.incarnation and self.machine.state is not LinkState.DEAD:
                self.send(header._replace(kind=Kind.PONG))
        elif kind == Kind.NACK and header.status in _REFUSALS:
            self._on_refusal(header)
        else:
            lane = self.lanes.get(header.lane)
            if lane is None or header.incarnation != self.peer.incarnation:
                controller.world.covered["foreign lane"] += 1
                return
            controller.run(lane, lane.machine.receive(header, buffers, controller.now))

    def _on_welcome(self, buffers: Buffers) -> None:
        now = self.controller.now
        try:
            cursors = self.controller.world.cursors(buffers)
        except Exception:  # as the client: anything but a well-formed WELCOME is junk  # noqa: BLE001
            self.controller.world.covered["bad welcome"] += 1
            return
        again = not self.machine.welcomed(now)
        if not again:
            for lane in self.lanes.values():
                self.controller.run(lane, lane.machine.on_connected(cursors.get(lane.machine.lane, 0), now))
        self.peer.refresh()

    def _on_refusal(self, header: Header) -> None:
        world = self.controller.world
        world.covered["refused", header.status, self.machine.state.value] += 1
        if header.status == Status.NO_SESSION:
            if not self.machine.up:  # said on a connection that is gone
                return
            self.machine.link_down(self.controller.now, "the worker no longer knows this session")
            self.machine.link_up(self.controller.now)
            for lane in self.lanes.values():
                lane.machine.on_disconnected()
            self.say_hello(self.controller.now)
            self.peer.refresh()
            return
        self.controller.declare_dead(self.peer, reason="fenced", evidence="it refused the session")


class SimPeer:
    """One incarnation of one worker as one controller sees it."""

    __slots__ = ("controller", "incarnation", "links", "lost", "slot", "state", "worker")

    def __init__(self, controller: SimController, worker: SimWorker) -> None:
        self.controller = controller
        self.worker = worker
        self.slot = worker.slot
        self.incarnation = worker.incarnation
        self.state = LinkState.CONNECTING
        self.lost = False
        self.links: dict[str, SimLink] = {}

    def refresh(self) -> None:
        """Recompute the state from the links."""
        links = self.links
        if len(links) == 1:
            (link,) = links.values()
            state = link.machine.state
        else:
            state = max((link.machine.state for link in links.values()), key=_RANK.__getitem__)
        if state is LinkState.READY or state is LinkState.DEAD:
            self.lost = False
        elif self.lost:
            state = LinkState.DEAD
        if state is not self.state:
            self.controller.world.covered["peer", self.state.value, state.value] += 1
            self.state = state


class SimController:
    """One session with its peers."""

    __slots__ = (
        "_due", "alive", "busy_until", "clock", "crash_in", "epoch", "gangs", "inbox", "pace", "paused_until", "peers",
        "session", "was_paused", "world",
    )  # fmt: skip

    def __init__(self, world: World, number: int, epoch: int) -> None:
        self.world = world
        self.session = number.to_bytes(16, "big")
        self.epoch = epoch
        self.alive = True
        self.paused_until = 0
        self.was_paused = False
        self.peers: list[SimPeer] = []
        self._due = _NEVER
        self.crash_in = -1  # it dies at its so many-th message from now
        self.gangs: list[tuple[GangTruth, list[SimPeer]]] = []
        self.clock = NodeClock()
        self.pace = self.busy_until = 0
        self.inbox: deque[Any] = deque()
        world.set_up_node(self)

    @property
    def now(self) -> int:
        """What this process's clock shows."""
        return self.clock.read(self.world.now)

    def __repr__(self) -> str:
        return f"controller {self.session[-1]} (epoch {self.epoch})"

    def connect(self, worker: SimWorker) -> None:
        """Open the links to an incarnation found in the registry."""
        peer = SimPeer(self, worker)
        for name in self.world.link_names:
            peer.links[name] = SimLink(self, peer, name, worker.address)
        self.peers.append(peer)
        for link in peer.links.values():
            self.world.reconnect(link)

    def current(self) -> list[SimPeer]:
        """Return the newest peer of each worker name, in order of names."""
        newest = {peer.slot: peer for peer in sorted(self.peers, key=lambda peer: peer.incarnation)}
        return [newest[slot] for slot in sorted(newest)]

    def place(
        self, members: list[SimPeer], lane_name: str, token: bytes, count: int, deadline: int | None, batch: int, *,
        strict: bool, stream: bool, together: bool = False,
    ) -> list[tuple[SimPeer, int]] | None:  # fmt: skip
        """Place atomically as the client does; None if some member is not READY."""
        for peer in members:
            if peer.state is not LinkState.READY:
                return None
        world = self.world
        now = self.now
        placed = []
        together = together and len(members) > 1
        gang = self._gang(members, lane_name, deadline) if together else None
        for peer in members:
            lane = self._lane(peer, lane_name)
            machine = lane.machine
            calls = []
            seq = machine.next_seq
            for index in range(count):
                call = Call(
                    (peer.incarnation, self.session, lane_name, seq + index), token, batch, index, count, deadline,
                    now, stream=stream, strict=strict,
                )  # fmt: skip
                lane.calls[seq + index] = call
                world.ledger.placed(call)
                calls.append(call)
            if gang is not None:
                gang.truth.members.append(calls)
                for call in calls:
                    call.gang = gang.truth
            _, effects = machine.place((token,), count, len(token), deadline, now, strict=strict, together=together)
            self.run(lane, effects)
            placed.append((peer, seq))
            self.note_due(machine.due_ns)
        return placed

    def place_joined(
        self, peer: SimPeer, lane_name: str, tokens: Sequence[bytes], deadlines: Sequence[int | None]
    ) -> int | None:
        """Place calls that leave together as the client does; the first's seq, None if the member is not READY."""
        if peer.state is not LinkState.READY:
            return None
        lane, now = self._lane(peer, lane_name), self.now
        machine = lane.machine
        first = machine.next_seq
        for seq, (token, deadline) in enumerate(zip(tokens, deadlines, strict=True), first):
            key = (peer.incarnation, self.session, lane_name, seq)
            lane.calls[seq] = call = Call(
                key, token, int(token.rstrip(b".")), 0, 1, deadline, now, stream=False, strict=False
            )
            self.world.ledger.placed(call)
        _, effects = machine.place_joined([(token,) for token in tokens], deadlines, now)
        self.run(lane, effects)
        self.note_due(machine.due_ns)
        return first

    def cancel(self, placed: list[tuple[SimPeer, int]], lane_name: str, count: int) -> None:
        """Cancel a placed batch, as the client does."""
        if not self._ready_to_act(self.cancel, placed, lane_name, count):
            return
        for peer, seq in placed:
            for index in range(count):
                self.world.ledger.calls[peer.incarnation, self.session, lane_name, seq + index].cancelled = True
        for peer, seq in placed:
            lane = self._lane(peer, lane_name)
            self.run(lane, lane.machine.cancel(seq, self.now))

    def consumed(self, lane: SimLane, seq: int, upto: int) -> None:
        """Give stream credit, as the client does."""
        if self._ready_to_act(self.consumed, lane, seq, upto):
            self.run(lane, lane.machine.consumed(seq, upto))

    def declare_dead(self, peer: SimPeer, reason: str, evidence: str, journal: JournalReport | None = None) -> None:
        """Settle a peer, as the client does."""
        now = self.now
        for link in peer.links.values():
            if link.machine.dead(now, reason, evidence):
                for lane in link.lanes.values():
                    name = lane.machine.lane
                    history = None if journal is None or name == "ctl" else journal.lane(self.session, name)
                    self.run(lane, lane.machine.on_dead(reason, evidence, history))
        peer.refresh()

    def close(self) -> None:
        """Say BYE and settle everything, as the client does; the process ends."""
        for peer in self.peers:
            for link in peer.links.values():
                if link.machine.state is LinkState.READY:
                    link.send(Header(Kind.BYE, self.session, self.epoch, peer.incarnation, link.name))
            self.declare_dead(peer, "shutdown", "this controller closed")
        self.alive = False

    def observe_end(self, incarnation: int, reason: str, journal: JournalReport | None = None) -> None:
        """Learn from the registry that an incarnation is over."""
        if not self._ready_to_act(self.observe_end, incarnation, reason, journal):
            return
        for peer in self.peers:
            if peer.incarnation == incarnation:
                self.declare_dead(peer, reason, "its exit record", journal)

    def observe_silence(self, incarnation: int) -> bool:
        """Learn from the registry that a lease ran out; whether that is done with."""
        if not self.alive:
            return True
        open_peers = 0
        for peer in self.peers:
            if peer.incarnation == incarnation and peer.state is not LinkState.DEAD:
                if peer.state is LinkState.READY or self.paused_until > self.world.now:
                    open_peers += 1  # while the connection lives, a lease is not asked
                else:
                    self.lose(peer, "lease", "its lease ran out")
        return not open_peers

    def lose(self, peer: SimPeer, reason: str, evidence: str) -> None:
        """Take a peer for dead for its silence, as the client does."""
        if peer.state is LinkState.DEAD:
            return
        self.world.covered["lost"] += 1
        for link in peer.links.values():
            for lane in link.lanes.values():
                self.run(lane, lane.machine.give_up(reason, evidence, self.now))
        peer.lost = True
        peer.refresh()

    def discover(self, worker: SimWorker) -> None:
        """Learn of a new incarnation from the registry."""
        if self._ready_to_act(self.discover, worker):
            self.world.covered["discovered"] += 1
            for peer in self.peers:
                if peer.slot == worker.slot and peer.incarnation < worker.incarnation:
                    self.declare_dead(peer, "fenced", "a later start has replaced it")
            self.connect(worker)

    def run(self, lane: SimLane, effects: list[Effect]) -> None:
        """Do what a lane's machine asks, as the client does."""
        world = self.world
        for effect in effects:
            kind = type(effect)
            if kind is SendTo:
                lane.link.send(effect.header, effect.buffers)  # type: ignore[union-attr]
            elif kind is Finish:
                self._finish(lane, effect)  # type: ignore[arg-type]
            elif kind is Results:
                for seq, body in enumerate(effect.bodies, effect.seq):  # type: ignore[union-attr]
                    outcome = Outcome(OutcomeKind.OK, (body,), attempts=effect.attempts)  # type: ignore[union-attr]
                    self._finish(lane, Finish(lane.machine.lane, seq, outcome))
            elif kind is Chunk:
                self._chunk(lane, effect)  # type: ignore[arg-type]
            elif kind is Poised and effect.seq in lane.gangs:  # type: ignore[union-attr]
                gang, member = lane.gangs[effect.seq]  # type: ignore[union-attr]
                self._take(gang, gang.machine.poised(member, self.now))
        lane.machine.validate()
        self.note_due(lane.machine.due_ns)
        if world.story is not None:
            for effect in effects:
                if type(effect) is Results:
                    world.tell(f"{self} is told {lane.machine.lane}/{effect.seq}+{len(effect.bodies)}: OK")
                elif type(effect) is Finish:
                    world.tell(f"{self} is told {lane.machine.lane}/{effect.seq}: {effect.outcome}")

    def note_due(self, due: int) -> None:
        """Have ``tick`` called in time."""
        if due < self._due:
            self._due = due
            self.world.at(max(self.world.now, self.clock.when(due)), self.tick, due)

    def look_soon(self) -> None:
        """Look at the timers now: the clock has jumped."""
        self._due = _NEVER
        self.note_due(self.now)

    def tick(self, due: int) -> None:
        """As the client's ticker."""
        if due != self._due or not self.alive:
            return
        world = self.world
        if self.paused_until > world.now:
            self._due = self.clock.read(self.paused_until)
            world.at(self.paused_until, self.tick, self._due)
            return
        now = self.now
        self._due = _NEVER
        next_due = _NEVER
        for peer in self.peers:
            for link in peer.links.values():
                if link.machine.hello_due <= now:
                    link.say_hello(now)
                if link.machine.redial_due <= now:
                    link.redial()
                next_due = min(next_due, link.machine.hello_due, link.machine.redial_due)
                for lane in link.lanes.values():
                    if lane.machine.due_ns <= now:
                        self.run(lane, lane.machine.on_timer(now))
                    next_due = min(next_due, lane.machine.due_ns)
        self.note_due(next_due)

    def settled(self) -> bool:
        """Whether every lane to a living peer has all its places back."""
        for peer in self.peers:
            if peer.state is LinkState.DEAD or peer.incarnation in self.world.ledger.liars:
                continue
            for link in peer.links.values():
                for lane in link.lanes.values():
                    if lane.machine.outstanding and not self._waits_for_a_liar(lane):
                        return False
        return True

    def _waits_for_a_liar(self, lane: SimLane) -> bool:
        """Whether what is open may wait for a member of its gang that lies."""
        liars = self.world.ledger.liars
        return bool(liars) and any(peer.incarnation in liars for _, members in self.gangs for peer in members)

    def _lane(self, peer: SimPeer, name: str) -> SimLane:
        link = peer.links.get("ctl" if name == "ctl" else "main") or peer.links["main"]
        lane = link.lanes.get(name)
        if lane is None:
            knobs = self.world.knobs
            machine = CallerLane(
                self.session, self.epoch, peer.incarnation, name,
                window_calls=knobs.window_calls, window_bytes=knobs.window_bytes, timing=self.world.timing,
            )  # fmt: skip
            lane = link.lanes[name] = SimLane(machine, link)
            if link.machine.state is LinkState.READY:
                machine.on_connected(0, self.now)
        return lane

    def _finish(self, lane: SimLane, effect: Finish) -> None:
        if not self.alive:
            return  # it died between two messages: nobody is told any more
        call = lane.calls.pop(effect.seq, None)
        if call is None:
            broken("I1", f"{lane.machine.lane}/{effect.seq} gets {effect.outcome} after its outcome")
        grace = None if self.was_paused else self.world.timing.cancel_grace + _ROUNDING
        self.world.ledger.finished(call, effect.outcome, self.now, grace=grace)
        found = lane.gangs.get(call.key[3] - call.index)
        if found is not None:
            gang, member = found
            self._take(gang, gang.machine.ended(member, effect.outcome, self.now))

    def _gang(self, members: list[SimPeer], lane_name: str, deadline: int | None) -> SimGang:
        """As the client: make the next request of each member's lane start together."""
        lanes = [self._lane(peer, lane_name) for peer in members]
        machines = [lane.machine for lane in lanes]
        names = [str(peer.worker) for peer in members]
        gang = SimGang(Gang(machines, [machine.next_seq for machine in machines], names, deadline), lanes)
        for index, lane in enumerate(lanes):
            lane.gangs[lane.machine.next_seq] = gang, index
        self.gangs.append((gang.truth, members))
        return gang

    def _take(self, gang: SimGang, steps: list[Step]) -> None:
        if gang.machine.released and gang.truth.gone is None:
            gang.truth.gone = self.now
            self.world.covered["gang", "released"] += 1
        for member, effects in steps:
            self.run(gang.lanes[member], effects)

    def _chunk(self, lane: SimLane, effect: Chunk) -> None:
        call = lane.calls.get(effect.seq)
        if call is None:
            broken("I1", f"{lane.machine.lane}/{effect.seq} delivers an item after its outcome")
        self.world.ledger.chunk(call, effect.number, effect.buffers)
        self.world.after(self.world.knobs.delay, self.consumed, lane, effect.seq, effect.number + 1)

    def _ready_to_act(self, method: Any, *args: Any) -> bool:
        """Whether this process runs now; if it is stopped, the call is made when it goes on."""
        if not self.alive:
            return False
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, method, *args)
            return False
        return True
