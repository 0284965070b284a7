"""The engines of ``rl.py``: those of the product, which also tell what of their CPU time was the user's own work.

That is, of the rank that trains, the optimizer steps on its main thread; and of the rank that generates, the steps of
the workflow's coroutine on its event loop without those of the engine that it calls in between: tokenising, reading
answers, making rows. What threads of their own compute is told by their names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import coroutine
from typing import Any, ClassVar

import zbus
from workers.engines.generate import TorchRolloutEngine
from workers.engines.train import TorchTrainEngine
from zbus.engine import Everywhere, PerRank

__all__ = ["Rollout", "Train"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "g2p"


class Train(TorchTrainEngine):
    """Notes the CPU time of its steps."""

    def __init__(self, model: Any = None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.trained = 0.0

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> dict[str, Any]:
        """Train."""
        began = time.thread_time()
        try:
            return super().do_train_batch(batch, loss, options)
        finally:
            self.trained += time.thread_time() - began

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def cpu(self) -> tuple[int, float]:
        """Return this process's pid and the CPU seconds of training on its main thread."""
        return os.getpid(), self.trained


@coroutine
def timed(steps: Coroutine[Any, Any, Any], add: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Await a coroutine and tell the CPU seconds of each of its steps, which are all on this thread."""
    value: Any = None
    error: BaseException | None = None
    while True:
        began = time.thread_time()
        try:
            asked = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as ended:
            return ended.value
        finally:
            add(time.thread_time() - began)
        value = error = None
        try:
            value = yield asked
        except BaseException as thrown:  # a cancel, too, goes to the coroutine  # noqa: BLE001
            error = thrown


class Inside:
    """The handle of a workflow, whose time is none of the workflow's."""

    def __init__(self, engine: Any, add: Callable[[float], None]) -> None:
        self._engine = engine
        self._add = add

    async def samples(self, *args: Any) -> Any:
        """Answer a prompt several times."""
        return await timed(self._engine.samples(*args), self._less)

    async def reward(self, *args: Any) -> Any:
        """Call a reward."""
        return await timed(self._engine.reward(*args), self._less)

    def _less(self, seconds: float) -> None:
        self._add(-seconds)


class Timed:
    """The example's workflow, which notes the CPU time of its own steps."""

    def __init__(self) -> None:
        sys.path.insert(0, str(EXAMPLE))
        from spelling import Spelling

        self._workflow = Spelling()
        self.seconds = 0.0

    async def run_episode(self, engine: Any, data: Any) -> Any:
        """Run it."""
        return await timed(self._workflow.run_episode(Inside(engine, self._add), data), self._add)

    def _add(self, seconds: float) -> None:
        self.seconds += seconds


class Rollout(TorchRolloutEngine):
    """Runs the workflow that notes its time."""

    workflows: ClassVar[dict[str, Any]] = {"spelling": Timed()}

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def cpu(self) -> tuple[int, float]:
        """Return this process's pid and the CPU seconds of the workflow's own steps."""
        return os.getpid(), self.workflows["spelling"].seconds
