from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_kit import AgentKit, agent_kit
from waiting import wait_until
from workers.control import AGENT_INCARNATION, agent_name
from zbus.ids import new_session
from zbus.protocol.messages import OutcomeKind
from zbus.runtime.processes import catches


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial with agents that leave nothing behind."""
    yield from agent_kit(tmp_path)


both_ways = pytest.mark.parametrize("use_template", [True, False], ids=["fork", "exec"])


@both_ways
def test_an_agent_ends_with_its_ranks(kit: AgentKit, use_template: bool) -> None:
    """Two ranks that end in order end the agent with code 0, one exit record each."""
    kit.lead(kit.job("print:hello {spec.rank}", world_size=2))
    code, text = kit.end(kit.agent(nproc=2, use_template=use_template))
    assert code == 0, text
    assert [(r.rank, r.exit_code, r.signal, r.start) for r in kit.exits()] == [(0, 0, None, 0), (1, 0, None, 0)]
    assert kit.log(1) == "hello 1\n"


@both_ways
def test_a_rank_knows_its_place(kit: AgentKit, use_template: bool) -> None:
    """Ranks get torchelastic's variables, ZBUS_* and thread defaults; the job's own value wins over a default."""
    words = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ZBUS_ROLE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    kit.lead(kit.job(";".join(f"env:{w}" for w in words), world_size=3, env={"OMP_NUM_THREADS": "3"}))
    code, text = kit.end(kit.agent(nproc=2, ranks=[1, 2], use_template=use_template))
    assert code == 0, text
    values = dict(line.split("=") for line in kit.log(2).splitlines())
    assert values == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "ZBUS_ROLE": "actor",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
    }


@both_ways
def test_held_ports_arrive_listening_and_survive_a_restart(kit: AgentKit, use_template: bool) -> None:
    """Ports asked for are bound and listening before the rank exists, and stay the same in its next start (B37)."""
    do = "listening;print:{spec.ports};exit:5"
    kit.lead(kit.job(do, port_count=2, restart="one", max_restarts=1, restart_window_s=60.0))
    kit.end(kit.agent(use_template=use_template))
    assert kit.log().splitlines()[:2] == ["listening True 1"] * 2
    assert kit.log() == kit.log(start=1)


@both_ways
def test_rank_zero_gets_the_socket_of_the_torch_store(kit: AgentKit, use_template: bool) -> None:
    """Rank 0 gets a listening socket, all ranks its port, and a new generation gets a new socket."""
    go = kit.trial.path / "go"
    kit.lead(
        kit.job(f"store;until:{go};first;exit:5", world_size=2, restart="all", max_restarts=1, restart_window_s=60.0)
    )
    agent = kit.agent(nproc=2, use_template=use_template)
    kit.wait_log("store", rank=0)
    kit.wait_log("store", rank=1)
    go.touch()
    kit.wait_log("store", rank=0, start=1)
    agent.terminate()
    kit.end(agent)
    first, second = kit.log(0, 0).split(), kit.log(0, 1).split()
    assert first[:2] == second[:2] == ["store", "True"]
    assert first[2] != second[2]
    assert kit.log(1, 0).split() == ["store", "False", first[2]]


def test_many_ranks_with_a_large_environment_start(kit: AgentKit) -> None:
    """More requests than the template's socket holds are sent one after the other."""
    kit.lead(kit.job("env:RANK", world_size=24, env={"BIG": "x" * 30_000}))
    code, text = kit.end(kit.agent(nproc=24), timeout_s=30)
    assert code == 0, text
    assert [kit.log(rank) for rank in range(24)] == [f"RANK={rank}\n" for rank in range(24)]
    assert "no template" not in text


def test_two_agents_cannot_run_one_rank(kit: AgentKit) -> None:
    """The second agent that claims a rank ends with code 2 within seconds and names both (fault 48, 73)."""
    kit.lead(kit.job("print:up;sleep"))
    first = kit.agent(ranks=[0])
    kit.wait_log("up")
    second = kit.agent(ranks=[0])
    code, text = kit.end(second)
    assert code == 2
    assert "ZB0203: actor/0 is already run by another agent" in text
    assert f"pid {first.pid}" in text
    assert f"pid {second.pid}" in text
    assert first.poll() is None


