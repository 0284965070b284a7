"""A torch process group of the trainer's rank 0 and the generation engines, beside the default groups of both.

Process groups of torch are objects that need a store, a rank and a size; only what is reached through
``torch.distributed.broadcast`` must be registered there. These are not, so they need no default group, and what goes
wrong in one leaves no trace in the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from workers.engines.weights.tensors import dtype_of
from zbus.errors import ConfigError
from zbus.rl.weights import Bytes, Manifest, TensorInfo

if TYPE_CHECKING:
    import datetime as dt

    import torch

    from zbus.runtime.context import Context

__all__ = ["WeightsGroup", "host_store", "keep_local", "reach_store"]

_BACKENDS: Final = {"gloo": ("ProcessGroupGloo", "cpu"), "nccl": ("ProcessGroupNCCL", "cuda")}
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def host_store(ctx: Context, timeout: dt.timedelta) -> Any:
    """Open the store of all groups on extra port 0, which is bound and listening already.

    Raises:
        ConfigError: The role asked for no extra port.
    """
    from torch.distributed import TCPStore

    keep_local(ctx.master_addr)
    return TCPStore(
        ctx.master_addr, ctx.port(0), is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=ctx.listen_fd(0), use_libuv=True,
    )  # fmt: skip


def reach_store(host: str, port: int, timeout: dt.timedelta) -> Any:
    """Connect to the store.

    Raises:
        torch.distributed.DistError: Nobody answers there in time.
    """
    from torch.distributed import TCPStore

    keep_local(host)
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False, use_libuv=True)


def keep_local(host: str) -> None:
    """Have gloo connect over loopback where that is where the ranks are."""
    if host in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class WeightsGroup:
    """One membership. Main thread.

    Args:
        name: Unique among all groups of the store.
        store: Where the members meet.
        rank: Of this member; 0 sends.
        size: How many members.
        backend: ``gloo`` or ``nccl``.
        timeout: For joining and for each tensor.

    Raises:
        ConfigError: torch has no such backend here.
        torch.distributed.DistError: Some did not join in time.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, backend: str, timeout: dt.timedelta) -> None:
        import torch.distributed as dist

        cls, self._device = _BACKENDS.get(backend, ("", ""))
        if not hasattr(dist, cls):
            msg = f"weights group {name!r}: torch has no backend {backend!r} here"
            raise ConfigError(msg, hint=f"use one of {', '.join(_BACKENDS)}")
        self._timeout = timeout
        store = dist.PrefixStore(f"zbus/weights/{name}", store)
        store.set_timeout(timeout)
        if backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            self._group = dist.ProcessGroupNCCL(store, rank, size)
            self._group.set_timeout(timeout)

    def send(self, tensors: Iterable[Bytes]) -> None:
        """Broadcast the bytes of tensors, in order."""
        import torch

        for data in tensors:
            if data.nbytes:
                self._broadcast(torch.from_numpy(data).to(self._device))

    def take(self, manifest: Manifest) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        """Yield each tensor as it comes, in memory that is used again for the next."""
        import torch

        room = torch.empty(max((info.nbytes for info in manifest), default=0), dtype=torch.uint8, device=self._device)
        for info in manifest:
            data = room[: info.nbytes]
            if info.nbytes:
                self._broadcast(data)
            yield info, data.view(dtype_of(info.dtype)).reshape(info.shape)

    def _broadcast(self, tensor: Any) -> None:
        self._group.broadcast(tensor, 0, self._timeout).wait()

    def close(self) -> None:
        """Close the connections, so that others who wait for this member hear of it."""
        group, self._group = self._group, None
        with suppress(RuntimeError):
            group.abort()
        # Gloo closes with its last reference, so there must be no other: errors keep frames, and these this object.
        del group
