"""What may run again, and where, after a real SIGKILL: the ground truth on disk against what the caller is told."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

import zbus
from controller import Role
from delivery_engine import lines
from launching import HERE, launch
from waiting import scaled, wait_until
from zbus.retry import RetryPolicy

FAST = RetryPolicy(attempts=3, backoff_s=0.01)


def role(truth: Path, **fields) -> Role:
    """Return a role of two ``Delivery`` engines."""
    return Role("delivery_engine:Delivery", replicas=2, args=(str(truth),), sys_path=[str(HERE)], **fields)


def began(truth: Path, what: str) -> list[str]:
    """Return where a call began, in order: rank and start."""
    return [line.split()[2] for line in lines(truth) if line.startswith(f"began {what} ")]


def test_a_pure_call_of_any_rank_moves_to_another_when_its_worker_dies(tmp_path):
    """The caller gets the answer of the other rank; the ground truth shows one start on each."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth)}) as bus:
        actor = bus.group("actor")
        pids = actor.pid()
        future = actor.pure.submit("moves", scaled(5.0))
        wait_until(lambda: began(truth, "moves"), what="the call to begin")
        first = int(began(truth, "moves")[0][0])
        os.kill(pids[first], signal.SIGKILL)
        assert future.result(timeout=scaled(20)) == 1 - first
        assert began(truth, "moves") == [f"{first}.0", f"{1 - first}.0"]


def test_an_idempotent_call_runs_again_on_the_next_incarnation_of_its_rank(tmp_path):
    """It waits for the restart by policy and is run there, once."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth, restart="one")}) as bus:
        again = bus.group("actor")[1].again.options(retries=FAST)
        assert again("again", die_at="1.0") == "1.1"
        assert began(truth, "again") == ["1.0", "1.1"]


def test_one_rank_of_an_idempotent_call_to_all_runs_again_by_itself(tmp_path):
    """A rank dies in its part: that part runs once more when the rank is back, the other rank's never."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth, restart="one")}) as bus:
        assert bus.group("actor").again.options(retries=FAST)("again", die_at="1.0") == ["0.0", "1.1"]
        assert sorted(began(truth, "again")) == ["0.0", "1.0", "1.1"]


def test_the_error_counts_every_transmission_of_every_execution(tmp_path):
    """When the retries are used up, the caller hears how often it was sent, and that it may have run."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth, restart="one")}) as bus:
        again = bus.group("actor")[0].again.options(retries=RetryPolicy(attempts=2, backoff_s=0.01))
        with pytest.raises(zbus.WorkerLost) as caught:
            again("twice", die_at="*")
        assert (caught.value.outcome, caught.value.attempts) == ("UNKNOWN", 2)
        assert began(truth, "twice") == ["0.0", "0.1"]


def test_a_once_call_is_never_run_again(tmp_path):
    """Its worker dies in it and comes back by policy: UNKNOWN for the caller, one start in the ground truth."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth, restart="one")}) as bus:
        actor = bus.group("actor")
        victim = actor[0].pid()
        future = actor[0].hold.options(retries=FAST).submit("once", "/nowhere")
        queued = [actor[0].each.submit(f"queued-{number}") for number in range(3)]
        wait_until(lambda: began(truth, "once"), what="the call to begin")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(zbus.WorkerLost) as caught:
            future.result(timeout=scaled(20))
        assert caught.value.outcome == "UNKNOWN"
        wait_until(lambda: actor.ready, timeout_s=30, what="the rank to come back")
        assert actor[0].each("after") == 0
        for number, call in enumerate(queued):
            error = call.exception(timeout=scaled(20))
            assert error is None or isinstance(error, zbus.NotExecuted)
            assert len(began(truth, f"queued-{number}")) == (error is None)
        assert began(truth, "once") == ["0.0"]


def test_a_batch_whose_worker_dies_between_its_calls_is_told_exactly(tmp_path):
    """SIGKILL in the third of six calls: two OK, one UNKNOWN, three NOT_EXECUTED, as in the ground truth."""
    truth = tmp_path / "truth.txt"
    with launch(tmp_path / "runs", {"actor": role(truth)}) as bus:
        actor = bus.group("actor")
        victim = actor[0].pid()
        batch = actor[0].batch()
        calls = [batch.each("a"), batch.each("b"), batch.hold("c", "/nowhere"), *(batch.each(name) for name in "def")]
        batch.submit()
        wait_until(lambda: began(truth, "c"), what="the third call to begin")
        assert calls[1].result(timeout=scaled(10)) == 0, "short results may wait for each other, not for a long call"
        os.kill(victim, signal.SIGKILL)
        for call in calls:
            call.exception(timeout=scaled(20))
        assert [call.outcomes()[0].outcome for call in calls] == ["OK", "OK", "UNKNOWN", *["NOT_EXECUTED"] * 3]
        assert Counter(line.split()[1] for line in lines(truth)) == Counter("abc")
