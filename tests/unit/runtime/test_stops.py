"""How a worker is told to stop, and that a full log keeps none from starting or ending."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from waiting import scaled
from zbus.protocol.messages import Effect
from zbus.registry.records import JobRecord
from zbus.runtime.host import EXIT_BUS_DIED, EXIT_TERMINATED, HostConfig, _Host
from zbus.runtime.journal import journal_file


class FullDisk(io.TextIOBase):
    """A log on a disk that is full."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def worker(trial_dir: Path) -> _Host:
    """Return a worker that is not open yet."""
    job = JobRecord(role="actor", engine="m:E", world_size=1, shared_memory=0)
    return _Host(HostConfig("e", "t", trial_dir, "actor", 0, 1, 1, job))


def test_a_second_sigterm_while_the_first_is_acted_on_stops_the_worker_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It falls due inside the section that drains, and runs at that section's end, within ``stop`` itself."""
    host = worker(tmp_path)
    do = host.server._do
    drained: list[int] = []

    def does(effects: Sequence[Effect]) -> None:
        drained.append(1)
        if len(drained) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        do(effects)

    def late(*_: object) -> None:
        raise TimeoutError("stop waits for itself")

    monkeypatch.setattr(host.server, "_do", does)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        signal.signal(signal.SIGTERM, host._on_term)
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, scaled(5))
        os.kill(os.getpid(), signal.SIGTERM)
        assert host.server.stopping
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        host.close()
    assert (len(drained), host.exit_code) == (2, EXIT_TERMINATED)


def test_a_worker_whose_journal_and_log_have_no_room_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is no journal cannot be said either."""
    path = journal_file(tmp_path, "actor", 0, 0)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("no directory")
    monkeypatch.setattr(sys, "stderr", FullDisk())
    host = worker(tmp_path)
    host.close()
    assert host.journal is None


def test_a_worker_whose_bus_thread_died_ends_though_its_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look alive for ever."""
    ended: list[int] = []
    host = worker(tmp_path)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(OSError, match="No space"):
        host._bus_ended(ValueError("bad"))
    host.close()
    assert ended == [EXIT_BUS_DIED]
