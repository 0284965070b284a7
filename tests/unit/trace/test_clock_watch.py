"""Clocks of other hosts, measured between a controller and its workers over real sockets, without a sidecar."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from controller.clocks import ClockWatch
from waiting import wait_until, within
from zbus import trace
from zbus.clock import ClockId, clock_id
from zbus.ids import WorkerName
from zbus.protocol.messages import Kind
from zbus.trace import control
from zbus.trace.blocks import ClockLine
from zbus.trace.tracer import Tracer
from zbus.trace.writer import TraceWriter
from zbus.transport.client import Client, Peer, PeerState
from zbus.transport.server import Server
from zbus.transport.sockets import SocketFactory

THERE = ClockId("another boot", 5)


class Skewed:
    """A monotonic clock ahead of the machine's and running off by ``drift``; ``jump`` moves it at once."""

    def __init__(self, ahead_ns: int, drift: float = 0.0) -> None:
        self.ahead_ns, self.drift, self.base = ahead_ns, drift, time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.of(time.monotonic_ns())

    def wall_ns(self) -> int:
        return time.time_ns()

    def of(self, real_ns: int) -> int:
        """Return what it shows when the machine's clock shows ``real_ns``."""
        return real_ns + self.ahead_ns + round((real_ns - self.base) * self.drift)


@contextlib.contextmanager
def worker(factory: SocketFactory, rank: int, directory: Path, clock: ClockId, shown: Skewed) -> Iterator[_Worker]:
    """Serve a worker's two sockets on a clock of its own."""
    made = _Worker(factory, rank, directory, clock, shown)
    try:
        yield made
    finally:
        made.server.close()


class _Worker:
    def __init__(self, factory: SocketFactory, rank: int, directory: Path, clock: ClockId, shown: Skewed) -> None:
        self.told: list[ClockLine] = []
        self.asked = 0
        self.name = WorkerName("actor", rank)
        self.server = Server(
            name=self.name,
            incarnation=1,
            factory=factory,
            lanes={"main": 1, "ctl": 1},
            dispatch=lambda request: None,
            describe=lambda: {"boot_id": clock.boot_id, "time_ns": clock.time_ns},
            on_clock=lambda told: self.told.append(msgspec.msgpack.decode(told, type=ClockLine)),
            clock=shown,
        )
        answer = self.server._on_message

        def counted(link, header, *rest):
            self.asked += header.kind == Kind.PING
            answer(link, header, *rest)

        self.server._on_message = counted  # type: ignore[method-assign]  # counts what is asked, changes nothing
        self.endpoints = {
            link: [self.server.bind(link, f"ipc://{directory}/{link}.{rank}")] for link in ("main", "ctl")
        }
        self.server.start()

    def met(self, client: Client) -> Peer:
        """Connect a client and wait until it is ready."""
        peer = client.connect(self.name, 1, self.endpoints)
        wait_until(lambda: peer.state is PeerState.READY, what="ready")
        return peer


def error_of(line: ClockLine, clock: Skewed) -> int:
    """Return how wrong a line of the controller's is, in ns."""
    return abs(line.offset_ns - (clock.of(line.at_ns) - line.at_ns))


@pytest.mark.parametrize("skew", [(5_000_000_000, 50e-6), (-5_000_000_000, -50e-6)])
def test_the_controller_measures_a_foreign_clock_and_tells_its_processes(client, factory, short_dir, skew):
    """A clock ±5 s and ±50 ppm off: the first window of 128 exchanges gives an offset whose bound holds, both ways."""
    clock, lines = Skewed(*skew), []
    watch = ClockWatch(client, clock_id(), lambda: True, lines.append)
    with (
        worker(factory, 0, short_dir, THERE, clock) as one,
        worker(factory, 1, short_dir, THERE, clock) as two,
        worker(factory, 2, short_dir, clock_id(), Skewed(0)) as ours,
    ):
        for made in (one, two, ours):
            made.met(client)
        wait_until(lambda: one.told and two.told, what="a window")
        watch.close()
    first = lines[0]
    assert first.n >= 128
    assert (first.ref_boot_id, first.ref_time_ns) == THERE
    assert all(error_of(line, clock) <= line.bound_ns for line in lines)
    assert error_of(first, clock) <= 25_000 or first.rtt_ns > 100_000, "an idle link gives 25 µs"
    for told in (*one.told, *two.told):
        assert (told.ref_boot_id, told.ref_time_ns) == clock_id()
        assert abs(clock.of(told.at_ns + told.offset_ns) - told.at_ns) <= told.bound_ns + 1000
    assert min(one.asked, two.asked) < 10 < max(one.asked, two.asked)  # one process speaks for its clock
    assert ours.asked == 0


