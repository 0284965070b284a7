"""Words for the effects of the protocol's machines, and machines ready to be asked."""

from __future__ import annotations

from collections.abc import Iterable

from zbus.protocol.callee import Callee
from zbus.protocol.caller import CallerLane, Timing
from zbus.protocol.messages import (
    CancelRunning,
    Chunk,
    Effect,
    Execute,
    Finish,
    Header,
    Kind,
    SendTo,
    Status,
    StreamCredit,
)

__all__ = [
    "BODY",
    "EPOCH",
    "INCARNATION",
    "MS",
    "PEER",
    "SESSION",
    "TIMING",
    "ask",
    "callee",
    "caller",
    "reply",
    "said",
    "words",
]

MS = 1_000_000
SESSION = b"session-16-bytes"
EPOCH = 3
INCARNATION = 2 << 48 | 99
PEER = b"peer!"
BODY = (b"body",)
TIMING = Timing(
    probe_first=100 * MS, probe_received=500 * MS, probe_max=2_000 * MS, cancel_grace=100 * MS, stop_grace=50 * MS,
    probe_least=None, jitter=0.0,
)  # fmt: skip


def caller(*, connected: bool = True, lane: str = "main", **options) -> CallerLane:
    """Return a caller's lane, connected to a callee that has seen nothing."""
    machine = CallerLane(SESSION, EPOCH, INCARNATION, lane, timing=TIMING, **options)
    if connected:
        machine.on_connected(0, 0)
    return machine


def callee(*, welcomed: bool = True, lanes: dict[str, int] | None = None, **options) -> Callee:
    """Return a callee that has welcomed the session."""
    machine = Callee(INCARNATION, lanes or {"main": 1, "ctl": 2}, **options)
    if welcomed:
        machine.hello(Header(Kind.HELLO, SESSION, EPOCH, INCARNATION, "main"), 0)
    return machine


def reply(kind: Kind, seq: int, status: Status = Status.NONE, *, calls: int = 1, floor: int = 0, **fields) -> Header:
    """Return a header of the callee."""
    return Header(kind, SESSION, EPOCH, INCARNATION, "main", seq, calls, floor=floor, status=status)._replace(**fields)


def ask(machine: Callee, kind: Kind, seq: int, *, now: int = 0, body=BODY, peer: bytes = PEER, **fields) -> list[str]:
    """Hand a message of the caller to a callee and return the words of its effects."""
    header = Header(kind, SESSION, EPOCH, INCARNATION, "main", seq)._replace(**fields)
    effects = machine.receive(header, body if kind is Kind.REQ else (), peer, now)
    machine.validate()
    return words(effects)


def said(machine: Callee, seq: int, kind: Kind = Kind.RESULT, status: Status = Status.OK, **options) -> list[str]:
    """Tell a callee that a call ended and return the words of its effects."""
    lane = options.pop("lane", "main")
    effects = machine.finished(SESSION, lane, seq, kind, status, (b"result",), options.pop("now", 0), **options)
    machine.validate()
    return words(effects)


def words(effects: Iterable[Effect]) -> list[str]:
    """Return a phrase per effect, such as ``REQ 0+2``, ``NACK GAP 1``, ``run 0``, ``finish 0 OK``."""
    return [_word(effect) for effect in effects]


def _word(effect: Effect) -> str:
    if isinstance(effect, SendTo):
        header = effect.header
        status = f" {Status(header.status).name}" if header.status else ""
        number = f" #{header.floor}" if header.kind in (Kind.CHUNK, Kind.ACK) else ""
        return f"{Kind(header.kind).name}{status} {_span(header.seq, header.calls)}{number}"
    if isinstance(effect, Finish):
        return f"finish {effect.seq} {effect.outcome.kind.value} {effect.outcome.reason}".rstrip()
    if isinstance(effect, Execute):
        return f"run {_span(effect.seq, effect.calls)}"
    if isinstance(effect, CancelRunning):
        return f"stop {effect.seq}"
    if isinstance(effect, StreamCredit):
        return f"credit {effect.seq} #{effect.acked}"
    assert isinstance(effect, Chunk)
    return f"item {effect.seq} #{effect.number}"


def _span(seq: int, calls: int) -> str:
    return f"{seq}" if calls == 1 else f"{seq}+{calls}"
