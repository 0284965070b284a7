"""What a group needs of whatever carries its calls: real connections, an in-process stand-in, or a test's fake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zbus.codec import Keep
from zbus.engine import EndpointSpec, Mesh
from zbus.ids import WorkerName
from zbus.protocol.messages import Buffers, Outcome

__all__ = [
    "ChunkSink",
    "Peer",
    "Placed",
    "Placer",
    "ResultsSink",
    "Roster",
    "Sink",
    "StaticRoster",
    "WorkerFacts",
    "is_crowded",
    "is_dead",
    "is_ready",
    "is_suspect",
    "loop_driver",
    "send_soon",
    "wake",
    "whereabouts",
]

Sink = Callable[[int, int, Outcome], None]
"""Called once per (member, call): quick, must not raise, must not call back into the placer."""

ResultsSink = Callable[[int, int, Sequence[bytes], int], None]
"""OK for consecutive calls at once: (member, first call, bodies, attempts). Same rules as ``Sink``."""

ChunkSink = Callable[[int, int, Buffers], None]
"""Called once per item of a stream, in order: (member, number, item). Same rules as ``Sink``."""

Placed = Any
"""Handle of what was placed: a placer's own business, passed back to ``cancel`` and ``consumed``."""


class Peer(Protocol):
    """One worker as the caller sees it."""

    @property
    def name(self) -> WorkerName:
        """Role and rank."""
        ...

    @property
    def incarnation(self) -> int:
        """Which start of the rank."""
        ...

    @property
    def state(self) -> Any:
        """An enum whose names include READY, SUSPECT and DEAD."""
        ...

    @property
    def evidence(self) -> str:
        """Why it is not READY, in words."""
        ...


def is_ready(peer: Peer) -> bool:
    """Tell whether calls may be placed on a peer now."""
    return bool(peer.state.name == "READY")


def is_dead(peer: Peer) -> bool:
    """Tell whether a peer is known to be gone."""
    return bool(peer.state.name == "DEAD")


def is_suspect(peer: Peer) -> bool:
    """Tell whether it is open what became of a peer: its connection was lost."""
    return bool(peer.state.name == "SUSPECT")


class Placer(Protocol):
    """Places calls and drives their completion. All methods may be called from any thread."""

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until ``done()`` or the timeout; return ``done()``."""
        ...

    def place(
        self,
        members: Sequence[Any],
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
        """Take ``count`` consecutive places in ``lane`` of every member, atomically; see ``transport.client.Client``.

        Raises:
            Unavailable: A member is not ready; nothing was placed.
        """
        ...

    def keeper(self, members: Sequence[Any], *, snapshot: bool) -> Keep | None:
        """Return what makes the frames of large arrays for a call of these members; None for frames as usual."""
        ...

    def cancel(self, placed: Placed) -> None:
        """Ask for the calls to be dropped; each still gets its outcome through the sink."""
        ...

    def consumed(self, placed: Placed, upto: int) -> None:
        """Give a stream credit: its items below ``upto`` were taken."""
        ...


@dataclass(frozen=True)
class WorkerFacts:
    """What is known of a worker, for error messages."""

    host: str | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    log_tail: Sequence[str] = ()
    crash_file: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    hint: str | None = None


class Roster(Protocol):
    """Who is in a role now. All methods may be called from any thread."""

    @property
    def role(self) -> str:
        """Name of the role."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Axes of the role."""
        ...

    def peers(self) -> Sequence[Any]:
        """Return the current incarnation of each rank, in rank order; its length is the world size."""
        ...

    def endpoints(self) -> Mapping[str, EndpointSpec]:
        """Return the endpoint table of the role's engine."""
        ...

    def facts(self, peer: Any) -> WorkerFacts:
        """Return what is known of one incarnation; may read files, never called under a lock."""
        ...

    def will_return(self, peer: Any) -> bool:
        """Tell whether a rank that is gone will be started again by policy."""
        ...


@dataclass
class StaticRoster:
    """A roster whose members are set by hand; the owner replaces ``members[rank]`` when a rank is restarted."""

    role: str
    mesh: Mesh
    members: list[Any]
    table: Mapping[str, EndpointSpec]

    def peers(self) -> Sequence[Any]:
        """Return the members."""
        return self.members

    def endpoints(self) -> Mapping[str, EndpointSpec]:
        """Return the table."""
        return self.table

    def facts(self, peer: Any) -> WorkerFacts:
        """Return what the peer said of itself."""
        welcome = getattr(peer, "welcome", {})
        return WorkerFacts(host=welcome.get("host"), pid=welcome.get("pid"))

    def will_return(self, peer: Any) -> bool:
        """Nobody restarts these."""
        return False


def whereabouts(placed: Placed, member: int, call: int) -> str:
    """Say in words how far a placed call is; empty where the placer cannot tell."""
    peer = placed.members[member] if hasattr(placed, "members") else None
    ask = getattr(peer, "whereabouts", None)
    return str(ask(placed.lane, placed.seqs[member] + call)) if ask is not None else ""


def is_crowded(placer: Placer, peers: Sequence[Any], lane: str) -> bool:
    """Tell whether a further call to these peers would only wait for room in a window; False where none has bounds."""
    ask = getattr(placer, "crowded", None)
    return ask is not None and bool(ask(peers, lane))


def room(placer: Placer) -> Callable[[Sequence[int], Any], Any] | None:
    """Return what makes arrays that are sent without a copy, from shape and dtype; None where there is none."""
    carrier = getattr(placer, "carrier", None)
    return None if carrier is None else carrier.empty


def loop_driver(placer: Placer) -> Any:
    """Return what an asyncio loop can attach to while it waits (``attach_loop``, ``detach_loop``), or None."""
    reactor = getattr(placer, "reactor", placer)
    return reactor if hasattr(reactor, "attach_loop") else None


def send_soon(placer: Placer) -> None:
    """Send what waits to leave with others, so that what is placed next comes behind it. Nothing where none does."""
    soon = getattr(placer, "soon", None)
    if soon is not None:
        soon.send_all()


def wake(placer: Placer) -> None:
    """Make waiting callers look again: something ended outside the placer's own rounds."""
    reactor = getattr(placer, "reactor", placer)
    if hasattr(reactor, "wake"):
        reactor.wake()
