"""From what is known of a call to the error its caller catches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.placer import Peer, Roster, WorkerFacts
from controller.places import fold
from zbus.errors import (
    BatchError,
    CallCancelled,
    CallError,
    CallTimeout,
    CodecError,
    Fenced,
    NotExecuted,
    OutcomeUnknown,
    RemoteError,
    Unavailable,
    WorkerLost,
)
from zbus.protocol.messages import Outcome, OutcomeKind

__all__ = [
    "AT",
    "Origin",
    "Superseded",
    "SupersededRefusal",
    "WaitTimeout",
    "batch_error",
    "error_of",
    "is_echo",
    "spans",
    "unavailable",
]


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


class Superseded(CallError, Fenced):
    """Another controller has taken the trial over; the fields say what became of this call."""

    code = Fenced.code
    exit_code = Fenced.exit_code


class SupersededRefusal(Unavailable, Fenced):
    """Another controller has taken the trial over, so nothing was sent."""

    code = Fenced.code
    exit_code = Fenced.exit_code


_REFUSED: Final = "refused"
"""Reason of a call that its worker could not start; the payload describes why."""

_SUPERSEDED: Final = "superseded"
"""Reason of a peer that obeys another controller."""


@dataclass(frozen=True)
class Origin:
    """Where an outcome comes from.

    Attributes:
        roster: The role.
        peer: The incarnation that held the call.
        method: Endpoint name.
        deadline_s: The call's deadline in seconds, or None.
        number: Number of the batch among those of its group, from 1, or None.
    """

    roster: Roster
    peer: Peer
    method: str
    deadline_s: float | None = None
    number: int | None = None


def error_of(outcome: Outcome, origin: Origin) -> CallError:
    """Make the error for an outcome other than OK. Reads the worker's facts, so never call it under a lock."""
    facts = origin.roster.facts(origin.peer)
    if outcome.is_error and outcome.reason in ("", _REFUSED):
        told = _remote(outcome, origin, facts)
        return _unread(told, origin, facts) if told.reason == _REFUSED and _is_of_codec(told) else told
    cls, text, more = _kind(outcome, origin)
    error = cls(
        text,
        **_place_of(origin, facts),
        attempts=outcome.attempts,
        outcome=outcome.kind.value,
        reason=outcome.reason,
        facts={**more, **facts.facts},
    )
    if outcome.reason == "deadline":
        _add_place(error, origin)
    if facts.log_tail:
        error.add_note(f"log {facts.facts.get('log', '')}: {facts.log_tail[-1]}")
    return error


def _place_of(origin: Origin, facts: WorkerFacts) -> dict[str, Any]:
    """Return what every error of a call says of its rank, as keywords of ``CallError``."""
    return {
        "role": origin.peer.name.role,
        "rank": origin.peer.name.rank,
        "host": facts.host,
        "pid": facts.pid,
        "method": origin.method,
        "batch": origin.number,
        "exit_code_of_worker": facts.exit_code,
        "signal_of_worker": facts.signal,
        "log_tail": facts.log_tail,
        "crash_file": facts.crash_file,
        "hint": facts.hint,
    }


def _add_place(error: CallError, origin: Origin) -> None:
    """Add where a rank is that did not answer in time. Its stacks were asked for when the deadline passed."""
    late = getattr(origin.roster, "late", None)
    if late is None:
        return
    dump = late.where({0: origin.peer}, _STACKS_S).get(0)
    if dump is not None:
        error.facts["at"] = dump.place
        if dump.path:
            error.facts["stacks"] = dump.path
        error.add_note(f"{origin.peer.name} is in {dump.place}")


def unavailable(error: Unavailable, origin: Origin, names: str) -> Unavailable:
    """Add to the refusal of a call what is known of the dead rank that caused it. Never call it under a lock.

    Args:
        error: The placer's refusal; nothing was sent.
        origin: The dead rank.
        names: All dead ranks of the call, in words.
    """
    facts = origin.roster.facts(origin.peer)
    evidence = origin.peer.evidence
    superseded = error.reason == _SUPERSEDED
    words = f"another controller has taken this trial over, so `{origin.method}` was sent to no rank"
    return (SupersededRefusal if superseded else Unavailable)(
        words if superseded else f"{names} died, so `{origin.method}` was sent to no rank",
        **_place_of(origin, facts),
        attempts=0,
        outcome=OutcomeKind.NOT_EXECUTED.value,
        reason=error.reason,
        facts={**({"evidence": evidence} if evidence and "exit" not in facts.facts else {}), **facts.facts},
    )


