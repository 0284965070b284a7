"""A training engine's side: gather on rank 0, cast, hash, and give away in shared memory, as files or by broadcast."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.engines.weights.files import save
from workers.engines.weights.group import WeightsGroup, host_store
from workers.engines.weights.tensors import State, as_tensor, bytes_of, check_dtype, dtype_of, info_of
from zbus.errors import ConfigError
from zbus.rl.weights import Bytes, Manifest, combine, digests, manifest_of, nbytes_of, triples_of, views

if TYPE_CHECKING:
    import torch

    from zbus.runtime.context import Context

__all__ = ["Publisher", "PublishesWeights"]

log = logging.getLogger("zbus.weights")


class _Publication:
    """What was published last, on rank 0."""

    def __init__(self, dtype: str | None, parts: dict[str, bytes], manifest: Manifest, data: Bytes) -> None:
        self.dtype = dtype
        self.parts = parts  # digest of every tensor of the model
        self.digest = combine(parts)
        self.manifest = manifest
        self.data = data
        self.full = len(manifest) == len(parts)


class Publisher:
    """Publishes the weights of one model. Main thread; on all ranks where tensors are sharded.

    Args:
        ctx: The engine's context; ``save_weights``, and the group of role ``ports: 1``, are rank 0's.
        state: Returns the tensors by the names that generation engines know; DTensors are gathered.
    """

    def __init__(self, ctx: Context, state: Callable[[], State]) -> None:
        self._ctx = ctx
        self._state = state
        self._last: _Publication | None = None
        self._store: Any = None
        self._groups: dict[str, WeightsGroup] = {}

    def publish(self, dtype: str | None, since: str | None, *, keep: bool) -> dict[str, Any]:
        """Gather the weights; see ``TrainEngine.publish_weights``. Returns an empty dict on ranks other than 0.

        Raises:
            ConfigError: The dtype is none to cast to.
            RefLimitError: There is no room to keep them (``data.refs``).
        """
        check_dtype(dtype)
        gather = _Gather(self._state())
        if self._ctx.rank != 0:
            gather.rest()
            return {}
        last, self._last = self._last, None  # what follows may fail half-way
        changes = last is not None and (last.digest, last.dtype) == (since, dtype)
        try:
            made = (
                self._changed(gather, last.parts, dtype) if changes and last is not None else self._all(gather, dtype)
            )
        except BaseException:
            with suppress(RuntimeError):  # where the gathering itself broke, nobody waits
                gather.rest()  # else the other ranks take part in all of it, and would wait for this one
            raise
        manifest = triples_of(made.manifest)
        ref = self._ctx.put({"manifest": manifest, "data": made.data, "full": made.full}) if keep else None
        self._last = made
        return {
            "ref": ref, "manifest": manifest, "digest": made.digest, "full": made.full, "nbytes": made.data.nbytes,
        }  # fmt: skip

    def _all(self, gather: _Gather, dtype: str | None) -> _Publication:
        manifest = manifest_of(info_of(name, tensor, dtype) for name, tensor in gather.state.items())
        data: Bytes = self._ctx.empty(nbytes_of(manifest), np.uint8)
        for (info, view), (_, whole) in zip(views(manifest, data), gather, strict=True):
            as_tensor(info, view).copy_(whole)
        return _Publication(dtype, digests(views(manifest, data)), manifest, data)

    def _changed(self, gather: _Gather, before: dict[str, bytes], dtype: str | None) -> _Publication:
        parts: dict[str, bytes] = {}
        changed: dict[Any, torch.Tensor] = {}
        for name, gathered in gather:
            info = info_of(name, gathered, dtype)
            whole = gathered.to(dtype_of(info.dtype))
            parts |= digests([(info, bytes_of(whole))])
            if before.get(name) != parts[name]:
                changed[info] = whole
        manifest = tuple(changed)
        data: Bytes = self._ctx.empty(nbytes_of(manifest), np.uint8)
        for info, view in views(manifest, data):
            as_tensor(info, view).copy_(changed[info])
        return _Publication(dtype, parts, manifest, data)

    def forget(self) -> None:
        """Let go of what was published, and leave all groups. The store stays: its port can be listened on once."""
        self._last = None
        for name in list(self._groups):
            self.leave(name)

    # -- giving away -------------------------------------------------------------------------------------------------

    def save(self, path: str) -> dict[str, Any]:
        """Write what was published last to a new directory, whole or not at all.

        Raises:
            ConfigError: Nothing was published, or the directory is there already.
            OSError: It cannot be written; nothing is left of it.
        """
        made = self._published("save_weights")
        return {"nbytes": save(Path(path), made.manifest, made.data, digest=made.digest, full=made.full)}

    def address(self) -> dict[str, Any]:
        """Return where a group meets: the host and extra port 0 of this rank.

        Raises:
            ConfigError: The role has no extra port.
        """
        return {"host": self._ctx.master_addr, "port": self._ctx.port(0)}

    def join(self, name: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Join a group as its rank 0; blocks until all have joined.

        Raises:
            ConfigError: The role has no extra port, or torch has no such backend here.
            torch.distributed.DistError: Some did not join in time.
        """
        timeout = dt.timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = host_store(self._ctx, timeout)
        self.leave(name)
        self._groups[name] = WeightsGroup(name, self._store, 0, world_size, backend, timeout)

    def leave(self, name: str) -> None:
        """Leave a group; harmless where it was not joined."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def broadcast(self, name: str) -> None:
        """Broadcast what was published last, in the order of its manifest.

        Raises:
            ConfigError: Nothing was published, or this rank is in no such group.
            RuntimeError: A member of the group is gone or late.
        """
        made = self._published("broadcast_weights")
        group = self._groups.get(name)
        if group is None:
            msg = f"{self._ctx.role}/{self._ctx.rank} is not in the weights group {name!r}"
            raise ConfigError(msg, hint="join_weights_group on both sides first; WeightSync does")
        group.send(view for _, view in views(made.manifest, made.data))

    def _published(self, what: str) -> _Publication:
        if self._last is None:
            msg = f"{self._ctx.role}/{self._ctx.rank} has published no weights, so `{what}` has nothing to give"
            raise ConfigError(msg, hint="call publish_weights first; WeightSync keeps the order")
        return self._last


class _Gather:
    """The tensors of a model, whole, one after the other: each in a collective where ranks hold parts.

    Attributes:
        state: The tensors by name, as they are.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._left = list(state.items())[::-1]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self._left:
            name, tensor = self._left.pop()
            gather = getattr(tensor, "full_tensor", None)
            yield name, (tensor if gather is None else gather()).detach()

    def rest(self) -> None:
        """Take part in what is left."""
        for _ in self:
            pass


class PublishesWeights:
    """Mixin of a ``TrainEngine``, before it in the bases: sets ``publisher`` when the model is there."""

    publisher: Publisher

    def do_publish_weights(self, dtype: str | None, since: str | None, keep: bool) -> dict[str, Any]:  # noqa: FBT001  # a hook mirrors its endpoint
        """Gather and keep."""
        return self.publisher.publish(dtype, since, keep=keep)

    def do_save_weights(self, path: str) -> dict[str, Any]:
        """Write what was published."""
        return self.publisher.save(path)

    def do_weights_address(self) -> dict[str, Any]:
        """Tell where a weights group meets."""
        return self.publisher.address()

    def do_join(self, name: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Join a weights group as its rank 0."""
        self.publisher.join(name, world_size, backend, timeout_s)

    def do_leave(self, name: str) -> None:
        """Leave it."""
        self.publisher.leave(name)

    def do_broadcast(self, name: str) -> None:
        """Broadcast what was published."""
        self.publisher.broadcast(name)
