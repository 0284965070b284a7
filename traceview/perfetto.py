"""The native Perfetto format: trace packets in protobuf, encoded by hand because only a few messages are needed.

Field numbers are those of Perfetto's ``trace_packet.proto`` and ``track_event.proto``; a test decodes the output with
the published message classes. One packet sequence per process; names, categories and argument names are interned.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.arrows import arrow_id
from traceview.encoder import Placed
from traceview.event import MAX_DEPTH, NO_ARGS, Event, args_of, call_of

__all__ = ["PerfettoEncoder", "process_packet", "thread_packet", "varint"]

_PROCESS_UUID: Final = 1 << 40
_EXTRA_UUID: Final = 2 << 40
_MAX_NAMES: Final = 20_000
_MAX_CACHED: Final = 20_000
_BEGIN, _END, _INSTANT, _COUNTER = b"\x48\x01", b"\x48\x02", b"\x48\x03", b"\x48\x04"  # TrackEvent.type
_NEEDS_STATE: Final = b"\x68\x02"  # TracePacket.sequence_flags
_CLEARED: Final = b"\x68\x01"

Ints = NDArray[np.int64]


def varint(number: int) -> bytes:
    """Return an unsigned integer in base 128, least significant group first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT: Final = [varint(n) for n in range(1 << 14)]


def _chunk(tag: bytes, body: bytes) -> bytes:
    """Return a length-delimited field."""
    size = len(body)
    return tag + (_SHORT[size] if size < 1 << 14 else varint(size)) + body


def _text(tag: bytes, text: str) -> bytes:
    return _chunk(tag, text.encode("utf-8", "replace"))


def _packet(body: bytes) -> bytes:
    return _chunk(b"\x0a", body)


def process_packet(pid: int, name: str, rank: int) -> bytes:
    """Return the descriptor of a process; processes are shown in order of ``rank``."""
    process = b"\x08" + varint(pid) + _text(b"\x32", name)
    body = b"\x08" + varint(_PROCESS_UUID + pid) + _chunk(b"\x1a", process) + b"\x60" + varint(rank)
    return _packet(_chunk(b"\xe2\x03", body))


def thread_packet(pid: int, tid: int, name: str, rank: int) -> bytes:
    """Return the descriptor of one row of a process."""
    thread = b"\x08" + varint(pid) + b"\x10" + varint(tid) + _text(b"\x2a", name)
    body = b"\x08" + varint(tid) + b"\x28" + varint(_PROCESS_UUID + pid) + _chunk(b"\x22", thread)
    return _packet(_chunk(b"\xe2\x03", body + b"\x60" + varint(rank)))


