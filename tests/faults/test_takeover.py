"""A controller dies; another takes its trial over: fencing, adoption of workers and of what they had run."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import zbus
from controller import Controller
from controller import launching as stations
from launching import HERE, launch, probes
from waiting import scaled, wait_until
from zbus.runtime.processes import is_alive, start_time
from zbus.transport.client import PeerState

FIRST = textwrap.dedent(
    """
    import os, sys, time
    sys.path.insert(0, {here!r})
    from controller import Controller
    from launching import probes

    bus = Controller.launch("test", {{"actor": probes(2, orphans="wait")}}, root={root!r}, trial="t")
    actor = bus.group("actor")
    actor.note("before")
    busy = actor[0].wait_for.submit({go!r})
    queued = actor[0].note.submit("queued behind it")
    print("ready", flush=True)
    time.sleep(600)
    """
)


def first_controller(root: Path) -> subprocess.Popen:
    """Start a controller that has a call running, until there is a file ``go``, and one queued; return it then."""
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST.format(here=str(HERE), root=str(root), go=str(root / "go"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def takes_over(tmp_path, monkeypatch):
    """Have what runs for the first controller end once the workers obey the second: a takeover waits for that."""
    await_ready = stations._await_ready

    def obeyed(members):
        peers = [member.peer for member in members.roles["actor"].members]
        return all(peer is not None and peer.state is PeerState.READY for peer in peers)

    def end_what_runs(session, members, *rest):
        wait_until(lambda: obeyed(members), what="the workers to obey the second controller")
        (tmp_path / "go").touch()
        await_ready(session, members, *rest)

    monkeypatch.setattr(stations, "_await_ready", end_what_runs)


def test_a_successor_adopts_workers_and_the_result_of_what_ran(tmp_path, takes_over):
    """The successor has the same processes; queued calls are gone, the result of a running one is kept."""
    first = first_controller(tmp_path)
    try:
        with pytest.raises(zbus.TrialError, match=r"in use|alive"):
            Controller.takeover(tmp_path / "test" / "t")
        with Controller.attach(tmp_path / "test" / "t") as guest:
            wait_until(lambda: any(s["call"] for s in guest.statuses().values()), what="the call to run")
            pids = {s["rank"]: s["pid"] for s in guest.statuses().values()}
        first.send_signal(signal.SIGKILL)
        first.wait()
        with Controller.takeover(tmp_path / "test" / "t", timeout=scaled(30)) as bus:
            assert bus.epoch == 2
            actor = bus.group("actor")
            assert {answer["rank"]: answer["pid"] for answer in actor.whoami()} == pids
            assert actor.notes() == [["before"], ["before"]], "what was queued for the old controller never starts"
            ended = wait_until(
                lambda: [o for o in bus.orphans() if o.methods == ["wait_for"] and not o.running],
                what="the running call of the first controller to end",
            )
            assert (ended[0].role, ended[0].rank, ended[0].epoch) == ("actor", 0, 1)
            assert ended[0].result() == str(tmp_path / "go")
            assert not [o for o in bus.orphans() if o.methods == ["wait_for"]], "an orphan is adopted once"
            started = [(pid, start_time(pid)) for pid in pids.values()]
        assert not any(is_alive(pid, at) for pid, at in started), "the successor's close ends the workers"
    finally:
        first.kill()
        first.wait()


def test_a_controller_that_was_replaced_is_fenced(tmp_path, takes_over):
    """A controller that was suspended while another took over gets a fenced error and changes nothing."""
    first = first_controller(tmp_path)
    try:
        first.send_signal(signal.SIGKILL)
        first.wait()
        with Controller.takeover(tmp_path / "test" / "t", timeout=scaled(30)) as second:
            from zbus.ids import WorkerName, new_session
            from zbus.transport.client import Client
            from zbus.transport.sockets import SocketFactory

            factory = SocketFactory()
            late = Client(session=new_session(), epoch=1, factory=factory)
            worker = second._session.members.roles["actor"].members[0].record
            peer = late.connect(WorkerName("actor", 0), worker.incarnation, {"main": worker.main, "ctl": worker.ctl})
            late.wait(lambda: peer.state is PeerState.DEAD, scaled(10))
            assert peer.reason == "superseded"
            assert "epoch 2" in peer.evidence
            late.close()
            factory.close()
            assert second.group("actor").echo(1) == 1
    finally:
        first.kill()
        first.wait()


SUSPENDED = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {here!r})
    import zbus
    from controller import Controller
    from controller.render import exit_code_of
    from launching import probes
    from waiting import wait_until

    roles = {{"actor": probes(2, orphans="wait", restart="{restart}")}}
    bus = Controller.launch("test", roles, root={root!r}, trial="t")
    actor = bus.group("actor")
    out = actor[0].wait_for.submit({go!r})
    wait_until(lambda: out.outcomes()[0].state.startswith("running"), what="the call to run")
    actor[0].note.submit("queued behind it")
    print("ready", flush=True)
    sys.stdin.readline()
    for call in (lambda: out.result(60), lambda: actor.note("late"), lambda: actor[1].note("later")):
        try:
            call()
            print("answered", flush=True)
        except BaseException as error:
            cause = error.root if isinstance(error, zbus.BatchError) else error
            print(isinstance(cause, zbus.Fenced), isinstance(cause, zbus.WorkerLost), exit_code_of(error), flush=True)
    """
)


@pytest.mark.parametrize("restart", ["never", "one"])
def test_a_suspended_controller_is_told_that_it_was_replaced(tmp_path, monkeypatch, takes_over, restart):
    """SIGSTOP, takeover as from another host whose lease check passed, SIGCONT: Fenced, exit 11, nothing runs."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SUSPENDED.format(here=str(HERE), root=str(tmp_path), restart=restart, go=str(tmp_path / "go")),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr("controller.launching.refuse_living", lambda *_, **__: None)
        monkeypatch.setattr("zbus.config.TrialDir.lock", lambda *_: None)
        with Controller.takeover(tmp_path / "test" / "t", timeout=scaled(30)) as second:
            process.send_signal(signal.SIGCONT)
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "answered\n", "what ran may end, and its answer still comes"
            assert [process.stdout.readline().split() for _ in range(2)] == [["True", "False", "11"]] * 2
            notes = second.group("actor").notes()
        assert notes == [[], []]
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_second_launch_on_a_running_trial_is_refused(tmp_path):
    """Two controllers at once: the second one hears who holds the trial, and the first one goes on."""
    with launch(tmp_path, {"actor": probes(1)}, trial="t") as bus:
        with pytest.raises(zbus.TrialError, match=r"in use|alive|running"):
            Controller.launch("test", {"actor": probes(1)}, root=tmp_path, trial="t")
        assert bus.group("actor").echo(1) == 1
        assert bus.epoch == 1


def test_a_trial_without_a_controller_cannot_be_taken_over(tmp_path):
    """Taking over what is no trial, or a finished one whose workers are gone, says so."""
    with pytest.raises(zbus.TrialError, match="not a trial"):
        Controller.takeover(tmp_path)
    with launch(tmp_path, {"actor": probes(1)}, trial="done") as bus:
        path = bus.trial.path
    with pytest.raises(zbus.StartupError, match="actor/0"):
        Controller.takeover(path, timeout=1.0)
    assert (path / "registry").is_dir()
