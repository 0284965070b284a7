"""The agent: starts the ranks of one role on one host, sees every exit at once, writes it once, keeps the lease.

Three threads. The main thread is a poll loop that owns processes: pidfds of ranks, of the controller and of the
template, signals, and posts of the others; it never touches the registry, so a slow disk cannot delay an exit. The I/O
thread reads and writes the registry and renews the lease. The control thread answers ``ctl``.

The restart policy is the pure ``workers.supervisor``; this module carries out its effects.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from workers import spawn
from workers.arrivals import Arrivals
from workers.background import Background
from workers.claims import Claimant, claim_ranks, claim_start
from workers.control import AgentControl
from workers.exits import RankExit, make_record
from workers.loop import PollLoop
from workers.membership import Joined, Joiner, Notice, Replaced
from workers.ranks import Place, RankStarter
from workers.spec import RankSpec
from workers.supervisor import (
    Effect,
    Escalate,
    Event,
    Exited,
    Finish,
    Policy,
    RestartAsked,
    SignalRank,
    Spawned,
    SpawnFailed,
    StartRank,
    StopAsked,
    Superseded,
    Supervisor,
    Tick,
)
from workers.template import RankMain, Template
from workers.watch import Ended, ProcessTable, kill_children
from zbus import failpoints
from zbus.config import TrialDir, parse_duration
from zbus.data.presence import shared_root, sweep
from zbus.errors import ConfigError, StartupError, TransportError, ZbusError
from zbus.registry.identity import pid_space
from zbus.registry.records import AgentRecord, JobRecord, RankClaim
from zbus.runtime.gil import DumpSignal
from zbus.runtime.journal import journal_file
from zbus.runtime.leaseword import LeaseWord
from zbus.runtime.processes import (
    ProcessHandle,
    become_subreaper,
    start_time,
)
from zbus.runtime.watchdog import Watchdog

__all__ = ["Agent", "AgentConfig", "run_agent"]

log = logging.getLogger("zbus.agent")

EXIT_WORKER_LOST: Final = 4
EXIT_CONTROLLER_LOST: Final = 9
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143
_ORPHAN_GRACE_S: Final = 1.0
_TICK_S: Final = 1.0
_DRAIN_S: Final = 5.0
_WATCH_S: Final = 0.4
"""How long a rank is looked at before its stack is not taken: who asks waits for half a second."""
_LOOK_S: Final = 0.005
_NS: Final = 1_000_000_000
_SHORTAGES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the host has no more open files to give: look who holds them (lsof)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or pids.max of the cgroup)",
    errno.ENOMEM: "free memory on this host, or raise the memory limit",
}


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is told by its command line.

    Attributes:
        trial_dir: The trial directory; may not exist yet.
        role: The role it serves.
        nproc: How many ranks it runs.
        ranks: Which; None takes any that are free.
        world_size: Size of the role that the caller expects, or None; the job decides, a difference is an error.
        group_rank: Index of this agent among the agents of the role.
        wait_controller_s: How long to wait for a living controller and its job.
        grace_s: Seconds between SIGTERM and SIGKILL of ranks when the agent is told to end.
        lease_ttl_s: Silence after which others call this agent dead.
        launcher: Pid and start time of the process that started this agent and shall take it along if it ends before
            the agent has found its controller; None where nobody in particular did.
        controller_lost: ``exit`` or ``wait`` instead of what the job says.
        transport: ``ipc`` or ``tcp``.
        bind_host: Address for tcp sockets and held ports.
        use_template: Fork ranks from a template instead of executing an interpreter for each.
        propagate_exit: A lone rank's exit code becomes the agent's.
        devices: Accelerators by local rank, each as ``CUDA_VISIBLE_DEVICES`` takes it; empty leaves it as it is.
        worker_main: What ranks run; only tests set it.
        worker_command: Command of ranks that are started by exec; only tests set it.
    """

    trial_dir: Path
    role: str
    nproc: int = 1
    ranks: tuple[int, ...] | None = None
    world_size: int | None = None
    group_rank: int = 0
    wait_controller_s: float = 600.0
    grace_s: float = 10.0
    lease_ttl_s: float = 5.0
    launcher: tuple[int, int] | None = None
    controller_lost: str | None = None
    transport: str = "ipc"
    bind_host: str = "127.0.0.1"
    use_template: bool = True
    propagate_exit: bool = False
    devices: tuple[str, ...] = ()
    worker_main: RankMain | None = None
    worker_command: Sequence[str] = spawn.WORKER_COMMAND


