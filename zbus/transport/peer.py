"""One incarnation of a worker as a calling session sees it: its connections, its lanes, how ready it is.

What a ``client.Client`` has many of. Everything happens under the client's lock, but for what says otherwise.
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgpack

from zbus.errors import TransportError
from zbus.ids import WorkerName
from zbus.protocol.caller import CallerLane
from zbus.protocol.frames import FrameError, VersionMismatch
from zbus.protocol.liveness import LinkMachine, LinkState
from zbus.protocol.messages import PROTOCOL_VERSION, Buffer, Buffers, Header, Kind, Status
from zbus.transport.arrivals import Arrivals
from zbus.transport.carrier import NOWHERE, Reach
from zbus.transport.channel import Channel
from zbus.transport.interrupts import gate
from zbus.transport.waiters import Waiters

if TYPE_CHECKING:
    from zbus.transport.client import Client
    from zbus.transport.soon import Awaited

__all__ = ["Exchange", "Link", "Peer", "PeerLane", "PeerState"]

log = logging.getLogger("zbus.client")

Exchange = tuple[int, int, int, int]
"""When we asked, when the other got it, when it answered, when we got that; each on its own monotonic clock, in ns."""


class PeerState(enum.Enum):
    """State of a worker as one session sees it: the least ready of its connections."""

    CONNECTING = "connecting"
    HANDSHAKING = "handshaking"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


_READY: Final = PeerState.READY
_STATE_OF: Final = {link: PeerState(link.value) for link in LinkState}
_RANK: Final = {
    PeerState.READY: 0,
    PeerState.HANDSHAKING: 1,
    PeerState.CONNECTING: 2,
    PeerState.SUSPECT: 3,
    PeerState.DEAD: 4,
}


class PeerLane:
    """One lane of a peer: its machine, and who waits for which seq."""

    __slots__ = ("arrivals", "gangs", "link", "machine", "pile", "piled_ns", "waiters", "wanted")

    def __init__(self, machine: CallerLane, link: Link) -> None:
        self.machine = machine
        self.link = link
        self.waiters = Waiters()
        self.arrivals: Arrivals | None = None  # answers whose arrays are on their way
        self.pile: list[tuple[Buffers, int | None, Awaited]] = []  # calls that leave together; see ``soon``
        self.piled_ns = 0  # since when there is a pile
        self.wanted = False  # somebody found it crowded, or was about to look
        self.gangs: dict[int, Callable[[], None]] = {}  # told that the callee holds the request and waits for GO


class Link:
    """One DEALER to one of a peer's sockets (``main`` or ``ctl``)."""

    def __init__(self, client: Client, peer: Peer, name: str, endpoints: Sequence[str]) -> None:
        self.client = client
        self.peer = peer
        self.name = name
        # One address only: a DEALER deals round robin over several, which would tear the order of a lane.
        self.endpoint = endpoints[0]
        self.took_ns = -1  # the last handshake, there and back
        self.machine = LinkMachine(client.clock.monotonic_ns(), jitter=random.random())  # noqa: S311  # no secret
        self.lanes: dict[str, PeerLane] = {}
        self.channel = self._dial()

    def _dial(self) -> Channel:
        client = self.client
        socket, monitor = client.factory.monitored_dealer("main" if self.name == "main" else "ctl")
        channel = Channel(
            client.reactor, socket, self.on_message, router=False, monitor=monitor, events=self, on_bad=self.on_bad
        )
        try:
            client.factory.connect(socket, self.endpoint)
        except BaseException:
            channel.close()
            raise
        return channel

    def redial(self) -> None:
        """Connect by a socket of its own making, where libzmq has given up the old one; see ``protocol.liveness``.

        Where there is none left, the old one stays, and it is tried again when dialling is due again.
        """
        machine, old = self.machine, self.channel
        if machine.redials == 0:
            log.warning("%s is not reached: %s; dialling %s again", self.peer.name, machine.evidence, self.endpoint)
        old.drain()
        try:
            made = self._dial()
        except (TransportError, OSError) as error:
            log.warning("%s cannot be dialled again yet: %s", self.peer.name, error)
            self.client.count("redials_failed")
            machine.redial_failed(self.client.clock.monotonic_ns())
            return
        self.client.keep_counts(old.counts())
        self.client.count("redials")
        old.close()
        self.channel = made
        machine.redialled()

    def counts(self) -> dict[str, int]:
        """Return what was sent again, asked about, refused and dropped on this link."""
        machines = [lane.machine for lane in self.lanes.values()]
        counts = self.channel.counts()
        counts["retransmissions"] = sum(machine.retransmissions for machine in machines)
        counts["probes"] = sum(machine.probes for machine in machines)
        strays = sum(machine.strays for machine in machines)
        return {**counts, "stray_answers": strays} if strays else counts

    def on_link_up(self) -> None:
        """Introduce the session on a connection that is there."""
        if self.machine.state is LinkState.DEAD:  # one that came back after it was given up: nobody asks it anything
            self.client.count("dead_peer_back")
            return
        now = self.client.clock.monotonic_ns()
        self.machine.link_up(now)
        self.say_hello(now)
        self.peer.refresh()

    def on_link_down(self, why: str) -> None:
        """Hold back what would be sent, until the next one."""
        self.machine.link_down(self.client.clock.monotonic_ns(), why)
        self.client.reactor.note_due(self.machine.redial_due)
        self.channel.clear_outbox()
        for lane in self.lanes.values():
            lane.machine.on_disconnected()
        self.peer.refresh()

    def on_link_retried(self) -> None:
        """Note that the transport tries again by itself."""
        self.machine.retrying()

    def say_hello(self, now: int) -> None:
        """Introduce the session; repeated by the timer until a WELCOME comes."""
        client = self.client
        body = msgpack.packb(
            {
                "role": self.peer.name.role,
                "rank": self.peer.name.rank,
                "link": self.name,
                "from": client.name,
                "protocol": PROTOCOL_VERSION,
                **(client.carrier.reach if client.carrier is not None else NOWHERE).facts(),
                "t": now,
            }
        )
        self.channel.send(Header(Kind.HELLO, client.session, client.epoch, self.peer.incarnation, self.name), (body,))
        self.machine.hello_sent(now)
        client.reactor.note_due(self.machine.hello_due)

    def on_bad(self, error: FrameError, _peer: bytes) -> None:
        """Give up a peer that speaks another version."""
        if isinstance(error, VersionMismatch):
            self.client.declare_dead(self.peer, reason="protocol", evidence=str(error))

    def on_message(self, header: Header, buffers: Sequence[Buffer], _peer: bytes) -> None:
        """Take one message: about a call to its lane, about the session here."""
        client = self.client
        kind = header.kind
        if header.session != client.session:
            client.count("foreign_session")
        elif kind not in _ABOUT_SESSIONS or (kind == Kind.NACK and header.status not in _REFUSALS):
            lane = self.lanes.get(header.lane)
            if lane is None or header.incarnation != self.peer.incarnation:
                client.count("foreign_lane")
                return
            plain = (
                len(buffers) <= 1 or header.calls > 1
            )  # several frames of several calls are their bodies, not arrays
            if (lane.arrivals or not plain) and client.arrives_later(lane, header, buffers):
                return
            opened = buffers if plain else client.opened(buffers, self.peer)
            if opened is not None:
                client.take(lane, header, opened)
        elif kind == Kind.WELCOME:
            self._on_welcome(buffers)
        elif kind == Kind.PONG:
            self._on_pong(buffers)
        elif kind == Kind.PING:  # it asks whether its place is still its own
            if header.incarnation == self.peer.incarnation and self.machine.state is not LinkState.DEAD:
                self.channel.send(header._replace(kind=Kind.PONG))
        elif kind != Kind.NACK:
            client.count("unexpected")
        elif (header.incarnation, header.epoch) == (self.peer.incarnation, client.epoch):
            self._on_refusal(header)
        else:  # the echo of a message that was not meant for this incarnation
            client.count("foreign_refusal")

    def _on_welcome(self, buffers: Sequence[Buffer]) -> None:
        now = self.client.clock.monotonic_ns()
        try:
            welcome = msgpack.unpackb(buffers[0])
            cursors = dict(welcome["lanes"])
            name = (welcome["role"], welcome["rank"])
        except Exception:  # anything but a well-formed WELCOME is junk from the peer: counted, ignored  # noqa: BLE001
            self.client.count("bad_welcome")
            return
        if name != self.peer.name:
            self.client.declare_dead(
                self.peer, reason="protocol", evidence=f"{name[0]}/{name[1]} answers at the address of {self.peer.name}"
            )
            return
        again = not self.machine.welcomed(now)
        self.peer.welcome.update(welcome)
        self.peer.reach = Reach.told(welcome)
        self.peer.joins = welcome.get("joins") is True
        asked, met = welcome.get("t_hello"), welcome.get("t")
        if type(asked) is int and type(met) is int and 0 < asked <= now:
            self.client.on_exchange(self.peer, (asked, met, met, now))
            self.took_ns = now - asked
            for lane in self.lanes.values():
                lane.machine.round_trip(self.took_ns)
        if not again:
            for lane in self.lanes.values():
                self.client.execute(lane, lane.machine.on_connected(int(cursors.get(lane.machine.lane, 0)), now))
        self.peer.refresh()

    def _on_pong(self, buffers: Sequence[Buffer]) -> None:
        now = self.client.clock.monotonic_ns()
        try:
            asked, (met, left) = msgpack.unpackb(buffers[0]), msgpack.unpackb(buffers[1])
            self.client.on_exchange(self.peer, (int(asked), int(met), int(left), now))
        except Exception:  # as of a WELCOME  # noqa: BLE001
            self.client.count("bad_pong")

    def _on_refusal(self, header: Header) -> None:
        if header.status == Status.NO_SESSION:
            if not self.machine.up:  # said on a connection that is gone
                return
            now = self.client.clock.monotonic_ns()
            self.machine.link_down(now, "the worker no longer knows this session")
            self.machine.link_up(now)
            for lane in self.lanes.values():
                lane.machine.on_disconnected()
            self.say_hello(now)
            self.peer.refresh()
            return
        evidence = {
            Status.FENCED_EPOCH: f"it obeys controller epoch {header.floor}, this one is {header.epoch}",
            Status.FENCED_INCARNATION: "another incarnation answers at its address",
            Status.DRAINING: "it is shutting down",
        }.get(Status(header.status), "it refused the session")
        reason = "superseded" if header.status == Status.FENCED_EPOCH else "fenced"
        self.client.declare_dead(self.peer, reason=reason, evidence=evidence)


