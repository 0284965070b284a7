"""A proxy between a controller and its workers that loses, doubles, delays and cuts what passes, message by message."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar

from zbus.testing.proxy.rules import REPLIES, REQUESTS, Direction, Rule
from zbus.testing.proxy.wire import GREETING_BYTES, MANGLED, Message, read_message

__all__ = ["FaultProxy"]

_T = TypeVar("_T")

_KEPT: Final = 256
"""Messages remembered per direction of each worker's connection, for ``replay``."""

_KEPT_BYTES: Final = 1 << 16
_ANSWER_S: Final = 10.0
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, by RST
_SIDES: Final = ("request", "reply")
_OTHER_SERVICE: Final = b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(100)


class FaultProxy:
    """Carries connections to workers and harms them as told. Methods may be called from any thread.

    Each worker address gets a front on loopback (``front``); ``zbus.testing.proxy.between`` puts the fronts in the
    way of every controller that is launched in a block. Without faults it only passes messages on.

    Args:
        seed: Of the choices by probability. What they hit also depends on the order in which messages arrive.

    Attributes:
        counters: How many messages passed (``request``, ``reply``) and were harmed (``drop request`` …), and how
            often connections were made, cut and frozen.
    """

    def __init__(self, seed: int = 0) -> None:
        self.counters: Counter[str] = Counter()
        self.rules: list[Rule] = []
        self._chance = random.Random(seed)  # noqa: S311  # faults, not secrets
        self._fronts: dict[tuple[str, str, str], str] = {}
        self._links: set[_Link] = set()
        self._servers: list[asyncio.Server] = []
        self._past: dict[tuple[str, str, str], deque[Message]] = {}
        self._frozen: set[tuple[str | None, str | None, str]] = set()
        self._thawed = asyncio.Event()
        self._refusing: set[str | None] = set()
        self._foreign: dict[str | None, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()

    # -- placing -----------------------------------------------------------------------------------------------------

    def front(self, endpoint: str, *, worker: str = "", link: str = "main") -> str:
        """Return the address that leads to ``endpoint`` through this proxy; the same one each time.

        Args:
            endpoint: Where the worker listens, ``ipc://…`` or ``tcp://…``.
            worker: Name for rules, such as ``actor/3``.
            link: Name of the connection for rules, ``main`` or ``ctl``.

        Raises:
            ValueError: Neither ipc nor tcp.
        """
        if not endpoint.startswith(("ipc://", "tcp://")):
            msg = f"a fault proxy leads to ipc or tcp endpoints, not to {endpoint!r}"
            raise ValueError(msg)
        with self._lock:
            key = (endpoint, worker, link)
            if key not in self._fronts:
                self._fronts[key] = self._do(self._listen(endpoint, worker, link))
            return self._fronts[key]

    # -- faults by rule ----------------------------------------------------------------------------------------------

    def drop(self, direction: Direction = "both", **which: Any) -> Rule:
        """Lose messages; see ``Rule`` for ``which``: worker, link, lane, kinds, probability, count, skip."""
        return self.add(Rule("drop", direction, **which))

    def duplicate(self, direction: Direction = "both", **which: Any) -> Rule:
        """Send messages again at once, ``copies`` times; see ``Rule``."""
        return self.add(Rule("duplicate", direction, **which))

    def delay(self, seconds: float, direction: Direction = "both", **which: Any) -> Rule:
        """Hold messages back; with ``overtake=True`` later ones may pass them, else all wait in line; see ``Rule``."""
        return self.add(Rule("delay", direction, seconds=seconds, **which))

    def cut_at(self, at_byte: int, direction: Direction = "both", **which: Any) -> Rule:
        """Let ``at_byte`` bytes of a message through and reset the connection; see ``Rule``. Count 1 if not given."""
        which.setdefault("count", 1)
        return self.add(Rule("cut", direction, at_byte=at_byte, **which))

    def mangle(self, direction: Direction = "both", **which: Any) -> Rule:
        """Put bytes that are no message in the place of one; see ``Rule``. Count 1 if not given.

        Whoever gets them ends the connection, and libzmq does not connect again by itself from that side.
        """
        which.setdefault("count", 1)
        return self.add(Rule("mangle", direction, **which))

    def add(self, rule: Rule) -> Rule:
        """Put a rule in force after those that are; a message is harmed by the first that takes it."""
        with self._lock:
            self.rules = [one for one in self.rules if not one.spent] + [rule]
        return rule

    # -- faults of whole connections ---------------------------------------------------------------------------------

    def cut(self, worker: str | None = None, link: str | None = None) -> int:
        """Reset the connections of a worker (all by default) on both sides; return how many there were.

        The caller's socket connects again by itself.
        """
        return self._do(self._cut(worker, link))

    def freeze(self, worker: str | None = None, link: str | None = None, direction: Direction = "both") -> None:
        """Pass nothing on, and close nothing: half-open, as when a host or a switch has gone; until ``thaw``.

        Nothing is lost meanwhile: what was sent is passed on after ``thaw``. New connections are frozen too.
        """
        self._do(self._set_frozen(worker, link, direction, on=True))

    def thaw(self) -> None:
        """End every ``freeze``."""
        self._do(self._thaw())

    def refuse(self, worker: str | None = None) -> None:
        """Reset the connections of a worker (all by default) and each new one at once; until ``accept``."""
        self._do(self._set_refusing(worker, on=True))

    def occupy(self, worker: str | None = None, greeting: bytes = _OTHER_SERVICE) -> None:
        """Cut a worker (all by default) and have another service answer at its address; until ``accept``.

        So it is when the port of a worker that has gone is reused.
        """
        self._do(self._set_foreign(worker, greeting))

    def accept(self) -> None:
        """End every ``refuse`` and ``occupy``."""
        self._do(self._set_refusing(None, on=False))

    def replay(self, worker: str, link: str = "main", direction: Direction = "request", last: int = 16) -> int:
        """Send remembered messages, also of dead connections, again on the living one; return how many.

        So come frames that were long on their way, after the connection they were sent on has gone.
        """
        return self._do(self._replay(worker, link, direction, last))

    def heal(self) -> None:
        """End every fault that is in force."""
        with self._lock:
            for rule in self.rules:
                rule.stop()
            self.rules = []
        self.thaw()
        self.accept()

    @property
    def connections(self) -> int:
        """Number of connections that are open."""
        return len(self._links)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut everything and stop the thread. May be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(Exception):  # whatever a connection died of, the thread must end
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_ANSWER_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FaultProxy {len(self._fronts)} fronts, {self.connections} connections, rules {self.rules}>"

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._closed:
            work.close()
            msg = "this fault proxy is closed"
            raise RuntimeError(msg)
        future: Future[_T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(_ANSWER_S)

    async def _listen(self, endpoint: str, worker: str, link: str) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(reader, writer, endpoint, worker, link)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: str, worker: str, link: str
    ) -> None:
        if self._refusing & {None, worker}:
            _reset(writer)
            return
        for who in (worker, None):
            if who in self._foreign:
                self.counters["foreign"] += 1
                await _speak(reader, writer, self._foreign[who])
                return
        try:
            far = await _connect(endpoint)
        except OSError:
            _reset(writer)
            return
        one = _Link(self, worker, link, (reader, writer), far)
        self._links.add(one)
        self.counters["connections"] += 1
        try:
            await one.run()
        finally:
            self._links.discard(one)

    async def _cut(self, worker: str | None, link: str | None) -> int:
        chosen = list(self._chosen(worker, link))
        for one in chosen:
            one.reset()
        self.counters["cut"] += len(chosen)
        return len(chosen)

    async def _set_frozen(self, worker: str | None, link: str | None, direction: str, *, on: bool) -> None:
        for side in _SIDES if direction == "both" else (direction,):
            (self._frozen.add if on else self._frozen.discard)((worker, link, side))
        self.counters["freeze"] += 1

    async def _thaw(self) -> None:
        self._frozen.clear()
        self._thawed.set()
        self._thawed = asyncio.Event()

    async def _set_refusing(self, worker: str | None, *, on: bool) -> None:
        if on:
            self._refusing.add(worker)
            for one in list(self._chosen(worker, None)):
                one.reset()
        else:
            self._refusing.clear()
            self._foreign.clear()

    async def _set_foreign(self, worker: str | None, greeting: bytes) -> None:
        self._foreign[worker] = greeting
        for one in list(self._chosen(worker, None)):
            one.reset()

    async def _replay(self, worker: str, link: str, direction: str, last: int) -> int:
        past = list(self._past.get((worker, link, direction), ()))[-last:]
        for one in self._chosen(worker, link):
            if direction not in one.talking:
                continue
            for message in past:
                one.write(direction, message.raw)
            self.counters[f"replay {direction}"] += len(past)
            return len(past)
        return 0

    def _chosen(self, worker: str | None, link: str | None) -> Iterator[_Link]:
        for one in list(self._links):
            if worker in (None, one.worker) and link in (None, one.link):
                yield one

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for one in list(self._links):
            one.reset()
        self._frozen.clear()
        self._thawed.set()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- asked by the links ------------------------------------------------------------------------------------------

    async def wait_thawed(self, worker: str, link: str, direction: str) -> None:
        """Return when the direction of a link is not frozen."""
        while any((w, k, direction) in self._frozen for w in (None, worker) for k in (None, link)):
            await self._thawed.wait()

    def fate(self, message: Message, worker: str, link: str, direction: str) -> Rule | None:
        """Return the rule that takes a message, if any, and count it."""
        if message.command:
            return None
        self.counters[direction] += 1
        for rule in self.rules:
            if rule.applies(message, direction, worker, link, self._chance):
                self.counters[f"{rule.action} {direction}"] += 1
                return rule
        return None

    def remember(self, message: Message, worker: str, link: str, direction: str) -> None:
        """Keep a message for ``replay``, unless it is large."""
        if len(message.raw) <= _KEPT_BYTES and (message.kind in REQUESTS or message.kind in REPLIES):
            past = self._past.setdefault((worker, link, direction), deque(maxlen=_KEPT))
            past.append(message)


class _Link:
    """One connection through the proxy: two pumps."""

    def __init__(
        self,
        proxy: FaultProxy,
        worker: str,
        link: str,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.proxy = proxy
        self.worker = worker
        self.link = link
        self._readers = {"request": near[0], "reply": far[0]}
        self._writers = {"request": far[1], "reply": near[1]}
        self._late: set[asyncio.Task[None]] = set()
        self.talking: set[str] = set()  # directions past the handshake

    async def run(self) -> None:
        """Pass messages on in both directions until either side ends; then end the other."""
        pumps = [asyncio.ensure_future(self._pump(direction)) for direction in _SIDES]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*pumps, *self._late):
                task.cancel()
            self.reset()
            await asyncio.gather(*pumps, *self._late, return_exceptions=True)

    def reset(self) -> None:
        """Reset both sides."""
        for writer in self._writers.values():
            _reset(writer)

    def write(self, direction: str, raw: bytes) -> None:
        """Write one whole message."""
        self._writers[direction].write(raw)

    async def _pump(self, direction: str) -> None:
        proxy, reader, writer = self.proxy, self._readers[direction], self._writers[direction]
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await proxy.wait_thawed(self.worker, self.link, direction)
            await _greet(reader, writer)
            while True:
                message = await read_message(reader)
                await proxy.wait_thawed(self.worker, self.link, direction)
                if not message.command:
                    self.talking.add(direction)
                rule = proxy.fate(message, self.worker, self.link, direction)
                proxy.remember(message, self.worker, self.link, direction)
                if rule is None:
                    writer.write(message.raw)
                elif not await self._harm(rule, message, direction):
                    return
                await writer.drain()

    async def _harm(self, rule: Rule, message: Message, direction: str) -> bool:
        """Do what a rule says; False if that ends the connection."""
        if rule.action == "duplicate":
            for _ in range(1 + rule.copies):
                self.write(direction, message.raw)
        elif rule.action == "delay" and rule.overtake:
            late = asyncio.ensure_future(self._later(rule.seconds, direction, message.raw))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        elif rule.action == "delay":
            await asyncio.sleep(rule.seconds)
            self.write(direction, message.raw)
        elif rule.action == "mangle":
            self.write(direction, MANGLED)
        elif rule.action == "cut":
            if rule.at_byte:
                self.write(direction, message.raw[: rule.at_byte])
                await self._writers[direction].drain()
                await asyncio.sleep(0.01)  # a reset overtakes what was not delivered yet
            self.proxy.counters["cut"] += 1
            return False
        return True

    async def _later(self, seconds: float, direction: str, raw: bytes) -> None:
        await asyncio.sleep(seconds)
        self.write(direction, raw)


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the greeting on piece by piece: each side sends its second part when it has seen the other's first."""
    left = GREETING_BYTES
    while left:
        piece = await reader.read(left)
        if not piece:
            raise asyncio.IncompleteReadError(piece, left)
        writer.write(piece)
        left -= len(piece)


async def _speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes) -> None:
    """Be another service: say something and listen until the caller has had enough."""
    with contextlib.suppress(OSError):
        writer.write(greeting)
        while await reader.read(4096):
            pass
    _reset(writer)


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if endpoint.startswith("ipc://"):
        return await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close by RST, so that the other side sees a broken connection and no orderly end."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
