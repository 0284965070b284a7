"""How a session begins: by a launch, in this process, by taking over, or as a guest.

A launch goes through these stations, each with its one deadline: trial directory and lock, sockets and hub, epoch (the
fencing number), job records, agents by the scheduler, workers by the directory, engines. A failure in any of them is
raised as it is found, and names who is missing and how far it came; whoever closes the session undoes what was started.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from msgspec import structs

from controller.asking import ask
from controller.members import Members
from controller.patience import wait_reminding
from controller.plan import LaunchPlan
from controller.refs import RefBook
from controller.scheduling.api import AgentExit, Job, Scheduler
from controller.session import Entry, Session
from controller.startup import agent_error, missing_error
from controller.takeover import arguments_of, refuse_living, with_arguments
from zbus.config import Config
from zbus.data.courier import Courier
from zbus.data.porter import Porter
from zbus.errors import TrialError
from zbus.ids import WorkerName, new_session
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.records import Records
from zbus.runtime.processes import is_alive
from zbus.transport.bulk import Bulk
from zbus.transport.client import Client, PeerState
from zbus.transport.sockets import SocketFactory

__all__ = ["attach", "launch", "launch_inline", "take_over"]

log = logging.getLogger("zbus.controller")

_PREDECESSORS_S: Final = 15.0
_LOOK_S: Final = 0.02


def launch(session: Session, plan: LaunchPlan) -> None:
    """Start the ranks of a trial, and return when all are ready."""
    session.startup_timeout = plan.startup_timeout
    deadline = time.monotonic() + plan.startup_timeout
    if not plan.keeps_lock:
        session.closers.callback(session.trial.unlock)
    config = plan.config
    jobs = {name: role.to_job(name, config.trace.level, config.data) for name, role in plan.roles.items()}
    records = session.open_records()

    def entries(epoch: int) -> dict[str, Entry]:
        return {
            name: (with_arguments(jobs[name].to_record(epoch), role.args, role.kwargs), role.args, role.kwargs)
            for name, role in plan.roles.items()
        }

    world = sum(role.world_size for role in plan.roles.values())
    if plan.scheduler != "external":
        _await_predecessors(records, min(_PREDECESSORS_S, plan.startup_timeout / 2))
    leftovers = _leftovers(records, starts_all=plan.scheduler != "external")
    members, directory = session.open_bus(plan.config, records, world, entries, leftovers)
    scheduler, failures = _schedule(session, plan)
    session.closers.callback(session.stop_workers, scheduler, plan.config.scheduler.stop_grace)
    for job in jobs.values():
        scheduler.start(job)
    _await_ready(session, members, scheduler, failures, records, deadline, plan.startup_timeout)
    directory.launching(active=False)


def take_over(session: Session, config: Config, timeout: float) -> None:
    """Claim the next epoch of a trial whose controller is gone, and adopt its workers."""
    from controller.scheduling.external import ExternalScheduler

    deadline = time.monotonic() + timeout
    session.closers.callback(session.trial.unlock)
    records = session.open_records()
    holder = records.current_epoch()
    jobs = [job for job in records.jobs() if holder is not None and job.epoch == holder.epoch]
    if holder is None or not jobs:
        msg = f"no controller has run in {session.trial.name} yet"
        raise TrialError(msg, hint="start one with Controller.launch")
    refuse_living(records, holder)

    def entries(epoch: int) -> dict[str, Entry]:
        return {job.role: (structs.replace(job, epoch=epoch), *arguments_of(job)) for job in jobs}

    members, directory = session.open_bus(config, records, sum(job.world_size for job in jobs), entries)
    scheduler = ExternalScheduler(session.trial, ask_stop=session.ask_agents)
    session.closers.callback(scheduler.close)
    session.closers.callback(session.stop_workers, scheduler, config.scheduler.stop_grace)
    for job in jobs:
        scheduler.start(Job(role=job.role, replicas=job.world_size, engine=job.engine))
    _await_ready(session, members, scheduler, [], records, deadline, timeout)
    directory.launching(active=False)


def launch_inline(session: Session, plan: LaunchPlan) -> None:
    """Make the ranks of a trial in this process."""
    from controller.scheduling.inline import InlineRuntime

    if not plan.keeps_lock:
        session.closers.callback(session.trial.unlock)
    session.deadline_s = plan.config.rpc.timeout
    runtime = InlineRuntime(trace=session.trace(plan.config))
    session.closers.callback(runtime.close)
    rosters = {}
    for name, role in plan.roles.items():
        rosters[name] = runtime.add_role(
            name,
            role.engine_path,
            replicas=role.world_size,
            mesh=role.mesh,
            args=role.args,
            kwargs=role.kwargs,
            trial_dir=session.trial.path,
        )
    session.placer, session.rosters = runtime, rosters
    session.refs = RefBook(runtime.desk, runtime.link, renew_s=plan.config.data.ref_lease / 4)
    session.closers.callback(session.refs.close)


def attach(session: Session, timeout: float) -> None:
    """Join a running trial as a guest."""
    from controller.guests import GuestRoster

    records = Records(FileRegistry(session.trial.registry, create=False))
    session.closers.callback(records.close)
    if records.current_epoch() is None:
        msg = f"no controller has run in {session.trial.name} yet"
        raise TrialError(msg, hint="zbus-controller status shows what runs")
    factory = SocketFactory()
    session.closers.callback(factory.close)
    bulk = Bulk(factory)
    session.closers.callback(bulk.close)
    porter = Porter(Courier.enter(), bulk)
    session.closers.callback(porter.leave)
    client = session.client = Client(session=new_session(), epoch=0, factory=factory, name="guest", carrier=porter)
    session.closers.callback(client.close)
    session.placer = client
    session.rosters = GuestRoster.connect(client, records, timeout)
    session.keep_refs(client, porter, Config(), 0)


def _await_predecessors(records: Records, limit_s: float) -> None:
    """Wait until the agents of a controller that was killed have ended, as they do once they see that it is gone.

    While they live they hold their ranks, and what they write down of their end would be taken for one of this run.
    """
    waiting = {job.role for job in records.jobs() if job.orphans == "wait"}
    here = pid_space()
    old = [agent for agent in records.agents() if agent.role not in waiting and agent.pid_space == here]
    until = time.monotonic() + limit_s
    while living := [agent for agent in old if is_alive(agent.pid, agent.pid_start)]:
        if time.monotonic() > until:
            log.warning("%d agents of the run before still live, such as %s", len(living), living[0].agent)
            return
        time.sleep(_LOOK_S)


def _leftovers(records: Records, *, starts_all: bool) -> list[int]:
    """Return the incarnations that stand in the registry and cannot be meant by a launch.

    A killed agent leaves no word of how its ranks ended. Their records would be taken for ranks of this run, and their
    silence for a death of it. Where agents are started by hand a rank may stand there already: only what is seen to be
    gone is left out then.
    """
    here = pid_space()
    return [
        record.incarnation
        for record in records.workers()
        if starts_all or (record.pid_space == here and not is_alive(record.pid, record.pid_start))
    ]


def _schedule(session: Session, plan: LaunchPlan) -> tuple[Scheduler, list[AgentExit]]:
    failures: list[AgentExit] = []
    settings = plan.config.scheduler
    if plan.scheduler == "external":
        from controller.scheduling.external import ExternalScheduler

        external = ExternalScheduler(session.trial, ask_stop=session.ask_agents)
        session.closers.callback(external.close)
        for name, role in plan.roles.items():
            log.info("waiting for %s/0-%d: zbus-worker start --role %s", name, role.world_size - 1, name)
        return external, failures
    from controller.scheduling.local import LocalScheduler

    def agent_ended(ended: AgentExit) -> None:
        failures.append(ended)
        if session.members is not None:
            session.members.on_agent_exit(ended)

    local = LocalScheduler(
        session.trial,
        gpus=settings.gpus,
        transport=settings.transport,
        bind_host=settings.bind,
        wait_controller_s=plan.startup_timeout,
        stop_grace_s=settings.stop_grace,
        on_agent_exit=agent_ended,
    )
    session.closers.callback(local.close)
    return local, failures


def _await_ready(
    session: Session,
    members: Members,
    scheduler: Scheduler,
    failures: list[AgentExit],
    records: Records,
    deadline: float,
    limit_s: float,
) -> None:
    """Wait until every rank is ready; the first failure ends the wait, so does the deadline."""

    def settled() -> bool:
        return members.all_ready() or members.first_error() is not None or bool(failures)

    wait_reminding(members, scheduler, settled, deadline)
    if failures and members.first_error() is None and not members.all_ready():
        members.wait(lambda: members.first_error() is not None, 0.3)  # an exit record tells more than its agent
    error = members.first_error()
    if error is not None:
        raise error
    if members.all_ready():
        return
    if failures:
        raise members.gave_up(failures[0].role) or agent_error(failures[0])
    raise missing_error(members, scheduler, session.trial, limit_s, _stacks(session, members), records.root_id())


def _stacks(session: Session, members: Members) -> dict[WorkerName, str]:
    """Ask ranks that answer but are not ready where they are."""
    peers = [member.peer for member, _ in members.missing() if member.peer is not None]
    ready = [peer for peer in peers if peer.state is PeerState.READY]
    return {} if session.client is None else ask(session.client, ready, "zbus.stacks", (), 0.5)
