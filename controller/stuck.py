"""Ranks that stay in a collective after one of them has failed: waited for a moment, then given fresh processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from controller.futures import BatchFuture
from controller.group import Group
from controller.outcomes import spans
from zbus.errors import BatchError, WorkerLost, ZbusError

if TYPE_CHECKING:
    from controller.controller import Controller

__all__ = ["NEXT", "answer_of"]

_log = logging.getLogger("zbus.controller.train")

T = TypeVar("T")

NEXT: Final = "train.initialize(), then train.load(...) of the last checkpoint"
"""What brings a role back whose ranks were given fresh processes."""


def answer_of(bus: Controller, group: Group, future: BatchFuture[T], patience_s: float | None) -> T:
    """Wait for the answer of a call whose ranks meet in collectives. If one fails, no other stays in one for long.

    Args:
        bus: Whose ranks they are.
        group: All ranks of the role.
        future: The call.
        patience_s: How long the others are waited for once one has failed. Whoever is still inside then gets a fresh
            process, as all ranks of the role do: what they hold of the model is lost. None: that is left to the caller.

    Raises:
        BatchError: Ranks failed. The facts of its root say so where ranks were given fresh processes.
    """
    try:
        return future.result()
    except BatchError as error:
        if not error.late or patience_s is None or isinstance(error.root, WorkerLost):
            raise
        _log.warning("%s; %s/%s still in the call, waited for %g s at most", error.message, group.role,
                     spans(sorted(error.late)), patience_s)  # fmt: skip
    if group.placer.wait(future.done, patience_s):
        return future.result()
    stuck = [one.rank for one in future.outcomes() if one.outcome is None]
    if not stuck:  # the last one answered at this moment
        return future.result()
    told = _replaced(bus, group, stuck, patience_s)
    try:
        return future.result()
    except BatchError as error:
        _tell(error, told)
        raise


def _replaced(bus: Controller, group: Group, stuck: Iterable[int], patience_s: float) -> str:
    """Give all ranks fresh processes; say in words what came of it."""
    role = group.role
    who = f"{role}/{spans(sorted(stuck))} stayed in a collective for {patience_s:g} s after the failure"
    try:
        bus.restart(role)
    except ZbusError as error:
        return f"{who}, and could not be given a fresh process: {error}"
    return f"{who}, so all ranks of {role} were given fresh processes: model and optimizer are gone"


def _tell(error: BatchError, told: str) -> None:
    error.add_note(f"{told}; next: {NEXT}")
    root: Any = error.root
    if isinstance(root, ZbusError):
        root.facts["group"] = told
        root.hint = NEXT
    _log.error("%s", told)
