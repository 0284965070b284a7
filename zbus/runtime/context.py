"""What an engine is told about its place: rank, mesh, ports, tracer; and torch's group without guessed ports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbus.engine import Mesh
from zbus.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from zbus.codec import Ref
    from zbus.runtime.refs import WorkerRefs

__all__ = ["Context"]


@dataclass
class Context:
    """Handed to ``Engine.setup`` on the worker's main thread.

    Attributes:
        role, rank, world_size, local_rank: Its place, as torchrun names them.
        mesh: Named axes of the group.
        start: 0 for the first start of this rank.
        incarnation: Identity of this start.
        trial_dir: The trial directory.
        ports: Extra ports held for this rank (``port_count`` of its role); ``socket(i)`` hands the i-th over.
        env: The process's environment.
        owns_process: Whether this process is the rank's own: where it ends, nobody else does.
    """

    role: str
    rank: int
    world_size: int
    mesh: Mesh
    local_rank: int = 0
    start: int = 0
    incarnation: int = 0
    trial_dir: Path = field(default_factory=Path)
    ports: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    tracer: Any = None
    listen_fds: Sequence[int] = ()
    torch_store_fd: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    owns_process: bool = False
    _store: Any = None
    _joins: int = 0
    _joined: bool = False
    _empty: Callable[[Sequence[int] | int, Any], Any] | None = None
    _refs: WorkerRefs | None = None

    @property
    def coords(self) -> dict[str, int]:
        """Position of this rank on each mesh axis."""
        return self.mesh.coords(self.rank)

    def empty(self, shape: Sequence[int] | int, dtype: Any = "float32") -> Any:
        """Return an uninitialised numpy array in shared memory: as a result it is sent from there without a copy.

        The rules are those of ``Controller.empty``: take a new one for each call, and do not change it once it was
        returned. Any thread.

        Args:
            shape: Sizes of the dimensions.
            dtype: numpy dtype, not of objects.
        """
        if self._empty is not None:
            return self._empty(shape, dtype)
        import numpy as np

        return np.empty(shape, dtype)

    def put(self, value: Any) -> Ref:
        """Keep a value here and return its handle, to be answered or stored: whoever uses it gets the value from here.

        Inside a call it is kept for the caller: until the last handle that came to it in an answer, its scope, or the
        caller itself is gone. Outside one (in ``setup``) it is kept until ``release`` or the end of this process. Any
        thread.

        Raises:
            CodecError: The value cannot be carried.
            RefLimitError: This rank keeps as much as it may (``data.refs``).
        """
        return self._kept().put(value)

    def get(self, ref: Ref) -> Any:
        """Return the value of a handle; arrays are read-only. Blocks. Handles in a call's arguments are opened already.

        Raises:
            RefLostError: Its owner is gone, or it was released.
        """
        return self._kept().get(ref)

    def release(self, ref: Ref) -> None:
        """Let go of a value that this rank keeps."""
        self._kept().release(ref)

    def _kept(self) -> WorkerRefs:
        if self._refs is None:
            msg = f"{self.role}/{self.rank} keeps no values: it was made without a bus"
            raise ConfigError(msg)
        return self._refs

    def port(self, index: int = 0) -> int:
        """Return extra port number ``index``: bound and listening already, so nobody else can take it.

        Raises:
            ConfigError: The role asked for fewer ports.
        """
        if not 0 <= index < len(self.ports):
            msg = f"{self.role}/{self.rank} has {len(self.ports)} extra ports, not {index + 1}"
            raise ConfigError(msg, hint=f"set roles.{self.role}.ports={index + 1}")
        return self.ports[index]

    def socket(self, index: int = 0) -> socket.socket:
        """Return the listening socket of ``port(index)``; the caller owns it.

        Raises:
            ConfigError: The role asked for fewer ports, or runs without an agent (inline).
        """
        import socket

        return socket.socket(fileno=self.listen_fd(index))

    def listen_fd(self, index: int = 0) -> int:
        """Return ``socket(index)`` as a descriptor, for libraries that take one; the caller owns it.

        Raises:
            ConfigError: As ``socket``.
        """
        self.port(index)
        if index >= len(self.listen_fds):
            msg = "this context holds no sockets: they come from the agent, and this engine runs without one"
            raise ConfigError(msg)
        return os.dup(self.listen_fds[index])

    def init_torch(self, backend: str = "gloo", *, timeout_s: float = 120.0) -> None:
        """Initialise torch.distributed over the ranks of this group; call on every rank, on the main thread.

        After ``close`` on every rank it may be called again.

        Rank 0 hosts the store on a socket that was bound and listening before any rank started, so no port is guessed
        and no rank can be early. Each generation of a group (a restart of all) has a store of its own.

        Args:
            backend: ``gloo``, ``nccl`` or a torch backend string such as ``cpu:gloo,cuda:nccl``.
            timeout_s: Limit for joining, and for each collective.

        Raises:
            ConfigError: torch is not installed.
            torch.distributed.DistError: A rank did not join in time.
        """
        try:
            import torch.distributed as dist
        except ImportError as error:
            msg = f"{self.role}/{self.rank} asked for torch, which is not installed here"
            raise ConfigError(msg, hint="pip install 'zbus-runtime[torch]' where the workers run") from error
        import datetime as dt

        if dist.is_initialized():
            return
        timeout = dt.timedelta(seconds=timeout_s)
        if "gloo" in backend and self.master_addr in ("127.0.0.1", "localhost", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._store is None:
            self._store = self._open_store(timeout)
        self._joins += 1  # every rank counts alike, so what an earlier group left in the store meets nobody
        self._joined = True
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"zbus/{self.role}/{self._joins}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )

    def _open_store(self, timeout: Any) -> Any:
        import torch.distributed as dist

        if self.world_size == 1 and self.torch_store_fd is None:
            return dist.HashStore()
        return dist.TCPStore(
            host_name=self.master_addr,
            port=self.master_port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if self.torch_store_fd is None or self.rank else os.dup(self.torch_store_fd),
            use_libuv=True,
        )

    def close(self) -> None:
        """Leave the torch process group, if one was joined. Its store stays for another one of these ranks."""
        if not self._joined:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._joined = False
