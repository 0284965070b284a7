"""The systems that ``benchmarks/faults.py`` compares, each driven as its own documentation says.

A driver offers ``start``, ``submit``, ``wait``, ``pid``, ``replace`` and ``stop``. Each runs in a process of its own,
under an interpreter that has the system installed; nothing of a system is imported before it is chosen.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import ray_here
from fault_work import step

HERE: Final = Path(__file__).resolve().parent
WORKERS: Final = 2


class Verdict(NamedTuple):
    """What a caller is told.

    Attributes:
        kind: ``ok``; ``not_executed`` or ``unknown`` where the system says so; ``timeout``: given up waiting, nothing
            said; ``error``: a failure that does not say whether the call ran; ``hang``: no answer at all.
        value: The answer, if ok.
        text: The error's first line.
    """

    kind: str
    value: int | None = None
    text: str = ""


def told(kind: str, error: BaseException) -> Verdict:
    """Return the verdict of an error."""
    return Verdict(kind, None, " ".join(f"{type(error).__name__}: {error}".split())[:400])


class Peer:
    """One system. ``timeout_s`` is the caller's patience for one call, None for the system's default."""

    packages: tuple[str, ...] = ()
    faults: tuple[str, ...] = ("cut", "reply", "kill", "stall")

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def start(self, timeout_s: float | None) -> None:
        """Start two workers."""
        raise NotImplementedError

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        """Begin a call."""
        raise NotImplementedError

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        """Wait for its verdict: the system's own, or ``hang`` after ``bound_s``."""
        raise NotImplementedError

    def later(self, handle: Any, bound_s: float) -> Verdict:
        """Ask again for a call whose verdict was a timeout, where the system can."""
        return Verdict("timeout")

    def pid(self, rank: int) -> int:
        """Return the process of a worker."""
        raise NotImplementedError

    def replace(self, rank: int) -> bool:
        """Wait until a worker is usable again; True if the system did not see to it and it had to be made anew."""
        return False

    def stop(self) -> None:
        """End everything."""


# -- zbus ------------------------------------------------------------------------------------------------------------


class Zbus(Peer):
    """As released: no option but tcp, restart of a dead rank by policy."""

    def start(self, timeout_s: float | None) -> None:
        from controller import Controller, Role
        from zbus.config import Config, SchedulerConfig

        role = Role(
            f"{HERE}/fault_engine.py:Counter", replicas=WORKERS, restart="one", max_restarts=100, sys_path=[str(HERE)]
        )
        config = Config(scheduler=SchedulerConfig(transport="tcp"))
        self.bus = Controller.launch(
            "faults", {"counter": role}, root=self.directory, config=config, startup_timeout=120
        )
        self.group = self.bus.group("counter")
        self.timeout_s = timeout_s

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        method = self.group[rank].options(deadline=self.timeout_s).step
        try:
            return method.submit(self.directory, number, seconds)
        except Exception as error:  # noqa: BLE001  # a refusal is a verdict
            return error

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        import zbus

        try:
            if isinstance(handle, Exception):
                raise handle
            return Verdict("ok", handle.result(bound_s))
        except zbus.CallError as error:
            if error.reason == "wait":
                return told("hang", error)
            said = {"NOT_EXECUTED": "not_executed", "CANCELLED": "not_executed", "UNKNOWN": "unknown"}
            return told(said.get(error.outcome, "error"), error)

    def pid(self, rank: int) -> int:
        return int(self.group[rank].pid())

    def replace(self, rank: int) -> bool:
        self.group[rank].options(deadline=30).pid()  # a call to a rank that comes back waits for it
        return False

    def stop(self) -> None:
        self.bus.close()


class ZbusWait(Zbus):
    """The caller's patience is ``result(timeout=…)`` in place of the call's deadline: the call goes on."""

    faults = ("stall",)

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        return self.group[rank].step.submit(self.directory, number, seconds)

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        verdict = super().wait(handle, self.timeout_s or bound_s)
        return verdict._replace(kind="timeout") if verdict.kind == "hang" else verdict

    def later(self, handle: Any, bound_s: float) -> Verdict:
        return super().wait(handle, bound_s)


# -- HTTP with retries, as AReaL's local scheduler does it -----------------------------------------------------------


