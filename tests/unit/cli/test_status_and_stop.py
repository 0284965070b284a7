from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from controller.console import Console
from controller.status import describe, show_status
from controller.stop import stop_trial
from controller.trials import find_trial, open_records, snapshot
from waiting import wait_until
from zbus.config import TrialDir, write_atomically
from zbus.errors import RegistryError, TrialError
from zbus.registry.identity import pid_space
from zbus.registry.records import AgentRecord, EpochRecord, ExitRecord, JobRecord, WorkerRecord
from zbus.runtime.processes import start_time

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def console():
    """A console whose streams can be read."""
    return Console(_stdout=io.StringIO(), _stderr=io.StringIO())


@pytest.fixture
def spawn():
    """Start processes that are gone after the test."""
    started = []

    def start(code=SLEEPER):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "up\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def here(process=None, **more):
    """Return the identity fields of a process of this host."""
    pid = os.getpid() if process is None else process.pid
    return {
        "host": socket.gethostname(),
        "pid_space": pid_space(),
        "pid": pid,
        "pid_start": start_time(pid) or 1,
        **more,
    }


def make_trial(root, name="t1", experiment="demo"):
    """Return an unlocked trial with its records open for writing."""
    trial = TrialDir.create(root, experiment, name)
    trial.unlock()
    return trial, open_records(trial)


def worker(rank, incarnation, **more):
    """Return the record of one rank."""
    return WorkerRecord(role="actor", rank=rank, world_size=3, incarnation=incarnation, **more)


def test_a_trial_is_found_by_what_people_type(tmp_path):
    """A directory, EXPERIMENT/TRIAL, TRIAL, EXPERIMENT or nothing (the newest) name a trial."""
    first, _ = make_trial(tmp_path, "t1")
    second, _ = make_trial(tmp_path, "t2")
    os.utime(first.path, (1, 1))
    for text in (str(first.path), "demo/t1", "t1"):
        assert find_trial(str(tmp_path), text).path == first.path
    for text in ("demo", "last", None):
        assert find_trial(str(tmp_path), text).path == second.path


def test_a_trial_that_is_not_clear_is_an_error(tmp_path):
    """Two trials of one name, a misspelling, and nothing at all end with exit code 8 and a way out."""
    make_trial(tmp_path, "t1", "one")
    make_trial(tmp_path, "t1", "two")
    with pytest.raises(TrialError, match="2 trials are named t1: ") as caught:
        find_trial(str(tmp_path), "t1")
    assert caught.value.exit_code == 8
    with pytest.raises(TrialError, match="trial one/t7 is not found") as caught:
        find_trial(str(tmp_path), "one/t7")
    assert caught.value.hint == "did you mean one/t1?"
    with pytest.raises(TrialError, match="no trial is running"):
        find_trial(str(tmp_path), None, running=True)


def test_the_state_of_a_trial_is_judged_by_facts(tmp_path):
    """Running by lock or live process, finished by summary, lost by a controller that is gone, else unknown."""
    trial, records = make_trial(tmp_path)
    assert snapshot(trial).state == "lost"
    records.claim_epoch(EpochRecord(session="aa", **here()))
    assert snapshot(trial).state == "running"
    records.claim_epoch(EpochRecord(session="bb", **here(pid_start=1)))
    assert snapshot(trial).state == "lost"
    records.claim_epoch(EpochRecord(session="cc", host="far", pid_space="other", pid=os.getpid()))
    assert snapshot(trial).state == "unknown"
    for status, state in (("ok", "finished"), ("failed", "failed"), ("interrupted", "interrupted")):
        write_atomically(trial.summary, json.dumps({"status": status}))
        assert snapshot(trial).state == state
    trial.lock()
    assert snapshot(trial).state == "running"
    trial.unlock()


def test_each_rank_shows_how_it_is(tmp_path, spawn):
    """A dead rank shows its exit, a live one that is silent says so, a vanished one is lost; newest starts only."""
    trial, records = make_trial(tmp_path)
    records.publish_job(JobRecord(role="actor", engine="m:C", world_size=4))
    records.claim_epoch(EpochRecord(session="aa", **here()))
    alive = spawn()
    records.publish_worker(worker(0, 1, **here(start=0)))
    records.publish_worker(worker(0, (1 << 48) | 5, **here(alive, start=1)))
    records.publish_worker(worker(1, 2, **here()))
    records.publish_exit(ExitRecord(role="actor", rank=1, incarnation=2, signal=9, oom=True))
    records.publish_worker(worker(2, 3, **here(pid_start=1)))
    data = describe(snapshot(trial), probe_s=0.2)
    assert [(w["rank"], w["start"], w["state"], w["note"]) for w in data["workers"]] == [
        (0, 1, "running", "did not answer"),
        (1, 0, "exited", "killed by SIGKILL (out of memory)"),
        (2, 0, "lost", None),
    ]
    assert data["roles"] == [{"role": "actor", "world_size": 4, "ready": 1, "exited": 1, "missing": 1}]
    assert data["schema"] == "zbus.status/1"


def test_status_is_a_table_or_one_object(tmp_path, console):
    """The text has one line per rank with aligned columns; foreign text is made harmless; --json is the same data."""
    trial, records = make_trial(tmp_path)
    records.publish_worker(worker(10, 1, host="a\x1b[2J", pid=5))
    records.publish_exit(ExitRecord(role="actor", rank=10, incarnation=1, exit_code=7))
    assert show_status(console, str(tmp_path), "t1") == 0
    lines = console.stdout.getvalue().splitlines()
    assert lines[0] == "demo/t1  lost"
    assert lines[1].split()[:3] == ["role", "rank", "host"]
    assert "exited with code 7" in lines[2]
    assert "\x1b" not in console.stdout.getvalue()
    as_json = Console(json=True, _stdout=io.StringIO(), _stderr=io.StringIO())
    show_status(as_json, None, str(trial.path))
    assert json.loads(as_json.stdout.getvalue())["workers"][0]["exit"] == {"code": 7, "signal": None, "oom": False}


