"""Records to trace events: what one ring tuple becomes in the file (``docs/reference/trace-format.md``).

Pure but for the thread names it is told; one ``Expander`` per file, used by its writer's flush thread alone.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import msgspec

from zbus.trace.tracer import CLIENT, COUNTER, FLOW, INSTANT, SERVER, SPAN, Record

__all__ = ["ROW_BASE", "Event", "Expander", "bus_flow_ids", "call_id", "encode_event", "encode_events", "user_flow_id"]

ROW_BASE: Final = 10_000_000
"""Thread ids from here on are rows of the bus, not threads: above every Linux thread id (at most 2^22)."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line of a trace file: the keys of the Chrome trace format, plus ``track``.

    ``ts`` and ``dur`` are microseconds with nanosecond decimals. Events of one thread with different ``track`` (a
    call, an asyncio task) never nest into one another.
    """

    name: str
    ph: str
    ts: float | None = None
    dur: float | None = None
    pid: int = 0
    tid: int = 0
    cat: str = ""
    s: str = ""
    track: str = ""
    bind_id: str = ""
    flow_out: bool = False
    flow_in: bool = False
    args: dict[str, Any] | None = None


_encoder = msgspec.json.Encoder(order=None)


def call_id(session: bytes, worker: str, incarnation: int, lane: str, seq: int) -> str:
    """Return the id of a call, equal on both sides and for every attempt: 16 hex digits."""
    return _hash(b"call", session, str(worker), incarnation, lane, seq)[:16]


def bus_flow_ids(  # as the records
    session: bytes, worker: str, incarnation: int, lane: str, seq: int, attempt: int
) -> tuple[str, str]:
    """Return the arrow ids (request, reply) of one attempt of a call, equal on both sides."""
    both = _hash(b"flow", session, str(worker), incarnation, lane, seq, attempt)
    return f"0x{both[:16]}", f"0x{both[16:]}"


def user_flow_id(run: str, key: str) -> str:
    """Return the arrow id of a ``flow`` key, equal in all processes of one run."""
    return f"0x{_hash(b'user', run.encode('utf-8', 'replace'), key)[:16]}"


def _hash(kind: bytes, *parts: bytes | str | int) -> str:
    text = b"\0".join(p if isinstance(p, bytes) else str(p).encode("utf-8", "replace") for p in (kind, *parts))
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def encode_events(events: list[Event]) -> bytes:
    """Return the events as strict JSON lines (NaN and infinities as null); a bad one costs only its args."""
    try:
        return _encoder.encode_lines(events)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b"".join(encode_event(event) for event in events)


def encode_event(event: Event) -> bytes:
    """Return one event as a JSON line, with values JSON cannot carry as text."""
    try:
        return _encoder.encode(event) + b"\n"
    except (ValueError, TypeError, OverflowError, RecursionError):
        event.name = _text(event.name)
        event.cat = _text(event.cat)
        event.track = _text(event.track)
        event.args = {_text(str(k)): _plain(v) for k, v in (event.args or {}).items()}
        return _encoder.encode(event) + b"\n"


def _text(text: str) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class Expander:
    """Turns records into events for one file.

    Args:
        pid: Process id written into every event.
        epoch_ns: This process's monotonic clock at ts 0.
        run: Name of the run, mixed into the ids of user flows.
    """

    def __init__(self, pid: int, epoch_ns: int, run: str) -> None:
        self._pid = pid
        self._epoch = epoch_ns
        self._run = run
        self._rows: dict[str, int] = {}

    def ts(self, at_ns: int) -> float:
        """Return microseconds since the run epoch."""
        return (at_ns - self._epoch) / 1000

    def expand(self, record: Record, tid: int, out: list[Event]) -> None:
        """Append the events of ``record``, recorded by thread ``tid``, to ``out``; an enclosing span comes first."""
        kind = record[0]
        if kind == SPAN:
            _, name, cat, start, end, args, task = record
            ts = (start - self._epoch) / 1000
            dur = (end - start) / 1000
            out.append(Event(name, "X", ts, dur, self._pid, tid, cat, track=task or "", args=args or None))
        elif kind == CLIENT:
            self._client(record, out)
        elif kind == SERVER:
            self._server(record, tid, out)
        elif kind == INSTANT:
            _, name, cat, at, scope, args, task = record
            ts = self.ts(at)
            out.append(Event(name, "i", ts, None, self._pid, tid, cat, scope, task or "", args=args or None))
        elif kind == COUNTER:
            _, name, at, series = record
            numbers = {k: v for k, v in series.items() if _is_number(v)}
            if numbers:
                out.append(Event(name, "C", self.ts(at), None, self._pid, tid, args=numbers))
        elif kind == FLOW:
            _, key, direction, at, task = record
            event = Event(f"flow {key}", "X", self.ts(at), 0.0, self._pid, tid, "flow", track=task or "")
            event.bind_id = user_flow_id(self._run, key)
            event.flow_out, event.flow_in = direction == "out", direction != "out"
            out.append(event)

    def _row(self, name: str, out: list[Event]) -> int:
        """Return the thread id of a row of bus spans, announcing it at first use."""
        tid = self._rows.get(name)
        if tid is None:
            tid = self._rows[name] = ROW_BASE + len(self._rows)
            out.append(Event("thread_name", "M", pid=self._pid, tid=tid, args={"name": name}))
            out.append(Event("thread_sort_index", "M", pid=self._pid, tid=tid, args={"sort_index": tid}))
        return tid

    def _span(self, out: list[Event], label: str, times: tuple[int, int], tid: int, track: str) -> Event:
        start, end = times
        event = Event(label, "X", self.ts(start), max(0, end - start) / 1000, self._pid, tid, "rpc", track=track)
        out.append(event)
        return event

    def _client(self, record: Record, out: list[Event]) -> None:
        _, session, worker, incarnation, lane, seq, attempt, method, *rest = record
        submit, encoded, sent, reply, decoded, bytes_out, bytes_in, outcome = rest
        tid = self._row(f"→ {worker} {lane}", out)
        call = call_id(session, worker, incarnation, lane, seq)
        whole = self._span(out, f"call {method}", (submit, decoded), tid, call)
        whole.args = {"kind": "client", "call": call, "method": method, "worker": str(worker), "lane": lane, "seq": seq}
        whole.args |= {"attempt": attempt, "outcome": outcome, "bytes_out": bytes_out, "bytes_in": bytes_in}
        request, answer = bus_flow_ids(session, worker, incarnation, lane, seq, attempt)
        if encoded:
            part = self._span(out, "encode", (submit, encoded), tid, call)
            part.args = {"kind": "encode", "call": call}
        if encoded and sent:
            part = self._span(out, "send", (encoded, sent), tid, call)
            part.args = {"kind": "send", "call": call}
        if sent:
            part = self._span(out, "wire", (sent, reply or decoded), tid, call)
            part.args = {"kind": "wire", "call": call, "attempt": attempt}
            part.bind_id, part.flow_out = request, True
        if reply:
            part = self._span(out, "decode", (reply, decoded), tid, call)
            part.args = {"kind": "return", "call": call, "attempt": attempt}
            part.bind_id, part.flow_in = answer, True

    def _server(self, record: Record, tid: int, out: list[Event]) -> None:
        _, session, worker, incarnation, lane, seq, attempt, method, *rest = record
        arrived, start, decoded, run_end, encoded, outcome, task = rest
        call = call_id(session, worker, incarnation, lane, seq)
        request, answer = bus_flow_ids(session, worker, incarnation, lane, seq, attempt)
        end = start or decoded or run_end or encoded or arrived
        queue = self._span(out, f"queue {method}", (arrived, end), self._row(f"queue {lane}", out), call)
        queue.args = {"kind": "queue", "call": call, "method": method, "worker": str(worker), "lane": lane, "seq": seq}
        queue.args |= {"attempt": attempt, "outcome": outcome}
        queue.bind_id, queue.flow_in = request, True
        track = task or ""
        if start and decoded:
            part = self._span(out, "decode", (start, decoded), tid, track)
            part.args = {"kind": "decode", "call": call}
        if decoded and run_end:
            part = self._span(out, f"run {method}", (decoded, run_end), tid, track)
            part.args = {"kind": "run", "call": call, "method": method, "attempt": attempt, "outcome": outcome}
        if encoded:
            part = self._span(out, "reply", (run_end or decoded or end, encoded), tid, track)
            part.args = {"kind": "reply", "call": call, "attempt": attempt}
            part.bind_id, part.flow_out = answer, True


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
