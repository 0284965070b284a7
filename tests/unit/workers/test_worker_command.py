from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import wait_until
from workers.cli import main
from workers.spec import RankSpec
from workers.worker import rank_environment
from zbus.registry.records import JobRecord

HEAVY = {"numpy", "torch", "zmq", "msgspec", "yaml", "rich", "asyncio"}


def test_help_imports_nothing_heavy() -> None:
    """`zbus-worker --help` loads click and little else, so it answers at once."""
    code = (
        "import sys\nfrom workers.cli import main\n"
        "try:\n    main(['start', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "--wait-controller" in done.stdout


def test_the_version_is_one_json_object() -> None:
    """--version --json carries the protocol version; stdout holds nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "workers", "--version", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["schema"], found["program"], found["protocol"]) == ("zbus.version/1", "zbus-worker", 1)


def test_an_error_is_one_block_with_code_facts_and_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors go to stderr in the common form, and the exit code is the error's."""
    with pytest.raises(SystemExit) as stop:
        main(["start", "nprok=3"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error[ZB0101]: unknown config key `nprok`\n"
        "  from  command line, argument 1\n"
        "hint: did you mean `nproc`?\n"
        "more: zbus-controller explain ZB0101\n"
    )


def test_wrong_usage_is_exit_code_2() -> None:
    """An unknown option or command is a usage error, not a traceback."""
    for arguments in (["strat"], ["start", "--rnak", "1"], ["start", "--rank", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def _spec(**fields) -> RankSpec:
    job = fields.pop("job", JobRecord(role="actor", engine="m:C", world_size=4, env={"A": "1,2=3", "RANK": "99"}))
    base = {
        "experiment": "e",
        "trial": "t",
        "trial_dir": "/t",
        "runtime_dir": "",
        "role": "actor",
        "rank": 1,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "start": 3,
        "incarnation": (3 << 48) + 7,
        "agent_id": "a",
        "agent_pid": 1,
        "log": "/l",
    }
    return RankSpec(job=job, **{**base, **fields})


def test_a_spec_survives_its_way_exactly() -> None:
    """What the agent writes is what the rank reads, type for type."""
    spec = _spec(listen_fds=[3, 4], ports=[5, 6], torch_store_fd=7, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert RankSpec.from_json(spec.to_json()) == spec


def test_a_user_value_wins_but_identity_is_not_the_users() -> None:
    """The job's environment beats devices and defaults; RANK and friends say who the rank is."""
    env = rank_environment(_spec(env={"A": "device"}, master_port=29))
    assert env["A"] == "1,2=3"
    assert (env["RANK"], env["MASTER_PORT"], env["ZBUS_START"]) == ("1", "29", "3")
    assert "MASTER_PORT" not in rank_environment(_spec())


def _session_of(stat: Path) -> int:
    """Return the session of a process, 0 once it is gone."""
    try:
        return int(stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return 0


def test_a_template_that_is_there_before_the_command_line_was_read_ends_with_it() -> None:
    """A start whose command line is refused leaves no process behind, though its template was forked first."""
    command = [sys.executable, "-P", "-m", "workers", "start", "nprok=3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as started:
        _, said = started.communicate()
    assert (started.returncode, said.splitlines()[0]) == (2, "error[ZB0101]: unknown config key `nprok`")
    wait_until(
        lambda: all(_session_of(stat) != started.pid for stat in Path("/proc").glob("[0-9]*/stat")),
        what="the end of the template",
    )


def test_only_a_start_that_wants_a_template_forks_one() -> None:
    """Other commands, and a start that is told so, fork nothing before they read their command line."""
    code = (
        "import sys\nfrom workers.__main__ import _fork_template\n"
        "assert _fork_template(sys.argv[1:]) is None\nassert 'workers.template' not in sys.modules"
    )
    for arguments in (["env"], ["--version"], [], ["start", "--role", "w", "--no-template"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)
