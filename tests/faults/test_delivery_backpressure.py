"""Back-pressure over real sockets: streams, and callers that never collect; what is out and in memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading

import pytest

import zbus
from controller import Role
from launching import HERE, launch
from waiting import scaled, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    """Launch one worker for all tests here."""
    role = Role("backpressure_engine:Source", replicas=1, sys_path=[str(HERE)])
    with launch(tmp_path_factory.mktemp("runs"), {"source": role}) as opened:
        yield opened


def out(group) -> int:
    """Return how many requests of the slow lane have no outcome yet."""
    (peer,) = group._view.core.roster.peers()
    return peer.lanes["slow"].machine.outstanding if "slow" in peer.lanes else 0


@pytest.mark.parametrize("how", ["numbers", "numbers_sync"])
def test_a_slow_reader_stops_a_fast_generator(bus, how):
    """A generator without end makes no more than its window beyond what was taken, and goes on with its reader."""
    source = bus.group("source")[0]
    before, ended = source.made(), source.ended()
    with getattr(source, how).stream() as stream:
        assert next(stream) == 0
        wait_until(lambda: source.made() - before >= 64, what="the generator to fill its window")
        for _ in range(20):
            assert source.echo(1) == 1, "calls go on meanwhile"
        assert source.made() - before <= 64 + 2
        assert [next(stream) for _ in range(200)] == list(range(1, 201))
        wait_until(lambda: source.made() - before > 200, what="the generator to go on")
    wait_until(lambda: source.ended() > ended, what="the generator to end")  # it counts until it does


def test_large_items_count_by_their_bytes(bus):
    """A few large items fill the window, however few they are; all arrive."""
    source = bus.group("source")[0]
    before = source.made()
    with source.blobs.stream(12, 16 * MIB) as stream:
        assert len(next(stream)) == 16 * MIB
        wait_until(lambda: source.made() - before >= 4, what="the generator to fill its window")
        for _ in range(20):
            source.echo(1)
        assert source.made() - before <= 64 // 16 + 2
        assert [len(item) for item in stream] == [16 * MIB] * 11


@pytest.mark.parametrize("how", ["closed", "forgotten", "an error in the loop"])
@pytest.mark.parametrize("kind", ["numbers", "numbers_sync"])
def test_a_stream_that_is_left_stops_its_generator(bus, kind, how):
    """Left by ``close``, by dropping it, or by an error: the generator's ``finally`` runs and its lane is free."""
    source = bus.group("source")[0]
    before = source.ended()
    stream = getattr(source, kind).stream()
    assert next(stream) == 0
    if how == "closed":
        stream.close()
    elif how == "an error in the loop":
        with pytest.raises(KeyError), stream:
            raise KeyError
    del stream
    gc.collect()
    wait_until(lambda: source.ended() == before + 1, what="the generator to end")


def test_a_plain_call_of_a_long_generator_gives_the_whole_list(bus):
    """Without ``.stream`` nobody takes items one by one: credit is given as they come."""
    count = bus.group("source")[0].count.options(deadline=scaled(20))
    assert count(1000) == list(range(1000))


def test_a_caller_that_never_collects_is_held_back(bus, tmp_path):
    """Row 64: 3,000 calls of 32 KB, no future kept, none waited for: no more are out than the window has places."""
    source = bus.group("source")[0]
    before = source.made()
    gate, most = tmp_path / "go", 0
    source.swallow.submit(b"", str(gate))

    def open_when_full() -> None:
        wait_until(lambda: out(source) == 1_024, 60, "the window to be full")
        gate.touch()

    opener = threading.Thread(target=open_when_full)
    opener.start()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3_000):
        source.swallow.submit(bytes(32 << 10))
        most = max(most, out(source))
    opener.join()
    assert gate.exists()
    assert most <= 1_024, "the window was filled, and no more"
    wait_until(lambda: source.made() - before == 3_001, what="every call to run")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 * 1024  # KiB


def test_a_call_that_finds_no_room_in_time_was_not_sent(bus, tmp_path):
    """While the window is full a call waits for room until its deadline, and then reads NOT_EXECUTED."""
    source = bus.group("source")[0]
    gate = tmp_path / "go"
    hold = source.swallow.submit(b"", str(gate))
    while out(source) < 1_024:
        source.swallow.submit(b"")
    refused = source.swallow.options(deadline=0.1).submit(b"late")
    with pytest.raises(zbus.CallTimeout, match="earlier calls fill the window") as caught:
        refused.result()
    assert (caught.value.outcome, caught.value.attempts) == ("NOT_EXECUTED", 0)
    gate.touch()
    assert hold.result() == 0


def test_on_a_loop_calls_wait_for_room_without_blocking_it(bus, tmp_path):
    """2,000 awaited calls at once on a full window: the loop goes on ticking, all are answered."""
    source = bus.group("source")[0]
    gate = tmp_path / "go"

    async def open_after_ticks_on_a_full_window() -> None:
        ticks = 0
        while ticks < 10:
            await asyncio.sleep(0.01)
            ticks += out(source) == 1_024
        gate.touch()

    async def main() -> list[int]:
        first = asyncio.create_task(source.swallow.aio(b"", str(gate)))
        opener = asyncio.create_task(open_after_ticks_on_a_full_window())
        answers = await asyncio.gather(*(source.swallow.aio(b"x") for _ in range(2_000)))
        await asyncio.gather(first, opener)
        return answers

    assert asyncio.run(asyncio.wait_for(main(), scaled(60))) == [1] * 2_000
