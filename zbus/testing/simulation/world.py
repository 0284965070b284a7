"""One run: time, the event queue, the registry's stand-in, the program's calls, and the faults.

Everything that happens is a pure function of (seed, size, code): one generator, one queue ordered by (time, number).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

import msgpack

from zbus.protocol.caller import Timing
from zbus.protocol.liveness import LinkState
from zbus.protocol.messages import Buffers, OutcomeKind
from zbus.testing.simulation.clocks import NodeClock
from zbus.testing.simulation.controller import SimController, SimLink, SimPeer
from zbus.testing.simulation.knobs import MS, Knobs, draw
from zbus.testing.simulation.ledger import Ledger, broken
from zbus.testing.simulation.network import Network
from zbus.testing.simulation.rough import NOT_BOUNDED, draw_rough, is_rough
from zbus.testing.simulation.trace_knobs import draw_tracing
from zbus.testing.simulation.tracing import Tracing
from zbus.testing.simulation.worker import LANES, SimWorker

__all__ = ["World"]

_TIMING: Final = Timing(
    probe_first=60 * MS,
    probe_received=150 * MS,
    probe_max=500 * MS,
    cancel_grace=60 * MS,
    stop_grace=15 * MS,
    probe_least=None,
    jitter=0.0,
)
_ADAPTIVE: Final = Timing(
    probe_first=60 * MS, probe_received=150 * MS, probe_max=500 * MS, cancel_grace=60 * MS, stop_grace=15 * MS,
    probe_least=20 * MS, jitter=0.25,
)  # fmt: skip
_HELLO_EVERY: Final = 120 * MS
_QUIET: Final = 40 * MS
_PATIENCE: Final = 60_000 * MS
_MAX_EVENTS: Final = 60_000
_LATER: Final = 0x2CB78E
"""Salt of the generator of what was added later; chosen so that it is off in the runs of the corpus."""
_TRACING: Final = 0x7ACED
"""Salt of the generator of what tracing is like."""

_ROUGH: Final = 0xB9DCF761
"""Salt of the generator of ``rough``."""

_LATEST: Final = 0x51B1E5
"""Salt of the generator of what was added after that."""

_JOINS: Final = (1, 2)
"""Which seeds of eight have requests that leave together: none of the corpus."""

_JOINED: Final = 0x10E15
"""Salt of the generator of those: so the runs of other seeds stay what they were."""

_NEWEST: Final = 0x51B1EA
"""Salt of the generator of what was added last; chosen as ``_LATER``."""


def _epoch(controller: SimController) -> int:
    return controller.epoch


class World:
    """One run. ``run`` raises ``Violation`` or ``AssertionError`` (a machine's ``validate``) on the first broken rule.

    Args:
        seed: Names the run.
        size: ``small``, ``large`` or ``trace``; see ``knobs.draw``.
        covered: Counters to add to.
        story: Where the last events are told, or None to save the time.
        knobs: Instead of drawn ones.
        script: What befalls which message, by the number of its sending from 0: ``lose``, ``copy``, ``late copy``,
            ``break`` (of its connection, after it), ``crash`` (of its worker, before it).
    """

    __slots__ = (
        "_number", "_slots", "_token", "controllers", "covered", "events", "faulty", "heap", "hello_every", "joining",
        "knobs", "later", "latest", "ledger", "link_names", "network", "now", "paused_until", "random", "rng", "rough",
        "script", "seed", "story", "timing", "tracing", "workers",
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        size: str,
        covered: dict[object, int],
        story: deque[str] | None = None,
        knobs: Knobs | None = None,
        script: dict[int, str] | None = None,
    ) -> None:
        self.seed = seed
        self.script = script
        self.rng = Random(seed)  # noqa: S311  # a schedule, not a secret
        self.random = self.rng.random
        later = Random(seed ^ _LATER)  # noqa: S311  # as above
        self.later = later.random
        rough = is_rough(seed, size)
        self.rough = Random(seed ^ _ROUGH) if rough else self.rng  # noqa: S311  # as above; not asked where none is
        joins = seed % 8 in _JOINS
        self.joining = Random(seed ^ _JOINED) if joins else self.rng  # noqa: S311  # as above; not asked where none do
        latest = Random(seed ^ _LATEST)  # noqa: S311  # as above
        self.latest = latest.random
        if knobs is None:
            traced = draw_tracing(Random(seed ^ _TRACING), size)  # noqa: S311  # as above
            knobs = draw(
                self.rng, later, latest, Random(seed ^ _NEWEST), size,  # noqa: S311  # as above
                tracing=traced, rough=draw_rough(self.rough, size) if rough else None,
                joined=0.2 + self.joining.random() * 0.8 if joins else 0.0,
            )  # fmt: skip
        self.knobs = knobs
        self.covered = covered
        self.story = story
        self.ledger = Ledger(
            covered, exact=self.knobs.journal, evicts=self.knobs.keep_bytes < NOT_BOUNDED, concurrency=LANES
        )
        self.network = Network(self)
        self.timing = _ADAPTIVE if self.knobs.adaptive else _TIMING
        self.hello_every = _HELLO_EVERY
        self.link_names = ("main", "ctl") if "ctl" in self.knobs.lanes else ("main",)
        self.heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.now = 0
        self.events = 0
        self.faulty = not self.knobs.faultless
        self._number = 0
        self._token = 0
        self.workers: list[SimWorker] = []
        self.controllers: list[SimController] = []
        self._slots: dict[int, SimWorker] = {}
        self.tracing: Tracing | None = None

    # -- time ----------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return the next event number: it orders events of one time."""
        self._number += 1
        return self._number

    def at(self, when: int, method: Callable[..., None], *args: Any) -> None:
        """Call a method at a time."""
        self._number += 1
        heappush(self.heap, (when, self._number, method, args))

    def after(self, delay: int, method: Callable[..., None], *args: Any) -> None:
        """Call a method after a while."""
        self._number += 1
        heappush(self.heap, (self.now + delay, self._number, method, args))

    def tell(self, text: str) -> None:
        """Add to the story."""
        if self.story is not None:
            self.story.append(f"{self.now / MS:10.3f} ms  {text}")

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the run to its end and check every promise on the way."""
        self._set_up()
        heap = self.heap
        events = 0
        while heap:
            when, _, method, args = heappop(heap)
            self.now = when
            events += 1
            method(*args)
            if events > _MAX_EVENTS:
                broken("I9", f"{events} events and no end: a storm of messages")
        self.events = events
        self.ledger.check_end({controller.session: controller.alive for controller in self.controllers})
        for worker in self.workers:
            if worker.alive and self.knobs.takeovers:
                worker.check_orphans()
        self._check_gangs()
        if self.tracing is not None:
            self.tracing.check_end()
        if self.knobs.faultless and not self.script:
            self._check_calm()

    def _set_up(self) -> None:
        knobs = self.knobs
        if knobs.tracing:
            self.tracing = Tracing(self)
        for slot in range(knobs.workers):
            self._start_worker(slot, 0, slot)
        controller = SimController(self, 1, 1)
        self.controllers.append(controller)
        for worker in self.workers:
            controller.connect(worker)
        if knobs.guests:
            guest = SimController(self, 2, 0)
            self.controllers.append(guest)
            for worker in self.workers:
                guest.connect(worker)
            self.at(int((30 + self.random() * 200) * MS), self._farewell, guest)
        begin = 12 * MS + 3 * (knobs.delay + knobs.jitter)  # so that most placements find their members READY
        for _ in range(knobs.requests):
            self.at(begin + int(self.random() * knobs.span), self._place, 3)
        if self.faulty:
            self._plan_faults(begin, knobs.span)
        self.at(begin + knobs.span, self._heal)

    def _plan_faults(self, begin: int, span: int) -> None:
        knobs = self.knobs
        plan: list[tuple[int, Callable[..., None]]] = [
            (knobs.breaks, self._break),
            (knobs.crashes, self._crash_any),
            (knobs.crash_effects, self._crash_soon),
            (knobs.pauses, self._pause),
            (knobs.takeovers, self._take_over),
            (knobs.drains, self._drain),
        ]
        rough: list[tuple[int, Callable[..., None]]] = [
            (knobs.fills, self._fill),
            (knobs.clock_jumps, self._jump),
            (knobs.crash_marks, self._crash_at_mark),
        ]
        for times, fault in rough:
            for _ in range(times):
                self.at(begin + int(self.rough.random() * span), fault)
        for times, fault in plan:
            for _ in range(times):
                self.at(begin + int(self.random() * span), fault)
        for _ in range(knobs.crash_sends):
            self.at(begin + int(self.later() * span), self._crash_controller_soon)
        for _ in range(knobs.holds):
            self.at(begin + int(self.latest() * span), self._hold_off)
        for number in range(knobs.partitions):
            self.at(begin + int(self.random() * span), self._partition, number < knobs.leases)

    def _heal(self) -> None:
        """End all faults; from now on everything must come to rest."""
        self.faulty = False
        self.covered["runs that came to the end of their faults"] += 1
        if self.tracing is not None:
            self.tracing.heal()
        self.at(self.now + _QUIET, self._look, self.now + _PATIENCE)

    def _look(self, limit: int) -> None:
        """End the run when nothing is open any more; complain when it never ends."""
        reason = self._unrest()
        if not reason:
            self.heap.clear()
        elif self.now > limit:
            broken("I1" if "call" in reason else "I11", f"{reason}, {_PATIENCE / 1e9:.0f} s after all faults")
        else:
            self.at(self.now + _QUIET, self._look, limit)

    def _unrest(self) -> str:
        highest = max(controller.epoch for controller in self.controllers)
        liars = self.ledger.liars
        for controller in self.controllers:
            if not controller.alive:
                continue
            if controller.epoch == highest:
                for peer in controller.current():
                    if peer.incarnation in liars and peer.state is LinkState.DEAD:
                        continue  # it said something for which there is no forgiving
                    if peer.worker is not self._slots[peer.slot] or peer.state is not LinkState.READY:
                        return f"{controller} has {peer.worker} {peer.state.value}"
            if not controller.settled():
                return f"{controller} has an unfinished place of a call"
        for call in self.ledger.calls.values():
            if call.outcome is None and self._controller_of(call.key[1]).alive and not self.ledger.excused(call):
                return f"{call!r} has no outcome"
        return "" if self.tracing is None else self.tracing.unrest()

    def _check_gangs(self) -> None:
        """Check that calls that start together ran on all of their workers or on none."""
        for controller in self.controllers:
            for truth, members in controller.gangs:
                if any(peer.incarnation in self.ledger.liars for peer in members):
                    continue
                excused = [
                    not controller.alive
                    or peer.state is LinkState.DEAD
                    or not peer.worker.alive
                    or peer.worker.callee.draining
                    or controller.session in peer.worker.byes
                    or 0 < controller.epoch < peer.worker.highest_epoch
                    for peer in members
                ]
                self.ledger.check_gang(truth, excused)

    def _check_calm(self) -> None:
        """Check that a run without faults had nothing to recover from, and said nothing twice."""
        for call in self.ledger.calls.values():
            outcome = call.outcome
            if outcome is None or outcome.kind is not OutcomeKind.UNKNOWN:
                continue
            if outcome.reason not in ("shutdown", "deadline"):  # a guest left; a call took longer than it may
                broken("I10", f"{call!r} is told {outcome} in a calm run")
        machines = [
            lane.machine
            for controller in self.controllers
            for peer in controller.peers
            for link in peer.links.values()
            for lane in link.lanes.values()
        ]
        for machine in machines:
            if machine.retransmissions:
                broken("I10", f"{machine.retransmissions} retransmissions in a calm run")
        if not any(machine.probes for machine in machines) and self.network.last_words > len(self.ledger.calls):
            words, calls = self.network.last_words, len(self.ledger.calls)
            broken("I10", f"{words} outcomes are told of {calls} calls in a calm run in which nobody asked")

    # -- the program ---------------------------------------------------------------------------------------------

    def _place(self, tries: int) -> None:
        """Place a batch as the program of the newest controller that lives."""
        random = self.random
        knobs = self.knobs
        living = [controller for controller in self.controllers if controller.alive]
        if not living:  # between the death of one and the next
            self.after(_QUIET, self._place, tries - 1)
            return
        controller = max(living, key=_epoch) if random() < 0.5 else living[int(random() * len(living))]
        if controller.paused_until > self.now:
            self.at(controller.paused_until, self._place, tries)
            return
        members = controller.current()
        if len(members) > 1 and random() > knobs.group:
            members = [members[int(random() * len(members))]]
        lane = knobs.lanes[int(random() * len(knobs.lanes))]
        if random() < 0.02:
            lane = "nowhere"
        stream = knobs.stream > 0 and len(members) == 1 and random() < knobs.stream
        count = 2 + int(random() * 3) if not stream and random() < knobs.batch else 1
        deadline = None
        if knobs.deadline and random() < knobs.deadline:
            deadline = controller.now + int((1 + random() * 200) * MS)
        token = self._next_token()
        alone = count == 1 and not stream and len(members) == 1
        if alone and knobs.joined and self.joining.random() < knobs.joined:
            self._place_joined(controller, members[0], lane, token, deadline)
            return
        together = knobs.together > 0 and len(members) > 1 and self.later() < knobs.together
        placed = controller.place(
            members, lane, token, count, deadline, self._token, strict=random() < knobs.strict, stream=stream,
            together=together,
        )  # fmt: skip
        if placed is None:
            self.covered["unavailable"] += 1
            if tries:
                self.after(_QUIET, self._place, tries - 1)
            return
        if self.story is not None:
            where = ", ".join(f"{peer.worker} seq {seq}" for peer, seq in placed)
            self.tell(f"{controller} places {count} call(s) in {lane}: {where}; deadline {deadline}")
        if knobs.cancel and random() < knobs.cancel:
            self.after(int(random() * 150 * MS), controller.cancel, placed, lane, count)

    def _next_token(self) -> bytes:
        """Return a payload that no other request has."""
        self._token += 1
        token = b"%d" % self._token
        if self.random() < 0.1:
            token += b"." * 60  # larger than the smallest byte window
        elif self.knobs.keep_bytes < NOT_BOUNDED and self.rough.random() < 0.6:
            token += b"." * 40  # so that its reply is large
        return token

    def _place_joined(
        self, controller: SimController, peer: SimPeer, lane: str, token: bytes, deadline: int | None
    ) -> None:
        """Place some calls that leave together, each a request of its own; some of them are cancelled alone."""
        joining, knobs = self.joining.random, self.knobs
        tokens = [token]
        for _ in range(1 + int(joining() * 5)):
            self._token += 1
            tokens.append(b"%d" % self._token)
        deadlines = [deadline if joining() < 0.7 else None for _ in tokens]  # most
        first = controller.place_joined(peer, lane, tokens, deadlines)
        if first is None:
            self.covered["unavailable"] += 1
            return
        self.covered["joined"] += 1
        if self.story is not None:
            self.tell(f"{controller} places {len(tokens)} calls as one in {lane}: {peer.worker} seq {first}")
        for seq in range(first, first + len(tokens)):
            if knobs.cancel and joining() < knobs.cancel:
                self.after(int(joining() * 150 * MS), controller.cancel, [(peer, seq)], lane, 1)

    # -- the registry's stand-in ---------------------------------------------------------------------------------

    def _start_worker(self, slot: int, start: int, address: int) -> SimWorker:
        worker = self._slots[slot] = SimWorker(self, slot, start, address)
        self.workers.append(worker)
        self.covered["started"] += 1
        if self.tracing is not None:
            self.tracing.adopt(worker)
        return worker

    def _replace(self, old: SimWorker) -> None:
        """Start the next incarnation of a name and publish it."""
        same = self.knobs.same_address and not old.alive
        address = old.address if same else len(self.workers)
        new = self._start_worker(old.slot, (old.incarnation >> 48) + 1, address)
        self.tell(f"{new} starts at address {address}")
        for controller in self.controllers:
            self.after(int(self.random() * 60 * MS), controller.discover, new)

    def crash(self, worker: SimWorker) -> None:
        """Kill a worker now; its exit is seen a little later and a new incarnation starts."""
        if not worker.alive:
            return
        self.tell(f"{worker} dies")
        worker.alive = False
        for connection in list(self.network.by_peer.values()):
            if connection.worker is worker and connection.alive:
                self.cut(connection.link, "the connection was lost")
        report = worker.journal_report()
        if self.knobs.moves and self.rough.random() < self.knobs.moves:
            self.covered["fault", "restart on another host"] += 1
            self.ledger.unread.add(worker.incarnation)
            report = None
        for controller in self.controllers:
            self.after(int(self.random() * 80 * MS), controller.observe_end, worker.incarnation, "worker_exit", report)
        if self._slots[worker.slot] is worker:
            self.after(int(self.random() * 50 * MS), self._replace_once, worker)

    # -- connections ---------------------------------------------------------------------------------------------

    def reconnect(self, link: SimLink) -> None:
        """Let a link try to connect, as libzmq does by itself, until it is dead."""
        self.after(self.knobs.delay + int(self.random() * 10 * MS), self._try_connect, link)

    def _try_connect(self, link: SimLink) -> None:
        controller = link.controller
        if not controller.alive or link.machine.state is LinkState.DEAD:
            return
        if controller.paused_until > self.now:
            self.at(controller.paused_until, self._try_connect, link)
            return
        listener = None
        for worker in self.workers:
            if worker.address == link.address and worker.alive:
                listener = worker
        if listener is None or max(listener.blocked) > self.now or listener.paused_until > self.now:
            self.after(20 * MS, self._try_connect, link)
            return
        if self.faulty and self.knobs.garbled and self.latest() < 0.5 * self.knobs.garbled:
            self.covered["fault", "a handshake that is none"] += 1
            link.on_link_down("it is not a zbus peer")
            return
        link.connection = self.network.connect(link, listener)
        link.on_link_up()

    def cut(self, link: SimLink, why: str) -> None:
        """Break a link's connection; the caller notices a little later, or only by the next connection."""
        connection = link.connection
        if connection is None or not connection.alive:
            return
        self.tell(f"{connection} of {link.controller} to {connection.worker} breaks")
        self.network.broke(connection)
        if self.knobs.coalesce and self.random() < self.knobs.coalesce:
            self.covered["fault", "a break noticed by the next connection"] += 1
            self.reconnect(link)
        else:
            self.after(int(self.random() * 20 * MS), self._notice, link, why)

    def _notice(self, link: SimLink, why: str) -> None:
        controller = link.controller
        if not controller.alive:
            return
        if controller.paused_until > self.now:
            self.at(controller.paused_until, self._notice, link, why)
            return
        link.on_link_down(why)
        if self.knobs.garbled and self.latest() < self.knobs.garbled:
            self.covered["fault", "a loss after which the transport gives up"] += 1
            return
        link.on_link_retried()
        self.reconnect(link)

    # -- faults --------------------------------------------------------------------------------------------------

    def _any_link(self) -> SimLink | None:
        links = [
            link
            for controller in self.controllers
            if controller.alive
            for peer in controller.peers
            for link in peer.links.values()
            if link.connection is not None and link.connection.alive
        ]
        return links[int(self.random() * len(links))] if links else None

    def _any_worker(self) -> SimWorker | None:
        living = [worker for worker in self.workers if worker.alive]
        return living[int(self.random() * len(living))] if living else None

    def _break(self) -> None:
        link = self._any_link()
        if link is not None:
            self.covered["fault", "break"] += 1
            self.cut(link, "the connection was lost")

    def _crash_any(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            self.covered["fault", "crash"] += 1
            self.crash(worker)

    def _crash_soon(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            worker.crash_in = int(self.random() * 8)

    def _drain(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            self.tell(f"{worker} drains")
            worker.drain()
            self.after(int(self.random() * 200 * MS), self.crash, worker)

    def _hold_off(self) -> None:
        living = [worker for worker in self.workers if worker.alive]
        if living:
            worker = living[int(self.latest() * len(living))]
            self.tell(f"{worker} holds off")
            worker.hold_off(int(self.latest() * 200 * MS))

    def _fill(self) -> None:
        """Fill a connection's queue, in one direction or both: what is sent waits in its process."""
        link = self._any_link()
        if link is None or link.connection is None:
            return
        until = self.now + int(self.rough.random() * 150 * MS)
        side = int(self.rough.random() * 3)
        for direction in (0, 1):
            if side in (direction, 2):
                link.connection.full[direction] = max(link.connection.full[direction], until)
        self.covered["fault", "queue full"] += 1
        self.tell(f"{link.connection} is full (sides {side}) until {until / MS:.3f} ms")

    def _jump(self) -> None:
        """Let a process's clock jump forward; it looks at its timers at once."""
        everyone: list[SimController | SimWorker] = [*self.controllers, *self.workers]
        nodes = [node for node in everyone if node.alive]
        if not nodes:
            return
        node = self.rough.choice(nodes)
        by = int(self.rough.random() ** 2 * 400 * MS)
        node.clock.jump(by)
        self.covered["fault", f"clock of a {type(node).__name__[3:].lower()} jumps"] += 1
        self.tell(f"the clock of {node} jumps by {by / MS:.3f} ms")
        if isinstance(node, SimController):
            node.was_paused = True
            node.look_soon()

    def _crash_at_mark(self) -> None:
        living = [worker for worker in self.workers if worker.alive]
        if living:
            self.rough.choice(living).crash_mark = 1 + int(self.rough.random() * 4)

    def set_up_node(self, node: SimController | SimWorker) -> None:
        """Give a new process its clock and pace."""
        knobs = self.knobs
        if knobs.wrong_clocks:
            self.covered["fault", "a clock at another rate"] += 1
            node.clock = NodeClock(0.5 * 4 ** self.rough.random(), int(self.rough.random() * 1e15))
        if knobs.pace and self.rough.random() < 0.5:
            self.covered["fault", "slow peer"] += 1
            node.pace = int(self.rough.random() * knobs.pace)

    def _pause(self) -> None:
        nodes: list[SimController | SimWorker] = [*self.controllers, *self.workers]
        nodes = [node for node in nodes if node.alive]
        if not nodes:
            return
        node = nodes[int(self.random() * len(nodes))]
        node.paused_until = max(node.paused_until, self.now + int(self.random() * 300 * MS))
        self.covered["fault", f"pause of a {type(node).__name__[3:].lower()}"] += 1
        self.tell(f"{node} is stopped until {node.paused_until / MS:.3f} ms")
        if isinstance(node, SimController):
            node.was_paused = True

    def _partition(self, lease: bool) -> None:  # noqa: FBT001  # event
        """Cut a worker off in one or both directions; with ``lease`` for so long that it is replaced."""
        worker = self._any_worker()
        if worker is None:
            return
        until = self.now + int((10 + self.random() * 150) * MS)
        direction = int(self.random() * 3)
        self.covered[
            "fault", ("partition to callers", "partition to the worker", "partition both ways")[direction]
        ] += 1
        for side in (0, 1):
            if direction in (side, 2):
                worker.blocked[side] = max(worker.blocked[side], until)
        self.tell(f"{worker} is cut off (sides {direction}) until {until / MS:.3f} ms")
        for connection in self.network.by_peer.values():
            if connection.worker is worker:
                for side in (0, 1):
                    connection.blocked[side] = max(connection.blocked[side], worker.blocked[side])
                if connection.alive and self.random() < 0.4:
                    self.after(int(self.random() * 100 * MS), self.cut, connection.link, "no heartbeat")
        if lease and self._slots[worker.slot] is worker:
            self.covered["fault", "lease"] += 1
            for controller in self.controllers:
                self.after(int(self.random() * 120 * MS), self._lapse, controller, worker, until)
            replaced_in = int(self.random() * 200 * MS)
            if self.knobs.unreplaced and self.latest() < self.knobs.unreplaced:
                self.covered["fault", "lease, not replaced"] += 1
            else:
                self.after(replaced_in, self._replace_once, worker)

    def _lapse(self, controller: SimController, worker: SimWorker, until: int) -> None:
        """Tell a controller that a lease ran out, until it is renewed or the connection is lost too."""
        if self.now < until and not controller.observe_silence(worker.incarnation):
            self.after(15 * MS, self._lapse, controller, worker, until)

    def _replace_once(self, worker: SimWorker) -> None:
        if self._slots[worker.slot] is worker:
            self._replace(worker)

    def _crash_controller_soon(self) -> None:
        controller = max(self.controllers, key=_epoch)
        if controller.alive:
            controller.crash_in = int(self.later() * 6)

    def crash_controller(self, controller: SimController) -> None:
        """Kill a controller between two messages; another one takes over a little later."""
        self.covered["fault", "controller dies between two messages"] += 1
        self.tell(f"{controller} dies between two messages")
        self._end_controller(controller)
        self.after(int(self.later() * 100 * MS), self._take_over)

    def _end_controller(self, old: SimController) -> None:
        old.alive = False
        for peer in old.peers:
            for link in peer.links.values():
                if link.connection is not None:
                    self.network.broke(link.connection)

    def _take_over(self) -> None:
        """Replace the controller of the highest epoch; the old one dies or, cut off from the news, goes on."""
        old = max(self.controllers, key=_epoch)
        new = SimController(self, len(self.controllers) + 1, old.epoch + 1)
        self.controllers.append(new)
        fate = "goes on"
        if not old.alive:
            fate = "is dead"
        elif self.random() >= self.knobs.zombie:
            fate = "says BYE" if self.random() < self.knobs.farewell and old.paused_until <= self.now else "dies"
        self.covered["fault", f"controller replaced, the old one {fate}"] += 1
        self.tell(f"{new} takes over from {old}, which {fate}")
        if fate == "says BYE":
            old.close()
        if fate == "dies":
            self._end_controller(old)
        for worker in self._slots.values():
            new.connect(worker)

    def _farewell(self, controller: SimController) -> None:
        if controller.paused_until > self.now:
            self.at(controller.paused_until, self._farewell, controller)
        elif controller.alive:
            controller.close()

    # -- small things --------------------------------------------------------------------------------------------

    def epoch_of(self, session: bytes) -> int:
        """Return the epoch of a session."""
        return self._controller_of(session).epoch

    def _controller_of(self, session: bytes) -> SimController:
        return self.controllers[int.from_bytes(session, "big") - 1]

    def pack_cursors(self, cursors: dict[str, int]) -> Buffers:
        """Return the body of a WELCOME."""
        return (msgpack.packb(cursors),)

    def cursors(self, buffers: Buffers) -> dict[str, int]:
        """Return what ``pack_cursors`` packed."""
        return dict(msgpack.unpackb(buffers[0]))
