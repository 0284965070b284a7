"""Whoever dies or is interrupted first: the rest follows in time, with the right exit code, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_kit import DRIVERS, RunKit, run_kit
from waiting import wait_until, within

pytestmark = pytest.mark.alone


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a job of two ranks, and check at the end that no process is left."""
    yield from run_kit(tmp_path, short_dir, monkeypatch)


def driver(function: str) -> str:
    """Choose a function of the driver."""
    return f"target={DRIVERS}/fault_driver.py:{function}"


# -- who dies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", [pytest.param("sleep", marks=pytest.mark.ci), "hang"])
def test_everything_follows_a_killed_controller(kit: RunKit, peers: str) -> None:
    """Kill -9 of the command: agents, templates and workers are gone within 2 s, also in a call that never ends."""
    running = kit.start("params.how=sleep", f"params.peers={peers}")
    kit.wait_log("step: ")
    assert len(kit.processes()) >= 4
    running.signal(signal.SIGKILL)
    running.process.wait()
    kit.gone(2.0)


def test_a_run_resumed_at_once_waits_for_the_end_of_the_one_before(kit: RunKit) -> None:
    """An agent that is slow to see its controller's death holds its ranks; it is waited for, and harms nobody."""
    first = kit.start(driver("idle"), f"params.go={kit.directory / 'never'}", "-t", "t1")
    first.wait_err("driver")
    (agent,) = kit.records().agents()
    os.kill(agent.pid, signal.SIGSTOP)
    first.signal(signal.SIGKILL)
    first.process.wait()
    go = kit.directory / "go"
    go.touch()
    second = kit.start(driver("idle"), f"params.go={go}", "-t", "t1", "--resume")
    wait_until(lambda: (kit.trial.holder() or {}).get("pid") == second.process.pid, what="the second run's lock")
    assert not [epoch for epoch in kit.records().epochs() if epoch.pid == second.process.pid]
    os.kill(agent.pid, signal.SIGCONT)
    done = second.end(60.0)
    assert done.code == 0, done.err
    assert "died" not in done.err


def test_the_next_launch_sweeps_what_a_killed_controller_left(kit: RunKit) -> None:
    """The runtime directory of a killed controller is removed by the next launch; live ones stay."""
    running = kit.start("params.how=sleep", "params.peers=sleep")
    kit.wait_log("step: ")
    running.signal(signal.SIGKILL)
    running.process.wait()
    kit.gone(2.0)
    left = set(kit.runtime.iterdir())
    assert left, "a killed controller cannot remove its runtime directory"
    second = kit.start(driver("idle"), f"params.go={kit.directory / 'never'}", "-t", "second")
    second.wait_err("driver")
    third = kit.run("-t", "third")
    assert third.code == 0, third.err
    now = set(kit.runtime.iterdir())
    assert not left & now
    assert now, "the directory of the run that lives is not touched"
    second.signal(signal.SIGINT)
    assert second.end().code == 130
    assert not set(kit.runtime.iterdir())


def test_a_killed_agent_takes_its_ranks_along_and_is_named(kit: RunKit) -> None:
    """Kill -9 of the agent in a call: its ranks end, the call fails within 2 s and the block says what is known."""
    running = kit.start("params.how=sleep", "params.peers=sleep")
    kit.wait_log("step: ")
    (agent,) = kit.records().agents("actor")
    time.sleep(0.5)  # a call is confirmed after some 2 ms
    began = time.monotonic()
    os.kill(agent.pid, signal.SIGKILL)
    running.wait_err("more: ")
    assert time.monotonic() - began < within(2.0)
    done = running.end()
    assert done.code == 4
    assert "error[ZB0301]: actor/" in done.block
    assert f"its agent (pid {agent.pid}) was killed by SIGKILL" in done.block
    assert "it was running" in done.block


# -- interrupts --------------------------------------------------------------------------------------------------------


def _in_idle(kit: RunKit):
    running = kit.start(driver("idle"), f"params.go={kit.directory / 'never'}")
    running.wait_err("ready")
    return running


def _in_call(kit: RunKit):
    running = kit.start("params.how=sleep", "params.peers=hang")
    kit.wait_log("step: ")
    return running


def _in_launch(kit: RunKit):
    kit.write(args=["hang"])
    running = kit.start()
    kit.wait_log("hanging here", 1)
    return running


def _in_close(kit: RunKit):
    running = kit.start(driver("slow_close"))
    running.wait_err("closing")
    return running


moments = pytest.mark.parametrize("begin", [_in_idle, _in_call, _in_launch, _in_close], ids=lambda f: f.__name__[4:])


