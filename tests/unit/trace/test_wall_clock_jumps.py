"""A wall clock that jumps while a run is recorded, and between the starts of a rank: times stay where they were."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from traceview.merge import merge
from zbus import trace
from zbus.trace import tracefile
from zbus.trace.blocks import ClockLine
from zbus.trace.control import writer_of

HOUR_NS = 3_600_000_000_000
EPOCH = {"run_epoch_wall_ns": time.time_ns(), "run_epoch_mono_ns": time.monotonic_ns()}


class Jumping:
    """The machine's clocks, with a wall clock that is set at will and a monotonic clock ahead by ``ahead_ns``."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.wall_off_ns = 0
        self.ahead_ns = ahead_ns

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def wall_ns(self) -> int:
        return time.time_ns() + self.wall_off_ns


@pytest.fixture(autouse=True)
def _no_tracer_left():
    yield
    trace.reset()


def config(root: Path) -> dict:
    """Return the settings of a process of the controller's machine."""
    return {"root": str(root), "run": "e/t", **EPOCH, "clock_boot_id": tracefile.boot_id()}


def true_us(root: Path, **more) -> list[tuple[str, float]]:
    """Merge and return how late (+) or early each span of work is, in µs."""
    output = root / "o.json"
    report = merge([str(root)], output, jobs=1, **more)
    zero = report.processes[0].shift_us - EPOCH["run_epoch_mono_ns"] / 1000
    events = json.loads(output.read_text())["traceEvents"]
    names = {p.pid: p.clock for p in report.processes}
    return [
        (names[e["pid"]], e["ts"] - zero - e["args"]["true_ns"] / 1000)
        for e in events
        if e["ph"] == "X" and "true_ns" in e.get("args", {})
    ]


def work() -> None:
    """Record a span that knows its true start."""
    with trace.span("work", true_ns=time.monotonic_ns()):
        pass


def test_a_jump_of_the_wall_clock_moves_nothing_on_one_machine(tmp_path):
    """An hour back while recording, and another start of the rank after it: all on the controller's clock exactly."""
    trace.configure(config(tmp_path), role="controller", rank=0)
    work()
    clock = Jumping()
    for start in range(3):
        trace.configure(config(tmp_path), role="actor", rank=0, start=start, clock=clock)
        work()
        clock.wall_off_ns -= HOUR_NS
        work()
        trace.reset("actor")
    trace.reset()
    found = true_us(tmp_path)
    assert [how for how, _ in found] == ["reference"] + ["shared"] * 6
    assert all(0 <= late < 500_000 for _, late in found)


@pytest.mark.parametrize("measured", [True, False])
def test_on_another_machine_measured_offsets_count_and_not_its_wall_clock(tmp_path, monkeypatch, measured):
    """A host whose wall clock is an hour off places its epoch wrongly; what was measured counts, if there is any."""
    trace.configure(config(tmp_path), role="controller", rank=0)
    work()
    clock = Jumping(ahead_ns=5_000_000_000)
    clock.wall_off_ns = -HOUR_NS
    settings = config(tmp_path)
    monkeypatch.setattr(tracefile, "boot_id", lambda: "another boot")
    tracer = trace.configure(settings, role="actor", rank=0, clock=clock)
    writer = writer_of(tracer)
    assert writer is not None
    work()
    clock.wall_off_ns = 0
    work()
    if measured:
        at, ref = clock.monotonic_ns(), (settings["clock_boot_id"], tracefile.time_namespace())
        writer.note_clock(ClockLine(at, -clock.ahead_ns, 1000, 2000, 128, 0, *ref))
    trace.reset()
    [(_, late), *others] = true_us(tmp_path)
    assert 0 <= late < 500_000
    assert [how for how, _ in others] == ["measured" if measured else "wall"] * 2
    if measured:
        assert all(0 <= late < 500_000 for _, late in others)
    else:
        assert all(abs(late) > 1e9 for _, late in others)
