"""The driver's handle on a trial: launch or attach, call groups, close; nothing is left behind."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from controller.asking import ask
from controller.group import Group
from controller.launching import attach, launch, launch_inline, take_over
from controller.plan import LaunchPlan
from controller.refs import RefBook, Scope
from controller.restarting import ask_restart
from controller.role import Role
from controller.session import ACK_S, Session
from controller.takeover import OrphanResult
from zbus.codec import Ref
from zbus.config import Config, TrialDir
from zbus.errors import ConfigError, StartupError
from zbus.ids import WorkerName
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records
from zbus.trace import control

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Controller", "Role"]

log = logging.getLogger("zbus.controller")

_GUEST_S: Final = 5.0


class Controller:
    """A running trial. Use it as a context manager; ``close`` may be called again.

    Attributes:
        trial: Paths of the trial directory.
    """

    def __init__(self, session: Session) -> None:
        self.trial = session.trial
        self._session = session
        self._groups: dict[str, Group] = {}
        self._closed = False
        self._close_lock = threading.Lock()
        self._began = time.monotonic()

    @property
    def epoch(self) -> int:
        """This controller's fencing number, 0 for a guest."""
        return self._session.epoch

    # -- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def launch(
        cls,
        experiment: str | None = None,
        roles: Mapping[str, Role] | None = None,
        *,
        trial: str | None = None,
        root: str | os.PathLike[str] | None = None,
        scheduler: str | None = None,
        startup_timeout: float | None = None,
        resume: bool = False,
        overwrite: bool = False,
        config: Config | None = None,
    ) -> Controller:
        """Start a trial and return when every rank of every role is ready.

        What ``zbus-controller run`` was told (trial, scheduler, ``roles.actor.replicas=8``, …) wins over these
        arguments, so a script need not parse anything.

        Args:
            experiment: Name of the experiment; the config's, or ``default``.
            roles: Roles by name; the config's where not given.
            trial: Name of the trial; a new one where not given.
            root: Directory of all experiments; ``zbus-runs`` where not given.
            scheduler: ``local`` (processes on this host), ``inline`` (this process and thread, for pdb) or
                ``external`` (agents started by hand).
            startup_timeout: Seconds until all ranks must be ready.
            resume: Go on in an existing trial.
            overwrite: Replace an existing trial.
            config: A whole config; the other arguments win over it.

        Raises:
            ConfigError: The arguments cannot work.
            TrialError: The trial exists or is in use.
            StartupError: Ranks are missing at the deadline; each is named with its phase.
            WorkerLost: A rank died while starting.
            RemoteError: An engine's constructor or ``setup`` raised.
        """
        plan = LaunchPlan.of(experiment, roles, trial, root, scheduler, startup_timeout, resume, overwrite, config)
        self = cls(Session(plan.trial))
        try:
            if plan.scheduler == "inline":
                launch_inline(self._session, plan)
            else:
                launch(self._session, plan)
        except BaseException:
            self.close()
            raise
        if plan.run is not None:
            plan.run.launched.append(self)
        return self

    @classmethod
    def attach(cls, trial: TrialDir | str | os.PathLike[str], *, timeout: float = _GUEST_S) -> Controller:
        """Join a running trial as a guest: a session of its own, ``ctl`` and ``pure`` calls only.

        Closing a guest leaves the trial as it is.

        Args:
            trial: The trial directory.
            timeout: Seconds to reach the workers.

        Raises:
            TrialError: Not a trial directory, or no controller has run in it.
            StartupError: Workers cannot be reached.
        """
        opened = trial if isinstance(trial, TrialDir) else TrialDir.open(trial)
        self = cls(Session(opened))
        try:
            attach(self._session, timeout)
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def takeover(
        cls, trial: TrialDir | str | os.PathLike[str], *, config: Config | None = None, timeout: float = 30.0
    ) -> Controller:
        """Claim the next epoch of a trial whose controller is gone, and adopt its running workers.

        Workers outlive their controller where their role says ``orphans="wait"``. From the moment a worker accepts the
        new epoch, nothing of the old session starts there any more: what was queued is cancelled, what runs may end,
        and its result waits in ``orphans()``.

        Args:
            trial: The trial directory.
            config: Timeouts and tracing; defaults where not given.
            timeout: Seconds to reach every rank.

        Raises:
            TrialError: Its controller is alive, or no controller has run in it.
            StartupError: Ranks cannot be reached.
        """
        opened = trial if isinstance(trial, TrialDir) else TrialDir.open(trial)
        opened.lock()
        self = cls(Session(opened))
        try:
            take_over(self._session, config or Config(), timeout)
        except BaseException:
            self.close()
            raise
        return self

    def orphans(self) -> list[OrphanResult]:
        """Return what earlier controllers of this trial left on the workers: calls that ran, or still run.

        An ended one can be adopted once, by ``result()``.
        """
        found: list[OrphanResult] = []
        for role in self.roles:
            for name, listed in self._session.ask(role, "zbus.orphans").items():
                found += [OrphanResult(name, entry, self._adopt) for entry in listed]
        return found

    # -- using it ------------------------------------------------------------------------------------------------

    def group(self, role: str) -> Group:
        """Return the group of a role: all its ranks, with its endpoints as methods.

        Raises:
            ConfigError: No such role.
        """
        found = self._groups.get(role)
        if found is None:
            roster = self._session.rosters.get(role)
            if roster is None:
                known = ", ".join(self._session.rosters) or "none"
                msg = f"trial {self.trial.name} has no role {role!r}"
                raise ConfigError(msg, hint=f"its roles are: {known}")
            found = self._groups[role] = Group(
                roster, self._session.placer, deadline_s=self._session.deadline_s, refs=self._session.refs
            )
        return found

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles."""
        return tuple(self._session.rosters)

    def empty(self, shape: Sequence[int] | int, dtype: Any = "float32") -> np.ndarray[Any, Any]:
        """Return an uninitialised array in shared memory: sent from there without a copy.

        Fill it, send it, and take a new one for the next call: the memory of this one is used again when you and all
        its readers have let go of it. Do not change it once it is sent; ranks of this host read it in place. Below
        64 KiB, or where there is no shared memory (or no room left), it is an ordinary array. Any thread.

        Args:
            shape: Sizes of the dimensions.
            dtype: numpy dtype, not of objects.
        """
        import numpy as np

        carrier = None if self._session.client is None else self._session.client.carrier
        if carrier is None:
            return np.empty(shape, dtype)
        made: np.ndarray[Any, Any] = carrier.empty(shape, dtype)
        return made

    def put(self, value: Any) -> Ref:
        """Keep a value in this process and return its handle; ranks that are given it get it from here.

        Arrays are copied once, into shared memory where there is some (those of ``empty`` are not copied), so that
        any number of calls with the handle copy them no more. It is kept as long as a handle of it lives, at most to
        the end of the ``scope`` around. Any thread.

        Args:
            value: What a call could take as an argument.

        Raises:
            CodecError: It cannot be carried.
            RefLimitError: This process keeps as much as it may (``data.refs``), or the scope does.
        """
        return self._book().put(value)

    def get(self, value: Any, timeout: float | None = None) -> Any:
        """Return the value of a ``Ref``, or a list, tuple or dict with values in place of its Refs. Blocks.

        Arrays of this host are mapped and read-only.

        Args:
            value: The handle, or what holds some.
            timeout: Seconds to reach the owners.

        Raises:
            RefLostError: An owner is gone or does not answer, or a value was released.
        """
        return self._book().get(value, timeout)

    def scope(self, limit: int | None = None) -> AbstractContextManager[Scope]:
        """Own what is kept in a ``with`` block, by ``put`` and by calls that leave their results with the ranks.

        At its end all of it is let go, however many handles live; calls under way still get their arguments. What was
        made before the block, and is only read in it, stays. Scopes nest, and belong to the thread or task that entered
        them.

        Args:
            limit: Most bytes it may hold; beyond, ``RefLimitError`` is raised where the next value comes.
        """
        return self._book().scope(limit)

    def _book(self) -> RefBook:
        if self._session.refs is None:
            msg = f"{self.trial.name} is not running"
            raise ConfigError(msg)
        return self._session.refs

    def config_perf_tracer(self, config: Mapping[str, Any] | None, role: str | None = None) -> None:
        """Switch tracing of a role's workers (all roles by default) and of this process.

        None switches it off; no call is made to ranks that do not trace, which are all where it is off from the start.
        """
        control.config_perf_tracer(config, "controller", self._session.trace_rank)
        traced = self._session.traced
        for name in self.roles if role is None else (role,):
            if traced is not None and config is None and name not in traced:
                continue
            if traced is not None:
                traced.add(name)
            if self._session.client is not None:
                self._session.ask(name, "zbus.config_perf_tracer", config, name)
            elif any(tracer.role == name for tracer in control.tracers()):  # ranks in this process
                control.config_perf_tracer(config, name)

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # founding spelling  # noqa: FBT001, FBT002
        """Have every process write its trace now, if ``step`` is due. No call is made where nothing is traced."""
        tracer = self._session.tracer
        if not force and (tracer is None or not (tracer.rpc or tracer.sessions is not None)):
            return
        control.save_perf_tracer(step, force)
        for name in self.roles:
            self._session.ask(name, "zbus.save_perf_tracer", step, force)

    def statuses(self, timeout: float = 2.0) -> dict[WorkerName, dict[str, Any]]:
        """Return ``zbus.status`` of every rank that answers; asked on ``ctl``, so busy ranks answer too."""
        found: dict[WorkerName, dict[str, Any]] = {}
        for role in self.roles:
            found.update(self._session.ask(role, "zbus.status", timeout=timeout))
        return found

    def restart(self, role: str, timeout: float | None = None) -> None:
        """Give every rank of a role a fresh process and engine, and return when all are ready again.

        For a group that is stuck: ranks that sit in a collective whose peer has failed are ended, by force after their
        grace, and nothing waits for the collective's own timeout. Calls that are out end with what is known of them;
        engines are told by ``recover``.

        Args:
            role: Which.
            timeout: Seconds until all ranks must be ready; the launch's limit where not given.

        Raises:
            ConfigError: No such role, or one without agents (inline).
            StartupError: No agent of the role answers, or ranks are missing at the deadline.
        """
        members, client = self._session.members, self._session.client
        self.group(role)
        if members is None or client is None:
            msg = f"the ranks of {role} have no processes of their own to restart"
            raise ConfigError(msg, hint="restart needs scheduler local or external, and not a guest")
        limit = self._session.startup_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        before = {one.name.rank: one.record.start for one in members.roles[role].members if one.record is not None}
        records = Records(FileRegistry(self.trial.registry, create=False))
        try:
            agreed = ask_restart(client, records, members.roles[role].job)
        finally:
            records.close()
        if not agreed:
            msg = f"no agent of {role} answers, so its ranks cannot be restarted"
            raise StartupError(msg, hint="zbus-controller status shows what runs")

        def done() -> bool:
            return members.first_error() is not None or all(
                one.phase == "ready" and one.record is not None and one.record.start > before.get(one.name.rank, -1)
                for one in members.roles[role].members
            )

        if not members.wait(done, max(0.0, deadline - time.monotonic())):
            late = ", ".join(f"{one.name}: {one.phase}" for one in members.roles[role].members if one.phase != "ready")
            msg = f"{role} was not ready again within {limit:g} s"
            raise StartupError(msg, facts={"late": late or "ranks of the start before are still there"})
        if (error := members.first_error()) is not None:
            raise error

    def report(self) -> dict[str, Any]:
        """Return figures of this session: wall seconds, roles, calls, retransmissions, probes, shared memory."""
        stats = {} if self._session.client is None else self._session.client.statistics()
        carrier = None if self._session.client is None else self._session.client.carrier
        memory = carrier.statistics() if carrier is not None else {}
        facts = {} if self._session.refs is None else self._session.refs.desk.statistics()
        kept: dict[str, Any] = {name: facts[name] for name in ("refs", "refs_bytes") if name in facts}
        return {
            "wall_s": round(time.monotonic() - self._began, 3),
            "roles": {name: len(roster.peers()) for name, roster in self._session.rosters.items()},
            **stats,
            **memory,
            **kept,
        }

    def close(self) -> None:
        """Stop all workers in order and free everything. A guest only leaves. Any thread; idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._session.closers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "guest" if not self.epoch else f"epoch {self.epoch}"
        return f"<Controller {self.trial.name}: {state}, roles {', '.join(self._session.rosters) or 'none'}>"

    # -- inside --------------------------------------------------------------------------------------------------

    def _adopt(self, name: WorkerName, session: bytes, lane: str, seq: int) -> Any:
        client = self._session.client
        if client is None:
            return None
        peer = self._session.rosters[name.role].peers()[name.rank]
        return ask(client, [peer], "zbus.adopt", (session, lane, seq), ACK_S).get(name)