class Agent:
    """One agent. Make it, then ``run`` it on the main thread of a process of its own.

    Args:
        config: What to do.
        template: The template of its ranks, if this process has forked one already; the agent owns it.
    """

    def __init__(self, config: AgentConfig, template: Template | None = None) -> None:
        self.config = config
        self.host = socket.gethostname()
        self.agent_id = f"{config.role}.{self.host[:24]}.{os.urandom(4).hex()}"
        self._trial = TrialDir(config.trial_dir, config.trial_dir.parent.name, config.trial_dir.name)
        self._loop = PollLoop(self._on_signal)
        self._processes = ProcessTable(self._loop, self._on_exit)
        self._background = Background(self._crashed)
        self._lease = LeaseWord.make()
        self._arrivals = Arrivals(self._background)
        self._place = Place(
            trial=self._trial,
            role=config.role,
            agent_id=self.agent_id,
            group_rank=config.group_rank,
            transport=config.transport,
            bind_host=config.bind_host,
            devices=config.devices,
            worker_command=config.worker_command,
            lease=self._lease,
            lease_ttl_s=config.lease_ttl_s,
            published_fd=self._arrivals.fileno(),
        )
        self._starter = RankStarter(
            self._place,
            template,
            on_started=self._started,
            on_failed=self._spawn_failed,
            on_no_template=self._forget_template,
        )
        self._control: AgentControl | None = None
        self._watchdog = Watchdog(look_s=_TICK_S)
        self._supervisor: Supervisor | None = None
        self._joined: Joined | None = None
        self._joiner: Joiner | None = None
        self._fresh: set[int] = set()
        self._stop_asked = False
        self._controller: ProcessHandle | None = None
        self._last_exit: int | None = None
        self._result: tuple[int, str] | None = None
        self._failure: BaseException | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Join the trial, run the ranks to their end, and return the exit code.

        Raises:
            ZbusError: The agent could not join: no controller in time, a rank held by another, a wrong world size.
        """
        if self.config.use_template and self._starter.template is None:
            # First of all: a fork is only clean while there is one thread and no socket.
            self._starter.template = Template.fork(self.config.worker_main)
        become_subreaper()
        with self._loop.signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)):
            if self._starter.template is not None:
                self._loop.watch(self._starter.template.fileno(), self._starter.on_template_readable)
            self._loop.watch(self._arrivals, self._arrivals.on_bell)
            try:
                self._watch_launcher()
                self._background.start()
                self._joiner = Joiner(
                    self._trial,
                    self.config.role,
                    self._background,
                    self._on_notice,
                    wait_s=self.config.wait_controller_s,
                    lease_ttl_s=self.config.lease_ttl_s,
                    starts=lambda: self._place.starts.copy(),  # the dict is replaced later  # noqa: PLW0108
                    held_until=self._lease.hold_until,
                    hears=lambda epoch: self._control is not None and self._control.hears(epoch),
                )
                self._joiner.start()
                self._serve()
            finally:
                self._clean_up()
        if self._failure is not None:
            raise self._failure
        code, reason = self._result or (EXIT_TERMINATED, "")
        log.info("agent ends with code %d: %s", code, reason or "done")
        return code

    def _going_on(self) -> bool:
        return self._result is None and self._failure is None

    def _serve(self) -> None:
        next_refresh = time.monotonic() + _TICK_S
        while self._going_on():
            self._loop.once(self._timeout_s(next_refresh), self._going_on)
            now = time.monotonic()
            if now >= next_refresh:
                next_refresh = now + _TICK_S
                self._processes.refresh()
                self._watchdog.look()
            if self._supervisor is not None:
                due = self._supervisor.next_deadline_ns()
                if due is not None and due <= time.monotonic_ns():
                    self._feed(Tick())

    def _timeout_s(self, next_refresh: float) -> float:
        timeout = next_refresh - time.monotonic()
        due = None if self._supervisor is None else self._supervisor.next_deadline_ns()
        if due is not None:
            timeout = min(timeout, (due - time.monotonic_ns()) / _NS)
        return max(0.0, timeout)

    # -- other threads and signals -------------------------------------------------------------------------------------

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the poll loop. May be called from any thread."""
        self._loop.post(job)

    def _crashed(self, error: BaseException) -> None:
        def fail() -> None:
            self._failure = error

        self.post(fail)

    def _on_signal(self, signum: int) -> None:
        if signum != signal.SIGCHLD:
            self._on_end_signal(signum)
        elif not self._starter.starting:  # else a child may be a rank that the template has not told yet
            template = self._starter.template
            self._processes.reap_strays([] if template is None else [template.handle.pid])

    def _on_end_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        code = EXIT_INTERRUPTED if signum == signal.SIGINT else EXIT_TERMINATED
        if self._supervisor is None:
            self._result = (code, f"{name} before any rank was started")
            return
        again = self._stop_asked
        self._stop_asked = True
        log.info("%s: stopping %d ranks%s", name, len(self._processes), " at once" if again else "")
        self._feed(StopAsked(0.0 if again else self.config.grace_s, code, name))

    def stop(self, grace_s: float, reason: str, exit_code: int = 0) -> None:
        """Stop all ranks, then end. May be called from any thread."""

        def begin() -> None:
            self._stop_asked = True
            if self._supervisor is None:
                self._result = (exit_code, reason)
            else:
                self._feed(StopAsked(grace_s, exit_code, reason))

        self.post(begin)

    def restart(self, rank: int) -> None:
        """Replace the process of ``rank`` by a fresh one. May be called from any thread.

        Raises:
            ValueError: No such rank here.
        """
        if rank not in tuple(self._place.starts):
            msg = f"{self.config.role}/{rank} is not a rank of this agent"
            raise ValueError(msg)
        self.post(lambda: self._feed(RestartAsked(rank)))

    def dump_stacks(self, rank: int) -> str:
        """Have ``rank`` write the stack of its main thread, held by native code; return the file's path.

        For a rank that was asked over its own ``ctl`` and has not answered: the signal is sent only if native code is
        seen to hold its GIL, since it has killed ranks that ran Python code. May be called from any thread; blocks for
        up to 0.4 s. Empty where the rank does not run, is not armed, or is not seen to be held.
        """
        pid, started, start = self._processes.pid(rank), self._processes.started(rank), self._place.starts.get(rank)
        if pid is None or start is None or (dump := DumpSignal.open(pid, started)) is None:
            return ""
        try:
            until = time.monotonic() + _WATCH_S
            while not dump.send():
                if time.monotonic() > until:
                    return ""
                time.sleep(_LOOK_S)
        finally:
            dump.close()
        return str(self._trial.stack_file(self.config.role, rank, start))

    def status(self) -> dict[str, Any]:
        """Return what ``zbus.status`` answers. May be called from any thread: it reads, it does not wait."""
        supervisor = self._supervisor
        ranks = [
            {
                "rank": rank,
                "state": "idle" if supervisor is None else supervisor.state(rank),
                "start": start,
                "pid": self._processes.pid(rank),
            }
            for rank, start in sorted(self._place.starts.copy().items())
        ]
        return {
            "agent": self.agent_id,
            "role": self.config.role,
            "host": self.host,
            "pid": os.getpid(),
            "ranks": ranks,
            "refused": {} if self._control is None else self._control.statistics(),
            "slow_handlers": self._watchdog.facts(),
        }

    # -- joining -------------------------------------------------------------------------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        """Take news of the controller; called on the I/O thread."""
        self.post(lambda: self._take_notice(notice))

    def _take_notice(self, notice: Notice) -> None:
        match notice:
            case Joined():
                self._on_joined(notice)
            case Replaced(claim):
                self._on_replaced(claim)
            case "controller lost":
                self._on_controller_lost("its lease ran out")
            case ZbusError() as error:
                self._failure = error

    def _on_joined(self, joined: Joined) -> None:
        first = self._joined is None
        self._joined = joined
        self._place.epoch = joined.epoch
        self._watch_controller(joined.controller)
        if not first:
            log.info("controller of epoch %d found", joined.epoch.epoch)
            self._background.submit(self._publish)
            return
        self._place.job = job = joined.job
        self._check_world(job)
        self._starter.prepare()
        self._background.submit(lambda: self._claim_all(joined, job))

    def _check_world(self, job: JobRecord) -> None:
        config = self.config
        if config.world_size is not None and config.world_size != job.world_size:
            msg = f"{config.role} has {job.world_size} ranks, but this worker was told {config.world_size}"
            raise ConfigError(msg, hint=f"start it with --world-size {job.world_size}, or without")
        outside = [rank for rank in config.ranks or () if rank >= job.world_size]
        if outside or config.nproc > job.world_size:
            wanted = ", ".join(map(str, outside)) if outside else f"{config.nproc} ranks"
            msg = (
                f"{config.role} has {job.world_size} ranks (0 to {job.world_size - 1}), but this worker wants {wanted}"
            )
            raise ConfigError(msg, hint="check --rank, --nproc and the role's replicas")

    def _claim_all(self, joined: Joined, job: JobRecord) -> None:
        """Publish this agent, then claim its ranks; on the I/O thread."""
        config = self.config
        methods: dict[str, Callable[..., Any]] = {
            "ping": lambda: {"t": time.monotonic_ns(), "pid": os.getpid()},
            "status": self.status,
            "stop": self._asked_to_stop,
            "restart": self.restart,
            "dump_stacks": self.dump_stacks,
        }
        try:
            self._control = AgentControl(
                self.agent_id,
                joined.epoch,
                joined.records,
                transport=config.transport,
                bind_host=config.bind_host,
                methods=methods,
                on_fatal=self._crashed,
            )
            self._watchdog.watch(self._control.handlers)
            self._publish()
            claims = claim_ranks(
                joined.records, self._me(), ranks=config.ranks, world_size=job.world_size, count=config.nproc
            )
            self._publish(sorted(claims))
        except ZbusError as error:
            self._crashed(error)
            return
        self.post(lambda: self._on_claimed(claims))

    def _asked_to_stop(self, grace_s: float | None = None) -> None:
        # Checked here, where the caller hears of it, not on the poll loop.
        grace = self.config.grace_s if grace_s is None else parse_duration(grace_s, "grace_s")
        self.stop(grace, "asked over ctl")

    def _me(self) -> Claimant:
        return Claimant(self.agent_id, self.config.role, self.host, os.getpid())

    def _publish(self, ranks: Sequence[int] | None = None) -> None:
        """Write the agent's record and hint that it is there; on the I/O thread."""
        assert self._joined is not None  # noqa: S101  # called after joining
        assert self._joiner is not None  # noqa: S101  # made before any notice
        record = AgentRecord(
            agent=self.agent_id,
            role=self.config.role,
            host=self.host,
            pid_space=pid_space(),
            pid=os.getpid(),
            pid_start=start_time(os.getpid()) or 0,
            ctl=[] if self._control is None else self._control.ctl,
            public_key="" if self._control is None else self._control.public_key,
            ranks=sorted(self._place.starts) if ranks is None else list(ranks),
            epoch=self._joined.epoch.epoch,
        )
        self._joiner.publish(record)
        if self._control is not None:
            self._control.published(record)

    def _on_claimed(self, claims: dict[int, int]) -> None:
        job = self._place.job
        assert job is not None  # noqa: S101  # claims come after the job
        self._place.starts = claims
        try:
            self._starter.hold_ports()
        except OSError as error:
            msg = f"no port can be bound on {self.config.bind_host}: {error.strerror}"
            self._failure = TransportError(msg, hint="give an address of this host with --bind")
            return
        policy = Policy(restart=cast("Any", job.restart), max_restarts=job.max_restarts, window_s=job.restart_window_s)
        log.info("runs ranks %s of %s", ", ".join(map(str, sorted(claims))), self.config.role)
        self._fresh = set(claims)
        self._supervisor = Supervisor(claims, policy)
        self._carry_out(self._supervisor.begin())

    # -- controller ----------------------------------------------------------------------------------------------------

    def _watch_controller(self, handle: ProcessHandle | None) -> None:
        self._unwatch_controller()
        self._controller = handle
        if handle is not None:
            self._loop.watch(handle, lambda: self._on_controller_lost("its process ended"))

    def _watch_launcher(self) -> None:
        if self.config.launcher is not None:
            handle = ProcessHandle.open(*self.config.launcher)
            if handle is None:
                self._result = (EXIT_CONTROLLER_LOST, "its launcher is gone")
            self._watch_controller(handle)

    def _on_replaced(self, claim: RankClaim) -> None:
        if self._supervisor is None or self._place.starts.get(claim.rank, -1) >= claim.start:
            return
        name = f"{claim.role}/{claim.rank}"
        by = f"start {claim.start} by agent {claim.agent}, host {claim.host}, pid {claim.pid}"
        if self._supervisor.state(claim.rank) in ("starting", "running"):
            log.error("%s was replaced while this agent was taken for dead: %s; it ends here", name, by)
        self._feed(Superseded(claim.rank, f"{name} was replaced: {by}"))

    def _unwatch_controller(self) -> None:
        if self._controller is not None:
            self._loop.unwatch(self._controller)
            self._controller.close()
            self._controller = None

    def _on_controller_lost(self, how: str) -> None:
        self._unwatch_controller()
        if self._joined is None:
            self._result = (EXIT_CONTROLLER_LOST, f"its launcher is gone: {how}")
            return
        orphans = self.config.controller_lost or ("exit" if self._place.job is None else self._place.job.orphans)
        if orphans == "wait":
            log.warning("the controller is gone (%s); waiting for the next one", how)
            if self._joiner is not None:
                self._joiner.look_for_next()
            return
        log.warning("the controller is gone (%s); stopping the ranks", how)
        if self._supervisor is None:
            self._result = (EXIT_CONTROLLER_LOST, f"controller lost: {how}")
            return
        self._feed(
            StopAsked(min(_ORPHAN_GRACE_S, self.config.grace_s), EXIT_CONTROLLER_LOST, f"controller lost: {how}")
        )

    # -- effects -------------------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if self._supervisor is not None:
            self._carry_out(self._supervisor.on_event(time.monotonic_ns(), event))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartRank(rank):
                    self._begin_start(rank)
                case SignalRank(rank, signum):
                    self._processes.signal(rank, signum)
                case Escalate(cause):
                    log.error("giving up: %s", cause)
                case Finish(code, reason):
                    if (
                        self.config.propagate_exit
                        and len(self._place.starts) == 1
                        and code == EXIT_WORKER_LOST
                        and self._last_exit
                    ):
                        code = self._last_exit
                    self._result = (code, reason)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _begin_start(self, rank: int) -> None:
        if rank in self._fresh:  # claimed when the agent joined
            self._fresh.discard(rank)
            self._starter.start(rank)
            return
        joined = self._joined
        assert joined is not None  # noqa: S101  # ranks start after joining

        def claim() -> None:
            try:
                start = claim_start(joined.records, self._me(), rank, after=self._place.starts.get(rank))
            except ZbusError as error:
                reason = str(error)
                self.post(lambda: self._feed(SpawnFailed(rank, reason)))
                return

            def go() -> None:
                self._place.starts[rank] = start
                self._starter.start(rank)

            self.post(go)

        self._background.submit(claim)

    def _forget_template(self, template: Template) -> None:
        self._loop.unwatch(template.fileno())

    def _spawn_failed(self, rank: int, reason: str) -> None:
        log.error("%s/%d could not be started: %s", self.config.role, rank, reason)
        self._feed(SpawnFailed(rank, reason))

    def _started(self, spec: RankSpec, pid: int) -> None:
        if not self._processes.add(spec, pid):
            self._spawn_failed(spec.rank, "its process vanished")
            return
        log.info("%s/%d runs: pid %d, start %d", spec.role, spec.rank, pid, spec.start)
        joined = self._joined
        assert joined is not None  # noqa: S101  # ranks start after joining
        self._arrivals.expect(spec, joined.records, lambda: self._processes.pid(spec.rank) == pid, self._arrived)
        self._feed(Spawned(spec.rank))

    def _arrived(self, spec: RankSpec) -> None:
        """Hint at a rank's record, so that nobody need wait for the next look at everything; on the I/O thread."""
        if self._control is not None:
            self._control.started(spec.role, spec.rank, spec.incarnation)

    # -- exits ---------------------------------------------------------------------------------------------------------

    def _on_exit(self, end: Ended) -> None:
        assert self._supervisor is not None  # noqa: S101  # it started the rank
        spec = end.spec
        ended = RankExit(
            role=spec.role,
            rank=spec.rank,
            start=spec.start,
            incarnation=spec.incarnation,
            agent=self.agent_id,
            host=self.host,
            pid=end.pid,
            exit_code=end.exit_code,
            signum=end.signum,
            oom=end.oom,
            asked=self._supervisor.asked(spec.rank),
            started_wall_ns=end.started_wall_ns,
            ended_wall_ns=time.time_ns(),
            log=Path(spec.log),
        )
        self._last_exit = end.exit_code if end.exit_code is not None else 128 + (end.signum or 0)
        log.log(logging.INFO if ended.in_order else logging.ERROR, "%s/%d %s", ended.role, ended.rank, ended.cause())
        self._background.submit(lambda: self._write_exit(ended))
        self._feed(Exited(spec.rank, end.exit_code, ended.cause()))

    def _write_exit(self, ended: RankExit) -> None:
        """Write the exit once, then announce it; on the I/O thread."""
        assert self._joined is not None  # noqa: S101  # ranks run after joining
        record = make_record(self._trial, ended)
        self._joined.records.publish_exit(record)
        if self._control is not None:
            self._control.exited(record)
        if ended.in_order:  # nobody will ask how it died, and the record has what the journal told
            with contextlib.suppress(OSError):
                journal_file(self._trial.path, ended.role, ended.rank, ended.start).unlink()

    # -- end -----------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Leave nothing behind: processes, sockets, the registry entry. Bounded."""
        self._starter.close()
        kill_children()
        sweep(shared_root())  # what killed ranks lent, and a killed controller
        self._processes.close()
        self._unwatch_controller()
        if self._joiner is not None:
            self._joiner.finish()
        if not self._background.stop(_DRAIN_S):
            log.error("the registry did not answer for %g s: exit records may be missing", _DRAIN_S)
        else:
            self._lease.close()
        if self._control is not None:
            self._control.close()
        self._arrivals.close()


def run_agent(config: AgentConfig, template: Template | None = None) -> int:
    """Run an agent in this process, on its main thread, and return the exit code.

    Args:
        config: What to do.
        template: As for ``Agent``; ended where the ranks shall not be forked from it.

    Raises:
        ZbusError: The agent could not join the trial, or this process lacks descriptors, processes or memory.
    """
    failpoints.configure(os.environ.get(failpoints.VARIABLE))
    if template is not None and (not config.use_template or config.worker_main is not None):
        template.close()
        template = None
    try:
        return Agent(config, template).run()
    except OSError as error:
        if error.errno not in _SHORTAGES:
            raise
        msg = f"the agent of {config.role} could not go on: {error.strerror}"
        raise StartupError(msg, hint=_SHORTAGES[error.errno]) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python has no class and no number for it
            raise
        msg = f"the agent of {config.role} could not go on: no thread can be started"
        raise StartupError(msg, hint=_SHORTAGES[errno.EAGAIN]) from error
