"""Taking over a trial: is the holder really gone, what its engines were made with, and what it left on the workers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.codec import decode, encode
from zbus.codec.exceptions import rebuild_exception
from zbus.errors import NotExecuted, OutcomeUnknown, TrialError
from zbus.ids import WorkerName
from zbus.protocol.messages import Status
from zbus.registry.identity import pid_space
from zbus.registry.records import EpochRecord, JobRecord, Records
from zbus.registry.watch import lease_moves
from zbus.runtime.processes import is_alive

__all__ = ["OrphanResult", "arguments_of", "refuse_living", "with_arguments"]

_MAX_ARGUMENTS: Final = 16_384


def with_arguments(record: JobRecord, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobRecord:
    """Put the engine's arguments into the job, for a successor, where they are plain and short."""
    frames = encode((tuple(args), dict(kwargs)))
    if len(frames) > 1 or len(frames[0]) > _MAX_ARGUMENTS:
        return record
    return replace(record, arguments=base64.b64encode(frames[0]).decode())


def arguments_of(record: JobRecord) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the engine's arguments that a job carries."""
    if not record.arguments:
        return (), {}
    args, kwargs = decode([base64.b64decode(record.arguments)])
    return args, kwargs


def refuse_living(records: Records, holder: EpochRecord, clock: Clock = SYSTEM_CLOCK) -> None:
    """Refuse a takeover while the holder lives: by its process, or by its lease where its pid means nothing here.

    A lease is judged by this process's monotonic clock, so the answer may take its time to live.

    Raises:
        TrialError: It lives.
    """
    name = f"controller.{holder.epoch}"
    if records.lease(name) is None:
        return  # it left in good order and released its lease
    here = holder.pid_space == pid_space()
    alive = is_alive(holder.pid, holder.pid_start) if here else lease_moves(records, name, clock=clock)
    if alive:
        msg = f"the controller of epoch {holder.epoch} is alive (pid {holder.pid} on {holder.host})"
        raise TrialError(msg, hint="stop it first: zbus-controller stop")


class OrphanResult:
    """One request that an earlier controller left on a worker.

    Attributes:
        role, rank: The worker.
        epoch: Epoch of the controller that asked.
        methods: The endpoints called, one per call of the request; empty text where it is no longer known.
        seq, lane: Which request.
        running: Whether it still ran when it was listed.
    """

    def __init__(
        self, name: WorkerName, entry: Mapping[str, Any], adopt: Callable[[WorkerName, bytes, str, int], Any]
    ) -> None:
        self.role, self.rank = name
        self.epoch: int = entry["epoch"]
        self.methods: list[str] = list(entry["methods"])
        self.lane: str = entry["lane"]
        self.seq: int = entry["seq"]
        self.running: bool = entry["running"]
        self._session: bytes = entry["session"]
        self._name = name
        self._adopt = adopt
        self._answer: list[Any] | None = None

    def __repr__(self) -> str:
        state = "running" if self.running else "ended"
        return f"<OrphanResult {self.role}/{self.rank} {', '.join(self.methods)}: {state}, of epoch {self.epoch}>"

    def results(self) -> list[Any]:
        """Adopt the request and return each call's value; an exception stands in the list as itself.

        The worker then forgets it; this object keeps the answer.

        Raises:
            NotExecuted: It is not there: still running, adopted by another, or forgotten.
        """
        if self._answer is None:
            told = self._adopt(self._name, self._session, self.lane, self.seq)
            if told is None:
                msg = f"{self.role}/{self.rank} holds no ended request {self.seq} of epoch {self.epoch}"
                raise NotExecuted(msg, role=self.role, rank=self.rank, hint="list bus.orphans() again")
            self._answer = [self._value(method, *call) for method, call in zip(self.methods, told, strict=False)]
        return self._answer

    def result(self) -> Any:
        """Adopt a request of one call and return its value.

        Raises:
            Exception: What the call raised.
            NotExecuted: As ``results``.
        """
        answer = self.results()[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _value(self, method: str, status: int, frames: list[bytes]) -> Any:
        if status == Status.OK:
            return decode(frames) if frames else None
        if status == Status.NOT_KEPT:
            msg = f"{method} ran to its end, and its answer was too large to keep"
            return OutcomeUnknown(msg, role=self.role, rank=self.rank, method=method)
        if status in (Status.APP_ERROR, Status.STOPPED, Status.NOT_STARTED):
            error = rebuild_exception(
                decode(frames), role=self.role, rank=self.rank, host=None, pid=None, method=method, attempts=1
            )
            if status == Status.NOT_STARTED:
                error.outcome, error.reason = "NOT_EXECUTED", "refused"
            return error
        return NotExecuted(f"{method} did not run", role=self.role, rank=self.rank, method=method)