def test_agents_without_a_rank_take_what_is_free(kit: AgentKit) -> None:
    """The same line twice fills a role of two; the third time there is no room."""
    kit.lead(kit.job("print:up;sleep", world_size=2))
    kit.agent()
    kit.wait_log("up", rank=0)
    kit.agent()
    kit.wait_log("up", rank=1)
    code, text = kit.end(kit.agent())
    assert (code, "no room for 1 more" in text) == (2, True)


def test_a_dead_agents_rank_can_be_taken_over(kit: AgentKit) -> None:
    """The claim of an agent that was killed does not bind; the next start has the next number."""
    kit.lead(kit.job("print:up;sleep"))
    first = kit.agent()
    kit.wait_log("up")
    first.kill()
    first.wait()
    kit.agent()
    kit.wait_log("up", start=1)


def test_an_agent_may_start_before_its_controller(kit: AgentKit) -> None:
    """It waits for a living controller and its job and says why; a dead one's job does not count (rows 50, 74)."""
    dead = kit.controller(kit.job("print:old"))
    dead.kill()
    dead.wait()
    agent = kit.agent()
    assert agent.stderr is not None
    assert "waiting for a controller: the last controller of this trial is gone" in agent.stderr.readline()
    kit.lead(kit.job("print:new"))
    assert kit.end(agent)[0] == 0
    assert kit.log() == "new\n"


def test_no_controller_in_time_is_an_error_that_says_why(kit: AgentKit) -> None:
    """Waiting has a deadline: code 3, with what was missing (B38)."""
    code, text = kit.end(kit.agent(wait_controller_s=0.3))
    assert code == 3
    assert "no controller for actor of exp/trial within 0.3 s: no controller has claimed this trial yet" in text
    kit.lead(kit.job(role="critic"))
    code, text = kit.end(kit.agent(wait_controller_s=0.3))
    assert code == 3
    assert "the controller has no job for actor; it has critic" in text


def test_a_wrong_world_size_is_refused(kit: AgentKit) -> None:
    """What the caller expects and what the job says must agree (row 73)."""
    kit.lead(kit.job(world_size=4))
    for options in ({"world_size": 3}, {"ranks": [4]}, {"nproc": 5}):
        code, text = kit.end(kit.agent(**options))
        assert code == 2
        assert "ZB0101: actor has" in text


def test_a_rank_that_cannot_start_is_reported(kit: AgentKit) -> None:
    """A log that cannot be opened is a cause in words, not a traceback."""
    (kit.trial.logs / "actor").write_text("in the way")
    kit.lead(kit.job())
    code, text = kit.end(kit.agent())
    assert code == 4
    assert "actor/0 could not be started" in text


def test_a_preload_that_fails_is_only_a_warning(kit: AgentKit) -> None:
    """A module that cannot be preloaded is named; the rank starts and will say in full what it misses."""
    kit.lead(kit.job("print:up", preload=["no_such_module_zt"]))
    code, text = kit.end(kit.agent())
    assert code == 0
    assert "cannot preload no_such_module_zt" in text


def test_a_preload_with_threads_falls_back_to_exec(kit: AgentKit, tmp_path: Path) -> None:
    """A template with threads must not fork: its ranks get an interpreter each, and the module's threads are named."""
    (tmp_path / "zt_threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='zt', daemon=True).start()\n"
    )
    kit.lead(kit.job("print:up", preload=["zt_threads"], sys_path=[str(tmp_path)]))
    code, text = kit.end(kit.agent())
    assert code == 0, text
    assert "no template for actor (preload started threads zt)" in text
    assert kit.log() == "up\n"


def test_a_template_that_dies_is_done_without(kit: AgentKit, tmp_path: Path) -> None:
    """A module that ends the process at import costs speed, not the run."""
    (tmp_path / "zt_exit.py").write_text("import os\nos._exit(3)\n")
    kit.lead(kit.job("print:up", preload=["zt_exit"], sys_path=[str(tmp_path)]))
    code, text = kit.end(kit.agent())
    assert code == 0, text
    assert "no template for actor (it died)" in text


