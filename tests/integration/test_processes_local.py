from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_kit import STANDIN, AgentKit, agent_kit
from controller.scheduling.api import Job, Scheduling
from controller.scheduling.external import ExternalScheduler
from controller.scheduling.local import LocalScheduler
from waiting import scaled, wait_until, within
from zbus.errors import ConfigError, StartupError


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial with agents that leave nothing behind."""
    yield from agent_kit(tmp_path)


@pytest.fixture
def local(kit: AgentKit) -> Iterator[LocalScheduler]:
    """Give a local scheduler of a trial that this test process controls."""
    scheduler = LocalScheduler(kit.trial, gpus=[], wait_controller_s=20, stop_grace_s=1.0)
    yield scheduler
    scheduler.close()


def _job(kit: AgentKit, do: str, *, role: str = "actor", replicas: int = 1, real: bool = False, **fields) -> Job:
    """Publish a job whose ranks do ``do`` (or, if ``real``, are real workers) and return it."""
    command = None if real else [sys.executable, str(STANDIN), "cli"]
    job = Job(
        role=role, replicas=replicas, engine="none:None", tasks=[Scheduling(cmd=command)], env={"ZT_DO": do}, **fields
    )
    current = kit.records.current_epoch()
    if current is None:
        kit.lead()
        current = kit.records.current_epoch()
    assert current is not None
    kit.records.publish_job(job.to_record(current.epoch))
    return job


def test_a_role_is_started_and_its_workers_are_listed(kit: AgentKit, local: LocalScheduler) -> None:
    """Real workers publish themselves; the scheduler lists them in rank order with their extra ports."""
    job = Job(role="actor", replicas=2, engine="none:None", tasks=[Scheduling(port_count=2)])
    kit.lead()
    kit.records.publish_job(job.to_record(1))
    local.start(job)
    workers = local.workers("actor", scaled(20))
    assert [w.id for w in workers] == ["actor/0", "actor/1"]
    assert all(len(w.extra_ports) == 2 for w in workers)
    assert len({port for w in workers for port in w.extra_ports}) == 4
    assert local.missing() == []
    (ended,) = local.stop(grace_s=2.0)
    assert (ended.exit_code, ended.asked) == (143, True)
    assert [r.stopped for r in kit.exits()] == [True, True]
    assert kit.records.agents() == []


@pytest.mark.alone
def test_a_dead_agent_is_reported_at_once_with_its_log(kit: AgentKit, local: LocalScheduler) -> None:
    """The death of an agent is known within a second, with the signal and the tail of its log; its ranks are gone."""
    reported: list[float] = []
    local.on_agent_exit = lambda _ended: reported.append(time.monotonic())
    local.start(_job(kit, "print:up;sleep"))
    kit.wait_log("up")
    (agent,) = kit.records.agents()
    (rank,) = [int(line.split()[-3].rstrip(",")) for line in _agent_log(kit).splitlines() if "actor/0 runs" in line]
    began = time.monotonic()
    os.kill(agent.pid, signal.SIGKILL)
    ended = wait_until(local.poll, what="the agent's exit")[0]
    assert (ended.role, ended.exit_code, ended.signal, ended.asked) == ("actor", None, 9, False)
    assert any("actor/0 runs" in line for line in ended.log_tail)
    assert reported[0] - began < within(1.0)
    assert local.poll() == []
    wait_until(lambda: not kit.alive(rank), timeout_s=2, what="the rank gone")


def _agent_log(kit: AgentKit) -> str:
    (path,) = (kit.trial.logs / "agents").iterdir()
    return path.read_text()


def test_waiting_for_workers_ends_when_their_agent_does(kit: AgentKit, local: LocalScheduler) -> None:
    """A rank that dies at its start fails the wait at once, with cause and log (B28, B38)."""
    local.start(_job(kit, "print:no licence;exit:3", replicas=2))
    began = time.monotonic()
    with pytest.raises(StartupError) as caught:
        local.workers("actor", 60)
    assert time.monotonic() - began < within(20)
    assert "the agent of actor exited with code 4 before its ranks were ready" in str(caught.value)
    assert caught.value.facts["actor/0"] == "exited with code 3; log logs/actor/0.0.log"


def test_waiting_for_workers_has_a_deadline_and_names_who_is_missing(kit: AgentKit, local: LocalScheduler) -> None:
    """Ranks that never publish themselves are named with their last state (B28)."""
    local.start(_job(kit, "print:up;sleep"))
    kit.wait_log("up")
    with pytest.raises(StartupError) as caught:
        local.workers("actor", 0.2)
    assert "1 of 1 ranks of actor are not there after 0.2 s" in str(caught.value)
    assert "has not published itself yet" in caught.value.facts["actor/0"]
    assert len(local.missing()) == 1


@pytest.mark.alone
def test_stopping_kills_what_does_not_obey_and_nothing_else(kit: AgentKit, local: LocalScheduler) -> None:
    """Ranks that ignore SIGTERM are gone after the grace; a bystander of the same kind lives on (B44)."""
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        local.start(_job(kit, "stubborn;child;print:up;sleep", replicas=2))
        kit.wait_log("up", rank=1)
        kit.wait_log("up", rank=0)
        children = [int(kit.log(rank).split()[1]) for rank in (0, 1)]
        began = time.monotonic()
        local.stop(grace_s=0.3)
        assert time.monotonic() - began < within(5)
        assert [r.signal for r in kit.exits()] == [9, 9]
        assert not [pid for pid in children if kit.alive(pid)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_agent_that_hangs_is_killed(kit: AgentKit, local: LocalScheduler) -> None:
    """An agent that does not answer SIGTERM is killed, and the kernel takes its ranks along."""
    local.start(_job(kit, "print:up;sleep"))
    kit.wait_log("up")
    (agent,) = kit.records.agents()
    os.kill(agent.pid, signal.SIGSTOP)
    (ended,) = local.stop(grace_s=0.1)
    assert ended.signal == 9
    wait_until(lambda: not kit.alive(agent.pid), what="the agent gone")


def test_roles_stop_one_by_one_and_can_start_again(kit: AgentKit, local: LocalScheduler) -> None:
    """Deleting a role ends and reaps its processes; another stays; the same name can be used again (B40)."""
    actor, critic = _job(kit, "print:up;sleep"), _job(kit, "print:up;sleep", role="critic")
    local.start(actor)
    local.start(critic)
    with pytest.raises(ConfigError, match="role actor has been started already"):
        local.start(actor)
    wait_until(lambda: kit.log() and kit.log(role="critic"), what="both roles up")
    assert [e.role for e in local.stop("actor", grace_s=1.0)] == ["actor"]
    assert [a.role for a in kit.records.agents()] == ["critic"]
    local.start(actor)
    kit.wait_log("up", start=1)


def test_a_scheduler_that_lost_its_caller_thread_keeps_its_agents(kit: AgentKit, local: LocalScheduler) -> None:
    """Agents belong to the scheduler's permanent thread: the end of the thread that started them changes nothing."""
    thread = threading.Thread(target=local.start, args=(_job(kit, "print:up;sleep"),))
    thread.start()
    thread.join()
    kit.wait_log("up")
    assert local.poll() == []


