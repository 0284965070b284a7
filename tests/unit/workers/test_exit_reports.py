from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from workers.cgroup import MemoryCounters, MemoryWatch, OomVerdict, read_counters
from workers.exits import RankExit, log_tail, make_record
from workers.spawn import hold_port, open_log, thread_defaults
from zbus.config import TrialDir


@pytest.fixture
def trial(tmp_path: Path) -> TrialDir:
    """Give an empty trial directory."""
    found = TrialDir.create(tmp_path, "e", "t")
    found.unlock()
    return found


def _ended(trial: TrialDir, **fields) -> RankExit:
    path = trial.log("actor", 0, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("one\ntwo\n")
    base = {
        "role": "actor",
        "rank": 0,
        "start": 2,
        "incarnation": 5,
        "agent": "a",
        "host": "h",
        "pid": 7,
        "log": path,
    }
    return RankExit(**{**base, **fields})


def test_an_orderly_end_leaves_no_crash_file(trial: TrialDir) -> None:
    """Code 0 and an asked end are not crashes."""
    for fields in ({"exit_code": 0}, {"exit_code": 143, "asked": True}, {"signum": 9, "asked": True}):
        record = make_record(trial, _ended(trial, **fields))
        assert record.crash_file == ""
        assert record.stopped == fields.get("asked", False)
    assert list(trial.crash.iterdir()) == []


def test_the_workers_own_words_stay_in_the_crash_file(trial: TrialDir) -> None:
    """What the worker wrote about its exception is kept; the agent adds how the process ended."""
    own = {"exception": {"type": "ValueError", "message": "bad\nworse", "traceback": "tb"}, "step": 3}
    trial.crash_file("actor", 0, 2).write_text(json.dumps(own))
    record = make_record(trial, _ended(trial, exit_code=1))
    assert record.reason == "exited with code 1 after ValueError: bad"
    report = json.loads((trial.path / record.crash_file).read_text())
    assert report["exception"] == own["exception"]
    assert report["step"] == 3
    assert report["exit"]["reason"] == "exited with code 1"
    assert report["log_tail"] == ["one", "two"]


def test_half_a_crash_file_is_kept_as_text(trial: TrialDir) -> None:
    """A worker that died while it wrote loses nothing of what it wrote."""
    trial.crash_file("actor", 0, 2).write_text('{"exception": {"ty')
    record = make_record(trial, _ended(trial, signum=signal.SIGKILL))
    report = json.loads((trial.path / record.crash_file).read_text())
    assert report["worker_text"] == '{"exception": {"ty'
    assert report["exit"]["signal"] == 9


def test_a_disk_that_takes_no_crash_file_still_gets_an_exit_record(trial: TrialDir) -> None:
    """The exit record does not depend on the crash report."""
    for entry in trial.crash.iterdir():
        entry.unlink()
    trial.crash.rmdir()
    trial.crash.write_text("in the way")
    record = make_record(trial, _ended(trial, exit_code=3))
    assert (record.exit_code, record.crash_file) == (3, "")


def test_the_reason_carries_the_evidence_of_an_oom_kill(trial: TrialDir) -> None:
    """The cause of a memory kill is part of the reason."""
    record = make_record(trial, _ended(trial, signum=9, oom=OomVerdict(oom=True, evidence="oom_kill 0 -> 1")))
    assert record.reason == "killed by SIGKILL; oom_kill 0 -> 1"
    assert record.oom


def test_a_log_tail_is_bounded_in_lines_bytes_and_width(tmp_path: Path) -> None:
    """However large or odd the log, the tail is small and whole lines."""
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert log_tail(path)[-1] == "line 99999"
    assert len(log_tail(path)) == 20
    path.write_text("x" * 1_000_000)
    assert [len(line) for line in log_tail(path)] == [400]
    path.write_bytes(b"\xff\xfe broken\nend")
    assert log_tail(path)[-1] == "end"
    assert log_tail(tmp_path / "missing") == []
    link = tmp_path / "link"
    link.symlink_to("/etc/hostname")
    assert log_tail(link) == []
    os.mkfifo(tmp_path / "fifo")
    assert log_tail(tmp_path / "fifo") == []


def _v1(directory: Path, kills: int, peak: int = 100 << 20) -> None:
    (directory / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (directory / "memory.failcnt").write_text("12\n")
    (directory / "memory.limit_in_bytes").write_text(f"{100 << 20}\n")
    (directory / "memory.max_usage_in_bytes").write_text(f"{peak}\n")


def test_counters_of_both_cgroup_versions_are_read(tmp_path: Path) -> None:
    """v1 and v2 say the same things in different files; an unlimited group has no limit."""
    one, two = tmp_path / "v1", tmp_path / "v2"
    one.mkdir()
    two.mkdir()
    _v1(one, 3)
    assert read_counters(one) == MemoryCounters(3, 12, 100 << 20, 100 << 20)
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_counters(one).limit_bytes is None
    (two / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n")
    (two / "memory.max").write_text("max\n")
    (two / "memory.peak").write_text("4096\n")
    assert read_counters(two) == MemoryCounters(1, 7, None, 4096)
    assert read_counters(tmp_path) == MemoryCounters()


def test_only_an_unasked_sigkill_with_evidence_is_an_oom_kill(tmp_path: Path, monkeypatch) -> None:
    """Other signals and our own kills are never called out of memory; a kill elsewhere on the host is only a hint."""
    _v1(tmp_path, 0)
    host = [5]
    monkeypatch.setattr("workers.cgroup.cgroup_directory", lambda _pid: tmp_path)
    monkeypatch.setattr("workers.cgroup._host_kills", lambda: host[0])
    watch = MemoryWatch(4711, kernel_log=list)
    assert watch.verdict(signal.SIGKILL) == OomVerdict()
    host[0] = 6
    assert not watch.verdict(signal.SIGKILL).oom
    assert "not known which" in watch.verdict(signal.SIGKILL).evidence
    _v1(tmp_path, 1)
    assert watch.verdict(signal.SIGSEGV) == OomVerdict()
    assert watch.verdict(signal.SIGKILL, by_us=True) == OomVerdict()
    verdict = watch.verdict(signal.SIGKILL)
    assert verdict.oom
    assert verdict.evidence == "memory limit of its cgroup was hit (oom_kill 0 -> 1, peak 100 MiB of 100 MiB)"
    named = MemoryWatch(4711, kernel_log=lambda: ["6,1;Memory cgroup out of memory: Killed process 4711 (python) x"])
    _v1(tmp_path, 2)
    assert named.verdict(signal.SIGKILL).evidence.endswith("kernel log: Killed process 4711 (python)")


def test_thread_defaults_respect_what_is_set() -> None:
    """Only unset variables get a default: 1, or what OMP_NUM_THREADS says."""
    assert thread_defaults({})["OMP_NUM_THREADS"] == "1"
    found = thread_defaults({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"})
    assert "OMP_NUM_THREADS" not in found
    assert "MKL_NUM_THREADS" not in found
    assert found["OPENBLAS_NUM_THREADS"] == "4"


def test_a_held_port_cannot_be_had_by_others() -> None:
    """The port is bound and listening while it is held."""
    import socket

    held = hold_port("127.0.0.1")
    port = held.getsockname()[1]
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    held.close()


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nobody can have a rank write where a planted link points."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.0.log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"[Ss]ymbolic"):
        open_log(tmp_path / "x" / "0.0.log")
