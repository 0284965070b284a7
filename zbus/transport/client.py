"""All connections of one calling session: ordered lanes, atomic placement, outcomes. One of them is ``peer.Peer``.

The shell around ``protocol.caller`` and ``protocol.liveness``: it owns the DEALER sockets, hands messages in and
executes effects. Everything happens under ``reactor.lock``; outcomes are delivered under it too, so a sink must be
quick. A waiting caller drives the reactor itself (``wait``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgpack

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.codec import Keep
from zbus.errors import CodecError, TransportError, Unavailable
from zbus.ids import Session, WorkerName
from zbus.protocol.caller import CallerLane, Timing
from zbus.protocol.gang import Gang, Step
from zbus.protocol.journal import JournalReport
from zbus.protocol.liveness import LinkState
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
    nbytes_of,
)
from zbus.transport.arrivals import Arrivals
from zbus.transport.carrier import Carrier, Opening
from zbus.transport.channel import Channel
from zbus.transport.interrupts import gate
from zbus.transport.peer import Exchange, Link, Peer, PeerLane, PeerState
from zbus.transport.reactor import Reactor
from zbus.transport.sockets import SocketFactory
from zbus.transport.soon import Soon
from zbus.transport.waiters import ChunkSink, ResultsSink, Sink

__all__ = ["ChunkSink", "Client", "Exchange", "Peer", "PeerState", "Placed", "ResultsSink", "Sink"]

log = logging.getLogger("zbus.client")

_NEVER: Final = 1 << 62

_REQ: Final = Kind.REQ
_READY: Final = PeerState.READY


class Placed:
    """A placed batch: which peers, lane and seqs. Opaque to users; give it to ``Client.cancel``.

    Attributes:
        sent_ns: For each of several members when its request was about to leave, on the client's clock; empty where
            nobody asks (``Client.on_sent``).
    """

    __slots__ = ("calls", "lane", "members", "sent_ns", "seqs")

    def __init__(
        self, members: Sequence[Peer], lane: str, seqs: list[int], calls: int, sent_ns: Sequence[int] = ()
    ) -> None:
        self.sent_ns = sent_ns
        self.members = members
        self.lane = lane
        self.seqs = seqs
        self.calls = calls


def _ignore_state(_peer: Peer, _state: PeerState) -> None:
    """Default of ``Client.on_state``."""


def _ignore_exchange(_peer: Peer, _stamps: Exchange) -> None:
    """Default of ``Client.on_exchange``."""


class Client:
    """All connections of one session. Methods may be called from any thread unless they say otherwise.

    Args:
        session: This caller's session id.
        epoch: Controller epoch; 0 for a guest.
        factory: Socket factory, sized for the number of peers.
        clock: Monotonic clock for deadlines.
        name: Who calls, for the callee's logs.
        timing: Probe and grace times.
        carrier: Takes large arrays to and from peers of this host; None: they travel in the messages.

    Attributes:
        on_state: Told of each change of a peer, under the lock.
        on_sent: Told under the lock of each request that leaves later than it was placed, or again.
        answering: Attempt that the message names whose outcomes are being delivered. Under the lock.
        on_exchange: Told of each exchange of timestamps with a peer (HELLO and WELCOME, PING and PONG), under the lock.
    """

    def __init__(
        self,
        *,
        session: Session,
        epoch: int,
        factory: SocketFactory,
        clock: Clock = SYSTEM_CLOCK,
        name: str = "controller",
        timing: Timing | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self.session = session
        self.carrier = carrier
        self.epoch = epoch
        self.factory = factory
        self.clock = clock
        self._now = clock.monotonic_ns
        self.name = name
        self.reactor = Reactor(clock=clock, name="zbus-client")
        self.on_state: Callable[[Peer, PeerState], None] = _ignore_state
        self.on_exchange: Callable[[Peer, Exchange], None] = _ignore_exchange
        self.on_sent: Callable[[Peer, Header], None] | None = None
        self.answering = 1
        self.counters: dict[str, int] = {}
        self._timing = timing
        self._peers: list[Peer] = []
        self.soon = Soon(self)
        self._room_watchers: list[Callable[[], None]] = []
        self.closed = False
        self.reactor.add_ticker(self._tick)
        self.reactor.start()

    # -- peers ---------------------------------------------------------------------------------------------------

    def connect(self, name: WorkerName, incarnation: int, endpoints: Mapping[str, Sequence[str]]) -> Peer:
        """Open connections to one incarnation.

        Args:
            name: Role and rank; the WELCOME must agree.
            incarnation: Which start; another is refused.
            endpoints: Addresses by link, ``{"main": [...], "ctl": [...]}``; an agent has only ``ctl``.

        Raises:
            TransportError: An address is none, or there is no socket or descriptor left; nothing stays open.
        """
        peer = Peer(self, name, incarnation)
        with gate, self.reactor.lock:
            self._check_open()
            try:
                for link in ("main", "ctl"):
                    if endpoints.get(link):
                        peer.links[link] = Link(self, peer, link, endpoints[link])
            except BaseException:
                for made in peer.links.values():
                    made.channel.close()
                raise
            self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Close the connections to a peer; its unfinished calls are settled as lost."""
        with gate, self.reactor.lock:
            self._settle(peer, "disconnected", "this process closed the connection")
            for link in peer.links.values():
                self.keep_counts(link.counts())
                link.channel.close()
            if peer in self._peers:
                self._peers.remove(peer)
        self.reactor.wake()  # as of whatever is settled outside the rounds of whoever leads: it may wait for that

    def declare_dead(self, peer: Peer, *, reason: str, evidence: str, journal: JournalReport | None = None) -> None:
        """End an incarnation: its exit was seen, or its lease ran out. Every unfinished call gets its outcome.

        Args:
            peer: Which.
            reason: Machine-readable cause.
            evidence: How it was seen, in words.
            journal: What its crash journal tells, read after its end: each call is settled by it. Without one,
                whatever was sent is UNKNOWN.
        """
        with gate, self.reactor.lock:
            self._settle(peer, reason, evidence, journal)
        self.reactor.wake()

    def lose(self, peer: Peer, *, reason: str, evidence: str) -> bool:
        """Take an incarnation for dead because of its silence alone. Every unfinished call gets its outcome.

        It is READY again if it answers before it is declared dead: nothing has taken its place.

        Args:
            peer: Which.
            reason: Machine-readable cause.
            evidence: Who was silent for how long, in words.

        Returns:
            False where nothing was done: it answers, or is dead already.
        """
        with gate, self.reactor.lock:
            if peer.state in {PeerState.READY, PeerState.DEAD}:
                return False
            now = self.clock.monotonic_ns()
            for link in peer.links.values():
                for lane in link.lanes.values():
                    peer.had_calls = peer.had_calls or (bool(lane.waiters) and lane.machine.lane != "ctl")
                    self.execute(lane, lane.machine.give_up(reason, evidence, now))
            peer.lost = (reason, evidence)
            peer.refresh()
            self._stop_waiting(peer)
        self.reactor.wake()
        return True

    def ping(self, peer: Peer, told: bytes | None = None) -> bool:
        """Ask a peer for the time, on its ``ctl`` link; False if that is not ready.

        Args:
            peer: Whom.
            told: What it is told by the way, for its ``on_clock``.
        """
        with gate, self.reactor.lock:
            link = peer.links.get("ctl")
            if self.closed or link is None or link.machine.state is not LinkState.READY:
                return False
            header = Header(Kind.PING, self.session, self.epoch, peer.incarnation, "ctl")
            asked = msgpack.packb(self.clock.monotonic_ns())
            link.channel.send(header, (asked,) if told is None else (asked, told))
            link.channel.check()
            return True

    # -- calls ---------------------------------------------------------------------------------------------------

    def place(
        self,
        members: Sequence[Peer],
        lane: str,
        payloads: Sequence[Buffers],
        count: int,
        *,
        deadline_s: float | None,
        sink: Sink,
        results_sink: ResultsSink | None = None,
        chunk_sink: ChunkSink | None = None,
        trace: int = 0,
        strict: bool = False,
        together: bool = False,
    ) -> Placed:
        """Take ``count`` consecutive places in ``lane`` of every member, atomically, and send.

        Two batches, from whatever threads, are seen in the same order by all members they share.

        Args:
            members: Who is called; each at most once.
            lane: Name of the lane.
            payloads: Frames for each member; the same object may stand several times.
            count: Calls in each payload (>= 1).
            deadline_s: Seconds from now, or None for no deadline.
            sink: Told of each call's outcome.
            results_sink: Told in its place where several calls came well in one message.
            chunk_sink: Told of each item of a stream; only with one member and ``count`` 1.
            trace: Span id of the caller.
            strict: A failed call makes its successors in this batch NOT_EXECUTED.
            together: It begins on no member until all hold it; see ``protocol.gang``.

        Raises:
            Unavailable: Some member is not READY; nothing was placed.
            TransportError: The client is closed.
        """
        if count == 1 and chunk_sink is None:
            payload = payloads[0]
            if len(members) == 1:
                return self._place_one(members, lane, payload, deadline_s, sink, trace, strict)
            if not together and all(other is payload for other in payloads):
                return self._place_alike(members, lane, payload, deadline_s, sink, trace, strict)
        sizes = [sum(map(nbytes_of, payload)) for payload in payloads]
        with gate, self.reactor.lock:
            for peer in members:
                if peer.state is not PeerState.READY:
                    raise self._refusal(members)
            now = self._now()
            deadline_ns = None if deadline_s is None else now + int(deadline_s * 1e9)
            together = together and len(members) > 1
            if together:
                sink = self._gang(members, lane, sink, deadline_ns)
                results_sink = None  # each outcome counts for the start
            seqs: list[int] = []
            sent: list[int] = []
            stamped = self.on_sent is not None
            lanes: list[PeerLane] = []
            for index, peer in enumerate(members):
                if stamped:
                    sent.append(self._now())
                found = self._lane(peer, lane)
                if found.pile:
                    self.soon.send(found)
                if chunk_sink is not None:
                    found.waiters.chunks[found.machine.next_seq] = (chunk_sink, index)
                payload = payloads[index] if len(payloads[index]) == 1 else self._addressed(payloads[index], peer)
                seqs.append(
                    self._put(
                        found, payload, count, sizes[index], deadline_ns, now, sink, index, trace, strict,
                        together, results_sink,
                    )
                )  # fmt: skip
                lanes.append(found)
            for found in lanes:
                self.reactor.note_due(found.machine.due_ns)
                found.link.channel.check()
            return Placed(members, lane, seqs, count, sent)

    def _place_one(
        self, members: Sequence[Peer], lane: str, payload: Buffers, deadline_s: float | None, sink: Sink, trace: int,
        strict: bool,  # noqa: FBT001  # private, hot path
    ) -> Placed:  # fmt: skip
        """As ``place`` for one call of one member, in the fewest steps."""
        peer = members[0]
        if len(payload) == 1:
            nbytes = len(payload[0])
        else:
            nbytes = sum(map(nbytes_of, payload))
            payload = self._addressed(payload, peer)
        with gate, self.reactor.lock:
            if peer.state is not _READY:
                raise self._refusal(members)
            found = peer.lanes.get(lane) or self._lane(peer, lane)
            now = self._now()
            deadline_ns = None if deadline_s is None else now + int(deadline_s * 1e9)
            seq = self._put(found, payload, 1, nbytes, deadline_ns, now, sink, 0, trace, strict)
            self.reactor.note_due(found.machine.due_ns)
            found.link.channel.check()
            return Placed(members, lane, [seq], 1)

    def _place_alike(
        self, members: Sequence[Peer], lane: str, payload: Buffers, deadline_s: float | None, sink: Sink, trace: int,
        strict: bool,  # noqa: FBT001  # private, hot path
    ) -> Placed:  # fmt: skip
        """As ``place`` for one call that is the same for each member, in the fewest steps."""
        nbytes = sum(map(nbytes_of, payload))
        whole = len(payload) == 1
        with gate, self.reactor.lock:
            for peer in members:
                if peer.state is not _READY:
                    raise self._refusal(members)
            now = self._now()
            deadline_ns = None if deadline_s is None else now + int(deadline_s * 1e9)
            seqs: list[int] = []
            sent: list[int] = []
            stamped = self.on_sent is not None
            channels: list[Channel] = []
            due = _NEVER
            for peer in members:
                if stamped:
                    sent.append(self._now())
                found = peer.lanes.get(lane) or self._lane(peer, lane)
                frames = payload if whole else self._addressed(payload, peer)
                seqs.append(self._put(found, frames, 1, nbytes, deadline_ns, now, sink, len(seqs), trace, strict))
                channels.append(found.link.channel)
                due = min(due, found.machine.due_ns)
            self.reactor.note_due(due)
            for channel in channels:
                channel.check()
            return Placed(members, lane, seqs, 1, sent)

    def _put(  # noqa: PLR0917  # private, hot path
        self, lane: PeerLane, payload: Buffers, count: int, nbytes: int, deadline_ns: int | None, now: int, sink: Sink,
        member: int, trace: int, strict: bool, together: bool = False,  # noqa: FBT001, FBT002
        results_sink: ResultsSink | None = None,
    ) -> int:  # fmt: skip
        """Take the next places of one member's lane; what can leave at once is booked while it is on its way."""
        machine = lane.machine
        if lane.pile:
            self.soon.send(lane)
        header = None if together else machine.next_header(count, nbytes, deadline_ns, now, trace, strict)
        if header is None:
            seq = machine.next_seq
        else:
            seq = header.seq
            lane.link.channel.send(header, payload)
            machine.sent(header, payload, nbytes, deadline_ns, now)
        if count == 1:
            lane.waiters.singles[seq] = (sink, member, 0)
        else:
            lane.waiters.add_batch(seq, count, member, sink, results_sink)
        if header is None:
            _, effects = machine.place(
                payload, count, nbytes, deadline_ns, now, trace=trace, strict=strict, together=together
            )
            self.execute(lane, effects, placing=True)
        return seq

    def crowded(self, members: Sequence[Peer], lane: str) -> bool:
        """Tell whether some member's window has no room, so that a further call would only wait in this process.

        After True, those who ``watch_room`` are told when there is room again.
        """
        for peer in members:
            found = peer.lanes.get(lane)
            if found is not None and peer.state is not PeerState.DEAD:
                found.wanted = True  # before the look: whoever makes room after it sees that somebody waits
                if found.machine.crowded:
                    return True
        return False

    def watch_room(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` under the lock when a lane that was crowded has room. ``unwatch_room`` ends it."""
        with gate, self.reactor.lock:
            self._room_watchers.append(watcher)

    def unwatch_room(self, watcher: Callable[[], None]) -> None:
        """Undo ``watch_room``."""
        with gate, self.reactor.lock:
            self._room_watchers.remove(watcher)

    def keeper(self, members: Sequence[Peer], *, snapshot: bool) -> Keep | None:
        """Return what makes the frames of large arrays for a call of these members; None for frames as usual.

        Args:
            members: Who may be called.
            snapshot: Arrays may change as soon as they are encoded.
        """
        if self.carrier is None:
            return None
        return self.carrier.keeper([peer.reach for peer in members], snapshot=snapshot)

    def _addressed(self, payload: Buffers, peer: Peer) -> Buffers:
        return payload if self.carrier is None else self.carrier.addressed(payload, peer.reach)

    def opened(self, buffers: Buffers, peer: Peer) -> Buffers | None:
        """Return received frames with the arrays in their places, or None: the message counts as lost.

        That is so when its sender has ended since, and its memory is gone.
        """
        if self.carrier is None:
            return buffers
        try:
            return self.carrier.opened(buffers, peer.reach)
        except CodecError as error:
            self._lost_arrays(peer, error)
            return None

    def _lost_arrays(self, peer: Peer, error: CodecError) -> None:
        self.count("lost_arrays")
        log.warning("an answer of %s cannot be read: %s", peer.name, error)

    def take(self, lane: PeerLane, header: Header, buffers: Buffers) -> None:
        """Take a worker's word about a call, with its arrays in their places. Under the lock."""
        machine = lane.machine
        effects = machine.receive(header, buffers, self._now())
        if effects:
            self.answering = header.attempt
            self.execute(lane, effects)
        if lane.wanted:  # also a late answer, which has no effect, frees its place
            self._make_room(lane)
        self.reactor.note_due(machine.due_ns)

    def arrives_later(self, lane: PeerLane, header: Header, buffers: Buffers) -> bool:
        """Keep an answer whose arrays have to be pulled, or that comes behind one; False: it is to be taken now."""
        arrivals = lane.arrivals
        if arrivals is None:
            carrier = self.carrier
            if carrier is None or not carrier.must_pull(buffers):
                return False
            arrivals = lane.arrivals = Arrivals(
                carrier.must_pull,
                lambda seq, frames: self._pull(lane, seq, frames),
                lambda head, frames: self._take_opened(lane, head, frames),
            )
        return arrivals.keeps(header, buffers)

    def _take_opened(self, lane: PeerLane, header: Header, buffers: Buffers) -> None:
        opened = self.opened(buffers, lane.link.peer)  # those of this host, in a message that had to wait
        if opened is not None:
            self.take(lane, header, opened)

    def _pull(self, lane: PeerLane, seq: int, buffers: Buffers) -> Opening | None:
        peer, carrier = lane.link.peer, self.carrier
        assert carrier is not None  # noqa: S101  # it is who said that data must be pulled
        try:
            return carrier.open_later(buffers, peer.reach, lambda opening: self._arrived(lane, seq, opening))
        except CodecError as error:
            self._lost_arrays(peer, error)
            return None

    def _arrived(self, lane: PeerLane, seq: int, opening: Opening) -> None:
        """Take what was pulled. On the thread of bulk data."""
        with gate, self.reactor.lock:
            if self.closed or lane.arrivals is None:
                return
            buffers: Buffers | None = None
            try:
                buffers = opening.result()
            except CodecError as error:
                self._lost_arrays(lane.link.peer, error)
            lane.arrivals.arrived(seq, opening, buffers)
        self.reactor.wake()  # whoever leads looks at once whether it has what it waits for

    def forget_memory(self, peer: Peer) -> None:
        """Drop what is kept of the memory of a peer that is gone. May look at files: not under the lock."""
        if self.carrier is not None:
            self.carrier.forget(peer.reach)

    def cancel(self, placed: Placed) -> None:
        """Ask that a batch should not run. Every call of it still gets exactly one outcome."""
        with gate, self.reactor.lock:
            now = self.clock.monotonic_ns()
            for peer, seq in zip(placed.members, placed.seqs, strict=True):
                lane = self._lane(peer, placed.lane)
                self.execute(lane, lane.machine.cancel(seq, now))
                lane.link.channel.check()
        self.reactor.wake()

    def consumed(self, placed: Placed, upto: int) -> None:
        """Give a stream credit: the user took all its items below ``upto``."""
        with gate, self.reactor.lock:
            lane = self._lane(placed.members[0], placed.lane)
            self.execute(lane, lane.machine.consumed(placed.seqs[0], upto))
            lane.link.channel.check()

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``done()``, driving the sockets meanwhile; False if the time ran out first."""
        return self.reactor.drive(done, timeout_s)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say BYE, settle what is open, close all sockets. Idempotent; never waits for a peer."""
        with gate, self.reactor.lock:
            if self.closed:
                return
            self.closed = True
            self.soon.send_all()
            for peer in self._peers:
                for link in peer.links.values():
                    if link.machine.state is LinkState.READY:
                        link.channel.send(Header(Kind.BYE, self.session, self.epoch, peer.incarnation, link.name))
                self._settle(peer, "shutdown", "this controller closed")
            for peer in self._peers:
                for link in peer.links.values():
                    link.channel.close()
            self._peers.clear()
        self.reactor.close()

    def count(self, what: str) -> None:
        """Count something refused or dropped. Under the lock."""
        self.counters[what] = self.counters.get(what, 0) + 1

    def keep_counts(self, counts: Mapping[str, int]) -> None:
        """Add what a connection that is about to be closed has counted. Under the lock."""
        for reason, number in counts.items():
            self.counters[reason] = self.counters.get(reason, 0) + number

    def statistics(self) -> dict[str, int]:
        """Return counters: refused messages by kind, retransmissions, probes, parked messages."""
        with gate, self.reactor.lock:
            totals = dict(self.counters)
            for peer in self._peers:
                for link in peer.links.values():
                    for reason, number in link.counts().items():
                        totals[reason] = totals.get(reason, 0) + number
            return totals

    def load(self) -> dict[str, float]:
        """Return what is under way: ``open`` requests, those that wait for ``credit`` and the least credit of any lane.

        ``credit`` counts calls that may still be placed before a lane's window is full, ``out_mib`` is what was sent
        and not answered.
        """
        with gate, self.reactor.lock:
            lanes = [
                lane.machine for peer in self._peers for link in peer.links.values() for lane in link.lanes.values()
            ]
            load: dict[str, float] = {
                "open": sum(lane.outstanding for lane in lanes),
                "waiting": sum(lane.waiting for lane in lanes),
                "out_mib": round(sum(lane.bytes_out for lane in lanes) / (1 << 20), 3),
            }
            if lanes:
                load["credit"] = min(lane.credit for lane in lanes)
            return load

    # -- inside --------------------------------------------------------------------------------------------------

    def execute(self, lane: PeerLane, effects: Sequence[Effect], *, placing: bool = False) -> None:
        """Do what a lane's machine asks; ``placing``: of a request that is being placed. Under the lock.

        What takes an outcome and raises costs nobody else theirs: it is logged and counted.
        """
        for effect in effects:
            if type(effect) is SendTo:
                lane.link.channel.send(effect.header, effect.buffers)
                if self.on_sent is not None and effect.header.kind == _REQ and not placing:
                    self.on_sent(lane.link.peer, effect.header)
                continue
            try:
                self._tell(lane, effect)
            except Exception as error:  # noqa: BLE001  # see above
                self.not_heard(lane, error)
            if lane.wanted:
                self._make_room(lane)

    def _tell(self, lane: PeerLane, effect: Effect) -> None:
        if type(effect) is Finish:
            lane.waiters.finish(effect if not lane.arrivals else _without(lane, effect))
        elif type(effect) is Results:
            lane.waiters.results(effect)
        elif type(effect) is Chunk:
            lane.waiters.chunk(effect)
        elif type(effect) is Poised:
            holds = lane.gangs.get(effect.seq)
            if holds is not None:
                holds()

    def _make_room(self, lane: PeerLane) -> None:
        """Tell those who found a lane crowded, if there is room again, or nobody who would make any."""
        if lane.machine.roomy or lane.link.peer.state is PeerState.DEAD:
            lane.wanted = False
            for watcher in tuple(self._room_watchers):
                try:
                    watcher()
                except Exception as error:  # noqa: BLE001  # as in ``execute``
                    self.not_heard(lane, error)

    def not_heard(self, lane: PeerLane, error: Exception) -> None:
        """Log and count what raised when it was told of a lane. Under the lock."""
        self.count("failed_listeners")
        where = (lane.machine.lane, lane.link.peer.name)
        log.error("what takes the outcomes of lane %s of %s raised", *where, exc_info=error)

    def _stop_waiting(self, peer: Peer) -> None:
        """Tell those who wait for room in the lanes of a dead peer: calls given up before have no end to tell them."""
        for lane in peer.lanes.values():
            if lane.wanted:
                self._make_room(lane)

    def _gang(self, members: Sequence[Peer], lane_name: str, sink: Sink, deadline_ns: int | None) -> Sink:
        """Make the next request of each member's lane start together; return the sink to place it with."""
        lanes = [self._lane(peer, lane_name) for peer in members]
        for lane in lanes:
            self.soon.send(lane)
        seqs = [lane.machine.next_seq for lane in lanes]
        gang = Gang([lane.machine for lane in lanes], seqs, [str(peer.name) for peer in members], deadline_ns)

        def take(steps: Sequence[Step]) -> None:
            if gang.released or gang.over:
                for lane, seq in zip(lanes, seqs, strict=True):
                    lane.gangs.pop(seq, None)
            for member, effects in steps:
                self.execute(lanes[member], effects)
                self.reactor.note_due(lanes[member].machine.due_ns)

        def ended(member: int, call: int, outcome: Outcome) -> None:
            sink(member, call, outcome)
            if not gang.released and not gang.over:
                take(gang.ended(member, outcome, self.clock.monotonic_ns()))

        for index, (lane, seq) in enumerate(zip(lanes, seqs, strict=True)):
            lane.gangs[seq] = lambda index=index: take(gang.poised(index, self.clock.monotonic_ns()))  # type: ignore[misc]
        return ended

    def _lane(self, peer: Peer, name: str) -> PeerLane:
        link = peer.links.get("ctl" if name == "ctl" else "main") or peer.links["ctl"]
        lane = link.lanes.get(name)
        if lane is None:
            machine = CallerLane(self.session, self.epoch, peer.incarnation, name, timing=self._timing)
            lane = link.lanes[name] = peer.lanes[name] = PeerLane(machine, link)
            if link.machine.state is LinkState.DEAD:
                machine.on_dead(peer.reason, peer.evidence)
            elif link.machine.state is LinkState.READY:
                machine.round_trip(link.took_ns)
                machine.on_connected(0, self.clock.monotonic_ns())
        return lane

    def _settle(self, peer: Peer, reason: str, evidence: str, journal: JournalReport | None = None) -> None:
        now = self.clock.monotonic_ns()
        for link in peer.links.values():
            if journal is not None and link.machine.state is not LinkState.DEAD:
                link.channel.drain()  # answers that came before the end count
            if link.machine.dead(now, reason, evidence):
                link.channel.clear_outbox()
                for lane in link.lanes.values():
                    peer.had_calls = peer.had_calls or (bool(lane.waiters) and lane.machine.lane != "ctl")
                    name = lane.machine.lane
                    history = None if journal is None or name == "ctl" else journal.lane(self.session, name)
                    self.execute(lane, lane.machine.on_dead(reason, evidence, history))
        peer.refresh()
        self._stop_waiting(peer)

    def _tick(self, now: int) -> int:
        due = _NEVER
        for peer in self._peers:
            for link in peer.links.values():
                machine = link.machine
                if machine.hello_due <= now:
                    link.say_hello(now)
                if machine.redial_due <= now:
                    link.redial()
                due = min(due, machine.hello_due, machine.redial_due)
                for lane in link.lanes.values():
                    if lane.machine.due_ns <= now:
                        self.execute(lane, lane.machine.on_timer(now))
                    due = min(due, lane.machine.due_ns)
        return due

    def takes(self, peer: Peer) -> bool:
        """Tell whether calls that travel together may be sent to a peer now. Under the lock."""
        return peer.state is _READY and peer.joins and not self.closed

    def lanes(self) -> list[PeerLane]:
        """Return all lanes. Under the lock."""
        return [lane for peer in self._peers for lane in peer.lanes.values()]

    def _check_open(self) -> None:
        if self.closed:
            msg = "this bus is closed"
            raise TransportError(msg)

    def _refusal(self, members: Sequence[Peer]) -> Unavailable:
        """Make the error of a placement that some member is not ready for; a closed bus raises its own."""
        self._check_open()
        return _unavailable(members)


def _without(lane: PeerLane, effect: Finish) -> Finish:
    """Return the end of a call whose answer may have come without its arrays, which are then wanted no more."""
    opening = None if lane.arrivals is None else lane.arrivals.over(effect.seq)
    if opening is None:
        return effect
    opening.cancel()
    where = ", ".join(lane.link.peer.reach.data)
    words = f"executed; its answer had come, but not the {opening.total:,} bytes of its arrays from {where}"
    outcome = effect.outcome
    if outcome.reason != "deadline" and outcome.evidence:  # what else is known by then is of the time before the answer
        words = f"{outcome.evidence}; {words}"
    return effect._replace(outcome=outcome._replace(evidence=words))


def _unavailable(members: Sequence[Peer]) -> Unavailable:
    late = [peer for peer in members if peer.state is not PeerState.READY]
    names = ", ".join(f"{peer.name} is {peer.state.value}" for peer in late)
    first = late[0]
    return Unavailable(
        f"nothing was sent: {names}",
        role=first.name.role,
        rank=first.name.rank,
        outcome=OutcomeKind.NOT_EXECUTED.value,
        reason=first.reason or "not_ready",
        facts={str(peer.name): f"{peer.state.value}: {peer.evidence}".rstrip(": ") for peer in late},
    )
