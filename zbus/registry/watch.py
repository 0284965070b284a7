"""Whether the holder of a lease lives, by looking again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.registry.lease import LeaseObserver, LeaseState
from zbus.registry.records import Records

__all__ = ["lease_moves"]

_LOOKS_PER_TTL: Final = 8
_LONGEST_PAUSE_S: Final = 0.25


def lease_moves(
    records: Records, holder: str, *, clock: Clock = SYSTEM_CLOCK, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Return whether a lease is renewed while this process looks. Blocks for up to its time to live; any thread.

    Silence counts as in ``LeaseObserver``: a process that was itself suspended meanwhile looks again before it judges.

    Raises:
        RegistryError: The registry cannot be read.
    """
    observer = LeaseObserver()
    first = lease = records.lease(holder)
    while lease is not None and first is not None:
        if lease.counter != first.counter:
            return True
        observer.observe({holder: lease}, clock.monotonic_ns())
        if observer.state(holder) is LeaseState.EXPIRED:
            return False
        sleep(min(lease.ttl_s / _LOOKS_PER_TTL, _LONGEST_PAUSE_S))
        lease = records.lease(holder)
    return False
