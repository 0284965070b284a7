"""One incarnation of a worker: the same machine as ``zbus.transport.server``, and engine code that takes time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from zbus.protocol.callee import Callee
from zbus.protocol.joining import JoinedResults
from zbus.protocol.journal import RING, JournalReport, LaneRing, history
from zbus.protocol.messages import (
    Buffers,
    CancelRunning,
    Effect,
    Execute,
    Header,
    Kind,
    OutcomeKind,
    SendTo,
    Status,
    StreamCredit,
)
from zbus.testing.simulation.clocks import NodeClock
from zbus.testing.simulation.knobs import MS
from zbus.testing.simulation.ledger import Call, broken
from zbus.testing.simulation.rough import LARGE_BYTES, SimShelf, made_up

if TYPE_CHECKING:
    from zbus.testing.simulation.network import Connection
    from zbus.testing.simulation.world import World

__all__ = ["LANES", "SimWorker"]

LANES = {"main": 1, "ctl": 2, "side": 2}
"""Lanes of a simulated worker, with their concurrency."""

_EXPIRE_EVERY = 20 * MS
_SETTLE = 15 * MS
_TAKEOVER = 2 * MS
_STREAM_WINDOW = 2
_FLUSHED = 0.3
"""Share of the results of a batch behind which what is held leaves."""

_MOMENTS = ("", "before the mark of a start", "behind the mark of a start", "before the mark of an end", "behind it")


class _Running:
    """A request that runs."""

    __slots__ = ("acked", "calls", "cancelled", "held", "index", "items", "poisoned", "request", "sent", "waiting")

    def __init__(self, request: Execute, calls: list[Call]) -> None:
        self.request = request
        self.calls = calls
        self.index = 0
        self.poisoned = False
        self.cancelled = False
        self.items = 0
        self.sent = 0
        self.acked = 0
        self.waiting = False
        self.held: list[bytes] = []  # results that leave together: those of the calls before ``index``


class SimWorker:
    """One incarnation: callee machine, running calls, and when it dies."""

    __slots__ = (
        "_expire_armed",
        "address",
        "alive",
        "blocked",
        "busy_until",
        "byes",
        "callee",
        "clock",
        "crash_in",
        "crash_mark",
        "highest_epoch",
        "inbox",
        "incarnation",
        "joined",
        "liar",
        "marks",
        "pace",
        "paused_until",
        "running",
        "slot",
        "world",
    )  # fmt: skip

    def __init__(self, world: World, slot: int, start: int, address: int) -> None:
        self.world = world
        self.slot = slot
        self.address = address
        self.incarnation = start << 48 | slot << 8 | 7
        knobs = world.knobs
        self.callee = Callee(
            self.incarnation, LANES, window_calls=knobs.callee_window, guest_lanes=("ctl",),
            keep_bytes=knobs.keep_bytes, large_bytes=LARGE_BYTES, shelf=SimShelf(world.rough, knobs.shelf_room),
        )  # fmt: skip
        self.alive = True
        self.paused_until = 0
        self.blocked = [0, 0]
        self.crash_in = -1
        self.highest_epoch = 0
        self.running: dict[tuple[bytes, str, int], _Running] = {}
        self.byes: set[bytes] = set()
        self.marks: dict[tuple[bytes, str], list[int]] = {}
        self._expire_armed = False
        self.clock = NodeClock()
        self.pace = self.busy_until = 0
        self.inbox: deque[Any] = deque()
        self.joined = JoinedResults()
        self.crash_mark = 0  # it dies at this moment of the next call that comes to it: see ``_dies_at``
        self.liar = bool(knobs.lies) and slot == 0
        if self.liar:
            world.ledger.liars.add(self.incarnation)
        world.set_up_node(self)

    @property
    def now(self) -> int:
        """What this process's clock shows."""
        return self.clock.read(self.world.now)

    def __repr__(self) -> str:
        return f"worker {self.slot}.{self.incarnation >> 48}"

    def on_message(self, connection: Connection, header: Header, buffers: Buffers) -> None:
        """As the server."""
        kind = header.kind
        if self.callee.held_off and header.epoch >= self.callee.max_epoch:
            self.world.after(_SETTLE, self._resume)
        if kind == Kind.HELLO:
            self._on_hello(connection, header)
        elif kind == Kind.PONG:
            self.world.covered["PONG"] += 1
        elif kind == Kind.BYE:
            if connection.link.name == self.world.link_names[-1]:
                self.byes.add(header.session)
                self.do(self.callee.bye(header.session))
        else:
            self._cover(header)
            self.do(self.callee.receive(header, buffers, connection.peer, self.now))
            if header.budget_ms and self.callee.queued and not self._expire_armed:
                self._expire_armed = True
                self.world.after(_EXPIRE_EVERY, self._expire)

    def journal_report(self) -> JournalReport | None:
        """Return what the crash journal tells, as the agent reads it after the death."""
        if not self.world.knobs.journal:
            return None
        lanes = [history(session, lane, marks) for (session, lane), marks in self.marks.items()]
        return JournalReport(complete=True, lanes=lanes)

    def check_orphans(self) -> None:
        """Check what is kept of superseded controllers.

        A run ends while calls of the dead still run: what those hold back for a moment is kept in that moment.
        """
        self.paused_until = 0
        for running in tuple(self.running.values()):
            self._flush(running)
        superseded = {
            controller.session
            for controller in self.world.controllers
            if 0 < controller.epoch < self.highest_epoch and controller.session not in self.byes
        }
        self.world.ledger.check_orphans(self.incarnation, self.callee.orphans(), superseded)

    def _ring(self, request: Execute) -> LaneRing:
        marks = self.marks.get((request.session, request.lane))
        if marks is None:
            marks = self.marks[request.session, request.lane] = [0] * RING
        return LaneRing(marks, marks)

    def drain(self) -> None:
        """As the server: start nothing more."""
        if self.alive:
            self.world.covered["fault", "drain"] += 1
            self.do(self.callee.drain())

    def hold_off(self, lease: int) -> None:
        """As the server: start nothing until the lease is held again, or the controller is heard."""
        if self.alive:
            self.world.covered["fault", "hold off"] += 1
            self.do(self.callee.hold_off())
            self.world.after(lease, self._resume)

    def _resume(self) -> None:
        if self.alive and self.paused_until <= self.world.now:
            self.do(self.callee.resume(self.now))
        elif self.alive:
            self.world.at(self.paused_until, self._resume)

    def do(self, effects: list[Effect]) -> None:
        """Do what the machine asks, as the server; the process may die before any effect."""
        world = self.world
        for effect in effects:
            if self.crash_in >= 0:
                if self.crash_in == 0:
                    world.covered["fault", "crash between effects"] += 1
                    world.crash(self)
                    return
                self.crash_in -= 1
            kind = type(effect)
            if kind is SendTo:
                assert isinstance(effect, SendTo)
                if effect.header.status == Status.POISED:
                    header = effect.header
                    world.ledger.held(self.incarnation, header.session, header.lane, header.seq)
                self._send(effect)
            elif kind is Execute:
                self._begin(effect)  # type: ignore[arg-type]
            elif kind is CancelRunning:
                self._cancel(effect)  # type: ignore[arg-type]
            elif kind is StreamCredit:
                self._credit(effect)  # type: ignore[arg-type]
            if not self.alive:  # its script says that it dies here
                return
        self.callee.validate()

    def _send(self, send: SendTo) -> None:
        """As the server: short results of calls that came together wait a moment for each other."""
        header, world = send.header, self.world
        if world.knobs.joined and self.callee.joins(header.session, header.lane):
            if self.joined.add(send):
                if world.joining.random() < _FLUSHED:
                    self._flush_joined()
                else:
                    world.after(_TAKEOVER, self._flush_joined)
                return
            self._flush_joined()
            if self.joined.add(send):
                world.after(_TAKEOVER, self._flush_joined)
                return
        self._say(world.network.by_peer.get(send.peer or b""), header, send.buffers)

    def _flush_joined(self) -> None:
        if not self.alive or not len(self.joined):
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, self._flush_joined)
            return
        self.world.covered["results of several requests", min(len(self.joined), 3)] += 1
        send = self.joined.take()
        if send is not None:
            self._say(self.world.network.by_peer.get(send.peer or b""), send.header, send.buffers)

    def _say(self, connection: Connection | None, header: Header, buffers: Buffers) -> None:
        world = self.world
        if self.liar and world.faulty and world.rough.random() < world.knobs.lies:
            world.covered["fault", "lie"] += 1
            header, buffers = made_up(world.rough, header, buffers)
        world.network.send(connection, 0, header, buffers)

    def _dies_at(self, moment: int) -> bool:
        """Die at a moment of a call: before the mark of its start, behind it, behind its end, behind the mark of it."""
        if self.crash_mark != moment:
            return False
        self.crash_mark = 0
        self.world.covered["fault", f"crash {_MOMENTS[moment]}"] += 1
        self.world.crash(self)
        return True

    def _cover(self, header: Header) -> None:
        """Count which message meets a request in which state."""
        session = self.callee._sessions.get(header.session)  # noqa: SLF001  # the test kit may look inside
        lane = None if session is None else session.lanes.get(header.lane)
        run = None if lane is None else lane.runs.get(header.seq)
        state = "new" if run is None else run.state.value
        self.world.covered["meets", Kind(header.kind).name, state] += 1

    def _on_hello(self, connection: Connection, header: Header) -> None:
        world = self.world
        status, effects = self.callee.hello(header, self.now)
        if status is not Status.NONE:
            reply = header._replace(kind=Kind.NACK, status=status, floor=self.callee.max_epoch)
            self._say(connection, reply, ())
            return
        self.highest_epoch = max(self.highest_epoch, header.epoch)
        self.do(effects)
        if self.alive:
            reply = header._replace(kind=Kind.WELCOME, incarnation=self.incarnation)
            self._say(connection, reply, world.pack_cursors(self.callee.lane_cursors(header.session)))

    def _begin(self, request: Execute) -> None:
        if self.callee.held_off:
            broken("I7", f"{self} starts {request.lane}/{request.seq} while it holds off")
        calls = self.world.ledger.handed_out(self.incarnation, request, self.now)
        running = _Running(request, calls)
        self.running[request.session, request.lane, request.seq] = running
        self._start_call(running)

    def _start_call(self, running: _Running) -> None:
        world = self.world
        call = running.calls[running.index]
        if self._dies_at(1):
            return
        if world.knobs.refuses and world.random() < world.knobs.refuses:
            call.refused = True
            world.after(0, self._refuse, running)  # not amid the effects that begin calls behind it
            return
        if world.knobs.journal:
            call.marked = True
            self._ring(running.request).begin(call.key[3])
        if self._dies_at(2):
            return
        world.ledger.start(
            call,
            epoch=world.epoch_of(running.request.session) if running.index == 0 else 0,
            highest=self.highest_epoch,
            over=self._over(running.request.session),
            alone=LANES[running.request.lane] == 1,
        )
        if world.story is not None:
            world.tell(f"{self} starts {call!r}")
        if call.stream:
            running.items = int(world.random() * 6)
            running.sent = 0
        length = int(world.random() * world.knobs.run)
        if world.knobs.slow and world.random() < world.knobs.slow:
            length = length * 10 + 50 * MS
        world.after(length, self._step, running)
        if length > _TAKEOVER and running.index == 0 and running.request.lane == "main":
            world.after(_TAKEOVER, self._announce, running)

    def _refuse(self, running: _Running) -> None:
        """Say that a call could not be started, and go on behind it."""
        request = running.request
        if self.alive and self.running.get((request.session, request.lane, request.seq)) is running:
            self._answer(running, Kind.FAILURE, Status.NOT_STARTED, (b"why",))
            self._go_on(running, failed=True)

    def _announce(self, running: _Running) -> None:
        """As the server, once a call of the main lane turns out to be long."""
        request = running.request
        if self.alive and self.running.get((request.session, request.lane, request.seq)) is running:
            self.do(self.callee.announce("main"))

    def _over(self, session: bytes) -> str:
        if session in self.byes:
            return "BYE"
        return "the drain" if self.callee.draining else ""

    def _step(self, running: _Running) -> None:
        """Go on with a running call: the next item of a stream, or its end."""
        world = self.world
        if not self.alive or running.index == len(running.calls):  # it was stopped before
            return
        if self.paused_until > world.now:
            world.at(self.paused_until, self._step, running)
            return
        call = running.calls[running.index]
        request = running.request
        if call.stream and running.sent < running.items:
            if running.sent >= running.acked + _STREAM_WINDOW:
                running.waiting = True
                return
            number = running.sent
            running.sent += 1
            item = (b"%s#%d" % (call.token, number),)
            self.do(self.callee.chunk(request.session, request.lane, request.seq, number, item))
            world.after(world.knobs.delay, self._step, running)
            return
        self._end_call(running, call)

    def _end_call(self, running: _Running, call: Call) -> None:
        world = self.world
        failed = world.random() < world.knobs.app_error
        stopped = running.cancelled and world.knobs.cooperative
        failed = failed or stopped
        kind = OutcomeKind.APP_ERROR if failed else OutcomeKind.OK
        result = b"%s=%d" % (call.token, call.index)
        call.said = running.sent
        world.ledger.end(call, kind, result)
        if self._dies_at(3):
            return
        if world.knobs.journal:
            ring = self._ring(running.request)
            (ring.raised if failed else ring.end)(call.key[3])
        if self._dies_at(4):
            return
        if world.story is not None:
            world.tell(f"{self} ends {call!r} with {kind.value}")
        status = Status.STOPPED if stopped else Status.APP_ERROR if failed else Status.OK
        word = Kind.END if call.stream else Kind.FAILURE if failed else Kind.RESULT
        self._answer(running, word, status, (result,))
        self._go_on(running, failed=failed)

    def _go_on(self, running: _Running, *, failed: bool) -> None:
        """Come to the next call of a request, if there is one."""
        if running.request.strict and failed:
            running.poisoned = True
        while self.alive and running.index < len(running.calls):
            if running.cancelled and self.world.knobs.cooperative:
                self._answer(running, Kind.FAILURE, Status.CANCELLED, ())
                continue
            if not running.poisoned:
                self._start_call(running)
                return
            self._answer(running, Kind.FAILURE, Status.PREDECESSOR, ())

    def _answer(self, running: _Running, kind: Kind, status: Status, buffers: Buffers) -> None:
        request = running.request
        held = kind is Kind.RESULT and request.calls > 1 and request.lane == "main"  # as the server may
        if not held:
            self._flush(running)
        seq = request.seq + running.index
        running.index += 1
        over = running.index == len(running.calls)
        if over:
            del self.running[request.session, request.lane, request.seq]
        if held:
            running.held.append(bytes(buffers[0]))
            if over or self.world.random() < _FLUSHED:
                self._flush(running)
            else:
                self.world.after(_TAKEOVER, self._flush, running)
            return
        if self.alive:
            chunks = running.sent if kind is Kind.END else 0
            self.do(
                self.callee.finished(request.session, request.lane, seq, kind, status, buffers, self.now, chunks=chunks)
            )

    def _flush(self, running: _Running) -> None:
        """As the server: send the results of a batch that wait for their message."""
        if not self.alive or not running.held:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, self._flush, running)
            return
        request = running.request
        bodies, running.held = running.held, []
        first = request.seq + running.index - len(bodies)
        self.world.covered["results together", min(len(bodies), 3)] += 1
        self.do(self.callee.finished_together(request.session, request.lane, first, bodies, self.now))

    def _cancel(self, effect: CancelRunning) -> None:
        running = self.running.get((effect.session, effect.lane, effect.seq))
        self.world.covered["cancel of a running call"] += 1
        if running is not None:
            running.cancelled = True
            if self.world.knobs.cooperative:
                running.items = running.sent
                running.waiting = False
                self.world.after(0, self._step, running)
            elif running.waiting:
                running.waiting = False
                running.items = running.sent
                self.world.after(0, self._step, running)

    def _credit(self, effect: StreamCredit) -> None:
        running = self.running.get((effect.session, effect.lane, effect.seq))
        if running is not None:
            running.acked = max(running.acked, effect.acked)
            if running.waiting:
                running.waiting = False
                self.world.after(0, self._step, running)

    def _expire(self) -> None:
        self._expire_armed = False
        if not self.alive:
            return
        world = self.world
        if self.paused_until <= world.now:
            self.do(self.callee.expire(self.now))
        if self.callee.queued:
            self._expire_armed = True
            world.after(_EXPIRE_EVERY, self._expire)
