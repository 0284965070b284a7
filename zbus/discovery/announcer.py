"""The announcer: tells whoever listens that something in the registry has changed."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.discovery.hints import Hint, HintKind, encode_hint, topic_of
from zbus.errors import RegistryError, ZbusError
from zbus.protocol.redial import Redial
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, Records, WorkerRecord
from zbus.transport.pubsub import Publisher, wait_readable
from zbus.transport.sockets import SocketFactory

__all__ = ["Announcer"]

_log: Final = logging.getLogger("zbus.discovery")
_NS: Final = 1_000_000_000
_MAX_WAITING: Final = 10_000
_QUICK_BEATS_S: Final = (0.1, 0.3)
_DEAF_LOOK_S: Final = 0.25
_LINGER_MS: Final = 200


class Announcer:
    """Publishes hints from a thread of its own. Every method may be called from any thread and none waits.

    A hint is only a pointer: write the record first, then announce it. Hints may get lost; sequence numbers and beats
    let the other side notice, and its periodic look at the registry finds what even those miss.

    Args:
        factory: Makes the socket.
        publisher: Number that names this process's stream: its incarnation, or a random uint64 for an agent.
        records: Where to look for the hub of the current epoch; it is looked up again when nobody listens any more.
            None: only ``hub_pub`` is used.
        hub_pub: The hub's publisher endpoints, where already known.
        clock: Time source.
        beat_s: Seconds between beats; each repeats how many hints there were.
        look_s: Seconds between looks for a newer epoch while somebody listens.
        redial_s: Seconds without a listener after which the hub is connected to anew; then less and less often.

    Attributes:
        dropped: Hints dropped because more than 10,000 were waiting.
    """

    def __init__(
        self,
        factory: SocketFactory,
        publisher: int,
        *,
        records: Records | None = None,
        hub_pub: Sequence[str] = (),
        clock: Clock = SYSTEM_CLOCK,
        beat_s: float = 5.0,
        look_s: float = 5.0,
        redial_s: float = 2.0,
    ) -> None:
        self._publisher = Publisher(factory, publisher)
        self._records = records
        self._hub: tuple[str, ...] = tuple(hub_pub)
        self._epoch = 0
        self._clock = clock
        self._beat_ns = int(beat_s * _NS)
        self._look_ns = int(look_s * _NS)
        self._redial = Redial(first_s=redial_s, jitter=random.random())  # noqa: S311  # no secret
        self._waiting: deque[Hint] = deque()
        self._states: dict[tuple[str, int], Hint] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._closed = False
        self.dropped = 0
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="zbus-announcer", daemon=True)
        self._thread.start()

    # -- what happened

    def joined(self, record: WorkerRecord) -> None:
        """A worker's record was published."""
        self.announce(Hint(HintKind.JOIN, record.role, record.rank, record.incarnation))

    def exited(self, record: ExitRecord) -> None:
        """An exit record was published."""
        self.announce(Hint(HintKind.EXIT, record.role, record.rank, record.incarnation))

    def leaving(self, role: str, rank: int, incarnation: int) -> None:
        """A worker is about to end in good order."""
        self.announce(Hint(HintKind.LEAVE, role, rank, incarnation))

    def state(self, role: str, rank: int, incarnation: int, text: str) -> None:
        """A worker is doing something else now; the last one is repeated to every new listener."""
        self.announce(Hint(HintKind.STATE, role, rank, incarnation, text))

    def agent(self, record: AgentRecord) -> None:
        """An agent's record was published or withdrawn."""
        self.announce(Hint(HintKind.AGENT, record.role, text=record.agent))

    def epoch(self, record: EpochRecord) -> None:
        """A new epoch record was published."""
        self.announce(Hint(HintKind.EPOCH, "controller", record.epoch))

    def announce(self, hint: Hint) -> None:
        """Publish any hint. Does nothing once closed."""
        with self._lock:
            if self._closed or self._stopping:
                return
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(hint)
            os.eventfd_write(self._bell, 1)

    @property
    def listened(self) -> bool:
        """Whether a hub with a listener is connected."""
        return self._publisher.listened

    def hears(self, epoch: int) -> bool:
        """Return whether the hub of the controller of ``epoch`` is connected: then its process is alive."""
        return self._epoch == epoch and self._publisher.listened

    def close(self, timeout_s: float = 1.0) -> None:
        """Publish what waits and end the thread, within ``timeout_s`` seconds. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._stopping = True
            os.eventfd_write(self._bell, 1)
        self._thread.join(timeout_s)
        with self._lock:
            if not self._thread.is_alive() and not self._closed:
                self._closed = True
                os.close(self._bell)

    # -- its own thread

    def _run(self) -> None:
        try:
            self._serve()
        except ZbusError as error:
            if not self._stopping:
                _log.warning("no more hints from this process: %s", error)
        finally:
            self._publisher.close(_LINGER_MS)

    def _serve(self) -> None:
        beats: deque[int] = deque()
        next_beat = self._clock.monotonic_ns() + self._beat_ns
        next_look = 0
        if self._hub:
            self._publisher.connect(self._hub)
        while True:
            now = self._clock.monotonic_ns()
            if now >= next_look:
                self._look()
                next_look = now + (self._look_ns if self._publisher.listened else int(_DEAF_LOOK_S * _NS))
            if self._publisher.heard():  # a new listener: show it that it missed something
                self._repeat_states()
                self._publisher.beat()
            if self._publish_waiting():
                beats.extend(now + int(after * _NS) for after in _QUICK_BEATS_S)
            if self._stopping:
                return
            self._dial_again(now)
            if now >= next_beat or (beats and now >= beats[0]):
                while beats and now >= beats[0]:
                    beats.popleft()
                next_beat = now + self._beat_ns
                self._publisher.beat()
            due = self._redial.due_ns
            wake = min(
                [next_beat, *list(beats)[:1], *([next_look] if self._records is not None else []), due or next_beat]
            )
            wait_readable((self._publisher.socket, self._bell), (wake - self._clock.monotonic_ns()) / _NS)
            self._unring()

    def _dial_again(self, now: int) -> None:
        """Connect to the hub anew while it does not listen: libzmq may have given the connection up."""
        if self._publisher.listened or not self._publisher.endpoints:
            self._redial.heard()
        elif self._redial.silent(now):
            self._publisher.connect(list(self._publisher.endpoints))

    def _unring(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return

    def _look(self) -> None:
        """Find the hub of the current epoch and move to it."""
        if self._records is None:
            return
        try:
            current = self._records.current_epoch()
        except RegistryError as error:
            _log.debug("cannot look for the hub: %s", error)
            return
        if current is None or current.epoch <= self._epoch or not current.hub_pub:
            return
        self._epoch = current.epoch
        if tuple(current.hub_pub) != tuple(self._publisher.endpoints):
            self._publisher.connect(current.hub_pub)

    def _publish_waiting(self) -> bool:
        any_sent = False
        while True:
            with self._lock:
                if not self._waiting:
                    return any_sent
                hint = self._waiting.popleft()
            if hint.kind is HintKind.STATE:
                self._states[hint.role, hint.rank] = hint
            self._publisher.publish(topic_of(hint.role), encode_hint(hint))
            any_sent = True

    def _repeat_states(self) -> None:
        for hint in self._states.values():
            self._publisher.publish(topic_of(hint.role), encode_hint(hint))