def test_a_command_that_does_not_exist_is_named(kit: AgentKit, local: LocalScheduler) -> None:
    """A wrong interpreter is an error in words, and its role can be started again."""
    job = Job(role="actor", replicas=1, engine="none:None", tasks=[Scheduling(cmd=["/no/such/python"])])
    for _ in range(2):
        with pytest.raises(StartupError) as caught:
            local.start(job)
        assert caught.value.facts["command"] == "/no/such/python"


def test_many_trials_leave_nothing_behind(kit: AgentKit) -> None:
    """Starting and stopping again and again leaves no process, no descriptor and no registry entry."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    job = _job(kit, "print:up;sleep")
    for start in range(3):
        scheduler = LocalScheduler(kit.trial, gpus=[], stop_grace_s=1.0)
        scheduler.start(job)
        kit.wait_log("up", start=start)
        scheduler.close()
        scheduler.close()
    assert kit.records.agents() == []
    assert kit.records.leases() == {}
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_an_external_scheduler_says_who_is_missing(kit: AgentKit) -> None:
    """Started by hand: the missing ranks are named, the line to type is given, and ranks are found when they come."""
    kit.lead()
    job = Job(role="actor", replicas=2, engine="none:None")
    kit.records.publish_job(job.to_record(1))
    external = ExternalScheduler(kit.trial)
    external.start(job)
    assert external.missing() == ["actor/0: nobody has started it", "actor/1: nobody has started it"]
    with pytest.raises(StartupError, match="2 of 2 ranks of actor are not there"):
        external.workers("actor", 0.1)
    line = external.instructions("actor").split()
    assert line[:2] == ["zbus-worker", "start"]
    agent = subprocess.Popen([sys.executable, "-P", "-m", "workers", *line[1:]], stderr=subprocess.PIPE, text=True)
    kit.agents.append(agent)
    assert [w.id for w in external.workers("actor", scaled(20))] == ["actor/0", "actor/1"]
    assert external.missing() == []
    assert external.poll() == []
    agent.send_signal(signal.SIGTERM)
    kit.end(agent)
    assert [e.role for e in external.poll()] == ["actor"]
    external.close()