@moments
def test_one_interrupt_ends_in_order(kit: RunKit, begin) -> None:
    """Ctrl-C while idle, in a call, in the launch, in the close: exit 130 within 5 s, a summary, no traceback."""
    running = begin(kit)
    began = time.monotonic()
    running.signal(signal.SIGINT)
    done = running.end()
    took = time.monotonic() - began
    assert done.code == 130, done.err
    assert took < within(5.5), f"{took:.1f} s"
    assert "Traceback" not in done.err
    assert "error" not in done.err
    assert not kit.processes()
    assert kit.summary()["status"] == "interrupted"
    assert not list(kit.runtime.iterdir())


@moments
def test_two_interrupts_end_at_once(kit: RunKit, begin) -> None:
    """The second Ctrl-C does not wait for anything: exit 130 within a second, and the ranks follow within 2 s."""
    running = begin(kit)
    running.signal(signal.SIGINT)
    running.wait_err("once more to stop at once")
    began = time.monotonic()
    running.signal(signal.SIGINT)
    done = running.end()
    assert time.monotonic() - began < within(1.0)
    assert done.code == 130
    assert "Traceback" not in done.err
    kit.gone(2.0)
    assert json.loads(kit.trial.summary.read_text())["status"] == "interrupted"


@pytest.mark.ci  # the same over the CLI tests' own job runs always
def test_sigterm_in_a_call_ends_in_order(kit: RunKit) -> None:
    """SIGTERM is an orderly end too: exit 143."""
    running = _in_call(kit)
    running.signal(signal.SIGTERM)
    assert running.end().code == 143
    assert not kit.processes()
    assert kit.summary()["status"] == "terminated"


def test_an_interrupt_of_the_whole_terminal_is_still_the_controllers(kit: RunKit) -> None:
    """Ctrl-C reaches every process of a terminal: ranks and agents leave it to the controller."""
    running = _in_call(kit)
    for line in kit.processes():
        pid = int(line.split()[0])
        if pid != running.process.pid:
            os.kill(pid, signal.SIGINT)
    time.sleep(0.3)  # the rule is that nothing happens
    assert running.process.poll() is None
    assert not kit.exits()
    running.signal(signal.SIGINT)
    assert running.end().code == 130


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_a_restarted_rank_takes_the_next_call(kit: RunKit) -> None:
    """restart=one: the lost call fails, the next call works, start 1 is seen, and each start has its own files."""
    kit.write(restart="one")
    done = kit.run(driver("goes_on"), "params.how=kill:9", "--json")
    assert done.code == 0, done.err
    metrics = json.loads(done.out)["metrics"]
    assert metrics["caught"] == "WorkerLost"
    assert [one["start"] for one in metrics["after"]] == [0, 1]
    assert metrics["after"][1]["recovered"] is True
    assert metrics["after"][0]["pid"] == metrics["before"][0]["pid"]
    trial = kit.trial.path
    assert "step: kill:9" in (trial / "logs/actor/1.0.log").read_text()
    assert "step: kill:9" not in (trial / "logs/actor/1.1.log").read_text()
    assert (trial / "crash/actor.1.0.json").exists()
    assert not (trial / "crash/actor.1.1.json").exists()
    assert (trial / "traces/actor/traces_1.jsonl").exists()
    assert (trial / "traces/actor/traces_1.1.jsonl").exists()


def test_restart_all_replaces_every_rank(kit: RunKit) -> None:
    """restart=all: one death gives all ranks a new start, also one that hangs in the call."""
    kit.write(restart="all")
    done = kit.run(driver("goes_on"), "params.how=kill:9", "params.peers=hang", "--json")
    assert done.code == 0, done.err
    metrics = json.loads(done.out)["metrics"]
    assert metrics["caught"] == "WorkerLost"
    assert [one["start"] for one in metrics["after"]] == [1, 1]
    assert all(one["recovered"] for one in metrics["after"])


def test_a_crash_loop_in_setup_ends_with_its_cause(kit: RunKit) -> None:
    """restart=one with a rank that always dies in setup: a bounded number of starts, then the cause; exit 4."""
    kit.write(args=["exit:9"], restart="one", max_restarts=2)
    done = kit.run()
    assert done.code == 4, done.err
    assert [(ended.rank, ended.start) for ended in kit.exits() if ended.exit_code == 9] == [(1, 0), (1, 1), (1, 2)]
    assert "actor/1" in done.block
    assert "exited with code 9" in done.block
    assert "restarted 2 times" in done.block


def test_a_rank_that_dies_too_often_is_not_waited_for(kit: RunKit) -> None:
    """restart=one beyond its limit during the run: the next call ends at once with the death; no peer is left."""
    kit.write(restart="one", max_restarts=2)
    done = kit.run(driver("again_and_again"))
    assert done.code == 4, done.err
    assert [line for line in done.err.splitlines() if "lost start" in line][-1].endswith("lost start 2")
    assert "actor/1 died" in done.block
    assert "exited with code 9" in done.block
    assert not kit.processes()
