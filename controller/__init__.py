"""The driver's side of zbus: launch a trial, call its groups.

::

    from controller import Controller, Role

    with Controller.launch("demo", roles={"actor": Role("engines:Actor", replicas=4)}) as bus:
        print(bus.group("actor").train(batch))

Names are loaded on first use, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

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


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (PEP 562) and keep it."""
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module 'controller' has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=importlib.import_module(__name__))
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
