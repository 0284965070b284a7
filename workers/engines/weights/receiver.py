"""A generation engine's side: check what came against the model, then copy it in, and hash what is there."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.engines.weights.files import Files
from workers.engines.weights.group import WeightsGroup, reach_store
from workers.engines.weights.tensors import State, as_tensor, bytes_of, dtype_name, dtype_of, info_of, keeps
from zbus.errors import ConfigError
from zbus.rl.weights import Manifest, TensorInfo, combine, digests, manifest_of, views

if TYPE_CHECKING:
    import torch

__all__ = ["Receiver", "ReceivesWeights"]


class Receiver:
    """Takes weights into one model, in place. Main thread, while nothing is generated.

    Args:
        state: Returns the model's tensors by name, the names of the training engine.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._parts: dict[str, bytes] = {}  # digests of tensors that were not written since
        self._dtypes: dict[str, str] = {}  # in which each came last
        self._groups: dict[str, WeightsGroup] = {}

    # -- taking ------------------------------------------------------------------------------------------------------

    def update(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Copy pieces of memory into the model; see ``RolloutEngine.update_weights``.

        Raises:
            ConfigError: They do not fit the model; nothing was written.
        """
        state = self._state()
        manifests = [manifest_of(piece["manifest"]) for piece in pieces]
        self._check(state, "memory", manifests, full=any(piece["full"] for piece in pieces))
        ready = [list(views(manifest, piece["data"])) for manifest, piece in zip(manifests, pieces, strict=True)]
        for piece in ready:
            self._copy(state, ((info, as_tensor(info, view)) for info, view in piece))

    def load(self, paths: Sequence[str]) -> None:
        """Copy directories of safetensors into the model, in order.

        Raises:
            ConfigError: A directory holds none, is damaged, or does not fit the model; nothing was written.
        """
        state = self._state()
        opened = [Files.open(Path(path)) for path in paths]
        source = ", ".join(paths)
        self._check(state, source, [files.manifest for files in opened], full=any(files.full for files in opened))
        for files in opened:
            self._copy(state, files.tensors())

    def receive(self, name: str, manifest: Sequence[Sequence[Any]], *, full: bool) -> None:
        """Receive broadcasts of a group into the model.

        Raises:
            ConfigError: They do not fit the model, or this engine is in no such group; nothing was written.
            RuntimeError: The group broke; the model may be half-way.
        """
        state = self._state()
        group = self._groups.get(name)
        if group is None:
            msg = f"this engine is not in the weights group {name!r}"
            raise ConfigError(msg, hint="join_weights_group on both sides first; WeightSync does")
        known = manifest_of(manifest)
        self._check(state, f"group {name}", [known], full=full)
        self._copy(state, group.take(known))

    def _check(self, state: State, source: str, manifests: Sequence[Manifest], *, full: bool) -> None:
        came = {info.name: info for manifest in manifests for info in manifest}
        if unknown := [name for name in came if name not in state]:
            raise _misfit(source, f"holds {_some(unknown)}, which the model has not")
        if full and (missing := [name for name in state if name not in came]):
            raise _misfit(source, f"lacks {_some(missing)} of the model")
        for info in (info for manifest in manifests for info in manifest):
            own = info_of(info.name, state[info.name])
            if own.shape != info.shape:
                raise _misfit(source, f"has {info.name!r} as {list(info.shape)}, the model as {list(own.shape)}")
            if not keeps(own.dtype, info.dtype):
                raise _misfit(source, f"has {info.name!r} as {info.dtype}, which the model's {own.dtype} cannot hold")

    def _copy(self, state: State, tensors: Iterable[tuple[TensorInfo, torch.Tensor]]) -> None:
        for info, tensor in tensors:
            self._parts.pop(info.name, None)
            self._dtypes[info.name] = info.dtype
            state[info.name].detach().copy_(tensor)

    # -- hashing -----------------------------------------------------------------------------------------------------

    def digest(self, *, anew: bool) -> str:
        """Return the digest of the model, in the dtypes its tensors last came in.

        Args:
            anew: Hash all of them, not only those that were written since they were hashed last.
        """
        if anew:
            self._parts.clear()
        state = self._state()
        self._parts |= digests(self._as_it_came(name, tensor) for name, tensor in state.items()
                               if name not in self._parts)  # fmt: skip
        return combine({name: self._parts[name] for name in state})

    def _as_it_came(self, name: str, tensor: torch.Tensor) -> tuple[TensorInfo, Any]:
        dtype = self._dtypes.get(name, dtype_name(tensor.dtype))
        return info_of(name, tensor)._replace(dtype=dtype), bytes_of(tensor.detach().to(dtype_of(dtype)))

    # -- the group ---------------------------------------------------------------------------------------------------

    def join(
        self, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a group; blocks until all have joined.

        Raises:
            ConfigError: torch has no such backend here.
            torch.distributed.DistError: Its store cannot be reached, or some did not join in time.
        """
        timeout = dt.timedelta(seconds=timeout_s)
        self.leave(name)
        store = reach_store(host, port, timeout)
        self._groups[name] = WeightsGroup(name, store, first_rank, world_size, backend, timeout)

    def leave(self, name: str) -> None:
        """Leave a group; harmless where it was not joined."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()


def _some(names: Sequence[str]) -> str:
    told = ", ".join(map(repr, names[:3]))
    return told if len(names) <= 3 else f"{told} and {len(names) - 3} more"


def _misfit(source: str, what: str) -> ConfigError:
    return ConfigError(
        f"weights from {source}: what came {what}",
        hint="both roles must build the same model; publish in a dtype that the generation engine holds (dtype=...)",
    )


class ReceivesWeights:
    """Mixin of a ``RolloutEngine``, before it in the bases: sets ``receiver`` when the model is there."""

    receiver: Receiver

    def do_update(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Copy pieces of memory into the model."""
        self.receiver.update(pieces)

    def do_load(self, paths: Sequence[str]) -> None:
        """Copy directories of safetensors into the model."""
        self.receiver.load(paths)

    def do_receive(self, name: str, manifest: Sequence[Sequence[Any]], full: bool) -> None:  # noqa: FBT001  # a hook mirrors its endpoint
        """Receive broadcasts of a group into the model."""
        self.receiver.receive(name, manifest, full=full)

    def do_join(
        self, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a weights group."""
        self.receiver.join(name, host, port, first_rank, world_size, backend, timeout_s)

    def do_leave(self, name: str) -> None:
        """Leave it."""
        self.receiver.leave(name)

    def do_digest(self, anew: bool) -> str:  # noqa: FBT001  # a hook mirrors its endpoint
        """Return the digest of the model."""
        return self.receiver.digest(anew=anew)
