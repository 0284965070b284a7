"""Records to trace events: what one ring tuple becomes in the file (``docs/reference/trace-format.md``).

Pure but for the thread names it is told; one ``Expander`` per file, used by its writer's flush thread alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from zbus.trace.args import freeze
from zbus.trace.tracer import BATCH, CLIENT, COUNTER, FLOW, INSTANT, PROFILE, SENT, SERVER, SPAN, SPAN_FIELDS, Record

__all__ = [
    "ROW_BASE",
    "ArrowEnd",
    "Event",
    "Expander",
    "Instant",
    "bus_flow_ids",
    "call_id",
    "encode_event",
    "encode_events",
    "plain_json",
    "row_id",
    "user_flow_id",
]

ROW_BASE: Final = 10_000_000
"""Thread ids from here on are rows, not threads: above every Linux thread id (at most 2^22)."""

_ROWS: Final = 1 << 24
_AT_ONCE_NS: Final = 1_000_000


class Event(msgspec.Struct, omit_defaults=True, gc=False):  # no cycles; a collector that visits them costs threefold
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
    track: str = ""
    args: dict[str, Any] | None = None


class Instant(Event, omit_defaults=True, gc=False):
    """A moment; ``s`` is its scope."""

    s: str = ""


class ArrowEnd(Event, omit_defaults=True, gc=False):
    """A span at which an arrow leaves or arrives."""

    bind_id: str = ""
    flow_out: bool = False
    flow_in: bool = False


_LANES: Final = 4096

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


def row_id(name: str) -> int:
    """Return the thread id of a row: a hash of its name, so that all who write parts of one trace agree on it."""
    return ROW_BASE + int(_hash(b"row", name)[:12], 16) % _ROWS


def user_flow_id(run: str, key: str) -> str:
    """Return the arrow id of a ``flow`` key, equal in all processes of one run."""
    return f"0x{_hash(b'user', run.encode('utf-8', 'replace'), key)[:16]}"


def _hash(kind: bytes, *parts: bytes | str | int) -> str:
    digest: str = _blake2b()(_joined(kind, *parts), digest_size=16).hexdigest()
    return digest


def _joined(*parts: bytes | str | int) -> bytes:
    return b"\0".join(p if isinstance(p, bytes) else str(p).encode("utf-8", "replace") for p in parts)


def _blake2b() -> Any:
    import hashlib  # brings all of OpenSSL along: an agent never hashes, and should not pay for it

    return hashlib.blake2b


class _Lane:
    """What all calls of one lane to one worker share: its rows, and what their ids are hashes of, up to the seq."""

    __slots__ = ("_blake2b", "_call", "_flow", "caller_row", "queue_row", "worker")

    def __init__(self, session: bytes, worker: str, incarnation: int, lane: str) -> None:
        self.worker = worker
        self.caller_row = f"→ {worker} {lane}"
        self.queue_row = f"queue {lane}"
        self._call = _joined(b"call", session, worker, incarnation, lane, b"")
        self._flow = _joined(b"flow", session, worker, incarnation, lane, b"")
        self._blake2b = _blake2b()

    def call(self, seq: int) -> str:
        """Return ``call_id`` of a call of this lane."""
        digest: str = self._blake2b(self._call + str(seq).encode(), digest_size=16).hexdigest()
        return digest[:16]

    def flows(self, seq: int, attempt: int) -> tuple[str, str]:
        """Return ``bus_flow_ids`` of an attempt of a call of this lane."""
        both = self._blake2b(self._flow + f"{seq}\0{attempt}".encode(), digest_size=16).hexdigest()
        return f"0x{both[:16]}", f"0x{both[16:]}"


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
        event.args = plain_json(event.args or {})
        if isinstance(event, Instant):
            event.s = _text(event.s)
        return _encoder.encode(event) + b"\n"


def _text(value: object) -> str:
    text = value if isinstance(value, str) else str(freeze(value))
    return text.encode("utf-8", "backslashreplace").decode()


def plain_json(value: Any) -> Any:
    """Return a value as no encoder refuses it: lone surrogates become escapes, huge numbers texts.

    What is not frozen yet is frozen: ``Span.set`` on a span that has ended puts anything into args already recorded.
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    frozen = freeze(value)
    return _text(frozen) if isinstance(frozen, str) else frozen


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
        self._lanes: dict[tuple[bytes, str, int, str], _Lane] = {}

    def forget_names(self) -> None:
        """Announce every row anew: the lines that announced them may not have been written."""
        self._rows.clear()

    def ts(self, at_ns: int) -> float:
        """Return microseconds since the run epoch."""
        return (at_ns - self._epoch) / 1000

    def spans(self, fields: list[Any], tid: int) -> list[Event]:
        """Return the events of spans whose fields stand one after the other, as in ``Ring.spans``.

        Raises:
            Exception: One of them is no span.
        """
        epoch, pid = self._epoch, self._pid
        values = iter(fields)
        return [
            Event(name, "X", (start - epoch) / 1000, (end - start) / 1000, pid, tid, cat, task or "", args or None)
            for name, cat, start, end, args, task in zip(*[values] * SPAN_FIELDS, strict=False)
        ]

    def expand(self, record: Record, tid: int, out: list[Event]) -> None:
        """Append the events of ``record``, recorded by thread ``tid``, to ``out``; an enclosing span comes first.

        Raises:
            ValueError: It is no record (or another exception; ``out`` may then hold a part of it).
        """
        kind = record[0]
        if kind == SPAN:
            out += self.spans(list(record[1:]), tid)
        elif kind == CLIENT:
            self._client(record, out)
        elif kind == SERVER:
            self._server(record, tid, out)
        elif kind == INSTANT:
            _, name, cat, at, scope, args, task = record
            ts = self.ts(at)
            out.append(Instant(name, "i", ts, None, self._pid, tid, cat, task or "", args or None, scope))
        elif kind == COUNTER:
            _, name, at, series = record
            numbers = {k: v for k, v in series.items() if _is_number(v)}
            if numbers:
                out.append(Event(name, "C", self.ts(at), None, self._pid, tid, args=numbers))
        elif kind == FLOW:
            _, key, direction, at, task = record
            end = ArrowEnd(f"flow {key}", "X", self.ts(at), 0.0, self._pid, tid, "flow", track=task or "")
            end.bind_id = user_flow_id(self._run, key)
            end.flow_out, end.flow_in = direction == "out", direction != "out"
            out.append(end)
        elif kind == SENT:
            self._sent(record, out)
        elif kind == BATCH:
            self._batch(record, tid, out)
        elif kind == PROFILE:
            self._profile(record, out)
        else:
            msg = f"unknown kind of record {kind!r}"
            raise ValueError(msg)

    def _row(self, name: str, out: list[Event]) -> int:
        """Return the thread id of a row of bus spans, announcing it at first use."""
        tid = self._rows.get(name)
        if tid is None:
            tid = self._rows[name] = row_id(name)
            out.append(Event("thread_name", "M", pid=self._pid, tid=tid, args={"name": name}))
            out.append(Event("thread_sort_index", "M", pid=self._pid, tid=tid, args={"sort_index": ROW_BASE}))
        return tid

    def _lane(self, session: bytes, worker: Any, incarnation: int, lane: str) -> _Lane:
        key = session, worker if type(worker) is str else _worker(worker), incarnation, lane
        found = self._lanes.get(key)
        if found is None:
            if len(self._lanes) >= _LANES:
                self._lanes.clear()
            found = self._lanes[key] = _Lane(*key)
        return found

    def _span(  # hot path
        self, out: list[Event], label: str, start: int, end: int, tid: int, track: str, args: dict[str, Any]
    ) -> None:
        ts, dur = (start - self._epoch) / 1000, (end - start if end > start else 0) / 1000
        out.append(Event(label, "X", ts, dur, self._pid, tid, "rpc", track, args))

    def _leave(  # as _span
        self, out: list[Event], label: str, start: int, end: int, tid: int, track: str, args: dict[str, Any], arrow: str
    ) -> None:
        ts, dur = (start - self._epoch) / 1000, (end - start if end > start else 0) / 1000
        out.append(ArrowEnd(label, "X", ts, dur, self._pid, tid, "rpc", track, args, arrow, flow_out=True))

    def _arrive(  # as _span
        self, out: list[Event], label: str, start: int, end: int, tid: int, track: str, args: dict[str, Any], arrow: str
    ) -> None:
        ts, dur = (start - self._epoch) / 1000, (end - start if end > start else 0) / 1000
        out.append(ArrowEnd(label, "X", ts, dur, self._pid, tid, "rpc", track, args, arrow, flow_in=True))

    def _client(self, record: Record, out: list[Event]) -> None:
        _, session, worker, incarnation, lane, seq, attempt, method, *rest = record
        submit, encoded, sent, reply, decoded, bytes_out, bytes_in, outcome, batch, attempts = rest
        link = self._lane(session, worker, incarnation, lane)
        tid = self._row(link.caller_row, out)
        call = link.call(seq)
        whole = {
            "kind": "client", "call": call, "method": method, "worker": link.worker, "lane": lane, "seq": seq,
            "attempt": attempt, "outcome": outcome, "bytes_out": bytes_out, "bytes_in": bytes_in,
        }  # fmt: skip
        if batch:
            whole["batch"] = batch
        request, answer = link.flows(seq, attempt)
        first = attempt
        if attempts > 1:  # what left at t_sent was the first of them, whichever was answered
            whole["attempts"], first = attempts, 1
            request, _ = link.flows(seq, first)
        self._span(out, f"call {method}", submit, decoded, tid, call, whole)
        if encoded:
            self._span(out, "encode", submit, encoded, tid, call, {"kind": "encode", "call": call})
        if sent:
            # The arrow leaves where sending begins: the worker may have the request before the caller notes it as sent.
            wire = {"kind": "wire", "call": call, "attempt": attempt}
            if encoded:
                send = {"kind": "send", "call": call, "attempt": first}
                self._leave(out, "send", encoded, sent, tid, call, send, request)
                self._span(out, "wire", sent, reply or decoded, tid, call, wire)
            else:
                self._leave(out, "wire", sent, reply or decoded, tid, call, wire, request)
        if reply:
            taken = {"kind": "return", "call": call, "attempt": attempt}
            self._arrive(out, "decode", reply, decoded, tid, call, taken, answer)

    def _sent(self, record: Record, out: list[Event]) -> None:
        _, session, worker, incarnation, lane, seq, calls, attempt, at = record
        link = self._lane(session, worker, incarnation, lane)
        row = self._row(link.caller_row, out)
        for number in range(seq, seq + calls):
            call = link.call(number)
            args = {"kind": "sent", "call": call, "attempt": attempt}
            if attempt > 1:
                self._leave(out, "sent again", at, at, row, call, args, link.flows(number, attempt)[0])
            else:  # the arrow of the first attempt leaves from the call's own span
                self._span(out, "sent late", at, at, row, call, args)

    def _server(self, record: Record, tid: int, out: list[Event]) -> None:
        _, session, worker, incarnation, lane, seq, attempt, method, *rest = record
        arrived, start, decoded, run_end, encoded, outcome, sent, task = rest
        link = self._lane(session, worker, incarnation, lane)
        call = link.call(seq)
        request, answer = link.flows(seq, attempt)
        end = start or decoded or run_end or encoded or arrived
        row = self._row(link.queue_row, out)
        queue = {
            "kind": "queue", "call": call, "method": method, "worker": link.worker, "lane": lane, "seq": seq,
            "attempt": attempt, "outcome": outcome,
        }  # fmt: skip
        self._arrive(out, f"queue {method}", arrived, end, row, call, queue, request)
        track = task or ""
        if start and decoded:
            self._span(out, "decode", start, decoded, tid, track, {"kind": "decode", "call": call})
        if decoded and run_end:
            run = {
                "kind": "run", "call": call, "method": method, "attempt": attempt, "outcome": outcome, "lane": lane,
                "seq": seq,
            }  # fmt: skip
            self._span(out, f"run {method}", decoded, run_end, tid, track, run)
        begin = run_end or decoded or end
        if encoded and sent:
            args = {"kind": "encode_result", "call": call, "attempt": attempt}
            self._span(out, "encode", begin, encoded, tid, track, args)
            begin = encoded
        if encoded or sent:
            args = {"kind": "reply", "call": call, "attempt": attempt}
            self._leave(out, "reply", begin, sent or encoded, tid, track, args, answer)

    def _batch(self, record: Record, tid: int, out: list[Event]) -> None:
        _, method, batch, lane, members, calls, submit, done, merged, outcome, taken, decoded, task = record
        facts = {
            "kind": "batch", "batch": batch, "method": method, "lane": lane, "members": members, "calls": calls,
            "outcome": outcome,
        }  # fmt: skip
        # An answer that was taken long after it had come does not make the batch longer.
        end = done if taken - done > _AT_ONCE_NS else merged or done
        row = self._row(f"batches {lane}", out)
        self._span(out, f"batch {method}", submit, end, row, f"batch {batch}", facts)
        if taken and decoded:
            args = {"kind": "decode_results", "batch": batch}
            self._span(out, "decode", taken, decoded, tid, task or "", args)
        if merged:
            args = {"kind": "merge", "batch": batch}
            self._span(out, f"merge {method}", decoded or taken or done, merged, tid, task or "", args)

    def _profile(self, record: Record, out: list[Event]) -> None:
        _, row, events = record
        tid = self._row(row, out)
        for name, cat, start, end, args in events:
            out.append(
                Event(name, "X", self.ts(start), max(0, end - start) / 1000, self._pid, tid, cat, "", args or None)
            )


def _worker(name: Any) -> str:
    """Return a worker's name as text: role and rank may come as a pair."""
    return f"{name[0]}/{name[1]}" if isinstance(name, list | tuple) else str(name)


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
