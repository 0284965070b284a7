from __future__ import annotations

import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from sidecar_kit import TrialFiles
from waiting import wait_until
from zbus.clock import ClockId, boot_id, time_namespace
from zbus.registry.file import FileRegistry
from zbus.trace import wire
from zbus.trace.clocksync import ClockFilter, ClockPoint, offset_at
from zbus.trace.collector import Collector
from zbus.trace.config import TraceConfig
from zbus.trace.export import SIDECAR_KEY, Exporter
from zbus.trace.tracer import Tracer
from zbus.trace.writer import TraceWriter
from zbus.transport.sockets import SocketFactory

SKEWS = [(5_000_000_000, 50e-6), (-5_000_000_000, -50e-6), (0, 0.0)]


class Skewed:
    """A clock ahead of the machine's by ``ahead_ns`` and running off by ``drift``."""

    def __init__(self, ahead_ns: int, drift: float) -> None:
        self.ahead_ns, self.drift = ahead_ns, drift
        self.base = time.monotonic_ns()

    def of(self, real_ns: int) -> int:
        """Return what this clock shows when the machine's shows ``real_ns``."""
        return real_ns + self.ahead_ns + round((real_ns - self.base) * self.drift)

    def real(self, shown_ns: int) -> int:
        """Return what the machine's clock shows when this one shows ``shown_ns``."""
        return self.base + round((shown_ns - self.ahead_ns - self.base) / (1 + self.drift))

    def monotonic_ns(self) -> int:
        return self.of(time.monotonic_ns())

    def wall_ns(self) -> int:
        return time.time_ns() + self.ahead_ns


class Network:
    """A simulated link between a reference clock and a skewed one; time is only counted."""

    def __init__(self, seed: int, skew: tuple[int, float], *, there_us: float, back_us: float, load_us: float) -> None:
        self.rng = random.Random(seed)
        self.clock = Skewed(*skew)
        self.clock.base = 0
        self.there_us, self.back_us, self.load_us = there_us, back_us, load_us

    def delay(self, least_us: float) -> int:
        """Return one way's time: never below the least, with a long tail under load."""
        return round((least_us + self.rng.expovariate(1 / self.load_us)) * 1000)

    def exchange(self, real_ns: int) -> tuple[int, int, int, int]:
        """Return the four timestamps of an exchange begun at ``real_ns``."""
        there, busy, back = self.delay(self.there_us), self.delay(1), self.delay(self.back_us)
        arrived = real_ns + there
        left = arrived + busy
        return self.clock.of(real_ns), arrived, left, self.clock.of(left + back)

    def truth(self, at_ns: int) -> int:
        """Return the true offset when the skewed clock shows ``at_ns``."""
        return self.clock.real(at_ns) - at_ns


def run(network: Network, seconds: float, *, window_s: float = 30.0, every_s: float = 0.25) -> list[ClockPoint]:
    """Exchange for some time, in a burst first; return the points."""
    clocks = ClockFilter(window_ns=round(window_s * 1e9), min_samples=100)
    points, real = [], 1_000_000_000
    for number in range(round(seconds / every_s) + 128):
        point = clocks.add(*network.exchange(real))
        if point is not None:
            points.append(point)
        real += 5_000_000 if number < 128 else round(every_s * 1e9)
    last = clocks.finish()
    return points + ([last] if last is not None else [])


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("seed", range(5))
def test_idle_symmetric_links_give_offsets_within_25_us(skew, seed):
    """Clocks 5 s and 50 ppm apart over an idle link: every offset, also between the points, is right to 25 µs."""
    network = Network(seed, skew, there_us=40, back_us=40, load_us=10)
    points = run(network, 300)
    assert len(points) > 5
    for at in range(points[0].at_ns, points[-1].at_ns, 1_000_000_000):
        offset, bound = offset_at(points, at)
        assert abs(offset - network.truth(at)) <= min(25_000, bound)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(
    ("there_us", "back_us", "load_us"), [(40, 5000, 10), (20_000, 50, 10), (40, 40, 30_000), (10, 3000, 5000)]
)
def test_the_true_error_never_exceeds_the_bound(skew, there_us, back_us, load_us):
    """Asymmetric and loaded links make the bound wider, never wrong: inside, before and after the points."""
    for seed in range(10):
        network = Network(seed, skew, there_us=there_us, back_us=back_us, load_us=load_us)
        points = run(network, 120)
        for at in range(points[0].at_ns - 5_000_000_000, points[-1].at_ns + 60_000_000_000, 3_000_000_000):
            offset, bound = offset_at(points, at)
            assert abs(offset - network.truth(at)) <= bound


def test_the_drift_is_said():
    """From window to window the slope shows the drift: 50 ppm fast is minus 50,000 ppb of offset."""
    points = run(Network(1, (0, 50e-6), there_us=40, back_us=40, load_us=5), 200)
    assert points[0].drift_ppb == 0
    for before, point in pairwise(points[1:]):
        assert before.at_ns < point.at_ns
        assert abs(point.drift_ppb + 50_000) < 2_000


