"""What a config may say: the one place where each key, its type and its default stand.

Durations are seconds and sizes are bytes once loaded; in files and overrides they may be text (``30s``, ``64MiB``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "DURATION",
    "SIZE",
    "Config",
    "Duration",
    "LogConfig",
    "RecoverConfig",
    "RoleConfig",
    "RpcConfig",
    "SchedulerConfig",
    "Size",
    "TraceConfig",
]

DURATION: Final = "duration"
SIZE: Final = "size"

Duration = Annotated[float, Meta(ge=0, le=1e8, extra={"unit": DURATION})]
Limit = Annotated[float, Meta(gt=0, le=1e8, extra={"unit": DURATION})]
"""Seconds."""
Size = Annotated[int, Meta(ge=0, extra={"unit": SIZE})]
"""Bytes."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Level = Literal["off", "rpc", "full"]


class RoleConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One role: what its ranks run and what they need.

    Attributes:
        engine: ``module:Class``, or ``file.py:Class`` relative to the config file. Empty only where a script names it.
        replicas: World size; the product of ``mesh`` or 1 where not given.
        args, kwargs: Arguments of the engine class.
        mesh: Axis name to size, in row-major order; their product is the world size.
        gpus: GPUs per rank.
        cpus: CPU cores per rank, for schedulers that can reserve them.
        mem: Memory per rank, for schedulers that can limit it; 0 for no limit.
        env: Environment of the ranks, on top of the caller's.
        preload: Modules a template process imports before it forks ranks.
        ports: Extra ports per rank, bound and held by the agent.
        restart: What restarts after a rank died: nothing, that rank, or all ranks.
        max_restarts, restart_window: At most so many restarts within this time.
        cwd: Working directory of the ranks; the caller's where not given.
        sys_path: Directories put first on the ranks' import path.
        orphans: What ranks do without a controller: exit, or wait for the next one.
    """

    engine: str = ""
    replicas: Positive | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    mesh: dict[str, Positive] = {}
    gpus: Annotated[float, Meta(ge=0)] = 0
    cpus: Annotated[float, Meta(ge=0)] = 0
    mem: Size = 0
    env: dict[str, str] = {}
    preload: list[str] = []
    ports: Count = 0
    restart: Literal["never", "one", "all"] = "never"
    max_restarts: Count = 3
    restart_window: Duration = 300.0
    cwd: str | None = None
    sys_path: list[str] = []
    orphans: Literal["exit", "wait"] = "exit"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if self.replicas is not None:
            return self.replicas
        size = 1
        for axis in self.mesh.values():
            size *= axis
        return size


class SchedulerConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where ranks run.

    Attributes:
        type: ``inline`` (in this process, for pdb), ``local`` (processes here), ``external`` (agents started by hand).
        startup_timeout: Time from launch until every rank must be ready.
        stop_grace: Time that ranks have to end in order before they are killed.
        gpus: GPU indices this run may use; all visible ones where not given.
        transport: ``ipc`` or ``tcp`` on one host.
        bind: Host or address that tcp sockets bind.
    """

    type: Literal["inline", "local", "external"] = "local"
    startup_timeout: Limit = 60.0
    stop_grace: Duration = 3.0
    gpus: list[int] | None = None
    transport: Literal["ipc", "tcp"] = "ipc"
    bind: str = "127.0.0.1"


class RpcConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How calls and liveness behave.

    Attributes:
        timeout: Deadline of a call whose endpoint names none.
        lease: How long the controller's lease lives without being renewed.
        create_timeout: How long one engine creation may take.
        stuck_after: A call that runs longer is reported as stuck, with stacks; nothing is killed for it.
        stuck_factor: How much longer than its peers, or than ever before, a call must run to be reported.
    """

    timeout: Limit = 1800.0
    lease: Limit = 15.0
    create_timeout: Limit = 600.0
    stuck_after: Limit = 60.0
    stuck_factor: Annotated[float, Meta(ge=1, le=1e6)] = 3.0


class TraceConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is traced.

    Attributes:
        level: ``off``, ``rpc`` (bus and user spans) or ``full``.
        merge: Merge all files into one timeline, and write ``report.html``, when the run ends.
        root: Where trace files go; ``<trial>/traces`` where not given.
        sidecar: Start a process that takes over the writing from all others.
    """

    level: Level = "rpc"
    merge: bool = True
    root: str | None = None
    sidecar: bool = False


class DataConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How arrays travel between processes of one host, and what processes keep for others.

    Attributes:
        shared_memory: Most bytes of shared memory that one process lends; half of ``/dev/shm`` where not given. 0: none
            is used, arrays go through sockets.
        refs: Most bytes that one process keeps for Refs; half of what it may lend where not given.
        ref_lease: How long a process keeps the values of a controller that is silent.
    """

    shared_memory: Size | None = None
    refs: Size | None = None
    ref_lease: Limit = 60.0


class RecoverConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When a driver that keeps dumps writes one, and what `--resume` does with a broken one.

    Attributes:
        every_steps: Dump after so many steps; 0: not by steps.
        every: Dump once so much time has passed since the last; 0: not by time.
        keep: Dumps that stay.
        fallback: Where the newest dump is broken or missing, go on from the newest whole one instead of refusing.
    """

    every_steps: Count = 0
    every: Duration = 300.0
    keep: Positive = 2
    fallback: bool = False


class LogConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the console shows.

    Attributes:
        level: Least severe record shown on the console.
        format: ``plain`` or ``json`` lines; ``auto`` is plain.
    """

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["auto", "plain", "json"] = "auto"


class Config(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A whole config.

    Attributes:
        experiment: Name of the experiment; the target's name where not given.
        trial: Name of the trial; time and a random suffix where not given.
        root: Directory of all experiments.
        target: The driver: ``file.py:function`` relative to the config file, or ``module:function``.
        roles: Role name to role.
        params: The user's own section, passed to the driver as it stands.
    """

    experiment: str = ""
    trial: str = ""
    root: str = "zbus-runs"
    target: str = ""
    roles: dict[str, RoleConfig] = {}
    scheduler: SchedulerConfig = SchedulerConfig()
    rpc: RpcConfig = RpcConfig()
    trace: TraceConfig = TraceConfig()
    data: DataConfig = DataConfig()
    recover: RecoverConfig = RecoverConfig()
    log: LogConfig = LogConfig()
    params: dict[str, Any] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``load_config(data=…)`` reads back to an equal config."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
