from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import zbus
from waiting import wait_until
from zbus import AnyOne, failpoints
from zbus.codec import encode
from zbus.engine import endpoints_of
from zbus.protocol.journal import LaneRing
from zbus.protocol.messages import CancelRunning, Execute, Status
from zbus.runtime.executor import Executor

SESSION = bytes(range(16))

story: list[tuple[Any, ...]] = []


class Told(LaneRing):
    """A ring that adds what it is told to the story."""

    def __init__(self, lane: str) -> None:
        super().__init__([0] * 2048, [0] * 2048)
        self.lane = lane

    def begin(self, seq: int) -> None:
        super().begin(seq)
        story.append(("begin", seq))

    def end(self, seq: int) -> None:
        super().end(seq)
        story.append(("end", seq))

    def raised(self, seq: int) -> None:
        super().raised(seq)
        story.append(("raised", seq))

    def answered(self, seq: int, frames: Any) -> None:
        super().answered(seq, frames)
        story.append(("answered", seq))


class Answers:
    """Takes answers into the story."""

    def finish(self, request, index, kind, status, buffers, *, chunks=0) -> None:
        story.append(("finish", request.seq + index, Status(status).name))

    def chunk(self, request, number, buffers) -> None:
        story.append(("chunk", number))

    def is_guest(self, request) -> bool:
        return False


class Works(zbus.Engine):
    @zbus.endpoint()
    def add(self, what):
        story.append(("run", what))
        return what

    @zbus.endpoint()
    def bad(self):
        story.append(("run", "bad"))
        raise ValueError("bad")

    @zbus.endpoint()
    def unspeakable(self):
        story.append(("run", "unspeakable"))
        return lambda: None

    @zbus.endpoint(AnyOne())
    def items(self, fail):
        story.append(("run", "items"))
        yield 1
        if fail:
            raise ValueError("bad")
        story.append(("run", "last"))

    @zbus.endpoint()
    def hidden(self):
        return (n for n in range(3))

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=2)
    async def soon(self, what):
        story.append(("run", what))
        await asyncio.sleep(0)
        if what == "bad":
            raise ValueError("bad")
        story.append(("ran", what))

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=2)
    async def forever(self):
        story.append(("run", "forever"))
        await asyncio.Event().wait()

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=2)
    async def stream(self):
        story.append(("run", "stream"))
        yield 1
        story.append(("ran", "stream"))

    @zbus.endpoint(AnyOne(), lane="gen", concurrency=2)
    def sync_there(self):
        story.append(("run", threading.current_thread() is not threading.main_thread()))
        return 1


@pytest.fixture
def executor() -> Iterator[Executor]:
    """Give an executor whose rings, answers and methods tell one story."""
    story.clear()
    rings: dict[str, Told] = {}
    made = Executor(
        name="actor/0",
        incarnation=1,
        answers=Answers(),
        builtins={"ctl:zbus.ping": lambda: story.append(("run", "ping")), "main:zbus.barrier": lambda: None},
        rings=lambda _, lane: rings.setdefault(lane, Told(lane)),
    )
    made.install(Works(), endpoints_of(Works))
    yield made
    failpoints.configure(None)
    made.close()
    assert made.async_lanes is not None
    wait_until(made.async_lanes.loop.is_closed, what="the end of the loop")


def request(*calls: tuple[str, tuple[Any, ...]], seq: int = 4, lane: str = "main", strict: bool = False) -> Execute:
    """Return a request of these calls."""
    body = encode([[name, args, {}] for name, args in calls])
    return Execute(SESSION, lane, seq, len(calls), body, None, 0, strict, 1, 0)


def test_start_and_end_stand_right_around_the_call(executor: Executor) -> None:
    """The start is marked before the method's first step, the end before anything is made of its result."""
    executor.run_main(request(("add", (1,))))
    assert story == [("begin", 4), ("run", 1), ("end", 4), ("answered", 4), ("finish", 4, "OK")]


