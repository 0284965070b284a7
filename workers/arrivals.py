"""Sees the records of started ranks appear: takes each into the agent's care and hints at it once it can be read.

A rank rings a bell when it has published its record, so that nobody waits for the next look. The looks stay, for ranks
that cannot ring.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from workers.background import Background
from workers.spec import RankSpec
from zbus.errors import RegistryError
from zbus.registry.records import Records

__all__ = ["Arrivals"]

_LOOK_S: Final = 0.2


class Arrivals:
    """Used on the agent's main thread; it reads the registry on the I/O thread.

    Args:
        background: The I/O thread.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._looks: dict[int, Callable[[], float | None]] = {}  # by incarnation; both threads take out
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the bell, readable when a rank has rung; it is passed to the ranks."""
        return self._bell

    def expect(
        self, spec: RankSpec, records: Records, lives: Callable[[], bool], arrived: Callable[[RankSpec], None]
    ) -> None:
        """Look for the record of a rank that has just been started, until it is there or the rank has ended.

        Args:
            spec: Which start of which rank.
            records: The registry.
            lives: Tells whether that process still runs; called on the I/O thread.
            arrived: Called once on the I/O thread when the record is there.
        """

        def look() -> float | None:
            if spec.incarnation not in self._looks:
                return None
            there = False
            with contextlib.suppress(RegistryError):
                # Ranks do not write again: should the directory be made anew, who vouched puts the record back.
                there = records.vouch(spec.role, spec.rank, spec.incarnation)
            if there:
                self._looks.pop(spec.incarnation, None)
                arrived(spec)  # its own errors are not the registry's
                return None
            if lives():
                return _LOOK_S
            self._looks.pop(spec.incarnation, None)
            return None

        self._looks[spec.incarnation] = look
        self._background.every(look)

    def on_bell(self) -> None:
        """Look for every record that is still expected: one of them has been published."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for look in list(self._looks.values()):
            self._background.submit(look)

    def close(self) -> None:
        """Close the bell."""
        os.close(self._bell)
