"""Every exception zbus raises, as one tree with stable codes.

Each class carries a ``code`` (ZB01 config, ZB02 discovery and start-up, ZB03 worker, ZB04 call, ZB05 transport and
registry, ZB06 version and authority, ZB08 trial), the ``exit_code`` a command ends with, facts as attributes, and an
optional ``hint``: one command or change the reader can make. Text is made in ``__str__``; fields are the truth.
All are ``Exception`` (never ``KeyboardInterrupt``) and survive ``copy`` and ``pickle``.

::

    ZbusError
    ├── ConfigError            ZB0101  exit 2   bad option, key, value or name
    ├── StartupError           ZB0201  exit 3   a start deadline passed; names each missing rank and its phase
    │   ├── EngineLoadError    ZB0202  exit 2   an engine class cannot be imported or is not an Engine
    │   └── RankClaimed        ZB0203  exit 2   two workers claim one rank
    ├── TrialError             ZB0801  exit 8   trial not found, ambiguous, or in use
    ├── RecoverError           ZB0802  exit 8   the dump a trial shall go on from is missing or broken
    ├── RegistryError          ZB0501  exit 5   the registry cannot be read or written
    ├── TransportError         ZB0502  exit 5   a socket cannot be made, bound or connected
    ├── ProtocolMismatch       ZB0601  exit 6   peers speak different protocol versions
    ├── Fenced                 ZB0602  exit 11  a newer epoch or incarnation holds this place
    ├── RefLostError           ZB0408  exit 4   the value behind a Ref is gone: its owner ended, or it was released
    ├── RefLimitError          ZB0409  exit 1   a process keeps as many bytes for Refs as it may
    ├── RolloutError           ZB0410  exit 1   a rollout made nothing to use
    ├── WeightsError           ZB0411  exit 4   new weights did not get to the ranks that generate
    ├── RewardError            ZB0302  exit 4   a reward function hung, or its process died
    ├── CodecError             ZB0405  exit 1   a value cannot be carried exactly, or bytes are not a valid value
    └── CallError                               base of everything a call can end in but success
        ├── RemoteError        ZB0401  exit 1   the engine raised; also an instance of the original builtin class
        ├── CallTimeout        ZB0402  exit 3   the deadline passed
        ├── NotExecuted        ZB0403  exit 4   proved: the method did not start
        ├── OutcomeUnknown     ZB0404  exit 4   the method may have run; evidence attached
        │   └── WorkerLost     ZB0301  exit 4   the worker died or its lease ran out while it held the call
        ├── CallCancelled      ZB0406  exit 1   cancelled before start
        └── Unavailable        ZB0407  exit 4   not every member was ready; nothing was sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

__all__ = [
    "BatchError",
    "CallCancelled",
    "CallError",
    "CallStopped",
    "CallTimeout",
    "CodecError",
    "ConfigError",
    "EngineLoadError",
    "Fenced",
    "NotExecuted",
    "OutcomeUnknown",
    "ProtocolMismatch",
    "RankClaimed",
    "RecoverError",
    "RefLimitError",
    "RefLostError",
    "RegistryError",
    "RemoteError",
    "RewardError",
    "RolloutError",
    "StartupError",
    "TransportError",
    "TrialError",
    "Unavailable",
    "WeightsError",
    "WorkerLost",
    "ZbusError",
]


class ZbusError(Exception):
    """Base of all zbus errors.

    Args:
        message: One plain sentence that names the user's thing (role, rank, method, key, file).
        hint: One change or pasteable command, or None.
        facts: Aligned facts for the error block, in display order.
    """

    code: ClassVar[str] = "ZB0000"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts: dict[str, str] = dict(facts or {})

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild an error without calling its ``__init__`` (fields are the truth); used by copy and pickle."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ZbusError):
    """A bad option, key, value or name; ``facts['from']`` says where it came from."""

    code = "ZB0101"
    exit_code = 2


class StartupError(ZbusError):
    """A start deadline passed or a start step failed; the facts name each culprit and its phase."""

    code = "ZB0201"
    exit_code = 3


class EngineLoadError(StartupError):
    """An engine class cannot be imported, is missing, or is not a ``zbus.Engine``."""

    code = "ZB0202"
    exit_code = 2


class RankClaimed(StartupError):
    """Two workers claim one rank; both are named."""

    code = "ZB0203"
    exit_code = 2


class TrialError(ZbusError):
    """A trial is not found, ambiguous, or in use by a live controller."""

    code = "ZB0801"
    exit_code = 8


class RecoverError(ZbusError):
    """The dump that a trial shall go on from is missing, broken or of another run, or a new one cannot be written."""

    code = "ZB0802"
    exit_code = 8


class RegistryError(ZbusError):
    """The registry cannot be read or written; the cause names the file."""

    code = "ZB0501"
    exit_code = 5


class TransportError(ZbusError):
    """A socket cannot be made, bound or connected."""

    code = "ZB0502"
    exit_code = 5


class ProtocolMismatch(ZbusError):
    """Two peers speak different protocol versions; both versions are named."""

    code = "ZB0601"
    exit_code = 6


class Fenced(ZbusError):
    """A newer epoch or incarnation holds this place; this process must stop acting."""

    code = "ZB0602"
    exit_code = 11


class CodecError(ZbusError):
    """A value cannot be carried exactly, or received bytes are not a valid value; ``path`` says where."""

    code = "ZB0405"

    def __init__(self, message: str, *, path: str = "$", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path

    def __str__(self) -> str:
        return f"{self.message} - at `{self.path}`"


class RefLostError(ZbusError):
    """The value behind a ``Ref`` cannot be had any more: its owner has ended, or it was released.

    Where a call got such a Ref as an argument, its method did not start, and ``outcome`` is ``NOT_EXECUTED``.

    Attributes:
        owner_role, owner_rank: Who kept the value.
        made_by: The endpoint that made it, ``bus.put`` or ``ctx.put``.
        nbytes: Its size.
        started: False where it was to be an argument, and the method did not start.
    """

    code = "ZB0408"
    exit_code = 4
    started: bool = True

    def __init__(
        self,
        message: str,
        *,
        owner_role: str = "",
        owner_rank: int = 0,
        made_by: str = "",
        nbytes: int = 0,
        hint: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, facts=facts)
        self.owner_role = owner_role
        self.owner_rank = owner_rank
        self.made_by = made_by
        self.nbytes = nbytes


class RefLimitError(ZbusError):
    """A process keeps as many bytes for Refs as it may; the facts name who holds how much of them.

    Attributes:
        started: False where the method did not start, since nothing more could be kept.
    """

    code = "ZB0409"
    started: bool = True


class RolloutError(ZbusError):
    """A rollout made nothing to use; its own error, if it has one, is the cause.

    Attributes:
        rollout: Which: a ``controller.rollout.Rollout``.
        finished: Of a batch: all that had finished by then, in order of submission.
    """

    code = "ZB0410"

    rollout: Any = None
    finished: Sequence[Any] = ()


class WeightsError(ZbusError):
    """An update of weights failed as a whole; generation goes on where the weights are known.

    Attributes:
        phase: ``pause``, ``publish``, ``join``, ``transfer`` or ``version``.
        version: The version that counts, None where none was transferred yet.
        missing: By rank, why it did not take part.
    """

    code = "ZB0411"
    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        phase: str,
        version: int | None = None,
        missing: Mapping[int, str] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.phase = phase
        self.version = version
        self.missing = dict(missing or {})


class RewardError(ZbusError):
    """A reward function has no result: it took too long, its process died, or none could be started.

    Attributes:
        reward: Its name; empty where it is about all rewards.
        item: What it was called with, shortened.
        hung: It took too long.
    """

    code = "ZB0302"
    exit_code = 4

    def __init__(
        self, message: str, *, reward: str = "", item: str = "", hung: bool = False, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.reward = reward
        self.item = item
        self.hung = hung


class CallError(ZbusError):
    """Base of everything a call can end in but success. The fields say whether it ran.

    Attributes:
        role, rank, host, pid: The worker (None where not known).
        method: Endpoint name.
        batch: Number of the batch in its group, or None.
        attempts: How many times the request was transmitted.
        outcome: ``APP_ERROR``, ``NOT_EXECUTED``, ``UNKNOWN`` or ``CANCELLED``.
        reason: Machine-readable cause, such as ``deadline``, ``worker_exit``, ``predecessor``.
        exit_code_of_worker, signal_of_worker: How the worker ended, when it did.
        log_tail: Last lines of the worker's log, oldest first.
        crash_file: Path of the JSON crash report, or None.
        remote_traceback: Text of the remote traceback, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str | None = None,
        rank: int | None = None,
        host: str | None = None,
        pid: int | None = None,
        method: str | None = None,
        batch: int | None = None,
        attempts: int = 1,
        outcome: str = "",
        reason: str = "",
        exit_code_of_worker: int | None = None,
        signal_of_worker: int | None = None,
        log_tail: Sequence[str] = (),
        crash_file: str | None = None,
        remote_traceback: str | None = None,
        hint: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, facts=facts)
        self.role = role
        self.rank = rank
        self.host = host
        self.pid = pid
        self.method = method
        self.batch = batch
        self.attempts = attempts
        self.outcome = outcome
        self.reason = reason
        self.exit_code_of_worker = exit_code_of_worker
        self.signal_of_worker = signal_of_worker
        self.log_tail = list(log_tail)
        self.crash_file = crash_file
        self.remote_traceback = remote_traceback


