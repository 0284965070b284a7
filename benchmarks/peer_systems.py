"""Rivals that ``--peers`` compares with, each driven as its own documentation says; one process per system and round.

    python benchmarks/peer_systems.py measure ray --workloads call_sync,fanout_4 --scale 1    # one JSON line per result

Needs numpy and the system, not zbus: each system has an interpreter of its own (``peers.py`` makes it). Nothing of a
system is imported before it is chosen. A workload that a system has no way for is left out.

What crosses the wire is the same for all: small integers, and arrays by value. Systems whose serializers know numpy
send arrays as they are; the others send one block of bytes (``pack``), made by one copy and read without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray_here

HERE = Path(__file__).resolve().parent
SIZES = {"64kb": 1 << 16, "1mb": 1 << 20, "16mb": 1 << 24, "256mb": 1 << 28}
IN_FLIGHT = 128
ROWS, TOKENS = 256, 4096
PATIENCE_S = 60.0
MOST_S = 1.5
Array = Any
Call = tuple[int, str, tuple[Any, ...]]


# -- what workers do --------------------------------------------------------------------------------------------------


def touch(array: Array) -> int:
    """Read one byte of each page."""
    return int(np.asarray(array).reshape(-1).view(np.uint8)[::4096].sum())


class Service:
    """The methods of a worker."""

    def __init__(self) -> None:
        self.made: dict[int, Array] = {}

    def echo(self, value: int) -> int:
        return value

    def pid(self) -> int:
        return os.getpid()

    def need(self, module: str) -> int:
        importlib.import_module(module)
        return 0

    def take(self, array: Array) -> int:
        return touch(array)

    def give(self, nbytes: int) -> Array:
        if nbytes not in self.made:
            self.made[nbytes] = np.ones(nbytes, np.uint8)
        return self.made[nbytes]

    def step(self, batch: dict[str, Array]) -> dict[str, Array]:
        for array in batch.values():
            touch(array)
        return batch

    def hang(self, seconds: float) -> int:
        time.sleep(seconds)
        return 0


SERVICE = Service()


def invoke(method: str, *args: Any) -> Any:
    return getattr(SERVICE, method)(*args)


def pack(*values: Any) -> bytes:
    """Return numbers, texts, arrays and dicts of arrays as one block: a JSON head, then the bytes of all arrays."""
    parts: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            parts.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return {"array": [value.dtype.str, value.shape]}
        if isinstance(value, dict):
            return {"dict": {name: plain(entry) for name, entry in value.items()}}
        return value

    head = json.dumps([plain(value) for value in values]).encode()
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def unpack(block: bytes) -> list[Any]:
    """Return the values of ``pack``; arrays are views of the block."""
    (size,) = struct.unpack_from("<I", block)
    at = 4 + size

    def whole(value: Any) -> Any:
        nonlocal at
        if not isinstance(value, dict):
            return value
        if "dict" in value:
            return {name: whole(entry) for name, entry in value["dict"].items()}
        kind, shape = np.dtype(value["array"][0]), value["array"][1]
        count = int(np.prod(shape))
        found = np.frombuffer(block, kind, count, at).reshape(shape)
        at += found.nbytes
        return found

    return [whole(value) for value in json.loads(block[4 : 4 + size])]


def answer(block: bytes) -> bytes:
    """Run one packed call and return its packed answer."""
    method, *args = unpack(block)
    return pack(invoke(method, *args))


# -- systems ----------------------------------------------------------------------------------------------------------


class System:
    """One system. ``submit`` begins a call, ``result`` waits for it."""

    most_bytes = 1 << 40

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def load(self) -> None:
        """Import the caller's side; not part of the start."""

    def start(self, workers: int) -> None:
        """Start workers; the first answered call of each ends it."""
        raise NotImplementedError

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def call(self, rank: int, method: str, *args: Any) -> Any:
        return self.result(self.submit(rank, method, *args))

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        return [self.result(handle) for handle in [self.submit(rank, method, *args) for rank, method, args in calls]]

    def arrays(self, value: Any) -> Any:
        """Return an array, or a dict of some, as this system takes it."""
        return value

    def plain(self, value: Any) -> Any:
        """Undo ``arrays``."""
        return value

    def broadcast(self, array: Array, ranks: Sequence[int]) -> None:
        self.gather([(rank, "take", (self.arrays(array),)) for rank in ranks])

    def pipeline(self, ranks: Sequence[int], calls: int) -> int:
        """Make ``calls`` calls with some in flight for each rank; return how many were answered."""
        waiting: deque[tuple[int, Any]] = deque()
        done = 0
        for number in range(calls):
            waiting.append((number, self.submit(ranks[number % len(ranks)], "echo", number)))
            if len(waiting) >= IN_FLIGHT * len(ranks):
                wanted, handle = waiting.popleft()
                assert self.result(handle) == wanted
                done += 1
        while waiting:
            wanted, handle = waiting.popleft()
            assert self.result(handle) == wanted
            done += 1
        return done

    batch: Callable[[int], None] | None = None
    """Makes so many ordered calls of one rank as one message, with an answer for each."""

    awaited: Callable[..., Awaitable[Any]] | None = None
    """``call`` for a caller on an asyncio loop, by the system's own means."""

    relay: Callable[[int], None] | None = None
    """Has rank 0 make an array of so many bytes, and rank 1 take it from there."""

    # -- worker processes that this script makes -----------------------------------------------------------------

    def spawn(self, rank: int, workers: int) -> None:
        command = [sys.executable, str(HERE / "peer_systems.py"), "worker", name_of(type(self)), str(rank)]
        with Path(self.directory, f"{rank}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen([*command, self.directory, str(workers)], stdout=log, stderr=log, env=environment())
            )

    def address(self, rank: int) -> str:
        """Wait until a worker has said where it listens."""
        path = Path(self.directory, f"address{rank}")
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                raise SystemExit(Path(self.directory, f"{rank}.log").read_text(errors="replace")[-2000:])
            time.sleep(0.002)
        return path.read_text()

    def all_answer(self, workers: int) -> None:
        for rank in range(workers):
            assert self.call(rank, "echo", rank) == rank

    @staticmethod
    def work(rank: int, directory: str, workers: int) -> None:
        """Be a worker, for ever."""
        raise NotImplementedError


