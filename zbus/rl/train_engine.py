"""The contract of training engines: endpoints declared once, hooks that an engine fills in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zbus
from zbus.engine import Concat, Everywhere, First, PerRank, RankZero, Same, Split

__all__ = ["TrainEngine"]


class TrainEngine(zbus.Engine):
    """Base of engines that train, over the mesh axis ``dp`` (and others, such as ``tp``). All run on ``main``.

    An engine overrides the ``do_…`` hooks. A batch is a dict of columns with one row per sequence: padded arrays
    ``[rows, longest]``, arrays ``[rows]`` or ``zbus.Ragged``; each rank gets its rows, perhaps none. Calls whose ranks
    meet in collectives start together: none runs unless all hold the call.
    """

    def __init__(self) -> None:
        self._version = 0

    # -- life --------------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once", start="together")
    def create_process_group(self, backend: str = "gloo", timeout_s: float = 120.0) -> dict[str, int]:
        """Join the group of all ranks; returns this rank's coordinates on the mesh."""
        return self.do_create_process_group(backend, timeout_s)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once", start="together")
    def initialize(self) -> dict[str, Any]:
        """Build model, optimizer and schedule; returns ``parameters`` (their number) and whatever else is of note."""
        return self.do_initialize()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def destroy(self) -> None:
        """Forget the model and leave the group; harmless where there is none. ``initialize`` may follow."""
        self.do_destroy()

    # -- steps -------------------------------------------------------------------------------------------------------

    @zbus.endpoint(Split("dp", by="tokens", args=("batch",)), collect=PerRank(), effect="once", start="together")
    def train_batch(self, batch: Any, loss: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take one optimizer step on this rank's rows; returns this rank's statistics."""
        return self.do_train_batch(batch, loss, dict(options or {}))

    @zbus.endpoint(Split("dp", by="tokens", args=("batch",)), collect=PerRank(), effect="pure", start="together")
    def eval_batch(self, batch: Any, loss: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compute a loss on this rank's rows without a step."""
        return self.do_eval_batch(batch, loss, dict(options or {}))

    @zbus.endpoint(Split("dp", by="tokens", args=("batch",)), collect=Concat(), effect="pure", start="together")
    def forward_batch(self, batch: Any, output: str = "logprobs", options: Mapping[str, Any] | None = None) -> Any:
        """Return one value per row of the batch, such as each token's log-probability, in the order of the rows."""
        return self.do_forward_batch(batch, output, dict(options or {}))

    @zbus.endpoint(Split("dp", by="tokens", args=("batch",)), collect=PerRank(), effect="once", start="together")
    def forward_backward_batch(self, batch: Any, loss: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Add this batch's gradients to those that are there; no step."""
        return self.do_forward_backward_batch(batch, loss, dict(options or {}))

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        self.do_optimizer_zero_grad()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once", start="together")
    def optimizer_step(self) -> dict[str, Any]:
        """Clip and step; returns statistics such as ``grad_norm``."""
        return self.do_optimizer_step()

    @zbus.endpoint(Everywhere(), collect=Same(), effect="once")
    def lr_scheduler_step(self) -> float:
        """Go on in the learning-rate schedule; returns the rate of the next step."""
        return self.do_lr_scheduler_step()

    # -- state -------------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent", start="together")
    def save(self, path: str, kind: str = "checkpoint") -> dict[str, Any]:
        """Write a ``checkpoint`` (model, optimizer, schedule, RNG of every rank) or the ``model`` alone (safetensors).

        The directory must not exist or be empty; the controller names a fresh one and renames it when all have written.
        """
        return self.do_save(path, kind)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent", start="together")
    def load(self, path: str, kind: str = "checkpoint") -> dict[str, Any]:
        """Take over what ``save`` wrote, also on another number of ranks where the format allows."""
        return self.do_load(path, kind)

    @zbus.endpoint(Everywhere(), collect=Same(), effect="pure")
    def get_version(self) -> int:
        """Tell the version of the weights."""
        return self._version

    @zbus.endpoint(Everywhere(), collect=Same(), effect="idempotent")
    def set_version(self, version: int) -> int:
        """Name the weights that are there."""
        self._version = version
        return version

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once")
    def export_stats(self) -> dict[str, Any]:
        """Hand over what was recorded since the last time, as ``zbus.rl.stats`` merges it."""
        return self.do_stats()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def offload(self) -> None:
        """Move weights and optimizer state off the accelerator."""
        self.do_offload()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def onload(self) -> None:
        """Undo ``offload``."""
        self.do_onload()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def get_device_stats(self) -> dict[str, Any]:
        """Tell memory in use, in bytes, by device."""
        return self.do_device_stats()

    # -- weights for generation --------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=First(), effect="idempotent", start="together")
    def publish_weights(self, dtype: str | None = None, since: str | None = None, keep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002  # as it is called
        """Gather the weights on rank 0: what ``save_weights``, ``broadcast_weights`` and the ``Ref`` then give away.

        Args:
            dtype: Bare torch name to cast floating-point tensors to; None: as they are.
            since: Digest of an earlier publication: only what has changed since is published, if it was the last one
                and in the same dtype; else all.
            keep: Keep them in shared memory for others, as a ``Ref``.

        Returns:
            Of rank 0: ``manifest`` (``zbus.rl.weights``), ``digest`` of *all* weights in that dtype, ``full`` (whether
            the manifest holds all of them), ``nbytes``, and ``ref``: a ``Ref`` to ``{"manifest", "data",
            "full"}``, ``data`` being the one buffer that the manifest describes, or None. Nothing on other ranks.
        """
        return self.do_publish_weights(dtype, since, keep)

    @zbus.endpoint(RankZero(), effect="idempotent")
    def save_weights(self, path: str) -> dict[str, Any]:
        """Write what was published last to a new directory of safetensors, whole or not at all; returns ``nbytes``."""
        return self.do_save_weights(path)

    @zbus.endpoint(RankZero(), effect="pure")
    def weights_address(self) -> dict[str, Any]:
        """Tell ``host`` and ``port`` (extra port 0 of rank 0) of the store at which a weights group meets."""
        return self.do_weights_address()

    @zbus.endpoint(RankZero(), effect="once")
    def join_weights_group(self, name: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Join a weights group as its rank 0, hosting its store; blocks until all have joined."""
        self.do_join(name, world_size, backend, timeout_s)

    @zbus.endpoint(RankZero(), effect="idempotent")
    def leave_weights_group(self, name: str) -> None:
        """Leave it; harmless where it was not joined."""
        self.do_leave(name)

    @zbus.endpoint(RankZero(), effect="once")
    def broadcast_weights(self, name: str) -> None:
        """Broadcast what was published last, in the order of its manifest."""
        self.do_broadcast(name)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def do_create_process_group(self, backend: str, timeout_s: float) -> dict[str, int]:
        """Join the group of all ranks."""
        raise NotImplementedError

    def do_initialize(self) -> dict[str, Any]:
        """Build model, optimizer and schedule."""
        raise NotImplementedError

    def do_destroy(self) -> None:
        """Forget the model and leave the group."""

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Take one optimizer step."""
        raise NotImplementedError

    def do_eval_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Compute a loss."""
        raise NotImplementedError

    def do_forward_batch(self, batch: Any, output: str, options: dict[str, Any]) -> Any:
        """Compute one value per row."""
        raise NotImplementedError

    def do_forward_backward_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Add gradients."""
        raise NotImplementedError

    def do_optimizer_zero_grad(self) -> None:
        """Forget gradients."""
        raise NotImplementedError

    def do_optimizer_step(self) -> dict[str, Any]:
        """Clip and step."""
        raise NotImplementedError

    def do_lr_scheduler_step(self) -> float:
        """Go on in the schedule."""
        raise NotImplementedError

    def do_save(self, path: str, kind: str) -> dict[str, Any]:
        """Write this rank's part."""
        raise NotImplementedError

    def do_load(self, path: str, kind: str) -> dict[str, Any]:
        """Take over this rank's part."""
        raise NotImplementedError

    def do_stats(self) -> dict[str, Any]:
        """Hand over what was recorded."""
        return {}

    def do_offload(self) -> None:
        """Move off the accelerator."""

    def do_onload(self) -> None:
        """Move back."""

    def do_device_stats(self) -> dict[str, Any]:
        """Tell memory in use."""
        return {}

    def do_publish_weights(self, dtype: str | None, since: str | None, keep: bool) -> dict[str, Any]:  # noqa: FBT001  # a hook mirrors its endpoint
        """Gather and keep."""
        raise NotImplementedError

    def do_save_weights(self, path: str) -> dict[str, Any]:
        """Write what was published."""
        raise NotImplementedError

    def do_weights_address(self) -> dict[str, Any]:
        """Tell where a weights group meets."""
        raise NotImplementedError

    def do_join(self, name: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Join a weights group as its rank 0."""
        raise NotImplementedError

    def do_leave(self, name: str) -> None:
        """Leave it."""
        raise NotImplementedError

    def do_broadcast(self, name: str) -> None:
        """Broadcast what was published."""
        raise NotImplementedError
