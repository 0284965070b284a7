"""``TrainController``: the ranks of a training role as one trainer, by the founding method names."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from controller.group import Group
from controller.outcomes import spans
from controller.stuck import answer_of
from controller.train_aio import AsyncTraining
from controller.trajectories import as_batch, fill_up, per_item, rows_of
from zbus.config import sync_to_disk
from zbus.engine import Mesh, Split
from zbus.errors import ConfigError, StartupError
from zbus.retry import duration_s
from zbus.rl.stats import Stats, merge, values
from zbus.rl.steps import Report, merge_reports
from zbus.rl.train_engine import TrainEngine

if TYPE_CHECKING:
    from controller.controller import Controller
    from controller.futures import BatchFuture

__all__ = ["DistributedTrainController", "TrainController"]

_log = logging.getLogger("zbus.controller.train")

_OWN: Final = (
    "destroy", "eval_batch", "export_stats", "forward_backward_batch", "forward_batch", "get_device_stats",
    "get_version", "initialize", "load", "lr_scheduler_step", "offload", "onload", "optimizer_step",
    "optimizer_zero_grad", "save", "set_version", "train_batch",
)  # fmt: skip
"""Methods here that call the endpoint of that name, if the engine declares it as ``TrainEngine`` does."""

_AXIS: Final = "dp"
_DESTROY_S: Final = 10.0


class TrainController:
    """Trains with the ranks of one role. Endpoints that are no methods here are methods as on the group.

    ::

        train = TrainController(bus, "actor")
        train.initialize()
        report = train.train_batch(batch, "sft")            # one optimizer step; report["loss"], report.heads
        logprobs = train.forward_batch(trajectories)        # one array per trajectory, in their order

    A batch is a dict of columns with one row per sequence (``Ragged``, arrays, tensors, lists) or a list of
    trajectories: dicts of one sequence each. Its rows are shared over the mesh axis ``dp`` by tokens, unevenly where
    they do not divide; ranks without a row take part in the collectives all the same. An endpoint that the role's
    engine declares otherwise than ``zbus.rl.TrainEngine`` is called as the engine declares it.

    Calls of one controller follow one another: use it from one thread at a time.

    Args:
        bus: A launched controller.
        role: Name of the training role.
        pad_to: ``"equal"``: fill batches of ``eval_batch`` and ``forward_batch`` up until ranks get equally many rows.
            The added rows count in no statistic and no result. None: as the engine asks when it is initialised.
        patience: How long ranks are waited for when another has failed in a call in which they meet: seconds or text.
            Ranks that are still inside a collective then are given fresh processes, with all others of the role; the
            error says so, and what to do next. None: they stay there until torch's own limit (``collectives``).

    Attributes:
        stats: What this controller records of its calls; ``export_stats`` hands it over with what the ranks recorded.
        aio: The same operations to be awaited: ``await train.aio.train_batch(batch)``.
    """

    def __init__(
        self,
        bus: Controller,
        role: str = "actor",
        *,
        pad_to: Literal["equal"] | None = None,
        patience: float | str | None = "30s",
    ) -> None:
        if pad_to not in (None, "equal"):
            msg = f"pad_to={pad_to!r} is not known"
            raise ConfigError(msg, hint='give "equal" or None')
        self.bus = bus
        self.role = role
        self.group: Group = bus.group(role)
        self.stats = Stats()
        self._pad_to: str | None = pad_to
        self._patience_s = None if patience is None else duration_s(patience, "patience")
        self._traces = False
        ours = TrainEngine.__zbus_endpoints__
        for name, spec in self.group.endpoints.items():
            if name in _OWN and (name not in ours or spec.parameters != ours[name].parameters):
                self.__dict__[name] = getattr(self.group, name)
        self.aio = AsyncTraining(self)

    def __getattr__(self, name: str) -> Any:
        """Return an endpoint of the engine."""
        if name.startswith("_") or name == "group":
            raise AttributeError(name)
        return getattr(self.group, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group!r}>"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.group)

    @property
    def heads(self) -> tuple[int, ...]:
        """The lowest rank of each position on ``dp``: those whose answers count once."""
        mesh = Mesh(self.group.mesh)
        return tuple(rank for rank in range(mesh.size) if not any(self._beside(mesh.coords(rank))))

    @staticmethod
    def _beside(coords: Mapping[str, int]) -> Iterator[int]:
        return (at for axis, at in coords.items() if axis != _AXIS)

    # -- life --------------------------------------------------------------------------------------------------------

    def initialize(
        self,
        *,
        backend: str = "gloo",
        ready: float | str = "2m",
        group: float | str = "2m",
        engine: float | str = "10m",
        collectives: float | str = "10m",
    ) -> list[dict[str, Any]]:
        """Wait for the ranks, have them make a process group, and build model and optimizer on each.

        If a phase fails, the ranks are told to leave what they joined, so that it can be tried again.

        Args:
            backend: Of ``torch.distributed``: ``gloo``, ``nccl`` or ``cpu:gloo,cuda:nccl``.
            ready: Deadline of the first phase: seconds or text.
            group: Of the second.
            engine: Of the third.
            collectives: How long a rank waits for others inside a collective of torch's, from then on.

        Returns:
            What each rank tells of its engine, in rank order: ``parameters``, ``device``, …

        Raises:
            StartupError: Ranks are not ready in time; they are named.
            CallTimeout, BatchError: Ranks did not do their part in time, or failed; a note names the phase.
        """
        self._await_ready(duration_s(ready, "ready"))
        limit_s = duration_s(group, "group")
        try:
            with _phase("process group", self.role):
                waits_s = duration_s(collectives, "collectives")
                self.group.create_process_group.options(deadline=limit_s)(backend, waits_s)
            with _phase("engine", self.role):
                told = self.group.initialize.options(deadline=duration_s(engine, "engine"))()
        except BaseException:
            self._leave(_DESTROY_S)
            raise
        if any(one.get("pad_to") == "equal" for one in told):
            self._pad_to = "equal"
        return list(told)

    def _await_ready(self, limit_s: float) -> None:
        if self.group.placer.wait(lambda: self.group.ready, limit_s):
            return
        late = [rank for rank in self.group.ranks if not self.group[rank].ready]
        msg = f"{self.role}/{spans(late)} not ready within {limit_s:g} s, so no process group was made"
        raise StartupError(msg, hint="zbus-controller status shows what runs", facts={"ranks": repr(self.group)})

    def destroy(self, timeout: float | str = _DESTROY_S) -> dict[int, Exception]:
        """Have every rank forget its model and leave the process group, whatever has died. The ranks stay.

        Args:
            timeout: For all ranks together: seconds or text.

        Returns:
            What went wrong, by rank; each is logged too. Empty where nothing did.
        """
        return self._leave(duration_s(timeout, "timeout"))

    def _leave(self, limit_s: float) -> dict[int, Exception]:
        wrong: dict[int, Exception] = {}
        futures = {}
        for rank in self.group.ranks:
            try:
                futures[rank] = self.group[rank].destroy.options(deadline=limit_s).submit()
            except Exception as error:  # noqa: BLE001  # a rank that cannot be asked keeps no other from being asked
                wrong[rank] = error
        for rank, future in futures.items():
            try:
                future.result()
            except Exception as error:  # noqa: BLE001  # as above
                wrong[rank] = error
        for rank, cause in sorted(wrong.items()):
            _log.warning("%s/%d did not leave in order: %s", self.role, rank, cause)
        return dict(sorted(wrong.items()))

    # -- batches -----------------------------------------------------------------------------------------------------

    def train_batch(
        self,
        batch: Any,
        loss: str = "sft",
        options: Mapping[str, Any] | None = None,
        *,
        groups: int | str | None = None,
        split: Split | None = None,
        deadline: float | str | None = None,
    ) -> Report:
        """Take one optimizer step on a batch.

        Args:
            batch: A dict of columns, or a list of trajectories.
            loss: Name of a loss that the role declares.
            options: Keyword arguments of the loss, such as ``{"clip": 0.2}``.
            groups: Rows that stay together, on one rank and in one portion: a number n for each n consecutive ones, or
                the name of a column of equal values.
            split: How rows are shared out, instead of by tokens over ``dp``.
            deadline: Seconds or text; None: the group's.

        Returns:
            Numbers merged over the data-parallel heads: ``loss`` per unit of weight, ``weight``, ``grad_norm``, ``lr``
            and what the loss reports. ``heads`` keeps each rank's own, ``partial`` names keys that only some reported.

        Raises:
            ConfigError: The batch holds no rows, or is not split as declared.
            BatchError: Ranks failed; none has taken the step unless its error says so.
        """
        return self._step("train_batch", batch, loss, options, groups, split, deadline)

    def forward_backward_batch(
        self,
        batch: Any,
        loss: str = "sft",
        options: Mapping[str, Any] | None = None,
        *,
        groups: int | str | None = None,
        split: Split | None = None,
        deadline: float | str | None = None,
    ) -> Report:
        """Add the gradients of a batch to those that are there; ``optimizer_step`` weighs all of them together."""
        return self._step("forward_backward_batch", batch, loss, options, groups, split, deadline)

    def eval_batch(
        self,
        batch: Any,
        loss: str = "sft",
        options: Mapping[str, Any] | None = None,
        *,
        groups: int | str | None = None,
        split: Split | None = None,
        deadline: float | str | None = None,
    ) -> Report:
        """Compute a loss without a step; arguments and result as of ``train_batch``."""
        columns, _ = as_batch(batch)
        if self._pad_to and split is None:
            columns, _ = fill_up(columns, len(self.heads), groups)
            split = Split(_AXIS, groups=groups)
        return self._step("eval_batch", columns, loss, options, groups, split, deadline)

    def forward_batch(
        self,
        batch: Any,
        output: str = "logprobs",
        options: Mapping[str, Any] | None = None,
        *,
        split: Split | None = None,
        deadline: float | str | None = None,
    ) -> Any:
        """Compute one value per row, such as each token's log-probability.

        Args:
            batch: As for ``train_batch``.
            output: Name of an output that the role declares.
            options: Keyword arguments of the output.
            split: As for ``train_batch``.
            deadline: Seconds or text; None: the group's.

        Returns:
            In the order of the rows: an array ``[rows, ...]``, of values per token a ``Ragged`` where the tokens came
            as one, or a dict of these; of a list of trajectories a list with one entry per trajectory.
        """
        columns, listed = as_batch(batch)
        count = rows_of(columns)
        filled = columns
        if self._pad_to and split is None:
            filled, count = fill_up(columns, len(self.heads), None)
            split = Split(_AXIS)
        call = self.group.forward_batch.options(deadline=deadline, split=split)
        answer = self._met(call, filled, output, dict(options or {}))
        if listed:
            return per_item(answer, count)
        return answer if filled is columns else _first_rows(answer, count)

    def _step(
        self,
        method: str,
        batch: Any,
        loss: str,
        options: Mapping[str, Any] | None,
        groups: int | str | None,
        split: Split | None,
        deadline: float | str | None,
    ) -> Report:
        columns, _ = as_batch(batch)
        told = dict(options or {})
        if groups is not None:
            told["groups"] = groups
            split = split or Split(_AXIS, by="tokens", groups=groups)
        with self.stats.scope(method), self.stats.timing("call"):
            call = getattr(self.group, method).options(deadline=deadline, split=split)
            return self._report(self._met(call, columns, loss, told), method, loss)

    def _met(self, call: Any, *args: Any) -> Any:
        """Call ranks that meet in collectives."""
        return answer_of(self.bus, self.group, call.start(args, {}), self._patience_s)

    def _report(self, answers: Sequence[Any], method: str, loss: str) -> Report:
        report = merge_reports({rank: answers[rank] for rank in self.heads})
        for key, ranks in report.partial.items():
            _log.debug("%s of %s: %s/%s reported no %r", method, loss, self.role, spans(ranks), key)
        with self.stats.scope(loss):
            self.stats.scalar(report)
        return report

    # -- steps -------------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients on all ranks."""
        self.group.optimizer_zero_grad()

    def optimizer_step(self, *, deadline: float | str | None = None) -> Report:
        """Step with the gradients of all ``forward_backward_batch`` since the last step."""
        answers = self._met(self.group.optimizer_step.options(deadline=deadline))
        return merge_reports({rank: answers[rank] for rank in self.heads})

    def lr_scheduler_step(self) -> float:
        """Go on in the learning-rate schedule; returns the rate of the next step."""
        return float(self.group.lr_scheduler_step())

    # -- state -------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        kind: Literal["checkpoint", "model"] = "checkpoint",
        *,
        deadline: float | str | None = None,
    ) -> Path:
        """Write a checkpoint, or the model alone, to a new directory: it is there whole or not at all.

        Args:
            path: A directory that does not exist, on a file system that all ranks share.
            kind: ``checkpoint``: all that training goes on from. ``model``: safetensors.
            deadline: Seconds or text; None: the group's.

        Returns:
            The directory.

        Raises:
            ConfigError: There is something at ``path`` already.
            BatchError: Ranks failed to write their part; nothing is left at ``path``.
        """
        target = Path(path).absolute()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            msg = f"there is something at {str(target)!r} already"
            raise ConfigError(msg, hint="save to a directory of its own, and remove old ones yourself")
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        whole = temp / target.name  # a rank that is late finds nothing to write it in, once this call has failed
        future: BatchFuture[Any] | None = None
        try:
            temp.mkdir()
            future = self.group.save.options(deadline=deadline).start((str(whole), kind), {})
            answer_of(self.bus, self.group, future, self._patience_s)
            for file in [*whole.rglob("*"), whole]:
                sync_to_disk(file)
            whole.rename(target)
            temp.rmdir()
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            if future is not None and not future.done():  # one that was writing meanwhile leaves more
                future.when_done(lambda: shutil.rmtree(temp, ignore_errors=True))
            raise
        sync_to_disk(target.parent)
        return target

    def load(
        self,
        path: str | os.PathLike[str],
        kind: Literal["checkpoint", "model"] = "checkpoint",
        *,
        deadline: float | str | None = None,
    ) -> dict[str, Any]:
        """Take over what ``save`` wrote; returns what rank 0 tells of it, such as ``steps`` and ``version``.

        Raises:
            BatchError: Ranks refused it or failed.
        """
        call = self.group.load.options(deadline=deadline)
        told: dict[str, Any] = self._met(call, str(Path(path).absolute()), kind)[0]
        return told

    def get_version(self) -> int:
        """Return the version of the weights, on which all ranks agree."""
        return int(self.group.get_version())

    def set_version(self, version: int) -> int:
        """Name the weights that are there, on all ranks.

        Raises:
            BatchError: Ranks failed; the error names them, and ``results`` those that have the new version.
        """
        return int(self.group.set_version(version))

    def export_stats(self) -> dict[str, float]:
        """Return what was recorded since the last time, on all ranks and here; every key of every rank counts."""
        return values(merge([*self.group.export_stats(), self.stats.export()]))

    def offload(self) -> None:
        """Move weights and optimizer state off the accelerators."""
        self.group.offload()

    def onload(self) -> None:
        """Undo ``offload``."""
        self.group.onload()

    def get_device_stats(self) -> list[dict[str, Any]]:
        """Return the memory in use on each rank, in bytes."""
        return list(self.group.get_device_stats())

    # -- tracing -----------------------------------------------------------------------------------------------------

    def config_perf_tracer(self, config: Mapping[str, Any] | None, role: str | None = None) -> None:
        """Configure tracing of this role's ranks; None switches off what was configured here, else calls nobody."""
        if config is None and not self._traces:
            return
        self.bus.config_perf_tracer(config, role or self.role)
        self._traces = config is not None

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # noqa: FBT001, FBT002  # founding spelling
        """Write traces now if ``step`` is due, or in any case with ``force``; nobody is called where nothing traces."""
        self.bus.save_perf_tracer(step, force)


DistributedTrainController = TrainController
"""The founding name."""


@contextlib.contextmanager
def _phase(name: str, role: str) -> Iterator[None]:
    """Say in an error which phase of a start it ended."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {role} was initialised, phase: {name}")
        raise


def _first_rows(answer: Any, count: int) -> Any:
    if isinstance(answer, Mapping):
        return {key: _first_rows(column, count) for key, column in answer.items()}
    return answer[:count]