class _Sequence:
    """What was interned for one process, and what its packets share."""

    __slots__ = ("cats", "extra", "flags", "keys", "mark", "names", "new", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mark = b"\x50" + varint(pid)  # trusted_packet_sequence_id
        self.flags = _CLEARED
        self.names: dict[str, bytes] = {}
        self.cats: dict[str, bytes] = {"": b""}
        self.keys: dict[str, bytes] = {}
        self.new = b""
        self.extra: dict[tuple[str, str], bytes] = {}

    def name(self, text: str) -> bytes:
        """Return the field that names an event, interning the name."""
        if len(self.names) >= _MAX_NAMES:
            return _text(b"\xba\x01", text)
        iid = varint(len(self.names) + 1)
        self.new += _chunk(b"\x12", b"\x08" + iid + _text(b"\x12", text))
        found = self.names[text] = b"\x50" + iid
        return found

    def category(self, text: str) -> bytes:
        """Return the field of a category."""
        if len(self.cats) >= _MAX_NAMES:
            return _text(b"\xb2\x01", text)
        iid = varint(len(self.cats) + 1)
        self.new += _chunk(b"\x0a", b"\x08" + iid + _text(b"\x12", text))
        found = self.cats[text] = b"\x18" + iid
        return found

    def key(self, text: str) -> bytes:
        """Return the field that names an argument."""
        if len(self.keys) >= _MAX_NAMES:
            return _text(b"\x52", text)
        iid = varint(len(self.keys) + 1)
        self.new += _chunk(b"\x1a", b"\x08" + iid + _text(b"\x12", text))
        found = self.keys[text] = b"\x08" + iid
        return found


class _Row:
    """One thread of the output: its open spans, as (end, packet that ends it), outermost first."""

    __slots__ = ("begin", "end", "end_size", "head", "instant", "stack")

    def __init__(self, tid: int, sequence: _Sequence) -> None:
        track = b"\x58" + varint(tid)
        event = _END + track
        self.begin, self.instant = _BEGIN + track, _INSTANT + track
        self.head = sequence.mark + _NEEDS_STATE + b"\x5a"
        self.end = sequence.mark + b"\x5a" + _SHORT[len(event)] + event
        self.end_size = len(self.end) + 1
        self.stack: list[tuple[int, bytes]] = []


_SPAN, _CALL, _MARK, _WHOLE, _OPEN, _CLOSE = b"XYiPbe"
"""First byte of a body: a span, one with its call, an instant on a row, whole packets, begin or end of a phase."""


class PerfettoEncoder:
    """Turns events, in order of time per row, into packets; one encoder per part of the output.

    A body is what an event's packet holds but for its row and its arrows, behind a byte that says what it is. What
    bodies refer to (interned names, tracks) is written before the next events that are placed.
    """

    several_arrows: Final = True
    trim: Final = (0, 0)

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._rows: dict[int, _Row] = {}
        self._args: dict[tuple[int, bytes], bytes] = {}
        self._tracks: list[bytes] = []
        self._opened: dict[bytes, int] = {}  # track of async phases -> how many are open
        self.dropped = 0

    def bodies(
        self, events: list[Event], pids: Ints, starts: Ints, ends: Ints, spans: NDArray[np.bool_]
    ) -> tuple[bytes, NDArray[np.int32]]:
        """Return the bodies of events, one behind the other, and the size of each."""
        out = []
        sequence = self._sequence(int(pids[0]))
        for event, pid, start in zip(events, pids.tolist(), starts.tolist(), strict=True):
            if sequence.pid != pid:
                sequence = self._sequence(pid)
            if event.ph != "X":
                out.append(self._other(event, sequence, varint(start)))
                continue
            body = b"X"
            if event.args is not NO_ARGS and (call := call_of(bytes(event.args))) and len(call) < 1 << 8:
                body = b"Y" + bytes((len(call),)) + call
            body += self._named(event, sequence)
            if event.bind_id != "":
                body += _flow(arrow_id(event.bind_id))
            out.append(body)
        return b"".join(out), np.fromiter(map(len, out), dtype=np.int32, count=len(out))

    def place(self, placed: Placed) -> bytes:
        """Return the packets of events; times in nanoseconds."""
        stamps, width = _stamps(placed.starts)
        end_stamps, end_width = _stamps(placed.ends)
        out = self._announce()
        put = out.append
        rows = self._rows
        flows: dict[int, bytes] = {}
        for place, number in zip(placed.arrows.places, placed.arrows.numbers, strict=True):
            flows[place] = flows.get(place, b"") + _flow(number)
        times = zip(placed.starts.tolist(), placed.ends.tolist(), strict=True)
        names = zip(placed.pids.tolist(), placed.tids.tolist(), strict=True)
        for at, (body, (start, end), (pid, tid)) in enumerate(zip(placed.bodies, times, names, strict=True)):
            kind = body[0]
            if kind not in (_SPAN, _CALL, _MARK):
                self._put_other(kind, body, out)
                continue
            row = rows.get(tid) or self._row(tid, self._sequence(pid))
            if kind == _MARK:
                event = row.instant + body[1:]
            else:
                stack = row.stack
                while stack and stack[-1][0] <= start:
                    put(stack.pop()[1])
                stamp_of_end = end_stamps[at * end_width : at * end_width + end_width]
                size = end_width + row.end_size
                stack.append((end, b"\x0a" + _SHORT[size] + b"\x40" + stamp_of_end + row.end))
                event = row.begin + (body[1:] if kind == _SPAN else body[2 + body[1] :])
                if at in flows:
                    event += flows[at]
            size = len(event)
            packet = b"\x40" + stamps[at * width : at * width + width] + row.head
            packet += (_SHORT[size] if size < 1 << 14 else varint(size)) + event
            size = len(packet)
            put(b"\x0a" + (_SHORT[size] if size < 1 << 14 else varint(size)) + packet)
        return b"".join(out)

    def calls(self, bodies: list[bytes]) -> list[bytes]:
        """Return the call that the args of each span name, empty where there is none."""
        return [body[2 : 2 + body[1]] if body[0] == _CALL else b"" for body in bodies]

    def finish(self) -> bytes:
        """Return the ends of all spans that are still open."""
        out = []
        for row in self._rows.values():
            while row.stack:
                out.append(row.stack.pop()[1])
        return b"".join(out)

    # -- parts of a packet -----------------------------------------------------------------------------------------

    def _sequence(self, pid: int) -> _Sequence:
        found = self._sequences.get(pid)
        if found is None:
            found = self._sequences[pid] = _Sequence(pid)
        return found

    def _row(self, tid: int, sequence: _Sequence) -> _Row:
        row = self._rows[tid] = _Row(tid, sequence)
        return row

    def _announce(self) -> list[bytes]:
        """Return what is new since the last time: tracks, and interned names by sequence."""
        out, self._tracks = self._tracks, []
        for sequence in self._sequences.values():
            if sequence.new or sequence.flags == _CLEARED:
                out.append(_packet(sequence.mark + sequence.flags + _chunk(b"\x62", sequence.new)))
                sequence.flags, sequence.new = _NEEDS_STATE, b""
        return out

    def _annotations(self, event: Event, sequence: _Sequence) -> bytes:
        raw = bytes(event.args)
        key = (sequence.pid, raw)
        found = self._args.get(key)
        if found is None:
            keys = sequence.keys
            parts = []
            for name, value in args_of(event).items():
                body = keys.get(name) or sequence.key(name)
                kind = type(value)
                if kind is str:
                    text = value.encode("utf-8", "replace")
                    body += b"\x32" + (_SHORT[len(text)] if len(text) < 1 << 14 else varint(len(text))) + text
                elif kind is int and 0 <= value < 1 << 14:
                    body += b"\x20" + _SHORT[value]
                else:
                    body += _value(value)
                parts.append(b"\x22" + (_SHORT[len(body)] if len(body) < 1 << 14 else varint(len(body))) + body)
            found = b"".join(parts)
            if len(self._args) >= _MAX_CACHED:
                self._args.clear()
            self._args[key] = found
        return found

    def _other(self, event: Event, sequence: _Sequence, stamp: bytes) -> bytes:
        phase = event.ph
        if phase == "C":
            packets = []
            for series, number in args_of(event).items():
                if isinstance(number, int | float):
                    track = self._extra(sequence, ("C", f"{event.name}\0{series}"), event.name, series)
                    body = _COUNTER + track + b"\xe1\x02" + struct.pack("<d", number)
                    packets.append(_whole(sequence, stamp, body))
            return b"P" + b"".join(packets)
        if phase in "iI":
            return b"i" + self._named(event, sequence)
        if phase in "ben":
            track = self._extra(sequence, ("b", f"{event.cat}\0{bytes(event.id2)!r}"), event.name, None)
            mark = bytes((len(track),)) + track
            if phase == "e":
                return b"e" + mark + _whole(sequence, stamp, _END + track)
            body = (_BEGIN if phase == "b" else _INSTANT) + track + self._named(event, sequence)
            return (b"b" + mark if phase == "b" else b"P") + _whole(sequence, stamp, body)
        self.dropped += 1
        return b"P"

    def _put_other(self, kind: int, body: bytes, out: list[bytes]) -> None:
        if kind == _WHOLE:
            out.append(body[1:])
            return
        track, packet = body[2 : 2 + body[1]], body[2 + body[1] :]
        count = self._opened.get(track, 0)
        if kind == _CLOSE and not count:
            self.dropped += 1
            return
        self._opened[track] = count + (1 if kind == _OPEN else -1)
        out.append(packet)

    def _named(self, event: Event, sequence: _Sequence) -> bytes:
        body = sequence.names.get(event.name) or sequence.name(event.name)
        if event.cat:
            body += sequence.cats.get(event.cat) or sequence.category(event.cat)
        if event.args is not NO_ARGS:
            body += self._annotations(event, sequence)
        return body

    def _extra(self, sequence: _Sequence, key: tuple[str, str], name: str, series: str | None) -> bytes:
        """Return the field of a counter's or async track, which is announced at first use."""
        found = sequence.extra.get(key)
        if found is None:
            uuid = varint(_EXTRA_UUID + (sequence.pid << 20) + len(sequence.extra))
            shown = name if series in (None, "value") else f"{name} {series}"
            body = b"\x08" + uuid + b"\x28" + varint(_PROCESS_UUID + sequence.pid) + _text(b"\x12", shown)
            if series is not None:
                body += b"\x42\x00"  # an empty CounterDescriptor
            self._tracks.append(_packet(_chunk(b"\xe2\x03", body)))
            found = sequence.extra[key] = b"\x58" + uuid
        return found


def _whole(sequence: _Sequence, stamp: bytes, event: bytes) -> bytes:
    return _packet(b"\x40" + stamp + sequence.mark + _NEEDS_STATE + _chunk(b"\x5a", event))


def _stamps(times: Ints) -> tuple[bytes, int]:
    """Return all times as varints of one width: protobuf allows leading zero groups, and numpy makes them at once."""
    times = np.maximum(times, 0)
    top = int(times.max()) if len(times) else 0
    width = max(1, -(-top.bit_length() // 7))
    shifts = np.arange(width, dtype=np.int64) * 7
    groups = ((times[:, None] >> shifts) & 0x7F).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups.tobytes(), width


def _flow(number: int) -> bytes:
    """Return an arrow's end; both are alike: one said to be the last is lost if a doubtful clock puts it first."""
    return b"\xf9\x02" + struct.pack("<Q", number)  # flow_ids


def _value(value: Any, depth: int = MAX_DEPTH) -> bytes:
    """Return the value fields of a DebugAnnotation."""
    kind = type(value)
    if kind is str:
        return _text(b"\x32", value)
    if kind is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if kind is int:
        if 0 <= value < 1 << 63:
            return b"\x20" + varint(value)
        if -(1 << 63) <= value < 0:
            return b"\x20" + varint(value + (1 << 64))
        return b"\x18" + varint(value) if 0 <= value < 1 << 64 else _text(b"\x32", str(value))
    if kind is float:
        return b"\x29" + struct.pack("<d", value)
    if kind in (dict, list) and not depth:
        return _text(b"\x32", "…")
    if kind is dict:
        return b"".join(_chunk(b"\x5a", _text(b"\x52", str(k)) + _value(v, depth - 1)) for k, v in value.items())
    if kind is list:
        return b"".join(_chunk(b"\x62", _value(v, depth - 1)) for v in value)
    return _text(b"\x32", "null")
