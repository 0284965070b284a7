"""Arrays: zbus beside raw pyzmq frames, a reused shared segment and ``memcpy``, in interleaved rounds of one run.

    python benchmarks/data.py --json             # one JSON line per result
    python benchmarks/data.py --rounds 5 --only send_,recv_

``send_*`` and ``recv_*`` move one array to or from one worker, acknowledged; the receiver reads one byte of each page,
so that memory mapped lazily pays for its pages. ``in_place_256mb`` sends an array that was made where it is sent from.
``broadcast_16mb`` sends one array to four workers. ``rl_batch`` splits 256 x 4,096 tokens in four arrays over four
workers and gathers arrays of the same shape. ``tcp_256mb`` sends an array to a worker that shares no memory, and
``tcp_256mb_recv`` has one sent back: their ``ratio`` is to ``frames-tcp`` (raw pyzmq frames over tcp). ``ref_256mb``
has one worker keep an array that it makes and another take it by its ``Ref``; ``shm`` moves it once. Unit: GB/s, or ms.
``ratio`` is else the median of the ratios to ``shm`` (a segment made once, a copy in, a note over a pyzmq pair, a
mapped view) of the same round, ``limit`` that to ``memcpy``.

Systems: ``zbus`` (over ipc, on this host: shared memory), ``zbus-frames`` (shared memory switched off), ``frames`` (raw
pyzmq, DEALER/ROUTER over ipc, ``copy=False``), ``shm``, ``memcpy``; ``zbus-tcp`` and ``frames-tcp`` over loopback.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket as socket_module
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from peers import Rivals, add_options
from rounds import Figures, parser, printer, wanted

HERE = Path(__file__).resolve().parent
SIZES = {"64kb": 1 << 16, "1mb": 1 << 20, "16mb": 1 << 24, "256mb": 1 << 28}
REPEATS = {"64kb": 100, "1mb": 50, "16mb": 15, "256mb": 3}
ROWS, TOKENS = 256, 4096
PEER_WORKLOADS = (
    *(f"{way}_{name}" for way in ("send", "recv") for name in SIZES),
    *("ref_256mb", "broadcast_16mb", "rl_batch"),
)


def touch(data: Any) -> int:
    """Read one byte of each page."""
    return int(np.frombuffer(data, np.uint8)[::4096].sum())


# -- the references --------------------------------------------------------------------------------------------------


def frames_worker(endpoint: str, ready: Any) -> None:
    """Take frames, or give an array of the size that is asked for."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    ready.set()
    made: dict[int, Any] = {}
    while True:
        peer, command, payload = socket.recv_multipart(copy=False)
        if command.bytes == b"take":
            touch(payload.buffer)
            socket.send_multipart([peer.bytes, b"ok"])
        else:
            size = int(payload.bytes)
            array = made.setdefault(size, np.ones(size, np.uint8))
            socket.send_multipart([peer.bytes, array], copy=False)


