"""A batch of the main lane, run in one loop: what is marked, answered and told of each of its calls."""

from __future__ import annotations

import errno
import io
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import zbus
from zbus.codec import decode, encode
from zbus.engine import endpoints_of
from zbus.protocol.journal import Fate, LaneRing, history
from zbus.protocol.messages import Buffers, CancelRunning, Execute, Kind, Status
from zbus.runtime.executor import Executor

SESSION = b"session-16-bytes"


class Answers:
    """Takes answers as the server does, and keeps what each call was told, in the order of the messages."""

    def __init__(self) -> None:
        self.messages: list[list[tuple[int, str, Any]]] = []
        self.bodies: deque[bytes] = deque()
        self.over = False

    def hold(self, request: Execute, answered: Callable[[int, Sequence[bytes]], None]) -> deque[bytes]:
        self.request, self.answered, self.next, self.over = request, answered, 0, False
        return self.bodies

    def flush(self, *, over: bool = False) -> None:
        if self.bodies:
            bodies = list(self.bodies)
            self.bodies.clear()
            self.answered(self.request.seq + self.next, bodies)
            self.messages.append([(n, "OK", decode((body,))) for n, body in enumerate(bodies, self.next)])
            self.next += len(bodies)
        self.over = over

    def finish(
        self, request: Execute, index: int, kind: Kind, status: Status, buffers: Buffers, *, chunks: int = 0
    ) -> None:
        self.flush()
        assert index == self.next, "answers are in the order of the calls"
        value = decode(buffers) if status is Status.OK else None
        self.messages.append([(index, Status(status).name, value)])
        self.next = index + 1

    def chunk(self, request: Execute, number: int, buffers: Buffers) -> None:
        raise AssertionError


class Works(zbus.Engine):
    """Says what it is asked, and looks at the marks while it runs."""

    look: Callable[[], object] = staticmethod(lambda: None)

    @zbus.endpoint()
    def say(self, what: Any) -> Any:
        return what

    @zbus.endpoint()
    def twice(self, what: Any, *, times: int = 2) -> Any:
        return what * times

    @zbus.endpoint()
    def bad(self) -> None:
        raise ValueError("bad")

    @zbus.endpoint()
    def unspeakable(self) -> object:
        return lambda: None

    @zbus.endpoint()
    def hidden(self) -> Any:
        return (n for n in range(3))

    @zbus.endpoint()
    def looks(self) -> Any:
        return self.look()

    @zbus.endpoint()
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @zbus.endpoint()
    def guarded(self) -> int:
        zbus.checkpoint()
        return 1


class Bench:
    """An executor with its answers and its marks."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.marks = [0] * 2048
        self.prints = [0] * 2048
        self.ring = LaneRing(self.marks, self.prints)
        self.executor = Executor(
            name="actor/0", incarnation=1, answers=self.answers, builtins={}, rings=lambda *_: self.ring
        )
        self.engine = Works()
        self.executor.install(self.engine, endpoints_of(Works))

    def run(
        self, *calls: tuple[Any, ...], seq: int = 4, strict: bool = False, deadline_ns: int | None = None
    ) -> list[tuple[int, str, Any]]:
        """Run a batch and return what each call was told."""
        self.answers.messages.clear()
        listed = [[name, list(args), {}] if type(name) is str else name for name, *args in calls]
        request = Execute(SESSION, "main", seq, len(calls), encode(listed), deadline_ns, 0, strict, 1, 0)
        self.executor.run_main(request)
        assert self.answers.over, "nothing is held once the batch is over"
        return [told for message in self.answers.messages for told in message]

    def fates(self, first: int, count: int) -> list[Fate]:
        """Return what the journal tells of these places."""
        told = history(SESSION, "main", self.marks)
        return [told.fate(seq) for seq in range(first, first + count)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Give one."""
    made = Bench()
    yield made
    made.executor.close()


def test_short_results_leave_in_one_message_and_each_call_has_its_marks(bench: Bench) -> None:
    """Their replies' fingerprints stand before they leave."""
    assert bench.run(*[("say", n) for n in range(5)]) == [(n, "OK", n) for n in range(5)]
    assert len(bench.answers.messages) == 1
    assert bench.fates(4, 6) == [Fate.ENDED] * 5 + [Fate.NEVER_STARTED]
    assert all(bench.prints[seq] for seq in range(4, 9))
    assert bench.executor.done == 5