def test_junk_in_the_registry_does_not_hide_the_rest(tmp_path, console):
    """A file that is no record is skipped."""
    trial, records = make_trial(tmp_path)
    records.publish_worker(worker(0, 1, **here()))
    (trial.registry / "workers" / "actor.1.9").write_bytes(b"garbage")
    assert [w["rank"] for w in describe(snapshot(trial), probe_s=0)["workers"]] == [0]


def test_stop_ends_the_controller_then_the_rest(tmp_path, console, spawn):
    """The controller goes first; an agent and a rank that outlive it are ended too; nothing else is touched."""
    _trial, records = make_trial(tmp_path)
    controller, agent, rank, innocent = (spawn() for _ in range(4))
    records.claim_epoch(EpochRecord(session="aa", **here(controller)))
    records.publish_agent(AgentRecord(agent="a1", role="actor", **here(agent)))
    records.publish_worker(worker(0, 1, **here(rank)))
    records.publish_worker(worker(1, 2, **here(innocent, pid_start=1)))  # its pid is another process's by now
    assert stop_trial(console, str(tmp_path), "t1", grace_s=5) == 0
    assert [p.wait() for p in (controller, agent, rank)] == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]
    assert innocent.poll() is None
    assert "stopped demo/t1: 3 processes" in console.stdout.getvalue()


def test_stop_kills_what_ignores_it(tmp_path, console, spawn):
    """After the grace a process that ignores SIGTERM is killed; --force does so at once."""
    _trial, records = make_trial(tmp_path)
    controller = spawn(STUBBORN)
    records.claim_epoch(EpochRecord(session="aa", **here(controller)))
    stop_trial(console, str(tmp_path), "t1", grace_s=0.1)
    assert controller.wait() == -signal.SIGKILL

    second = spawn(STUBBORN)
    records.claim_epoch(EpochRecord(session="bb", **here(second)))
    began = time.monotonic()
    stop_trial(console, str(tmp_path), "t1", grace_s=60, force=True)
    assert second.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 30


def test_stopping_what_does_not_run_is_no_error(tmp_path, console):
    """An idle trial is said to be idle; processes of other hosts are named, not signalled."""
    _trial, records = make_trial(tmp_path)
    assert stop_trial(console, str(tmp_path), "t1", grace_s=1) == 0
    assert "demo/t1 is idle" in console.stdout.getvalue()
    records.claim_epoch(EpochRecord(session="aa", host="far", pid_space="other", pid=os.getpid(), pid_start=1))
    assert stop_trial(console, str(tmp_path), "t1", grace_s=1) == 0
    assert "controller on far" in console.stderr.getvalue()


def test_a_registry_that_cannot_be_read_says_so(tmp_path, console):
    """A registry open to other users is refused with exit code 5."""
    trial, _ = make_trial(tmp_path)
    trial.registry.chmod(0o777)
    with pytest.raises(RegistryError):
        show_status(console, str(tmp_path), "t1")


SIGNALLED = """
import sys, time
from controller.console import Console
from controller.signals import Interrupts
interrupts = Interrupts(Console(), lambda code: print("forced", code, flush=True), grace_s=float(sys.argv[1]))
with interrupts:
    try:
        print("up", flush=True)
        time.sleep(60)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    interrupts.closing()
    if sys.argv[2] == "hang":
        while True:
            time.sleep(60)
sys.exit(interrupts.exit_code)
"""


def signalled(grace, ending, *numbers):
    """Send signals one after another, each when the last was dealt with; return output and exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, str(grace), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "up\n"
        lines = []
        for index, number in enumerate(numbers):
            process.send_signal(number)
            if index < len(numbers) - 1:
                lines.append(process.stdout.readline())
        rest, _ = process.communicate()
    return "".join(lines) + rest, process.returncode


@pytest.mark.parametrize(
    ("ending", "numbers", "grace", "output", "code"),
    [
        ("end", [signal.SIGINT], 60, "KeyboardInterrupt\n", 130),
        ("end", [signal.SIGTERM], 60, "Terminated\n", 143),
        ("hang", [signal.SIGINT, signal.SIGINT], 60, "KeyboardInterrupt\nforced 130\n", 130),
        ("hang", [signal.SIGTERM, signal.SIGINT], 60, "Terminated\nforced 143\n", 143),
        ("hang", [signal.SIGINT], 0.2, "KeyboardInterrupt\nforced 130\n", 130),
    ],
    ids=["interrupt", "terminate", "interrupt twice", "terminate, interrupt", "stop that hangs"],
)
def test_the_first_signal_stops_in_order_and_the_second_at_once(ending, numbers, grace, output, code):
    """One signal raises in the user's code; a second one, or a stop that takes too long, ends the process."""
    assert signalled(grace, ending, *numbers) == (output, code)


def test_a_holder_that_lives_shows_as_running(tmp_path, spawn):
    """A trial whose lock a live process holds is running, even before it has an epoch."""
    code = (
        f"import time; from zbus.config import TrialDir; TrialDir.create({str(tmp_path)!r}, 'demo', 't9');"
        "print('up', flush=True); time.sleep(600)"
    )
    process = spawn(code)
    trial = find_trial(str(tmp_path), None, running=True)
    assert (trial.trial, snapshot(trial).state) == ("t9", "running")
    process.kill()
    wait_until(lambda: snapshot(trial).state == "lost", 10, "the trial to show as lost")