@pytest.mark.parametrize("by_s", [2.0, -2.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_a_jump_begins_a_new_line_and_the_bound_holds_on_both_sides(seed, by_s):
    """A host that sleeps, or a clock that is set, is seen with the next exchange; nothing before or after it bends."""
    network = Network(seed, SKEWS[0], there_us=40, back_us=40, load_us=200)
    clocks = ClockFilter(window_ns=5_000_000_000, min_samples=20)
    points, truth, real = [], [], 1_000_000_000
    for number in range(300):
        if number == 150:
            network.clock.ahead_ns += round(by_s * 1e9)
            real += max(0, round(-by_s * 1e9))  # asleep: our clock stood still, it did not go back
        stamps = network.exchange(real)
        if number != 149:  # the last moment before is not sampled
            truth.append((stamps[0], network.truth(stamps[0])))
            point = clocks.add(*stamps)
            if point is not None:
                points.append(point)
        real += 250_000_000
    assert clocks.jumps == 1
    for at, true in truth:
        offset, bound = offset_at(points, at)
        assert abs(offset - true) <= bound
    jumps = [(a, b) for a, b in pairwise(points) if abs(b.offset_ns - a.offset_ns + by_s * 1e9) < 1e7]
    [(before, after)] = jumps
    assert 0 < after.at_ns - before.at_ns - max(0, by_s * 1e9) < 1_100_000_000
    assert after.drift_ppb == 0


def test_few_exchanges_end_a_window_too():
    """Where questions are rare a window ends after twice its time, with what it has."""
    network = Network(1, SKEWS[0], there_us=40, back_us=40, load_us=10)
    clocks = ClockFilter(window_ns=30_000_000_000, min_samples=128)
    found = [clocks.add(*network.exchange(1_000_000_000 + n * 10_000_000_000)) for n in range(30)]
    assert sum(point is not None for point in found) == 4


def test_impossible_exchanges_are_counted_and_ignored():
    """An answer before the question, or one that took longer than the whole, tells nothing."""
    clocks = ClockFilter(min_samples=1)
    assert clocks.add(100, 5, 6, 99) is None
    assert clocks.add(100, 9, 5, 200) is None
    assert clocks.add(100, 0, 500, 200) is None
    assert clocks.finish() is None
    assert clocks.rejected == 3


def test_a_single_point_holds_everywhere_with_a_growing_bound():
    """Far from the only point the bound grows by what sane clocks may part."""
    point = ClockPoint(1_000_000_000, 77, 1000, 2000, 128)
    assert offset_at([point], 1_000_000_000) == (77, 1000)
    assert offset_at([point], 2_000_000_000) == (77, 1000 + 200_000)
    with pytest.raises(ValueError, match="no clock points"):
        offset_at([], 0)


@pytest.mark.alone
@pytest.mark.parametrize("skew", SKEWS[:2])
def test_a_process_on_another_clock_writes_its_offset_to_the_sidecars(short_dir: Path, monkeypatch, skew):
    """Over real sockets a clock 5 s and 50 ppm off gets an offset right to 25 µs, with a bound that holds."""
    clock = Skewed(*skew)
    monkeypatch.setattr("zbus.trace.export.clock_id", lambda: ClockId("another boot", 1))
    (short_dir / "registry").mkdir(mode=0o700)
    factory = SocketFactory(max_sockets=16)
    collector = Collector(short_dir / "traces", factory)
    endpoints = collector.bind([f"ipc://{short_dir}/s"])
    record = wire.SidecarRecord(endpoints=endpoints, boot_id=boot_id(), time_ns=time_namespace())
    registry = FileRegistry(short_dir / "registry")
    registry.put(SIDECAR_KEY, msgspec.json.encode(record))
    registry.close()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: collector.serve(stop.is_set))
    thread.start()
    writer = TraceWriter(
        Tracer("actor", 0, clock=clock), TraceConfig(root=str(short_dir / "traces"), flush_period_s=0.05), clock=clock
    )
    writer._open_file()
    exporter = Exporter(writer, short_dir / "registry", record)
    try:
        assert exporter.greet(5.0)
        wait_until(lambda: (exporter.settle(), exporter._clocks.settled)[1], what="a full window")
        exporter.close(writer.counts)
    finally:
        stop.set()
        thread.join()
        writer._file.close()
        collector.close()
        factory.close()
    lines = TrialFiles(short_dir).named("zbus_clock")
    assert lines
    for line in lines:
        facts = line["args"]
        assert (facts["ref_boot_id"], facts["ref_time_ns"]) == (boot_id(), time_namespace())
        error = abs(facts["offset_ns"] - (clock.real(facts["at_ns"]) - facts["at_ns"]))
        assert error <= facts["bound_ns"]
    first = lines[0]["args"]
    assert first["n"] >= 128
    error = abs(first["offset_ns"] - (clock.real(first["at_ns"]) - first["at_ns"]))
    assert error <= 25_000 or first["rtt_ns"] > 100_000, "an idle link gives 25 µs"


def test_one_clock_asks_nothing(short_dir: Path):
    """Processes of one boot and time namespace share the clock: no samples, no clock lines."""
    writer = TraceWriter(Tracer("actor", 0), TraceConfig(root=str(short_dir / "traces"), flush_period_s=0.05))
    writer._open_file()
    record = wire.SidecarRecord(endpoints=[f"ipc://{short_dir}/s"], boot_id=boot_id(), time_ns=time_namespace())
    exporter = Exporter(writer, short_dir / "registry", record)
    said: list[object] = []
    exporter._say = lambda message, payload=None: bool(said.append(message)) or True  # type: ignore[method-assign]
    exporter._sample_clock()
    assert said == []
    exporter.discard()
    writer._file.close()