def shm_worker(endpoint: str, ready: Any, path: str) -> None:
    """Read from one segment, write to the other, as told."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    with open(path, "r+b") as file:  # noqa: PTH123  # mmap wants the descriptor
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    inward, outward = memory[: len(memory) // 2], memory[len(memory) // 2 :]
    ready.set()
    made: dict[int, Any] = {}
    while True:
        peer, command, number = socket.recv_multipart()
        size = int(number)
        if command == b"take":
            touch(inward[:size].data)
        else:
            np.copyto(outward[:size], made.setdefault(size, np.ones(size, np.uint8)))
        socket.send_multipart([peer, b"ok"])


class Peers:
    """Worker processes of one reference and a DEALER to each."""

    def __init__(self, target: Callable[..., None], count: int, directory: str, *more: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.context = zmq.Context()
        self.sockets, self.processes = [], []
        for number in range(count):
            endpoint = f"ipc://{directory}/{target.__name__}.{number}"
            if not directory:
                with socket_module.create_server(("127.0.0.1", 0)) as free:
                    endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            ready = context.Event()
            process = context.Process(target=target, args=(endpoint, ready, *more), daemon=True)
            process.start()
            ready.wait(60)
            self.processes.append(process)
            socket = self.context.socket(zmq.DEALER)
            socket.connect(endpoint)
            self.sockets.append(socket)

    def close(self) -> None:
        """End the workers."""
        self.context.destroy(0)
        for process in self.processes:
            process.kill()
            process.join()


class Frames(Peers):
    """Raw pyzmq frames; over tcp where no directory is given."""

    def __init__(self, count: int, directory: str) -> None:
        super().__init__(frames_worker, count, directory)

    def send(self, data: Any) -> None:
        self.sockets[0].send_multipart([b"take", data], copy=False)
        self.sockets[0].recv()

    def recv(self, size: int) -> None:
        self.sockets[0].send_multipart([b"give", str(size).encode()])
        touch(self.sockets[0].recv(copy=False).buffer)

    def broadcast(self, data: Any) -> None:
        for socket in self.sockets:
            socket.send_multipart([b"take", data], copy=False)
        for socket in self.sockets:
            socket.recv()


class Shm(Peers):
    """One reused segment for each direction."""

    def __init__(self, count: int, directory: str) -> None:
        self.path = f"/dev/shm/zb-bench-{os.getpid()}"
        with open(self.path, "w+b") as file:  # noqa: PTH123  # as above
            os.posix_fallocate(file.fileno(), 0, 2 * SIZES["256mb"])
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        half = len(memory) // 2
        self.outward, self.inward = memory[:half], memory[half:]
        super().__init__(shm_worker, count, directory, self.path)

    def _say(self, word: bytes, size: int, count: int = 1) -> None:
        for socket in self.sockets[:count]:
            socket.send_multipart([word, str(size).encode()])
        for socket in self.sockets[:count]:
            socket.recv()

    def send(self, data: Any) -> None:
        np.copyto(self.outward[: data.nbytes], data)
        self._say(b"take", data.nbytes)

    def recv(self, size: int) -> None:
        self._say(b"give", size)
        touch(self.inward[:size].data)

    def broadcast(self, data: Any) -> None:
        np.copyto(self.outward[: data.nbytes], data)
        self._say(b"take", data.nbytes, len(self.sockets))

    def rl_batch(self, arrays: list[Any]) -> None:
        """Write all shares, have each read, written and read back: the least that must be copied."""
        total = sum(array.nbytes for array in arrays)
        at = 0
        for array in arrays:
            np.copyto(self.outward[at : at + array.nbytes], array.reshape(-1).view(np.uint8))
            at += array.nbytes
        share = total // len(self.sockets)
        self._say(b"take", share, len(self.sockets))
        self._say(b"give", share, len(self.sockets))
        touch(self.inward[:total].data)

    def close(self) -> None:
        """End the workers and remove the segment."""
        super().close()
        Path(self.path).unlink()


# -- zbus ------------------------------------------------------------------------------------------------------------


class Zbus:
    """A local trial with some workers."""

    def __init__(self, workers: int, root: str, shared: int | None, transport: str = "ipc") -> None:
        from controller import Controller, Role
        from zbus.config import load_config

        data = {
            "trace": {"level": "off", "merge": False},
            "data": {} if shared is None else {"shared_memory": shared},
            "scheduler": {"transport": transport},
        }
        self.bus = Controller.launch(
            f"bench-{transport}",
            {"w": Role("bench_engines:Arrays", replicas=workers)},
            root=root,
            config=load_config(data=data).config,
            startup_timeout=120,
        )
        self.group = self.bus.group("w")
        self.one = self.group[0]
        for size in SIZES.values():
            self.one.give(size)

    def send(self, data: Any) -> None:
        self.one.take(data)

    def recv(self, size: int) -> None:
        touch(self.one.give(size))

    def broadcast(self, data: Any) -> None:
        self.group.take(data)

    def rl_batch(self, arrays: list[Any]) -> None:
        for array in self.group.step({str(number): array for number, array in enumerate(arrays)}).values():
            touch(array)

    def in_place(self, size: int) -> float:
        """Return the seconds of one call with an array that was made and filled before."""
        array = self.bus.empty(size, np.uint8)
        array[::4096] = 1
        began = time.perf_counter()
        self.one.take(array)
        return time.perf_counter() - began

    def ref(self, size: int) -> None:
        """Have one worker keep an array that it makes, and another take it from there."""
        kept = self.one.give.options(keep=True)(size)
        self.group[1].take(kept)

    def close(self) -> None:
        self.bus.close()


# -- measuring -------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any], count: int) -> float:
    """Return the median of ``count`` calls."""
    call()
    call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Results(Figures):
    """Figures of systems that each tell how long they took."""

    def take(self, workload: str, unit: str, times: dict[str, float], nbytes: int = 0) -> None:
        """Take one round: seconds by system; the reference is ``shm``, the limit ``memcpy``."""
        values = {name: nbytes / took / 1e9 if unit == "GB/s" else took * 1e3 for name, took in times.items()}
        for system, value in values.items():
            self.add(workload, system, unit, value, values.get("shm"), values.get("memcpy"))


def measure_far(results: Results, far: dict[str, Any], array: Any, copy_s: float) -> None:
    """Take one round over tcp, both ways; the reference is ``frames-tcp``."""
    size = array.nbytes
    for workload, way, what in (("tcp_256mb", "send", array), ("tcp_256mb_recv", "recv", size)):
        figures = {label: size / seconds(partial(getattr(one, way), what), 3) / 1e9 for label, one in far.items()}
        for label, figure in figures.items():
            results.add(workload, label, "GB/s", figure, figures["frames-tcp"], size / copy_s / 1e9)


def measure_refs(results: Results, pairs: dict[str, Zbus], shm: Shm, copy: float) -> None:
    """Take one round of ``ref_256mb``, where it is wanted."""
    if pairs:
        size = SIZES["256mb"]
        times = {label: seconds(partial(one.ref, size), 5) for label, one in pairs.items()}
        results.take("ref_256mb", "GB/s", {"memcpy": copy, "shm": seconds(partial(shm.recv, size), 5), **times}, size)


def run(results: Results, rounds: int, wanted: Callable[[str], bool], rivals: Rivals) -> None:
    """Run all rounds."""
    with tempfile.TemporaryDirectory(prefix="zb-bench-") as directory, contextlib.ExitStack() as stack:
        four = any(map(wanted, ("broadcast_16mb", "rl_batch")))
        workers = 4 if four else 1
        far: dict[str, Any] = {}
        if wanted("tcp_256mb"):
            far = {"frames-tcp": Frames(1, ""), "zbus-tcp": Zbus(1, directory, 0, "tcp")}
        systems: dict[str, Any] = {
            "frames": Frames(workers, directory),
            "shm": Shm(workers, directory),
            "zbus": Zbus(workers, directory, None),
            "zbus-frames": Zbus(workers, directory, 0),
        }
        pairs = {"zbus": Zbus(2, directory, None), "zbus-frames": Zbus(2, directory, 0)} if wanted("ref_256mb") else {}
        for system in (*systems.values(), *far.values(), *pairs.values()):
            stack.callback(system.close)
        source = {name: np.ones(size, np.uint8) for name, size in SIZES.items()}
        target = np.ones(SIZES["256mb"], np.uint8)
        shape = (ROWS, TOKENS)
        batch = [np.ones(shape, kind) for kind in (np.int64, np.float32, np.bool_, np.int64)]
        for _ in range(rounds):
            copies = {
                name: seconds(partial(np.copyto, target[: SIZES[name]], source[name]), REPEATS[name]) for name in SIZES
            }
            for name, size in SIZES.items():
                for workload, call in (("send", source[name]), ("recv", size)):
                    if wanted(f"{workload}_{name}"):
                        times = {
                            label: seconds(partial(getattr(one, workload), call), REPEATS[name])
                            for label, one in systems.items()
                        }
                        results.take(f"{workload}_{name}", "GB/s", {"memcpy": copies[name], **times}, size)
            if far:
                measure_far(results, far, source["256mb"], copies["256mb"])
            if wanted("in_place_256mb"):
                times = sorted(systems["zbus"].in_place(SIZES["256mb"]) for _ in range(7))
                results.take("in_place_256mb", "ms", {"memcpy": copies["256mb"], "zbus": times[3]})
            measure_refs(results, pairs, systems["shm"], copies["256mb"])
            if wanted("broadcast_16mb"):
                times = {label: seconds(partial(one.broadcast, source["16mb"]), 20) for label, one in systems.items()}
                results.take("broadcast_16mb", "ms", {"memcpy": copies["16mb"], **times})
            if wanted("rl_batch"):
                times = {
                    label: seconds(partial(systems[label].rl_batch, batch), 20)
                    for label in ("shm", "zbus", "zbus-frames")
                }
                results.take("rl_batch", "ms", times)
            rivals.measure(results, PEER_WORKLOADS, wanted)


def main() -> None:
    made = parser(__doc__)
    add_options(made)
    options = made.parse_args()
    rivals = Rivals(options.peers, options.venvs)
    results = Results(options.rounds, printer(as_json=options.json))
    run(results, options.rounds, wanted(options.only), rivals)
    results.finish()


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    main()
