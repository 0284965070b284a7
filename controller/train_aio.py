"""The awaited face of a train controller: the same operations for coroutines of any loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.twins import Turns

if TYPE_CHECKING:
    from controller.train import TrainController

__all__ = ["AsyncTraining"]


class AsyncTraining:
    """``TrainController.aio``: each method as the blocking one of the same name, to be awaited on any running loop.

    Operations follow one another in the order in which they are awaited, also those of several tasks. Cancelling an
    await ends the wait alone: a step that has begun is taken, and the next operation waits for its end.
    """

    def __init__(self, train: TrainController) -> None:
        turn = Turns(f"zbus-train-{train.role}").twin
        self.initialize = turn(train.initialize)
        self.destroy = turn(train.destroy)
        self.train_batch = turn(train.train_batch)
        self.forward_backward_batch = turn(train.forward_backward_batch)
        self.eval_batch = turn(train.eval_batch)
        self.forward_batch = turn(train.forward_batch)
        self.optimizer_zero_grad = turn(train.optimizer_zero_grad)
        self.optimizer_step = turn(train.optimizer_step)
        self.lr_scheduler_step = turn(train.lr_scheduler_step)
        self.save = turn(train.save)
        self.load = turn(train.load)
        self.get_version = turn(train.get_version)
        self.set_version = turn(train.set_version)
        self.export_stats = turn(train.export_stats)
        self.offload = turn(train.offload)
        self.onload = turn(train.onload)
        self.get_device_stats = turn(train.get_device_stats)