def test_ranks_of_one_template_draw_different_random_numbers(kit: AgentKit) -> None:
    """Forked ranks do not share the state of numpy's or the standard library's generator."""
    kit.lead(kit.job("random", world_size=2, preload=["numpy", "random"]))
    kit.end(kit.agent(nproc=2))
    assert kit.log(0) != kit.log(1)


def test_an_agent_answers_on_its_control_socket(kit: AgentKit) -> None:
    """Status, restart and stop are asked over ctl, and the agent ends with code 0 after an acknowledged stop."""
    from zbus.codec import decode, encode
    from zbus.transport.client import Client
    from zbus.transport.sockets import SocketFactory

    kit.lead(kit.job("print:start {spec.start};sleep"))
    agent = kit.agent()
    kit.wait_log("start 0")
    (record,) = kit.records.agents()
    factory = SocketFactory()
    client = Client(session=new_session(), epoch=1, factory=factory)
    try:
        peer = client.connect(agent_name(record.agent), AGENT_INCARNATION, {"ctl": record.ctl})

        def ask(method: str, *args: object) -> object:
            assert client.wait(lambda: peer.state.name == "READY", 10)
            outcomes: list = []
            body = encode([[f"zbus.{method}", args, {}]])
            client.place([peer], "ctl", [body], 1, deadline_s=10, sink=lambda _m, _c, o: outcomes.append(o))
            assert client.wait(lambda: bool(outcomes), 10)
            if outcomes[0].kind is not OutcomeKind.OK:
                return outcomes[0].kind.value
            return decode(outcomes[0].payload)

        status = ask("status")
        assert (status["role"], status["ranks"][0]["state"]) == ("actor", "running")
        assert ask("ping")["pid"] == agent.pid
        assert ask("dump_stacks", 0) == "", "a rank without a handler must not be signalled"
        ask("restart", 0)
        kit.wait_log("start 1", start=1)
        assert kit.exits()[0].stopped
        for bad in (("restart", 7), ("restart", [0]), ("stop", "soon"), ("stop", float("nan"))):
            assert ask(*bad) == "APP_ERROR"
        assert ask("no_such_thing") == "NOT_EXECUTED"
        assert ask("stop", 5.0) is None
    finally:
        client.close()
        factory.close()
    assert kit.end(agent)[0] == 0
    assert kit.records.agents() == []
    assert kit.records.leases() == {}


def test_an_agent_keeps_a_lease(kit: AgentKit) -> None:
    """The lease's counter rises while the agent lives."""
    kit.lead(kit.job("sleep"))
    kit.agent(lease_ttl_s=0.3)
    first = wait_until(kit.records.leases, what="a lease")
    (holder,) = first
    wait_until(lambda: kit.records.leases()[holder].counter > first[holder].counter + 2, what="a rising counter")


def test_an_agent_imports_neither_numpy_nor_torch() -> None:
    """The agent stays light: its whole code, control socket included, loads without them."""
    code = "import sys, workers.agent, workers.cli, zbus.runtime.host\nprint({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command_line_starts_ranks(kit: AgentKit) -> None:
    """`python -m workers start` is the agent; without an engine host of its own the stand-in rank is not used."""
    env = {**os.environ, "ZBUS_ROLE": "actor"}
    command = [sys.executable, "-P", "-m", "workers", "start", "--trial-dir", str(kit.trial), "grace=2s"]
    agent = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    kit.agents.append(agent)
    kit.lead(kit.job())
    wait_until(lambda: kit.records.workers("actor"), what="the worker's record")
    (worker,) = kit.records.workers("actor")
    assert catches(worker.pid, signal.SIGUSR2)
    os.kill(worker.pid, signal.SIGUSR2)
    stacks = kit.trial.stack_file("actor", 0)
    wait_until(lambda: "in serve" in stacks.read_text(), what="the stack dump")
    agent.send_signal(signal.SIGTERM)
    code, text = kit.end(agent)
    assert code == 143, text
    (record,) = kit.exits()
    assert record.stopped
    assert record.exit_code == 143
