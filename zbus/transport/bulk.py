"""Large buffers between processes that share no memory: offered by their owner, pulled by whoever needs them.

A process has one ``Bulk``: a ROUTER where it hands out what it offers, and a DEALER to each owner it pulls from, made
on first use. They have sockets and a thread of their own, so that a gigabyte on its way delays no call, no
acknowledgement and no sign of life. Buffers are neither copied on their way out (libzmq reads them in place) nor more
than once on their way in (received into memory that the asker chose).

The machines are ``zbus.protocol.puller`` and ``zbus.protocol.stock``; the bytes of a message ``zbus.protocol.parts``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import TransportError, ZbusError
from zbus.protocol.messages import Buffer
from zbus.protocol.puller import Ending, Patience, Range, check_pull
from zbus.protocol.stock import Stock
from zbus.transport.bulk_asker import OwnerLink
from zbus.transport.bulk_owner import Counter
from zbus.transport.interrupts import gate
from zbus.transport.profile import MOST_DATA_PEERS
from zbus.transport.reactor import Reactor
from zbus.transport.sockets import SocketFactory

__all__ = ["PIECE", "WINDOW", "Bulk", "Pull", "PullFailed", "Range"]

log = logging.getLogger("zbus.bulk")

PIECE: Final = 2 << 20
WINDOW: Final = 8 << 20
"""Bytes of one ASK, and of all that are out towards one owner; measured in ``docs/decisions/bulk-data.md``."""

_IDLE_NS: Final = 60_000_000_000
_SLEEP_S: Final = 30.0
_NEVER: Final = 1 << 62


class PullFailed(TransportError):
    """A pull ended without its data.

    Attributes:
        how: Why.
        endpoint: The owner's.
    """

    how: Ending
    endpoint: str


class Pull:
    """One pull, until it ends. Any thread may call.

    Attributes:
        endpoint: The owner's.
        how: How it ended; None before.
        evidence: What was seen, in words.
    """

    def __init__(
        self,
        bulk: Bulk,
        endpoint: str,
        what: tuple[bytes, Sequence[Range], Sequence[memoryview]],
        deadline_ns: int | None,
        then: Callable[[Pull], None] | None,
    ) -> None:
        self.endpoint = endpoint
        self.how: Ending | None = None
        self.evidence = ""
        self._bulk = bulk
        self._what = what
        self._deadline_ns = deadline_ns
        self._then = then
        self._ended = threading.Event()
        self._link: OwnerLink | None = None
        self._number = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False if the time ran out first. It ends by itself in bounded time."""
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """End it now, without its callback: its memory is not written to any more when this returns."""
        self._bulk._cancel(self)  # noqa: SLF001  # one mechanism in two classes

    def check(self) -> None:
        """Raise what it failed of, once it has ended.

        Raises:
            PullFailed: It ended without its data.
        """
        if self.how is not Ending.DONE:
            raise self.failure()

    def failure(self) -> PullFailed:
        """Return what it failed of, once it has."""
        nbytes = sum(one.nbytes for one in self._what[1])
        how = "not over" if self.how is None else self.how.value
        error = PullFailed(
            f"{nbytes:,} bytes could not be pulled from {self.endpoint} ({how}): {self.evidence}",
            facts={"owner": self.endpoint, "bytes": f"{nbytes:,}", "seen": self.evidence},
        )
        error.how, error.endpoint = self.how or Ending.CANCELLED, self.endpoint
        return error

    def _tell(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(self)

    def _end(self, how: Ending, evidence: str) -> None:
        self.how, self.evidence = how, evidence
        self._what = (self._what[0], self._what[1], ())
        self._link = None
        self._ended.set()


class Bulk:
    """What this process offers and pulls. Any thread may call; none may wait in a callback.

    Args:
        factory: Socket factory.
        clock: Monotonic clock of deadlines.
        piece: Bytes of one ASK.
        window: Most bytes out towards one owner.
        patience: When a pull is given up.

    Attributes:
        endpoints: Where it is bound, best first.
    """

    def __init__(
        self,
        factory: SocketFactory,
        *,
        clock: Clock = SYSTEM_CLOCK,
        piece: int = PIECE,
        window: int = WINDOW,
        patience: Patience | None = None,
    ) -> None:
        self.endpoints: list[str] = []
        self._factory = factory
        self._now = clock.monotonic_ns
        self._piece, self._window, self._patience = piece, window, patience or Patience()
        self._reactor = Reactor(clock=clock, name="zbus-bulk")
        self._stock = Stock()
        self._counter: Counter | None = None
        self._links: dict[str, OwnerLink] = {}
        self._pulls: dict[tuple[str, int], Pull] = {}
        self._waiting: deque[Pull] = deque()
        self._told: deque[Callable[[], None]] = deque()
        self._withdrawn: deque[bytes] = deque()
        self._past: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken = ""
        self._reactor.add_ticker(self._tick)

    # -- the owner's side ----------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> str:
        """Bind the ROUTER, at one more address if it is bound; return the endpoint really bound.

        Raises:
            TransportError, ConfigError: The address cannot be bound.
        """
        with gate, self._reactor.lock:
            self._check_open()
            if self._counter is not None:
                bound = self._factory.bind(self._counter.socket, endpoint)
            else:
                socket = self._factory.router("data")
                try:
                    bound = self._factory.bind(socket, endpoint)
                    self._counter = Counter(self._reactor, socket, self._stock)
                except BaseException:
                    socket.close(0)
                    raise
            self.endpoints.append(bound)
            self._start()
            return bound

    def offer(self, key: bytes, *buffers: Buffer) -> None:
        """Offer contiguous buffers under a key of 16 bytes that nobody can guess, until ``withdraw``.

        They are read in place, so they must not change meanwhile.

        Raises:
            ValueError: The key is in use, or no key.
        """
        with gate, self._reactor.lock:
            self._drain()
            self._stock.offer(key, buffers)

    def withdraw(self, key: bytes) -> None:
        """Offer it no more. Takes no lock, so that it can be called out of the garbage collector.

        Parts that are on their way still keep the memory alive, not its bytes as they were.
        """
        self._withdrawn.append(key)
        self._reactor.wake()

    def asked_ns(self, key: bytes) -> int | None:
        """Return when anything under a key was last asked for, by the clock of this object; None: not yet."""
        with gate, self._reactor.lock:
            return self._stock.asked_ns(key)

    def let_go(self) -> None:
        """Let go of what is withdrawn now, not when the bulk thread comes to it: its memory is wanted again."""
        if self._withdrawn:
            with gate, self._reactor.lock:
                self._drain()

    # -- the asker's side ----------------------------------------------------------------------------------------

    def pull(
        self,
        endpoints: Sequence[str],
        key: bytes,
        ranges: Sequence[Range],
        into: Sequence[memoryview],
        *,
        deadline_s: float | None = None,
        then: Callable[[Pull], None] | None = None,
    ) -> Pull:
        """Begin to pull ranges of what an owner offers.

        Args:
            endpoints: The owner's, best first.
            key: What it offers them under.
            ranges: Which bytes of which buffers.
            into: Writable memory for each range, of its size.
            deadline_s: Seconds from now; None: only silence ends it.
            then: Called with the pull once it ended, on the bulk thread, with no lock held; must be quick.

        Raises:
            TransportError: None of the endpoints can be reached from here, or this object is closed.
            ValueError: Ranges and memory do not fit.
        """
        if [one.nbytes for one in ranges] != [view.nbytes for view in into] or any(view.readonly for view in into):
            msg = "each range needs writable memory of its size"
            raise ValueError(msg)
        check_pull(key, ranges)
        deadline_ns = None if deadline_s is None else self._now() + int(deadline_s * 1e9)
        views = [view.cast("B") for view in into]
        pull = Pull(self, _choose(endpoints), (key, tuple(ranges), views), deadline_ns, then)
        with gate, self._reactor.lock:
            self._check_open()
            self._start()
            self._waiting.append(pull)
            try:
                self._admit()
            except BaseException:
                if pull in self._waiting:  # whoever is told of this waits for nothing
                    self._waiting.remove(pull)
                raise
        self._reactor.wake()  # a send here may have swallowed the sign of what has come: its thread looks again
        return pull

    def fetch(
        self,
        endpoints: Sequence[str],
        key: bytes,
        ranges: Sequence[Range],
        into: Sequence[memoryview],
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Pull and wait for the end; see ``pull``. Not on an event loop's thread.

        Raises:
            PullFailed: It ended without its data: the owner refuses, is silent or gone, or the deadline passed.
            TransportError, ValueError: As ``pull``.
        """
        pull = self.pull(endpoints, key, ranges, into, deadline_s=deadline_s)
        try:
            pull.wait()
        except BaseException:
            pull.cancel()
            raise
        pull.check()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call on the bulk thread, with no lock held, between the callbacks of pulls. It must be quick."""
        self._told.append(callback)
        with gate, self._reactor.lock:
            self._check_open()
            self._start()
        self._reactor.wake()

    def owner_gone(self, endpoints: Sequence[str], evidence: str) -> None:
        """End all pulls from a process that is known to be no more, and its connection."""
        with gate, self._reactor.lock:
            for endpoint in endpoints:
                link = self._links.get(endpoint)
                if link is not None:
                    link.owner_gone(evidence)
                    self._hang_up(link)
            for pull in [pull for pull in self._waiting if pull.endpoint in endpoints]:
                self._waiting.remove(pull)
                self._finish(pull, Ending.ABSENT, evidence)
            self._admit()
        self._reactor.wake()

    # -- the rest ------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return bytes offered, given and pulled, and what was refused or ignored, by reason."""
        with gate, self._reactor.lock:
            self._drain()
            counts = {"bulk_given_bytes": 0, "bulk_pulled_bytes": 0, **self._past}
            sources = [link.counts() for link in self._links.values()]
            if self._counter is not None:
                sources.append(self._counter.counts())
            sources.append({f"bulk_refused_{why}": number for why, number in self._stock.refused.items()})
            for source in sources:
                _add(counts, source)
            counts["bulk_offered_bytes"] = self._stock.nbytes
            return counts

    def close(self) -> None:
        """End all pulls, close all sockets, stop the thread. Idempotent; never waits for a peer."""
        with gate, self._reactor.lock:
            if self._closed:
                return
            self._closed = True
            self._end_all("this process closes")
            if self._counter is not None:
                self._counter.close()
        self._reactor.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._tell()
        self._reactor.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed or self._broken:
            msg = f"bulk data of this process is closed{self._broken and f': {self._broken}'}"
            raise TransportError(msg)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="zbus-bulk", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                msg = f"bulk data of this process has no thread: {error}"
                raise TransportError(msg, hint="raise the limit of processes and threads (`ulimit -u`)") from error
            self._thread = thread  # only one that runs can be waited for

    def _run(self) -> None:
        try:
            while not self._closed:
                self._reactor.once(_SLEEP_S)
                if self._withdrawn:
                    with self._reactor.lock:
                        self._drain()
                self._tell()
        except BaseException as error:  # nobody may wait for ever because of a fault of ours
            log.exception("bulk data of this process ends")
            with gate, self._reactor.lock:
                self._broken = f"its thread died of {error!r}"
                self._end_all(self._broken)
            self._tell()
            raise

    def _end_all(self, evidence: str) -> None:
        """End all pulls and close their connections. Under the lock."""
        for link in list(self._links.values()):
            link.owner_gone(evidence)
            self._hang_up(link)
        while self._waiting:
            self._finish(self._waiting.popleft(), Ending.ABSENT, evidence)

    def _tell(self) -> None:
        """Call back for what ended. No lock is held, for the callback has locks of its own to take."""
        while self._told:
            callback = self._told.popleft()
            try:
                callback()
            except Exception:  # a fault of one callback costs its pull, not the thread and all that it serves
                log.exception("the end of a pull could not be handled")

    def _drain(self) -> None:
        while self._withdrawn:
            self._stock.withdraw(self._withdrawn.popleft())

    def _admit(self) -> None:
        """Begin pulls that wait, as far as there may be connections. Under the lock."""
        for pull in list(self._waiting):
            link = self._links.get(pull.endpoint)
            if link is not None and link.spoilt and link.puller.idle:
                self._hang_up(link)
                link = None
            try:
                link = link or self._dial(pull.endpoint)
            except (ZbusError, OSError) as error:  # no such address, or no descriptor left: this pull's end alone
                self._waiting.remove(pull)
                self._finish(pull, Ending.ABSENT, str(error))
                continue
            if link is not None:
                self._waiting.remove(pull)
                self._begin(pull, link)
        if self._waiting:
            self._reactor.note_due(min(pull._deadline_ns or _NEVER for pull in self._waiting))  # noqa: SLF001  # as above

    def _begin(self, pull: Pull, link: OwnerLink) -> None:
        """Begin a pull; where its connection breaks by it, that is the end of all that it was pulling."""
        key, ranges, into = pull._what  # noqa: SLF001  # as above
        try:
            number = link.pull(key, ranges, into, pull._deadline_ns)  # noqa: SLF001  # as above
        except ZbusError as error:
            link.owner_gone(str(error))
            self._hang_up(link)
            self._finish(pull, Ending.ABSENT, str(error))
            return
        pull._link, pull._number = link, number  # noqa: SLF001  # as above
        self._pulls[pull.endpoint, number] = pull

    def _dial(self, endpoint: str) -> OwnerLink | None:
        if len(self._links) >= MOST_DATA_PEERS:
            idle = [link for link in self._links.values() if link.puller.idle]
            if not idle:
                return None
            self._hang_up(min(idle, key=lambda link: link.idle_since))
        link = OwnerLink(
            self._reactor,
            self._factory,
            endpoint,
            lambda number, how, evidence: self._on_end(endpoint, number, how, evidence),
            self._now,
            piece=self._piece,
            window=self._window,
            patience=self._patience,
        )
        self._links[endpoint] = link
        self._reactor.note_due(self._now() + _IDLE_NS)
        return link

    def _hang_up(self, link: OwnerLink) -> None:
        del self._links[link.endpoint]
        _add(self._past, link.counts())
        link.close()

    def _on_end(self, endpoint: str, number: int, how: Ending, evidence: str) -> None:
        pull = self._pulls.pop((endpoint, number), None)
        if pull is not None:
            self._finish(pull, how, evidence)

    def _finish(self, pull: Pull, how: Ending, evidence: str) -> None:
        pull._end(how, evidence)  # noqa: SLF001  # as above
        if pull._then is not None:  # noqa: SLF001  # as above
            self._told.append(pull._tell)  # noqa: SLF001  # as above
            self._reactor.wake()
        if self._waiting:
            self._reactor.note_due(0)  # its connection may be idle now

    def _cancel(self, pull: Pull) -> None:
        with gate, self._reactor.lock:
            pull._then = None  # noqa: SLF001  # as above
            if pull.how is not None:
                return
            link = pull._link  # noqa: SLF001  # as above
            evidence = "given up here, before anything came"
            if link is None:
                self._waiting.remove(pull)
            else:
                evidence = f"given up here; {link.puller.progress(pull._number)}"  # noqa: SLF001  # as above
                link.cancel(pull._number)  # noqa: SLF001  # as above
                self._pulls.pop((pull.endpoint, pull._number), None)  # noqa: SLF001  # as above
            self._finish(pull, Ending.CANCELLED, evidence)
        self._reactor.wake()  # as in ``pull``

    def _tick(self, now: int) -> int:
        due = _NEVER if self._counter is None else self._counter.on_timer(now)
        for link in list(self._links.values()):
            link.on_timer(now)
            if link.puller.idle and (link.spoilt or now - link.idle_since >= _IDLE_NS):
                self._hang_up(link)
                continue
            due = min(due, link.puller.due_ns, link.idle_since + _IDLE_NS if link.puller.idle else _NEVER)
        for pull in [pull for pull in self._waiting if (pull._deadline_ns or _NEVER) <= now]:  # noqa: SLF001  # as above
            self._waiting.remove(pull)
            self._finish(pull, Ending.DEADLINE, f"its time is over; it waited for one of {MOST_DATA_PEERS} connections")
        self._admit()
        for pull in self._waiting:
            due = min(due, pull._deadline_ns or _NEVER)  # noqa: SLF001  # as above
        return due


def _add(totals: dict[str, int], counts: dict[str, int]) -> None:
    for name, number in counts.items():
        totals[name] = totals.get(name, 0) + number


def _choose(endpoints: Sequence[str]) -> str:
    """Return the best endpoint that can be reached from here: a unix socket only where its file is."""
    for endpoint in endpoints:
        if not endpoint.startswith("ipc://") or os.path.exists(endpoint.removeprefix("ipc://")):  # noqa: PTH110  # hot path
            return endpoint
    msg = f"no way to the owner of the data: {', '.join(endpoints) or 'it named no endpoint'}"
    raise TransportError(msg)
