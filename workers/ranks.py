"""How an agent brings ranks to life: what each is told, the sockets held for it, and fork or exec."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from workers import spawn
from workers.spec import RankSpec
from workers.template import ForkReply, Template
from zbus.config import TrialDir
from zbus.ids import new_incarnation
from zbus.registry.records import EpochRecord, JobRecord
from zbus.runtime.leaseword import LeaseWord

__all__ = ["Place", "RankStarter"]

log = logging.getLogger("zbus.agent")

_MOST_ASKED: Final = 8
"""Requests that may be on their way to the template: it forks one after the other anyway."""


class Place(msgspec.Struct):
    """Where ranks run and what they are told beside their job; the agent keeps it current.

    Attributes:
        trial, role, agent_id, group_rank: As in ``RankSpec``.
        transport, bind_host: How ranks are reached, and the address of held ports.
        devices: Accelerators by local rank.
        worker_command: Command of ranks that are started by exec.
        job: What to run.
        epoch: The controller.
        starts: The ranks of this agent, with the number of their current start.
        lease: Tells ranks until when the agent's lease is held.
        lease_ttl_s: Silence after which others call the agent dead.
        published_fd: Written by a rank when its record is there.
    """

    trial: TrialDir
    role: str
    agent_id: str
    group_rank: int
    transport: str
    bind_host: str
    devices: Sequence[str]
    worker_command: Sequence[str]
    job: JobRecord | None = None
    epoch: EpochRecord | None = None
    starts: dict[int, int] = msgspec.field(default_factory=dict)
    lease: LeaseWord | None = None
    lease_ttl_s: float = 5.0
    published_fd: int | None = None


class RankStarter:
    """Starts ranks. Used on the agent's main thread only.

    Args:
        place: What ranks are told.
        template: The role's template, or None to start an interpreter for each rank.
        on_started: Takes the spec and pid of each new process.
        on_failed: Takes the rank and the reason where there is none.
        on_no_template: Told when the template is given up, before it is closed.
    """

    def __init__(
        self,
        place: Place,
        template: Template | None,
        *,
        on_started: Callable[[RankSpec, int], None],
        on_failed: Callable[[int, str], None],
        on_no_template: Callable[[Template], None],
    ) -> None:
        self.place = place
        self.template = template
        self._on_started = on_started
        self._on_failed = on_failed
        self._on_no_template = on_no_template
        self._ready = False
        self._waiting: list[int] = []
        self._starting: dict[int, RankSpec] = {}
        self._held: dict[int, list[socket.socket]] = {}
        self._store: socket.socket | None = None
        self._store_used = False

    @property
    def starting(self) -> bool:
        """Whether the template was asked for a rank and has not answered: a child may be there that nobody knows."""
        return bool(self._starting)

    def hold_ports(self) -> None:
        """Bind what the job asks for; the sockets stay with the agent, so the ports survive restarts.

        Raises:
            OSError: No port can be bound.
        """
        job = self.place.job
        for rank in self.place.starts:
            self._held[rank] = [spawn.hold_port(self.place.bind_host) for _ in range(job.port_count if job else 0)]

    def prepare(self) -> None:
        """Let the template import what the job names."""
        job = self.place.job
        if self.template is None or job is None:
            return
        try:
            self.template.configure(self.place.role, preload=job.preload, env=job.env, sys_path=job.sys_path)
        except OSError as error:
            self._drop_template(f"it died: {error.strerror}")

    def start(self, rank: int) -> None:
        """Start the current start of ``rank``; the answer comes through ``on_started`` or ``on_failed``."""
        if self.template is not None and (not self._ready or len(self._starting) >= _MOST_ASKED):
            self._waiting.append(rank)
            return
        try:
            spec = self._spec(rank)
            log_fd = spawn.open_log(Path(spec.log))
        except OSError as error:
            self._on_failed(rank, f"{error.strerror}: {error.filename or ''}")
            return
        try:
            if self.template is not None:
                self._starting[rank] = spec
                self._ask(self.template, spec, log_fd)
                return
            environment = {**os.environ, **self._environment(spec)}
            pid = spawn.spawn_exec(spec, environment, log_fd, self.place.worker_command)
        except OSError as error:
            self._starting.pop(rank, None)
            self._on_failed(rank, f"{error.strerror or error}")
            return
        finally:
            os.close(log_fd)
        self._on_started(spec, pid)

    def _ask(self, template: Template, spec: RankSpec, log_fd: int) -> None:
        try:
            template.start(spec, self._environment(spec), log_fd)
        except BlockingIOError:
            # The socket is full of requests: this one goes out after the next answer.
            del self._starting[spec.rank]
            if not self._starting:
                raise
            self._waiting.append(spec.rank)

    def close(self) -> None:
        """End the template and close the held sockets."""
        if self.template is not None:
            self.template.close()
            self.template = None
        for held in [*self._held.values(), [self._store] if self._store else []]:
            for one in held:
                one.close()

    # -- what a rank is told -------------------------------------------------------------------------------------------

    def _environment(self, spec: RankSpec) -> Mapping[str, str]:
        wanted = {**os.environ, **spec.job.env}
        return {**spawn.thread_defaults(wanted), **spec.env, **spec.job.env}

    def _spec(self, rank: int) -> RankSpec:
        place = self.place
        job, epoch = place.job, place.epoch
        assert job is not None  # noqa: S101  # ranks start after joining
        assert epoch is not None  # noqa: S101  # as above
        start = place.starts[rank]
        store_fd = self._store_for(rank)
        local = sorted(place.starts).index(rank)
        devices = place.devices[local] if local < len(place.devices) else ""
        held = self._held.get(rank, [])
        return RankSpec(
            experiment=place.trial.experiment,
            trial=place.trial.trial,
            trial_dir=str(place.trial),
            runtime_dir=epoch.runtime_dir,
            role=place.role,
            rank=rank,
            world_size=job.world_size,
            local_rank=local,
            local_world_size=len(place.starts),
            group_rank=place.group_rank,
            start=start,
            incarnation=new_incarnation(start),
            agent_id=place.agent_id,
            agent_pid=os.getpid(),
            job=job,
            log=str(place.trial.log(place.role, rank, start)),
            listen_fds=[one.fileno() for one in held],
            ports=[one.getsockname()[1] for one in held],
            torch_store_fd=store_fd,
            master_addr=place.bind_host,
            master_port=0 if self._store is None else self._store.getsockname()[1],
            # Without a runtime directory there is no place for ipc sockets.
            transport=place.transport if epoch.runtime_dir else "tcp",
            bind_host=place.bind_host,
            controller_epoch=epoch.epoch,
            lease_fd=None if place.lease is None else place.lease.fileno(),
            published_fd=place.published_fd,
            lease_ttl_s=place.lease_ttl_s,
            env={"CUDA_VISIBLE_DEVICES": devices} if devices else {},
        )

    def _store_for(self, rank: int) -> int | None:
        """Return rank 0's socket for the torch store, a new one for each generation of the group.

        Peers that start before rank 0 of their generation are told the same port: the generation begins with the
        first start after rank 0 took the old socket.
        """
        if 0 not in self.place.starts:
            return None
        if self._store is None or (rank == 0 and self._store_used):
            if self._store is not None:
                self._store.close()
            self._store, self._store_used = spawn.hold_port(self.place.bind_host), False
        if rank != 0:
            return None
        self._store_used = True
        return self._store.fileno()

    # -- the template --------------------------------------------------------------------------------------------------

    def on_template_readable(self) -> None:
        """Take the template's answers."""
        template = self.template
        if template is None:
            return
        replies = template.replies()
        if replies is None:
            self._drop_template("it died")
            return
        for reply in replies:
            if self.template is template:
                self._on_reply(template, reply)

    def _on_reply(self, template: Template, reply: ForkReply) -> None:
        for line in reply.warnings:
            log.warning("%s", line)
        if reply.ready:
            if reply.error:
                self._drop_template(reply.error)
                return
            self._ready = True
            self._start_waiting()
            return
        spec = self._starting.pop(reply.rank)
        if reply.error:
            template.release(reply.rank, run=False)
            self._on_failed(reply.rank, reply.error)
        else:
            self._on_started(spec, reply.pid)
            template.release(reply.rank)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._starting) < _MOST_ASKED:
            before = len(self._waiting)
            self.start(self._waiting.pop(0))
            if len(self._waiting) >= before:  # put back: the socket is full
                return

    def _drop_template(self, why: str) -> None:
        """Go on without a template: ranks are started by exec."""
        template, self.template = self.template, None
        if template is None:
            return
        log.warning("no template for %s (%s): ranks are started one interpreter each", self.place.role, why)
        self._on_no_template(template)
        template.close()
        waiting = [*self._waiting, *self._starting]
        self._waiting.clear()
        self._starting.clear()
        for rank in waiting:
            self.start(rank)
