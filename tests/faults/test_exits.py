from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent_kit import AgentKit, agent_kit
from waiting import wait_until, within
from zbus.runtime.processes import ProcessHandle, start_time


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial with agents that leave nothing behind."""
    yield from agent_kit(tmp_path)


both_ways = pytest.mark.parametrize("use_template", [True, False], ids=["fork", "exec"])


def _one_exit(kit: AgentKit, do: str, *, use_template: bool = True):
    kit.lead(kit.job(do))
    code, text = kit.end(kit.agent(use_template=use_template))
    (record,) = kit.exits()
    return code, text, record


@both_ways
def test_an_exit_code_is_kept_exactly(kit: AgentKit, use_template: bool) -> None:
    """Code 7 is recorded as 7 with the log tail and a crash file, and the agent ends with 4 (B29)."""
    code, text, record = _one_exit(kit, "print:last words;osexit:7", use_template=use_template)
    assert (code, record.exit_code, record.signal, record.oom) == (4, 7, None, False)
    assert record.reason == "exited with code 7"
    assert record.log == "logs/actor/0.0.log"
    assert record.log_tail == ["last words"]
    assert "actor/0 exited with code 7" in text
    report = json.loads((kit.trial.path / record.crash_file).read_text())
    assert report["exit"]["exit_code"] == 7
    assert report["log_tail"] == ["last words"]


@pytest.mark.parametrize(
    ("do", "signum", "use_template"),
    [
        ("segfault", signal.SIGSEGV, True),
        ("segfault", signal.SIGSEGV, False),
        ("kill:9", signal.SIGKILL, True),
        ("kill:6", signal.SIGABRT, True),
        ("kill:15", signal.SIGTERM, True),
    ],
)
def test_a_signal_is_named(kit: AgentKit, do: str, signum: signal.Signals, use_template: bool) -> None:
    """A rank ended by a signal has no exit code, and its reason names the signal (B29, faults 1 and 11)."""
    code, _, record = _one_exit(kit, do, use_template=use_template)
    assert (code, record.exit_code, record.signal) == (4, None, signum)
    assert record.reason == f"killed by {signum.name}"
    assert not record.stopped


@both_ways
def test_an_exception_is_in_the_reason_the_crash_file_and_the_log(kit: AgentKit, use_template: bool) -> None:
    """An unhandled exception ends the rank with 1; type, message and traceback are kept."""
    _, _, record = _one_exit(kit, "raise:bad tensor", use_template=use_template)
    assert (record.exit_code, record.signal) == (1, None)
    assert record.reason == "exited with code 1 after ValueError: bad tensor"
    assert record.log_tail[-1] == "ValueError: bad tensor"
    report = json.loads((kit.trial.path / record.crash_file).read_text())
    assert report["exception"]["type"] == "ValueError"
    assert "_step" in report["exception"]["traceback"]


def test_an_exception_without_a_text_is_reported_all_the_same(kit: AgentKit) -> None:
    """An exception whose repr and str raise still ends with code 1 and its type (fault 13)."""
    _, _, record = _one_exit(kit, "unprintable")
    assert record.exit_code == 1
    assert "UnprintableError" in record.reason


@pytest.mark.parametrize(
    ("argument", "code", "use_template"), [("3", 3, True), ("3", 3, False), ("0", 0, True), ("enough", 1, True)]
)
def test_system_exit_gives_its_code(kit: AgentKit, argument: str, code: int, use_template: bool) -> None:
    """SystemExit ends a rank as it ends any Python program (fault 14)."""
    agent_code, _, record = _one_exit(kit, f"sysexit:{argument}", use_template=use_template)
    assert record.exit_code == code
    assert agent_code == (0 if code == 0 else 4)
    if argument == "enough":
        assert record.log_tail == ["enough"]


def test_a_lone_rank_can_lend_the_agent_its_code(kit: AgentKit) -> None:
    """With propagate_exit the agent ends as its only rank did."""
    kit.lead(kit.job("exit:42"))
    assert kit.end(kit.agent(propagate_exit=True))[0] == 42


@both_ways
def test_a_child_that_holds_stdout_does_not_hide_a_death(kit: AgentKit, use_template: bool) -> None:
    """A death is seen within a second although a child has the log open, and the child goes too (B30)."""
    kit.lead(kit.job("child;kill:9"))
    agent = kit.agent(use_template=use_template)
    record = kit.exit()
    assert record.signal == signal.SIGKILL
    kit.end(agent)
    child = int(kit.log().split()[1])
    wait_until(lambda: not kit.alive(child), what="the rank's child gone")


def test_a_process_that_left_the_session_does_not_outlive_the_agent(kit: AgentKit) -> None:
    """A rank's child in a session of its own is found through the subreaper and ended with the agent."""
    kit.lead(kit.job("daemon;sleep"))
    agent = kit.agent()
    log = kit.wait_log("daemon")
    agent.send_signal(signal.SIGTERM)
    assert kit.end(agent)[0] == 143
    assert not kit.alive(int(log.split()[1]))


