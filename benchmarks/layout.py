"""Who drives the sockets, and how many there are: the measurements behind decisions 0003 and 0004.

    python benchmarks/layout.py --json                   # one JSON line per result
    python benchmarks/layout.py --only who --rounds 5    # only the first table
    python benchmarks/layout.py --only sockets --sizes 16,256

Two tables, each in interleaved rounds of one run; a ratio is the median of the ratios to ``raw`` of the same round.

``who``: one small call at a time (``who_call``), broadcast and gather over 8 (``who_fanout_8``), 64 calls in flight
(``who_pipeline``), where the caller's end of the same DEALERs is driven by: ``raw`` (blocking send and receive),
``caller`` (the calling thread polls zmq), ``reactor`` (ours: descriptors in epoll, one mutex, the waiter leads),
``io_thread`` (a thread owns the sockets; a queue and a wake-up each way), ``zmq_asyncio``, ``asyncio_fd`` (a reader on
each zmq descriptor), ``asyncio_reactor`` (ours inside a loop: one reader on the reactor's epoll).

``sockets``: broadcast and gather over W simulated workers (ROUTER echoes, many per process) with one DEALER per worker
(``dealer``), with a monitor each (``dealer_mon``), two per worker (``main`` and ``ctl``) with a monitor on both
(``two_mon``) or on ``main`` only (``two_one_mon``), and one ROUTER that connects out (``router``). Besides the time:
descriptors and context sockets per worker, seconds until all W are connected, and the time from ``kill -9`` of one
worker to its name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import select
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from zbus.transport.interrupts import gate
from zbus.transport.multipart import Receiver, send
from zbus.transport.reactor import Reactor

FANOUT = 8
IN_FLIGHT = 64
PER_PROCESS = 64
NEVER_S = 1.0
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


# -- simulated workers -----------------------------------------------------------------------------------------------


def echo_farm(endpoints: list[str], ready: Any) -> None:
    """Serve one ROUTER echo per endpoint from one thread, for ever."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, len(endpoints) + 16)
    epoll = select.epoll()
    sockets = {}
    for endpoint in endpoints:
        socket = context.socket(zmq.ROUTER)
        socket.bind(endpoint)
        fd = socket.getsockopt(zmq.FD)
        sockets[fd] = socket
        epoll.register(fd, select.EPOLLIN)
    ready.set()
    parent = os.getppid()
    while os.getppid() == parent:
        for fd, _ in epoll.poll(1.0):
            socket = sockets[fd]
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                socket.send_multipart(socket.recv_multipart())


