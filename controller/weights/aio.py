"""The awaited face of ``WeightSync``: the same operations for coroutines of any loop."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from controller.twins import Turns

if TYPE_CHECKING:
    from controller.weights.sync import WeightSync, Window

__all__ = ["AsyncWeights", "AsyncWindow"]


class AsyncWindow:
    """While generation stands still; made by ``WeightSync.aio.paused``.

    Attributes:
        ranks: Ranks that stand still.
        update: As ``Window.update``, to be awaited.
    """

    def __init__(self, window: Window, turns: Turns, context: contextvars.Context) -> None:
        self.ranks = window.ranks
        self.update = turns.twin(window.update, context)


class AsyncWeights:
    """``WeightSync.aio``: each method as the blocking one of the same name, to be awaited on any running loop.

    Cancelling an await ends the wait alone: an update that has begun goes on to its end, and generation after it.
    """

    def __init__(self, sync: WeightSync, name: str) -> None:
        self._sync = sync
        self._turns = Turns(name)
        self._inside = Turns(f"{name}-inside")  # a block that stands is left while the next waits on the other thread
        self.update = self._turns.twin(sync.update)
        self.refresh = self._turns.twin(sync.refresh)
        self.stale = Turns(f"{name}-looking").twin(sync.stale)  # it answers while an update runs or waits
        self.close = self._turns.twin(sync.close)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[AsyncWindow]:
        """As ``WeightSync.paused``. A cancel while ranks are asked to stand still has them go on."""
        block = self._sync.paused()
        context = contextvars.copy_context()
        entered: list[Window] = []

        def undo() -> None:
            if entered:
                block.__exit__(None, None, None)

        begun = self._turns.begin(lambda: entered.append(block.__enter__()), context)
        try:
            await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            if begun.done():
                self._inside.begin(undo, context)
            else:  # before what waits for its turn there: that would wait for this block's end
                begun.add_done_callback(lambda _: context.run(undo))
            raise
        leave = self._inside.twin(block.__exit__, context)
        try:
            yield AsyncWindow(entered[0], self._inside, context)
        except BaseException:
            await asyncio.shield(leave(*sys.exc_info()))
            raise
        await asyncio.shield(leave(None, None, None))
