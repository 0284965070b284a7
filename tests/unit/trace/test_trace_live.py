from __future__ import annotations

from zbus.trace.events import Event, Instant
from zbus.trace.live import Live


def run(end_s: float, dur_s: float, method: str = "train") -> Event:
    """Return a run span of a worker."""
    args = {"kind": "run", "method": method}
    return Event(f"run {method}", "X", (end_s - dur_s) * 1e6, dur_s * 1e6, 1, 1, "rpc", args=args)


def mark(step: int, at_s: float) -> Event:
    """Return a step mark."""
    return Instant("zbus_step", "i", at_s * 1e6, None, 1, 1, "instr", args={"step": step}, s="g")


def test_a_step_is_told_with_its_slowest_rank():
    """One line per step mark: wall time, busy time per rank, and how much longer the slowest took than its peers."""
    live = Live()
    for step in range(3):
        for rank, busy in enumerate((0.5, 0.9, 0.3)):
            live.feed("actor", rank, [run(step + 0.95, busy)], 0)
        live.feed("controller", 0, [mark(step, step + 1.0)], 0)
    for rank in range(3):
        live.feed("actor", rank, [run(9.0, 0.1)], 0)
    lines = live.lines(0, 0)
    assert [(line["step"], line["wall_s"]) for line in lines] == [(0, None), (1, 1.0), (2, 1.0)]
    worst = lines[1]["slowest"][0]
    assert (worst["who"], worst["busy_s"], round(worst["ratio"], 3)) == ("actor/1", 0.9, 2.25)
    assert [line["n"] for line in live.lines(2, 0)] == [3]


def test_a_step_waits_for_ranks_that_have_not_told_of_it_yet():
    """The controller's mark may come first: the step closes when every speaking rank is past it, or after a while."""
    live = Live()
    live.feed("actor", 0, [run(0.5, 0.5)], 0)
    live.feed("controller", 0, [mark(0, 1.0)], 0)
    assert live.lines(0, 1_000_000_000) == []
    live.feed("actor", 0, [run(0.99, 0.2), run(1.5, 0.1)], 1_000_000_000)
    [line] = live.lines(0, 1_000_000_000)
    assert line["busy_s"] == {"actor/0": 0.7}
    live.feed("controller", 0, [mark(1, 2.0)], 2_000_000_000)
    assert live.lines(1, 2_000_000_000) == []
    assert len(live.lines(1, 5_500_000_000)) == 1
    live.feed("controller", 0, [mark(2, 3.0)], 6_000_000_000)
    live.gone("actor", 0)
    assert len(live.lines(2, 6_000_000_000)) == 1


def test_without_marks_each_call_on_a_role_is_told():
    """The n-th call of a method on all ranks of a role is a line, told when all have it; the bus's own are not."""
    live = Live()
    for number, (first, second) in enumerate([(0.1, 0.1), (0.1, 0.4)]):
        live.feed("actor", 0, [run(number + 0.5, first), run(number + 0.5, 1, "zbus.ping")], 0)
        live.feed("actor", 1, [run(number + 0.5, second)], 0)
    assert live.lines(0, 0) == []
    lines = live.lines(0, 6_000_000_000)
    assert [(line["method"], line["call"], round(line["wall_s"], 3)) for line in lines][-1] == ("train", 1, 0.4)
    assert lines[-1]["slowest"][0]["who"] == "actor/1"


def test_memory_stays_bounded():
    """A long run without marks, many names and many steps keep a bounded number of things."""
    live = Live()
    for number in range(30_000):
        live.feed("actor", number % 2, [run(number, 0.5, f"m{number}")], 0)
    for step in range(5_000):
        live.feed("controller", 0, [mark(step, 40_000.0 + step)], 0)
    live.lines(0, 10**12)
    assert len(live._runs) <= 20_000
    assert len(live._totals) <= 500
    assert len(live.lines(0, 10**12)) <= 1000
