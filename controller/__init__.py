"""The driver's side of zbus: launch a trial, call its groups.

::

    from controller import Controller, Role

    with Controller.launch("demo", roles={"actor": Role("engines:Actor", replicas=4)}) as bus:
        print(bus.group("actor").train(batch))

Names are loaded on first use, so importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zbus.lazy import loaders

if TYPE_CHECKING:
    from controller.controller import Controller as Controller
    from controller.founding import DistributedTrainController as DistributedTrainController
    from controller.founding import RolloutController as RolloutController
    from controller.founding import TrainController as TrainController
    from controller.founding import create_engine_with_retry as create_engine_with_retry
    from controller.founding import get_scheduling_config as get_scheduling_config
    from controller.founding import rpc_call as rpc_call
    from controller.futures import BatchFuture as BatchFuture
    from controller.futures import wait_future_ordered as wait_future_ordered
    from controller.group import Group as Group
    from controller.role import Role as Role
    from controller.rollout import Rollout as Rollout
    from controller.rollout import RolloutTimeout as RolloutTimeout
    from controller.scheduling.api import Job as Job
    from controller.scheduling.api import ScheduleStrategy as ScheduleStrategy
    from controller.scheduling.api import Scheduling as Scheduling
    from controller.scheduling.api import Worker as Worker
    from controller.weights.sync import WeightSync as WeightSync

_HOMES: Final = {
    "controller.controller": ("Controller",),
    "controller.founding": (
        "DistributedTrainController",
        "RolloutController",
        "TrainController",
        "create_engine_with_retry",
        "get_scheduling_config",
        "rpc_call",
    ),
    "controller.futures": ("BatchFuture", "wait_future_ordered"),
    "controller.group": ("Group",),
    "controller.role": ("Role",),
    "controller.rollout": ("Rollout", "RolloutTimeout"),
    "controller.scheduling.api": ("Job", "ScheduleStrategy", "Scheduling", "Worker"),
    "controller.weights.sync": ("WeightSync",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]  # noqa: PLE0604  # computed from the one table; a test checks each name against its home

__getattr__, __dir__ = loaders(__name__, _HOME_OF)
