"""From what is known of a call to the error its caller catches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.placer import Peer, Roster, WorkerFacts
from zbus.errors import (
    BatchError,
    CallCancelled,
    CallError,
    CallTimeout,
    NotExecuted,
    OutcomeUnknown,
    WorkerLost,
)
from zbus.protocol.messages import Outcome, OutcomeKind

__all__ = ["Origin", "WaitTimeout", "batch_error", "error_of", "is_echo"]


class WaitTimeout(CallTimeout, TimeoutError):
    """``result(timeout=...)`` ran out; the call itself goes on.

    Attributes:
        results: Good results so far, by rank.
        late: What is known of each rank that has not answered, by rank.
    """

    def __init__(self, message: str, *, results: Mapping[int, Any], late: Mapping[int, str], **fields: Any) -> None:
        super().__init__(message, **fields)
        self.results = dict(results)
        self.late = dict(late)


@dataclass(frozen=True)
class Origin:
    """Where an outcome comes from.

    Attributes:
        roster: The role.
        peer: The incarnation that held the call.
        method: Endpoint name.
        batch: Number of the call in its batch, or None for a plain call.
        deadline_s: The call's deadline in seconds, or None.
    """

    roster: Roster
    peer: Peer
    method: str
    batch: int | None = None
    deadline_s: float | None = None


def error_of(outcome: Outcome, origin: Origin) -> Exception:
    """Make the error for an outcome other than OK. Reads the worker's facts, so never call it under a lock."""
    facts = origin.roster.facts(origin.peer)
    if outcome.kind is OutcomeKind.APP_ERROR:
        return _remote(outcome, origin, facts)
    cls, text = _kind(outcome, origin, facts)
    name = origin.peer.name
    return cls(
        f"{name.role}.{origin.method} on rank {name.rank} {text}",
        role=name.role,
        rank=name.rank,
        host=facts.host,
        pid=facts.pid,
        method=origin.method,
        batch=origin.batch,
        attempts=outcome.attempts,
        outcome=outcome.kind.value,
        reason=outcome.reason,
        exit_code_of_worker=facts.exit_code,
        signal_of_worker=facts.signal,
        log_tail=facts.log_tail,
        crash_file=facts.crash_file,
        hint=facts.hint,
        facts=facts.facts,
    )


def _remote(outcome: Outcome, origin: Origin, facts: WorkerFacts) -> Exception:
    from zbus.codec import decode
    from zbus.codec.exceptions import rebuild_exception

    name = origin.peer.name
    error = rebuild_exception(
        decode(outcome.payload or ()),
        role=name.role,
        rank=name.rank,
        host=facts.host,
        pid=facts.pid,
        method=origin.method,
        attempts=outcome.attempts,
        log_tail=facts.log_tail,
    )
    error.batch = origin.batch
    error.outcome = outcome.kind.value
    return error


_LOST: Final = ("worker_exit", "lease", "fenced", "disconnected")


def _kind(outcome: Outcome, origin: Origin, facts: WorkerFacts) -> tuple[type[CallError], str]:
    """Return the class and what happened, in words."""
    why = f": {outcome.evidence}" if outcome.evidence else ""
    ran = outcome.kind is OutcomeKind.UNKNOWN
    if outcome.kind is OutcomeKind.CANCELLED:
        return CallCancelled, f"was cancelled before it started{why}"
    if outcome.reason == "deadline":
        limit = "" if origin.deadline_s is None else f" of {origin.deadline_s:g} s"
        state = "it may have run" if ran else "it did not run"
        return CallTimeout, f"passed its deadline{limit}, {state}{why}"
    if not ran:
        return NotExecuted, f"did not run ({outcome.reason or 'unknown reason'}){why}"
    if outcome.reason in _LOST:
        return WorkerLost, f"was lost with its worker{_how(facts)}; it may have run{why}"
    return OutcomeUnknown, f"has no known outcome ({outcome.reason or 'no reason'}){why}"


def _how(facts: WorkerFacts) -> str:
    if facts.signal is not None:
        return f" (signal {facts.signal})"
    return f" (exit code {facts.exit_code})" if facts.exit_code is not None else ""


_ECHO: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|peer (closed|gone|disconnected)"
    r"|socket timeout|timed out (waiting|after)|gloo|nccl|processgroup|unhandled system error|remote process",
    re.IGNORECASE,
)


def is_echo(error: BaseException) -> bool:
    """Tell whether an engine's error looks like the echo of another rank's failure in a collective."""
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError | OSError | TimeoutError) and bool(_ECHO.search(str(error)))


def batch_error(
    method: str, role: str, errors: Sequence[tuple[int, Exception]], results: Mapping[int, Any], total: int
) -> BatchError:
    """Make the error of a call to several ranks from (rank, error) pairs ordered root first."""
    rank, root = errors[0]
    failed = list(dict.fromkeys(rank for rank, _ in errors))
    message = f"{role}.{method} failed on {len(failed)} of {total} ranks, first on rank {rank}: {_first_line(root)}"
    error = BatchError(message, [one for _, one in errors], results)
    if results:
        error.add_note(f"answered: {_ranks(sorted(results))}")
    error.add_note("failed: " + "; ".join(f"rank {rank} {_label(one)}" for rank, one in errors))
    return error


def _label(error: Exception) -> str:
    return getattr(error, "remote_type", None) or type(error).__name__


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if text.startswith(_label(error)) else f"{_label(error)}: {text}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
