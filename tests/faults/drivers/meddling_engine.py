"""An engine that harms the bus thread of its own worker: loaded in real workers of the tests of slow handlers."""

from __future__ import annotations

import gc
import time

import zbus
from zbus import Everywhere, PerRank
from zbus.transport.server import Server

NEVER = 1 << 62


class Meddler(zbus.Engine):
    """Puts a timer into the worker's bus thread, as a fault of the product would."""

    def setup(self, ctx: zbus.Context) -> None:
        self.ran = 0

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def count(self) -> int:
        self.ran += 1
        return self.ran

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def block_bus(self, seconds: float) -> None:
        def handler_that_blocks(_now: int) -> int:
            self.server()._bus.remove_ticker(handler_that_blocks)
            time.sleep(seconds)
            return NEVER

        self.server()._bus.add_ticker(handler_that_blocks)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def break_bus(self) -> None:
        def handler_that_breaks(_now: int) -> int:
            msg = "a fault of the bus"
            raise RuntimeError(msg)

        self.server()._bus.add_ticker(handler_that_breaks)
        time.sleep(10)  # the end comes from the other thread

    @staticmethod
    def server() -> Server:
        return next(one for one in gc.get_objects() if type(one) is Server)
