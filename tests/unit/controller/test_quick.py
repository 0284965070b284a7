"""Plain calls that are waited for, the short way: they end as any other, and leave it when something is not plain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zbus
from controller.quick import QuickCall
from fake_placer import FakePlacer, Request, lost, make_group, ok, raised
from waiting import wait_until
from zbus.codec import Ref
from zbus.engine import PerRank, RankZero, Same
from zbus.errors import BatchError
from zbus.protocol.messages import Outcome, OutcomeKind
from zbus.retry import RetryPolicy


class Actor(zbus.Engine):
    @zbus.endpoint(collect=PerRank(), effect="pure")
    def each(self, what): ...

    @zbus.endpoint(collect=Same(), effect="pure")
    def same(self, what): ...

    @zbus.endpoint(RankZero())
    def save(self, path): ...


class Watcher:
    """Stands in for who watches calls that take long."""

    def __init__(self) -> None:
        self.out: list[Any] = []
        self.ever = 0

    def began(self, call: Any) -> None:
        self.out.append(call)
        self.ever += 1

    def ended(self, call: Any) -> None:
        if call in self.out:
            self.out.remove(call)

    def where(self, *_: Any) -> dict[int, Any]:
        return {}


class Bench:
    """A group of three whose answers the test gives, and what was asked of it on another thread."""

    def __init__(self, ranks: int = 3) -> None:
        self.group, self.placer, self.roster = make_group(Actor, ranks)
        self.roster.late = self.watcher = Watcher()  # type: ignore[attr-defined]

    def ask(self, call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
        """Make a call on a thread; its end is (answer,) or an exception."""
        ends: list[Any] = []

        def run() -> None:
            try:
                ends.append((call(),))
            except Exception as error:  # noqa: BLE001  # the end that is asked for
                ends.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, ends

    def requests(self, count: int) -> list[Request]:
        """Wait for so many requests."""
        wait_until(lambda: len(self.placer.requests) == count, what="the requests")
        return list(self.placer.requests)


@pytest.fixture
def bench() -> Bench:
    """Give one."""
    return Bench()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[QuickCall]:
    """Give the calls that left the short way."""
    found: list[QuickCall] = []
    hand_over = QuickCall.hand_over

    def noted(self: QuickCall, placement: Any) -> None:
        found.append(self)
        hand_over(self, placement)

    monkeypatch.setattr(QuickCall, "hand_over", noted)
    return found


def test_answers_come_in_the_order_of_the_ranks(bench: Bench, handed: list[QuickCall]) -> None:
    """Whatever order they came in; also for a slice, for one rank, and merged as declared."""
    bench.placer.auto = lambda request: request.answer(ok(request.member * 10))
    assert bench.group.each(1) == [0, 10, 20]
    assert bench.group[1:3].each(1) == [0, 10]
    assert [request.peer.name.rank for request in bench.placer.requests[3:]] == [1, 2]
    assert bench.group[2].each(1) == 0
    assert bench.group[1].save("x") == 0
    bench.placer.auto = None
    thread, ends = bench.ask(lambda: bench.group.each(1))
    requests = bench.requests(10)[-3:]
    wait_until(lambda: bench.placer.placed[-1].requests == requests, what="the call")
    for member in (2, 0, 1):
        requests[member].answer(ok(member))
    thread.join(10)
    assert ends == [([0, 1, 2],)]
    assert not any(bench.watcher.out)


def test_answers_that_cannot_be_merged_raise_as_declared(bench: Bench) -> None:
    """Same of different answers is an error that keeps them all."""
    bench.placer.auto = lambda request: request.answer(ok(request.member))
    with pytest.raises(zbus.errors.ConfigError) as caught:
        bench.group.same(1)
    assert caught.value.results == {0: 0, 1: 1, 2: 2}  # type: ignore[attr-defined]


def test_a_failure_is_told_with_the_good_answers(bench: Bench, handed: list[QuickCall]) -> None:
    """The root first, the late ones named, as by the long way."""
    thread, ends = bench.ask(lambda: bench.group.each(1))
    first, second, third = bench.requests(3)
    third.answer(ok("good"))
    first.answer(raised(ValueError("bad")))
    second.answer(ok("late but in time"))
    thread.join(10)
    (error,) = ends
    assert isinstance(error, BatchError)
    assert error.results == {1: "late but in time", 2: "good"}
    assert isinstance(error.exceptions[0], ValueError)
    assert len(handed) == 1
    assert not bench.watcher.out


def test_a_lost_rank_runs_its_part_once_more(bench: Bench, handed: list[QuickCall]) -> None:
    """A pure call whose rank comes back by policy is whole again; nothing is run twice elsewhere."""
    bench.roster.will_return = lambda peer: True  # type: ignore[method-assign]
    group = bench.group.options(retries=RetryPolicy(attempts=3))
    thread, ends = bench.ask(lambda: group.each(1))
    first, second, third = bench.requests(3)
    first.answer(ok("a"))
    second.answer(lost())
    third.answer(ok("c"))
    again = bench.requests(4)[-1]
    assert again.peer.name.rank == 1
    again.answer(ok("b"))
    thread.join(10)
    assert ends == [(["a", "b", "c"],)]


def test_a_call_that_takes_a_while_is_watched(bench: Bench, handed: list[QuickCall]) -> None:
    """It is handed over with what has come, ends as any other, and is no longer watched then."""
    thread, ends = bench.ask(lambda: bench.group.each(1))
    requests = bench.requests(3)
    requests[1].answer(ok("b"))
    wait_until(lambda: bench.watcher.out, what="the watcher to hear of it")
    (placement,) = bench.watcher.out
    assert placement.slots.missing(0) == [0, 2]
    for request in (requests[2], requests[0]):
        request.answer(ok(request.member))
    thread.join(10)
    assert ends == [([0, "b", 2],)]
    assert not bench.watcher.out
    assert len(handed) == bench.watcher.ever == 1


def test_outcomes_that_come_while_it_is_handed_over_count_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the adoption and the handing on: each reaches the placement once."""
    from controller.placement import Placement

    told: list[tuple[int, OutcomeKind]] = []
    adopt, deliver = Placement.adopt, Placement.deliver

    def adopted(self: Placement, *args: Any) -> None:
        adopt(self, *args)
        bench.placer.requests[0].answer(ok("a"))
        bench.placer.requests[1].answer(raised(ValueError("bad")))

    def delivered(self: Placement, member: int, call: int, outcome: Outcome) -> None:
        told.append((member, outcome.kind))
        deliver(self, member, call, outcome)

    monkeypatch.setattr(Placement, "adopt", adopted)
    monkeypatch.setattr(Placement, "deliver", delivered)
    thread, ends = bench.ask(lambda: bench.group.each(1))
    requests = bench.requests(3)
    wait_until(lambda: len(told) == 2, what="the hand-over")
    requests[2].answer(ok("c"))
    thread.join(20)
    assert told == [(0, OutcomeKind.OK), (1, OutcomeKind.APP_ERROR), (2, OutcomeKind.OK)]
    assert isinstance(ends[0], BatchError)


