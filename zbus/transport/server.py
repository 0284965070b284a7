"""The callee's sockets: who reads which, who runs what, and how an answer finds its way back.

Two ROUTERs are bound, ``main`` and ``ctl``. The *bus thread* owns ``ctl`` and answers even while the engine runs. The
*main thread* reads ``main`` itself (``run``), so a small call changes no thread; when a call runs longer than
``TAKEOVER_S``, the bus thread reads ``main`` too, until the call ends: arrivals are acknowledged, cancelled, fenced and
credited in a ten-minute step. Both go through one ``protocol.callee`` core under one lock.

Measured in ``docs/decisions/0003-who-drives-the-sockets.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgpack

from zbus import failpoints
from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.ids import WorkerName
from zbus.protocol.callee import Callee, Orphan
from zbus.protocol.frames import FrameError
from zbus.protocol.joining import JoinedResults
from zbus.protocol.messages import (
    PROTOCOL_VERSION,
    Buffer,
    Buffers,
    CancelRunning,
    Effect,
    Execute,
    Header,
    Kind,
    SendTo,
    Status,
    StreamCredit,
)
from zbus.transport.carrier import NOWHERE, Reach
from zbus.transport.channel import Channel
from zbus.transport.interrupts import gate
from zbus.transport.reactor import Reactor
from zbus.transport.shelf import ReplyShelf
from zbus.transport.sockets import SocketFactory

__all__ = ["TAKEOVER_S", "Server"]

log = logging.getLogger("zbus.server")

TAKEOVER_S: Final = 0.002
"""How long a call runs before the bus thread reads the main socket for it."""

_FLUSH_S: Final = 0.02
"""How long a result of a batch waits at most for the end of a long call behind it."""

_JOIN_NS: Final = 1_000_000
_JOIN_CALLS: Final = 16
"""The result of a call behind which others stand leaves with theirs when one ends so much later, or with so many: a
worker that dies takes along no more of them than a group may run once more at once (``zbus.retry.TokenBucket``).
Behind a call that turns out to be long the bus thread sends it, which needs the GIL for that."""

_AWAKE_S: Final = 0.1
_SLEEP_S: Final = 30.0
_EXPIRE_EVERY_NS: Final = 50_000_000
_MEMORIES: Final = 64
"""Sessions come and go (each look at the status is one): beyond so many, those that are over are forgotten."""

_NEVER: Final = 1 << 62
_JOINED: Final = int(Status.JOINED)
_ABOUT_SESSIONS: Final = frozenset(map(int, (Kind.HELLO, Kind.PING, Kind.PONG, Kind.BYE)))
_ASK_EVERY_NS: Final = 500_000_000
_SETTLE_NS: Final = 50_000_000
"""From a controller's first word to going on: what it has given up meanwhile comes right behind that word."""


Run = Callable[[Execute], None]
"""Runs one request of the main lane to its end, on the main thread."""

GiveUp = Callable[[Execute, BaseException], None]
"""Answers what is ``unanswered`` of a request that the main thread will not go on with, because of an exception."""


class _Held:
    """Results of a batch that wait for their message."""

    __slots__ = ("answered", "bodies", "index", "request")

    def __init__(self, request: Execute, answered: Callable[[int, Sequence[bytes]], None]) -> None:
        self.request = request
        self.answered = answered  # told of (first seq, bodies) before they leave
        self.index = 0  # number of the call whose body is the first
        self.bodies: deque[bytes] = deque()


