"""Compares what the callers saw with what really ran. Offline and pure: two files in, a list of broken promises out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from zbus.testing.chaos.history import Answer, Op
from zbus.testing.chaos.truth import Run

__all__ = ["Findings", "check"]

_SHOWN = 50
_NO_RUN = frozenset({"NOT_EXECUTED", "CANCELLED"})


@dataclass
class Findings:
    """What the checker found.

    Attributes:
        duplicates: Second runs that no declaration allows.
        lost: Answers without a run, runs that answered wrongly, and calls that ended without an outcome.
        untrue: Outcomes that say "it did not run" of calls that ran, or "executed" of calls that did not end, and
            UNKNOWN without a cause.
        disorder: Calls that started in another order than they were submitted in, or than on a peer.
        hangs: Calls without all their outcomes by deadline and grace.
        outcomes: How many of each.
        unknown: Outcomes UNKNOWN, by cause.
        examples: The first of what is broken, in words.
    """

    duplicates: int = 0
    lost: int = 0
    untrue: int = 0
    disorder: int = 0
    hangs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def began(self) -> int:
        """How many calls are UNKNOWN since they began and did not end."""
        return sum(number for cause, number in self.unknown.items() if "began, no end" in cause)

    @property
    def broken(self) -> int:
        """How many promises were broken."""
        return self.duplicates + self.lost + self.untrue + self.disorder + self.hangs

    def note(self, what: str, op: Op | None, text: str) -> None:
        """Count one."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{what}: {text}" + (f" ({op.shape} {op.effect} {op.call})" if op else ""))


def check(ops: Sequence[Op], truth: Mapping[str, Sequence[Run]]) -> Findings:
    """Check every call against the ground truth, and the order of starts.

    Args:
        ops: The history.
        truth: Executions by call id; a call id that the history does not know is a finding too.
    """
    found = Findings()
    known = set()
    for op in ops:
        known.add(op.call)
        _check_op(found, op, truth.get(op.call, ()))
    for call in truth.keys() - known:
        found.note("lost", None, f"call {call} ran, and no caller has an outcome of it")
    _check_callers_order(found, ops, truth)
    _check_peers_order(found, ops, truth)
    return found


def _check_op(found: Findings, op: Op, runs: Sequence[Run]) -> None:
    took = op.ended - op.began
    answered = [answer for answer in op.answers if answer.outcome]
    if len(answered) < op.wanted:
        what = "hangs" if took >= op.limit_s else "lost"
        found.note(
            what, op, f"{op.wanted - len(answered)} of {op.wanted} outcomes missing after {took:.1f} s {op.note}"
        )
    _check_repeats(found, op, runs)
    for answer in answered:
        found.outcomes[answer.outcome] += 1
        mine = runs if answer.rank < 0 else [run for run in runs if run.rank == answer.rank]
        _check_answer(found, op, answer, mine)


def _check_repeats(found: Findings, op: Op, runs: Sequence[Run]) -> None:
    """In one incarnation nothing runs twice; ``once`` runs once per rank; ``idempotent`` never moves."""
    for (rank, start), count in Counter((run.rank, run.start) for run in runs).items():
        if count > 1:
            found.note("duplicates", op, f"ran {count} times in start {start} of rank {rank}")
    if op.effect == "once":
        for rank, count in Counter(run.rank for run in runs).items():
            if count > 1:
                found.note("duplicates", op, f"`once`, yet it ran {count} times on rank {rank}")
    if op.effect != "pure":
        called = {answer.rank for answer in op.answers}
        for run in runs:
            if run.rank not in called:
                found.note("duplicates", op, f"ran on rank {run.rank}, which was not called")


def _check_answer(found: Findings, op: Op, answer: Answer, runs: Sequence[Run]) -> None:
    where = f"rank {answer.rank}" if answer.rank >= 0 else "some rank"
    if answer.outcome in ("OK", "APP_ERROR"):
        raised = answer.outcome == "APP_ERROR"
        if not any(run.ended and run.raised == raised for run in runs):
            found.note("lost", op, f"{answer.outcome} from {where}, where it did not run to such an end: {list(runs)}")
        if not answer.right:
            found.note("lost", op, f"{where} gave a wrong answer {answer.cause}")
    elif answer.outcome in _NO_RUN:
        if runs:
            found.note("untrue", op, f"{answer.outcome} ({answer.cause}) on {where}, where it ran: {list(runs)}")
    elif answer.outcome == "UNKNOWN":
        found.unknown[_short(answer.cause)] += 1
        if not answer.cause:
            found.note("untrue", op, f"UNKNOWN on {where} without a cause")
        if "executed, reply lost" in answer.cause and not any(run.ended for run in runs):
            found.note("untrue", op, f"{answer.cause} on {where}, where it did not run to its end: {list(runs)}")
    else:
        found.note("lost", op, f"no such outcome: {answer.outcome!r}")


def _short(cause: str) -> str:
    """Return a cause without its numbers, to count by."""
    return "".join("#" if char.isdigit() else char for char in cause)[:200]


def _check_callers_order(found: Findings, ops: Sequence[Op], truth: Mapping[str, Sequence[Run]]) -> None:
    """On the main lane of one incarnation, calls of one caller that are never re-run start as they were submitted."""
    lanes: dict[tuple[str, int, int], list[tuple[int, Run, Op]]] = defaultdict(list)
    for op in ops:
        if op.ordered and op.effect == "once":
            for run in truth.get(op.call, ()):
                lanes[op.thread, run.rank, run.start].append((op.number, run, op))
    for entries in lanes.values():
        entries.sort(key=lambda entry: entry[0])
        for (_, before, _), (_, after, op) in pairwise(entries):
            if after.place < before.place:
                found.note("disorder", op, f"{after.call} started before {before.call} on rank {after.rank}")


def _check_peers_order(found: Findings, ops: Sequence[Op], truth: Mapping[str, Sequence[Run]]) -> None:
    """Calls to whole groups start in one order on all ranks, whoever submitted them."""
    orders: dict[int, list[tuple[int, str]]] = defaultdict(list)
    by_call: dict[str, Op] = {}
    for op in ops:
        if op.ordered and op.effect == "once" and op.wanted > 1:
            by_call[op.call] = op
            for run in truth.get(op.call, ()):
                orders[run.rank].append((run.place, op.call))
    places = {rank: {call: place for place, call in sorted(order)} for rank, order in orders.items()}
    for (_, left), (_, right) in pairwise(sorted(places.items())):
        common = sorted(left.keys() & right.keys(), key=left.__getitem__)
        for before, after in pairwise(common):
            if right[after] < right[before]:
                found.note("disorder", by_call[after], f"{before} and {after} started in different orders on two ranks")
