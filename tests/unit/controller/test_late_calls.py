"""Where ranks are, from the text of a dump; and which calls are stuck, from a clock and who has answered."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from controller.late import Late, Patience
from controller.places import IDLE, fold, place_of
from controller.stacks import Dump
from zbus.protocol.batch import BatchSlots
from zbus.protocol.messages import Outcome, OutcomeKind

BUS = """Thread 0x00007f01 (most recent call first):
  File "/opt/lib/python3.11/site-packages/zbus/transport/reactor.py", line 9 in poll
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
MAIN = """Current thread 0x00007f02 (most recent call first):
{frames}  File "/opt/lib/python3.11/site-packages/zbus/runtime/executor.py", line 200 in run_main
  File "/opt/lib/python3.11/site-packages/workers/worker.py", line 120 in main
  File "<frozen runpy>", line 88 in _run_code
"""


def main(*frames: str) -> str:
    """Return a dump whose main thread has these frames, innermost first."""
    return BUS + MAIN.format(frames="".join(f"  File {frame}\n" for frame in frames))


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (['"/u/engines.py", line 12 in hold'], "/u/engines.py:12 in hold"),
        (
            ['"/u/engines.py", line 12 in hold', '"/u/engines.py", line 40 in step'],
            "/u/engines.py:12 in hold < engines.py:40 in step",
        ),
        (
            ['"/usr/lib/python3.11/threading.py", line 327 in wait', '"/u/engines.py", line 3 in step'],
            "/u/engines.py:3 in step (in threading.py:327 in wait)",
        ),
        (
            ['"/opt/site-packages/torch/distributed/c10d.py", line 7 in all_reduce', '"/u/e.py", line 3 in step'],
            "/u/e.py:3 in step (in c10d.py:7 in all_reduce)",
        ),
        (['"/opt/site-packages/trainer/loop.py", line 7 in fit'], "/opt/site-packages/trainer/loop.py:7 in fit"),
        ([], "no code of the engine: it waits in the bus, or in a coroutine"),
    ],
)
def test_the_place_is_the_innermost_frame_of_the_users(frames: list[str], place: str) -> None:
    """Frames of zbus are left out; a library is named only where the engine waits in it."""
    assert place_of(main(*frames)) == place


def test_what_the_worker_was_started_by_is_no_place() -> None:
    """A packaged library outside of the executor's frames, such as that of the command line, is none of the engine."""
    started = '  File "/opt/site-packages/click/core.py", line 9 in invoke\n'
    assert place_of(main() + started) == IDLE
    assert place_of(main('"/opt/site-packages/trainer/loop.py", line 7 in fit') + started).endswith("loop.py:7 in fit")


def test_the_thread_that_serves_is_told_rather_than_a_helper_of_the_engine() -> None:
    """A data loader's thread is no place of the call."""
    helper = 'Thread 0x00007f03 (most recent call first):\n  File "/u/loader.py", line 5 in load\n\n'
    assert place_of(helper + main('"/u/engines.py", line 12 in hold')) == "/u/engines.py:12 in hold"


@pytest.mark.parametrize("text", ["", "\0\0", "Fatal Python error", '  File "x", line 1 in f\n', "Thread 0x"])
def test_text_that_is_no_dump_has_no_place(text: str) -> None:
    """Torn or foreign text is read without an error."""
    assert place_of(text) == ""


def test_identical_places_are_folded_the_largest_first() -> None:
    """Ranks in order within a place."""
    assert fold({3: "b", 0: "a", 2: "b", 1: "b", 4: "a"}) == [([1, 2, 3], "b"), ([0, 4], "a")]


