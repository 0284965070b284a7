"""The external scheduler: agents are started by hand, torchrun or a cluster; it only says what is still missing."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from typing import Final

from controller.scheduling.api import AgentExit, Job, Worker, missing_lines, wait_workers
from zbus.config import TrialDir
from zbus.errors import ConfigError
from zbus.registry.file import FileRegistry
from zbus.registry.records import AgentRecord, Records

__all__ = ["ExternalScheduler"]

_ABSENT: Final = "nobody has started it"


class ExternalScheduler:
    """Waits for agents that others start. Methods may be called from any thread.

    Args:
        trial: The trial; it must exist.
        ask_stop: Asks the agents of a role over ``ctl`` to stop (role, grace in seconds) and returns whether they
            acknowledged. Without it their lease on the controller ends them.
    """

    def __init__(self, trial: TrialDir, *, ask_stop: Callable[[str, float], bool] | None = None) -> None:
        self.trial = trial
        self.ask_stop = ask_stop
        self._jobs: dict[str, Job] = {}
        self._seen: dict[str, AgentRecord] = {}
        self._lock = threading.Lock()
        self._records = Records(FileRegistry(trial.registry))

    def start(self, job: Job) -> None:
        """Expect the agents of a role from now on.

        Raises:
            ConfigError: The role is expected already.
        """
        with self._lock:
            if job.role in self._jobs:
                msg = f"role {job.role} has been started already"
                raise ConfigError(msg, hint="give the second one another name")
            self._jobs[job.role] = job

    def instructions(self, role: str, count: int | None = None) -> str:
        """Return the line that starts ranks of a role on one host: ``count`` that are free, or all of them."""
        number = self._job(role).replicas if count is None else count
        line = ["zbus-worker", "start", "--role", role, "--nproc", str(number), "--trial-dir", str(self.trial)]
        return shlex.join(line)

    def reminder(self) -> list[str]:
        """Say who is still missing, and the lines that start those whom nobody has started; empty when all are there.

        Raises:
            RegistryError: The registry cannot be read.
        """
        lines = self.missing()
        absent: dict[str, int] = {}
        for line in lines:
            name, _, words = line.partition(": ")
            if words == _ABSENT:
                role = name.rpartition("/")[0]
                absent[role] = absent.get(role, 0) + 1
        return [*lines, *(f"start with: {self.instructions(role, count)}" for role, count in absent.items())]

    def poll(self) -> list[AgentExit]:
        """Return agents that took back their record since the last poll. How they ended is not known here."""
        with self._lock:
            jobs = list(self._jobs)
        present = {record.agent: record for role in jobs for record in self._records.agents(role)}
        gone = [record for agent, record in self._seen.items() if agent not in present]
        self._seen = present
        return [AgentExit(role=r.role, host=r.host, pid=r.pid, exit_code=None, signal=None, asked=False) for r in gone]

    def workers(self, role: str, timeout_s: float) -> list[Worker]:
        """Wait for all ranks of a role; see ``Scheduler.workers``.

        Raises:
            ConfigError: The role was not started.
            StartupError: The time is over; each missing rank is named.
        """
        return wait_workers(self._records, role, self._job(role).replicas, timeout_s, absent=_ABSENT)

    def missing(self) -> list[str]:
        """Say, one line each, which ranks are not there."""
        with self._lock:
            jobs = list(self._jobs.values())
        return [line for job in jobs for line in missing_lines(self._records, job.role, job.replicas, _ABSENT)]

    def stop(self, role: str | None = None, *, grace_s: float = 5.0) -> list[AgentExit]:
        """Ask the agents to stop and wait until they have taken back their records, at most ``grace_s`` + 2 s.

        Processes of others are never signalled.
        """
        with self._lock:
            roles = [name for name in self._jobs if role in (None, name)]
        if self.ask_stop is None:
            return []
        before = [record for name in roles for record in self._records.agents(name)]
        for name in roles:
            self.ask_stop(name, grace_s)
        deadline = time.monotonic() + grace_s + 2.0
        while before and time.monotonic() < deadline:
            if not [name for name in roles if self._records.agents(name)]:
                break
            time.sleep(0.02)
        left = {record.agent for name in roles for record in self._records.agents(name)}
        return [
            AgentExit(role=r.role, host=r.host, pid=r.pid, exit_code=0, signal=None, asked=True)
            for r in before
            if r.agent not in left
        ]

    def close(self) -> None:
        """Let go of the registry; agents are left to the controller's lease. May be repeated."""
        self._records.close()

    def _job(self, role: str) -> Job:
        with self._lock:
            job = self._jobs.get(role)
        if job is None:
            msg = f"role {role} was not started here"
            raise ConfigError(msg)
        return job