def _remote(outcome: Outcome, origin: Origin, facts: WorkerFacts) -> RemoteError:
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
    error.batch = origin.number
    error.outcome = outcome.kind.value
    error.reason = outcome.reason or error.reason
    return error


def _is_of_codec(error: RemoteError) -> bool:
    return (error.remote_module, error.remote_type) == (CodecError.__module__, CodecError.__name__)


def _unread(cause: RemoteError, origin: Origin, facts: WorkerFacts) -> NotExecuted:
    """Make the error of a call whose arguments did not come, or could not be read: the engine raised nothing."""
    name = origin.peer.name
    error = NotExecuted(
        f"{name.role}.{origin.method} on rank {name.rank} did not run: its arguments could not be had: "
        f"{cause.remote_message}",
        **{**_place_of(origin, facts), "hint": cause.hint or facts.hint},
        attempts=cause.attempts,
        outcome=cause.outcome,
        reason=cause.reason,
        remote_traceback=cause.remote_traceback,
        facts={**cause.facts, **facts.facts},
    )
    error.__cause__ = cause
    return error


_STACKS_S: Final = 2.0

_CALL_WAS: Final = "; the call was "
"""What ``protocol.caller`` puts between how a worker ended and how far its call had come."""

_LOST: Final = {
    "worker_exit": "died",
    "lease": "was lost",
    "fenced": "was replaced",
    "disconnected": "was disconnected",
}


def _kind(outcome: Outcome, origin: Origin) -> tuple[type[CallError], str, dict[str, str]]:
    """Return the class, what happened in words, and facts that only this outcome has."""
    if outcome.reason in _LOST and outcome.kind in (OutcomeKind.UNKNOWN, OutcomeKind.NOT_EXECUTED):
        return _lost(outcome, origin)
    name = origin.peer.name
    who = f"{name.role}.{origin.method} on rank {name.rank}"
    if outcome.reason == _SUPERSEDED:
        state = "may have run" if outcome.kind is OutcomeKind.UNKNOWN else "did not run"
        return Superseded, f"another controller has taken this trial over; {who} {state}: {outcome.evidence}", {}
    why = f": {outcome.evidence}" if outcome.evidence else ""
    ran = outcome.kind is OutcomeKind.UNKNOWN
    if outcome.kind is OutcomeKind.APP_ERROR:  # it followed our wish to end
        if outcome.reason == "deadline":
            limit = "" if origin.deadline_s is None else f" of {origin.deadline_s:g} s"
            return CallTimeout, f"{who} passed its deadline{limit} while it ran, and was stopped", {}
        return CallCancelled, f"{who} was stopped by its cancel while it ran", {}
    if outcome.kind is OutcomeKind.CANCELLED:
        return CallCancelled, f"{who} was cancelled before it started{why}", {}
    if outcome.reason == "deadline":
        limit = "" if origin.deadline_s is None else f" of {origin.deadline_s:g} s"
        state = "it may have run" if ran else "it did not run"
        return CallTimeout, f"{who} passed its deadline{limit}, {state}{why}", {}
    if not ran and outcome.reason == "shutdown":
        return NotExecuted, f"{name} is leaving and did not start `{origin.method}`{why}", {}
    if not ran:
        return NotExecuted, f"{who} did not run ({outcome.reason or 'unknown reason'}){why}", {}
    return OutcomeUnknown, f"{who} has no known outcome ({outcome.reason or 'no reason'}){why}", {}


