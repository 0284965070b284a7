"""Too few processes and threads allowed, at any point of a worker's start: a clean end with the cause in words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_kit import AgentKit, agent_kit
from waiting import scaled, wait_until

PID_GROUPS = Path("/sys/fs/cgroup/pids")

pytestmark = [
    pytest.mark.ci,
    pytest.mark.alone,
    pytest.mark.skipif(not os.access(PID_GROUPS / "cgroup.procs", os.W_OK), reason="needs root and a v1 pids cgroup"),
]

WORDS = (
    "raise the limit of processes",  # the agent's own threads and processes
    "the limit of processes or memory is reached",  # a rank cannot be forked
    "Resource temporarily unavailable",  # libzmq ends a process that cannot start its thread
    "can't start new thread",  # a rank cannot start one
    "killed by SIGABRT",  # the same, of a rank, as its agent tells it
)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[AgentKit]:
    """Give a trial led by this process."""
    yield from agent_kit(tmp_path)


@pytest.fixture
def group() -> Iterator[Path]:
    """Give a pids cgroup that is empty at the end."""
    made = PID_GROUPS / f"zbus-test-{os.getpid()}"
    made.mkdir()
    yield made
    wait_until(lambda: not (made / "cgroup.procs").read_text(), what="the group to be empty")
    made.rmdir()


@pytest.mark.parametrize("most", [1, 2, 4, 6, 8, 10, 12])
def test_a_worker_that_may_not_have_its_threads_ends_with_that_cause(kit, group, most):
    """Row 61: whichever thread or process is one too many, the worker ends within seconds and says so."""
    kit.lead({"role": "actor", "engine": "none:None", "world_size": 1})
    (group / "pids.max").write_text(str(most))
    command = [sys.executable, "-m", "workers", "start", "--trial-dir", str(kit.trial), "--role", "actor"]
    with subprocess.Popen(
        ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("ZBUS_")},
    ) as agent:
        _, said = agent.communicate(timeout=scaled(20))
    assert agent.returncode not in {0, 1}
    exits = " ".join(record.reason for record in kit.exits())
    assert any(word in said + exits for word in WORDS), said
    assert "Traceback" not in said