class Http(Peer):
    """Own minimal server and client with the retry rules of AReaL 1.0.4's local scheduler.

    At most 3 attempts, pauses of 1 s doubling; retried: time-outs, connection errors, every status but 200, 400, 500;
    a worker whose process has ended is an error at once. No request id. The server reads requests on threads and runs
    them one by one on an engine thread.
    """

    def start(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s or 7200.0  # its default
        self.workers = [self._spawn(rank) for rank in range(WORKERS)]

    def _spawn(self, rank: int) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, __file__, "http-worker"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        box: list[Verdict] = []
        thread = threading.Thread(target=lambda: box.append(self._call(rank, number, seconds)), daemon=True)
        thread.start()
        time.sleep(0.02)  # requests on separate connections arrive in no order; keep the one they were made in
        return thread, box

    def _call(self, rank: int, number: int, seconds: float) -> Verdict:
        body = json.dumps([self.directory, number, seconds]).encode()
        last = Verdict("error")
        for attempt in range(3):
            process, port = self.workers[rank]
            if process.poll() is not None:
                return Verdict("error", None, f"worker failed with exit code {process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/call", body, timeout=self.timeout_s) as answer:
                    return Verdict("ok", json.loads(answer.read()))
            except urllib.error.HTTPError as error:
                if error.code in (400, 500):
                    return told("error", error)
                last = told("error", error)
            except Exception as error:  # noqa: BLE001  # whatever the connection suffered is retried
                last = told("timeout" if "timed out" in str(error) else "error", error)
            if attempt < 2:
                time.sleep(2.0**attempt)
        return last

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        thread, box = handle
        thread.join(bound_s)
        return box[0] if box else Verdict("hang")

    def pid(self, rank: int) -> int:
        return self.workers[rank][0].pid

    def replace(self, rank: int) -> bool:
        dead = self.workers[rank][0].poll() is not None
        if dead:
            self.workers[rank] = self._spawn(rank)
        return dead

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.wait()


def http_worker() -> None:
    """Serve ``/call`` until killed."""
    engine = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the library's name
            arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with engine:
                answer = json.dumps(step(*arguments)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # the library's name  # noqa: A002
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


# -- Ray -------------------------------------------------------------------------------------------------------------


class Ray(Peer):
    """Actors with Ray's defaults: no restart, no retry."""

    packages = ("ray",)
    options: ClassVar[dict[str, Any]] = {}

    def start(self, timeout_s: float | None) -> None:
        ray = ray_here.imported()
        self.ray, self.timeout_s = ray, timeout_s
        ray_here.start(ray, self.directory, 200 << 20)

        class Counter:
            def step(self, directory: str, number: int, seconds: float) -> int:
                from fault_work import step

                return step(directory, number, seconds)

            def pid(self) -> int:
                return os.getpid()

        self.Counter = ray.remote(Counter)
        self.actors = [self._new() for _ in range(WORKERS)]
        for rank in range(WORKERS):
            self.pid(rank)

    def _new(self) -> Any:
        return self.Counter.options(num_cpus=0, **self.options).remote()

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        return self.actors[rank].step.remote(self.directory, number, seconds)

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        errors = self.ray.exceptions
        try:
            return Verdict("ok", self.ray.get(handle, timeout=self.timeout_s or bound_s))
        except errors.GetTimeoutError as error:
            return told("hang" if self.timeout_s is None else "timeout", error)
        except errors.ActorUnavailableError as error:  # its text: the task may or may not have run
            return told("unknown", error)
        except Exception as error:  # noqa: BLE001  # any of its errors is a verdict
            return told("error", error)

    def later(self, handle: Any, bound_s: float) -> Verdict:
        try:
            return Verdict("ok", self.ray.get(handle, timeout=bound_s))
        except self.ray.exceptions.GetTimeoutError as error:
            return told("hang", error)
        except Exception as error:  # noqa: BLE001  # any of its errors is a verdict
            return told("error", error)

    def pid(self, rank: int) -> int:
        return int(self.ray.get(self.actors[rank].pid.remote(), timeout=60))

    def replace(self, rank: int) -> bool:
        anew = False
        for _ in range(20):
            try:
                self.pid(rank)
            except self.ray.exceptions.ActorUnavailableError:
                time.sleep(0.5)
            except Exception:  # noqa: BLE001  # it is dead: make another
                self.actors[rank], anew = self._new(), True
            else:
                break
        return anew

    def stop(self) -> None:
        self.ray.shutdown()


class RayRetries(Ray):
    """Actors that are restarted, and whose calls are retried, as Ray's page on fault tolerance shows."""

    options: ClassVar[dict[str, Any]] = {"max_restarts": -1, "max_task_retries": 3}


# -- Dask ------------------------------------------------------------------------------------------------------------


class Dask(Peer):
    """Tasks pinned to a worker, with the defaults."""

    packages = ("distributed",)

    def start(self, timeout_s: float | None) -> None:
        import logging

        import distributed

        self.timeout_s = timeout_s
        os.environ["PYTHONPATH"] = str(HERE)
        self.cluster = distributed.LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=0,
            silence_logs=logging.CRITICAL,
            host="127.0.0.1",
        )
        self.client = distributed.Client(self.cluster)
        self.client.wait_for_workers(WORKERS)

    def _addresses(self) -> list[str]:
        return [worker.worker_address for _, worker in sorted(self.cluster.workers.items())]

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        where = {"workers": [self._addresses()[rank]], "allow_other_workers": True}
        return self.client.submit(step, self.directory, number, seconds, pure=False, key=f"step-{number}", **where)

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        return self._get(handle, self.timeout_s or bound_s, "hang" if self.timeout_s is None else "timeout")

    def later(self, handle: Any, bound_s: float) -> Verdict:
        return self._get(handle, bound_s, "hang")

    def _get(self, handle: Any, timeout_s: float, late: str) -> Verdict:
        try:
            return Verdict("ok", handle.result(timeout_s))
        except TimeoutError as error:
            return told(late, error)
        except Exception as error:  # noqa: BLE001  # any of its errors is a verdict
            return told("error", error)

    def pid(self, rank: int) -> int:
        where = [self._addresses()[rank]]
        return int(self.client.submit(os.getpid, pure=False, workers=where, allow_other_workers=False).result(5))

    def replace(self, rank: int) -> bool:
        until = time.monotonic() + 15.0
        while time.monotonic() < until:  # a nanny starts dead workers again
            with contextlib.suppress(Exception):
                for one in range(WORKERS):
                    self.pid(one)
                return False
            time.sleep(0.1)
        self.stop()
        self.start(self.timeout_s)
        return True

    def stop(self) -> None:
        self.client.close()
        self.cluster.close()


class DaskActors(Dask):
    """One actor on each worker; calls go straight from the client to it."""

    def start(self, timeout_s: float | None) -> None:
        super().start(timeout_s)
        self.made = 0
        self.actors = [self._new(rank) for rank in range(WORKERS)]

    def _new(self, rank: int) -> Any:
        from fault_peers import DaskCounter

        self.made += 1
        return self.client.submit(
            DaskCounter, actor=True, workers=[self._addresses()[rank]], pure=False, key=f"counter-{self.made}"
        ).result(30)

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        try:
            return self.actors[rank].step(self.directory, number, seconds)
        except Exception as error:  # noqa: BLE001  # a refusal is a verdict
            return error

    def _get(self, handle: Any, timeout_s: float, late: str) -> Verdict:
        return told("error", handle) if isinstance(handle, Exception) else super()._get(handle, timeout_s, late)

    def replace(self, rank: int) -> bool:
        anew = super().replace(rank)
        try:
            self.actors[rank].ping().result(5)
        except Exception:  # noqa: BLE001  # it is gone: make another
            self.actors[rank], anew = self._new(rank), True
        return anew


class DaskCounter:
    """The actor."""

    def step(self, directory: str, number: int, seconds: float) -> int:
        """Run the shared work."""
        return step(directory, number, seconds)

    def ping(self) -> int:
        """Answer."""
        return 1


# -- ipyparallel -----------------------------------------------------------------------------------------------------


class IPyParallel(Peer):
    """Direct views of two engines, with the defaults."""

    packages = ("ipyparallel",)

    def start(self, timeout_s: float | None) -> None:
        import ipyparallel

        self.ipp, self.timeout_s = ipyparallel, timeout_s
        os.environ |= {"PYTHONPATH": str(HERE), "IPYTHONDIR": f"{self.directory}/ipython"}
        self.cluster = ipyparallel.Cluster(n=WORKERS, controller_ip="127.0.0.1", log_level=50)
        self.cluster.start_cluster_sync()
        self.client = self.cluster.connect_client_sync()
        self.client.wait_for_engines(WORKERS, timeout=60)
        self.ids = list(self.client.ids)

    def submit(self, rank: int, number: int, seconds: float) -> Any:
        try:
            return self.client[self.ids[rank]].apply_async(step, self.directory, number, seconds)
        except Exception as error:  # noqa: BLE001  # a refusal is a verdict
            return error

    def wait(self, handle: Any, bound_s: float) -> Verdict:
        return self._get(handle, self.timeout_s or bound_s, "hang" if self.timeout_s is None else "timeout")

    def later(self, handle: Any, bound_s: float) -> Verdict:
        return self._get(handle, bound_s, "hang")

    def _get(self, handle: Any, timeout_s: float, late: str) -> Verdict:
        try:
            if isinstance(handle, Exception):
                raise handle
            return Verdict("ok", handle.get(timeout_s))
        except (TimeoutError, self.ipp.TimeoutError) as error:
            return told(late, error)
        except Exception as error:  # noqa: BLE001  # any of its errors is a verdict
            return told("error", error)

    def pid(self, rank: int) -> int:
        return int(self.client[self.ids[rank]].apply_async(os.getpid).get(20))

    def replace(self, rank: int) -> bool:
        try:
            self.client[self.ids[rank]].apply_async(os.getpid).get(5)
        except Exception:  # noqa: BLE001  # it is gone: a new cluster, since engines are not started again
            self.stop()
            self.start(self.timeout_s)
            return True
        return False

    def stop(self) -> None:
        self.client.close()
        self.cluster.stop_cluster_sync()


PEERS: Final[dict[str, type[Peer]]] = {
    "zbus": Zbus,
    "zbus-wait": ZbusWait,
    "http-retry": Http,
    "ray": Ray,
    "ray-retries": RayRetries,
    "dask": Dask,
    "dask-actors": DaskActors,
    "ipyparallel": IPyParallel,
}

if __name__ == "__main__" and sys.argv[1:] == ["http-worker"]:
    http_worker()