def test_a_method_that_raises_has_ended(executor: Executor) -> None:
    """An exception is an end."""
    executor.run_main(request(("bad", ())))
    assert story == [("begin", 4), ("run", "bad"), ("raised", 4), ("finish", 4, "APP_ERROR")]


def test_a_result_that_cannot_be_sent_was_still_executed(executor: Executor) -> None:
    """The end does not wait for the encoding."""
    executor.run_main(request(("unspeakable", ())))
    assert story == [("begin", 4), ("run", "unspeakable"), ("end", 4), ("finish", 4, "APP_ERROR")]


@pytest.mark.parametrize(
    "bad", [request(("missing", ())), Execute(SESSION, "main", 4, 1, [b"\xc1"], None, 0, False, 1, 0)]
)
def test_what_is_never_called_is_never_marked(executor: Executor, bad: Execute) -> None:
    """No such method, an unreadable request: nothing started."""
    executor.run_main(bad)
    assert story == [("finish", 4, "NOT_STARTED")]


@pytest.mark.parametrize("body", [(["add", [1], {}],), {"add": 1}, {"abc"}, "abc", [None], [["add", [1]]], [3]])
def test_what_is_no_list_of_calls_is_answered_and_never_run(executor: Executor, body: Any) -> None:
    """A request that holds something else than calls costs its sender an answer, and nobody anything more."""
    executor.run_main(Execute(SESSION, "main", 4, 1, encode(body), None, 0, False, 1, 0))
    assert story == [("finish", 4, "NOT_STARTED")]


class Argument:
    """Says when it goes."""

    def __del__(self) -> None:
        story.append(("gone",))


