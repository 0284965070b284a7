"""Workers that are stopped, hold the GIL or get little CPU are slow, not dead: nothing is lost, nothing runs twice."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller import Controller, Role
from controller.stacks import Stacks, Told
from launching import launch
from waiting import scaled, wait_until, within
from zbus.runtime.gil import GilWatch

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


@contextmanager
def trial(root: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Controller]:
    """Launch two ``Counting`` engines that restart when they die, and see that neither was ever called dead."""
    caplog.set_level(logging.INFO, "zbus")
    role = Role(f"{HERE}/drivers/network_engines.py:Counting", replicas=2, args=[str(root / "effects")], restart="one")
    with launch(root, {"actor": role}) as bus:
        yield bus
        assert [one["start"] for one in bus.group("actor").who()] == [0, 0]
        said = " ".join(record.getMessage() for record in caplog.records)
        assert "died" not in said
        assert "replaced" not in said


def effects(root: Path) -> Counter[str]:
    """Return how often each side effect happened."""
    return Counter((root / "effects").read_text().split())


def test_a_rank_stopped_for_five_seconds_is_not_dead(tmp_path, caplog):
    """SIGSTOP in a call, SIGCONT 5 s later: its calls are answered OK, once each; its peer does not notice."""
    with trial(tmp_path, caplog) as bus:
        actor = bus.group("actor")
        pid = actor[0].who()["pid"]
        running = actor[0].add.submit("running", 0.3)
        wait_until(lambda: effects(tmp_path)["running"], what="the start of the call")
        os.kill(pid, signal.SIGSTOP)
        try:
            queued = [actor[0].add.submit(f"c{number}") for number in range(10)]
            until = time.monotonic() + 5.0
            while time.monotonic() < until:
                assert actor[1].add.submit("peer").result(within(1)) > 0
                time.sleep(0.1)  # the stop has a length; the peer is asked now and then
            assert not running.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert running.result(scaled(10)) == 1
        assert [future.result(scaled(10)) for future in queued] == list(range(2, 12))
    seen = effects(tmp_path)
    assert seen.pop("peer") > 0
    assert set(seen.values()) == {1}
    assert len(seen) == 11


def letters_for(seconds: float) -> int:
    """Return for how many letters ``backtrack`` takes at least so long on this machine, even while it is idle."""
    began = time.thread_time()
    assert re.match(r"(a|a)*b", "a" * 18) is None
    return 18 + math.ceil(math.log2(seconds / (time.thread_time() - began)))


def hold_gil(root: Path, caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    """Hold the GIL of rank 0 in one C call, and see that its calls and its peer's are answered."""
    with trial(root, caplog) as bus:
        actor = bus.group("actor")
        letters = letters_for(seconds)
        began = time.monotonic()
        long = actor[0].backtrack.submit("long", letters)
        wait_until(lambda: effects(root)["long"], what="the start of the call")
        queued = [actor[0].add.submit(f"c{number}") for number in range(10)]
        while not long.done() and time.monotonic() - began < seconds:
            assert actor[1].add.submit("peer").result(within(1)) > 0
            time.sleep(0.2)  # the call has a length; the peer is asked now and then
        assert long.result(scaled(10 * seconds + 30)) == letters
        took = time.monotonic() - began
        assert took > 0.6 * seconds, f"the GIL was held for {took:.1f} s only"
        assert [future.result(scaled(10)) for future in queued] == list(range(1, 11))
    seen = effects(root)
    assert seen.pop("peer") > 0
    assert set(seen.values()) == {1}
    assert len(seen) == 11


def test_a_rank_that_holds_the_gil_for_seconds_is_not_dead(tmp_path, caplog):
    """A regular expression backtracks for some 5 to 10 s: no thread of the worker runs, and nothing is lost."""
    hold_gil(tmp_path, caplog, 5.0)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_rank_that_holds_the_gil_for_half_a_minute_is_not_dead(tmp_path, caplog):
    """As above for 30 s and more, beyond every heartbeat and probe."""
    hold_gil(tmp_path, caplog, 30.0)


@pytest.mark.ci
@pytest.mark.skipif(not os.access(CPU_GROUPS / "cgroup.procs", os.W_OK), reason="needs root and a v1 cpu cgroup")
def test_a_rank_with_five_percent_of_a_cpu_is_not_dead(tmp_path, caplog):
    """A CPU quota of 5 %: calls take long, and every one is answered OK, once."""
    group = CPU_GROUPS / f"zbus-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("5000")
        with trial(tmp_path, caplog) as bus:
            actor = bus.group("actor")
            (group / "cgroup.procs").write_text(str(actor[0].who()["pid"]))
            payload = b"x" * 1_000_000
            for number in range(20):
                futures = [actor[0].add.submit(f"c{number}.{one}") for one in range(20)]
                assert actor[0].mirror.submit(f"m{number}", payload).result(scaled(60)) == payload
                assert [future.result(scaled(60)) for future in futures] == list(
                    range(number * 20 + 1, number * 20 + 21)
                )
            stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            assert int(stat["nr_throttled"]) > 0
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="the group to be empty")
        group.rmdir()
    assert set(effects(tmp_path).values()) == {1}


def test_a_busy_rank_that_is_asked_for_its_stack_all_the_time_lives_on(tmp_path, caplog):
    """A thousand questions, as the product asks them, while several threads of the worker are at work, harm nothing."""
    with trial(tmp_path, caplog) as bus:
        actor = bus.group("actor")
        record = bus._session.members.roles["actor"].members[0].record
        stacks = Stacks(bus.trial, bus._session.threads_of, fresh_s=0.0)
        calls = 0
        answers: list[Mapping[int, Told]] = []
        while sum(map(bool, answers)) < 1000:  # a slow machine leaves some unanswered: a question holds for a second
            futures = [actor[0].add.submit(f"c{calls + number}") for number in range(50)]
            streams = [actor[0].count.submit(f"s{calls + number}", 50) for number in range(5)]
            calls += 50
            answers += [bus._session.threads_of([record])[0] for _ in range(50)]
            assert stacks.take([record])[record.incarnation].place
            assert [future.result(scaled(10)) for future in streams] == [list(range(50))] * 5
            assert [future.result(scaled(10)) for future in futures][-1] == calls
        stacks.close()
        assert all("Thread 0x" in told.text for answer in answers for told in answer.values())


def test_a_rank_that_native_code_holds_lives_on_while_it_is_signalled(tmp_path, caplog):
    """Many signals while a regular expression holds the GIL, up to its end and beyond, as often as the product may."""
    with trial(tmp_path, caplog) as bus:
        actor = bus.group("actor")
        record = bus._session.members.roles["actor"].members[0].record
        letters = letters_for(0.5)
        sent = 0
        for number in range(3):
            held = actor[0].backtrack.submit(f"h{number}", letters)
            after = [actor[0].add.submit(f"c{number}.{one}") for one in range(50)]
            while not held.done():
                watch = GilWatch(record.pid)
                answers, _ = bus._session.threads_of([record])
                while not answers and not held.done():
                    if watch.held():
                        os.kill(record.pid, signal.SIGUSR2)
                        sent += 1
                    time.sleep(0.0005)  # the rate of the signals
            assert held.result(scaled(10)) == letters
            assert [future.result(scaled(10)) for future in after] == list(range(50 * number + 1, 50 * number + 51))
        assert sent > 0
        assert "Stack (most recent call first)" in bus.trial.stack_file("actor", 0).read_text()