def test_each_start_has_a_log_of_its_own(kit: AgentKit) -> None:
    """A restarted rank writes a new log, and its report quotes only that one (B31)."""
    kit.lead(kit.job("print:start {spec.start};exit:5", restart="one", max_restarts=2, restart_window_s=60.0))
    code, text = kit.end(kit.agent())
    assert code == 4, text
    assert [(r.start, r.log, r.log_tail) for r in kit.exits()] == [
        (n, f"logs/actor/0.{n}.log", [f"start {n}"]) for n in range(3)
    ]
    assert len({r.incarnation for r in kit.exits()}) == 3


def test_a_crash_loop_ends_with_its_first_cause(kit: AgentKit) -> None:
    """More restarts than the policy allows end the agent, naming the first cause (fault 21)."""
    kit.lead(kit.job("exit:5", restart="one", max_restarts=2, restart_window_s=60.0))
    code, text = kit.end(kit.agent())
    assert code == 4
    assert "giving up: rank 0 exited with code 5; restarted 2 times within 60 s (limit 2)" in text
    assert len(kit.exits()) == 3


def test_one_rank_of_a_collective_restarts_all(kit: AgentKit) -> None:
    """Under restart=all the death of one rank replaces every rank, and peers are noted as stopped (fault 22)."""
    job = kit.job(
        "first;kill:9", world_size=3, restart="all", max_restarts=2, env={"ZT_DO_0": "sleep", "ZT_DO_2": "sleep"}
    )
    kit.lead({**job, "env": {**job["env"], "ZT_DO_1": "until:" + str(kit.trial.path / "go") + ";first;kill:9"}})
    agent = kit.agent(nproc=3)
    old = kit.ranks(agent, 3)
    (kit.trial.path / "go").touch()
    wait_until(lambda: len(kit.exits()) == 3, what="three exits")
    assert [(r.rank, r.stopped, r.signal) for r in kit.exits()][1] == (1, False, 9)
    assert [r.stopped for r in kit.exits()] == [True, False, True]
    new = wait_until(lambda: (p := kit.ranks(agent, 3)) and not p & old and p, what="a new generation")
    assert len(new) == 3
    assert all(kit.log(rank, 1) == "" for rank in range(3))


def test_paths_with_spaces_and_values_with_commas_work(tmp_path: Path) -> None:
    """No shell and no list syntax stands between a value and its rank (B32, B33)."""
    root = tmp_path / "my runs; $HOME 'x'"
    for kit in agent_kit(root):
        kit.lead(kit.job("env:NCCL_IB_HCA;env:ODD", env={"NCCL_IB_HCA": "mlx5_0,mlx5_1", "ODD": "a=b; c 'd' \"e\"\nf"}))
        code, text = kit.end(kit.agent())
        assert code == 0, text
        assert kit.log() == "NCCL_IB_HCA=mlx5_0,mlx5_1\nODD=a=b; c 'd' \"e\"\nf\n"


