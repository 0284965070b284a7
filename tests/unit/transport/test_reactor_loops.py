from __future__ import annotations

import asyncio
import os
import threading

import pytest

from waiting import wait_until
from zbus.transport.reactor import Reactor


class Bell:
    """A descriptor on a reactor that counts how often it rang."""

    def __init__(self, reactor: Reactor) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.rung = 0
        self.on_ring = lambda: None
        reactor.register(self.fd, self._take)

    def _take(self) -> None:
        os.eventfd_read(self.fd)
        self.rung += 1
        self.on_ring()

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    async def awaited(self, reactor: Reactor) -> None:
        """Ring from another thread and wait for it as an awaited call does."""
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        self.on_ring = lambda: loop.call_soon_threadsafe(heard.set)
        reactor.attach_loop(loop)
        try:
            threading.Timer(0.002, self.ring).start()
            await asyncio.wait_for(heard.wait(), 10)
        finally:
            reactor.detach_loop(loop)
            self.on_ring = lambda: None


@pytest.fixture
def reactor():
    """A running reactor."""
    reactor = Reactor()
    reactor.start()
    yield reactor
    reactor.close()


@pytest.fixture
def bell(reactor):
    """A bell on it."""
    bell = Bell(reactor)
    yield bell
    reactor.unregister(bell.fd)
    os.close(bell.fd)


def test_loops_that_come_and_go_are_served_and_forgotten(reactor, bell):
    """Awaited events arrive in each of several loops; a closed loop is not held for ever, and sync waiting goes on."""

    async def main():
        for _ in range(5):
            await bell.awaited(reactor)

    for turn in range(3):
        asyncio.run(main())
        assert bell.rung == 5 * (turn + 1)
        assert len(reactor._readers) <= 1
    threading.Timer(0.002, bell.ring).start()
    assert reactor.drive(lambda: bell.rung == 16, 10)


def test_a_loop_without_calls_lets_go_at_the_next_event(reactor, bell):
    """After its last call a loop stops watching at an event, which the background thread takes; it never spins."""

    async def main():
        await bell.awaited(reactor)
        polls = 0
        poll_from = reactor._poll_from

        def counted(loop):
            nonlocal polls
            polls += 1
            poll_from(loop)

        asyncio.get_running_loop().add_reader(reactor.fileno(), counted, asyncio.get_running_loop())
        for _ in range(1000):  # the thread may be quicker than the loop, then the loop sees nothing
            bell.ring()
            await asyncio.sleep(0.001)
            if polls:
                break
        for _ in range(20):
            bell.ring()
            await asyncio.sleep(0.001)
        assert not reactor._readers
        return polls

    assert asyncio.run(main()) == 1


def test_the_background_thread_leads_again_after_awaited_calls(reactor, bell):
    """Events after the last awaited call are taken although nobody waits."""

    async def main():
        await bell.awaited(reactor)

    asyncio.run(main())
    bell.ring()
    wait_until(lambda: bell.rung == 2, what="the second ring")


def test_closing_inside_a_running_loop_frees_the_descriptors_number():
    """A reactor closed by the loop that watched it leaves no reader behind, so its number can be used anew at once."""

    async def main():
        reactor = Reactor()
        reactor.start()
        bell = Bell(reactor)
        await bell.awaited(reactor)
        number = reactor.fileno()
        reactor.unregister(bell.fd)
        os.close(bell.fd)
        reactor.close()
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(number)

    asyncio.run(main())


def test_a_closed_reactor_wakes_nobody():
    """Its descriptor's number may belong to another file by now: nothing is written there."""
    reactor = Reactor()
    reactor.start()
    read, write = os.pipe()
    os.set_blocking(read, False)
    reactor.close()
    reactor.close()
    try:
        os.dup2(write, reactor._wake_fd)  # the number is used again
        reactor.wake()
        os.close(reactor._wake_fd)
        with pytest.raises(BlockingIOError):
            os.read(read, 8)
    finally:
        os.close(read)
        os.close(write)


def test_a_loop_does_not_spin_while_another_thread_is_at_what_is_ready(reactor, bell, monkeypatch):
    """It looks a thousand times a second at most, and drives again once the other has ended."""
    looks, held, go_on = [], threading.Event(), threading.Event()
    poll = reactor.poll_nowait
    monkeypatch.setattr(reactor, "poll_nowait", lambda: looks.append(threading.get_ident()) or poll())

    def hold() -> None:
        bell.on_ring = lambda: None
        bell.ring()  # something is ready all the time
        held.set()
        go_on.wait(10)

    async def main() -> tuple[int, float]:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        reactor.attach_loop(loop)
        try:
            leader.start()
            await asyncio.to_thread(held.wait, 10)
            before, began = looks.count(me), loop.time()
            await asyncio.sleep(0.05)
            seen, took = looks.count(me) - before, loop.time() - began
        finally:
            go_on.set()
            await asyncio.to_thread(leader.join, 10)
            bell.on_ring = lambda: loop.call_soon_threadsafe(heard.set)
            bell.ring()
            await asyncio.wait_for(heard.wait(), 10)
            reactor.detach_loop(loop)
        return seen, took

    me, bell.on_ring = threading.get_ident(), hold
    leader = threading.Thread(target=reactor.drive, args=(go_on.is_set, 10))
    threading.Thread(target=lambda: (wait_until(lambda: reactor._owner is not None), bell.ring())).start()
    seen, took = asyncio.run(main())
    assert seen <= took / 0.001 + 2
