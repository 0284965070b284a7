"""One model over the ranks: whole on each (DDP), in parts (FSDP2), layers split (tensor parallel)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers.engines.models import dtype_of
from workers.engines.train.meeting import Meeting
from workers.engines.train.place import Place
from workers.engines.train.settings import Settings
from zbus.errors import ConfigError

__all__ = ["Replica", "is_sharded", "norm_and_clip", "scale_gradients"]

Loss = Callable[[nn.Module, Mapping[str, Any]], Any]

_NEW_NAME: Final = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
_OWN_BUFFERS: Final = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}
"""Buffers stay each rank's own in a forward; torch 2.13 renamed the argument."""


class _Call(nn.Module):  # type: ignore[misc]  # torch is Any
    """Runs a loss as the forward of a module, so that DDP sees all of it, whatever the loss does with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Loss, batch: Mapping[str, Any]) -> Any:
        return loss(self.model, batch)


class Replica:
    """This rank's part of the model.

    Gradients are averaged over the ranks of ``dp`` when the last portion of a batch has gone back.

    Args:
        model: On its device, the same on every rank.
        place: This rank's.
        settings: ``parallel``, ``autocast``, ``unused_parameters``.

    Attributes:
        model: What losses and outputs are given.
        in_parts: Whether ranks must run the model equally often, since its parameters are gathered by all of them.

    Raises:
        ConfigError: The settings do not fit the mesh, or the model has no plan for tensor parallelism.
    """

    def __init__(self, model: nn.Module, place: Place, settings: Settings) -> None:
        self._dtype = None if settings.autocast is None else dtype_of(settings.autocast)
        self._device = place.device.type
        self._check(place, settings)
        if place.tp_size > 1:
            self._split_layers(model, place)
        self.in_parts = settings.parallel == "fsdp2" and place.mesh is not None
        self.model = model
        self._call: nn.Module = _Call(model)
        self._ddp: Any = None
        if self.in_parts:
            self._shard(model, place)
        elif place.dp_size > 1:
            assert place.mesh is not None, "ranks that share a model have a mesh"  # noqa: S101  # join made it
            self._call = self._ddp = nn.parallel.DistributedDataParallel(
                self._call,
                process_group=place.mesh.get_group("dp"),
                **_OWN_BUFFERS,
                find_unused_parameters=settings.unused_parameters,
            )

    def run(self, loss: Loss, batch: Mapping[str, Any]) -> Any:
        """Run a loss forward, ready to go back."""
        with self._cast():
            return self._call(loss, batch)

    def look(self, output: Loss, batch: Mapping[str, Any]) -> Any:
        """Run a loss or an output without gradients."""
        with torch.no_grad(), self._cast():
            return output(self.model, batch)

    def portion(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return what is around forward and back of one portion: gradients are exchanged with the last one."""
        if last or self._ddp is None:
            return nullcontext()
        waits: AbstractContextManager[Any] = self._ddp.no_sync()
        return waits

    def part(self) -> None:
        """Let go of gathered weights, before those of this rank change: what was only looked at keeps some for later.

        They are not gathered anew while they are there, so the next pass would run on what was before the change.
        """
        if self.in_parts:
            from torch.distributed.fsdp import FSDPModule

            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def meet(self, meeting: Meeting) -> None:
        """Have ranks meet before parts of layers are gathered."""
        if self.in_parts:
            for layer in _layers(self.model):
                meeting.before(layer)
            meeting.before(self.model)

    def recover(self) -> None:
        """Be ready for the next pass on all ranks alike, after one was left half-way."""
        self.part()
        reset = getattr(self.model, "reset_iter_state", None) if self.in_parts else None
        if reset is not None:  # torch before 2.13 has none, and gets over it by itself in the next pass forward
            reset()

    def _cast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        cast: AbstractContextManager[Any] = torch.autocast(self._device, dtype=self._dtype)
        return cast

    @staticmethod
    def _check(place: Place, settings: Settings) -> None:
        if settings.parallel == "none" and place.world > 1:
            msg = f"parallel=none trains on one rank, the role has {place.world}"
            raise ConfigError(msg, hint="set kwargs.parallel=ddp or fsdp2")
        if settings.parallel == "ddp" and place.tp_size > 1 and place.dp_size > 1:
            msg = "parallel=ddp cannot copy a model whose layers are split over tp"
            raise ConfigError(msg, hint="set kwargs.parallel=fsdp2, or mesh.dp=1")

    def _shard(self, model: nn.Module, place: Place) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert place.mesh is not None, "parts need a mesh"  # noqa: S101  # in_parts says so
        policy = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=None if self._dtype is None else torch.float32
        )
        mesh = place.mesh["dp"]
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    @staticmethod
    def _split_layers(model: nn.Module, place: Place) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        assert place.mesh is not None, "split layers need a mesh"  # noqa: S101  # tp_size > 1 says so
        parallelize_module(model, place.mesh["tp"], _plan(model))


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the layers of a model: what stands in its outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


_STYLES: Final = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output")


def _plan(model: nn.Module) -> dict[str, Any]:
    """Return the model's plan for tensor parallelism in torch's terms.

    Raises:
        ConfigError: It declares none, or a style that is not known.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    declared = getattr(model, "tp_plan", None)
    if not isinstance(declared, Mapping) or not declared:
        msg = f"{type(model).__name__} declares no plan for tensor parallelism, but the mesh has tp > 1"
        raise ConfigError(msg, hint='give the class tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}')
    made = {}
    for pattern, style in declared.items():
        if isinstance(style, ParallelStyle):
            made[pattern] = style
        elif style == "colwise":
            made[pattern] = ColwiseParallel()
        elif style == "rowwise":
            made[pattern] = RowwiseParallel()
        elif style in _STYLES:
            made[pattern] = ColwiseParallel(output_layouts=Replicate())
        else:
            msg = f"{type(model).__name__}.tp_plan[{pattern!r}] is {style!r}, which is not known"
            raise ConfigError(msg, hint=f"one of {', '.join(_STYLES)}, or a ParallelStyle of torch")
    return made


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether ranks hold parts of it."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def norm_and_clip(parameters: Iterable[nn.Parameter], most: float | None) -> float:
    """Return the norm of all gradients, over all ranks, and scale them down to ``most``. Collective if sharded.

    Parameters of different meshes, and plain ones beside sharded ones, are measured apart: torch cannot mix them.
    """
    from torch.distributed.tensor import DTensor

    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            alike.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    squares = 0.0
    for gradients in alike.values():
        norm = nn.utils.get_total_norm(gradients)
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    norm_of_all = math.sqrt(squares)
    if most is not None and norm_of_all > most:
        factor = most / (norm_of_all + 1e-6)
        for gradients in alike.values():
            for gradient in gradients:
                gradient.mul_(factor)
    return norm_of_all