def test_a_call_that_runs_has_begun_those_before_it_ended_those_behind_did_not_begin(bench: Bench) -> None:
    """As the journal would tell after a kill in its middle; status names the call."""
    bench.engine.look = lambda: [fate.name for fate in bench.fates(4, 3)]
    told = bench.run(("say", 1), ("looks",), ("say", 2))
    assert told[1] == (1, "OK", ["ENDED", "BEGAN", "NEVER_STARTED"])
    bench.engine.look = lambda: [(c["method"], c["seq"]) for c in bench.executor.current_calls()]
    assert bench.run(("say", 1), ("looks",), ("say", 2), seq=7)[1][2] == [("looks", 8)]
    assert bench.executor.current_calls() == []


def test_values_of_all_kinds_keep_their_order(bench: Bench) -> None:
    """Short and long, plain and not, keywords, among failures."""
    long = "x" * 5000
    told = bench.run(
        ("say", 1), ("say", long), ("say", [1, (2, 3)]), ("bad",), ("say", 1 << 70), (["twice", ["a"], {"times": 3}],),
        ("unspeakable",), ("hidden",), ("missing",), ("say", None),
    )  # fmt: skip
    assert told == [
        (0, "OK", 1), (1, "OK", long), (2, "OK", [1, (2, 3)]), (3, "APP_ERROR", None), (4, "OK", 1 << 70),
        (5, "OK", "aaa"), (6, "APP_ERROR", None), (7, "APP_ERROR", None), (8, "NOT_STARTED", None), (9, "OK", None),
    ]  # fmt: skip
    assert bench.fates(4, 10) == [
        Fate.ENDED, Fate.ENDED, Fate.ENDED, Fate.RAISED, Fate.ENDED, Fate.ENDED, Fate.ENDED, Fate.RAISED,
        Fate.NEVER_STARTED, Fate.ENDED,
    ]  # fmt: skip


def test_a_strict_batch_ends_at_its_first_failure(bench: Bench) -> None:
    """What stands behind it is not begun, and told so."""
    told = bench.run(("say", 1), ("bad",), ("say", 2), ("say", 3), strict=True)
    assert [word for _, word, _ in told] == ["OK", "APP_ERROR", "PREDECESSOR", "PREDECESSOR"]
    assert bench.fates(4, 4)[2:] == [Fate.NEVER_STARTED] * 2


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_cancelled_meanwhile_does_not_begin(bench: Bench, strict: bool) -> None:
    """A cancel between two calls; the one that runs sees it at its checkpoint."""
    bench.engine.look = lambda: bench.executor.cancel(CancelRunning(SESSION, "main", 4))
    told = bench.run(("say", 1), ("looks",), ("say", 2), ("guarded",), strict=strict)
    last = "PREDECESSOR" if strict else "CANCELLED"
    assert [word for _, word, _ in told] == ["OK", "OK", "CANCELLED", last]
    assert bench.fates(4, 4)[2:] == [Fate.NEVER_STARTED] * 2
    assert bench.run(("say", 1), ("guarded",), seq=4)[1] == (1, "OK", 1)


def test_what_is_too_late_does_not_begin(bench: Bench) -> None:
    """The deadline runs out in the second call."""
    told = bench.run(("say", 1), ("nap", 0.4), ("say", 2), deadline_ns=time.monotonic_ns() + 300_000_000)
    assert [word for _, word, _ in told][1:] == ["OK", "EXPIRED"]


def test_results_are_not_held_for_longer_than_a_moment(bench: Bench) -> None:
    """A call that takes more than a millisecond sends what stands before it, and itself."""
    told = bench.run(("say", 1), ("nap", 0.005), ("say", 2))
    assert [word for _, word, _ in told] == ["OK"] * 3
    assert [len(message) for message in bench.answers.messages] == [2, 1]


def test_methods_of_a_batch_are_known_by_their_places(bench: Bench) -> None:
    """For whoever asks later what became of a place."""
    bench.run(("say", 1), ("bad",), seq=10)
    assert [bench.executor.method_of(SESSION, "main", seq) for seq in (9, 10, 11, 12)] == ["", "say", "bad", ""]
    assert bench.executor.method_of(SESSION, "other", 10) == ""


class FullDisk(io.TextIOBase):
    """A log on a disk that is full."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_that_cannot_be_logged_is_answered_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's disk is full: the call that raised, the one that was stopped and the others have their answers."""
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert bench.run(("bad",), ("say", 1), ("say", 2)) == [(0, "APP_ERROR", None), (1, "OK", 1), (2, "OK", 2)]
    bench.engine.look = lambda: (bench.executor.cancel(CancelRunning(SESSION, "main", 4)), zbus.checkpoint())
    assert [word for _, word, _ in bench.run(("looks",), ("say", 1))] == ["STOPPED", "CANCELLED"]
    bench.answers.messages, bench.answers.next = [], 0
    bench.executor.run_main(Execute(SESSION, "main", 9, 1, encode([["bad", [], {}]]), None, 0, False, 1, 0))
    assert bench.answers.messages == [[(0, "APP_ERROR", None)]]