def listening(directory: str, rank: int, address: str) -> None:
    """Say where a worker listens."""
    path = Path(directory, f"address{rank}")
    path.with_suffix(".new").write_text(address)
    path.with_suffix(".new").rename(path)


def environment() -> dict[str, str]:
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single, "PYTHONPATH": str(HERE)}


class Ray(System):
    """Actors; arrays go through its object store."""

    def load(self) -> None:
        self.ray = ray_here.imported()

    def start(self, workers: int) -> None:
        import peer_systems

        ray_here.start(self.ray, self.directory, 3 << 30)
        made = self.ray.remote(peer_systems.Service).options(num_cpus=0)
        self.actors = [made.remote() for _ in range(workers)]
        self.all_answer(workers)

    def stop(self) -> None:
        self.ray.shutdown()

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        return getattr(self.actors[rank], method).remote(*args)

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        return self.ray.get(handle, timeout=timeout_s)

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        found: list[Any] = self.ray.get([self.submit(rank, method, *args) for rank, method, args in calls])
        return found

    def broadcast(self, array: Array, ranks: Sequence[int]) -> None:
        stored = self.ray.put(array)
        self.ray.get([self.actors[rank].take.remote(stored) for rank in ranks])

    async def awaited(self, rank: int, method: str, *args: Any) -> Any:
        return await self.submit(rank, method, *args)

    def relay(self, nbytes: int) -> None:
        self.ray.get(self.actors[1].take.remote(self.actors[0].give.remote(nbytes)))