_ABOUT_SESSIONS: Final = frozenset(map(int, (Kind.WELCOME, Kind.NACK, Kind.PING, Kind.PONG, Kind.BYE)))
_REFUSALS: Final = (Status.NO_SESSION, Status.FENCED_EPOCH, Status.FENCED_INCARNATION, Status.DRAINING)


class Peer:
    """One incarnation of one worker (or agent), as this session sees it. Read from any thread.

    Attributes:
        name: Role and rank.
        incarnation: Which start of it.
        state: See ``PeerState``.
        welcome: What the worker said of itself in its WELCOME (pid, host, …); empty before.
        reach: Where its arrays can be read, by the same word.
        joins: Whether it takes calls that travel together, by the same word.
        had_calls: Whether a call was out when the incarnation ended; its outcome tells of the end.
        lost: Why it is taken for dead although it may come back, and the evidence; None: it is not.
    """

    def __init__(self, client: Client, name: WorkerName, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.welcome: dict[str, Any] = {}
        self.reach = NOWHERE
        self.state = PeerState.CONNECTING
        self.had_calls = False
        self.joins = False
        self.lost: tuple[str, str] | None = None
        self._client = client
        self.links: dict[str, Link] = {}
        self.lanes: dict[str, PeerLane] = {}

    @property
    def evidence(self) -> str:
        """Why the peer is not READY, in words."""
        if self.lost is not None:
            return self.lost[1]
        return "; ".join(dict.fromkeys(link.machine.evidence for link in self.links.values() if link.machine.evidence))

    @property
    def reason(self) -> str:
        """Machine-readable cause of DEAD, or empty."""
        if self.lost is not None:
            return self.lost[0]
        return next((link.machine.reason for link in self.links.values() if link.machine.reason), "")

    def refresh(self) -> None:
        """Recompute ``state`` from the links and tell the client's listener of a change. Under the lock."""
        states = [_STATE_OF[link.machine.state] for link in self.links.values()]
        state = max(states, key=_RANK.__getitem__)
        if state is _READY or state is PeerState.DEAD:
            self.lost = None
        elif self.lost is not None:
            state = PeerState.DEAD
        if state is not self.state:
            self.state = state
            self._client.on_state(self, state)

    def whereabouts(self, lane: str, seq: int) -> str:
        """Say how far a placed call is, as far as is known here, such as ``running since 4.2 s``. Any thread."""
        with gate, self._client.reactor.lock:
            link = self.links["ctl" if lane == "ctl" or "main" not in self.links else "main"]
            found = link.lanes.get(lane)
            if found is None:
                return "not placed"
            return found.machine.whereabouts(seq, self._client.clock.monotonic_ns())

    def __repr__(self) -> str:
        return f"<Peer {self.name} {self.state.value}>"
