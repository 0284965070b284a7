from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from controller.twins import Turns
from controller.weights.aio import AsyncWeights
from waiting import scaled, wait_until


class Gated:
    """An operation that says when it begins and ends when it may."""

    def __init__(self) -> None:
        self.story: list[tuple[str, int]] = []
        self.gate = threading.Event()

    def step(self, number: int) -> int:
        self.story.append(("begins", number))
        assert self.gate.wait(scaled(20))
        self.story.append(("ends", number))
        return number


async def until(condition) -> None:
    """Wait without holding up the loop."""
    await asyncio.to_thread(wait_until, condition)


def test_operations_follow_one_another_though_they_are_awaited_side_by_side():
    """The loop runs on meanwhile, and answers come to whom they belong."""
    gated = Gated()
    step = Turns("zbus-test").twin(gated.step)

    async def main():
        both = asyncio.gather(step(0), step(1))
        await until(lambda: gated.story)
        gated.gate.set()
        return await both

    assert asyncio.run(main()) == [0, 1]
    assert gated.story == [("begins", 0), ("ends", 0), ("begins", 1), ("ends", 1)]


def test_a_cancelled_await_tears_no_operation_apart():
    """What has begun ends before the next begins; what waits for its turn is not begun."""
    gated = Gated()
    step = Turns("zbus-test").twin(gated.step)

    async def main():
        begun, waiting = asyncio.create_task(step(0)), asyncio.create_task(step(1))
        await until(lambda: gated.story)
        for task in (begun, waiting):
            task.cancel()
        await asyncio.gather(begun, waiting, return_exceptions=True)
        assert begun.cancelled()
        assert waiting.cancelled()
        gated.gate.set()
        return await step(2)

    assert asyncio.run(main()) == 2
    assert gated.story == [("begins", 0), ("ends", 0), ("begins", 2), ("ends", 2)]


class Sync:
    """A stand-in for WeightSync whose ranks stand still slowly."""

    def __init__(self) -> None:
        self.asked, self.gate, self.standing = threading.Event(), threading.Event(), []

    def update(self): ...

    refresh = stale = close = update

    @contextmanager
    def paused(self):
        self.asked.set()
        assert self.gate.wait(scaled(20))
        self.standing.append(True)
        try:
            yield SimpleNamespace(ranks=(0, 1), update=lambda version=None: ("updated", version))
        finally:
            self.standing.append(False)


def test_generation_goes_on_after_a_block_however_it_ends():
    """Left in order, by an error, or by a cancel while ranks are still asked to stand still."""
    sync = Sync()
    aio = AsyncWeights(sync, "zbus-test")
    sync.gate.set()

    async def in_order():
        async with aio.paused() as window:
            assert sync.standing == [True]
            assert window.ranks == (0, 1)
            assert await window.update(7) == ("updated", 7)

    async def by_error():
        async with aio.paused():
            raise KeyError("x")

    async def by_cancel():
        waiting = asyncio.create_task(in_order())
        await asyncio.to_thread(sync.asked.wait, scaled(20))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert sync.standing == []
        sync.gate.set()

    asyncio.run(in_order())
    assert sync.standing == [True, False]
    sync.standing.clear()
    with pytest.raises(KeyError):
        asyncio.run(by_error())
    assert sync.standing == [True, False]
    sync.standing.clear()
    sync.gate.clear()
    sync.asked.clear()
    asyncio.run(by_cancel())
    wait_until(lambda: sync.standing == [True, False], what="generation to go on")