def _lost(outcome: Outcome, origin: Origin) -> tuple[type[CallError], str, dict[str, str]]:
    verb = _LOST[outcome.reason]
    batch = "" if origin.number is None else f" (batch {origin.number})"
    how, _, where = outcome.evidence.partition(_CALL_WAS)
    where, _, proof = where.partition(": ")
    if proof:
        where = f"{where} ({proof})"
    more = {"exit" if outcome.reason == "worker_exit" else "evidence": how} if how else {}
    if outcome.kind is OutcomeKind.NOT_EXECUTED:
        more["outcome"] = "the call did not start"
        before = "it started" if outcome.attempts else "it was sent"
        return NotExecuted, f"{origin.peer.name} {verb} before {before} `{origin.method}`{batch}", more
    if where.startswith("executed"):  # the crash journal's word
        more["outcome"] = f"the call ran: it was {where}"
        return WorkerLost, f"{origin.peer.name} {verb} before it answered `{origin.method}`{batch}", more
    more["outcome"] = f"the call may have run: it was {where}" if where else "the call may have run"
    return WorkerLost, f"{origin.peer.name} {verb} during `{origin.method}`{batch}", more


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
    method: str,
    role: str,
    errors: Sequence[tuple[int, Exception]],
    results: Mapping[int, Any],
    total: int,
    late: Mapping[int, str] | None = None,
    *,
    again: Sequence[int] = (),
) -> BatchError:
    """Make the error of a call to several ranks from (rank, error) pairs ordered root first.

    Args:
        method: What was called.
        role: On whom.
        errors: The failures.
        results: Good answers by rank.
        total: How many ranks were called.
        late: What is known of each rank that has no outcome yet: the caller does not wait for them.
        again: Ranks whose part was to run once more, ascending.
    """
    rank, root = errors[0]
    failed = list(dict.fromkeys(rank for rank, _ in errors))
    message = f"{role}.{method} failed on {len(failed)} of {total} ranks, first on rank {rank}: {_first_line(root)}"
    error = BatchError(message, [one for _, one in errors], results, late)
    if results:
        error.add_note(f"answered: {_ranks(sorted(results))}")
    error.add_note("failed: " + "; ".join(f"rank {rank} {_label(one)}" for rank, one in errors))
    if late:
        error.add_note("not waited for: " + "; ".join(f"rank {rank} {state}" for rank, state in late.items()))
    if isinstance(root, CallError):
        if results or late:
            root.facts["peers"] = _peers(role, results, late or {}, again)
        if places := {rank: state.partition(AT)[2] for rank, state in (late or {}).items() if AT in state}:
            root.facts["peers at"] = _places(role, places)
        if root.reason == "deadline":
            _add_places(root, role, method, errors)
    return error


def _add_places(root: CallError, role: str, method: str, errors: Sequence[tuple[int, Exception]]) -> None:
    """Say in the first failure of a call that ran out of time who else has not answered, and where all of them are."""
    late = {rank: one for rank, one in errors if isinstance(one, CallError) and one.reason == "deadline"}
    if len(late) < 2:
        return
    root.facts["late"] = f"{role}/{spans(sorted(late))} have not answered `{method}`"
    places = {rank: one.facts["at"] for rank, one in late.items() if "at" in one.facts}
    if places:
        root.facts["at"] = _places(role, places)


AT: Final = ", in "
"""Stands in what is known of a rank that has not answered between how far it is and the place of its engine."""


def _places(role: str, places: Mapping[int, str]) -> str:
    return "\n".join(f"{role}/{spans(ranks)}: {place}" for ranks, place in fold(places))


def _peers(role: str, results: Mapping[int, Any], late: Mapping[int, str], again: Sequence[int]) -> str:
    """Say what became of the ranks that did not fail."""
    told = [f"{role}/{spans(sorted(results))} finished this call"] if results else []
    states: dict[str, list[int]] = {}
    for rank, state in late.items():
        states.setdefault(_SINCE.sub("", state.partition(AT)[0]), []).append(rank)
    for state, ranks in states.items():
        since = _SINCE.search(late[ranks[0]]) if len(ranks) == 1 else None
        told.append(f"{role}/{spans(ranks)} {_STILL.get(state, state)}{since.group() if since else ''}")
    return "; ".join([*told, f"{role}/{spans(again)} was run again" if again else "nothing was re-run"])


_SINCE: Final = re.compile(r" since [\d.]+ s")
_STILL: Final = {
    "running": "still running it",
    "sent, not confirmed": "has not confirmed it",
    "arrived, not started": "has not started it",
}


def spans(ranks: Sequence[int]) -> str:
    """Write ascending ranks shortly: ``0-2, 4``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _label(error: Exception) -> str:
    return getattr(error, "remote_type", None) or type(error).__name__


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if text.startswith(_label(error)) else f"{_label(error)}: {text}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
