"""The local scheduler: one agent per role, as a process of this host in a session of its own.

One permanent thread makes the processes, watches their pidfds and reaps them. So a death is known at once, whoever is
waiting for what, and no process hangs on the life of a passing thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Final

from controller.scheduling.api import AgentExit, Job, Worker, missing_lines, wait_workers
from controller.scheduling.gpus import GpuPool, find_gpus
from zbus.config import TrialDir
from zbus.errors import ConfigError, RegistryError, StartupError
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.records import Records
from zbus.runtime.processes import ProcessHandle, start_time

__all__ = ["AGENT_COMMAND", "LocalScheduler"]

log = logging.getLogger("zbus.scheduler")

AGENT_COMMAND: Final = (sys.executable, "-P", "-m", "workers")
"""Starts an agent. ``-P`` keeps the working directory out of ``sys.path``, where a user's ``workers`` may lie."""

_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16 * 1024
_KILL_WAIT_S: Final = 5.0


@dataclass(slots=True)
class _Agent:
    job: Job
    process: subprocess.Popen[bytes]
    handle: ProcessHandle
    log: Path
    asked: bool = False
    ended: AgentExit | None = None
    reported: bool = False


class LocalScheduler:
    """Starts agents on this host. Methods may be called from any thread.

    Args:
        trial: The trial; it must exist.
        gpus: Accelerators of this run; those that are visible if None.
        transport: ``ipc`` or ``tcp``.
        bind_host: Address that tcp sockets and held ports bind.
        wait_controller_s: How long agents wait for the controller and their job.
        lease_ttl_s: Lease time of agents.
        stop_grace_s: Seconds ranks have to end in order.
        ask_stop: Asks the agent of a role over ``ctl`` to stop (role, grace in seconds) and returns whether it
            acknowledged. Without it, agents are stopped by SIGTERM, which they answer in the same order.
        on_agent_exit: Called once for each agent that ended, on the scheduler's thread; must be quick.
    """

    def __init__(
        self,
        trial: TrialDir,
        *,
        gpus: Sequence[int | str] | None = None,
        transport: str = "ipc",
        bind_host: str = "127.0.0.1",
        wait_controller_s: float = 60.0,
        lease_ttl_s: float = 5.0,
        stop_grace_s: float = 5.0,
        ask_stop: Callable[[str, float], bool] | None = None,
        on_agent_exit: Callable[[AgentExit], None] | None = None,
    ) -> None:
        self.trial = trial
        self.ask_stop = ask_stop
        self.on_agent_exit = on_agent_exit
        self._options = ("--transport", transport, "--bind", bind_host, "--lease", f"{lease_ttl_s:g}")
        self._wait_controller_s = wait_controller_s
        self._stop_grace_s = stop_grace_s
        self._pool = GpuPool(find_gpus() if gpus is None else [str(gpu) for gpu in gpus])
        self._agents: dict[str, _Agent] = {}
        self._past: list[_Agent] = []
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._records: Records | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zbus-spawner", daemon=True)
        self._thread.start()

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Start the agent of a role; see ``Scheduler.start``.

        Raises:
            ConfigError: The role runs already, or its accelerators are not free.
            StartupError: The agent's process could not be made.
        """
        with self._lock:
            running = self._agents.get(job.role)
            if running is not None and running.ended is None:
                msg = f"role {job.role} has been started already"
                raise ConfigError(msg, hint="give the second one another name")
            sets = self._pool.reserve(job)
        try:
            agent = self._on_thread(lambda: self._spawn(job, sets)).result()
        except OSError as error:
            self._pool.release(job.role)
            msg = f"the agent of {job.role} could not be started: {error.strerror}"
            raise StartupError(msg, facts={"command": " ".join(job.tasks[0].cmd or AGENT_COMMAND)}) from error
        log.debug("agent of %s: pid %d", job.role, agent.handle.pid)

    def command(self, job: Job, sets: Sequence[str]) -> list[str]:
        """Return the command of a role's agent."""
        command = [*(job.tasks[0].cmd or AGENT_COMMAND), "start", "--role", job.role, "--nproc", str(job.replicas)]
        # Everything is said by flags: inside somebody's Slurm allocation the environment speaks of another job.
        command += ["--rank", "0", "--world-size", str(job.replicas), "--node-rank", "0"]
        command += ["--launcher", f"{os.getpid()}:{start_time(os.getpid()) or 0}"]
        command += ["--trial-dir", str(self.trial), "--wait-controller", f"{self._wait_controller_s:g}"]
        command += ["--grace", f"{self._stop_grace_s:g}", *self._options]
        if any(sets):
            command += ["--devices", ";".join(sets)]
        return command

    def _spawn(self, job: Job, sets: Sequence[str]) -> _Agent:
        path = self.trial.agent_log(job.role, socket.gethostname())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            process = subprocess.Popen(
                self.command(job, sets), stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, start_new_session=True
            )
        finally:
            os.close(fd)
        handle = ProcessHandle.open(process.pid)
        if handle is None:  # pragma: no cover  # an unreaped child always has a pidfd
            raise OSError(0, "its process vanished")
        agent = _Agent(job, process, handle, path)
        with self._lock:
            if (old := self._agents.get(job.role)) is not None:
                self._past.append(old)
            self._agents[job.role] = agent
        self._selector.register(handle, selectors.EVENT_READ, agent)
        return agent

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _on_thread(self, job: Callable[[], _Agent]) -> Future[_Agent]:
        future: Future[_Agent] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001  # the caller gets it, whatever it is
                future.set_exception(error)

        if self._closed:
            msg = "the scheduler is closed"
            raise StartupError(msg)
        self._jobs.put(run)
        os.eventfd_write(self._wake_fd, 1)
        return future

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Agent):
                    self._on_end(key.data)
                    continue
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                while not self._jobs.empty():
                    job = self._jobs.get()
                    if job is None:
                        return
                    job()

    def _on_end(self, agent: _Agent) -> None:
        self._selector.unregister(agent.handle)
        code = agent.process.wait()
        ended = AgentExit(
            role=agent.job.role,
            host=socket.gethostname(),
            pid=agent.handle.pid,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            asked=agent.asked,
            log=self.trial.relative(agent.log),
            log_tail=tuple(_tail(agent.log)),
        )
        with self._lock:
            agent.ended = ended
        self._pool.release(agent.job.role)
        if self.on_agent_exit is not None:
            self.on_agent_exit(ended)

    # -- watching ------------------------------------------------------------------------------------------------------

    def poll(self) -> list[AgentExit]:
        """Return agents that ended since the last poll. Never waits."""
        found = []
        with self._lock:
            for agent in [*self._past, *self._agents.values()]:
                if agent.ended is not None and not agent.reported:
                    agent.reported = True
                    found.append(agent.ended)
        return found

    def workers(self, role: str, timeout_s: float) -> list[Worker]:
        """Wait for all ranks of a role; see ``Scheduler.workers``.

        Raises:
            ConfigError: The role was not started.
            StartupError: A rank's agent ended, or the time is over.
        """
        agent = self._agent(role)
        return wait_workers(
            self._open(),
            role,
            agent.job.replicas,
            timeout_s,
            absent="its agent has not started it yet",
            failed=lambda: self._failed(agent),
        )

    def _failed(self, agent: _Agent) -> StartupError | None:
        ended = agent.ended
        if ended is None:
            return None
        facts = {"log": ended.log, **{f"line {n}": line for n, line in enumerate(ended.log_tail[-5:], 1)}}
        for line in missing_lines(self._open(), ended.role, agent.job.replicas, "never started"):
            name, _, words = line.partition(": ")
            facts[name] = words
        return StartupError(f"the agent of {ended.role} {ended.cause()} before its ranks were ready", facts=facts)

    def missing(self) -> list[str]:
        """Say, one line each, what started roles still lack."""
        with self._lock:
            jobs = [agent.job for agent in self._agents.values()]
        absent = "its agent has not started it yet"
        return [line for job in jobs for line in missing_lines(self._open(), job.role, job.replicas, absent)]

    def _agent(self, role: str) -> _Agent:
        with self._lock:
            agent = self._agents.get(role)
        if agent is None:
            msg = f"role {role} was not started here"
            raise ConfigError(msg)
        return agent

    def _open(self) -> Records:
        if self._records is None:
            self._records = Records(FileRegistry(self.trial.registry))
        return self._records

    # -- stopping ------------------------------------------------------------------------------------------------------

    def stop(self, role: str | None = None, *, grace_s: float | None = None) -> list[AgentExit]:
        """End the agents of a role, or all: ask over ``ctl``, then SIGTERM, then SIGKILL; see ``Scheduler.stop``.

        Takes up to the grace period and a few seconds for agents that do not answer, nothing for those that do.
        """
        grace = self._stop_grace_s if grace_s is None else grace_s
        with self._lock:
            chosen = [agent for name, agent in self._agents.items() if role in (None, name)]
            for agent in chosen:
                agent.asked = True
        living = [agent for agent in chosen if not agent.handle.ended()]
        asked = []
        for agent in living:
            if self.ask_stop is not None:
                with contextlib.suppress(Exception):  # whatever went wrong, SIGTERM is next
                    if self.ask_stop(agent.job.role, grace):
                        asked.append(agent)
        told = [agent for agent in living if agent not in asked]
        for agent in told:
            agent.handle.signal(SIGTERM)
        # An agent gives its ranks the grace; it needs a moment more for its own end.
        _wait_all(asked, grace + 1.0)
        for agent in asked:
            agent.handle.signal(SIGTERM)
        _wait_all(living, self._stop_grace_s + 2.0)
        killed = [agent for agent in living if not agent.handle.ended()]
        for agent in killed:
            log.error("the agent of %s (pid %d) did not stop and is killed", agent.job.role, agent.handle.pid)
            agent.handle.signal(SIGKILL)
        _wait_all(killed, _KILL_WAIT_S)
        for agent in chosen:
            self._sweep(agent.job.role)
        return self._ended(chosen)

    def _ended(self, chosen: Sequence[_Agent]) -> list[AgentExit]:
        """Return the exits, once the thread has seen them."""
        deadline = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < deadline and any(agent.ended is None for agent in chosen):
            time.sleep(0.002)
        return [agent.ended for agent in chosen if agent.ended is not None]

    def _sweep(self, role: str) -> None:
        """See that no rank outlived its agent: the kernel kills them with it, this only makes sure."""
        try:
            records = self._open().workers(role)
        except RegistryError:
            return
        for record in records:
            if record.pid_space != pid_space():
                continue
            handle = ProcessHandle.open(record.pid, record.pid_start)
            if handle is None:
                continue
            if not handle.wait(1.0):
                handle.signal(SIGKILL)
                handle.wait(1.0)
            handle.close()

    def close(self) -> None:
        """Stop everything that still runs and end the thread. May be repeated."""
        if self._closed:
            return
        self.stop()
        self._closed = True
        self._jobs.put(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_KILL_WAIT_S)
        self._selector.close()
        os.close(self._wake_fd)
        for agent in [*self._past, *self._agents.values()]:
            agent.handle.close()
        if self._records is not None:
            self._records.close()


def _wait_all(agents: Sequence[_Agent], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for agent in agents:
        agent.handle.wait(max(0.0, deadline - time.monotonic()))


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
