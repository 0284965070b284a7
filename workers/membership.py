"""How an agent belongs to a trial: waits for a living controller and its job, keeps the lease, notices the end.

Everything here runs on the agent's I/O thread. A controller on this kernel is watched by its process (pid and start
time, then a pidfd in the agent's loop); one elsewhere by the counter of its lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from workers.background import Background
from workers.claims import replaced_by
from zbus.config import TrialDir
from zbus.errors import StartupError, ZbusError
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.lease import LeaseObserver, LeaseRenewer, LeaseState
from zbus.registry.records import AgentRecord, EpochRecord, JobRecord, Lease, RankClaim, Records
from zbus.runtime.processes import ProcessHandle

__all__ = ["Joined", "Joiner", "Notice", "Replaced", "controller_lease"]

log = logging.getLogger("zbus.agent")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_REPORT_S: Final = 10.0
_LOOKS_PER_TTL: Final = 4


class Joined(msgspec.Struct, frozen=True):
    """A living controller with a job for the role.

    Attributes:
        epoch: Its epoch record.
        job: What to run.
        records: The registry, for use on the I/O thread.
        controller: The controller's process, None where its lease is watched instead. Whoever takes the notice owns it.
    """

    epoch: EpochRecord
    job: JobRecord
    records: Records
    controller: ProcessHandle | None


class Replaced(msgspec.Struct, frozen=True):
    """Another agent has claimed the next start of a rank that this one runs: it was taken for dead meanwhile."""

    claim: RankClaim


Notice = Joined | Replaced | ZbusError | Literal["controller lost"]


def controller_lease(epoch: int) -> str:
    """Return the lease holder name of a controller."""
    return f"controller.{epoch}"


class Joiner:
    """Finds the controller, keeps the agent's lease, and reports by ``notify`` (called on the I/O thread).

    Args:
        trial: The trial; its directory may not exist yet.
        role: The role that needs a job.
        background: The I/O thread.
        notify: Takes news.
        wait_s: How long to look for the first controller.
        lease_ttl_s: Silence after which others call this agent dead.
        starts: Returns the ranks that run here, with the number of their start; called on the I/O thread.
        held_until: Told until when (monotonic ns) the lease is held, after each renewal; called on the I/O thread.
        hears: Tells whether the controller of an epoch is connected to this process; called on the I/O thread.
    """

    def __init__(
        self,
        trial: TrialDir,
        role: str,
        background: Background,
        notify: Callable[[Notice], None],
        *,
        wait_s: float,
        lease_ttl_s: float = 5.0,
        starts: Callable[[], Mapping[int, int]] = dict,
        held_until: Callable[[int], None] = lambda _when: None,
        hears: Callable[[int], bool] = lambda _epoch: False,
    ) -> None:
        self._trial = trial
        self._role = role
        self._wait_s = wait_s
        self._background = background
        self._notify = notify
        self._ttl_s = lease_ttl_s
        self._records: Records | None = None
        self._record: AgentRecord | None = None
        self._starts = starts
        self._hears = hears
        self._held_until = held_until
        self._renewer: LeaseRenewer | None = None
        self._lease: Lease | None = None
        self._observer = LeaseObserver()
        self._first_seen: tuple[str, int, int] | None = None  # a controller's lease: holder, counter, and when (ns)
        self._looked_at: int | None = None  # the epoch of the last look; 0 where there was none
        self._epoch = 0
        self._deadline: float | None = None
        self._reason = ""
        self._reported = 0.0
        self._pause_s = _FIRST_PAUSE_S

    # -- finding a controller ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for the first controller."""
        self._deadline = time.monotonic() + self._wait_s
        self._background.every(self._look)

    def look_for_next(self) -> None:
        """Look for a controller of a higher epoch, for as long as it takes."""
        self._deadline = None
        self._pause_s = _FIRST_PAUSE_S
        self._background.every(self._look)

    def _look(self) -> float | None:
        try:
            found = self._find()
        except ZbusError as error:
            found, self._reason = None, str(error)
        if found is not None:
            self._epoch = found.epoch.epoch
            if found.controller is None:
                self._background.every(self._watch_lease)
            self._notify(found)
            return None
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            msg = f"no controller for {self._role} of {self._trial.name} within {self._wait_s:g} s: {self._reason}"
            facts = {"looked in": str(self._trial.registry), **self._root_facts()}
            hint = "start the controller with the same trial directory, or wait longer with --wait-controller"
            self._notify(StartupError(msg, facts=facts, hint=hint))
            return None
        if now - self._reported > _REPORT_S:
            self._reported = now
            root = self._root_facts().get("registry id")
            log.info("waiting for a controller: %s%s", self._reason, f" (registry id {root})" if root else "")
        pause, self._pause_s = self._pause_s, min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
        return pause

    def _root_facts(self) -> dict[str, str]:
        """Name the registry by its id: two processes with different ids do not look at one directory."""
        try:
            return {} if self._records is None else {"registry id": self._records.root_id()}
        except ZbusError as error:
            return {"registry id": f"unreadable: {error}"}

    def _find(self) -> Joined | None:
        records = self._open()
        if records is None:
            return None
        epoch = records.current_epoch()
        before, self._looked_at = self._looked_at, 0 if epoch is None else epoch.epoch
        if epoch is None or epoch.epoch <= self._epoch:
            self._reason = "no controller has claimed this trial yet"
            return None
        claimed_now = before is not None and before < epoch.epoch
        alive, handle, evidence = self._controller_lives(records, epoch, claimed_now=claimed_now)
        if not alive:
            self._reason = f"{evidence} (epoch {epoch.epoch}, pid {epoch.pid} on {epoch.host})"
            return None
        job = records.job(self._role)
        if job is None or job.epoch != epoch.epoch:
            known = ", ".join(found.role for found in records.jobs() if found.epoch == epoch.epoch)
            self._reason = f"the controller has no job for {self._role}" + (f"; it has {known}" if known else " yet")
            if handle is not None:
                handle.close()
            return None
        return Joined(epoch, job, records, handle)

    def _open(self) -> Records | None:
        if self._records is None:
            if not Path(self._trial.registry).is_dir():
                self._reason = f"{self._trial.registry} does not exist yet"
                return None
            self._records = Records(FileRegistry(self._trial.registry, create=False))
        return self._records

    def _controller_lives(
        self, records: Records, epoch: EpochRecord, *, claimed_now: bool = False
    ) -> tuple[bool, ProcessHandle | None, str]:
        """Tell whether a controller lives, its process where that is seen from here, and else what speaks against it.

        Elsewhere, or in a container of this kernel, a counter that moves is a sign of life, and so is an epoch claimed
        since the last look; a counter that stands still for its whole time is none, and in between nothing is known.
        """
        here, gone = epoch.pid_space == pid_space(), "the last controller of this trial is gone"
        if here:
            handle = ProcessHandle.open(epoch.pid, epoch.pid_start)
            if handle is not None and not handle.ended():
                return True, handle, ""
            if handle is not None:
                handle.close()
        elif claimed_now:
            return True, None, ""
        holder = controller_lease(epoch.epoch)
        lease, now = records.lease(holder), time.monotonic_ns()
        if lease is None:
            return False, None, gone if here else f"{gone}, or has only just come: it has no lease"
        if self._first_seen is None or self._first_seen[0] != holder:
            self._first_seen = (holder, lease.counter, now)
        _, counter, since = self._first_seen
        silent_s = (now - since) / 1e9
        if lease.counter != counter:
            return True, None, ""
        if not here and silent_s < lease.ttl_s:
            return False, None, f"its controller has still to give a sign of life, within {lease.ttl_s:g} s"
        return False, None, gone if here else f"{gone}: no sign of life for {silent_s:.0f} s"

    def _watch_lease(self) -> float | None:
        """Watch the lease of a controller whose process cannot be watched from here.

        While its connection stands, a lease that does not move tells of a disk it cannot write to, not of its end (R8).
        """
        records, holder = self._records, controller_lease(self._epoch)
        if records is None:
            return None
        try:
            lease = records.lease(holder)
        except ZbusError as error:
            log.debug("the controller's lease could not be read: %s", error)
            return self._ttl_s / _LOOKS_PER_TTL
        if self._hears(self._epoch):
            self._observer.forget(holder)
        self._observer.observe({} if lease is None else {holder: lease}, time.monotonic_ns())
        if self._observer.state(holder) is LeaseState.EXPIRED:
            self._observer.forget(holder)
            self._notify("controller lost")
            return None
        return (self._ttl_s if lease is None else lease.ttl_s) / _LOOKS_PER_TTL

    # -- being found ---------------------------------------------------------------------------------------------------

    def publish(self, record: AgentRecord) -> None:
        """Publish or replace the agent's record; the first time, begin the lease.

        Raises:
            RegistryError: The registry cannot be written.
        """
        records = self._records
        if records is None:
            return
        self._record = record
        first = self._renewer is None
        if first:
            self._renewer = LeaseRenewer(self._record.agent, self._ttl_s)
            self._renew()
        records.publish_agent(self._record)
        if first:
            self._background.every(self._renew)

    def _renew(self) -> float | None:
        records, renewer = self._records, self._renewer
        if records is None or renewer is None:
            return None
        now = time.monotonic_ns()
        if renewer.due(now):
            lease = renewer.next(now)
            try:
                records.renew_lease(lease)
            except ZbusError as error:
                if renewer.failures == 0:
                    log.warning("the lease could not be renewed: %s", error)
                renewer.failed()
            else:
                self._lease = lease
                renewer.renewed()
                self._held_until(renewer.held_until_ns)
                self._look_for_successors(records, lease.holder)
        return renewer.wait_s(time.monotonic_ns())

    def _look_for_successors(self, records: Records, agent: str) -> None:
        """Tell of ranks that others have claimed while this agent was silent. A registry that fails proves nothing."""
        try:
            found = replaced_by(records, self._role, self._starts(), agent)
        except ZbusError as error:
            log.debug("claims could not be read: %s", error)
            return
        for claim in found.values():
            self._notify(Replaced(claim))

    def finish(self) -> None:
        """Take the agent's record and lease back, as the last job of the I/O thread."""

        def withdraw() -> None:
            records, self._renewer = self._records, None
            if records is None:
                return
            if self._record is not None:
                records.withdraw_agent(self._record)
            if self._lease is not None:
                records.release_lease(self._lease)

        self._background.submit(withdraw)
