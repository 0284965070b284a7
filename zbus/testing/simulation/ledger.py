"""The truth about every call of a run, kept outside the machines under test, and the promises it is held against.

The invariants have the numbers of the promises' reference: I1 one outcome, I2 one start, I3 order, I4 OK means one
whole run with that result, I5 NOT_EXECUTED means none, I6 UNKNOWN has a named cause, I7 no start for a fenced epoch,
I9 bounds, I10 a quiet run sends nothing twice, I11 the living are READY again after the last fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NoReturn

from zbus.protocol.callee import Orphan
from zbus.protocol.messages import Buffers, Execute, Kind, Outcome, OutcomeKind, Status

__all__ = ["Call", "GangTruth", "Ledger", "Violation", "broken"]

_CAUSES: Final = frozenset({"worker_exit", "lease", "fenced", "deadline", "shutdown"})
_PROVED: Final = (OutcomeKind.NOT_EXECUTED, OutcomeKind.CANCELLED)


class Violation(Exception):
    """A promise was broken; ``rule`` is its number."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def broken(rule: str, text: str) -> NoReturn:
    """Raise ``Violation``."""
    raise Violation(rule, text)


class GangTruth:
    """What is known of a call that starts together, kept outside the machine under test.

    Attributes:
        members: The calls of each member.
        gone: When its caller said GO, or None.
    """

    __slots__ = ("gone", "members")

    def __init__(self) -> None:
        self.members: list[list[Call]] = []
        self.gone: int | None = None