class Server:
    """The bound side of a worker or an agent.

    Args:
        name: Role and rank (an agent's rank is its number).
        incarnation: This incarnation; callers that expect another are refused.
        factory: Socket factory.
        lanes: Lane name to concurrency. ``main`` runs on the main thread; any other is handed to ``dispatch``.
        dispatch: Called under the lock, on the bus thread or the main thread, with each request that does not run
            on the main thread; must hand it on, not run it.
        describe: Facts for WELCOME (pid, host, …): msgpack-able values.
        on_cancel: Told of each cancel of a running request, under the lock.
        on_credit: Told of each stream credit, under the lock.
        on_clock: Given what a caller of this epoch found out about the two clocks, as bytes, under the lock.
        guest_lanes: Lanes a guest may use; None for all.
        lease: Returns until when (monotonic ns) nobody else may have this callee's place; None: nobody ever may.
        contact_ns: With ``lease``: how long a word of the controller counts as much as the lease.
        keep_bytes: How much of large replies stays in memory until their callers have them; beyond it they go to files.
        on_fatal: Told, on the bus thread, of what ended that thread; without it nobody answers ``ctl`` any more.
    """

    def __init__(
        self,
        *,
        name: WorkerName,
        incarnation: int,
        factory: SocketFactory,
        lanes: Mapping[str, int],
        dispatch: Callable[[Execute], None],
        describe: Callable[[], Mapping[str, Any]] = dict,
        on_cancel: Callable[[CancelRunning], None] | None = None,
        on_credit: Callable[[StreamCredit], None] | None = None,
        on_clock: Callable[[bytes], None] | None = None,
        guest_lanes: Sequence[str] | None = ("ctl",),
        lease: Callable[[], int] | None = None,
        contact_ns: int = 0,
        keep_bytes: int = 256 << 20,
        on_fatal: Callable[[BaseException], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.clock = clock
        self._now = clock.monotonic_ns
        self.lock = threading.RLock()
        self._shelf = ReplyShelf()
        self.callee = Callee(
            incarnation, dict(lanes), guest_lanes=guest_lanes, keep_bytes=keep_bytes, shelf=self._shelf
        )
        self._factory = factory
        self._dispatch = dispatch
        self._describe = describe
        self._on_cancel = on_cancel
        self._on_credit = on_credit
        self._on_clock = on_clock
        self._lease = lease
        self._contact_ns = contact_ns
        self._on_fatal = on_fatal
        self._bus = Reactor(clock=clock, lock=self.lock, name="zbus-bus")
        self._main = Reactor(clock=clock, lock=self.lock, name="zbus-main")
        self._channels: dict[str, Channel] = {}
        self._link_of_lane: dict[str, str] = {}
        self._reaches: dict[bytes, Reach] = {}
        self._ready: deque[Execute] = deque()
        self._held: _Held | None = None
        self._joined = JoinedResults()
        self._joined_since = 0
        self._busy_since: int | None = None
        self._takeover = False
        self._bus_awake = False
        self._last_busy = 0.0
        self._stopping = False
        self._closing = False
        self._os_thread: threading.Thread | None = None
        self._runner = 0  # the thread in ``run``
        self._checking = False
        self._bus.add_ticker(self._tick)
        self._heard_ns = 0
        self._ask_ns = _NEVER
        self._alone = False

    # -- binding -------------------------------------------------------------------------------------------------

    def bind(self, link: str, endpoint: str) -> str:
        """Bind the ROUTER of ``link`` (``main`` or ``ctl``) and return the bound endpoint.

        Raises:
            TransportError: The address cannot be bound.
        """
        with self.lock:
            channel = self._channels.get(link)
            if channel is not None:
                return self._factory.bind(channel.socket, endpoint)
            socket = self._factory.router("main" if link == "main" else "ctl")
            bound = self._factory.bind(socket, endpoint)
            reactor = self._main if link == "main" else self._bus
            self._channels[link] = Channel(
                reactor,
                socket,
                partial(self._on_message, link),
                router=True,
                on_bad=lambda error, peer: self._on_bad(link, error, peer),
            )
            return bound

    def start(self) -> None:
        """Start the bus thread; ``ctl`` is answered from now on."""
        thread = threading.Thread(target=self._run_bus, name="zbus-bus", daemon=True)
        thread.start()
        self._os_thread = thread  # only one that runs: where no thread can be started, that is what shall be told

    @property
    def bus_thread(self) -> int:
        """Native id of the bus thread; 0 before ``start``."""
        return 0 if self._os_thread is None else self._os_thread.native_id or 0

    # -- the main thread -----------------------------------------------------------------------------------------

    def run(self, run: Run, give_up: GiveUp | None = None) -> None:
        """Serve the main lane on the calling thread until ``stop``. Requests run one at a time, in order.

        A signal handler may raise out of here between two calls; calling ``run`` again goes on.

        Args:
            run: Runs a request.
            give_up: Told of a request that what a signal handler raised has ended before all its calls were answered.
        """
        ready = self._ready
        main = self._main
        self._runner = threading.get_ident()
        while not self._stopping:
            while ready:
                request = ready[0]
                try:
                    self._begin_busy(self._now())  # not since it arrived: it may have stood behind others
                    ready.popleft()  # as late as can be: what a signal handler raises before leaves the request here
                    run(request)
                except BaseException as error:
                    if give_up is not None and not (ready and ready[0] is request):
                        with gate:  # what a second signal raises comes after it
                            give_up(request, error)
                    raise
                finally:
                    self._end_busy()
            if not self.stopping:
                main.once(_SLEEP_S)

    def stop(self) -> None:
        """Make ``run`` return after the current request. Any thread."""
        self._stopping = True
        self._main.wake()

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping

    # -- answers -------------------------------------------------------------------------------------------------

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        """Answer call number ``index`` of a request. Any thread.

        Args:
            request: As handed out.
            index: 0 … calls-1; each exactly once.
            kind: RESULT, FAILURE or END.
            status: How it ended.
            buffers: Encoded value or exception description.
            chunks: For END, how many items the stream had.
        """
        trap = failpoints.active if request.lane != "ctl" else None
        if trap is not None:
            trap("before_reply")
        with gate, self.lock:
            now = self._now()
            if self._lease is not None and now - self._heard_ns >= self._contact_ns:
                self._hold_off(now)
            held = self._held
            if held is not None and held.request is request:
                self._flush(now)
                held.index = index + 1
            lane = request.lane
            effects = self.callee.finished(
                request.session, lane, request.seq + index, kind, status, buffers, now, chunks=chunks
            )
            channel = self._channels.get(self._link_of_lane.get(lane, "main"))
            if len(effects) == 2 and self._joins(request, effects, now):  # its result, and what is next
                return
            if self._joined:
                self._send_joined()
            if channel is not None and len(effects) == 1 and type(effects[0]) is SendTo:  # as most end
                channel.send(*effects[0])
            else:
                self._do(effects)
            if channel is not None:
                channel.check()
        if trap is not None:
            trap("after_reply")

    def _joins(self, request: Execute, effects: Sequence[Effect], now: int) -> bool:
        """Begin what stands behind a call of the main thread, and let its result wait for the next one's if it may.

        Only where the caller sends calls together. The bus thread sends what waits once a call turns out to be long.
        """
        result, following = effects
        if request.lane != "main" or type(result) is not SendTo or type(following) is not Execute:
            return False
        if following.lane != "main" or failpoints.active is not None or not self.callee.joins(request.session, "main"):
            return False
        joined = self._joined
        if not joined:
            self._joined_since = now
        if not joined.add(result):
            return False
        self._ready.append(following)
        if len(joined) >= _JOIN_CALLS or now - self._joined_since >= _JOIN_NS:
            self._send_joined()
            self._check_after_send("main")
        return True

    def _send_joined(self) -> None:
        """Send the results that wait for each other."""
        result = self._joined.take()
        if result is not None:
            self._do((result,))

    def unanswered(self, request: Execute) -> list[int]:
        """Send what of a running request is held, and return which of its calls then have no answer. Main thread."""
        with gate, self.lock:
            self._flush(self._now())
            return self.callee.unanswered(request.session, request.lane, request.seq)

    def hold(self, request: Execute, answered: Callable[[int, Sequence[bytes]], None]) -> deque[bytes]:
        """Return where short results of a batch may be left instead of ``finish``, so that many leave in one message.

        The first one left there is of call number 0, the next of the next, and so on, where ``finish`` has its place
        among them. ``flush`` sends them, and so does the bus thread if a call turns out to be long. Main thread.

        Args:
            request: The batch.
            answered: Told of (first seq, bodies) before they leave. Under the lock.
        """
        held = self._held = _Held(request, answered)
        if self._takeover:  # the bus thread sleeps long where nothing is held
            self._bus.wake()
        return held.bodies

    def flush(self, *, over: bool = False) -> None:
        """Send what was left at ``hold``; ``over``: nothing more is left there. Main thread."""
        with gate, self.lock:
            self._flush(self._now())
            if over:
                self._held = None
            self._check_after_send("main")

    def _flush(self, now: int) -> None:
        # The main thread may append meanwhile, without the lock: what it adds is sent the next time.
        held = self._held
        if held is not None and held.bodies:
            self._send_joined()  # they ended before what is held: nothing of a batch leaves before them
            if self._lease is not None and now - self._heard_ns >= self._contact_ns:
                self._hold_off(now)
            request, bodies = held.request, [held.bodies.popleft() for _ in range(len(held.bodies))]
            first = request.seq + held.index
            held.index += len(bodies)
            held.answered(first, bodies)
            self._do(self.callee.finished_together(request.session, request.lane, first, bodies, now))

    def _flush_late(self) -> None:
        """Send what was held back before a call that turns out to be long. On the bus thread."""
        with self.lock:
            self._flush(self._now())
            self._send_joined()
            self._check_all()

    def reach_of(self, session: bytes) -> Reach:
        """Return what a session's process said of where its arrays are. Any thread."""
        return self._reaches.get(session, NOWHERE)

    def knows(self, session: bytes) -> bool:
        """Return whether a session's calls may still run or come; once False, that session is over. Any thread."""
        return self.callee.knows(session)

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        """Send item ``number`` of a stream. Any thread; the caller of this keeps to the credit."""
        with gate, self.lock:
            self._do(self.callee.chunk(request.session, request.lane, request.seq, number, buffers))
            self._check_after_send(request.lane)

    def open_lane(self, name: str, concurrency: int) -> None:
        """Declare a lane (an engine's endpoints bring theirs)."""
        with gate, self.lock:
            self.callee.open_lane(name, concurrency)

    def drain(self) -> None:
        """Start nothing more; queued requests end as not executed."""
        with gate, self.lock:
            self._send_joined()
            self._do(self.callee.drain())
            self._check_all()

    def orphans(self) -> list[Orphan]:
        """Return what superseded controllers left here; see ``protocol.callee.Orphan``."""
        with gate, self.lock:
            return self.callee.orphans()

    def adopt(self, session: bytes, lane: str, seq: int) -> Orphan | None:
        """Hand over one ended orphan and forget it."""
        with gate, self.lock:
            return self.callee.adopt(session, lane, seq)

    @property
    def running(self) -> int:
        """Number of requests running now."""
        with self.lock:
            return self.callee.running

    def parked(self) -> int:
        """Number of answers that wait for their peer."""
        with self.lock:
            return sum(channel.parked for channel in self._channels.values())

    def statistics(self) -> dict[str, int]:
        """Return counters of refused and dropped messages."""
        with gate, self.lock:
            totals = {f"dropped_{why}": number for why, number in self.callee.dropped.items()}
            for channel in self._channels.values():
                for why, number in channel.counts().items():
                    totals[why] = totals.get(why, 0) + number
            return totals

    def close(self) -> None:
        """Close the sockets and stop the bus thread. Never waits for a peer."""
        self._stopping = True
        self._closing = True
        self._bus.wake()
        if self._os_thread is not None and self._os_thread is not threading.current_thread():
            self._os_thread.join(5.0)
        with gate, self.lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            self._shelf.close()
        self._main.close()
        self._bus.close()

    def round_since(self) -> tuple[int, int] | None:
        """Return since when (monotonic ns) the bus thread handles what is ready, and its id; None while it waits."""
        since, thread = self._bus.round_ns, self._os_thread
        return (since, thread.ident) if since and thread is not None and thread.ident else None

    # -- the bus thread ------------------------------------------------------------------------------------------

    def _run_bus(self) -> None:
        try:
            self._serve_bus()
        except BaseException as error:
            if self._on_fatal is None:
                raise
            if not self._closing:
                self._on_fatal(error)

    def _serve_bus(self) -> None:
        bus = self._bus
        while not self._closing:
            busy_since = self._busy_since
            if busy_since is not None:
                if self.clock.monotonic_ns() - busy_since > TAKEOVER_S * 1e9:
                    if not self._takeover:
                        self._take_over(busy_since)
                    self._bus_awake = False  # the next call must wake this sleep, or nobody reads main for it
                    if self._takeover and self._held is not None:
                        bus.once(_FLUSH_S)
                        self._flush_late()
                    elif self._takeover:
                        bus.once(_SLEEP_S)
                    self._bus_awake = True
                else:
                    bus.once(TAKEOVER_S)
            elif time.monotonic() - self._last_busy < _AWAKE_S:
                bus.once(TAKEOVER_S)
            else:
                self._bus_awake = False
                if self._busy_since is None:  # asked again after the flag: a call that began meanwhile wakes us
                    bus.once(_SLEEP_S)
                self._bus_awake = True

    def _begin_busy(self, since_ns: int) -> None:
        self._busy_since = since_ns
        if not self._bus_awake:
            self._bus.wake()

    def _end_busy(self) -> None:
        self._busy_since = None
        self._last_busy = time.monotonic()
        if self._held is not None:  # a signal handler ended the request before its last call
            self.flush(over=True)
        if self._joined and not self._ready:  # likewise: what should have come behind it does not
            with gate, self.lock:
                self._send_joined()
                self._check_after_send("main")
        if self._takeover:
            with gate, self.lock:
                self._takeover = False
                self._bus.unregister(self._main.fileno())
                channel = self._channels.get("main")
                if channel is not None:
                    channel.take_all()

    def _take_over(self, since_ns: int) -> None:
        """Let the bus thread read ``main`` while the main thread is in a long call."""
        with self.lock:
            channel = self._channels.get("main")
            if self._busy_since != since_ns or channel is None:
                return
            self._takeover = True
            self._flush(self._now())
            self._send_joined()
            self._bus.register(self._main.fileno(), self._main_from_bus)
            channel.take_all()
            self._do(self.callee.announce("main"))
            channel.check()

    def _main_from_bus(self) -> None:
        channel = self._channels.get("main")
        if self._takeover and channel is not None:
            channel.take_all()
            channel.check()

    # -- fencing -------------------------------------------------------------------------------------------------

    def _hold_off(self, now: int) -> None:
        """Start nothing more where the lease is over and the controller silent: it may have replaced this callee."""
        if self._lease is not None and now >= self._lease() and not self.callee.held_off:
            self._ask_ns = now + _ASK_EVERY_NS
            self._do(self.callee.hold_off())
            self._bus.note_due(self._ask_ns)
            self._check_all()

    def _heard(self, now: int) -> None:
        """The controller is there: this is no time to wonder whether it has replaced this callee."""
        self._heard_ns = now
        if self.callee.held_off:
            self._ask_ns = min(self._ask_ns, now + _SETTLE_NS)
            self._bus.note_due(self._ask_ns)

    def _ask_again(self, now: int) -> None:
        """Go on if the lease is held again, or the controller was heard; else ask once more."""
        if self._lease is not None and now >= self._lease() and now - self._heard_ns >= self._contact_ns:
            if not self._alone:
                log.warning(
                    "%s starts nothing: its agent's lease is over and its controller does not answer", self.name
                )
            self._alone = True
            self._ask_ns = now + _ASK_EVERY_NS
            self._do(self.callee.ask_callers())
        else:
            if self._alone:
                log.warning("%s goes on: its place is still its own", self.name)
            self._alone = False
            self._ask_ns = _NEVER
            self._do(self.callee.resume(now))

    # -- messages ------------------------------------------------------------------------------------------------

    def _on_message(self, link: str, header: Header, buffers: Sequence[Buffer], peer: bytes) -> None:
        now = self._now()
        kind = header.kind
        if header.epoch >= self.callee.max_epoch and kind != Kind.HELLO:
            self._heard(now)
        if kind not in _ABOUT_SESSIONS:
            self._link_of_lane[header.lane] = link
            self._do(self.callee.receive(header, buffers, peer, now))
            if (header.budget_ms or header.status == _JOINED) and self.callee.may_queue:  # those have one each
                self._bus.note_due(now + _EXPIRE_EVERY_NS)
        elif kind == Kind.HELLO:
            self._on_hello(link, header, buffers, peer, now)
        elif kind == Kind.PING:
            self._on_ping(link, header, buffers, peer, now)
        elif kind == Kind.PONG:
            pass  # it was heard
        elif link == "ctl" or "ctl" not in self._channels:
            self._do(self.callee.bye(header.session))
            self._check_other(link)

    def _on_ping(self, link: str, header: Header, buffers: Sequence[Buffer], peer: bytes, now: int) -> None:
        """Say when it came and when the answer left; take what the caller found out."""
        stamps = msgpack.packb((now, self._now()))
        self._channels[link].send(header._replace(kind=Kind.PONG), (*buffers[:1], stamps), peer)
        if len(buffers) > 1 and self._on_clock is not None and self.callee.knows(header.session):
            self._on_clock(bytes(buffers[1]))

    def _on_hello(self, link: str, header: Header, buffers: Sequence[Buffer], peer: bytes, now: int) -> None:
        channel = self._channels[link]
        try:
            hello = msgpack.unpackb(buffers[0])
            wanted = (hello["role"], hello["rank"])
        except Exception:  # a HELLO that is not one: counted, the peer is not answered  # noqa: BLE001
            self.callee.dropped["bad_hello"] = self.callee.dropped.get("bad_hello", 0) + 1
            return
        status, effects = self.callee.hello(header, now)
        if wanted != self.name:
            status = Status.FENCED_INCARNATION
        if status is not Status.NONE:
            channel.send(header._replace(kind=Kind.NACK, status=status, floor=self.callee.max_epoch), (), peer)
            return
        self._remember_reach(header.session, Reach.told(hello))
        self._do(effects)
        if header.epoch:
            self._heard(now)
        welcome = {
            **self._describe(),
            "role": self.name.role,
            "rank": self.name.rank,
            "protocol": PROTOCOL_VERSION,
            "lanes": self.callee.lane_cursors(header.session),
            "joins": True,
            "t_hello": hello.get("t", 0),
            "t": now,
        }
        channel.send(header._replace(kind=Kind.WELCOME, incarnation=self.incarnation), (msgpack.packb(welcome),), peer)
        self._check_other(link)

    def _remember_reach(self, session: bytes, reach: Reach) -> None:
        if reach != NOWHERE:
            self._reaches[session] = reach
            if len(self._reaches) > _MEMORIES:
                self._reaches = {key: one for key, one in self._reaches.items() if self.callee.knows(key)}

    def _on_bad(self, link: str, error: FrameError, peer: bytes) -> None:
        """Tell a peer of another version so; it cannot know otherwise."""
        header = Header(Kind.NACK, bytes(16), 0, self.incarnation, link, status=Status.VERSION)
        self._channels[link].send(header, (str(error).encode(),), peer)

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is SendTo:
                lane = effect.header.lane
                channel = self._channels.get(self._link_of_lane.get(lane, "main")) or self._channels.get("ctl")
                if channel is not None:
                    channel.send(effect.header, effect.buffers, effect.peer)
            elif type(effect) is Execute:
                if effect.lane == "main":
                    self._ready.append(effect)
                    if self._busy_since is None and threading.get_ident() != self._runner:
                        self._main.wake()
                else:
                    self._dispatch(effect)
            elif type(effect) is CancelRunning:
                if self._on_cancel is not None:
                    self._on_cancel(effect)
            elif type(effect) is StreamCredit and self._on_credit is not None:
                self._on_credit(effect)

    def _check_after_send(self, lane: str) -> None:
        channel = self._channels.get(self._link_of_lane.get(lane, "main"))
        if channel is not None:
            channel.check()

    def _check_all(self) -> None:
        for channel in list(self._channels.values()):
            channel.check()

    def _check_other(self, link: str) -> None:
        """Check the sockets that another reactor reads: a message on ``link`` may have had answers for them."""
        if self._checking:  # what is read there has answers here in turn, and here it goes on reading anyway
            return
        self._checking = True
        try:
            for name, channel in list(self._channels.items()):
                if name != link:
                    channel.check()
        finally:
            self._checking = False

    def _tick(self, now: int) -> int:
        effects = self.callee.expire(now)
        if effects:
            self._do(effects)
            self._check_all()
        if now >= self._ask_ns:
            self._ask_again(now)
            self._check_all()
        return min(self._ask_ns, now + _EXPIRE_EVERY_NS if self.callee.may_queue else _NEVER)