class RemoteError(CallError):
    """The engine raised. Where the original class is a builtin, the instance is of that class too.

    Attributes:
        remote_type: Name of the original class, such as ``ValueError``.
        remote_module: The module it was defined in.
        remote_message: Its text, without the place that ``str()`` adds.
    """

    code = "ZB0401"
    remote_type: str = ""
    remote_module: str = ""
    remote_message: str = ""


class CallTimeout(CallError):
    """The deadline passed; ``outcome`` says whether the method is known not to have run."""

    code = "ZB0402"
    exit_code = 3


class NotExecuted(CallError):
    """Proved: the method did not start."""

    code = "ZB0403"
    exit_code = 4


class OutcomeUnknown(CallError):
    """The method may have run; ``reason`` and the facts carry the evidence."""

    code = "ZB0404"
    exit_code = 4


class WorkerLost(OutcomeUnknown):
    """The worker died, or its lease ran out, while it held the call."""

    code = "ZB0301"
    exit_code = 4

    def __str__(self) -> str:
        told = [self.facts[key] for key in ("exit", "evidence", "outcome") if self.facts.get(key)]
        return f"{self.message}: {'; '.join(told)}" if told else self.message


class CallStopped(BaseException):
    """Raised inside a running method by ``zbus.checkpoint``: its caller cancelled it, or its deadline has passed.

    Not an ``Exception``, so that ``except Exception`` in a method does not keep it going.

    Attributes:
        reason: ``cancelled`` or ``deadline``.
        method: Endpoint name.
    """

    def __init__(self, reason: str, method: str) -> None:
        why = "its deadline has passed" if reason == "deadline" else "its caller cancelled it"
        super().__init__(f"`{method}` was stopped: {why}")
        self.reason = reason
        self.method = method


