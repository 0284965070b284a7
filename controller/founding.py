"""The names this project began with, each working over groups: see ``docs/reference/api.md``.

``rpc_call`` is one call by name, ``wait_future_ordered`` waits for several in order, ``create_engine_with_retry`` makes
sure that every rank has its engine, ``get_scheduling_config`` tells what each rank of a role asks for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from controller.futures import wait_future_ordered
from controller.group import Group
from controller.role import Role
from controller.rollout import RolloutController
from controller.scheduling.api import Job, ScheduleStrategy, Scheduling, Worker
from controller.train import DistributedTrainController, TrainController
from zbus.engine import EndpointSpec, Everywhere, PerRank
from zbus.errors import BatchError, NotExecuted, Unavailable, WorkerLost
from zbus.retry import RetryPolicy, duration_s

__all__ = [
    "DistributedTrainController",
    "Job",
    "RolloutController",
    "ScheduleStrategy",
    "Scheduling",
    "TrainController",
    "Worker",
    "create_engine_with_retry",
    "get_scheduling_config",
    "rpc_call",
    "wait_future_ordered",
]

_CREATE: Final = EndpointSpec("zbus.create_engine", Everywhere(), PerRank(), effect="once", lane="main")
_SAFE: Final = (Unavailable, NotExecuted, WorkerLost)


def rpc_call(group: Group, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call one endpoint by name and wait: ``rpc_call(actor[0], "train", batch, step)``.

    A rank is chosen by ``actor[0]``, a deadline by ``actor.options(deadline="2m")``: every argument after the name is
    the endpoint's own.

    Raises:
        AttributeError: No such endpoint; the nearest name is suggested.
        Exception: As ``BatchFuture.result``.
    """
    return getattr(group, method)(*args, **kwargs)


def create_engine_with_retry(
    group: Group,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    attempts: int = 3,
    timeout: float | str = 600.0,
    backoff: float | str = 1.0,
) -> list[dict[str, Any]]:
    """Make sure that every rank of a group has its engine; a rank that has one keeps it.

    Tried again where that does no harm: a rank was not ready, the creation did not start, or the worker died with it
    (its next start is asked). An error of the engine's own constructor or ``setup`` is raised at once.

    Args:
        group: The group or slice.
        args: Positional arguments of the engine class.
        kwargs: Keyword arguments of the engine class.
        attempts: Tries in all.
        timeout: For all tries together: seconds or text such as ``"10m"``.
        backoff: Pause after the first try, doubled after each.

    Returns:
        What each rank says of its engine: endpoint table and digest, in rank order.

    Raises:
        BatchError: Some ranks failed; of one rank the error itself.
    """
    policy = RetryPolicy(attempts=attempts, backoff_s=duration_s(backoff, "backoff"), max_backoff_s=60.0)
    limit_s = duration_s(timeout, "timeout")
    began = time.monotonic()
    tries = 0
    while True:
        tries += 1
        left_s = max(0.001, limit_s - (time.monotonic() - began))
        call = group.options(deadline=left_s).builtin(_CREATE)
        try:
            found = call(args=tuple(args), kwargs=dict(kwargs or {}))
            return found if isinstance(found, list) else [found]
        except Exception as error:
            spent_s = time.monotonic() - began
            pause = policy.pause_s(tries, spent_s, random.random)
            if not _is_safe(error) or pause is None or spent_s + pause >= limit_s:
                raise
        time.sleep(pause)


def _is_safe(error: Exception) -> bool:
    if isinstance(error, BatchError):
        return all(isinstance(one, _SAFE) for one in error.exceptions)
    return isinstance(error, _SAFE)


def get_scheduling_config(role: Role) -> list[Scheduling]:
    """Return what each rank of a role asks for, in rank order.

    Raises:
        ConfigError: The role's needs are not valid.
    """
    job = role.to_job("role", "off")
    return [job.task(rank) for rank in range(role.world_size)]
