"""Calls that start together, and calls that stop when asked, on real workers."""

from __future__ import annotations

import os
import signal
import time

import pytest

import zbus
from controller import Role
from delivery_engine import lines
from launching import HERE, launch
from waiting import scaled, wait_until


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory):
    """Where the engines write what really happened."""
    return tmp_path_factory.mktemp("truth") / "truth.txt"


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory, truth):
    """One trial of three ranks for the tests that leave it as they found it."""
    with launch(tmp_path_factory.mktemp("runs"), {"actor": role(truth)}) as bus:
        yield bus


def role(truth, replicas=3, **fields):
    """Return a role of ``Delivery`` engines."""
    return Role("delivery_engine:Delivery", replicas=replicas, args=(str(truth),), sys_path=[str(HERE)], **fields)


def began(truth, what):
    """Return the starts of one call in the ground truth."""
    return [line for line in lines(truth) if line.startswith(f"began {what} ")]


def test_a_call_that_starts_together_answers_like_any_other(bus):
    """Every rank answers, in rank order; also in a batch, and one after the other without waiting."""
    actor = bus.group("actor")
    assert actor.together("plain") == [0, 1, 2]
    futures = [actor.together.submit("many") for _ in range(20)]
    assert all(future.result() == [0, 1, 2] for future in futures)
    with actor.batch(start="together") as b:
        first, second = b.each("a"), b.each("b")
    assert first.result() == second.result() == [0, 1, 2]
    assert actor[0].together("alone") == 0


def test_it_begins_on_no_rank_before_the_last_one_is_free(bus, truth, tmp_path):
    """While one rank is still busy, the others hold the call; when it is free, all run."""
    actor = bus.group("actor")
    busy = actor[2].hold.submit("busy", str(tmp_path / "go"))
    wait_until(lambda: began(truth, "busy"), what="rank 2 to be busy")
    future = actor.together.submit("late")
    wait_until(
        lambda: "ready, waiting for the other ranks" in future.outcomes()[0].state, what="rank 0 to wait for rank 2"
    )
    time.sleep(0.1)  # long enough for ranks 0 and 1 to have begun, if they were going to
    assert not began(truth, "late")
    (tmp_path / "go").touch()
    assert future.result() == [0, 1, 2]
    assert busy.result()


def test_a_deadline_before_the_start_means_it_ran_nowhere(bus, truth, tmp_path):
    """The rank that is late makes the call NOT_EXECUTED on all, and the next call is answered."""
    actor = bus.group("actor")
    busy = actor[1].hold.submit("slow", str(tmp_path / "go"))
    future = actor.together.options(deadline=0.15).submit("expired")
    with pytest.raises(zbus.BatchError):
        future.result()
    assert {known.outcome for known in future.outcomes()} == {"NOT_EXECUTED"}
    (tmp_path / "go").touch()
    busy.result()
    assert actor.together("after") == [0, 1, 2]
    assert not began(truth, "expired")


def test_a_cancel_before_the_start_means_it_ran_nowhere(bus, truth, tmp_path):
    """All ranks are told CANCELLED at once, though one is busy."""
    actor = bus.group("actor")
    busy = actor[1].hold.submit("slow2", str(tmp_path / "go"))
    wait_until(lambda: began(truth, "slow2"), what="rank 1 to be busy")
    future = actor.together.submit("cancelled")
    future.cancel()
    assert {known.outcome for known in future.outcomes()} == {"CANCELLED"}
    (tmp_path / "go").touch()
    busy.result()
    assert actor.together("after2") == [0, 1, 2]
    assert not began(truth, "cancelled")


