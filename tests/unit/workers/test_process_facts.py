from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from waiting import scaled, wait_until
from zbus.runtime.processes import (
    ProcessHandle,
    catches,
    children_of,
    describe_exit,
    is_alive,
    parent_of,
    start_time,
    state_of,
)

NAMED = (
    "import ctypes, signal, time; ctypes.CDLL(None).prctl(15, b'a) R (b c', 0, 0, 0)\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler); print('up', flush=True)\ntime.sleep(60)"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Give a process whose command name holds spaces and parentheses."""
    process = subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_facts_of_a_process_survive_an_odd_name(child: subprocess.Popen[str]) -> None:
    """A command name with parentheses does not shift the fields of /proc/PID/stat."""
    started = start_time(child.pid)
    assert started is not None
    assert parent_of(child.pid) == os.getpid()
    assert wait_until(lambda: state_of(child.pid) == "S", what="the child asleep")
    assert child.pid in children_of(os.getpid())
    assert is_alive(child.pid, started)
    assert not is_alive(child.pid, started + 1)


def test_a_zombie_is_not_alive_but_can_be_held(child: subprocess.Popen[str]) -> None:
    """A dead child that nobody reaped has ended: its handle says so, and a signal does no harm."""
    started = start_time(child.pid)
    assert started is not None
    handle = ProcessHandle.open(child.pid, started)
    assert handle is not None
    assert not handle.wait(0)
    os.kill(child.pid, signal.SIGKILL)
    assert handle.wait(scaled(5))
    assert state_of(child.pid) == "Z"
    assert not is_alive(child.pid, started)
    handle.close()
    handle.close()
    assert handle.ended()
    assert not handle.signal(signal.SIGTERM)


def test_a_process_that_is_gone_has_no_facts(child: subprocess.Popen[str]) -> None:
    """Every question about a pid without a process has an answer, not an exception."""
    child.kill()
    child.wait()
    assert start_time(child.pid) is None
    assert state_of(child.pid) is None
    assert parent_of(child.pid) is None
    assert children_of(child.pid) == []
    assert not catches(child.pid, signal.SIGTERM)
    assert ProcessHandle.open(child.pid) is None
    assert ProcessHandle.open(0) is None
    assert ProcessHandle.open(-1) is None


def test_handlers_of_a_process_are_seen(child: subprocess.Popen[str]) -> None:
    """A signal is caught where somebody asked for it, and SIGUSR2 was not asked for."""
    assert catches(child.pid, signal.SIGINT)
    assert not catches(child.pid, signal.SIGUSR2)


def test_a_child_notices_that_its_parent_is_gone() -> None:
    """Asking to die with a parent that died already is answered with False at once."""
    code = "from zbus.runtime.processes import die_with_parent\nprint(die_with_parent(1 << 22, timeout_s=0.05))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_ends_are_said_in_words() -> None:
    """Codes, signals and what is not known."""
    assert describe_exit(7, None) == "exited with code 7"
    assert describe_exit(None, 11) == "killed by SIGSEGV"
    assert describe_exit(None, 40) == "killed by signal 40"
    assert describe_exit(None, None) == "ended, exit status unknown"
