"""Calls through a proxy that loses, doubles, delays and cuts: each runs once, and each is answered."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller import Controller, Role
from launching import launch
from waiting import scaled, wait_until
from zbus.protocol.messages import Kind
from zbus.testing.proxy import FaultProxy, between, quick

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
WORKER = "actor/0"


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """Give a proxy without faults."""
    with FaultProxy(seed=7) as proxy:
        yield proxy


@contextmanager
def trial(root: Path, proxy: FaultProxy, *, replicas: int = 1, timing_ms: float = 20) -> Iterator[Controller]:
    """Launch a trial of ``Counting`` engines through the proxy."""
    role = Role(f"{HERE}/drivers/network_engines.py:Counting", replicas=replicas, args=[str(root / "effects")])
    with between(proxy, timing=quick(timing_ms)), launch(root, {"actor": role}) as bus:
        yield bus


def effects(root: Path) -> Counter[str]:
    """Return how often each side effect happened."""
    file = root / "effects"
    return Counter(file.read_text().split() if file.exists() else ())


def test_a_thousand_lost_replies_of_a_once_method_leave_a_thousand_side_effects(tmp_path, proxy):
    """The reply of every call is lost once: each call is answered OK by the cached reply and ran exactly once."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        lost = 0
        for start in range(0, 1000, 50):
            rule = proxy.drop("reply", kinds={Kind.RESULT}, lane="main", count=50)
            futures = [actor[0].add.submit(f"c{number}") for number in range(start, start + 50)]
            answers = [future.result(scaled(30)) for future in futures]
            assert answers == list(range(start + 1, start + 51))
            lost += rule.hits
        assert lost == 1000
    assert effects(tmp_path) == {f"c{number}": 1 for number in range(1000)}


def test_a_lost_request_is_asked_about_and_sent_again(tmp_path, proxy):
    """Requests that never arrive are sent again after a probe, keep their order, and run once."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        rule = proxy.drop("request", kinds={Kind.REQ}, lane="main", probability=0.3, count=40)
        futures = [actor[0].add.submit(f"c{number}") for number in range(200)]
        assert [future.result(scaled(30)) for future in futures] == list(range(1, 201))
        assert rule.hits > 10
        assert bus.report()["retransmissions"] >= rule.hits
    assert effects(tmp_path) == {f"c{number}": 1 for number in range(200)}


def test_a_request_that_comes_again_while_it_runs_does_not_run_twice(tmp_path, proxy):
    """A copy of a request arrives while the first is running: it is told so, and the method runs once."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        future = actor[0].add.submit("slow", 0.5)
        wait_until(lambda: effects(tmp_path)["slow"], what="the start of the call")
        for _ in range(5):
            assert proxy.replay(WORKER) > 0
        assert future.result(scaled(10)) == 1
        assert actor[0].add("after") == 2
    assert effects(tmp_path) == {"slow": 1, "after": 1}


def test_every_message_doubled_changes_nothing(tmp_path, proxy):
    """Each request and each reply comes three times: every call runs once and has one answer."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        proxy.duplicate("request", copies=2)
        proxy.duplicate("reply", copies=2)
        futures = [actor[0].add.submit(f"c{number}") for number in range(100)]
        assert [future.result(scaled(30)) for future in futures] == list(range(1, 101))
        assert proxy.counters["duplicate request"] >= 100
    assert effects(tmp_path) == {f"c{number}": 1 for number in range(100)}


def test_messages_that_overtake_each_other_run_in_order(tmp_path, proxy):
    """Late requests are held for: calls run in the order of submission, each once."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        proxy.delay(0.03, "request", kinds={Kind.REQ}, probability=0.3, overtake=True)
        proxy.delay(0.03, "reply", probability=0.3, overtake=True)
        futures = [actor[0].add.submit(f"c{number}") for number in range(200)]
        assert [future.result(scaled(30)) for future in futures] == list(range(1, 201))
    assert (tmp_path / "effects").read_text().split() == [f"c{number}" for number in range(200)]


def test_frames_of_a_dead_connection_that_arrive_late_are_ignored(tmp_path, proxy):
    """After a reconnect the old connection's requests come once more: nothing runs a second time."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        assert [actor[0].add(f"c{number}") for number in range(20)] == list(range(1, 21))
        assert proxy.cut(WORKER) > 0
        wait_until(lambda: actor.ready, what="the worker to be connected again")
        assert actor[0].add("after") == 21
        assert proxy.replay(WORKER, last=20) == 20
        assert proxy.replay(WORKER, direction="reply", last=20) > 0
        assert actor[0].add("last") == 22
    assert effects(tmp_path) == {**{f"c{number}": 1 for number in range(20)}, "after": 1, "last": 1}


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_connection_cut_in_a_large_message_loses_nothing(tmp_path, proxy, direction):
    """A reset 1 MiB into an 8 MiB message: it is sent again on the next connection, whole, and the call ran once."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        payload = bytes(range(256)) * (8 << 12)
        rule = proxy.cut_at(1 << 20, direction, kinds={Kind.REQ if direction == "request" else Kind.RESULT})
        assert actor[0].mirror.submit("big", payload).result(scaled(30)) == payload
        assert rule.hits == 1
    assert effects(tmp_path) == {"big": 1}


