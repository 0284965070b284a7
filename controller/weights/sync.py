"""``WeightSync``: the weights of a training role at the ranks that generate, update after update."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from controller.group import Group
from controller.weights.aio import AsyncWeights
from controller.weights.operations import Operations
from controller.weights.options import Limits, Listener, UpdateReport, Way
from zbus.errors import ConfigError
from zbus.trace import span

if TYPE_CHECKING:
    from controller.rollout import RolloutController
    from controller.train import TrainController
    from zbus.rl.rollout_engine import PauseMode

__all__ = ["WeightSync", "Window"]

_TRAIN: Final = ("publish_weights", "set_version", "get_version")
_ROLLOUT: Final = ("pause", "resume", "abort", "state", "update_weights")
_BY_WAY: Final[dict[Way, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "memory": ((), ()),
    "disk": (("save_weights",), ("load_weights",)),
    "group": (
        ("weights_address", "join_weights_group", "broadcast_weights", "leave_weights_group"),
        ("join_weights_group", "receive_weights", "leave_weights_group"),
    ),
}


class Window:
    """While generation stands still; made by ``WeightSync.paused``.

    Attributes:
        ranks: Ranks that stand still.
    """

    def __init__(self, operations: Operations, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._operations = operations

    def update(self, version: int | None = None) -> UpdateReport:
        """Publish, transfer and name the weights; as ``WeightSync.update``."""
        operations = self._operations
        number = _next(operations, version)
        operations.seconds = {"pause": operations.seconds.get("pause", 0.0)}
        with span("weights.update", "comm", path=operations.way, version=number):
            manifest = operations.publish(number)
            if operations.way == "group":
                incarnations = {rank: operations.standings.incarnation(rank) for rank in self.ranks}
                operations.broadcast(incarnations, manifest)
            else:
                operations.hand_over(self.ranks)
            operations.name()
        chain = operations.chain
        assert chain is not None  # noqa: S101  # it was published above
        return UpdateReport(
            version=number,
            digest=chain.digest,
            path=operations.way,
            nbytes=chain.last.nbytes,
            full=chain.last.full,
            ranks=tuple(rank for rank in self.ranks if operations.standings.has(rank, number)),
            stale=operations.standings.stale(),
            seconds=operations.seconds,  # the phase that is still to come adds to it
        )


class WeightSync:
    """Keeps the weights of a rollout role at those of a training role.

    Any thread may call; one update runs at a time, and what is known of the ranks can be read meanwhile.

    Args:
        train: Ranks with a ``TrainEngine``; rank 0 publishes.
        rollout: Ranks with a ``RolloutEngine``. A ``RolloutController`` is told who is stale and who is current.
        path: ``memory``: mapped where hosts share memory, pulled elsewhere. ``disk``: new directories of safetensors,
            which all ranks must see. ``group``: broadcast in a torch process group of its own; the training role needs
            ``ports: 1``.
        dtype: What floating-point tensors are cast to for the way, such as ``"bfloat16"``; None: as they are.
        changed_only: After the first update publish only tensors that have changed since the last.
        pause: What becomes of running requests meanwhile; see ``zbus.rl.rollout_engine.PauseMode``.
        backend: Of the group: ``gloo`` or ``nccl``.
        directory: Where ``disk`` writes; old versions in it are removed.
        limits: Deadlines.

    Attributes:
        aio: The same operations to be awaited: ``await sync.aio.update()``.

    Raises:
        ConfigError: An engine lacks an endpoint, or an argument cannot be.
    """

    def __init__(
        self,
        train: Group | TrainController,
        rollout: Group | RolloutController,
        *,
        path: Way = "memory",
        dtype: str | None = None,
        changed_only: bool = False,
        pause: PauseMode = "keep",
        backend: str = "gloo",
        directory: Path | str | None = None,
        limits: Limits | None = None,
    ) -> None:
        listener = None if isinstance(rollout, Group) else cast("Listener", rollout)
        self._turn = threading.Lock()
        self._operations = Operations(
            _group_of(train),
            _group_of(rollout),
            way=path,
            dtype=dtype,
            changed_only=changed_only,
            pause=pause,
            backend=backend,
            directory=None if directory is None else Path(directory),
            limits=limits or Limits(),
            listener=listener,
        )
        _check(self._operations, has_directory=directory is not None)
        self.aio = AsyncWeights(self, f"zbus-weights-{self._operations.rollout.role}")

    def __repr__(self) -> str:
        train, rollout = self._operations.train.role, self._operations.rollout.role
        return f"<WeightSync {train} to {rollout} by {self._operations.way}, version {self.version}>"

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that counts; None before the first update."""
        return self._operations.version

    def stale(self) -> dict[int, str]:
        """Return by rank why it gets no work: it missed an update, its weights are torn, or it was started anew."""
        self._operations.look()
        return self._operations.standings.stale()

    @property
    def limits(self) -> Limits:
        """Deadlines of the phases; may be set between two updates."""
        return self._operations.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._operations.limits = limits

    # -- acting ------------------------------------------------------------------------------------------------------

    def update(self, version: int | None = None) -> UpdateReport:
        """Bring the trainer's weights to all ranks that are there, also to those that missed earlier ones.

        Ranks that could not take them over are stale, and named in the report.

        Args:
            version: What they are called; default one more than the last, at first the trainer's own.

        Raises:
            WeightsError: A phase failed as a whole: no rank stands still, nothing was published, or no rank has the
                weights (``phase`` and ``missing`` say which and why); or ranks have them and the trainer was not told.
                Generation goes on where the weights are known.
            ConfigError: The version is not above the one that counts.
        """
        with self.paused() as window:
            return window.update(version)

    def refresh(self, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Bring the weights that were published last to ranks that missed them, while the others go on.

        Args:
            ranks: Which; default all that are stale.

        Returns:
            Why ranks are still stale, by rank.

        Raises:
            ConfigError: Nothing was published yet.
            WeightsError: As ``update``.
        """
        operations = self._operations
        with self._turn:
            if operations.chain is None:
                msg = f"no weights were published for {operations.rollout.role} yet, so there are none to refresh with"
                raise ConfigError(msg, hint="call update() first")
            there = operations.look()
            stale = operations.standings.stale()
            wanted = [rank for rank in (stale if ranks is None else ranks) if rank in there]
            if wanted:
                with operations.still(wanted) as still:
                    operations.hand_over(still)
                    if operations.version != operations.chain.version:
                        operations.name()
            return {rank: why for rank, why in operations.standings.stale().items() if ranks is None or rank in ranks}

    @contextmanager
    def paused(self) -> Iterator[Window]:
        """Have generation stand still inside. Whatever happens there, it goes on where the weights are known.

        Raises:
            WeightsError: No rank stands still.
        """
        operations = self._operations
        with self._turn:
            operations.seconds = {}
            with operations.still(operations.look()) as ranks:
                yield Window(operations, ranks)

    def close(self) -> None:
        """Leave the group and let go of what was published. Idempotent."""
        with self._turn:
            self._operations.close()


def _group_of(one: Any) -> Group:
    found: Group = one if isinstance(one, Group) else one.group
    return found


def _next(operations: Operations, version: int | None) -> int:
    last = operations.version
    if version is None:
        return int(operations.train.get_version()) if last is None else last + 1
    if last is not None and version <= last:
        msg = f"version {version} is not above {last}, which {operations.rollout.role} has"
        raise ConfigError(msg, hint="count versions up; None takes the next")
    return version


def _check(operations: Operations, *, has_directory: bool) -> None:
    way: object = operations.way
    if way not in get_args(Way):
        msg = f"weights cannot go by {way!r}"
        raise ConfigError(msg, hint='path="memory", "disk" or "group"')
    if way == "disk" and not has_directory:
        msg = "weights go by disk, and no directory was given"
        raise ConfigError(msg, hint='WeightSync(..., path="disk", directory="/shared/weights")')
    more = _BY_WAY[operations.way]
    for group, names, base in (
        (operations.train, (*_TRAIN, *more[0]), "TrainEngine"),
        (operations.rollout, (*_ROLLOUT, *more[1]), "RolloutEngine"),
    ):
        lacking = [name for name in names if name not in group.endpoints]
        if lacking:
            msg = f"the engine of role {group.role!r} has no endpoint `{lacking[0]}`, which weights need"
            raise ConfigError(msg, hint=f"subclass zbus.rl.{base}")