@pytest.mark.parametrize("lane", ["main", "gen"])
def test_arguments_go_before_the_caller_hears_of_the_end(
    executor: Executor, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is answered finds the memory of what it sent free again, however slow the thread that ran the call."""
    told = Future.set_result

    def slowly(future: Future[Any], result: Any) -> None:
        told(future, result)
        wait_until(lambda: ("finish", 4, "OK") in story, what="the answer")

    monkeypatch.setattr(Future, "set_result", slowly)
    method = "add" if lane == "main" else "sync_there"
    given = request((method, ()), lane=lane)
    monkeypatch.setattr("zbus.runtime.intake.decode_calls", lambda *_: [[method, [], {"given": Argument()}]])
    monkeypatch.setitem(executor._served._functions, method, lambda given: None)
    (executor.run_main if lane == "main" else executor.dispatch)(given)
    wait_until(lambda: ("finish", 4, "OK") in story, what="the end of the call")
    assert ("gone",) in story[: story.index(("finish", 4, "OK"))]


def test_each_call_of_a_batch_has_its_own_marks(executor: Executor) -> None:
    """In a strict batch the calls after a failure have none."""
    executor.run_main(request(("add", (1,)), ("bad", ()), ("add", (2,)), strict=True))
    assert [entry for entry in story if entry[0] in ("begin", "end", "raised")] == [
        ("begin", 4),
        ("end", 4),
        ("begin", 5),
        ("raised", 5),
    ]
    assert story[-1] == ("finish", 6, "PREDECESSOR")


def test_a_stream_ends_with_its_last_item(executor: Executor) -> None:
    """Its generator runs between the items, so the end comes after them."""
    executor.run_main(request(("items", (False,))))
    assert story == [
        ("begin", 4), ("run", "items"), ("chunk", 0), ("run", "last"), ("end", 4), ("finish", 4, "OK")
    ]  # fmt: skip
    story.clear()
    executor.run_main(request(("items", (True,))))
    assert story[-2:] == [("raised", 4), ("finish", 4, "APP_ERROR")]


def test_a_stream_is_alone_in_its_request(executor: Executor) -> None:
    """A generator that a batch's call returns fails that call, not its neighbours' places."""
    executor.run_main(request(("add", (1,)), ("hidden", ()), ("add", (2,))))
    assert [entry[1:] for entry in story if entry[0] == "finish"] == [(4, "OK"), (5, "APP_ERROR"), (6, "OK")]
    assert ("raised", 5) in story


def test_methods_of_the_bus_on_main_are_marked_and_ctl_is_not(executor: Executor) -> None:
    """``ctl`` answers while the engine runs; its calls change nothing that a caller must know of."""
    executor.run_main(request(("zbus.barrier", ())))
    assert story[0] == ("begin", 4)
    story.clear()
    executor.dispatch(request(("zbus.ping", ()), lane="ctl"))
    wait_until(lambda: story and story[-1][0] == "finish", what="the answer")
    assert story == [("run", "ping"), ("finish", 4, "OK")]


def finished() -> bool:
    """Tell whether the story has come to an answer."""
    return bool(story) and story[-1][0] == "finish"


def test_an_async_method_ends_when_it_has_been_awaited(executor: Executor) -> None:
    """Not when its coroutine was made."""
    executor.dispatch(request(("soon", ("a",)), lane="gen"))
    wait_until(finished, what="the answer")
    assert story == [("begin", 4), ("run", "a"), ("ran", "a"), ("end", 4), ("answered", 4), ("finish", 4, "OK")]
    story.clear()
    executor.dispatch(request(("soon", ("bad",)), lane="gen"))
    wait_until(finished, what="the answer")
    assert story == [("begin", 4), ("run", "bad"), ("raised", 4), ("finish", 4, "APP_ERROR")]


def test_an_async_stream_ends_with_its_last_item(executor: Executor) -> None:
    """As a sync one does."""
    executor.dispatch(request(("stream", ()), lane="gen"))
    wait_until(finished, what="the answer")
    assert story[-3:] == [("ran", "stream"), ("end", 4), ("finish", 4, "OK")]


def test_a_cancelled_async_call_has_ended(executor: Executor) -> None:
    """Its coroutine has unwound."""
    executor.dispatch(request(("forever", ()), lane="gen"))
    wait_until(lambda: ("run", "forever") in story, what="the call")
    executor.cancel(CancelRunning(SESSION, "gen", 4))
    wait_until(finished, what="the answer")
    assert story == [("begin", 4), ("run", "forever"), ("raised", 4), ("finish", 4, "STOPPED")]


def test_a_sync_method_on_an_async_lane_is_marked_where_it_runs(executor: Executor) -> None:
    """In the pool's thread, and not when it was queued."""
    executor.dispatch(request(("sync_there", ()), lane="gen"))
    wait_until(finished, what="the answer")
    assert story == [("begin", 4), ("run", True), ("end", 4), ("answered", 4), ("finish", 4, "OK")]


def test_fail_points_stand_where_they_say(executor: Executor) -> None:
    """Each point is passed once for each call, at its own place between the marks."""
    failpoints.active = lambda name: story.append(("point", name))
    executor.run_main(request(("add", (1,))))
    assert story == [
        ("point", "before_exec"), ("begin", 4), ("point", "after_start"), ("run", 1), ("point", "before_end"),
        ("end", 4), ("point", "after_exec"), ("answered", 4), ("finish", 4, "OK"),
    ]  # fmt: skip
    for lane, call in (("gen", ("soon", ("a",))), ("gen", ("sync_there", ()))):
        story.clear()
        executor.dispatch(request(call, lane=lane))
        wait_until(finished, what="the answer")
        assert [entry[1] for entry in story if entry[0] == "point"] == [
            "before_exec", "after_start", "before_end", "after_exec"
        ]  # fmt: skip
    story.clear()
    executor.dispatch(request(("zbus.ping", ()), lane="ctl"))
    wait_until(finished, what="the answer")
    assert not [entry for entry in story if entry[0] == "point"]


def test_a_raise_at_a_fail_point_is_the_outcome_of_the_call(executor: Executor) -> None:
    """The worker lives on."""
    failpoints.configure("before_end=raise@1")
    executor.run_main(request(("add", (1,)), ("add", (2,))))
    assert [entry[1:] for entry in story if entry[0] == "finish"] == [(4, "APP_ERROR"), (5, "OK")]