@both_ways
def test_ranks_die_with_their_agent(kit: AgentKit, use_template: bool) -> None:
    """SIGKILL of the agent takes all its ranks along (fault 10)."""
    kit.lead(kit.job("sleep", world_size=2))
    agent = kit.agent(nproc=2, use_template=use_template)
    ranks = kit.ranks(agent, 2)
    agent.kill()
    wait_until(lambda: not [p for p in ranks if kit.alive(p)], timeout_s=2, what="the ranks gone")


@pytest.mark.alone
@both_ways
def test_everything_ends_with_the_controller(kit: AgentKit, use_template: bool) -> None:
    """SIGKILL of the controller ends agents and ranks within 2 s, also ranks that ignore SIGTERM (B36, fault 6)."""
    controller = kit.controller(kit.job("stubborn;print:up;sleep", world_size=2))
    agent = kit.agent(nproc=2, use_template=use_template)
    kit.wait_log("up")
    kit.wait_log("up", rank=1)
    below = kit.descendants(agent)
    began = time.monotonic()
    controller.kill()
    controller.wait()
    code, text = kit.end(agent)
    took = time.monotonic() - began
    assert code == 9, text
    assert not [pid for pid in below if kit.alive(pid)]
    assert took < within(2.0)
    assert [r.signal for r in kit.exits()] == [9, 9]
    assert all(r.stopped for r in kit.exits())


@pytest.mark.alone
def test_an_agent_does_not_outlive_its_launcher_while_it_looks_for_a_controller(kit: AgentKit) -> None:
    """A launcher killed before the controller was found takes its agent along within 2 s (B36)."""
    launcher = subprocess.Popen(["sleep", "600"])
    started = start_time(launcher.pid)
    agent = kit.agent(launcher=[launcher.pid, started])
    assert agent.stderr is not None
    assert "waiting for a controller" in agent.stderr.readline()
    launcher.kill()
    launcher.wait()
    assert kit.end(agent, timeout_s=2)[0] == 9
    assert kit.end(kit.agent(launcher=[launcher.pid, started]))[0] == 9


def test_a_hung_disk_does_not_hold_up_a_stop(kit: AgentKit, tmp_path: Path) -> None:
    """Registry writes that hang keep neither the poll loop nor the end of the ranks waiting (fault 46)."""
    trigger = tmp_path / "hang"
    kit.lead(kit.job("stubborn;print:up;sleep"))
    agent = kit.agent(grace_s=0.2, lease_ttl_s=0.3, env={"ZT_DISK_HANGS_ONCE": str(trigger)})
    kit.wait_log("up")
    ranks = kit.ranks(agent, 1)
    trigger.touch()
    time.sleep(0.3)  # the next renewal of the lease hangs now
    agent.send_signal(signal.SIGTERM)
    wait_until(lambda: not [p for p in ranks if kit.alive(p)], timeout_s=2, what="the rank gone")
    code, text = kit.end(agent)
    assert code == 143
    assert "the registry did not answer" in text


def test_orphans_can_wait_for_the_next_controller(kit: AgentKit) -> None:
    """With orphans=wait the ranks outlive their controller, and the agent joins the next epoch (fault 7)."""
    job = kit.job("print:up;sleep", orphans="wait")
    controller = kit.controller(job)
    agent = kit.agent()
    kit.wait_log("up")
    ranks = kit.ranks(agent, 1)
    controller.kill()
    controller.wait()
    second = kit.controller(job)
    wait_until(lambda: [a.epoch for a in kit.records.agents()] == [2], what="the agent in epoch 2")
    assert all(kit.alive(pid) for pid in ranks)
    second.kill()
    second.wait()
    agent.send_signal(signal.SIGTERM)
    assert kit.end(agent)[0] == 143


def test_a_terminated_agent_drains_its_ranks(kit: AgentKit) -> None:
    """SIGTERM to the agent is SIGTERM to the ranks; what obeys ends in order, the rest is killed after the grace."""
    job = kit.job("", world_size=2, env={"ZT_DO_0": "term0;print:up;sleep", "ZT_DO_1": "stubborn;print:up;sleep"})
    kit.lead(job)
    agent = kit.agent(nproc=2, grace_s=0.5)
    kit.wait_log("up")
    kit.wait_log("up", rank=1)
    agent.send_signal(signal.SIGTERM)
    assert kit.end(agent)[0] == 143
    assert [(r.exit_code, r.signal, r.stopped) for r in kit.exits()] == [(0, None, True), (None, 9, True)]