class CallCancelled(CallError):
    """Cancelled: before it started (``outcome`` CANCELLED), or stopped at a checkpoint (``outcome`` APP_ERROR)."""

    code = "ZB0406"


class Unavailable(CallError):
    """Not every member was ready, so nothing was sent."""

    code = "ZB0407"
    exit_code = 4


class BatchError(ExceptionGroup[Exception]):
    """Several ranks of one batch failed. ``except* ValueError`` works.

    Attributes:
        results: Good results by rank.
        root: The first failure, the cause of the rest as far as is known.
        collateral: The other failures.
        late: What was known of each rank that had no outcome yet when this was raised, by rank; empty if all had one.
    """

    results: dict[int, Any]
    root: Exception
    collateral: tuple[Exception, ...]
    late: dict[int, str]

    def __new__(
        cls,
        message: str,
        errors: Sequence[Exception],
        results: Mapping[int, Any] | None = None,
        late: Mapping[int, str] | None = None,
    ) -> Self:
        """Build from errors ordered root first."""
        self = super().__new__(cls, message, errors)
        self.results = dict(results or {})
        self.late = dict(late or {})
        self.root = errors[0]
        self.collateral = tuple(errors[1:])
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args[:2])

    def derive(self, excs: Sequence[Exception]) -> BatchError:  # type: ignore[override]  # narrower than the generic
        """Keep the results when a subgroup is split off (``except*``)."""
        return BatchError(self.message, excs, self.results, self.late)

    def __reduce__(self) -> tuple[Any, ...]:
        return (BatchError, (self.message, list(self.exceptions), self.results, self.late))
