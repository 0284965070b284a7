"""Small calls: zbus beside raw pyzmq DEALER/ROUTER, in interleaved rounds of one run.

    python benchmarks/rpc.py --json            # one JSON line per result
    python benchmarks/rpc.py --rounds 5 --scale 0.3 --peers ray,grpc

Every figure is the median over rounds; its ratio is the median of the ratios to ``raw`` of the same round, so drift of
the machine's speed cancels out. The raw echo is the least that pyzmq can do: one ROUTER per worker process, one DEALER
per worker here, one frame each way, blocking receives, the same transport (ipc).

Workloads: ``call_sync`` and ``call_sync_p99`` (sequential round trips, us), ``call_async`` (awaited one at a time),
``call_traced`` (tracing at ``rpc``, in rounds of its own behind the others, and what it adds), ``pipeline_1`` and
``pipeline_8`` (one message per call, 128 in flight per worker, calls/s), ``fanout_1|4|8|16`` (broadcast and ordered
gather, us), ``batch_64`` (ordered batches of 64 calls, each result read, two batches on their way: 128 calls in flight
like the raw calls it is compared with, calls/s) and ``batch_64_alone`` (the next batch begins when the one before has
been read). With ``--peers``, rivals take their turn in each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from peers import Rivals, add_options
from rounds import Figures, parser, printer, wanted

HERE = Path(__file__).resolve().parent
IN_FLIGHT = 128
PEER_WORKLOADS = (
    *("call_sync", "call_sync_p99", "call_async", "call_async_p99", "pipeline_1", "pipeline_8", "batch_64"),
    *("fanout_1", "fanout_4", "fanout_8", "fanout_16"),
)


# -- raw pyzmq -------------------------------------------------------------------------------------------------------


def raw_worker(endpoint: str, ready: Any) -> None:
    """Echo one frame for ever."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    ready.set()
    while True:
        peer, payload = socket.recv_multipart()
        socket.send_multipart([peer, payload])