@pytest.mark.alone
def test_a_second_interrupt_ends_at_once(kit: AgentKit) -> None:
    """Two SIGINTs skip the grace; the exit code is 130 (fault 17)."""
    kit.lead(kit.job("stubborn;print:up;sleep"))
    agent = kit.agent(grace_s=60.0)
    kit.wait_log("up")
    began = time.monotonic()
    agent.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals at one moment are one to the kernel
    agent.send_signal(signal.SIGINT)
    assert kit.end(agent)[0] == 130
    assert time.monotonic() - began < within(5)


def test_a_stopped_rank_is_not_called_dead(kit: AgentKit) -> None:
    """SIGSTOP and SIGCONT of a rank leave no exit record (fault 4)."""
    kit.lead(kit.job("print:up;sleep"))
    agent = kit.agent()
    kit.wait_log("up")
    (rank,) = kit.ranks(agent, 1)
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "T", what="stopped")
    time.sleep(0.3)  # nothing to await: the rule is that nothing happens
    assert kit.exits() == []
    os.kill(rank, signal.SIGCONT)
    os.kill(rank, signal.SIGKILL)
    assert kit.exit().signal == 9


def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    """A handle opened with another start time is refused, so a kill reaches the right process or none (B44)."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = start_time(process.pid)
        assert started is not None
        assert ProcessHandle.open(process.pid, started + 1) is None
        handle = ProcessHandle.open(process.pid, started)
        assert handle is not None
        assert not handle.ended()
        assert handle.signal(signal.SIGKILL)
        process.wait()
        assert not handle.signal(signal.SIGTERM)
        assert handle.ended()
        handle.close()
    finally:
        process.kill()
        process.wait()


_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.ci
def test_a_rank_killed_for_memory_says_so(kit: AgentKit) -> None:
    """A rank over the memory limit of its cgroup is reported as such, with the counters (fault 12)."""
    group = _MEMORY / f"zbus-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(80 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no writable v1 memory cgroup: {error}")
    try:
        _, _, record = _one_exit(kit, f"cgroup:{group};eat:400")
        assert record.signal == signal.SIGKILL
        assert record.oom
        assert "memory limit of its cgroup was hit (oom_kill 0 -> 1, peak 80 MiB of 80 MiB)" in record.reason
    finally:
        wait_until(lambda: (group / "cgroup.procs").read_text() == "", what="the cgroup empty")
        group.rmdir()


@pytest.mark.ci
def test_a_limit_of_processes_is_a_cause_in_words(kit: AgentKit) -> None:
    """A restart that cannot fork is counted by the policy and named; the agent ends in order (fault 61)."""
    group = Path(f"/sys/fs/cgroup/pids/zbus-test-{os.getpid()}")
    go = kit.trial.path / "go"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no writable v1 pids cgroup: {error}")
    try:
        kit.lead(kit.job(f"print:up;until:{go};exit:5", restart="one", max_restarts=1, restart_window_s=60.0))
        agent = kit.agent()
        kit.wait_log("up")
        for pid in [agent.pid, *kit.descendants(agent)]:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text("1")
        go.touch()
        code, text = kit.end(agent)
        assert code == 4
        assert "actor/0 could not be started: fork" in text
        assert "giving up" in text
    finally:
        wait_until(lambda: (group / "cgroup.procs").read_text() == "", what="the cgroup empty")
        group.rmdir()


def test_a_limit_of_open_files_is_a_cause_in_words(kit: AgentKit) -> None:
    """An agent without descriptors says so with a way out, and leaves nothing behind (fault 59)."""
    kit.lead(kit.job("sleep", port_count=40))
    agent = kit.agent(nofile=40)
    code, text = kit.end(agent)
    assert code in (3, 5)
    assert "Too many open files" in text
    assert "Traceback" not in text
