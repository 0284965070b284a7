"""Agents as real processes for tests: start them, read what they recorded, and see that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import scaled, wait_until, within
from zbus.config import TrialDir
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.records import ExitRecord, Records
from zbus.runtime.processes import children_of, start_time

__all__ = ["AgentKit"]

STANDIN = Path(__file__).parent / "agent_standin.py"


class AgentKit:
    """A trial with agents and, by choice, a stand-in controller process. ``close`` ends and checks everything."""

    def __init__(self, root: Path) -> None:
        self.trial = TrialDir.create(root, "exp", "trial")
        self.records = Records(FileRegistry(self.trial.registry))
        self.agents: list[subprocess.Popen[str]] = []
        self.controllers: list[subprocess.Popen[str]] = []
        self._pids: set[int] = set()

    def job(self, do: str = "sleep", *, role: str = "actor", world_size: int = 1, **fields: Any) -> dict[str, Any]:
        """Return a job whose ranks do ``do``."""
        env = {"ZT_DO": do, **fields.pop("env", {})}
        return {"role": role, "engine": "none:None", "world_size": world_size, "env": env, **fields}

    def lead(self, *jobs: dict[str, Any]) -> None:
        """Make this test process the controller, with these jobs."""
        from zbus.registry.records import EpochRecord, JobRecord

        pid = os.getpid()
        epoch = self.records.claim_epoch(
            EpochRecord(session=os.urandom(16).hex(), pid_space=pid_space(), pid=pid, pid_start=start_time(pid) or 0)
        )
        for job in jobs:
            self.records.publish_job(JobRecord(**job, epoch=epoch.epoch))

    def controller(self, *jobs: dict[str, Any]) -> subprocess.Popen[str]:
        """Start a stand-in controller as a process of its own."""
        command = [sys.executable, str(STANDIN), "controller", str(self.trial), json.dumps(jobs)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self.controllers.append(process)
        return process

    def agent(
        self, *, role: str = "actor", nproc: int = 1, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start an agent, with ``env`` on top of this process's environment."""
        config = {"trial_dir": str(self.trial), "role": role, "nproc": nproc, "grace_s": 2.0, **options}
        process = subprocess.Popen(
            [sys.executable, str(STANDIN), "agent", json.dumps(config)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        self.agents.append(process)
        return process

    def end(self, process: subprocess.Popen[str], timeout_s: float = 15.0) -> tuple[int, str]:
        """Wait for a process to end; return its exit code and what it wrote to stderr."""
        _, text = process.communicate(timeout=within(timeout_s))
        return process.returncode, text or ""

    def exits(self) -> list[ExitRecord]:
        """Return the exit records, by rank and start."""
        return sorted(self.records.exits(), key=lambda r: (r.role, r.rank, r.start))

    def exit(self, count: int = 1) -> ExitRecord:
        """Wait for ``count`` exit records; return the last."""
        return wait_until(lambda: len(found := self.exits()) >= count and found, what=f"{count} exit records")[-1]

    def log(self, rank: int = 0, start: int = 0, role: str = "actor") -> str:
        """Return a rank's log, empty while it is not there."""
        with suppress(FileNotFoundError):
            return self.trial.log(role, rank, start).read_text()
        return ""

    def wait_log(self, text: str, rank: int = 0, start: int = 0) -> str:
        """Wait until a rank has logged ``text``."""
        return wait_until(lambda: (log := self.log(rank, start)) and text in log and log, what=f"{text!r} in the log")

    def descendants(self, agent: subprocess.Popen[str]) -> set[int]:
        """Return the pids of all processes below an agent, and remember them for the final check."""
        found: set[int] = set()
        front = [agent.pid]
        while front:
            children = children_of(front.pop())
            found.update(children)
            front.extend(children)
        self._pids |= found
        return found

    def ranks(self, agent: subprocess.Popen[str], count: int) -> set[int]:
        """Wait for ``count`` ranks of an agent to run planted code; return the pids of everything below it."""
        names = {f"actor/{i}" for i in range(64)}

        def running() -> set[int]:
            pids = set()
            for pid in self.descendants(agent):
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                        pids.add(pid)
            return pids if len(pids) >= count else set()

        return wait_until(running, what=f"{count} ranks of the agent")

    @staticmethod
    def alive(pid: int) -> bool:
        """Tell whether a pid is a running process (not a zombie)."""
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def close(self) -> None:
        """End every process and check that none is left."""
        for process in [*self.agents, *self.controllers]:
            if process.poll() is None:
                self.descendants(process)
                process.send_signal(signal.SIGTERM)
        for process in [*self.agents, *self.controllers]:
            try:
                process.communicate(timeout=scaled(10))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise
        wait_until(lambda: not [p for p in self._pids if self.alive(p)], what="no process left")
        self.trial.unlock()


def agent_kit(root: Path) -> Iterator[AgentKit]:
    """Yield a kit and close it: the body of a fixture."""
    kit = AgentKit(root)
    try:
        yield kit
    finally:
        kit.close()