class Monarch(System):
    """An actor mesh on this host; a broadcast is one call of a slice."""

    def load(self) -> None:
        from monarch.actor import Actor, endpoint, this_host

        class Remote(Actor):  # a local class is sent by value
            @endpoint
            def run(self, method: str, *args: Any) -> Any:
                import peer_systems

                return peer_systems.invoke(method, *args)

        self.host, self.remote = this_host, Remote

    def start(self, workers: int) -> None:
        self.mesh = self.host().spawn_procs({"gpus": workers})
        self.actors = self.mesh.spawn("service", self.remote)
        self.ranks = [self.actors.slice(gpus=rank) for rank in range(workers)]
        self.workers = workers
        self.all_answer(workers)

    def stop(self) -> None:
        with contextlib.suppress(Exception):  # whatever it says, this process ends
            self.mesh.stop().get(timeout=20)

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        return self.ranks[rank].run.call_one(method, *args)

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        return handle.get(timeout=timeout_s)

    def gather(self, calls: Sequence[Call]) -> list[Any]:
        _, method, args = calls[0]
        if method != "echo" or any(call[1:] != (method, args) for call in calls):
            return super().gather(calls)
        some = self.actors if len(calls) == self.workers else self.actors.slice(gpus=slice(0, len(calls)))
        some.run.call(method, *args).get()
        return [args[0]] * len(calls)

    async def awaited(self, rank: int, method: str, *args: Any) -> Any:
        return await self.submit(rank, method, *args)


class TorchRpc(System):
    """``torch.distributed.rpc`` over TensorPipe, with tensors."""

    def load(self) -> None:
        os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
        import torch
        from torch.distributed import rpc

        torch.set_num_threads(1)
        self.torch, self.rpc = torch, rpc

    def start(self, workers: int) -> None:
        import peer_systems

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        for rank in range(workers):
            self.spawn(rank, workers)
        self.rpc.init_rpc("caller", rank=0, world_size=workers + 1, rpc_backend_options=self.options(self.rpc))
        self.run = peer_systems.torch_invoke
        self.all_answer(workers)

    @staticmethod
    def options(rpc: Any) -> Any:
        return rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=600)

    def stop(self) -> None:
        super().stop()
        with contextlib.suppress(Exception):  # whatever it says, this process ends
            self.rpc.shutdown(graceful=False)

    @staticmethod
    def work(rank: int, directory: str, workers: int) -> None:  # as of every system  # noqa: ARG004
        import torch
        from torch.distributed import rpc

        torch.set_num_threads(1)
        options = TorchRpc.options(rpc)
        rpc.init_rpc(f"w{rank}", rank=rank + 1, world_size=workers + 1, rpc_backend_options=options)
        signal.pause()

    def arrays(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.torch.from_numpy(array) for name, array in value.items()}
        return self.torch.from_numpy(value)

    def plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensor.numpy() for name, tensor in value.items()}
        return value.numpy()

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        return self.rpc.rpc_async(f"w{rank}", self.run, args=(method, *args))

    def relay(self, nbytes: int) -> None:
        import peer_systems

        made = self.rpc.remote("w0", self.run, args=("give", nbytes))
        self.rpc.rpc_sync("w1", peer_systems.torch_take, args=(made,))

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:  # it has no limit of its own
        return handle.wait()


def torch_take(made: Any) -> int:
    """Take an array from the worker that made it."""
    return SERVICE.take(made.to_here().numpy())


def torch_invoke(method: str, *args: Any) -> Any:
    """Run one call whose arrays are tensors."""
    import torch

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensor.numpy() for name, tensor in value.items()}
        return value.numpy() if isinstance(value, torch.Tensor) else value

    found = invoke(method, *map(plain, args))
    if isinstance(found, dict):
        return {name: torch.from_numpy(array) for name, array in found.items()}
    return torch.from_numpy(found) if isinstance(found, np.ndarray) else found


class Grpc(System):
    """Unary calls of bytes over a unix socket, one server thread."""

    def load(self) -> None:
        import grpc

        self.grpc = grpc

    def start(self, workers: int) -> None:
        for rank in range(workers):
            self.spawn(rank, workers)
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.methods = [
            self.grpc.insecure_channel(self.address(rank), unlimited).unary_unary("/peer/call")
            for rank in range(workers)
        ]
        self.all_answer(workers)

    @staticmethod
    def work(rank: int, directory: str, workers: int) -> None:  # as of every system  # noqa: ARG004
        import grpc

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # untyped
            def service(self, _details: Any) -> Any:
                return grpc.unary_unary_rpc_method_handler(lambda block, _context: answer(block))

        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        server = grpc.server(ThreadPoolExecutor(1), options=unlimited)
        server.add_generic_rpc_handlers((Handler(),))
        server.add_insecure_port(f"unix:{directory}/socket{rank}")
        server.start()
        listening(directory, rank, f"unix:{directory}/socket{rank}")
        server.wait_for_termination()

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        return self.methods[rank].future(pack(method, *args))

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        return unpack(handle.result(timeout_s))[0]


