"""A network of ordered connections that lose, repeat, delay and break, and what may come out of a dead one.

Within one connection order holds, as in TCP, until it breaks. Two things are harsher than TCP: a message may vanish
from a living connection, and a copy of it may arrive at any later time, also after the connection is gone (a queue
inside libzmq can still hold it).
"""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING, Any

from zbus.protocol import frames
from zbus.protocol.messages import Buffers, Header, Kind, Status
from zbus.testing.simulation.knobs import MS

if TYPE_CHECKING:
    from zbus.testing.simulation.controller import SimLink
    from zbus.testing.simulation.worker import SimWorker
    from zbus.testing.simulation.world import World

__all__ = ["Connection", "Network"]


_LAST_WORDS = (Kind.RESULT, Kind.FAILURE, Kind.END)


class Connection:
    """One connection of a caller's link to a worker; ``peer`` is its routing id."""

    __slots__ = ("alive", "blocked", "full", "last", "link", "parked", "peer", "worker")

    def __init__(self, link: SimLink, worker: SimWorker, peer: bytes) -> None:
        self.link = link
        self.worker = worker
        self.peer = peer
        self.alive = True
        self.last = [0, 0]  # when the last message arrives: at the caller, at the worker
        self.blocked = [0, 0]  # nothing arrives before
        self.full = [0, 0]  # nothing more can be sent before: it is parked
        self.parked: list[list[tuple[Header, Buffers]]] = [[], []]

    def __repr__(self) -> str:
        return f"connection {int.from_bytes(self.peer, 'big')}"


class Network:
    """All connections of one run."""

    __slots__ = ("_made", "_world", "by_peer", "last_words", "sent")

    def __init__(self, world: World) -> None:
        self._world = world
        self._made = 0
        self.sent = 0  # messages, counted where there is a script
        self.last_words = 0  # outcomes told by workers, counted where there are no faults
        self.by_peer: dict[bytes, Connection] = {}

    def connect(self, link: SimLink, worker: SimWorker) -> Connection:
        """Make a connection between a link and a living worker."""
        self._made += 1
        peer = self._made.to_bytes(5, "big")
        connection = self.by_peer[peer] = Connection(link, worker, peer)
        connection.blocked[0] = worker.blocked[0]
        connection.blocked[1] = worker.blocked[1]
        return connection

    def send(self, connection: Connection | None, side: int, header: Header, buffers: Buffers) -> None:
        """Send a message to ``side`` (0 the caller, 1 the worker)."""
        world = self._world
        covered = world.covered
        covered[header.kind, header.status] += 1
        if not world.faulty and header.kind in _LAST_WORDS:
            self.last_words += header.calls
        if connection is None or not connection.alive:
            covered["unroutable"] += 1
            return
        knobs = world.knobs
        if world.script is not None and self._scripted(connection, side, header, buffers):
            return
        now = world.now
        if connection.full[side] > now or connection.parked[side]:
            if not connection.parked[side]:
                world.at(connection.full[side], self._unpark, connection, side)
            connection.parked[side].append((header, buffers))
            covered["fault", "parked"] += 1
            return
        message: Any = frames.encode(header, buffers) if knobs.wire else (header, buffers)
        when = now + knobs.delay
        if knobs.jitter:
            when += int(world.random() * knobs.jitter)
        if world.faulty:
            if knobs.duplicate and world.random() < knobs.duplicate:
                covered["fault", "duplicate"] += 1
                late = when + int(world.random() ** 3 * 400 * MS)
                heappush(world.heap, (late, world.next_number(), self._arrive, (connection, side, message, True)))
            if knobs.loss and world.random() < knobs.loss:
                covered["fault", "loss"] += 1
                if world.story is not None:
                    world.tell(f"lost on {connection}: {_words(header)}")
                return
        when = max(when, connection.last[side], connection.blocked[side])
        connection.last[side] = when
        heappush(world.heap, (when, world.next_number(), self._arrive, (connection, side, message, False)))

    def _scripted(self, connection: Connection, side: int, header: Header, buffers: Buffers) -> bool:
        """Do what the script says of this message; whether that was all of it."""
        world = self._world
        self.sent += 1
        fault = (world.script or {}).get(self.sent - 1)
        if fault is None:
            return False
        world.covered["scripted", fault] += 1
        if fault in {"copy", "late copy"}:
            when = world.now + (2 if fault == "copy" else 400) * MS
            message: Any = frames.encode(header, buffers) if world.knobs.wire else (header, buffers)
            heappush(world.heap, (when, world.next_number(), self._arrive, (connection, side, message, True)))
            return False
        if fault == "break":
            world.after(0, world.cut, connection.link, "the connection was lost")
            return False
        if fault == "crash":
            world.crash(connection.worker)
        return True

    def broke(self, connection: Connection) -> None:
        """Break a connection: nothing more is sent on it, and what was parked never is."""
        connection.alive = False
        connection.parked = [[], []]

    def _unpark(self, connection: Connection, side: int) -> None:
        """The queue has room again: send what was parked, in order."""
        parked, connection.parked[side] = connection.parked[side], []
        sender: Any = connection.link.controller if side else connection.worker
        for header, buffers in parked:
            if sender.alive:
                self.send(connection, side, header, buffers)

    def _arrive(self, connection: Connection, side: int, message: Any, late: bool) -> None:  # noqa: FBT001  # event
        world = self._world
        if not connection.alive:
            if not late and world.random() >= world.knobs.ghost:
                world.covered["fault", "lost in a break"] += 1
                return
            world.covered["fault", "from a dead connection"] += 1
        node: Any = connection.worker if side else connection.link.controller
        if not node.alive:
            return
        if node.paused_until > world.now:
            heappush(
                world.heap, (node.paused_until, world.next_number(), self._arrive, (connection, side, message, late))
            )
            return
        if node.pace:
            node.inbox.append((connection, side, message, late))
            if len(node.inbox) == 1:
                world.at(max(world.now, node.busy_until), self._take_next, node)
            return
        self._deliver(node, connection, side, message, late)

    def _take_next(self, node: Any) -> None:
        """Let a slow process take its next message."""
        world = self._world
        if not node.alive:
            return
        if node.paused_until > world.now:
            world.at(node.paused_until, self._take_next, node)
            return
        node.busy_until = world.now + node.pace
        self._deliver(node, *node.inbox.popleft())
        if node.inbox:
            world.at(node.busy_until, self._take_next, node)

    def _deliver(self, node: Any, connection: Connection, side: int, message: Any, late: bool) -> None:  # noqa: FBT001
        world = self._world
        try:
            header, buffers = frames.decode(message) if world.knobs.wire else message
        except frames.FrameError:
            if not connection.worker.liar:
                raise
            return  # refused and counted, as the channel does
        if world.story is not None:
            world.tell(f"{node} gets {_words(header)} on {connection}{' (late copy)' if late else ''}")
        if side:
            connection.worker.on_message(connection, header, buffers)
        else:
            connection.link.on_message(header, buffers)


def _words(header: Header) -> str:
    status = f" {Status(header.status).name}" if header.status else ""
    span = f"{header.seq}" if header.calls == 1 else f"{header.seq}+{header.calls}"
    return f"{Kind(header.kind).name}{status} {header.lane}/{span} attempt {header.attempt} floor {header.floor}"
