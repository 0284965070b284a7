"""The directory: one thread that keeps what is known of a trial's workers, agents, leases and epochs up to date."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.discovery.hints import HINTS_PREFIX, Hint, HintKind, decode_hint, probe_topic
from zbus.discovery.state import DirectoryState, EpochSeen, Event, Settings, Snapshot, View
from zbus.errors import RegistryError, TransportError, ZbusError
from zbus.registry.base import JunkRecord
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Records, WorkerRecord
from zbus.transport.pubsub import Delivery, GapTracker, Message, Publisher, Subscriber, topic_bytes, wait_readable
from zbus.transport.sockets import SocketFactory

__all__ = ["Directory", "read_everything"]

_log: Final = logging.getLogger("zbus.discovery")
_NS: Final = 1_000_000_000
_BURST: Final = 1_000
_PROBE: Final = b"?"

T = TypeVar("T")
Hub = tuple[Sequence[str], Sequence[str]]
"""(publisher endpoints, subscriber endpoints)."""


def read_everything(records: Records) -> Snapshot:
    """Read all areas once. Blocking file I/O, any thread.

    Exits are read after workers: a worker that ends in between is then known to have ended.

    Raises:
        RegistryError: The registry cannot be read.
    """
    workers = records.workers()
    return Snapshot(
        workers=workers,
        exits=records.exits(),
        agents=records.agents(),
        leases=records.leases(),
        epoch=records.current_epoch(),
    )


class Directory:
    """Keeps a ``View`` of a trial current, from hints for speed and from the registry for truth.

    Methods may be called from any thread, except that ``wait_for`` and ``close`` must not be called by ``on_event``.

    Args:
        records: The trial's registry.
        factory: Makes the sockets; None: no hints, the registry is only polled.
        hub: The hub's endpoints where this process knows them (it runs the hub). None: those of the highest epoch
            record, and of the next when a new controller takes over.
        on_event: Called with each event, in order, on the directory's thread: quick, and without waiting.
        settings: Periods.
        clock: Time source for periods and leases.
    """

    def __init__(
        self,
        records: Records,
        *,
        factory: SocketFactory | None = None,
        hub: Hub | None = None,
        on_event: Callable[[Event], None] | None = None,
        settings: Settings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._records = records
        self._on_event = on_event
        self._clock = clock
        self._follows = hub is None
        self._hub = hub
        self._number = int.from_bytes(os.urandom(8), "big")
        self._publisher = None if factory is None else Publisher(factory, self._number)
        self._subscriber = None if factory is None else Subscriber(factory)
        self._tracker = GapTracker()
        self._state = DirectoryState(
            settings if settings is not None else Settings(),
            has_hub=factory is not None and hub is not None,
            now_ns=clock.monotonic_ns(),
            jitter=random.random(),  # noqa: S311  # no secret
        )
        self._changed = threading.Condition()
        self._view = View()
        self._wishes: list[Callable[[int], None]] = []
        self._junk_hints = 0
        self._handler_errors = 0
        self._looks = 0
        self._stopping = False
        self._fault: BaseException | None = None
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="zbus-directory", daemon=True)

    def start(self) -> Directory:
        """Start the thread; the first look at the registry follows at once. Once."""
        self._thread.start()
        return self

    # -- what is known

    @property
    def view(self) -> View:
        """What is known now."""
        return self._view

    def wait_for(self, predicate: Callable[[View], T], timeout_s: float | None) -> T | None:
        """Wait until ``predicate(view)`` is true and return its value; None when ``timeout_s`` passed first.

        The predicate runs on the calling thread, once now and once per change.

        Raises:
            TransportError: The directory's thread has ended, so nothing will change any more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                value = predicate(self._view)
                if value:
                    return value
                if self._fault is not None or self._closed:
                    msg = "the directory has stopped"
                    raise TransportError(msg) from self._fault
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def refresh(self) -> None:
        """Look at the whole registry soon; returns at once."""
        self._wish(self._state.refresh)

    def launching(self, *, active: bool) -> None:
        """Say that ranks are expected to appear (or that all have), so that looks come more often."""
        self._wish(lambda now: self._state.launching(active=active, now_ns=now))

    def listen_to(self, hub: Hub) -> None:
        """Move to another hub that this process runs."""
        self._wish(lambda _now: self._listen(hub))

    def stats(self) -> dict[str, int]:
        """Return counters: ``gaps``, ``duplicates``, ``junk_hints``, ``handler_errors``, ``looks``, ``redials``."""
        junk = self._junk_hints + (self._subscriber.junk if self._subscriber is not None else 0)
        return {
            "gaps": self._state.gaps,
            "duplicates": self._state.duplicates,
            "junk_hints": junk,
            "handler_errors": self._handler_errors,
            "looks": self._looks,
            "redials": self._state.redials,
        }

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread within ``timeout_s`` seconds and wake all waiters; return whether it ended. Repeatable.

        It may not end in time while the registry's disk hangs; it then ends with that read.
        """
        with self._changed:
            if not self._closed:
                self._closed = self._stopping = True
                os.eventfd_write(self._bell, 1)
                self._changed.notify_all()
        if self._thread.ident is None:
            self._run()  # nothing but the end of it
        else:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- its own thread

    def _run(self) -> None:
        try:
            if self._hub is not None and not self._stopping:
                self._listen(self._hub)
            while not self._stopping:
                self._round()
        except BaseException as error:  # noqa: BLE001  # whatever it is, waiters must learn that nothing will change
            self._fault = error
            _log.exception("the directory has stopped")
        finally:
            for end in (self._publisher, self._subscriber):
                if end is not None:
                    end.close()
            with self._changed:
                self._closed = True
                os.close(self._bell)
                self._changed.notify_all()

    def _round(self) -> None:
        pause_s = (self._state.next_ns() - self._clock.monotonic_ns()) / _NS
        publisher = self._publisher.socket if self._publisher is not None else None
        subscriber = self._subscriber.socket if self._subscriber is not None else None
        wait_readable((self._bell, subscriber, publisher), pause_s)
        now = self._clock.monotonic_ns()
        self._grant_wishes(now)
        events = self._receive(now)
        events += self._state.tick(now)
        due = self._state.due(now)
        if due.redial:
            self._dial_again()
        if due.probe and self._publisher is not None:
            self._publisher.publish(probe_topic(self._number), _PROBE)
        if due.everything:
            events += self._look_everywhere()
        elif due.leases:
            events += self._look_at_leases()
        for hint in due.looks:
            events += self._look_at(hint)
        self._tell(events, looked=due.everything or due.leases)

    def _wish(self, wish: Callable[[int], None]) -> None:
        with self._changed:
            if not self._closed:
                self._wishes.append(wish)
                os.eventfd_write(self._bell, 1)

    def _grant_wishes(self, now: int) -> None:
        with self._changed:
            wishes, self._wishes = self._wishes, []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for wish in wishes:
            wish(now)

    def _receive(self, now: int) -> list[Event]:
        events: list[Event] = []
        if self._subscriber is None or self._publisher is None:
            return events
        self._publisher.heard()
        for _ in range(_BURST):
            message = self._subscriber.recv()
            if message is None:
                break
            events += self._take(message, now)
        return events

    def _take(self, message: Message, now: int) -> list[Event]:
        if message.topic == probe_topic(self._number):
            return self._state.echo(now) if message.publisher == self._number else []
        hint = decode_hint(message.payload) if message.payload else None
        if message.payload and hint is None:
            self._junk_hints += 1
            return []
        delivery = self._tracker.take(message)
        if hint is not None:
            return self._state.hint(hint, delivery, now)
        if delivery is Delivery.GAP:
            self._state.missed(now)
        return []

    def _look_everywhere(self) -> list[Event]:
        self._looks += 1
        began = self._clock.monotonic_ns()
        try:
            snapshot = read_everything(self._records)
        except RegistryError as error:
            return self._state.failed(str(error))
        ended = self._clock.monotonic_ns()
        events = self._state.snapshot(snapshot, ended, ended - began)
        for event in events:
            if isinstance(event, EpochSeen):
                self._follow(event.record)
        return events

    def _look_at_leases(self) -> list[Event]:
        try:
            leases = self._records.leases()
        except RegistryError as error:
            return self._state.failed(str(error))
        return self._state.leases(leases, self._clock.monotonic_ns())

    def _look_at(self, hint: Hint) -> list[Event]:
        record: WorkerRecord | ExitRecord | AgentRecord | EpochRecord | None
        try:
            if hint.kind is HintKind.JOIN:
                record = self._records.worker(hint.role, hint.rank, hint.incarnation)
            elif hint.kind is HintKind.EXIT:
                record = self._records.exit(hint.role, hint.rank, hint.incarnation)
            elif hint.kind is HintKind.AGENT:
                record = self._records.agent(hint.text)
            else:
                record = self._records.current_epoch()
        except JunkRecord:
            return []
        except RegistryError as error:
            return self._state.failed(str(error))
        except ZbusError:  # a name that cannot be: the hint was not one of ours
            self._junk_hints += 1
            return []
        events = self._state.found(hint, record)
        if events and isinstance(record, EpochRecord):
            self._follow(record)
        return events

    def _follow(self, epoch: EpochRecord) -> None:
        """Listen to the hub of a newer epoch, if this process does not run its own."""
        if self._follows and self._subscriber is not None and epoch.hub_sub:
            self._listen((epoch.hub_pub, epoch.hub_sub))

    def _listen(self, hub: Hub) -> None:
        if self._publisher is None or self._subscriber is None:
            return
        self._connect(hub)
        self._state.moved(has_hub=True, now_ns=self._clock.monotonic_ns())

    def _connect(self, hub: Hub) -> None:
        assert self._publisher is not None  # noqa: S101  # asked for by both callers
        assert self._subscriber is not None  # noqa: S101  # as above
        pub, sub = hub
        self._tracker.reset()
        self._publisher.connect(pub)
        self._subscriber.connect(sub, (HINTS_PREFIX.encode(), topic_bytes(probe_topic(self._number))))

    def _dial_again(self) -> None:
        """Make both connections to the hub anew: one of them may have been given up by libzmq."""
        if self._publisher is not None and self._subscriber is not None and self._subscriber.endpoints:
            self._connect((list(self._publisher.endpoints), list(self._subscriber.endpoints)))

    def _tell(self, events: Sequence[Event], *, looked: bool) -> None:
        """Publish the new view, wake waiters, call back."""
        if not events and not looked:
            return
        view = self._state.view()
        with self._changed:
            self._view = view
            self._changed.notify_all()
        if self._on_event is None:
            return
        for event in events:
            try:
                self._on_event(event)
            except Exception:  # noqa: BLE001  # a faulty handler costs one event, not the directory
                self._handler_errors += 1
                _log.exception("a handler of directory events raised on %s", type(event).__name__)
