"""Whether native code holds the GIL of a process, seen from outside: only then may its stack be taken by signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from waiting import wait_until
from zbus.runtime.gil import DumpSignal, GilWatch
from zbus.runtime.processes import start_time, state_of

PREPARE = """
import faulthandler, os, re, signal, sys, threading, time
from zbus.runtime.gil import name_thread
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
if len(sys.argv) > 1:
    faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "a"), all_threads=False, chain=True)
there, kept, lock = threading.Event(), threading.Event(), threading.Lock()
def answer():
    name_thread("answer")
    there.set()
    while True:
        asked = os.read(0, 1)
        with lock:
            os.write(1, asked)
def keep_lock():
    name_thread("keeper")
    with lock:
        kept.set()
        while True:
            time.sleep(0.01)
def down(n):
    return n and down(n - 1)
def spin():
    while True:
        down(10)
def hold():
    re.match(r"(a|a)*b", "a" * 60)  # for longer than anybody waits
def aside(work):
    threading.Thread(target=work, daemon=True).start()
aside(answer)
there.wait()
"""
LOCKED = "aside(keep_lock)\nkept.wait()\n"
"""Begun before the test is told that the process is there: threads that come later are not watched."""

HELD = ["hold()", "aside(hold)\nspin()", LOCKED + "hold()"]
FREE = ["time.sleep(60)", "spin()", "aside(spin)\nspin()"]


@contextmanager
def running(code: str, *stacks: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that has a thread which answers, beside what its main thread does."""
    pipe = subprocess.PIPE
    first = LOCKED if code.startswith(LOCKED) else ""
    program = f"{PREPARE}{first}os.write(1, b'!')\n{code.removeprefix(first)}"
    with subprocess.Popen([sys.executable, "-c", program, *stacks], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[bytes]) -> None:
    """Ask something."""
    assert process.stdin is not None
    os.write(process.stdin.fileno(), b"?")


def answered(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether there is an answer, and take it."""
    assert process.stdout is not None
    there = bool(select.select([process.stdout], [], [], 0)[0])
    return there and os.read(process.stdout.fileno(), 1) == b"?"


def held(process: subprocess.Popen[bytes], seen: Callable[[], bool]) -> bool:
    """Tell whether the process is seen to be held; ask it again whenever it answers, as it does until it is."""
    if answered(process):
        ask(process)
    return seen()


@pytest.mark.parametrize("code", HELD, ids=["main thread", "another", "locked"])
def test_a_process_that_native_code_holds_is_seen_to_be(code: str) -> None:
    """Whichever of its threads has the GIL; the answering thread waits for it, or for one that does."""
    with running(code) as process:
        watch = GilWatch(process.pid)
        ask(process)
        wait_until(lambda: held(process, watch.held), what="the silence")
        assert not answered(process)


@pytest.mark.parametrize("code", FREE, ids=["asleep", "python code", "two threads of it"])
def test_a_process_that_runs_python_code_answers_before_it_is_taken_for_held(code: str) -> None:
    """However long the answer takes on a busy machine."""
    with running(code) as process:
        for _ in range(20):
            watch = GilWatch(process.pid)
            ask(process)
            while not answered(process):
                assert not watch.held()
                time.sleep(0.001)  # more often than the product looks


@pytest.mark.parametrize("code", [*HELD[:2], *FREE])
def test_a_process_that_was_asked_nothing_is_not_held(code: str) -> None:
    """Nobody waits for its GIL, so nobody can tell."""
    with running(code) as process:
        watch = GilWatch(process.pid)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert not watch.held()
            time.sleep(0.005)  # that is how often the product looks


def test_a_stopped_or_ended_process_is_not_held() -> None:
    """What it will do when it goes on, and what the signal will hit then, nobody knows."""
    with running("hold()") as process:
        watch = GilWatch(process.pid)
        ask(process)
        wait_until(lambda: held(process, watch.held), what="the silence")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T", what="the stop")
        assert not watch.held()
        process.kill()
        wait_until(lambda: state_of(process.pid) == "Z", what="the end")
        assert not watch.held()
        process.wait()
        assert not watch.held()
        assert not GilWatch(process.pid).held()


def test_the_signal_is_sent_once_and_the_stack_is_written(tmp_path: Path) -> None:
    """A process held by native code writes the stack of its main thread, and lives on."""
    stacks = tmp_path / "stacks"
    with running("hold()", stacks) as process:
        dump = DumpSignal.open(process.pid, start_time(process.pid))
        assert dump is not None
        ask(process)
        wait_until(lambda: held(process, dump.send), what="the silence")
        wait_until(lambda: "in <module>" in stacks.read_text(), what="the stack")
        assert dump.send()
        dump.close()
        text = stacks.read_text()
        assert "in hold\n" in text
        assert text.count("most recent call first") == 1
        assert process.poll() is None


def test_a_process_without_a_handler_is_never_signalled() -> None:
    """The signal would do nothing there, or end it; nor is it sent to whoever has the pid by now."""
    with running("hold()") as process:
        dump = DumpSignal.open(process.pid)
        watch = GilWatch(process.pid)
        assert dump is not None
        ask(process)
        wait_until(lambda: held(process, watch.held), what="the silence")
        assert not dump.send()
        dump.close()
        assert DumpSignal.open(process.pid, (start_time(process.pid) or 0) + 1) is None
