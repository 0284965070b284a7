"""A role: what its ranks run, how many there are, and what each needs."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from controller.scheduling.api import Job, Scheduling
from zbus import names
from zbus.config.schema import DataConfig, RoleConfig
from zbus.engine import Engine, Mesh
from zbus.errors import ConfigError

__all__ = ["Role", "import_paths"]

_RESTARTS: Final = ("never", "one", "all")


@dataclass(frozen=True)
class Role:
    """One role of a trial.

    Attributes:
        engine: ``module:Class``, ``file.py:Class``, or the class itself (sent by its path, never pickled).
        replicas: Number of ranks; None: the product of ``mesh``, or 1.
        mesh: Axis name to size, last axis fastest; None: one axis ``dp``.
        args, kwargs: Arguments of the class.
        gpus, cpus: Per rank; GPUs are counted and handed out by the controller.
        mem: Bytes per rank, for schedulers that can limit it.
        env: Environment of the ranks, on top of this process's.
        preload: Modules the template imports once before it forks the ranks (``["torch"]``).
        ports: Extra ports per rank, bound and held before the rank starts.
        restart: What restarts when a rank dies: nothing, that rank, or all ranks.
        max_restarts, restart_window_s: At most so many restarts within so many seconds.
        cwd: Working directory of the ranks; None: this process's.
        sys_path: Directories put first on the ranks' import path.
        orphans: What ranks do without a controller: exit, or wait for the next.
    """

    engine: str | type[Engine]
    replicas: int | None = None
    mesh: Mapping[str, int] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gpus: float = 0
    cpus: float = 0
    mem: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    preload: Sequence[str] = ()
    ports: int = 0
    restart: Literal["never", "one", "all"] = "never"
    max_restarts: int = 3
    restart_window_s: float = 300.0
    cwd: str | None = None
    sys_path: Sequence[str] = ()
    orphans: Literal["exit", "wait"] = "exit"

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if not self.engine:
            msg = "a role needs an engine"
            raise ConfigError(msg, hint="name it as package.module:Class or file.py:Class")
        if self.replicas is not None and type(self.replicas) is not int:  # True is no number of ranks
            msg = f"replicas={self.replicas!r} is no number of ranks"
            raise ConfigError(msg, hint="give a whole number, at least 1")
        if self.replicas is not None and self.replicas < 1:
            msg = f"replicas={self.replicas} starts no worker"
            raise ConfigError(msg, hint="give at least 1")
        if self.restart not in _RESTARTS:
            msg = f"restart={self.restart!r} is not known"
            raise ConfigError(msg, hint=f"one of {', '.join(_RESTARTS)}")
        Mesh.of(self.mesh or None, self.world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if self.replicas is not None:
            return self.replicas
        return Mesh(self.mesh).size if self.mesh else 1

    @property
    def engine_path(self) -> str:
        """The engine as the workers import it; files are absolute.

        Raises:
            ConfigError: A class that cannot be imported by a path (local, or made in a console).
        """
        if isinstance(self.engine, str):
            module, separator, name = self.engine.rpartition(":")
            if separator and module.endswith(".py"):
                return f"{(Path(self.cwd or '.') / module).absolute()}:{name}"
            return self.engine
        return _path_of(self.engine)

    @classmethod
    def of(cls, config: RoleConfig, base: Path | None = None) -> Role:
        """Return the role a config describes; ``base`` is where its relative files are looked up."""
        engine = config.engine
        module, separator, name = engine.rpartition(":")
        if base is not None and separator and module.endswith(".py"):
            engine = f"{(base / module).absolute()}:{name}"
        return cls(
            engine=engine,
            replicas=config.replicas,
            mesh=config.mesh or None,
            args=config.args,
            kwargs=config.kwargs,
            gpus=config.gpus,
            cpus=config.cpus,
            mem=config.mem,
            env=config.env,
            preload=config.preload,
            ports=config.ports,
            restart=config.restart,
            max_restarts=config.max_restarts,
            restart_window_s=config.restart_window,
            cwd=config.cwd,
            sys_path=config.sys_path,
            orphans=config.orphans,
        )

    def to_job(self, name: str, trace: str, data: DataConfig | None = None) -> Job:
        """Return what a scheduler places and agents run.

        Args:
            name: The role's name.
            trace: ``off``, ``rpc`` or ``full``.
            data: How much its ranks lend and keep; defaults where not given.

        Raises:
            ConfigError: The role's name, engine or needs are not valid.
        """
        data = data or DataConfig()
        task = Scheduling(
            cpu=self.cpus, gpu=self.gpus, mem=self.mem, port_count=self.ports,
            env_vars={key: str(value) for key, value in self.env.items()},
        )  # fmt: skip
        job = Job(
            role=names.check(name, "role"),
            replicas=self.world_size,
            engine=self.engine_path,
            tasks=(task,),
            mesh=dict(self.mesh or {"dp": self.world_size}),
            preload=tuple(self.preload),
            restart=self.restart,
            max_restarts=self.max_restarts,
            restart_window_s=self.restart_window_s,
            cwd=None if self.cwd is None else str(Path(self.cwd).absolute()),
            sys_path=(*map(str, self.sys_path), *import_paths()),
            trace=trace,
            orphans=self.orphans,
            shared_memory=data.shared_memory,
            refs=data.refs,
            ref_lease_s=data.ref_lease,
        )
        record = job.to_record(0)
        plain = json.dumps({key: getattr(record, key) for key in record.__struct_fields__}, sort_keys=True)
        return replace(job, digest=hashlib.blake2b(plain.encode(), digest_size=8).hexdigest())

    def with_changes(self, changes: Mapping[str, Any]) -> Role:
        """Return a copy with some fields replaced, by config key (``restart_window`` for ``restart_window_s``)."""
        known = {f.name for f in fields(self)}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for key, value in changes.items():
            name = "restart_window_s" if key == "restart_window" else key
            if name in known:
                values[name] = value
        if "replicas" in changes and "mesh" not in changes and self.mesh and len(self.mesh) == 1:
            values["mesh"] = {next(iter(self.mesh)): changes["replicas"]}
        return Role(**values)


def import_paths() -> list[str]:
    """Return this process's own import directories, so that ranks can import what the driver can.

    What belongs to the interpreter or to installed packages is left out: the ranks have these of themselves.
    """
    installed = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
    found = []
    for entry in sys.path:
        path = str(Path(entry or ".").absolute())
        if not path.startswith(installed) and not path.endswith(".zip") and path not in found:
            found.append(path)
    return found


def _path_of(cls: type[Engine]) -> str:
    if "<locals>" in cls.__qualname__ or "." in cls.__qualname__:
        msg = f"engine class {cls.__qualname__} is not at the top level of its module, so workers cannot import it"
        raise ConfigError(msg, hint="move the class to the top level of a module")
    if cls.__module__ != "__main__":
        return f"{cls.__module__}:{cls.__qualname__}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        msg = f"engine class {cls.__qualname__} was defined in a console, so workers cannot import it"
        raise ConfigError(msg, hint="put the class in a file and import it")
    return f"{Path(file).absolute()}:{cls.__qualname__}"