def test_cuts_at_random_lose_and_double_nothing(tmp_path, proxy):
    """Connections reset again and again under load: every call is answered OK and ran once, and no worker is dead."""
    with trial(tmp_path, proxy, replicas=2) as bus:
        actor = bus.group("actor")
        futures = []
        for number in range(20):
            wait_until(lambda: actor.ready, what="both workers to be connected")
            futures += [actor.add.submit(f"c{number}.{one}") for one in range(10)]
            proxy.cut()
        for future in futures:
            future.result(scaled(30))
        assert [one["start"] for one in actor.who.options(retries=5)()] == [0, 0]
        assert proxy.counters["cut"] >= 40
    assert effects(tmp_path) == {f"c{number}.{one}": 2 for number in range(20) for one in range(10)}


@pytest.mark.parametrize("direction", ["request", "reply", "both"])
def test_a_half_open_connection_that_heals_costs_only_time(tmp_path, proxy, direction):
    """Nothing passes for 1.5 s and nothing is closed: no death is declared, calls are answered after it, once each."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        assert actor[0].add("before") == 1
        proxy.freeze(direction=direction)
        futures = [actor[0].add.submit(f"c{number}") for number in range(10)]
        time.sleep(1.5)  # the length of the fault is what is tested
        assert not any(future.done() for future in futures)
        proxy.thaw()
        assert [future.result(scaled(20)) for future in futures] == list(range(2, 12))
    assert effects(tmp_path) == {"before": 1, **{f"c{number}": 1 for number in range(10)}}


def test_a_worker_that_cannot_be_reached_for_a_while_is_not_dead(tmp_path, proxy):
    """Connections refused for 2 s: the worker is in doubt, a call that may wait is answered once it is back."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        proxy.refuse(WORKER)
        wait_until(lambda: not actor.ready, what="the loss to be seen")
        time.sleep(2.0)  # the length of the fault is what is tested
        proxy.accept()
        assert actor[0].who.options(retries=5)()["start"] == 0
        assert actor[0].add("after") == 1
    assert effects(tmp_path) == {"after": 1}


def test_lossy_both_ways_a_stream_gives_each_item_once_and_in_order(tmp_path, proxy):
    """Items of a stream and its end are lost and doubled: the caller still sees 0, 1, 2, … and the end."""
    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        proxy.drop("reply", lane="gen", probability=0.2, count=60)
        proxy.duplicate("reply", lane="gen", probability=0.2, count=60)
        for number in range(5):
            assert list(actor.count.stream(f"s{number}", 60)) == list(range(60))
    assert effects(tmp_path) == {f"s{number}": 1 for number in range(5)}


def test_a_call_whose_replies_never_come_is_unknown_and_says_so(tmp_path, proxy):
    """All replies lost up to the deadline: the outcome is UNKNOWN, never a lie, and the effect happened once."""
    from zbus.errors import CallError

    with trial(tmp_path, proxy) as bus:
        actor = bus.group("actor")
        rule = proxy.drop("reply", kinds={Kind.RESULT, Kind.PROGRESS}, lane="main")
        future = actor[0].add.options(deadline=0.5).submit("lost")
        error = future.exception(scaled(10))
        assert isinstance(error, CallError)
        assert error.outcome == "UNKNOWN"
        assert error.reason == "deadline"
        rule.stop()
        assert actor[0].add("after") == 2
    assert effects(tmp_path) == {"lost": 1, "after": 1}


def test_a_dead_worker_that_speaks_changes_nothing(tmp_path, proxy):
    """Answers of an incarnation that was declared dead arrive late, on the old and on its successor's connection.

    The calls keep the outcome they have, the successor's calls are answered, and nothing runs twice.
    """
    role = Role(
        f"{HERE}/drivers/network_engines.py:Counting",
        args=[str(tmp_path / "effects")],
        restart="one",
        restart_window_s=1.0,
    )
    with between(proxy, timing=quick()), launch(tmp_path, {"actor": role}) as bus:
        actor = bus.group("actor")
        pid = actor[0].who()["pid"]
        assert actor[0].add("before") == 1
        proxy.freeze(WORKER, direction="reply")
        lost = [actor[0].add.submit(f"lost{number}") for number in range(10)]
        wait_until(lambda: effects(tmp_path)["lost9"], what="the end of the calls whose answers are held up")
        os.kill(pid, signal.SIGKILL)
        errors = [future.exception(scaled(20)) for future in lost]
        assert {getattr(error, "outcome", None) for error in errors} == {"UNKNOWN"}
        assert all("killed by SIGKILL" in str(error) for error in errors)
        proxy.thaw()
        assert actor[0].who.options(retries=5)()["start"] == 1
        assert proxy.replay(WORKER, direction="reply", last=40) > 0
        assert proxy.replay(WORKER, direction="request", last=40) > 0
        assert actor[0].add("after") == 1
        assert {getattr(future.exception(), "outcome", None) for future in lost} == {"UNKNOWN"}
    assert effects(tmp_path) == {"before": 1, "after": 1, **{f"lost{number}": 1 for number in range(10)}}
