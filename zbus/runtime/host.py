"""The life of a worker: bind, publish, serve until told to stop, leave in order.

``serve`` runs on the main thread of a process that the agent started (or ``workers.worker`` did by hand).
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zbus import failpoints, names
from zbus.clock import boot_id, time_namespace
from zbus.codec import Ref
from zbus.data.carriage import BulkCarriage
from zbus.data.courier import Courier
from zbus.data.desk import Desk, Owner
from zbus.data.porter import Porter
from zbus.engine import Engine, Mesh, endpoints_of, lanes_of, table_to_wire
from zbus.errors import EngineLoadError
from zbus.ids import WorkerName, new_session
from zbus.protocol.messages import PROTOCOL_VERSION, CancelRunning, Execute, Kind, Status, StreamCredit
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.lease import HOLDER_MARGIN
from zbus.registry.records import EpochRecord, JobRecord, Records, WorkerRecord
from zbus.runtime.context import Context
from zbus.runtime.executor import Executor
from zbus.runtime.gil import name_thread
from zbus.runtime.journal import CrashJournal, journal_file
from zbus.runtime.leaseword import LeaseWord
from zbus.runtime.loader import digest_of, load_engine
from zbus.runtime.memory import SessionArrays
from zbus.runtime.processes import describe_exit, start_time
from zbus.runtime.refs import Asker, WorkerRefs
from zbus.runtime.stacks import StackFile, describe_threads
from zbus.runtime.stopping import stop_if_cancelled
from zbus.runtime.watchdog import Handler, Watchdog
from zbus.trace import control
from zbus.trace.config import TraceConfig
from zbus.trace.tracer import get_tracer
from zbus.transport.bulk import Bulk
from zbus.transport.carrier import Reach
from zbus.transport.client import Client
from zbus.transport.endpoints import RuntimeDir, bind_endpoints
from zbus.transport.security import ProcessKeys
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

__all__ = ["HostConfig", "prepare", "serve"]

_DRAIN_S: Final = 2.0
_LEAVE_S: Final = 0.03
EXIT_OK: Final = 0
EXIT_BUS_DIED: Final = 70
EXIT_TERMINATED: Final = 143


class HostConfig(msgspec.Struct, frozen=True):
    """Everything a worker must know to serve; see ``workers.spec.RankSpec`` for the fields."""

    experiment: str
    trial: str
    trial_dir: Path
    role: str
    rank: int
    world_size: int
    incarnation: int
    job: JobRecord
    local_rank: int = 0
    start: int = 0
    agent_id: str = ""
    runtime_dir: str = ""
    transport: str = "ipc"
    bind_host: str = "127.0.0.1"
    log: str = ""
    ports: Sequence[int] = ()
    listen_fds: Sequence[int] = ()
    torch_store_fd: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    lease_fd: int | None = None
    published_fd: int | None = None
    lease_ttl_s: float = 5.0
    env: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def from_spec(cls, spec: Any) -> HostConfig:
        """Take the fields of a rank spec (by name, so that this package need not know the programs)."""
        return cls(
            experiment=spec.experiment,
            trial=spec.trial,
            trial_dir=Path(spec.trial_dir),
            role=spec.role,
            rank=spec.rank,
            world_size=spec.world_size,
            incarnation=spec.incarnation,
            job=spec.job,
            local_rank=spec.local_rank,
            start=spec.start,
            agent_id=spec.agent_id,
            runtime_dir=spec.runtime_dir,
            transport=spec.transport,
            bind_host=spec.bind_host,
            log=spec.log,
            ports=tuple(spec.ports),
            listen_fds=tuple(spec.listen_fds),
            torch_store_fd=spec.torch_store_fd,
            master_addr=spec.master_addr,
            master_port=spec.master_port,
            lease_fd=spec.lease_fd,
            published_fd=spec.published_fd,
            lease_ttl_s=spec.lease_ttl_s,
        )


def prepare() -> None:
    """Do what a process does for the first time in its life and every rank would: in the template, for all of them.

    Reading the source of a class compiles two large patterns, and the first record of a kind builds its reader: a fifth
    of a rank's start. No thread, no socket.
    """
    inspect.getblock(["class Any:\n", "    pass\n"])  # a whole source would be parsed, which is of no use to the next
    for record in (EpochRecord(session="", epoch=1), WorkerRecord(role="r", rank=0, incarnation=1)):
        msgspec.json.decode(msgspec.json.encode(record), type=type(record))


def serve(config: HostConfig) -> int:
    """Serve until told to stop; return the process's exit code. Main thread.

    Raises:
        RegistryError, TransportError, ConfigError: The worker cannot take its place.
    """
    host = _Host(config)
    try:
        host.open()
        return host.run()
    finally:
        host.close()


class _Host:
    """One worker's parts, in the order they are made; closed in reverse."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self.name = WorkerName(names.check(config.role, "role"), config.rank)
        self.keys = ProcessKeys.create()
        self.factory = SocketFactory()
        self.records = Records(FileRegistry(config.trial_dir / "registry"))
        self.exit_code = EXIT_OK
        self.mesh = Mesh.of(config.job.mesh or None, config.world_size)
        self.context: Context | None = None
        self.table: dict[str, Any] = {}
        self.digest = ""
        self.lease = None if config.lease_fd is None else LeaseWord(config.lease_fd)
        self.server = Server(
            name=self.name,
            incarnation=config.incarnation,
            factory=self.factory,
            lanes={"main": 1, "ctl": 16},
            dispatch=self._dispatch,
            describe=self.describe,
            on_cancel=self._cancel,
            on_credit=self._credit,
            on_clock=control.note_clock,
            guest_lanes=None,
            lease=None if self.lease is None else self.lease.until,
            contact_ns=int(config.lease_ttl_s * HOLDER_MARGIN * 1e9),
            on_fatal=self._bus_ended,
        )
        failpoints.configure(os.environ.get(failpoints.VARIABLE))
        self.journal = self._open_journal()
        self.bulk = Bulk(self.factory)
        self.porter = Porter(Courier.enter(config.job.shared_memory), self.bulk)
        self.desk = Desk(
            Owner(config.role, config.rank, config.incarnation),
            self.porter,
            limit=config.job.refs,
            lease_s=config.job.ref_lease_s,
            is_over=self._holder_is_over,
            carriage=BulkCarriage(self.porter, self._owner_is_gone, look=stop_if_cancelled),
        )
        asker = Asker(self._connect_to_owners, self._owner_is_gone, self._forget_owner)
        self.refs = WorkerRefs(self.desk, asker)
        self.executor = Executor(
            name=str(self.name),
            incarnation=config.incarnation,
            answers=self.server,
            builtins=self._builtins(),
            rings=None if self.journal is None else self.journal.ring,
            arrays=SessionArrays(self.porter, self.server.reach_of),
            refs=self.refs,
        )
        self.watchdog = Watchdog()
        self.watchdog.watch(self._bus_handler)
        self.watchdog.watch(self.executor.ctl_handlers)
        self._stacks: StackFile | None = None
        self._stop_lock = threading.RLock()  # a SIGTERM that falls due inside `stop` runs there

    # -- the stations of a life ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind, start answering ``ctl``, publish the record."""
        config = self.config
        self._stacks = self._arm_stack_dumps()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the controller's to act on
        signal.signal(signal.SIGTERM, self._on_term)
        self._start_tracing()
        use_ipc = config.transport != "tcp"  # the directory is the controller's, and may be on another host
        runtime = RuntimeDir.open(Path(config.runtime_dir)) if use_ipc and config.runtime_dir else None
        bound: dict[str, list[str]] = {}
        for link in ("main", "ctl"):
            label = f"{link}-{config.rank}"
            wanted = bind_endpoints("ipc" if use_ipc else "tcp", label, runtime_dir=runtime, host=config.bind_host)
            bound[link] = [self.server.bind(link, endpoint) for endpoint in wanted]
        for endpoint in bind_endpoints(
            "ipc" if use_ipc else "tcp", f"data-{config.rank}", runtime_dir=runtime, host=config.bind_host
        ):
            self.bulk.bind(endpoint)
        self.desk.owner.endpoints.update(ctl=bound["ctl"], data=list(self.bulk.endpoints))
        self.server.start()
        name_thread("bus", self.server.bus_thread)
        self.watchdog.start()
        self.records.publish_worker(
            WorkerRecord(
                role=config.role,
                rank=config.rank,
                world_size=config.world_size,
                local_rank=config.local_rank,
                start=config.start,
                incarnation=config.incarnation,
                agent=config.agent_id,
                host=socket.gethostname(),
                pid_space=pid_space(),
                pid=os.getpid(),
                pid_start=start_time(os.getpid()) or 0,
                main=bound["main"],
                ctl=bound["ctl"],
                data=list(self.bulk.endpoints),
                public_key=self.keys.public_text,
                protocol=PROTOCOL_VERSION,
                version=_version(),
                ports=list(config.ports),
                log=os.path.relpath(config.log, config.trial_dir) if config.log else "",
            )
        )
        if config.published_fd is not None:  # the agent need not look for it
            os.eventfd_write(config.published_fd, 1)
            os.close(config.published_fd)

    def run(self) -> int:
        """Serve the main lane until stopped."""
        self.server.run(self.executor.run_main, self.executor.give_up)
        return self.exit_code

    def close(self) -> None:
        """Leave in order: tear the engine down, write the trace, flush answers, close sockets."""
        try:
            self._teardown()
        finally:
            control.shutdown()
            deadline = time.monotonic() + _DRAIN_S
            while self.server.parked() and time.monotonic() < deadline:
                time.sleep(0.005)  # answers leave on the bus thread; nothing signals an empty pipe
            time.sleep(_LEAVE_S)  # the last answer is with libzmq's own thread; sockets close without LINGER
            self.watchdog.close()
            self.executor.close()
            self.refs.close()
            self.server.close()
            self.bulk.close()
            self.porter.leave()
            self.records.close()
            self.factory.close()
            if self.journal is not None:
                self.journal.close()

    def _bus_handler(self) -> list[Handler]:
        busy = self.server.round_since()
        return [] if busy is None else [Handler("a handler of the bus thread", *busy)]

    def _bus_ended(self, error: BaseException) -> None:
        """End the process: with its bus thread gone nobody can ask it anything, and it would look alive."""
        try:
            print(f"zbus: {self.name} ends: its bus thread died of {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  # stderr is the log
            traceback.print_exception(error)
            sys.stderr.flush()
        finally:  # the log's disk may be full
            os._exit(EXIT_BUS_DIED)

    def stop(self, exit_code: int) -> None:
        """Stop after the current call. Any thread."""
        with self._stop_lock:
            if not self.server.stopping:
                self.exit_code = exit_code
                self.server.drain()
                self.server.stop()

    # -- the bus's own methods -----------------------------------------------------------------------------------

    def _builtins(self) -> dict[str, Any]:
        return {
            "ctl:zbus.ping": self._ping,
            "ctl:zbus.status": self._status,
            "ctl:zbus.describe": self._engine_facts,
            "ctl:zbus.stop": self._asked_to_stop,
            "ctl:zbus.stacks": describe_threads,
            "ctl:zbus.threads": self._dump_threads,
            "ctl:zbus.orphans": self._orphans,
            "ctl:zbus.adopt": self._adopt,
            "ctl:zbus.config_perf_tracer": self._config_tracer,
            "ctl:zbus.save_perf_tracer": self._save_tracer,
            "ctl:zbus.ref_open": self.desk.answers,
            "ctl:zbus.ref_release": self.refs.asked_to_release,
            "main:zbus.create_engine": self._create_engine,
            "main:zbus.destroy_engine": self._teardown,
            "main:zbus.barrier": lambda: None,
        }

    def describe(self) -> dict[str, Any]:
        """Return the facts that go into WELCOME."""
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "time_ns": time_namespace(),
            "incarnation": self.config.incarnation,
            "start": self.config.start,
            "world_size": self.config.world_size,
            "version": _version(),
            "engine_digest": self.digest,
            **self.porter.reach.facts(),
        }

    def _dispatch(self, request: Execute) -> None:
        self.executor.dispatch(request)

    def _cancel(self, effect: CancelRunning) -> None:
        self.executor.cancel(effect)

    def _credit(self, effect: StreamCredit) -> None:
        self.executor.credit(effect)

    def _asked_to_stop(self, _grace_s: float = 0.0) -> None:
        self.stop(EXIT_OK)

    def _ping(self) -> dict[str, Any]:
        return {"t": time.monotonic_ns(), "pid": os.getpid()}

    def _status(self) -> dict[str, Any]:
        calls = self.executor.current_calls()
        pulling = self.executor.pulling
        return {
            "role": self.config.role,
            "rank": self.config.rank,
            "start": self.config.start,
            "incarnation": self.config.incarnation,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": "busy" if pulling or any(c["lane"] != "ctl" for c in calls) else "idle",
            "engine": None if self.executor.engine is None else type(self.executor.engine).__name__,
            "call": next((c for c in calls if c["lane"] != "ctl"), None),
            "pulling_bytes": pulling,
            "done": self.executor.done,
            "failed": self.executor.failed,
            "rss_bytes": _rss_bytes(),
            "threads": threading.active_count(),
            "refused": self.server.statistics(),
            "slow_handlers": self.watchdog.facts(),
            **self.porter.statistics(),
            **self.desk.statistics(),
        }

    def _orphans(self) -> list[dict[str, Any]]:
        """Return what superseded controllers left: who asked for what, and how far it is."""
        return [
            {
                "session": orphan.session,
                "epoch": orphan.epoch,
                "lane": orphan.lane,
                "seq": orphan.seq,
                "calls": orphan.calls,
                "running": orphan.running,
                "methods": [
                    self.executor.method_of(orphan.session, orphan.lane, orphan.seq + n) for n in range(orphan.calls)
                ],
            }
            for orphan in self.server.orphans()
        ]

    def _adopt(self, session: bytes, lane: str, seq: int) -> list[list[Any]] | None:
        """Hand over an ended orphan: for each call its status and the frames of its value or exception."""
        orphan = self.server.adopt(session, lane, seq)
        if orphan is None:
            return None
        return [
            [
                int(Status.OK if header.kind == Kind.RESULT else header.status),
                [bytes(frame) for frame in Porter.in_full(buffers)],
            ]
            for header, buffers in orphan.replies
        ]

    def _engine_facts(self) -> dict[str, Any]:
        return {"endpoints": table_to_wire(self.table), "digest": self.digest, "mesh": dict(self.mesh.axes)}

    def _create_engine(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self.executor.engine is not None:  # creating what exists is safe to repeat
            return self._engine_facts()
        config = self.config
        try:
            cls = load_engine(config.job.engine, base=Path(config.job.cwd) if config.job.cwd else None)
        except EngineLoadError as error:  # a start-up failure with facts of its own, not an exception of the engine
            return {"load_error": {"message": error.message, "hint": error.hint, "facts": error.facts}}
        table = endpoints_of(cls)
        engine: Engine = cls(*args, **(kwargs or {}))
        context = self._make_context()
        try:
            engine.setup(context)
            if config.start > 0:
                engine.recover(context)
        except BaseException:
            context.close()
            raise
        self.context, self.table, self.digest = context, table, digest_of(cls, table)
        for lane, concurrency in lanes_of(table).items():
            self.server.open_lane(lane, concurrency)
        self.executor.install(engine, table)
        return self._engine_facts()

    def _make_context(self) -> Context:
        config = self.config
        return Context(
            role=config.role,
            rank=config.rank,
            world_size=config.world_size,
            mesh=self.mesh,
            local_rank=config.local_rank,
            start=config.start,
            incarnation=config.incarnation,
            trial_dir=config.trial_dir,
            ports=config.ports,
            tracer=get_tracer(),
            listen_fds=config.listen_fds,
            torch_store_fd=config.torch_store_fd,
            master_addr=config.master_addr,
            master_port=config.master_port,
            owns_process=True,
            _empty=self.porter.empty,
            _refs=self.refs,
        )

    # -- values kept for others ----------------------------------------------------------------------------------

    def _holder_is_over(self, session: bytes) -> bool:
        return not self.server.knows(session) or self.porter.courier.has_left(self.server.reach_of(session).memory)

    def _connect_to_owners(self) -> Client:
        return Client(session=new_session(), epoch=0, factory=self.factory, name=str(self.name))

    def _forget_owner(self, ref: Ref) -> None:
        self.porter.forget(Reach(ref.memory, tuple(ref.endpoints.get("data", ()))))

    def _owner_is_gone(self, ref: Ref) -> str:
        """Say why the owner of a handle is gone: its agent wrote of its exit, or it left this host's memory."""
        ended = self.records.exit(ref.role, ref.rank, ref.incarnation)
        if ended is not None:
            return f"it has ended, {describe_exit(ended.exit_code, ended.signal)}"
        return "its process is gone" if self.porter.courier.has_left(ref.memory) else ""

    def _teardown(self) -> None:
        engine = self.executor.remove()
        context, self.context = self.context, None
        try:
            if engine is not None:
                engine.teardown()
        finally:
            if context is not None:
                context.close()

    # -- tracing and diagnosis -----------------------------------------------------------------------------------

    def _start_tracing(self) -> None:
        epoch = self.records.current_epoch()
        control.configure(
            TraceConfig(
                root=str(self.config.trial_dir / "traces"),
                level=self.config.job.trace,
                run=f"{self.config.experiment}/{self.config.trial}",
                run_epoch_wall_ns=epoch.run_epoch_wall_ns if epoch else 0,
                run_epoch_mono_ns=epoch.run_epoch_mono_ns if epoch else 0,
                clock_boot_id=epoch.clock_boot_id if epoch else "",
                clock_time_ns=epoch.clock_time_ns if epoch else 0,
            ),
            role=self.config.role,
            rank=self.config.rank,
            incarnation=self.config.incarnation,
            start=self.config.start,
        ).add_gauge("bus", self._depth)

    def _depth(self) -> dict[str, float]:
        """Return how much waits and runs here, for the trace."""
        with self.server.lock:
            callee = self.server.callee
            return {"queued": callee.queued, "running": callee.running}

    def _config_tracer(self, config: Mapping[str, Any] | None = None, role: str | None = None) -> None:
        control.config_perf_tracer(config, role or self.config.role, self.config.rank)

    def _save_tracer(self, step: int | None = None, force: bool = False) -> None:  # wire signature  # noqa: FBT001, FBT002
        control.save_perf_tracer(step, force)

    def _open_journal(self) -> CrashJournal | None:
        """Open this start's crash journal; without one the worker serves on, and an end leaves its calls unknown."""
        config = self.config
        path = journal_file(config.trial_dir, config.role, config.rank, config.start)
        try:
            return CrashJournal(path, config.incarnation, is_over=lambda session: not self.server.knows(session))
        except OSError as error:
            with contextlib.suppress(OSError):  # the log may be on the same full disk
                print(f"zbus: no crash journal {path}: {error.strerror}", file=sys.stderr)  # the log  # noqa: T201
            return None

    def _arm_stack_dumps(self) -> StackFile:
        config = self.config
        stacks = StackFile(config.trial_dir / "stacks" / f"{config.role}.{config.rank}.{config.start}.txt")
        stacks.arm()
        faulthandler.enable(file=sys.stderr, all_threads=True)
        return stacks

    def _dump_threads(self) -> dict[str, Any]:
        return {"text": "", "saved": False} if self._stacks is None else self._stacks.dump()

    def _on_term(self, _signum: int, _frame: object) -> None:
        self.stop(EXIT_TERMINATED)


def _rss_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def _version() -> str:
    import zbus

    return zbus.__version__
