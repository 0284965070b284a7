from __future__ import annotations

from pathlib import Path

import pytest

from controller.scheduling.api import Job, ScheduleStrategy, Scheduling, Worker, live_workers, missing_lines
from controller.scheduling.gpus import GpuPool
from controller.scheduling.local import LocalScheduler
from zbus.config import TrialDir
from zbus.errors import ConfigError
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import AgentRecord, ExitRecord, RankClaim, Records, WorkerRecord
from zbus.runtime.devices import find_gpus


def _job(role: str, replicas: int, gpu: float = 0, **fields) -> Job:
    return Job(role=role, replicas=replicas, engine="m:C", tasks=[Scheduling(gpu=gpu)], **fields)


def test_accelerators_are_never_given_twice() -> None:
    """Two roles of two on two devices: the second is refused and the holder is named (B35)."""
    pool = GpuPool(["0", "1"])
    assert pool.reserve(_job("actor", 2, 1)) == ["0", "1"]
    with pytest.raises(ConfigError) as caught:
        pool.reserve(_job("critic", 2, 1))
    assert "role critic needs at least 1 accelerators and 0 of 2 are free" in str(caught.value)
    assert caught.value.facts["held by actor"] == "0,1"
    pool.release("actor")
    assert pool.reserve(_job("critic", 1, 2)) == ["0,1"]


def test_a_refused_role_holds_nothing() -> None:
    """A reservation is whole or not at all."""
    pool = GpuPool(["0", "1", "2"])
    with pytest.raises(ConfigError):
        pool.reserve(_job("actor", 2, 2))
    assert pool.free() == ["0", "1", "2"]


def test_parts_of_an_accelerator_are_packed() -> None:
    """Ranks that need a part share devices of their role, no more than fit."""
    pool = GpuPool(["0", "1"])
    assert pool.reserve(_job("actor", 3, 0.5)) == ["0", "0", "1"]
    assert pool.free() == []
    assert GpuPool(["0"]).reserve(_job("actor", 3, 0.3)) == ["0", "0", "0"]


def test_a_role_without_need_takes_none() -> None:
    """gpu=0 reserves nothing and works on a host without any."""
    assert GpuPool([]).reserve(_job("actor", 2)) == ["", ""]


def test_a_colocated_role_shares_rank_by_rank() -> None:
    """Colocation gives the target's devices; the target must be there with as many ranks."""
    pool = GpuPool(["0", "1"])
    strategy = ScheduleStrategy("colocation", "actor")
    with pytest.raises(ConfigError, match="has not been started"):
        pool.reserve(_job("critic", 2, strategy=strategy))
    pool.reserve(_job("actor", 2, 1))
    with pytest.raises(ConfigError, match="has 3 ranks"):
        pool.reserve(_job("critic", 3, strategy=strategy))
    assert pool.reserve(_job("critic", 2, strategy=strategy)) == ["0", "1"]
    pool.release("critic")
    assert pool.free() == []


def test_visible_devices_come_from_the_variable_or_the_nodes(tmp_path: Path) -> None:
    """The variable wins, also when it hides everything; else the numbered device nodes count."""
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_gpus({}, tmp_path) == ["0", "2", "10"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}, tmp_path) == ["3", "5"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == ["0"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _job("actor", 0), "role actor has 0 replicas"),
        (lambda: _job("a/b", 1), "role 'a/b' is not a valid name"),
        (lambda: Job(role="a", replicas=3, engine="m:C", tasks=[Scheduling()] * 2), "3 replicas but 2 scheduling"),
        (lambda: Job(role="a", replicas=2, engine="m:C", tasks=[Scheduling(), Scheduling(port_count=1)]), "rank 1"),
        (lambda: Scheduling(gpu=1.5), "gpu is 1.5"),
        (lambda: Scheduling(mem=-1), "mem is -1"),
        (lambda: ScheduleStrategy("colocation"), "needs a? ?target role"),
        (lambda: ScheduleStrategy("separation", "x"), "takes no target"),
        (lambda: ScheduleStrategy("spread"), "'spread' is not known"),
        (lambda: ScheduleStrategy("colocation", "x", fork=False), "not supported"),
    ],
)
def test_jobs_that_cannot_be_are_refused_at_once(make, words: str) -> None:
    """Bad numbers, names and combinations are errors where they are written."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_job_becomes_a_record_with_every_variable() -> None:
    """Values pass as they are; a task's variable wins over the role's; cores set the thread default (B33, B34)."""
    odd = "mlx5_0,mlx5_1=x"
    task = Scheduling(cpu=4, port_count=2, env_vars={"A": "task", "NCCL_IB_HCA": odd})
    record = Job(role="a", replicas=2, engine="m:C", tasks=[task], env={"A": "role", "B": "b"}).to_record(7)
    assert record.env == {"A": "task", "B": "b", "NCCL_IB_HCA": odd, "OMP_NUM_THREADS": "4"}
    assert (record.epoch, record.world_size, record.port_count) == (7, 2, 2)
    own = Job(role="a", replicas=1, engine="m:C", tasks=[Scheduling(cpu=4)], env={"OMP_NUM_THREADS": "2"})
    assert own.to_record(1).env["OMP_NUM_THREADS"] == "2"


def test_the_agents_command_says_everything_by_flags(tmp_path: Path) -> None:
    """Inside a Slurm allocation the flags decide, whatever the environment says (B39); paths are one argument (B32)."""
    trial = TrialDir.create(tmp_path / "my runs", "e", "t")
    scheduler = LocalScheduler(trial, gpus=["0", "1"])
    command = scheduler.command(_job("actor", 2, 1), ["0", "1"])
    scheduler.close()
    trial.unlock()
    assert command[command.index("--rank") + 1] == "0"
    assert command[command.index("--world-size") + 1] == "2"
    assert command[command.index("--trial-dir") + 1] == str(trial)
    assert command[command.index("--devices") + 1] == "0;1"


def test_a_worker_shows_where_it_is_reached() -> None:
    """Tcp endpoints give address and port, IPv6 included; ipc has no port."""
    make = lambda main: Worker.from_record(WorkerRecord(role="a", rank=1, incarnation=1, main=main, ports=[9]))  # noqa: E731
    assert make(["tcp://127.0.0.1:5555"]) == Worker("a/1", "127.0.0.1", 5555, (9,))
    assert make(["ipc:///x", "tcp://[::1]:5556"]) == Worker("a/1", "::1", 5556, (9,))
    assert make(["ipc:///x"]) == Worker("a/1", "127.0.0.1", 0, (9,))


def test_missing_ranks_are_named_with_their_last_state() -> None:
    """Never started, started but silent, ended: each is said in words (B28)."""
    records = Records(MemoryRegistry())
    records.publish_agent(AgentRecord(agent="ag", role="a", host="h", epoch=1))
    for rank in (1, 2, 3):
        records.claim_rank(RankClaim(role="a", rank=rank, start=0, agent="ag", host="h"))
    for rank, incarnation in ((2, 22), (3, 33)):
        records.publish_worker(WorkerRecord(role="a", rank=rank, incarnation=incarnation, agent="ag"))
    records.publish_exit(ExitRecord(role="a", rank=2, incarnation=22, reason="killed by SIGSEGV", log="logs/a/2.0.log"))
    assert missing_lines(records, "a", 4, "nobody has started it") == [
        "a/0: nobody has started it",
        "a/1: started on h, has not published itself yet",
        "a/2: killed by SIGSEGV; log logs/a/2.0.log",
    ]
    assert list(live_workers(records, "a", epoch=1)) == [3]
    assert live_workers(records, "a", epoch=2) == {}
