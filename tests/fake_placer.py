"""A placer whose workers answer when and what the test says."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from typing import Any

from controller.group import Group
from controller.placer import StaticRoster
from zbus.codec import decode, encode
from zbus.codec.exceptions import describe_exception
from zbus.engine import EndpointSpec, Engine, Mesh, endpoints_of
from zbus.errors import Unavailable
from zbus.ids import WorkerName
from zbus.protocol.messages import Outcome, OutcomeKind

__all__ = ["FakePeer", "FakePlacer", "FakeState", "Request", "lost", "make_group", "ok", "raised"]


class FakeState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    DEAD = "dead"


class FakePeer:
    def __init__(self, role: str, rank: int) -> None:
        self.name = WorkerName(role, rank)
        self.incarnation = rank + 1
        self.state = FakeState.READY
        self.evidence = ""
        self.welcome = {"host": "box", "pid": 100 + rank}
        self.where = "running"

    def whereabouts(self, lane: str, seq: int) -> str:
        return self.where


def ok(value: Any) -> Outcome:
    """Make a good outcome."""
    return Outcome(OutcomeKind.OK, encode(value, snapshot=True))


def raised(error: BaseException) -> Outcome:
    """Make the outcome of an engine that raised."""
    return Outcome(OutcomeKind.APP_ERROR, encode(describe_exception(error)))


def refused(error: BaseException) -> Outcome:
    """Make the outcome of a call that its worker could not start."""
    described = encode(describe_exception(error))
    return Outcome(OutcomeKind.NOT_EXECUTED, described, "refused", "the worker could not start it")


def lost(evidence: str = "killed by SIGKILL; the call was running", reason: str = "worker_exit") -> Outcome:
    """Make the outcome of a worker that died."""
    return Outcome(OutcomeKind.UNKNOWN, None, reason, evidence)


class Request:
    """One member's part of a placed batch; ``answer`` ends its calls."""

    def __init__(self, placer: FakePlacer, placed: Placed, member: int, payload: Any) -> None:
        self.placer = placer
        self.placed = placed
        self.member = member
        self.payload = payload
        self.calls = [(name, tuple(args), kwargs) for name, args, kwargs in decode(payload)]

    @property
    def peer(self) -> FakePeer:
        return self.placed.members[self.member]

    def answer(self, *outcomes: Outcome) -> None:
        with self.placer.changed:
            for call, outcome in enumerate(outcomes):
                self.placed.sink(self.member, call, outcome)
            self.placer.changed.notify_all()

    def item(self, number: int, value: Any) -> None:
        with self.placer.changed:
            self.placed.chunk_sink(self.member, number, encode(value))
            self.placer.changed.notify_all()


class Placed:
    def __init__(self, members, lane, sink, chunk_sink, deadline_s, strict) -> None:
        self.members = list(members)
        self.lane = lane
        self.sink = sink
        self.chunk_sink = chunk_sink
        self.deadline_s = deadline_s
        self.strict = strict
        self.seqs = [0] * len(self.members)
        self.requests: list[Request] = []
        self.credit = 0


class FakePlacer:
    """Keeps every placed request; ``auto`` answers each at once on the placing thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.placed: list[Placed] = []
        self.requests: list[Request] = []
        self.cancelled: list[Placed] = []
        self.auto: Callable[[Request], Any] | None = None
        self.under_lock = 0

    def keeper(self, members, *, snapshot) -> None:
        """Nothing is carried apart."""

    def place(
        self,
        members,
        lane,
        payloads,
        count,
        *,
        deadline_s,
        sink,
        results_sink=None,
        chunk_sink=None,
        trace=0,
        strict=False,
        together=False,
    ) -> Placed:
        late = [peer for peer in members if peer.state is not FakeState.READY]
        if late:
            msg = f"nothing was sent: {late[0].name} is {late[0].state.value}"
            raise Unavailable(msg, role=late[0].name.role, rank=late[0].name.rank)
        with self.changed:
            placed = Placed(members, lane, sink, chunk_sink, deadline_s, strict)
            self.placed.append(placed)
            placed.requests = [Request(self, placed, m, payload) for m, payload in enumerate(payloads)]
            assert all(len(request.calls) == count for request in placed.requests)
            self.requests += placed.requests
            self.changed.notify_all()
        if self.auto is not None:
            for request in placed.requests:
                self.auto(request)
        return placed

    def cancel(self, placed: Placed) -> None:
        self.cancelled.append(placed)

    def consumed(self, placed: Placed, upto: int) -> None:
        placed.credit = upto

    def wait(self, done, timeout_s=None) -> bool:
        with self.changed:
            return self.changed.wait_for(done, timeout_s)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def make_group(
    engine: type[Engine] | Mapping[str, EndpointSpec], ranks: int = 2, mesh: Mapping[str, int] | None = None, **options
) -> tuple[Group, FakePlacer, StaticRoster]:
    """Make a group of an engine class over a fake placer."""
    placer = FakePlacer()
    table = dict(engine) if isinstance(engine, Mapping) else endpoints_of(engine)
    roster = StaticRoster("actor", Mesh.of(mesh, ranks), [FakePeer("actor", rank) for rank in range(ranks)], table)
    return Group(roster, placer, **options), placer, roster
