"""``TorchTrainEngine``: what the ranks of a training role host. Importing it needs no torch."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from workers.engines.models import build_model
from workers.engines.train.settings import Settings
from workers.engines.weights.publisher import Publisher, PublishesWeights
from workers.engines.weights.tensors import tensors_of
from zbus.errors import ConfigError
from zbus.rl.stats import Stats
from zbus.rl.train_engine import TrainEngine
from zbus.runtime.loader import load_object

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workers.engines.train.place import Place
    from workers.engines.train.trainer import Trainer
    from zbus.runtime.context import Context

__all__ = ["TorchTrainEngine"]

_LOSSES: Final = {"sft": "workers.engines.losses:sft", "grpo": "workers.engines.losses:grpo"}
_OUTPUTS: Final = {
    "logprobs": "workers.engines.train.outputs:logprobs",
    "entropy": "workers.engines.train.outputs:entropy",
}


class TorchTrainEngine(PublishesWeights, TrainEngine):
    """Trains a torch model over the mesh axis ``dp``, its layers split over ``tp`` if there is one.

    ::

        Role("workers.engines.train:TorchTrainEngine", mesh={"dp": 2}, preload=["torch"],
             kwargs={"model": "model.py:Model", "losses": {"mine": "losses.py:mine"}, "optimizer": {"lr": 1e-4}})

    A subclass in your own file may instead set ``losses`` and ``outputs`` (names with functions), and override
    ``make_model`` and ``make_optimizer``.

    Args:
        model: ``"file.py:factory"``, ``{"factory": path, "kwargs": {...}}`` or ``{"hf": directory}``; a relative file
            is looked up in the ranks' directory and on their import path, where the driver's directory is. None: a
            subclass makes it.
        dtype: Torch's name of the dtype of weights and arithmetic; None: the factory's.
        device: ``cpu``, ``cuda`` (each rank its own) or ``cuda:N``.
        parallel: ``ddp``: each rank of ``dp`` holds the model. ``fsdp2``: each holds a part of every layer. ``none``:
            one rank.
        optimizer: Of AdamW: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        schedule: ``kind`` (``constant``, ``linear``, ``cosine``), ``warmup``, ``steps``, ``floor``; it moves by
            ``lr_scheduler_step`` only.
        clip: Largest norm of the gradient; None: any.
        autocast: Dtype of the arithmetic of forward passes, such as ``bfloat16``; weights keep theirs.
        micro_rows, micro_tokens: Most rows, and most tokens with padding, that go through the model at once.
        seed: Of initial weights, and with the place on ``dp`` of dropout.
        nonfinite: ``raise``, or ``skip`` the step and report ``skipped``, where a gradient is not finite.
        unused_parameters: Some parameters take no part in some losses (DDP then looks for them).
        equal_parts: Have the controller fill batches of ``eval_batch`` and ``forward_batch`` up to equal parts.
        losses, outputs: Names with paths of functions; see ``workers.engines.losses`` and
            ``workers.engines.train.outputs``. There are ``sft``, ``grpo``, ``logprobs`` and ``entropy``.

    Raises:
        ConfigError: An argument is not known, or cannot be; raised when the rank starts.
    """

    losses: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    outputs: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(self, model: Any = None, **arguments: Any) -> None:
        super().__init__()
        self.settings = Settings.of({"model": model, **arguments})
        if model is None and type(self).make_model is TorchTrainEngine.make_model:
            msg = "training engine: no model is given"
            raise ConfigError(msg, hint="set kwargs.model, or override make_model in a subclass")
        self.stats = Stats()
        self._ctx: Context | None = None
        self._place: Place | None = None
        self._trainer: Trainer | None = None
        self._publisher: Publisher | None = None
        self._away = False
        self._loaded: dict[str, Callable[..., Any]] = {}

    def setup(self, ctx: Context) -> None:
        """Keep the context: the group is joined when the controller says so."""
        self._ctx = ctx

    def teardown(self) -> None:
        """Leave the group."""
        self.do_destroy()

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def make_model(self) -> nn.Module:
        """Build the model, the same on every rank: generators are seeded alike when this is called."""
        return build_model(self.settings.model, dtype=self.settings.dtype)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer for the parameters of the model, which may be sharded by now."""
        raise NotImplementedError  # never called here: see do_initialize

    @property
    def trainer(self) -> Trainer:
        """This rank's training.

        Raises:
            ConfigError: The engine is not initialised, or its weights are away (``offload``).
        """
        if self._trainer is None:
            msg = "the training engine is not initialised"
            raise ConfigError(msg, hint="call TrainController.initialize() first")
        if self._away:
            msg = "the weights are off the device"
            raise ConfigError(msg, hint="call onload() first")
        return self._trainer

    @property
    def publisher(self) -> Publisher:  # type: ignore[override]  # the mixin's attribute, there once the model is
        """What publishes this rank's weights."""
        if self._publisher is None:
            assert self._ctx is not None, "a worker calls setup"  # noqa: S101  # for the type checker
            self._publisher = Publisher(self._ctx, lambda: tensors_of(self.trainer.model))
        return self._publisher

    # -- life --------------------------------------------------------------------------------------------------------

    def do_create_process_group(self, backend: str, timeout_s: float) -> dict[str, int]:
        """Join the group of all ranks."""
        from workers.engines.train.place import join

        assert self._ctx is not None, "a worker calls setup"  # noqa: S101  # for the type checker
        self._place = join(self._ctx, self.settings.device, backend, timeout_s)
        return self._place.coords

    def do_destroy(self) -> None:
        """Forget model and optimizer, and leave the group."""
        if self._publisher is not None:
            self._publisher.forget()
        self._trainer = self._place = None
        self._away = False
        if self._ctx is not None:
            self._ctx.close()

    def do_initialize(self) -> dict[str, Any]:
        """Build the model and share it out; again with one that is there: leave that."""
        if self._trainer is None:
            self._build()
        trainer = self.trainer
        return {
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "device": str(trainer.place.device),
            "pad_to": "equal" if self.settings.equal_parts else None,
            "losses": sorted({*_LOSSES, *self.losses, *self.settings.losses}),
            "outputs": sorted({*_OUTPUTS, *self.outputs, *self.settings.outputs}),
        }

    def _build(self) -> None:
        from workers.engines.train.trainer import Trainer, seed_all

        if self._place is None:
            msg = "this rank is in no process group"
            raise ConfigError(msg, hint="call TrainController.initialize(), which makes one first")
        seed_all(self.settings.seed)
        model = self.make_model().to(self._place.device)
        own = type(self).make_optimizer is not TorchTrainEngine.make_optimizer
        self._trainer = Trainer(model, self.settings, self._place, self.make_optimizer if own else None)

    # -- steps -------------------------------------------------------------------------------------------------------

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Take one optimizer step; ``options`` are the loss's keywords, but for ``groups``."""
        with self._counted("train_batch", loss):
            groups, function = self._function("loss", loss, options)
            return self.trainer.train(batch, function, loss, groups)

    def do_eval_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Compute a loss."""
        with self._counted("eval_batch", loss):
            groups, function = self._function("loss", loss, options)
            return self.trainer.evaluate(batch, function, loss, groups)

    def do_forward_batch(self, batch: Any, output: str, options: dict[str, Any]) -> Any:
        """Compute one value per row."""
        with self._counted("forward_batch", output):
            _, function = self._function("output", output, options)
            return self.trainer.forward(batch, function, output)

    def do_forward_backward_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Add gradients."""
        with self._counted("forward_backward_batch", loss):
            groups, function = self._function("loss", loss, options)
            return self.trainer.forward_backward(batch, function, loss, groups)

    def do_optimizer_zero_grad(self) -> None:
        """Forget gradients."""
        self.trainer.zero_grad()

    def do_optimizer_step(self) -> dict[str, Any]:
        """Clip and step."""
        return self.trainer.step()

    def do_lr_scheduler_step(self) -> float:
        """Go on in the schedule."""
        return self.trainer.advance()

    def _function(self, what: str, name: str, options: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
        """Return how rows stay together, and a loss or output with its keywords."""
        told = dict(options)
        groups = told.pop("groups", None)
        trainer = self.trainer
        try:
            function = self._named(what, name)
        except Exception:
            trainer.withdraw()  # it may be this rank alone that cannot load it
            raise
        return groups, functools.partial(function, **told) if told else function

    def _named(self, what: str, name: str) -> Callable[..., Any]:
        key = f"{what} {name!r}"
        if key not in self._loaded:
            if what == "loss":
                known: dict[str, Any] = {**_LOSSES, **self.losses, **self.settings.losses}
            else:
                known = {**_OUTPUTS, **self.outputs, **self.settings.outputs}
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                listed = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
                msg = f"this role declares no {what} {name!r}; {listed}"
                raise ConfigError(msg, hint=f"name it in the role's kwargs: {what}s={{{name!r}: 'file.py:function'}}")
            found = known[name]
            self._loaded[key] = load_object(found, key) if isinstance(found, str) else found
        return self._loaded[key]

    # -- state -------------------------------------------------------------------------------------------------------

    def do_save(self, path: str, kind: str) -> dict[str, Any]:
        """Write this rank's part."""
        from workers.engines.train import checkpoints

        return checkpoints.save(self.trainer, path, kind, self._version)

    def do_load(self, path: str, kind: str) -> dict[str, Any]:
        """Take over this rank's part."""
        from workers.engines.train import checkpoints

        found = checkpoints.load(self.trainer, path, kind)
        if "version" in found:
            self._version = found["version"]
        return found

    def do_stats(self) -> dict[str, Any]:
        """Hand over what was recorded."""
        return self.stats.export()

    def do_offload(self) -> None:
        """Move weights and optimizer state to the host's memory."""
        if not self._away:
            self.trainer.move("cpu")
            self._away = True

    def do_onload(self) -> None:
        """Move them back."""
        if self._away:
            self._away = False
            self.trainer.move(None)

    def do_device_stats(self) -> dict[str, Any]:
        """Tell memory in use, in bytes."""
        from workers.engines.train.trainer import memory

        return memory(self.trainer.place.device)

    @contextmanager
    def _counted(self, method: str, name: str) -> Iterator[None]:
        with self.stats.scope(name), self.stats.timing(method):
            yield