class Farm:
    """``count`` simulated workers, at most ``PER_PROCESS`` in a process."""

    def __init__(self, directory: str, name: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.endpoints = [f"ipc://{directory}/{name}.{number}" for number in range(count)]
        self.processes = []
        for first in range(0, count, PER_PROCESS):
            ready = context.Event()
            chunk = self.endpoints[first : first + PER_PROCESS]
            process = context.Process(target=echo_farm, args=(chunk, ready), daemon=True)
            process.start()
            assert ready.wait(60)
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


# -- who drives ------------------------------------------------------------------------------------------------------


class Driver(Protocol):
    """One way to make calls to W workers."""

    def call(self) -> None: ...
    def fanout(self) -> None: ...
    def pipeline(self, calls: int) -> None: ...
    def close(self) -> None: ...


def _dealers(context: Any, endpoints: list[str]) -> list[Any]:
    sockets = []
    for endpoint in endpoints:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        sockets.append(socket)
    return sockets


class RawDriver:
    """Blocking send and receive: the least that pyzmq can do."""

    def __init__(self, endpoints: list[str]) -> None:
        self.context = zmq.Context()
        self.sockets = _dealers(self.context, endpoints)

    def call(self) -> None:
        self.sockets[0].send(b"x")
        self.sockets[0].recv()

    def fanout(self) -> None:
        for socket in self.sockets:
            socket.send(b"x")
        for socket in self.sockets:
            socket.recv()

    def pipeline(self, calls: int) -> None:
        socket = self.sockets[0]
        for _ in range(IN_FLIGHT):
            socket.send(b"x")
        for _ in range(calls - IN_FLIGHT):
            socket.recv()
            socket.send(b"x")
        for _ in range(IN_FLIGHT):
            socket.recv()

    def close(self) -> None:
        self.context.destroy(0)


class MatchingDriver:
    """Calls matched to answers by number; how the answers arrive is the subclass's business."""

    def __init__(self) -> None:
        self.results: dict[bytes, bytes] = {}
        self.numbers = 0

    def submit(self, worker: int) -> bytes:
        """Send one call and return its number."""
        raise NotImplementedError

    def wait(self, number: bytes) -> None:
        """Return when the call of that number is answered."""
        raise NotImplementedError

    def workers(self) -> int:
        """Return how many workers there are."""
        raise NotImplementedError

    def next_number(self) -> bytes:
        self.numbers += 1
        return struct.pack("<Q", self.numbers)

    def call(self) -> None:
        self.wait(self.submit(0))

    def fanout(self) -> None:
        for number in [self.submit(worker) for worker in range(self.workers())]:
            self.wait(number)

    def pipeline(self, calls: int) -> None:
        pending = deque(self.submit(0) for _ in range(IN_FLIGHT))
        for _ in range(calls - IN_FLIGHT):
            self.wait(pending.popleft())
            pending.append(self.submit(0))
        while pending:
            self.wait(pending.popleft())


class CallerDriver(MatchingDriver):
    """The calling thread polls the zmq sockets."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.context = zmq.Context()
        self.sockets = _dealers(self.context, endpoints)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def workers(self) -> int:
        return len(self.sockets)

    def submit(self, worker: int) -> bytes:
        number = self.next_number()
        self.sockets[worker].send(number, zmq.NOBLOCK)
        return number

    def wait(self, number: bytes) -> None:
        results = self.results
        while number not in results:
            for socket, _ in self.poller.poll():
                with contextlib.suppress(zmq.Again):
                    while True:
                        results[socket.recv(zmq.NOBLOCK)] = b""
        del results[number]

    def close(self) -> None:
        self.context.destroy(0)


class ReactorDriver(MatchingDriver):
    """Ours: epoll on descriptors outside one mutex, sockets only under it, signals deferred, the waiter leads."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.context = zmq.Context()
        self.sockets = _dealers(self.context, endpoints)
        self.reactor = Reactor()
        self.takers = [self._taker(socket) for socket in self.sockets]
        for socket, taker in zip(self.sockets, self.takers, strict=True):
            self.reactor.register(int(socket.getsockopt(zmq.FD)), taker)
        self.reactor.start()

    def _taker(self, socket: Any) -> Callable[[], None]:
        receiver = Receiver(socket)

        def take() -> None:
            while (frames := receiver.recv()) is not None:
                self.answered(bytes(frames[0]))

        return take

    def answered(self, number: bytes) -> None:
        self.results[number] = b""

    def workers(self) -> int:
        return len(self.sockets)

    def submit(self, worker: int) -> bytes:
        with gate, self.reactor.lock:
            number = self.next_number()
            socket = self.sockets[worker]
            send(socket, [number])
            if socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self.takers[worker]()
        return number

    def wait(self, number: bytes) -> None:
        self.reactor.drive(lambda: number in self.results)
        del self.results[number]

    def close(self) -> None:
        with self.reactor.lock:
            for socket in self.sockets:
                self.reactor.unregister(int(socket.getsockopt(zmq.FD)))
        self.reactor.close()
        self.context.destroy(0)


class ThreadDriver(MatchingDriver):
    """An I/O thread owns the sockets; callers hand it messages through a queue and sleep on a lock of their own."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.context = zmq.Context()
        self.sockets = _dealers(self.context, endpoints)
        self.outbox: deque[tuple[int, bytes]] = deque()
        self.locks: dict[bytes, Any] = {}
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.asleep = False
        self.closing = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def workers(self) -> int:
        return len(self.sockets)

    def submit(self, worker: int) -> bytes:
        number = self.next_number()
        lock = threading.Lock()
        lock.acquire()
        self.locks[number] = lock
        self.outbox.append((worker, number))
        if self.asleep:
            os.eventfd_write(self.wake_fd, 1)
        return number

    def wait(self, number: bytes) -> None:
        self.locks[number].acquire()
        del self.locks[number]

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.wake_fd, zmq.POLLIN)
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        while not self.closing:
            self.asleep = True
            events = poller.poll(0 if self.outbox else 1000)
            self.asleep = False
            for socket, _ in events:
                if socket == self.wake_fd:
                    os.eventfd_read(self.wake_fd)
                    continue
                with contextlib.suppress(zmq.Again):
                    while True:
                        self.locks[socket.recv(zmq.NOBLOCK)].release()
            while self.outbox:
                worker, number = self.outbox.popleft()
                self.sockets[worker].send(number, zmq.NOBLOCK)

    def close(self) -> None:
        self.closing = True
        os.eventfd_write(self.wake_fd, 1)
        self.thread.join()
        os.close(self.wake_fd)
        self.context.destroy(0)


class LoopDriver:
    """Calls awaited on one event loop, which runs only while calls are out."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    async def one(self, worker: int) -> None:
        """Make one call."""
        raise NotImplementedError

    def workers(self) -> int:
        """Return how many workers there are."""
        raise NotImplementedError

    def repeat(self, kind: str, count: int) -> list[int]:
        """Return the nanoseconds of ``count`` calls or fan-outs, awaited one after the other inside the loop."""

        async def run() -> list[int]:
            times = []
            for _ in range(count):
                began = time.perf_counter_ns()
                if kind == "call":
                    await self.one(0)
                else:
                    await asyncio.gather(*(self.one(worker) for worker in range(self.workers())))
                times.append(time.perf_counter_ns() - began)
            return times

        return self.loop.run_until_complete(run())

    def call(self) -> None:
        self.repeat("call", 1)

    def fanout(self) -> None:
        self.repeat("fanout", 1)

    def pipeline(self, calls: int) -> None:
        async def some(count: int) -> None:
            for _ in range(count):
                await self.one(0)

        async def run() -> None:
            await asyncio.gather(*(some(calls // IN_FLIGHT) for _ in range(IN_FLIGHT)))

        self.loop.run_until_complete(run())

    def close(self) -> None:
        self.loop.close()


class ZmqAsyncioDriver(LoopDriver):
    """pyzmq's own asyncio sockets, with a task that receives for each."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.context = zmq.asyncio.Context()
        self.numbers = 0
        self.futures: dict[bytes, asyncio.Future[None]] = {}

        async def begin() -> None:
            self.sockets = _dealers(self.context, endpoints)
            self.tasks = [asyncio.ensure_future(self._take(socket)) for socket in self.sockets]

        self.loop.run_until_complete(begin())

    async def _take(self, socket: Any) -> None:
        while True:
            self.futures.pop(await socket.recv()).set_result(None)

    def workers(self) -> int:
        return len(self.sockets)

    async def one(self, worker: int) -> None:
        self.numbers += 1
        number = struct.pack("<Q", self.numbers)
        future = self.futures[number] = self.loop.create_future()
        await self.sockets[worker].send(number)
        await future

    def close(self) -> None:
        async def end() -> None:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.context.destroy(0)
        super().close()


class FdDriver(LoopDriver):
    """A loop reader on each zmq descriptor that drains the plain socket."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.context = zmq.Context()
        self.numbers = 0
        self.futures: dict[bytes, asyncio.Future[None]] = {}
        self.sockets = _dealers(self.context, endpoints)
        for socket in self.sockets:
            self.loop.add_reader(socket.getsockopt(zmq.FD), self._drain, socket)

    def _drain(self, socket: Any) -> None:
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.futures.pop(socket.recv(zmq.NOBLOCK)).set_result(None)

    def workers(self) -> int:
        return len(self.sockets)

    async def one(self, worker: int) -> None:
        self.numbers += 1
        number = struct.pack("<Q", self.numbers)
        future = self.futures[number] = self.loop.create_future()
        socket = self.sockets[worker]
        socket.send(number, zmq.NOBLOCK)
        self._drain(socket)  # the send may have swallowed the signal
        await future

    def close(self) -> None:
        for socket in self.sockets:
            self.loop.remove_reader(socket.getsockopt(zmq.FD))
        self.context.destroy(0)
        super().close()


class ReactorLoopDriver(LoopDriver):
    """Ours inside a loop: one reader on the reactor's epoll descriptor while calls are out."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__()
        self.futures: dict[bytes, asyncio.Future[None]] = {}
        self.inner = ReactorDriver(endpoints)
        self.inner.answered = self._answered  # type: ignore[method-assign]  # the one thing that differs

    def _answered(self, number: bytes) -> None:
        future = self.futures.pop(number)
        if threading.get_ident() == self.thread:
            future.set_result(None)
        else:  # the background thread led for a moment
            self.loop.call_soon_threadsafe(future.set_result, None)

    def workers(self) -> int:
        return self.inner.workers()

    async def one(self, worker: int) -> None:
        inner = self.inner
        self.thread = threading.get_ident()
        future = self.loop.create_future()
        with gate, inner.reactor.lock:
            self.futures[struct.pack("<Q", inner.numbers + 1)] = future
            inner.submit(worker)
        inner.reactor.attach_loop(self.loop)
        try:
            await future
        finally:
            inner.reactor.detach_loop(self.loop)

    def close(self) -> None:
        self.inner.close()
        super().close()


DRIVERS: dict[str, Callable[[list[str]], Any]] = {
    "raw": RawDriver,
    "caller": CallerDriver,
    "reactor": ReactorDriver,
    "io_thread": ThreadDriver,
    "zmq_asyncio": ZmqAsyncioDriver,
    "asyncio_fd": FdDriver,
    "asyncio_reactor": ReactorLoopDriver,
}


# -- how many sockets ------------------------------------------------------------------------------------------------


class Sockets:
    """One layout of the caller's sockets towards W workers; ``dead`` collects the peers that a monitor reported."""

    def __init__(self, endpoints: list[str], kind: str) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8 * len(endpoints) + 64)
        self.epoll = select.epoll()
        self.kind = kind
        self.endpoints = list(endpoints)
        self.takers: dict[int, Callable[[], None]] = {}
        self.connected: set[int] = set()
        self.dead: set[int] = set()
        self.answers = 0
        self.made = 0
        self.idle: list[Any] = []
        self.fds_before = open_descriptors()
        self.began = time.perf_counter()
        if kind == "router":
            self._one_router()
        else:
            self._dealers()

    def _socket(self, kind: int) -> Any:
        self.made += 1
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _watch(self, socket: Any, take: Callable[[], None]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        self.takers[fd] = take
        self.epoll.register(fd, select.EPOLLIN)
        take()

    def _monitor(self, socket: Any, peer_of: Callable[[str], int]) -> None:
        address = f"inproc://monitor-{id(socket)}"
        socket.monitor(address, _MONITORED)
        self.made += 2  # the PAIR at each end
        watcher = self.context.socket(zmq.PAIR)
        watcher.connect(address)
        self.idle.append(watcher)

        def take() -> None:
            while watcher.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                event, endpoint = watcher.recv_multipart(zmq.NOBLOCK)
                peer = peer_of(endpoint.decode())
                if struct.unpack("=hi", event)[0] == zmq.EVENT_DISCONNECTED:
                    self.dead.add(peer)
                else:
                    self.connected.add(peer)

        self._watch(watcher, take)

    def _one_router(self) -> None:
        numbers = {endpoint: number for number, endpoint in enumerate(self.endpoints)}
        router = self.router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 100_000)
        self._monitor(router, numbers.__getitem__)
        self.names = []
        for number, endpoint in enumerate(self.endpoints):
            name = f"w{number}".encode()
            router.setsockopt(zmq.CONNECT_ROUTING_ID, name)
            router.connect(endpoint)
            self.names.append(name)

        def take() -> None:
            while router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                router.recv_multipart(zmq.NOBLOCK)
                self.answers += 1

        self.take_router = take
        self._watch(router, take)

    def _dealers(self) -> None:
        self.dealers = []
        for number, endpoint in enumerate(self.endpoints):
            dealer = self._dealer(number, endpoint, monitored=self.kind in ("dealer_mon", "two_mon", "two_one_mon"))
            self.dealers.append((dealer, self.takers[int(dealer.getsockopt(zmq.FD))]))
            if self.kind.startswith("two_"):
                self.idle.append(self._dealer(number, endpoint, monitored=self.kind == "two_mon"))

    def _dealer(self, number: int, endpoint: str, *, monitored: bool) -> Any:
        dealer = self._socket(zmq.DEALER)

        def take() -> None:
            while dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                dealer.recv(zmq.NOBLOCK)
                self.answers += 1

        if monitored:
            self._monitor(dealer, lambda _endpoint: number)
        dealer.connect(endpoint)
        self._watch(dealer, take)
        return dealer

    def descriptors(self) -> int:
        return open_descriptors() - self.fds_before

    def fanout(self) -> None:
        wanted = self.answers + len(self.endpoints)
        if self.kind == "router":
            for name in self.names:
                send(self.router, [name, b"x"])
            self.take_router()
        else:
            for dealer, _ in self.dealers:
                send(dealer, [b"x"])
            for dealer, take in self.dealers:
                if dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    take()
        while self.answers < wanted:
            self.poll(1.0)

    def poll(self, timeout_s: float) -> None:
        for fd, _ in self.epoll.poll(timeout_s):
            self.takers[fd]()

    def close(self) -> None:
        self.epoll.close()
        self.context.destroy(0)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


LAYOUTS = ("dealer", "dealer_mon", "two_one_mon", "two_mon", "router")


def kill_detection_ms(farm: Farm, kind: str, directory: str, number: int) -> float | None:
    """Return milliseconds from ``kill -9`` of one of W + 1 workers until its name is known; None for never."""
    victim = Farm(directory, f"victim-{kind}-{number}", 1)
    try:
        sockets = Sockets([*farm.endpoints, *victim.endpoints], kind)
        try:
            for _ in range(3):
                sockets.fanout()
            index = len(farm.endpoints)
            began = time.perf_counter()
            os.kill(victim.processes[0].pid or 0, signal.SIGKILL)
            while index not in sockets.dead:
                sockets.poll(0.1)
                if time.perf_counter() - began > NEVER_S:
                    return None
            return (time.perf_counter() - began) * 1e3
        finally:
            sockets.close()
    finally:
        victim.close()


# -- measuring -------------------------------------------------------------------------------------------------------


class Results:
    """Figures by workload and system, each with the raw figure of its round."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], list[tuple[float, float | None]]] = {}

    def add(self, workload: str, system: str, unit: str, value: float, raw: float | None = None) -> None:
        self.rows.setdefault((workload, system, unit), []).append((value, raw))

    def lines(self) -> Iterator[dict[str, Any]]:
        for (workload, system, unit), values in self.rows.items():
            ratios = [value / raw for value, raw in values if raw]
            yield {
                "workload": workload,
                "system": system,
                "median": round(statistics.median(value for value, _ in values), 2),
                "best": round((max if unit == "calls/s" else min)(value for value, _ in values), 2),
                "unit": unit,
                "ratio": round(statistics.median(ratios), 3) if ratios else None,
                "rounds": len(values),
            }


def median_us(step: Callable[[], None], count: int) -> float:
    """Return the median microseconds of ``count`` steps after a warm-up."""
    times = []
    for turn in range(count + count // 10 + 5):
        began = time.perf_counter_ns()
        step()
        if turn >= count // 10 + 5:
            times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


def driver_us(driver: Any, kind: str, count: int) -> float:
    """Return the median of one kind of step, inside a running loop where the driver has one."""
    if isinstance(driver, LoopDriver):
        driver.repeat(kind, count // 10 + 5)
        return statistics.median(driver.repeat(kind, count)) / 1e3
    return median_us(getattr(driver, kind), count)


def measure_drivers(results: Results, rounds: int, scale: float, directory: str, only: list[str]) -> None:
    farm = Farm(directory, "who", FANOUT)
    drivers = {name: make(farm.endpoints) for name, make in DRIVERS.items() if not only or name in (*only, "raw")}
    count = max(100, int(1500 * scale))
    piped = max(1000, int(8000 * scale)) // IN_FLIGHT * IN_FLIGHT
    try:
        for _ in range(rounds):
            base: dict[str, float] = {}
            for name, driver in drivers.items():
                for kind, workload in (("call", "who_call"), ("fanout", f"who_fanout_{FANOUT}")):
                    value = driver_us(driver, kind, count if kind == "call" else count // 4)
                    base.setdefault(kind, value)
                    results.add(workload, name, "us", value, base[kind])
                began = time.perf_counter()
                driver.pipeline(piped)
                rate = piped / (time.perf_counter() - began)
                base.setdefault("pipeline", rate)
                results.add("who_pipeline", name, "calls/s", rate, base["pipeline"])
    finally:
        for driver in drivers.values():
            driver.close()
        farm.close()


def measure_sockets(results: Results, rounds: int, scale: float, directory: str, sizes: list[int]) -> None:
    for size in sizes:
        farm = Farm(directory, f"sockets{size}", size)
        raw = RawDriver(farm.endpoints)
        layouts: dict[str, Sockets] = {}
        try:
            for kind in LAYOUTS:
                layouts[kind] = sockets = Sockets(farm.endpoints, kind)
                sockets.fanout()
                results.add(f"join_{size}", kind, "ms", (time.perf_counter() - sockets.began) * 1e3)
                results.add(f"descriptors_{size}", kind, "per worker", sockets.descriptors() / size)
                results.add(f"sockets_{size}", kind, "per worker", sockets.made / size)
            count = max(10, int(2000 * scale / size))
            for _ in range(rounds):
                base = median_us(raw.fanout, count)
                results.add(f"fanout_{size}", "raw", "us", base, base)
                for kind, sockets in layouts.items():
                    results.add(f"fanout_{size}", kind, "us", median_us(sockets.fanout, count), base)
            for number in range(3):
                for kind in LAYOUTS:
                    found = kill_detection_ms(farm, kind, directory, 1000 * size + number)
                    results.add(f"kill_{size}", kind, "ms", float("inf") if found is None else found)
        finally:
            raw.close()
            for sockets in layouts.values():
                sockets.close()
            farm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of calls")
    parser.add_argument("--only", choices=["who", "sockets"], help="one of the two tables")
    parser.add_argument("--drivers", default="", help="comma-separated drivers of the first table; all by default")
    parser.add_argument("--sizes", default="1,16,64,256", help="numbers of workers of the second table")
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="zb-lay-") as directory:
        if options.only != "sockets":
            chosen = [name for name in options.drivers.split(",") if name]
            measure_drivers(results, options.rounds, options.scale, directory, chosen)
        if options.only != "who":
            sizes = [int(size) for size in options.sizes.split(",")]
            measure_sockets(results, options.rounds, options.scale, directory, sizes)
    if not options.json:
        print(f"{'workload':<18}{'system':<16}{'median':>12}{'best':>12} {'unit':<12}{'x raw':>8}")
    for line in results.lines():
        if options.json:
            # JSON knows no infinity: a death that nobody noticed is null
            print(
                json.dumps({key: None if value == float("inf") else value for key, value in line.items()}), flush=True
            )
        else:
            ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
            print(
                f"{line['workload']:<18}{line['system']:<16}{line['median']:>12.2f}{line['best']:>12.2f} "
                f"{line['unit']:<12}{ratio:>8}"
            )


if __name__ == "__main__":
    main()
