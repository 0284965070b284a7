"""The engine of ``delivery_cost``."""

from __future__ import annotations

import gc
import os

import zbus


class Cost(zbus.Engine):
    """Returns what it is given, and says which process it is."""

    @zbus.endpoint(effect="pure")
    def echo(self, value: object) -> object:
        """Return ``value``."""
        return value

    @zbus.endpoint(effect="pure")
    def pid(self) -> int:
        """Return the worker's process id."""
        return os.getpid()


class Unkept(Cost):
    """The same in a worker whose calls no crash journal hears of."""

    def setup(self, ctx: zbus.Context) -> None:
        """Take the journal from the executor that runs this engine: there is no setting for it."""
        from zbus.runtime.executor import Executor

        for found in gc.get_objects():
            if isinstance(found, Executor):
                found.rings.kept = None  # what is measured is its absence