class Pyro5(System):
    """A proxy per worker over a unix socket, its msgpack serializer; many calls by its batches."""

    def load(self) -> None:
        import Pyro5.api

        self.api = Pyro5.api
        Pyro5.config.SERIALIZER = "msgpack"

    def start(self, workers: int) -> None:
        for rank in range(workers):
            self.spawn(rank, workers)
        self.threads = [ThreadPoolExecutor(1) for _ in range(workers)]
        self.proxies = [self.api.Proxy(self.address(rank)) for rank in range(workers)]
        self.all_answer(workers)

    @staticmethod
    def work(rank: int, directory: str, workers: int) -> None:  # as of every system  # noqa: ARG004
        import Pyro5.api

        Pyro5.config.SERIALIZER = "msgpack"

        @Pyro5.api.expose  # type: ignore[untyped-decorator]  # untyped
        class Exposed:
            def echo(self, value: int) -> int:
                return value

            def run(self, block: bytes) -> bytes:
                return answer(block)

        daemon = Pyro5.api.Daemon(unixsocket=f"{directory}/socket{rank}")
        listening(directory, rank, str(daemon.register(Exposed(), "service")))
        daemon.requestLoop()

    def call(self, rank: int, method: str, *args: Any) -> Any:
        proxy = self.proxies[rank]
        proxy._pyroClaimOwnership()  # noqa: SLF001  # its way to use a proxy on another thread
        if method == "echo":
            return proxy.echo(*args)
        return unpack(proxy.run(pack(method, *args)))[0]

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        return self.threads[rank].submit(self.call, rank, method, *args)

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        return handle.result(timeout_s)

    def pipeline(self, ranks: Sequence[int], calls: int) -> int:
        def some(rank: int) -> int:
            return self._batch(rank, IN_FLIGHT)

        done = 0
        while done < calls:
            done += sum(future.result() for future in [self.threads[rank].submit(some, rank) for rank in ranks])
        return done

    def _batch(self, rank: int, count: int) -> int:
        proxy = self.proxies[rank]
        proxy._pyroClaimOwnership()  # noqa: SLF001  # as above
        batch = self.api.BatchProxy(proxy)
        for number in range(count):
            batch.echo(number)
        return len(list(batch()))

    def batch(self, count: int) -> None:
        assert self._batch(0, count) == count


class Rpyc(System):
    """A service over a unix socket. It compresses every larger message."""

    most_bytes = 1 << 24

    def load(self) -> None:
        import rpyc

        self.rpyc = rpyc

    def start(self, workers: int) -> None:
        for rank in range(workers):
            self.spawn(rank, workers)
        patient = {"sync_request_timeout": None}
        self.methods = []
        for rank in range(workers):
            self.address(rank)
            deadline = time.monotonic() + PATIENCE_S
            while True:  # it says that it listens before it does
                try:
                    made = self.rpyc.utils.factory.unix_connect(f"{self.directory}/socket{rank}", config=patient)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            self.methods.append((made, self.rpyc.async_(made.root.echo), self.rpyc.async_(made.root.run)))
        self.all_answer(workers)

    @staticmethod
    def work(rank: int, directory: str, workers: int) -> None:  # as of every system  # noqa: ARG004
        import rpyc
        from rpyc.utils.server import ThreadedServer

        class Exposed(rpyc.Service):  # type: ignore[misc]  # untyped
            def exposed_echo(self, value: int) -> int:
                return value

            def exposed_run(self, block: bytes) -> bytes:
                return answer(block)

        path = f"{directory}/socket{rank}"
        server = ThreadedServer(Exposed(), socket_path=path, protocol_config={"sync_request_timeout": None})
        listening(directory, rank, path)
        server.start()

    def submit(self, rank: int, method: str, *args: Any) -> Any:
        _, echo, run = self.methods[rank]
        return (True, echo(*args)) if method == "echo" else (False, run(pack(method, *args)))

    def result(self, handle: Any, timeout_s: float | None = None) -> Any:
        plain, pending = handle
        if timeout_s is not None:
            pending.set_expiry(timeout_s)
        return pending.value if plain else unpack(pending.value)[0]


