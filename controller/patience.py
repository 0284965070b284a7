"""Waiting for ranks that people start by hand, saying now and then who is missing and what to type."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from controller.members import Members
from controller.scheduling.api import Scheduler
from controller.scheduling.external import ExternalScheduler
from zbus.errors import RegistryError

__all__ = ["REMIND_S", "wait_reminding"]

log = logging.getLogger("zbus.controller")

REMIND_S: Final = 10.0
"""Seconds between two reminders."""


def wait_reminding(
    members: Members, scheduler: Scheduler, done: Callable[[], bool], deadline: float, *, every_s: float = REMIND_S
) -> bool:
    """Wait until ``done()``; False when ``deadline`` (monotonic seconds) came first.

    Where agents are started by hand, every ``every_s`` seconds a warning names the ranks that are missing and the
    lines that start them. Blocks the calling thread.
    """
    while True:
        left = deadline - time.monotonic()
        if members.wait(done, max(0.0, min(left, every_s))):
            return True
        if left <= every_s:
            return False
        if not isinstance(scheduler, ExternalScheduler):
            continue
        try:
            lines = scheduler.reminder()
        except RegistryError as error:
            lines = [str(error)]
        if lines:
            log.warning("still waiting, %.0f s left; %s", left - every_s, "; ".join(lines))
