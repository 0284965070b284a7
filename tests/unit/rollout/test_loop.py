from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from controller.rollouts.loop import OwnLoop
from waiting import scaled, wait_until
from zbus.errors import ConfigError


async def nothing() -> None:
    """Return once the loop has done what came before."""


@pytest.fixture
def loop():
    """Give a loop that ends with the test."""
    made = OwnLoop("zbus-test-loop")
    yield made
    made.close(nothing)


def test_what_ends_though_its_caller_has_gone_is_undone(loop):
    """An operation that finishes in spite of its cancel hands over nothing: what it took is given back."""
    begun, undone = threading.Event(), []

    async def takes() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "taken"
        return "never"

    async def story() -> None:
        waiting = asyncio.create_task(loop.aio(takes(), undone.append))
        await asyncio.to_thread(begun.wait, scaled(20))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())
    wait_until(lambda: undone == ["taken"], what="the undoing")


def test_what_was_handed_over_as_its_caller_went_is_undone(loop):
    """The result is there and its await is cancelled before it resumes: the result is given back."""
    undone = []

    async def takes() -> str:
        return "taken"

    async def story() -> None:
        waiting = asyncio.create_task(loop.aio(takes(), undone.append))
        await asyncio.sleep(0)
        loop.run(nothing())  # blocks this loop until the result was handed over
        loop.run(nothing())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())
    wait_until(lambda: undone == ["taken"], what="the undoing")


def test_a_result_that_arrives_is_not_undone(loop):
    """Neither blocking nor awaited."""
    undone = []

    async def takes() -> str:
        return "taken"

    assert loop.run(takes(), undone.append) == "taken"
    assert asyncio.run(loop.aio(takes(), undone.append)) == "taken"
    assert undone == []


def test_an_error_of_an_operation_is_its_callers(loop):
    """Raised where it was asked for; the loop goes on."""

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop.run(fails())
    with pytest.raises(KeyError):
        asyncio.run(loop.aio(fails()))
    loop.run(nothing())


def test_a_closed_loop_tells_who_waits_and_takes_nothing_more(loop):
    """What runs is ended with an error that says so, and a later call is refused."""
    begun, told = threading.Event(), []

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    def caller() -> None:
        try:
            loop.run(waits())
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=caller)
    thread.start()
    begun.wait(scaled(20))
    loop.close(nothing)
    thread.join(scaled(20))
    assert told == ["the rollout controller was destroyed meanwhile"]
    with pytest.raises(ConfigError, match="zbus-test-loop was destroyed"):
        loop.run(nothing())


def test_what_blocks_the_loop_does_not_keep_it_from_being_closed(caplog):
    """After the deadline the thread is left behind: the log names the line, and who waits is told."""
    loop, gate, begun, told = OwnLoop("zbus-blocked-loop"), threading.Event(), threading.Event(), []

    async def blocks() -> None:
        begun.set()
        gate.wait(scaled(60))

    def caller() -> None:
        with pytest.raises(ConfigError, match="destroyed"):
            loop.run(blocks())
        told.append(True)

    thread = threading.Thread(target=caller)
    thread.start()
    assert begun.wait(scaled(20))
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "zbus.rollout"):
        loop.close(nothing, limit_s=0.1)
    assert time.monotonic() - began < scaled(20)
    thread.join(scaled(20))
    assert told == [True]
    assert "zbus-blocked-loop does not end within 0.1 s and is left behind" in caplog.text
    assert "test_loop.py" in caplog.text
    assert "in blocks" in caplog.text
    gate.set()
    wait_until(lambda: "zbus-blocked-loop" not in {one.name for one in threading.enumerate()}, what="its end")
    assert len(caplog.records) == 1