class Raw:
    """W raw echo workers and one DEALER to each."""

    def __init__(self, workers: int, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.sockets = []
        self.context = zmq.Context()
        for number in range(workers):
            endpoint = f"ipc://{directory}/raw{workers}.{number}"
            ready = context.Event()
            process = context.Process(target=raw_worker, args=(endpoint, ready), daemon=True)
            process.start()
            ready.wait(30)
            self.processes.append(process)
            socket = self.context.socket(zmq.DEALER)
            socket.connect(endpoint)
            self.sockets.append(socket)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def call(self) -> None:
        self.sockets[0].send(b"x")
        self.sockets[0].recv()

    def fanout(self) -> None:
        for socket in self.sockets:
            socket.send(b"x")
        for socket in self.sockets:
            socket.recv()

    def pipeline(self, calls: int) -> float:
        sockets = self.sockets
        total = calls * len(sockets)
        sent = dict.fromkeys(sockets, 0)
        done = 0
        began = time.perf_counter()
        for socket in sockets:
            for _ in range(min(IN_FLIGHT, calls)):
                socket.send(b"x")
                sent[socket] += 1
        while done < total:
            for socket, _ in self.poller.poll():
                with contextlib.suppress(zmq.Again):
                    while True:
                        socket.recv(zmq.NOBLOCK)
                        done += 1
                        if sent[socket] < calls:
                            socket.send(b"x")
                            sent[socket] += 1
        return total / (time.perf_counter() - began)

    def close(self) -> None:
        self.context.destroy(0)
        for process in self.processes:
            process.kill()
            process.join()


# -- zbus ------------------------------------------------------------------------------------------------------------


class Zbus:
    """A local trial with W workers."""

    def __init__(self, workers: int, root: str, trace: str) -> None:
        from controller import Controller, Role
        from zbus.config import load_config

        config = load_config(data={"trace": {"level": trace, "merge": False}}).config
        self.bus = Controller.launch(
            "bench",
            {"w": Role("bench_engines:Echo", replicas=workers)},
            root=root,
            config=config,
            startup_timeout=120,
        )
        self.group = self.bus.group("w")
        self.one = self.group[0]
        self.echo = self.one.echo
        self.everywhere = self.group.echo

    def call(self) -> None:
        self.echo(b"x")

    async def call_async(self) -> None:
        await self.echo.aio(b"x")

    def fanout(self) -> None:
        self.everywhere(b"x")

    def pipeline(self, calls: int) -> float:
        ranks = [rank.echo for rank in self.group]
        total = calls * len(ranks)
        began = time.perf_counter()
        open_calls: list[list[Any]] = [[] for _ in ranks]
        for _ in range(min(IN_FLIGHT, calls)):
            for futures, echo in zip(open_calls, ranks, strict=True):
                futures.append(echo.submit(b"x"))
        left = calls - min(IN_FLIGHT, calls)
        for taken in range(calls):
            for futures, echo in zip(open_calls, ranks, strict=True):
                futures[taken].result()
                futures[taken] = None
                if left > 0:
                    futures.append(echo.submit(b"x"))
            left -= 1
        return total / (time.perf_counter() - began)

    def batches(self, calls: int, ahead: int) -> float:
        """Return the rate of batches of 64, of which so many more are sent before the results of one are read."""
        began = time.perf_counter()
        out: deque[list[Any]] = deque()
        for number in range(calls // 64 + ahead):
            if number < calls // 64:
                batch = self.one.batch()
                echo = batch.echo
                for _ in range(64):
                    echo(b"x")
                out.append(batch.submit())
            if number >= ahead:
                for future in out.popleft():
                    future.result()
        return (calls // 64) * 64 / (time.perf_counter() - began)

    def close(self) -> None:
        self.bus.close()


# -- measuring -------------------------------------------------------------------------------------------------------


def latencies(call: Callable[[], None], count: int) -> tuple[float, float]:
    """Return (p50, p99) in microseconds."""
    for _ in range(count // 10 + 20):
        call()
    times = []
    clock = time.perf_counter_ns
    for _ in range(count):
        began = clock()
        call()
        times.append(clock() - began)
    times.sort()
    return times[count // 2] / 1e3, times[int(count * 0.99)] / 1e3


def latencies_async(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """As ``latencies``, each call awaited inside one running loop."""

    async def run() -> list[int]:
        for _ in range(count // 10 + 20):
            await call()
        times = []
        for _ in range(count):
            began = time.perf_counter_ns()
            await call()
            times.append(time.perf_counter_ns() - began)
        return times

    times = sorted(asyncio.run(run()))
    return times[count // 2] / 1e3, times[int(count * 0.99)] / 1e3


def measure_rates(
    results: Figures, raws: dict[int, Raw], ours: dict[int, Zbus], calls: int, wanted: Callable[[str], bool]
) -> None:
    """Add the calls per second of one round."""
    for size in (1, 8):
        if wanted(f"pipeline_{size}"):
            base = raws[size].pipeline(calls // size)
            results.add(f"pipeline_{size}", "raw", "calls/s", base, base)
            results.add(f"pipeline_{size}", "zbus", "calls/s", ours[size].pipeline(calls // size), base)
    for name, ahead in (("batch_64", 1), ("batch_64_alone", 0)):
        if wanted(name):
            base = raws[1].pipeline(calls)
            results.add(name, "raw", "calls/s", base, base)
            results.add(name, "zbus", "calls/s", ours[1].batches(4 * calls, ahead), base)


def run(results: Figures, rounds: int, scale: float, wanted: Callable[[str], bool], rivals: Rivals) -> None:
    """Run all rounds."""
    count = max(200, int(2000 * scale))
    piped = max(1000, int(10000 * scale))
    with tempfile.TemporaryDirectory(prefix="zb-bench-") as directory, contextlib.ExitStack() as stack:

        def raw(workers: int) -> Raw:
            made = Raw(workers, directory)
            stack.callback(made.close)
            return made

        def zbus(workers: int, trace: str) -> Zbus:
            made = Zbus(workers, directory, trace)
            stack.callback(made.close)
            return made

        sizes = [1, *(size for size in (4, 8, 16) if wanted(f"fanout_{size}") or wanted(f"pipeline_{size}"))]
        raws = {size: raw(size) for size in sizes}
        ours = {size: zbus(size, "off") for size in sizes}
        untraced: list[float] = []
        for _ in range(rounds):
            if wanted("call_sync"):
                base, base99 = latencies(raws[1].call, count)
                results.add("call_sync", "raw", "us", base, base)
                results.add("call_sync_p99", "raw", "us", base99, base99)
                value, value99 = latencies(ours[1].call, count)
                results.add("call_sync", "zbus", "us", value, base)
                results.add("call_sync_p99", "zbus", "us", value99, base99)
                untraced.append(value)
                if wanted("call_async"):
                    value, value99 = latencies_async(ours[1].call_async, count)
                    results.add("call_async", "zbus", "us", value, base)
                    results.add("call_async_p99", "zbus", "us", value99, base99)
            measure_rates(results, raws, ours, piped, wanted)
            for size in (1, 4, 8, 16):
                if wanted(f"fanout_{size}"):
                    base = latencies(raws[size].fanout, count // 4)[0]
                    results.add(f"fanout_{size}", "raw", "us", base, base)
                    results.add(f"fanout_{size}", "zbus", "us", latencies(ours[size].fanout, count // 4)[0], base)
            rivals.measure(results, PEER_WORKLOADS, wanted)
        if wanted("call_traced"):  # last: the tracer is the process's, and would record the calls of the others, too
            traced = zbus(1, "rpc")
            for number in range(rounds):
                base = latencies(raws[1].call, count)[0]
                value = latencies(traced.call, count)[0]
                results.add("call_traced", "zbus", "us", value, base)
                if untraced:
                    results.add("call_traced_adds", "zbus", "us", value - untraced[number], base)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--scale", type=float, default=1.0, help="multiplies the number of calls")
    add_options(made)
    options = made.parse_args()
    rivals = Rivals(options.peers, options.venvs, options.scale)
    results = Figures(options.rounds, printer(as_json=options.json))
    run(results, options.rounds, options.scale, wanted(options.only), rivals)
    results.finish()


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    main()
