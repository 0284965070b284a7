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
        self.turn = threading.Lock()

    def update(self):
        with self.paused():
            return "updated"

    refresh = close = update

    def stale(self):
        return {1: "late"}

    @contextmanager
    def paused(self):
        with self.turn:
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


def test_a_block_given_up_while_it_is_asked_for_holds_up_no_update():
    """Generation goes on before the update that waits for its turn begins."""
    sync = Sync()
    aio = AsyncWeights(sync, "zbus-test")

    async def block():
        async with aio.paused():
            pytest.fail("it was cancelled")

    async def main():
        given_up = asyncio.create_task(block())
        await asyncio.to_thread(sync.asked.wait, scaled(20))
        update = asyncio.create_task(aio.update())
        await asyncio.sleep(0)  # it is queued in its first step
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        sync.gate.set()
        return await asyncio.wait_for(update, scaled(20))

    assert asyncio.run(main()) == "updated"
    assert sync.standing == [True, False, True, False]


def test_who_is_stale_is_told_while_an_update_waits():
    """Asked inside a block, it does not wait behind an update that waits for the block."""
    sync = Sync()
    sync.gate.set()
    aio = AsyncWeights(sync, "zbus-test")

    async def main():
        async with aio.paused():
            update = asyncio.create_task(aio.update())
            await asyncio.sleep(0)
            told = await asyncio.wait_for(aio.stale(), scaled(20))
        return told, await update

    assert asyncio.run(main()) == ({1: "late"}, "updated")