class Stacks:
    """Stands in for the collector."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, record: Any) -> None:
        self.asked.append(record)

    def get(self, _incarnation: int, _timeout_s: float) -> Dump:
        return Dump("e.py:1 in f", "stacks/a.1.0.txt", 0.0)

    def close(self) -> None:
        """Nothing to do."""


class Call:
    """A call to three ranks that is out."""

    def __init__(self, *, streams: bool = False, state: str = "running since 9.0 s") -> None:
        peers = [SimpleNamespace(incarnation=rank) for rank in range(3)]
        roster = SimpleNamespace(role="actor")
        self.order = SimpleNamespace(roster=roster, ranks=[0, 1, 2], peers=peers, methods=("train",), streams=streams)
        self.slots = BatchSlots(3, 1)
        self.state = state

    def answer(self, *members: int) -> None:
        for member in members:
            self.slots.fill(member, 0, Outcome(OutcomeKind.OK))

    def late(self, call: int) -> dict[int, str]:
        return dict.fromkeys(self.slots.missing(call), self.state)


class Watch:
    """A ``Late`` with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self.stacks = Stacks()
        self.late = Late(self.stacks, Patience(60.0, 3.0), lambda peer: peer)  # type: ignore[arg-type]
        self._caplog = caplog
        monkeypatch.setattr("controller.late.time.monotonic", lambda: self.now)
        caplog.set_level(logging.WARNING, "zbus.members")

    def run(self, seconds: float) -> list[str]:
        """Let time pass; return what was logged meanwhile."""
        self._caplog.clear()
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.late.look()
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Watch:
    """Give a watch."""
    return Watch(monkeypatch, caplog)


def test_a_call_is_stuck_after_its_time_and_told_again_at_twice_that(watch: Watch) -> None:
    """Nothing before 60 s; then who, what, since when, where; again at 120 s; nobody else is asked for stacks."""
    watch.late.began(Call())
    assert watch.run(59) == []
    (words,) = watch.run(3)
    assert words.startswith("stuck: actor/0-2 have not answered `train` for 60.")
    assert words.endswith("\n  actor/0-2 in e.py:1 in f; all threads in stacks/a.1.0.txt")
    assert watch.run(56) == []
    assert len(watch.run(6)) == 1


def test_a_rank_far_slower_than_its_peers_is_stuck_sooner(watch: Watch) -> None:
    """Two of three answered after 5 s: the third is stuck after 15 s, three times as long."""
    call = Call()
    watch.late.began(call)
    watch.run(5)
    call.answer(0, 2)
    assert watch.run(9) == []
    (words,) = watch.run(3)
    assert words.startswith("stuck: actor/1 has not answered `train` for 1")
    assert "2 others took at most " in words


def test_quick_peers_make_nobody_stuck_within_ten_seconds(watch: Watch) -> None:
    """A factor of milliseconds means nothing."""
    call = Call()
    call.answer(0, 2)
    watch.late.began(call)
    assert watch.run(9.5) == []
    assert len(watch.run(3)) == 1


def test_a_method_that_always_takes_long_is_not_stuck(watch: Watch) -> None:
    """Once a call has taken 100 s, the next is stuck only after 300."""
    call = Call()
    watch.late.began(call)
    assert len(watch.run(100)) == 1
    call.answer(0, 1, 2)
    watch.late.ended(call)
    watch.run(1)
    watch.late.began(Call())
    assert watch.run(290) == []
    assert len(watch.run(20)) == 1


def test_a_call_is_not_late_for_time_in_which_its_caller_was_stopped(watch: Watch) -> None:
    """Row 58: ten minutes of suspend make nobody stuck, and hide nobody who is."""
    watch.late.began(Call())
    assert watch.run(30) == []
    watch.now += 600.0
    assert watch.run(29) == []
    assert len(watch.run(3)) == 1


@pytest.mark.parametrize("call", [Call(streams=True), Call(state="arrived, not started"), Call(state="dead: exit 1")])
def test_streams_and_calls_that_do_not_run_are_not_stuck(watch: Watch, call: Call) -> None:
    """A stream may flow for ever; what waits behind another call is not late itself."""
    watch.late.began(call)
    assert watch.run(200) == []
    assert watch.stacks.asked == []
