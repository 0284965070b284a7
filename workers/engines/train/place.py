"""Where a rank stands among the ranks of its role, and the few words that they exchange besides gradients."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from workers.engines.weights.group import keep_local
from zbus.codec import decode, encode
from zbus.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zbus.runtime.context import Context

__all__ = ["Peers", "Place", "join"]

_KNOWN: Final = ("dp", "tp")


@dataclass(frozen=True)
class Place:
    """One rank's place.

    Attributes:
        rank, world: Among all ranks of the role.
        dp, dp_size: On the axis over which batches are split.
        tp, tp_size: On the axis over which layers are split.
        device: Of the model.
        mesh: Torch's mesh of all ranks; None for a process without a group.
        words: Gloo group of the ranks of ``dp`` at the same place of the other axes; None where that is this one alone.
            What they say there crosses no collective of the model's.
    """

    rank: int = 0
    world: int = 1
    dp: int = 0
    dp_size: int = 1
    tp: int = 0
    tp_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    words: Any = None

    @property
    def coords(self) -> dict[str, int]:
        """Position on each axis."""
        return {"dp": self.dp, "tp": self.tp}


def join(ctx: Context, device: str, backend: str, timeout_s: float) -> Place:
    """Join the group of all ranks and return this rank's place. Collective.

    Raises:
        ConfigError: The role's mesh has axes that this engine does not use, or the device is not there.
        torch.distributed.DistError: A rank did not join in time.
    """
    axes = dict(ctx.mesh.axes)
    others = [axis for axis, size in axes.items() if axis not in _KNOWN and size > 1]
    if others or "dp" not in axes:
        msg = f"role {ctx.role!r} has the mesh {axes}, this engine trains over dp and tp"
        raise ConfigError(msg, hint=f'set roles.{ctx.role}.mesh={{"dp": {ctx.world_size}}}')
    chosen = _device(device, ctx.local_rank)
    ctx.init_torch(backend, timeout_s=timeout_s)
    mesh = dist.device_mesh.init_device_mesh(
        chosen.type, tuple(size for axis, size in axes.items() if axis in _KNOWN),
        mesh_dim_names=tuple(axis for axis in axes if axis in _KNOWN),
    )  # fmt: skip
    keep_local(ctx.master_addr)
    coords = ctx.coords
    return Place(
        ctx.rank, ctx.world_size, coords["dp"], axes["dp"], coords.get("tp", 0), axes.get("tp", 1), chosen, mesh,
        _words(mesh, timeout_s) if axes["dp"] > 1 else None,
    )  # fmt: skip


def _words(mesh: DeviceMesh, timeout_s: float) -> Any:
    """Make the groups that ranks of ``dp`` talk in, and return this rank's. Collective over all ranks."""
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh.movedim(names.index("dp"), -1)
    lists = ranks.reshape(-1, ranks.shape[-1]).tolist()
    timeout = dt.timedelta(seconds=timeout_s)
    own, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend="gloo")
    return own


def _device(name: str, local_rank: int) -> torch.device:
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        msg = f"device {name!r} is not there: torch sees no CUDA device"
        raise ConfigError(msg, hint="set device=cpu, or roles.<role>.gpus=1 and install torch for CUDA")
    if device.index is None:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Peers:
    """Ranks of the axis ``dp`` at the same place of the other axes. All but ``fail`` are collectives on ``main``."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._group: Any = place.words

    def gather(self, *numbers: int) -> list[list[int]]:
        """Return every rank's numbers, by its position on ``dp``."""
        if self._group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._place.dp_size)]
        dist.all_gather(found, own, group=self._group)
        return [[int(number) for number in one] for one in found]

    def sum(self, *numbers: float) -> list[float]:
        """Return the sum of each number over the ranks, the same on all of them."""
        if self._group is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(number) for number in total]

    def fail(self) -> None:
        """Tell the others that this rank has failed, as the last number of the ``sum`` they are in, or come to.

        Waits for nobody: the others may be long in coming, or stuck.
        """
        if self._group is not None:
            told = torch.tensor([0.0, 1.0], dtype=torch.float64)
            with suppress(RuntimeError):  # the group is broken, so nobody waits there
                dist.all_reduce(told, group=self._group, async_op=True)

    def lend(self, value: Mapping[str, Any] | None, owner: int) -> Mapping[str, Any]:
        """Return what the rank at position ``owner`` of ``dp`` gives: plain data and arrays, as in a call."""
        frames = [] if value is None else list(map(bytes, encode(dict(value))))
        count = int(self._spread(np.array([len(frames)]), owner)[0])
        sizes = self._spread(np.array(list(map(len, frames)) or [0] * count), owner)
        joined = b"".join(frames) or bytes(int(sizes.sum()))
        data = self._spread(np.frombuffer(joined, np.uint8).copy(), owner).tobytes()
        cuts = [0, *np.cumsum(sizes).tolist()]
        lent: Mapping[str, Any] = decode([data[cuts[k] : cuts[k + 1]] for k in range(count)])
        return lent

    def _spread(self, array: Any, owner: int) -> Any:
        """Return the owner's array, whose size all know."""
        if self._group is None:
            return array
        tensor = torch.from_numpy(array)
        dist.broadcast(tensor, dist.get_global_rank(self._group, owner), group=self._group)
        return tensor.numpy()
