from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml

from waiting import scaled, wait_until
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records

pytestmark = pytest.mark.alone

CONTROLLER = [sys.executable, "-m", "controller.cli", "run", "job.yaml", "scheduler.type=external"]
WORKER = [sys.executable, "-m", "workers", "start"]

ENGINES = """
import zbus
from zbus import Everywhere, PerRank


class Actor(zbus.Engine):
    def setup(self, ctx):
        self.rank = ctx.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def add(self, x):
        return x + self.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def parent(self):
        import os
        return os.getppid()
"""

DRIVER = """
def main(run):
    actor = run.bus.group("actor")
    return {"sums": actor.add(5), "agents": len(set(actor.parent()))}
"""


class Terminals:
    """Processes started side by side in one directory, as by a user with several terminals."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self._count = 0

    def type(self, command: list[str], *more: str) -> subprocess.Popen:
        """Start a command; its stderr goes to a file of its own, so that it can be read while it runs."""
        self._count += 1
        path = self.directory / f"terminal-{self._count}.err"
        with path.open("w") as err:
            process = subprocess.Popen(
                [*command, *more], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err
            )
        process.screen = path
        self._stack.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(scaled(15))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def screen(process: subprocess.Popen) -> str:
    """Return what the process has written on its terminal so far."""
    return process.screen.read_text()


def see(process: subprocess.Popen, words: str) -> str:
    """Wait until the words are on the terminal, and return everything that is."""
    wait_until(
        lambda: words in screen(process) or process.poll() is not None, 20, f"{words!r} on the screen of {process.args}"
    )
    assert words in screen(process), screen(process)
    return screen(process)


def ends(process: subprocess.Popen, code: int) -> None:
    """Wait for the end of a process and check its exit code."""
    try:
        process.wait(scaled(30))
    except subprocess.TimeoutExpired:
        pytest.fail(f"{process.args} still runs; on its screen: {screen(process)}")
    assert process.returncode == code, screen(process)


@pytest.fixture
def desk(tmp_path, monkeypatch, short_dir):
    """A directory with a small job of two ranks, in which terminals are opened."""
    (tmp_path / "engines.py").write_text(ENGINES)
    (tmp_path / "drv.py").write_text(DRIVER)
    job = {
        "experiment": "demo",
        "trial": "two",
        "target": "drv.py:main",
        "roles": {"actor": {"engine": "engines.py:Actor", "replicas": 2}},
        "trace": {"merge": False},
        "scheduler": {"startup_timeout": f"{scaled(30):g}s"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv("HOME", str(tmp_path))
    with ExitStack() as stack:
        yield Terminals(tmp_path, stack)
    left = [path for path in short_dir.rglob("*") if path.is_socket()]
    assert left == [], "socket files are left"


def summary(desk: Terminals) -> dict:
    """Return the summary of the run."""
    return json.loads((desk.directory / "zbus-runs" / "demo" / "two" / "summary.json").read_text())


def at(desk: Terminals) -> list[str]:
    """Return the options by which a worker is told its trial before that exists."""
    return ["--root", str(desk.directory / "zbus-runs"), "-e", "demo", "-t", "two"]


def test_the_controller_prints_the_line_that_the_other_terminal_needs(desk):
    """Controller first: what it prints while it waits, typed as it stands, completes the run; both exit 0."""
    controller = desk.type(CONTROLLER)
    text = see(controller, "zbus-worker start ")
    line = re.search(r"zbus-worker (start .*)", text)[1]
    worker = desk.type([*WORKER[:-1], *shlex.split(line)])
    ends(controller, 0)
    ends(worker, 0)
    assert summary(desk)["metrics"] == {"sums": [5, 6], "agents": 1}


def test_a_worker_waits_for_its_controller(desk):
    """Worker first, before the trial exists: it says what it waits for, then does the same job; both exit 0."""
    worker = desk.type(WORKER, "--role", "actor", "--nproc", "2", *at(desk))
    see(worker, "waiting for a controller")
    controller = desk.type(CONTROLLER)
    ends(controller, 0)
    ends(worker, 0)
    assert summary(desk)["metrics"]["sums"] == [5, 6]


@pytest.mark.parametrize("placed", [False, True], ids=["free-ranks", "given-ranks"])
def test_two_workers_share_the_ranks_of_a_role(desk, placed):
    """Two terminals with one rank each make the group, whether they name their ranks or take what is free."""
    controller = desk.type(CONTROLLER)
    workers = [
        desk.type(WORKER, "--role", "actor", *(["--rank", str(rank)] if placed else []), *at(desk)) for rank in (1, 0)
    ]
    ends(controller, 0)
    for worker in workers:
        ends(worker, 0)
    assert summary(desk)["metrics"] == {"sums": [5, 6], "agents": 2}


def test_tcp_does_the_same_job(desk):
    """Controller, hub and worker over tcp on loopback: the same answers and exits."""
    controller = desk.type(CONTROLLER, "scheduler.transport=tcp")
    worker = desk.type(WORKER, "--role", "actor", "--nproc", "2", "--transport", "tcp", *at(desk))
    ends(controller, 0)
    ends(worker, 0)
    assert summary(desk)["metrics"]["sums"] == [5, 6]
    with closing(Records(FileRegistry(desk.directory / "zbus-runs/demo/two/registry", create=False))) as records:
        assert all(record.main[0].startswith("tcp://127.0.0.1:") for record in records.workers())
        assert len(records.workers()) == 2


def test_a_missing_rank_is_named_with_what_to_do(desk):
    """With one of two ranks there at the deadline: exit 3 names the other, and the waiting worker is told to end."""
    controller = desk.type(CONTROLLER, f"scheduler.startup_timeout={scaled(4):g}s")
    worker = desk.type(WORKER, "--role", "actor", "--rank", "0", *at(desk))
    ends(controller, 3)
    text = screen(controller)
    assert "error[ZB0201]: actor/1 not ready within" in text
    assert re.search(r"actor/1 +nobody has started it", text)
    assert "actor/0" not in text.partition("error[ZB0201]")[2]
    ends(worker, 0)


def test_a_worker_that_is_one_too_many_is_refused_by_name(desk):
    """A third worker for two ranks ends with both holders named, and disturbs nobody."""
    controller = desk.type(CONTROLLER)
    first = desk.type(WORKER, "--role", "actor", "--rank", "0", *at(desk))
    see(first, "runs ranks 0")
    third = desk.type(WORKER, "--role", "actor", "--rank", "0", *at(desk))
    third.wait(scaled(20))
    assert third.returncode not in (0, None)
    text = screen(third)
    assert "actor/0 is already run by another agent" in text
    assert f"pid {first.pid}" in text
    second = desk.type(WORKER, "--role", "actor", "--rank", "1", *at(desk))
    ends(controller, 0)
    ends(first, 0)
    ends(second, 0)


def test_ctrl_c_in_either_terminal_ends_both_in_order(desk):
    """An interrupted controller takes the worker along (130 and 0); an interrupted waiting worker leaves alone."""
    worker = desk.type(WORKER, "--role", "actor", *at(desk))
    see(worker, "waiting for a controller")
    worker.send_signal(signal.SIGINT)
    ends(worker, 130)
    controller = desk.type(CONTROLLER)
    see(controller, "zbus-worker start ")
    worker = desk.type(WORKER, "--role", "actor", "--rank", "0", *at(desk))
    see(worker, "runs ranks 0")
    controller.send_signal(signal.SIGINT)
    ends(controller, 130)
    ends(worker, 0)