SYSTEMS: dict[str, type[System]] = {
    "ray": Ray,
    "monarch": Monarch,
    "torch-rpc": TorchRpc,
    "grpc": Grpc,
    "pyro5": Pyro5,
    "rpyc": Rpyc,
}


def name_of(kind: type[System]) -> str:
    return next(name for name, known in SYSTEMS.items() if known.__name__ == kind.__name__)


# -- measuring --------------------------------------------------------------------------------------------------------


def times_s(step: Callable[[], Any], count: int) -> list[float]:
    """Return the sorted seconds of up to ``count`` steps, for ``MOST_S`` at most, after two more."""
    step()
    step()
    found = []
    ends = time.perf_counter() + MOST_S
    while len(found) < count and (len(found) < 3 or time.perf_counter() < ends):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return sorted(found)


async def awaits_s(step: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Do as ``times_s`` with steps that are awaited."""
    await step()
    await step()
    found: list[float] = []
    ends = time.perf_counter() + MOST_S
    while len(found) < count and (len(found) < 3 or time.perf_counter() < ends):
        began = time.perf_counter()
        await step()
        found.append(time.perf_counter() - began)
    return sorted(found)


def small(system: System, workloads: set[str], scale: float, workers: int) -> Iterator[tuple[str, str, float]]:
    """Measure small calls."""
    if "call_sync" in workloads:
        found = times_s(lambda: system.call(0, "echo", 1), max(200, int(2000 * scale)))
        yield "call_sync", "us", statistics.median(found) * 1e6
        yield "call_sync_p99", "us", found[int(len(found) * 0.99)] * 1e6
    if "call_async" in workloads and system.awaited is not None:
        found = asyncio.run(awaits_s(lambda: system.awaited(0, "echo", 1), max(200, int(2000 * scale))))  # type: ignore[misc]  # checked
        yield "call_async", "us", statistics.median(found) * 1e6
        yield "call_async_p99", "us", found[int(len(found) * 0.99)] * 1e6
    for count in (1, 8):
        if f"pipeline_{count}" in workloads:
            ranks = range(count)
            system.pipeline(ranks, 200)
            # As many calls as one second or so would need.
            began = time.perf_counter()
            probe = system.pipeline(ranks, 400)
            calls = max(400, min(int(10_000 * scale), int(probe / (time.perf_counter() - began))))
            began = time.perf_counter()
            done = system.pipeline(ranks, calls)
            yield f"pipeline_{count}", "calls/s", done / (time.perf_counter() - began)
    if "batch_64" in workloads and system.batch is not None:
        batch = system.batch
        yield "batch_64", "calls/s", 64 / statistics.median(times_s(lambda: batch(64), 150))
    for count in (1, 4, 8, 16):
        if f"fanout_{count}" in workloads and count <= workers:
            calls: list[Call] = [(rank, "echo", (7,)) for rank in range(count)]
            assert system.gather(calls) == [7] * count
            found = times_s(lambda calls=calls: system.gather(calls), 300)  # type: ignore[misc]  # a default
            yield f"fanout_{count}", "us", statistics.median(found) * 1e6


def bulk(system: System, workloads: set[str]) -> Iterator[tuple[str, str, float]]:
    """Measure arrays."""
    for name, size in SIZES.items():
        if size > system.most_bytes:
            continue
        count = max(3, min(50, (128 << 20) // size))
        if f"send_{name}" in workloads:
            array = system.arrays(np.ones(size, np.uint8))
            took = statistics.median(times_s(lambda array=array: system.call(0, "take", array), count))  # type: ignore[misc]  # a default
            yield f"send_{name}", "GB/s", size / took / 1e9
        if f"recv_{name}" in workloads:

            def receive(size: int = size) -> None:
                found = system.plain(system.call(0, "give", size))
                assert found.nbytes == size
                touch(found)

            yield f"recv_{name}", "GB/s", size / statistics.median(times_s(receive, count)) / 1e9
    if "ref_256mb" in workloads and system.relay is not None:
        relay, size = system.relay, SIZES["256mb"]
        yield "ref_256mb", "GB/s", size / statistics.median(times_s(lambda: relay(size), 5)) / 1e9
    if "broadcast_16mb" in workloads:
        array = np.ones(SIZES["16mb"], np.uint8)
        yield "broadcast_16mb", "ms", statistics.median(times_s(lambda: system.broadcast(array, range(4)), 20)) * 1e3
    if "rl_batch" in workloads:
        rows = ROWS // 4
        kinds = {"ids": np.int64, "logprobs": np.float32, "mask": np.bool_, "positions": np.int64}
        parts = [{name: np.ones((rows, TOKENS), kind) for name, kind in kinds.items()} for _ in range(4)]

        def step() -> None:
            calls: list[Call] = [(rank, "step", (system.arrays(part),)) for rank, part in enumerate(parts)]
            for found in system.gather(calls):
                for array in system.plain(found).values():
                    touch(array)

        yield "rl_batch", "ms", statistics.median(times_s(step, 15)) * 1e3


def kill_ms(system: System) -> float:
    """Return the milliseconds from the kill of a worker in a call until its caller has an error; inf for never."""
    victim = system.call(0, "pid")
    found: dict[str, float] = {}

    def wait() -> None:
        try:
            system.result(system.submit(0, "hang", 10 * PATIENCE_S), PATIENCE_S)
        except Exception:  # noqa: BLE001  # that there is one is what is measured
            found["end"] = time.perf_counter()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.7)  # no system says that a call has begun
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    thread.join(PATIENCE_S)
    took = found.get("end", float("inf")) - began
    return took * 1e3 if took < PATIENCE_S * 0.95 else float("inf")


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(name: str, workloads: set[str], scale: float) -> Iterator[tuple[str, str, float]]:
    """Start a system and measure what of it can be."""
    needed = [int(found) for word in workloads for found in word.split("_")[1:] if found.isdigit() and int(found) <= 16]
    os.environ.update(environment())
    with tempfile.TemporaryDirectory(prefix="zb-peer-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        system = SYSTEMS[name](directory)
        system.load()
        workers = max([4, *needed])
        began = time.perf_counter()
        system.start(workers)
        if f"startup_{workers}" in workloads:
            yield f"startup_{workers}", "s", time.perf_counter() - began
        if "startup_torch_4" in workloads and importlib.util.find_spec("torch"):
            system.gather([(rank, "need", ("torch",)) for rank in range(workers)])
            yield "startup_torch_4", "s", time.perf_counter() - began
        if "rss_worker_idle" in workloads:
            yield "rss_worker_idle", "MB", resident_mb(system.call(0, "pid"))
        yield from small(system, workloads, scale, workers)
        yield from bulk(system, workloads)
        if "kill_to_error" in workloads:
            yield "kill_to_error", "ms", kill_ms(system)
        system.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    one = kinds.add_parser("measure")
    one.add_argument("system", choices=SYSTEMS)
    one.add_argument("--workloads", required=True)
    one.add_argument("--scale", type=float, default=1.0)
    work = kinds.add_parser("worker")
    work.add_argument("system", choices=SYSTEMS)
    work.add_argument("rank", type=int)
    work.add_argument("directory")
    work.add_argument("workers", type=int)
    options = parser.parse_args()
    if options.what == "worker":
        SYSTEMS[options.system].work(options.rank, options.directory, options.workers)
        return
    for workload, unit, value in measure(options.system, set(options.workloads.split(",")), options.scale):
        print("RESULT", json.dumps([workload, unit, value if value != float("inf") else None]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a system need not end


if __name__ == "__main__":  # started by peers.py: no benchmark of its own
    main()