def handle() -> Ref:
    """Make a handle of some value."""
    return Ref(
        role="w", rank=1, incarnation=9, generation=5, number=7, memory="", endpoints={}, nbytes=8, rows=None,
        lengths=None, method="score", about="int",
    )  # fmt: skip


def test_handles_and_keywords_go_the_long_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do wrong arguments, what is meant for all as it stands, and calls that a full window holds back."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(QuickCall, "place", never)
    bench.placer.auto = lambda request: request.answer(ok(request.calls[0][1:]))
    bench.placer.auto = lambda request: request.answer(ok(len(request.calls)))
    assert bench.group.each(handle()) == [1] * 3
    assert bench.group.each({"within": [handle()]}) == [1] * 3
    assert bench.group.each(zbus.Whole([1])) == [1] * 3
    assert bench.group.each(what=2) == [1] * 3
    full = iter((True, True, False))
    monkeypatch.setattr(bench.placer, "crowded", lambda _peers, _lane: next(full), raising=False)
    assert bench.group.each(np.arange(3)) == [1] * 3
    with pytest.raises(TypeError, match="each"):
        bench.group.each()


def test_arrays_and_containers_go_the_short_way(bench: Bench, handed: list[QuickCall]) -> None:
    """Encoded once for all; one that is awaited is copied at once, one that is waited for is not."""
    copied: list[bool] = []
    bench.placer.keeper = lambda _members, *, snapshot: copied.append(snapshot)  # type: ignore[method-assign]
    bench.placer.auto = lambda request: request.answer(ok(request.calls[0][1][0]))
    array = np.arange(1000)
    for answer in (*bench.group.each(array), *asyncio.run(bench.group.each.aio(array))):
        assert np.array_equal(answer, array)
    assert bench.group.same({"rows": [1, 2]}) == {"rows": [1, 2]}
    assert copied == [False, True, False]
    assert len({id(request.payload) for request in bench.placer.requests}) == 3
    assert not handed


# -- awaited ---------------------------------------------------------------------------------------------------------


async def answer_when(placer: FakePlacer, count: int, outcomes: list[Outcome]) -> None:
    """Answer the last requests once there are so many, from another thread."""
    await asyncio.to_thread(wait_until, lambda: len(placer.requests) >= count, what="the requests")
    for request, outcome in zip(placer.requests[-len(outcomes) :], outcomes, strict=True):
        await asyncio.to_thread(request.answer, outcome)


def test_an_awaited_call_ends_with_its_answers(bench: Bench, handed: list[QuickCall]) -> None:
    """Those that are there at once, those that another thread brings, and those that fail."""

    async def run() -> None:
        bench.placer.auto = lambda request: request.answer(ok(request.member))
        assert await bench.group.each.aio(1) == [0, 1, 2]
        bench.placer.auto = None
        asked = asyncio.ensure_future(bench.group.each.aio(1))
        await answer_when(bench.placer, 6, [ok("a"), ok("b"), ok("c")])
        assert await asked == ["a", "b", "c"]
        assert not handed
        asked = asyncio.ensure_future(bench.group[0].each.aio(1))
        await answer_when(bench.placer, 7, [raised(KeyError("bad"))])
        with pytest.raises(KeyError):
            await asked

    asyncio.run(run())
    assert len(handed) == 1


def test_an_awaited_call_that_takes_a_while_is_watched(bench: Bench) -> None:
    """As a blocking one; the loop is not held up."""

    async def run() -> None:
        asked = asyncio.ensure_future(bench.group.each.aio(1))
        await asyncio.to_thread(wait_until, lambda: bench.watcher.out, what="the watcher to hear of it")
        await answer_when(bench.placer, 3, [ok("a"), ok("b"), ok("c")])
        assert await asked == ["a", "b", "c"]

    asyncio.run(run())
    assert not bench.watcher.out


def test_cancelling_the_await_cancels_the_call(bench: Bench) -> None:
    """Once, and what was placed."""

    async def run() -> None:
        asked = asyncio.ensure_future(bench.group.each.aio(1))
        await asyncio.to_thread(bench.requests, 3)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bench.placer.cancelled == [bench.placer.placed[-1]]
        bench.placer.requests[0].answer(Outcome(OutcomeKind.CANCELLED, None, "cancelled", "cancelled"))

    asyncio.run(run())