def test_another_process_of_a_clock_is_asked_when_the_first_is_gone(client, factory, short_dir):
    """The process that spoke for a clock ends: the next one of that clock is asked instead."""
    lines: list[ClockLine] = []
    watch = ClockWatch(client, clock_id(), lambda: True, lines.append)
    with worker(factory, 1, short_dir, THERE, Skewed(10**9)) as two:
        with worker(factory, 0, short_dir, THERE, Skewed(10**9)) as one:
            first = one.met(client)
            wait_until(lambda: one.asked > 5, what="questions to the first")
        client.declare_dead(first, reason="exit", evidence="it ended")
        two.met(client)
        wait_until(lambda: lines, what="a window")
        assert two.asked > 5
        watch.close()


def test_nothing_is_asked_while_nothing_is_traced(client, factory, short_dir):
    """With tracing off no question goes out but the HELLO; switched on, questions begin by themselves."""
    on = False
    watch = ClockWatch(client, clock_id(), lambda: on, lambda line: None)
    with worker(factory, 0, short_dir, THERE, Skewed(10**9)) as one:
        peer = one.met(client)
        client.ping(peer)
        wait_until(lambda: one.asked == 1, what="our own question")
        on = True
        wait_until(lambda: one.asked > 20, what="questions")
        watch.close()


def jumps(lines: list[ClockLine]) -> list[tuple[ClockLine, ClockLine]]:
    """Return the neighbours between which a clock moved by more than a second."""
    return [(one, next_) for one, next_ in pairwise(lines) if abs(next_.offset_ns - one.offset_ns) > 10**9]


def test_a_clock_that_jumps_gets_a_new_anchor_at_once(client, factory, short_dir):
    """A clock that moves by 2 s between two questions ends its window; the next point says the new offset."""
    clock, lines = Skewed(10**9), []
    watch = ClockWatch(client, clock_id(), lambda: True, lines.append)
    with worker(factory, 0, short_dir, THERE, clock) as one:
        one.met(client)
        wait_until(lambda: len(lines) >= 1, what="a window")
        asked = one.asked
        wait_until(lambda: one.asked > asked + 1, what="some questions more")
        clock.ahead_ns -= 2_000_000_000
        wait_until(lambda: jumps(lines), what="the window before and the one after")
        watch.close()
    [(before, after)] = jumps(lines)
    assert after.offset_ns - before.offset_ns == pytest.approx(-2e9, abs=before.bound_ns + after.bound_ns)
    assert after.drift_ppb == 0
    assert after.at_ns - before.at_ns < within(2) * 1e9


def test_noted_clocks_are_lines_of_the_file(tmp_path):
    """What is noted stands in the file after the next flush, as a zbus_clock line; other bytes are ignored."""
    trace.configure({"root": str(tmp_path), "level": "rpc"}, role="actor", rank=3)
    line = ClockLine(10**9, 77, 5, 10, 128, 0, "boot", 7)
    control.note_clock(msgspec.msgpack.encode(line))
    control.note_clock(b"\xc1 no line")
    trace.reset()
    lines = map(json.loads, (tmp_path / "actor" / "traces_3.jsonl").read_text().splitlines())
    [found] = [event for event in lines if event["name"] == "zbus_clock"]
    assert found["args"] == {
        "at_ns": 10**9, "offset_ns": 77, "bound_ns": 5, "rtt_ns": 10, "n": 128, "drift_ppb": 0, "ref_boot_id": "boot",
        "ref_time_ns": 7,
    }  # fmt: skip


def test_a_writer_that_is_full_keeps_the_newest_clocks(tmp_path):
    """A process whose file takes nothing holds a bounded number of lines."""
    writer = TraceWriter(Tracer("actor", 0), control.TraceConfig(root=str(tmp_path)))
    for number in range(5000):
        writer.note_clock(ClockLine(number, 0, 1, 1, 1, 0, "b", 1))
    assert len(writer._clocks) == 1024
    assert writer._clocks[-1].at_ns == 4999