class Call:
    """One placed call, what happened to it, and what its caller was told."""

    __slots__ = (
        "batch", "cancelled", "chunks", "deadline", "ended", "gang", "held", "index", "key", "marked", "outcome",
        "placed", "refused", "result", "said", "size", "started", "stream", "strict", "token",
    )  # fmt: skip

    def __init__(
        self, key: tuple[int, bytes, str, int], token: bytes, batch: int, index: int, size: int, deadline: int | None,
        placed: int, *, stream: bool, strict: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.token = token
        self.batch = batch
        self.index = index
        self.size = size
        self.deadline = deadline
        self.placed = placed
        self.stream = stream
        self.strict = strict
        self.outcome: Outcome | None = None
        self.started = 0
        self.ended = 0
        self.result: tuple[OutcomeKind, bytes] | None = None
        self.said = 0
        self.chunks = 0
        self.cancelled = False
        self.gang: GangTruth | None = None
        self.held = False
        self.refused = False  # its worker could not start it
        self.marked = False  # the crash journal was told that it starts

    def __repr__(self) -> str:
        incarnation, session, lane, seq = self.key
        return f"call {seq} of {lane} (session {session[-1]}, incarnation {incarnation:#x}, batch {self.batch})"


class Ledger:
    """Every call of one run. Each method raises ``Violation`` on the first broken promise.

    Args:
        covered: Counters to add to.
        exact: Whether crash journals tell of each call whether it started.
        evicts: Whether workers may be unable to keep a large reply.
        concurrency: How many requests each lane runs at once.

    Attributes:
        liars: Incarnations that make up what they say: only that callers bear it is checked of their calls.
        unread: Incarnations whose crash journal was lost with their host.
    """

    __slots__ = (
        "_began",
        "_last_started",
        "calls",
        "concurrency",
        "covered",
        "evicts",
        "exact",
        "liars",
        "open",
        "unread",
    )

    def __init__(
        self, covered: dict[object, int], *, exact: bool, evicts: bool, concurrency: Mapping[str, int]
    ) -> None:
        self.exact = exact
        self.evicts = evicts
        self.concurrency = concurrency
        self.liars: set[int] = set()
        self.unread: set[int] = set()
        self._began: dict[tuple[int, bytes, str], int] = {}
        self.calls: dict[tuple[int, bytes, str, int], Call] = {}
        self.open = 0
        self.covered = covered
        self._last_started: dict[tuple[int, bytes, str], Call] = {}

    def placed(self, call: Call) -> None:
        """Note a new call."""
        if call.key in self.calls:
            broken("I3", f"{call!r} was placed twice")
        self.calls[call.key] = call
        self.open += 1

    def handed_out(self, incarnation: int, request: Execute, now: int) -> list[Call]:
        """Return the calls of a request that the callee wants to run; they must be what was placed."""
        calls = []
        first = self.calls.get((incarnation, request.session, request.lane, request.seq))
        if first is not None and first.gang is not None:
            self._check_gang(first, first.gang)
        elif request.deadline_ns is not None and request.deadline_ns <= now:
            broken("P6", f"{request.lane}/{request.seq} is to run after its deadline")
        for index in range(request.calls):
            call = self.calls.get((incarnation, request.session, request.lane, request.seq + index))
            if call is None or call.index != index or call.size != request.calls:
                broken("I4", f"{request.lane}/{request.seq}+{index} is to run and was never placed so")
            if bytes(request.buffers[0]) != call.token:
                broken("I4", f"{call!r} is to run with the payload {bytes(request.buffers[0])!r}")
            calls.append(call)
        return calls

    def held(self, incarnation: int, session: bytes, lane: str, seq: int) -> None:
        """Note that a worker holds a call that starts together, and says so."""
        self.calls[incarnation, session, lane, seq].held = True

    def _check_gang(self, call: Call, gang: GangTruth) -> None:
        """Check that a call which is to run was held by all its members, and released in time."""
        if not all(member[0].held or member[0].key[0] in self.liars for member in gang.members):
            broken("P4", f"{call!r} is to start together, and not every member holds it")
        if gang.gone is None:
            broken("P4", f"{call!r} is to start together, and its caller said no GO")
        if call.deadline is not None and gang.gone >= call.deadline:
            broken("P6", f"{call!r} was told to start together after its deadline")

    def check_gang(self, gang: GangTruth, excused: Sequence[bool]) -> None:
        """Check, when all is quiet, that a gang ran everywhere or nowhere.

        Args:
            gang: Which.
            excused: Of each member, whether it (or its caller) was lost, so that it may have missed its GO.
        """
        calls = [member[0] for member in gang.members]
        ran = [call for call in calls if call.started]
        self.covered["gang", "ran" if ran else "did not run"] += 1
        if not ran:
            return
        for call, excuse in zip(calls, excused, strict=True):
            outcome = call.outcome
            told = "" if outcome is None or outcome.kind not in _PROVED else outcome.reason
            if told == "gang" or (told in ("deadline", "cancelled") and not excuse):
                broken("P4", f"{call!r} is told {told} before the start, but {ran[0]!r} started")
            if not call.started and not excuse and not call.refused:
                broken("P4", f"{ran[0]!r} started and {call!r} did not")

    def start(self, call: Call, *, epoch: int, highest: int, over: str, alone: bool) -> None:
        """Note that a call starts.

        Args:
            call: Which.
            epoch: Its caller's; 0 for a guest.
            highest: The highest that this incarnation welcomed.
            over: Why no request may begin any more, or empty.
            alone: Whether its lane runs one request at a time.
        """
        call.started += 1
        if call.started > 1:
            broken("I2", f"{call!r} starts a second time")
        if call.outcome is not None and call.outcome.kind in _PROVED and call.key[0] not in self.liars:
            broken("I5", f"{call!r} starts after {call.outcome.kind.value} was said")
        if 0 < epoch < highest:
            broken("I7", f"{call!r} starts for epoch {epoch}, {highest} was welcomed")
        if over and call.index == 0:
            broken("I7", f"{call!r} starts after {over}")
        if epoch == 0 and call.index == 0 and call.key[2] != "ctl":
            broken("I7", f"{call!r} of a guest starts")
        if call.index and not alone:
            return  # where several requests run at once, order is that of the requests
        stream = call.key[:3]
        last = self._last_started.get(stream)
        if last is not None and (last.key[3] >= call.key[3] or last.batch > call.batch):
            broken("I3", f"{call!r} starts after {last!r}")
        if alone and last is not None and not last.ended and last.index != call.index - 1:
            broken("I3", f"{call!r} starts before the end of {last!r}")
        self._last_started[stream] = call

    def end(self, call: Call, kind: OutcomeKind, result: bytes) -> None:
        """Note that a call ran to its end."""
        call.ended += 1
        call.result = (kind, result)

    def chunk(self, call: Call, number: int, buffers: Buffers) -> None:
        """Note an item delivered to the user."""
        if number != call.chunks:
            broken("I4", f"{call!r} delivers item {number}, expected {call.chunks}")
        if call.key[0] not in self.liars and bytes(buffers[0]) != b"%s#%d" % (call.token, number):
            broken("I4", f"{call!r} delivers {bytes(buffers[0])!r} as item {number}")
        if call.outcome is not None:
            broken("I1", f"{call!r} delivers an item after its outcome")
        call.chunks += 1

    def finished(self, call: Call, outcome: Outcome, now: int, *, grace: int | None) -> None:
        """Note what the caller is told.

        Args:
            call: Which.
            outcome: What is said.
            now: Time of it.
            grace: How long after its deadline it may come; None where the caller was stopped meanwhile.
        """
        if call.outcome is not None:
            broken("I1", f"{call!r} is told {outcome.kind.value} after {call.outcome.kind.value}")
        call.outcome = outcome
        self.open -= 1
        kind = outcome.kind
        self.covered["outcome", kind.value, outcome.reason] += 1
        if call.deadline is not None and grace is not None and now > call.deadline + grace:
            broken("I1", f"{call!r} has its outcome {(now - call.deadline) / 1e6:.1f} ms after its deadline")
        if call.key[0] in self.liars:
            return
        if kind in _PROVED:
            if call.started:
                broken("I5", f"{call!r} is told {kind.value} ({outcome.reason}), but it started")
            if kind is OutcomeKind.CANCELLED and not call.cancelled:
                broken("I1", f"{call!r} is told CANCELLED, nobody asked")
            if outcome.reason == "deadline" and call.deadline is None:
                broken("I1", f"{call!r} is told that it expired, it has no deadline")
        elif kind is OutcomeKind.UNKNOWN:
            self._check_unknown(call, outcome, now)
        else:
            if outcome.reason == "cancelled" and not call.cancelled:
                broken("I4", f"{call!r} was stopped by a cancel, nobody asked")
            payload = b"" if not outcome.payload else bytes(outcome.payload[0])
            if (call.started, call.ended) != (1, 1) or call.result != (kind, payload):
                broken(
                    "I4",
                    f"{call!r} is told {kind.value} {payload!r}; it started {call.started} and ended {call.ended} "
                    f"times with {call.result}",
                )
            if call.stream and kind is OutcomeKind.OK and call.chunks != call.said:
                broken("I4", f"{call!r} is told OK after {call.chunks} of {call.said} items")

    def _check_unknown(self, call: Call, outcome: Outcome, now: int) -> None:
        if outcome.reason == "evicted" and self.evicts:
            if not call.ended or not outcome.evidence.startswith("executed"):
                broken("I6", f"{call!r} is told that it was executed, and it has not ended")
            return
        if outcome.reason not in _CAUSES or not outcome.evidence:
            broken("I6", f"{call!r} is told UNKNOWN ({outcome.reason!r}, {outcome.evidence!r})")
        incarnation, session, lane, _ = call.key
        if outcome.reason == "worker_exit" and self.exact and lane != "ctl" and incarnation not in self.unread:
            if not call.started and not call.marked:
                broken("I6", f"{call!r} is told UNKNOWN ({outcome.evidence}); the journal knows that it never started")
            if "executed, reply lost" in outcome.evidence and not call.ended:
                broken("I6", f"{call!r} is told that it was executed, and it has not ended")
            if "began, no end" in outcome.evidence:
                began = self._began[incarnation, session, lane] = self._began.get((incarnation, session, lane), 0) + 1
                if began > self.concurrency[lane]:
                    broken("I6", f"{call!r} is told that it began: the {began}. of {lane}, which runs fewer at once")
        if outcome.reason == "deadline" and (call.deadline is None or now < call.deadline):
            broken("I6", f"{call!r} is told UNKNOWN(deadline) before its deadline")

    def check_orphans(self, incarnation: int, orphans: Sequence[Orphan], superseded: Collection[bytes]) -> None:
        """Check what a living worker keeps of superseded controllers for their successor.

        Args:
            incarnation: Which worker.
            orphans: What it keeps.
            superseded: Sessions of lower epochs that it knew and that did not say BYE.
        """
        if incarnation in self.liars:
            return
        kept = set()
        for orphan in orphans:
            for header, buffers in orphan.replies:
                key = (incarnation, orphan.session, orphan.lane, header.seq)
                call = self.calls[key]
                kept.add(key)
                self.covered["orphan"] += 1
                ran = header.kind in (Kind.RESULT, Kind.END) or header.status in (
                    Status.APP_ERROR, Status.STOPPED, Status.NOT_KEPT
                )  # fmt: skip
                if header.status == Status.NOT_KEPT and self.evicts and call.ended:
                    continue
                if ran != bool(call.ended) or (call.result and call.result[1] != bytes(buffers[0])):
                    broken("P8", f"{call!r} is kept as {header}, it ended with {call.result}")
        for key, call in self.calls.items():
            if key[0] != incarnation or key[1] not in superseded or key[2] == "ctl":
                continue
            if call.ended and call.outcome is None and key not in kept:
                broken("P8", f"{call!r} ended, its controller died without the outcome, and it is not kept")

    def excused(self, call: Call) -> bool:
        """Whether a call may stay without an outcome: it has no deadline, and a worker lies.

        What starts together with it, and whatever stands behind that on other workers, waits as long.
        """
        return call.deadline is None and bool(self.liars)

    def check_end(self, alive: Mapping[bytes, bool]) -> None:
        """Check what must hold when everything is quiet; ``alive`` tells which sessions' callers live."""
        for call in self.calls.values():
            if call.outcome is None and alive[call.key[1]] and not self.excused(call):
                broken("I1", f"{call!r} never got an outcome; it started {call.started} times")
            if call.key[0] in self.liars:
                continue
            if call.outcome is not None and call.outcome.kind in _PROVED and call.started:
                broken("I5", f"{call!r} was told {call.outcome.kind.value}, but it started")
