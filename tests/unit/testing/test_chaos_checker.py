from __future__ import annotations

from pathlib import Path

import pytest

from zbus.testing.chaos.checker import check
from zbus.testing.chaos.history import Answer, History, Op, read_history
from zbus.testing.chaos.nemesis import plan
from zbus.testing.chaos.truth import Run, TruthFile, runs_of


def op(call: str, *answers: Answer, number: int = 0, effect: str = "once", took: float = 1.0, wanted: int = 1) -> Op:
    """Make a record of a call by caller ``t0``."""
    return Op(
        call=call,
        shape="single",
        effect=effect,
        thread="t0",
        number=number,
        began=10.0,
        ended=10.0 + took,
        limit_s=5.0,
        answers=list(answers),
        wanted=wanted,
        ordered=True,
    )


def ran(call: str, rank: int = 0, start: int = 0, place: int = 0, *, ended: bool = True, raised: bool = False) -> Run:
    """Make a run."""
    return Run(call, rank, start, place, ended, raised)


def broken(ops: list[Op], *runs: Run) -> dict[str, int]:
    """Return what the checker finds, without zeros."""
    truth: dict[str, list[Run]] = {}
    for run in runs:
        truth.setdefault(run.call, []).append(run)
    found = check(ops, truth)
    kinds = ("duplicates", "lost", "untrue", "disorder", "hangs")
    return {kind: getattr(found, kind) for kind in kinds if getattr(found, kind)}


OK = Answer(0, "OK")
UNKNOWN = Answer(0, "UNKNOWN", "killed by SIGKILL; the call was running")
NOT = Answer(0, "NOT_EXECUTED", "the worker died before it started")


@pytest.mark.parametrize(
    ("ops", "runs"),
    [
        ([op("a", OK)], [ran("a")]),
        ([op("a", Answer(0, "APP_ERROR", "it raised"))], [ran("a", raised=True)]),
        ([op("a", NOT)], []),
        ([op("a", Answer(0, "CANCELLED", "in time"))], []),
        ([op("a", UNKNOWN)], [ran("a", ended=False)]),
        ([op("a", UNKNOWN)], []),
        ([op("a", OK, effect="idempotent")], [ran("a", ended=False), ran("a", start=1)]),
        ([op("a", Answer(-1, "OK"), effect="pure")], [ran("a", rank=1, ended=False), ran("a", rank=2)]),
    ],
)
def test_a_history_that_agrees_with_the_truth_passes(ops, runs):
    """What may happen is not a finding."""
    assert broken(ops, *runs) == {}


@pytest.mark.parametrize(
    ("ops", "runs", "found"),
    [
        ([op("a", OK)], [ran("a"), ran("a", place=5)], {"duplicates": 2}),
        ([op("a", OK)], [ran("a"), ran("a", start=1)], {"duplicates": 1}),
        ([op("a", OK, effect="idempotent")], [ran("a"), ran("a")], {"duplicates": 1}),
        ([op("a", OK, effect="idempotent")], [ran("a"), ran("a", rank=1)], {"duplicates": 1}),
        ([op("a", OK)], [], {"lost": 1}),
        ([op("a", OK)], [ran("a", ended=False)], {"lost": 1}),
        ([op("a", Answer(0, "OK", right=False))], [ran("a")], {"lost": 1}),
        ([op("a", Answer(0, "APP_ERROR", "x"))], [ran("a")], {"lost": 1}),
        ([op("a", Answer(0, ""))], [ran("a")], {"lost": 1}),
        ([op("a", Answer(0, ""), took=6.0)], [ran("a")], {"hangs": 1}),
        ([op("a", OK, wanted=2, took=6.0)], [ran("a")], {"hangs": 1}),
        ([], [ran("a")], {"lost": 1}),
        ([op("a", NOT)], [ran("a")], {"untrue": 1}),
        ([op("a", Answer(0, "CANCELLED", "x"))], [ran("a")], {"untrue": 1}),
        ([op("a", Answer(0, "UNKNOWN", ""))], [ran("a")], {"untrue": 1}),
        ([op("a", Answer(0, "UNKNOWN", "killed; the call was executed, reply lost"))], [], {"untrue": 1}),
        ([op("a", OK), op("b", OK, number=1)], [ran("b", place=1), ran("a", place=2)], {"disorder": 1}),
    ],
)
def test_each_broken_promise_is_found(ops, runs, found):
    """Second runs, lost answers, lies, wrong order and hangs are each counted under their name."""
    assert broken(ops, *runs) == found


def test_ranks_that_start_calls_of_groups_in_different_orders_are_found():
    """Two callers' calls to both ranks must start in one order on both."""
    both = (Answer(0, "OK"), Answer(1, "OK"))
    left, right = op("a", *both, wanted=2), op("b", *both, wanted=2)
    right.thread = "t1"
    runs = [ran("a", place=0), ran("b", place=1), ran("b", rank=1, place=2), ran("a", rank=1, place=3)]
    assert broken([left, right], *runs) == {"disorder": 1}


def test_the_ground_truth_file_gives_back_what_was_noted(tmp_path: Path):
    """Starts and ends, also of two runs of one call, and a run that never ended."""
    file = TruthFile(str(tmp_path / "truth"))
    file.start("a", 0, 0)
    file.end("a", 0, 0)
    file.start("a", 0, 1)
    file.start("b", 1, 0)
    file.end("b", 1, 0, raised=True)
    truth = runs_of(tmp_path / "truth")
    assert [(run.start, run.ended) for run in truth["a"]] == [(0, True), (1, False)]
    assert [(run.rank, run.raised) for run in truth["b"]] == [(1, True)]


def test_a_history_comes_back_from_its_file(tmp_path: Path):
    """Records survive the file."""
    one = op("a", OK)
    with History(tmp_path / "history") as history:
        history.add(one)
    assert read_history(tmp_path / "history") == [one]


def test_a_plan_is_made_by_its_seed_alone():
    """The same seed gives the same faults, another one others; at least one each second, of every kind in time."""
    faults = plan(3, 600, 4)
    assert faults == plan(3, 600, 4) != plan(4, 600, 4)
    assert len(faults) > 600
    assert len({fault.kind for fault in faults}) == 13
    assert all(fault.at < 599 for fault in faults)