def test_a_rank_killed_before_the_start_means_it_ran_nowhere(tmp_path):
    """SIGKILL of a rank that the others wait for: NOT_EXECUTED on all ranks, proved, and nothing ran."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth)}) as bus:
        actor = bus.group("actor")
        victim = actor[2].pid()
        actor[2].hold.submit("busy", "/nowhere")
        wait_until(lambda: began(truth, "busy"), what="rank 2 to be busy")
        future = actor.together.submit("never")
        wait_until(lambda: "ready" in future.outcomes()[0].state, what="rank 0 to hold the call")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(zbus.BatchError) as caught:
            future.result()
        outcomes = {known.rank: (known.outcome, known.state) for known in future.outcomes()}
        assert {outcome for outcome, _ in outcomes.values()} == {"NOT_EXECUTED"}, outcomes
        assert caught.value.root.rank == 2
        assert "had not begun on any rank" in outcomes[0][1]
        assert not began(truth, "never")


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["work", "wait", "beside"])
def test_a_cancelled_method_stops_and_says_that_it_had_started(bus, truth, how):
    """Sync at its checkpoint, async at its await, sync on an async lane: CallCancelled with outcome APP_ERROR."""
    what = f"cancel-{how}"
    future = getattr(bus.group("actor")[0], how).submit(what)
    wait_until(lambda: began(truth, what), what=f"{how} to begin")
    future.cancel()
    with pytest.raises(zbus.CallCancelled, match="while it ran") as caught:
        future.result(timeout=scaled(10))
    assert (caught.value.outcome, caught.value.reason) == ("APP_ERROR", "cancelled")
    assert f"ended {what} 0.0" in lines(truth)
    assert bus.group("actor")[0].each("after") == 0


@pytest.mark.parametrize("how", ["work", "wait", "beside"])
def test_a_method_past_its_deadline_stops_and_says_so(bus, truth, how):
    """CallTimeout with outcome APP_ERROR: it ran and was stopped, which is exact where UNKNOWN would not be."""
    method = getattr(bus.group("actor")[0], how).options(deadline=1.0)
    for number in range(5):
        what = f"deadline-{how}-{number}"
        with pytest.raises(zbus.CallTimeout) as caught:
            method(what)
        if caught.value.outcome != "UNKNOWN":  # else the machine was too slow for its word to come in time
            break
    assert "was stopped" in str(caught.value)
    assert (caught.value.outcome, caught.value.reason) == ("APP_ERROR", "deadline")
    assert f"ended {what} 0.0" in lines(truth)


def test_a_method_that_does_not_ask_is_unknown_at_its_deadline(bus, truth, tmp_path):
    """It runs on, and the caller is told so in time."""
    with pytest.raises(zbus.CallTimeout, match="still running at its deadline") as caught:
        bus.group("actor")[0].hold.options(deadline=1.0)("deaf", str(tmp_path / "go"))
    assert caught.value.outcome == "UNKNOWN"
    (tmp_path / "go").touch()
    wait_until(lambda: "ended deaf 0.0" in lines(truth), what="the method to end")


def test_a_cancel_at_once_is_never_lost(bus, truth):
    """Whether it comes before the worker, before its task, or after: the call ends, and says if it had started."""
    actor = bus.group("actor")[0]
    for number in range(30):
        what = f"race-{number}"
        future = actor.wait.submit(what)
        if number % 3:
            time.sleep(number % 7 / 5_000)
        future.cancel()
        with pytest.raises(zbus.CallCancelled) as caught:
            future.result(timeout=scaled(10))
        ran = bool(began(truth, what))
        assert caught.value.outcome == ("APP_ERROR" if ran else "CANCELLED"), what


def test_what_stands_behind_in_a_cancelled_batch_does_not_begin(bus, truth):
    """The call that runs stops; those behind it are CANCELLED, exactly."""
    b = bus.group("actor")[0].batch()
    calls = [b.work("first"), b.each("second")]
    placed = b.submit()
    wait_until(lambda: began(truth, "first"), what="the first call to begin")
    placed[0].cancel()
    assert [type(call.exception(timeout=scaled(10))) for call in calls] == [zbus.CallCancelled] * 2
    assert [call.outcomes()[0].outcome for call in calls] == ["APP_ERROR", "CANCELLED"]
    assert not began(truth, "second")


@pytest.mark.parametrize("how", ["numbers", "items"])
def test_a_closed_stream_stops_its_generator(bus, how):
    """Leaving a stream of endless items frees its lane."""
    method = getattr(bus.group("actor")[0], how)
    for _ in range(3):
        with method.stream() as stream:
            assert [next(stream) for _ in range(100)] == list(range(100))


def test_checkpoint_outside_a_call_does_nothing():
    """A library may ask without knowing who calls it."""
    zbus.checkpoint()
