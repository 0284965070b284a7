"""The lease of a controller: its workers and agents see by it that it is there."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from zbus.clock import SYSTEM_CLOCK
from zbus.errors import ZbusError
from zbus.registry.lease import LeaseRenewer
from zbus.registry.records import EpochRecord, Records

__all__ = ["ControllerLease"]

log = logging.getLogger("zbus.controller")


class ControllerLease:
    """Renews the controller's lease on a thread of its own until stopped."""

    def __init__(self, records: Records, epoch: EpochRecord, ttl_s: float) -> None:
        self._records = records
        self._renewer = LeaseRenewer(f"controller.{epoch.epoch}", ttl_s)
        self._stop = threading.Event()
        self._lease: Any = None
        self._thread = threading.Thread(target=self._run, name="zbus-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Release the lease."""
        self._stop.set()
        self._thread.join(2.0)
        if self._lease is not None:
            with contextlib.suppress(ZbusError):  # a sick registry must not keep a run from ending
                self._records.release_lease(self._lease)

    def _run(self) -> None:
        while not self._stop.is_set():
            now = SYSTEM_CLOCK.monotonic_ns()
            if self._renewer.due(now):
                lease = self._renewer.next(now)
                try:
                    self._records.renew_lease(lease)
                except ZbusError as error:
                    if self._renewer.failures == 0:
                        log.warning("the controller's lease could not be renewed: %s", error)
                    self._renewer.failed()
                else:
                    self._lease = lease
                    self._renewer.renewed()
            self._stop.wait(max(0.01, self._renewer.wait_s(SYSTEM_CLOCK.monotonic_ns())))
