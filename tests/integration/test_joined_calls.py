"""Calls that are submitted one after another travel together; each of them has its own end all the same."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zbus
from controller import Controller, Role
from controller.group import Group
from launching import HERE, launch
from waiting import scaled, wait_until

CALLS = 200


def role(truth: Path, **fields: Any) -> Role:
    """Return a role of one rank that writes to ``truth``."""
    return Role("joined_engine:Noted", replicas=1, sys_path=[str(HERE)], kwargs={"truth": str(truth)}, **fields)


def began(truth: Path) -> Counter[int]:
    """Return how often each number began."""
    return Counter(map(int, truth.read_text().split())) if truth.exists() else Counter()


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Controller, Path]]:
    """One trial for the tests that leave it as they found it, and its truth."""
    root = tmp_path_factory.mktemp("runs")
    with launch(root, {"actor": role(root / "truth")}) as bus:
        yield bus, root / "truth"


@pytest.fixture
def one(trial: tuple[Controller, Path]) -> Any:
    """Return its rank."""
    return trial[0].group("actor")[0]


@pytest.fixture
def truth(trial: tuple[Controller, Path]) -> Path:
    """Return its truth, empty."""
    trial[1].write_text("")
    return trial[1]


def test_calls_of_several_methods_run_in_their_order_and_each_has_its_answer(one, truth):
    """Results, errors and large answers come back to the call they belong to; a failure skips nothing behind it."""
    futures = []
    for number in range(0, CALLS, 4):
        futures += [
            one.once.submit(number), one.fails.submit(number + 1), one.many.submit(number + 2),
            one.again.submit(number + 3),
        ]  # fmt: skip
    for number, future in enumerate(futures):
        if number % 4 == 1:
            with pytest.raises(ValueError, match=f"number {number}$"):
                future.result()
        else:
            wanted = [number * 2, None, list(range(2_000)), number * 3][number % 4]
            assert future.result() == wanted
            assert future.result() is future.result()
        assert future.done()
    assert truth.read_text().split() == [str(number) for number in range(CALLS)]


def test_a_cancelled_call_takes_none_with_it(one, truth, tmp_path):
    """The cancel of one call of many that wait at a worker ends that one alone, and at once."""
    gate = tmp_path / "go"
    blocker = one.until.submit(str(gate), -1)
    futures = [one.once.submit(number) for number in range(CALLS)]
    unwanted = range(40, CALLS, 7)
    try:
        for number in unwanted:
            futures[number].cancel()
        for number in unwanted:  # while the call before them runs
            with pytest.raises(zbus.CallCancelled):
                futures[number].result(scaled(10))
    finally:
        gate.touch()
    assert blocker.result() == -1
    left = [number for number in range(CALLS) if number not in unwanted]
    assert [futures[number].result() for number in left] == [number * 2 for number in left]
    assert truth.read_text().split() == ["-1", *map(str, left)]


def test_deadlines_are_those_of_each_call(one, truth, tmp_path):
    """Calls with a short deadline expire in the queue, proved not to have run; those between them run."""
    gate = tmp_path / "go"
    blocker = one.until.submit(str(gate), -1)
    soon = one.options(deadline=0.3)
    futures = [(soon if number % 2 else one).once.submit(number) for number in range(CALLS)]
    try:
        for number in range(1, CALLS, 2):
            with pytest.raises(zbus.CallTimeout) as caught:
                futures[number].result()
            assert caught.value.outcome == "NOT_EXECUTED"
    finally:
        gate.touch()
    assert blocker.result() == -1
    assert [futures[number].result() for number in range(0, CALLS, 2)] == [2 * n for n in range(0, CALLS, 2)]
    assert truth.read_text().split() == ["-1", *map(str, range(0, CALLS, 2))]


def test_what_is_called_behind_them_comes_behind_them(one, truth):
    """A blocking call, and a batch, begin after every call that was submitted before."""
    for start in (0, 100):
        for number in range(start, start + 40):
            one.once.submit(number)
        if start:
            with one.batch() as batch:
                batch.once(start + 40)
        else:
            assert one.once(start + 40) == 80
    assert truth.read_text().split() == [str(number) for number in (*range(41), *range(100, 141))]


def test_calls_leave_though_nobody_waits_for_them(one, truth, tmp_path):
    """A program that only submits, and looks at nothing of the bus again, has all of its calls run."""
    for number in range(CALLS):
        one.once.submit(number)
    wait_until(lambda: len(truth.read_text().split()) == CALLS, what="every call to run")


def test_callbacks_iteration_and_outcomes_work_as_of_any_future(one, truth):
    """Whatever else a future can be asked works of one that is out with others."""
    futures = [one.once.submit(number) for number in range(CALLS)]
    done = threading.Event()
    futures[CALLS - 1].add_done_callback(lambda _: done.set())
    assert [one_rank.value for one_rank in futures[50].as_completed()] == [100]
    assert done.wait(scaled(10))
    assert futures[60].outcomes()[0].outcome == "OK"
    assert futures[70].results() == {0: 140}
    assert futures[80].exception() is None
    assert "1/1 answered" in repr(futures[90])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that falls into a deallocation
def test_an_interrupt_among_them_loses_none(one, truth):
    """An interrupt while calls are submitted and awaited: each call that was made has its answer, and ran once."""
    futures: dict[int, Any] = {}
    armed = False
    interrupts = number = 0

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        while number < 2_000 or interrupts < 20:
            try:
                armed = True
                futures[number] = one.once.submit(number)
                if number % 100 == 99:
                    futures[number].result()
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
            number += 1  # an interrupted one may have left
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for made, future in futures.items():
        assert future.result(scaled(30)) == made * 2
    ran = began(truth)
    assert set(ran.values()) == {1}
    assert set(futures) <= set(ran)


@pytest.mark.parametrize("restart", ["never", "one"])
def test_a_worker_killed_among_them_leaves_each_its_own_outcome(tmp_path, restart):
    """Kill -9: those before it have run, it may have, those behind it have not; with a restart the safe ones go on."""
    truth = tmp_path / "truth"
    with launch(tmp_path / "runs", {"actor": role(truth, restart=restart)}) as bus:
        actor: Group = bus.group("actor")
        one = actor[0]
        assert one.once(-1) == -2
        killer = 100
        futures = [
            one.dies.submit(n) if n == killer else (one.again if n % 2 else one.once).submit(n) for n in range(CALLS)
        ]
        ends: list[tuple[str, Any]] = []
        for future in futures:
            try:
                ends.append(("OK", future.result(scaled(30))))
            except zbus.CallError as error:
                ends.append((str(error.outcome), error.rank))
        ran = began(truth)
    assert ends[killer][0] == "UNKNOWN"
    for number, (outcome, value) in enumerate(ends):
        if outcome == "OK":
            assert value == number * (3 if number % 2 else 2)
            assert ran[number] >= 1
        else:
            assert value == 0, "the rank is named"
        if outcome == "NOT_EXECUTED":
            assert ran[number] == 0, number
        if outcome == "UNKNOWN":
            assert ran[number] == 1, number
        if number % 2 == 0:
            assert ran[number] <= 1, f"{number} is not declared safe to run twice"
    if restart == "one":
        assert {outcome for outcome, _ in ends[killer + 1 :: 2]} == {"OK"}
    else:
        assert {outcome for outcome, _ in ends[killer + 1 :]} == {"NOT_EXECUTED"}
