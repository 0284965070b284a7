from __future__ import annotations

import json

import pytest

from workers.cli import _agent_config, cli
from workers.environment import detect
from zbus.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2"}


def test_without_any_launcher_nothing_is_claimed() -> None:
    """An ordinary shell says nothing about rank or role."""
    found = detect({}, {"HOME": "/root"})
    assert (found.role, found.rank, found.world_size, found.sources) == (None, None, None, {})


def test_the_first_level_that_speaks_wins_value_by_value() -> None:
    """Flags beat ZBUS_*, then torchrun, Slurm, Kubernetes; each value tells its source."""
    env = {**KUBERNETES, **SLURM, **TORCHRUN, "ZBUS_WORLD_SIZE": "9", "ZBUS_ROLE": "actor"}
    found = detect({"rank": 4}, env)
    assert (found.role, found.rank, found.world_size, found.local_rank) == ("actor", 4, 9, 1)
    assert found.sources["rank"] == "flag --rank"
    assert found.sources["world_size"] == "ZBUS_WORLD_SIZE"
    assert found.sources["local_rank"] == "LOCAL_RANK"
    assert detect({}, {**KUBERNETES, **SLURM}).rank == 5
    assert detect({}, KUBERNETES).sources == {"rank": "JOB_COMPLETION_INDEX"}


def test_an_explicit_rank_beats_slurm_inside_an_allocation() -> None:
    """In somebody's allocation two local workers keep the ranks they were given (B39)."""
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    for rank in (0, 1):
        found = detect({"rank": rank, "world_size": 2}, env)
        assert (found.rank, found.world_size) == (rank, 2)
    # A rank given alone does not contradict Slurm's size, which speaks of another job: the size is dropped.
    assert detect({"rank": 1}, env).world_size is None


def test_a_bare_rank_variable_is_not_torchrun() -> None:
    """RANK counts only with LOCAL_WORLD_SIZE; an allocation without a task is not a task."""
    assert detect({}, {"RANK": "3", "WORLD_SIZE": "8"}).rank is None
    assert detect({}, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}).world_size is None


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        ({"rank": 2, "world_size": 2}, {}, ["flag --rank=2", "flag --world-size=2"]),
        ({}, {"ZBUS_RANK": "5", "ZBUS_WORLD_SIZE": "4"}, ["ZBUS_RANK=5", "ZBUS_WORLD_SIZE=4"]),
        ({}, {**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({}, {**SLURM, "SLURM_NPROCS": "4"}, ["SLURM_NTASKS=16", "SLURM_NPROCS=4"]),
        ({}, {"ZBUS_RANK": "two"}, ["ZBUS_RANK", "'two'"]),
        ({}, {"ZBUS_RANK": "-1"}, ["ZBUS_RANK", "'-1'"]),
    ],
)
def test_contradictions_of_one_level_are_errors_that_name_both(flags, env, words) -> None:
    """Within one level values must agree; the variables are named with their values."""
    with pytest.raises(ConfigError) as caught:
        detect(flags, env)
    assert all(word in str(caught.value) for word in words)


def test_a_role_that_is_no_name_is_refused() -> None:
    """A role becomes part of paths, so it is checked where it enters (R9)."""
    with pytest.raises(ConfigError, match=r"role '\.\./x' is not a valid name"):
        detect({"role": "../x"}, {})


def test_slurm_writes_tasks_per_node_in_its_own_way() -> None:
    """`2(x4)` means 2 on each node; an uneven list says nothing about this node."""
    assert detect({}, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}).local_world_size == 4
    assert detect({}, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,2"}).local_world_size is None


@pytest.mark.parametrize(
    ("options", "env", "ranks", "world_size", "group_rank"),
    [
        ({}, {}, None, None, 0),
        ({"nproc": "4"}, {}, None, None, 0),
        ({"nproc": "2", "rank": 4, "world_size": 8}, {}, (4, 5), 8, 2),
        ({"nproc": "2", "node_rank": 3}, {}, (6, 7), None, 3),
        ({}, TORCHRUN, (3,), 8, 1),
        ({"nproc": "4"}, SLURM, (20, 21, 22, 23), 64, 2),
        ({"nproc": "2"}, KUBERNETES, (4, 5), None, 2),
    ],
)
def test_launchers_count_processes_and_flags_count_ranks(options, env, ranks, world_size, group_rank) -> None:
    """One agent per launched process: its ranks are multiplied; ranks given by hand are taken as they are."""
    config = _agent_config({"role": "actor", "trial_dir": "/t/e/x", **options}, env)
    assert (config.ranks, config.world_size, config.group_rank) == (ranks, world_size, group_rank)


def test_env_shows_each_value_with_its_source(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """`zbus-worker env --json` prints one object on stdout."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    cli.main(["env", "--role", "actor", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "zbus.env/1"
    assert found["role"] == {"value": "actor", "source": "flag --role"}
    assert found["rank"] == {"value": 3, "source": "RANK"}
    cli.main(["env"], standalone_mode=False)
    assert "world size        8          WORLD_SIZE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start"], "it is not said which role to run"),
        (["start", "--role", "a"], "it is not said which trial to join"),
        (["start", "rloe=a"], "unknown config key `rloe`"),
        (["start", "role"], "'role' is not of the form KEY=VALUE"),
        (["start", "rank=x"], "rank is 'x', not a natural number"),
        (["start", "--role", "a", "--trial-dir", "/t", "--nproc", "0"], "--nproc is '0'"),
        (["start", "--role", "a", "--trial-dir", "/t", "--grace", "soon"], "--grace 'soon' is not a duration"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    """Each bad option is an error with the option and the value in it, before anything starts."""
    with pytest.raises(ConfigError) as caught:
        cli.main(arguments, standalone_mode=False)
    assert message in str(caught.value)
