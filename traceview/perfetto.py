"""The native Perfetto format: trace packets in protobuf, encoded by hand because only a few messages are needed.

Field numbers are those of Perfetto's ``trace_packet.proto`` and ``track_event.proto``; a test decodes the output with
the published message classes. One packet sequence per process; names, categories and argument names are interned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from traceview.arrows import arrow_number
from traceview.event import MAX_DEPTH, NO_ARGS, Event, args_of

__all__ = ["PerfettoEncoder", "process_packet", "thread_packet", "varint"]

_PROCESS_UUID: Final = 1 << 40
_EXTRA_UUID: Final = 2 << 40
_MAX_NAMES: Final = 20_000
_MAX_CACHED: Final = 20_000
_BEGIN, _END, _INSTANT, _COUNTER = b"\x48\x01", b"\x48\x02", b"\x48\x03", b"\x48\x04"  # TrackEvent.type
_NEEDS_STATE: Final = b"\x68\x02"  # TracePacket.sequence_flags
_CLEARED: Final = b"\x68\x01"


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

    __slots__ = ("cats", "extra", "flags", "keys", "mark", "names", "new", "opened", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mark = b"\x50" + varint(pid)  # trusted_packet_sequence_id
        self.flags = _CLEARED
        self.names: dict[str, bytes] = {}
        self.cats: dict[str, bytes] = {"": b""}
        self.keys: dict[str, bytes] = {}
        self.new = b""
        self.extra: dict[tuple[str, str], bytes] = {}
        self.opened: dict[bytes, int] = {}  # async track -> spans open on it

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

    __slots__ = ("begin", "end", "end_size", "instant", "stack")

    def __init__(self, tid: int, sequence: _Sequence) -> None:
        track = b"\x58" + varint(tid)
        event = _END + track
        self.begin, self.instant = _BEGIN + track, _INSTANT + track
        self.end = sequence.mark + b"\x5a" + _SHORT[len(event)] + event
        self.end_size = len(self.end) + 1
        self.stack: list[tuple[int, bytes]] = []


class PerfettoEncoder:
    """Turns placed events, in order of time per row, into packets; one encoder per part of the output."""

    several_arrows: Final = True

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._rows: dict[int, _Row] = {}
        self._args: dict[tuple[int, bytes], bytes] = {}
        self.dropped = 0

    def encode(
        self, events: list[Event], starts: list[int], ends: list[int], more: dict[int, list[tuple[int, bool, bool]]]
    ) -> bytes:
        """Return the packets of events whose ``pid`` and ``tid`` are those of the output; times in nanoseconds."""
        stamps, width = _stamps(starts)
        end_stamps, end_width = _stamps(ends)
        out: list[bytes] = []
        put = out.append
        sequence = None
        for at, event in enumerate(events):
            if sequence is None or sequence.pid != event.pid:
                sequence = self._sequence(event.pid)
            stamp = stamps[at * width : at * width + width]
            if event.ph != "X":
                self._other(event, sequence, stamp, out)
                continue
            row = self._rows.get(event.tid) or self._row(event.tid, sequence)
            stack = row.stack
            start = starts[at]
            while stack and stack[-1][0] <= start:
                put(stack.pop()[1])
            stamp_of_end = end_stamps[at * end_width : at * end_width + end_width]
            size = end_width + row.end_size
            stack.append((ends[at], b"\x0a" + _SHORT[size] + b"\x40" + stamp_of_end + row.end))
            body = row.begin + (sequence.names.get(event.name) or sequence.name(event.name))
            cat = event.cat
            if cat:
                body += sequence.cats.get(cat) or sequence.category(cat)
            if event.args is not NO_ARGS:
                body += self._annotations(event, sequence)
            if event.bind_id != "":
                body += _flow(event.bind_id)
            if at in more:
                body += b"".join(_flow(number) for number, _, _ in more[at])
            put(self._whole(sequence, stamp, body))
        return b"".join(out)

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

    def _whole(self, sequence: _Sequence, stamp: bytes, event: bytes) -> bytes:
        body = b"\x40" + stamp + sequence.mark + sequence.flags
        sequence.flags = _NEEDS_STATE
        if sequence.new:
            body += _chunk(b"\x62", sequence.new)
            sequence.new = b""
        size = len(event)
        body += b"\x5a" + (_SHORT[size] if size < 1 << 14 else varint(size)) + event
        size = len(body)
        return b"\x0a" + (_SHORT[size] if size < 1 << 14 else varint(size)) + body

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

    def _other(self, event: Event, sequence: _Sequence, stamp: bytes, out: list[bytes]) -> None:
        phase = event.ph
        if phase == "C":
            for series, number in args_of(event).items():
                if isinstance(number, int | float):
                    track = self._extra(sequence, ("C", f"{event.name}\0{series}"), out, event.name, series)
                    out.append(self._whole(sequence, stamp, _COUNTER + track + b"\xe1\x02" + struct.pack("<d", number)))
        elif phase in "iI":
            row = self._rows.get(event.tid) or self._row(event.tid, sequence)
            self._named(event, sequence, stamp, row.instant, out)
        elif phase in "ben":
            track = self._extra(sequence, ("b", f"{event.cat}\0{bytes(event.id2)!r}"), out, event.name, None)
            count = sequence.opened.get(track, 0)
            if phase == "e":
                if count:
                    sequence.opened[track] = count - 1
                    out.append(self._whole(sequence, stamp, _END + track))
                else:
                    self.dropped += 1
                return
            if phase == "b":
                sequence.opened[track] = count + 1
            self._named(event, sequence, stamp, (_BEGIN if phase == "b" else _INSTANT) + track, out)
        else:
            self.dropped += 1

    def _named(self, event: Event, sequence: _Sequence, stamp: bytes, body: bytes, out: list[bytes]) -> None:
        body += sequence.names.get(event.name) or sequence.name(event.name)
        if event.cat:
            body += sequence.cats.get(event.cat) or sequence.category(event.cat)
        if event.args is not NO_ARGS:
            body += self._annotations(event, sequence)
        out.append(self._whole(sequence, stamp, body))

    def _extra(
        self, sequence: _Sequence, key: tuple[str, str], out: list[bytes], name: str, series: str | None
    ) -> bytes:
        """Return the field of a counter's or async track, announcing it at first use."""
        found = sequence.extra.get(key)
        if found is None:
            uuid = varint(_EXTRA_UUID + (sequence.pid << 20) + len(sequence.extra))
            shown = name if series in (None, "value") else f"{name} {series}"
            body = b"\x08" + uuid + b"\x28" + varint(_PROCESS_UUID + sequence.pid) + _text(b"\x12", shown)
            if series is not None:
                body += b"\x42\x00"  # an empty CounterDescriptor
            out.append(_packet(_chunk(b"\xe2\x03", body)))
            found = sequence.extra[key] = b"\x58" + uuid
        return found


def _stamps(starts: Sequence[int]) -> tuple[bytes, int]:
    """Return all times as varints of one width: protobuf allows leading zero groups, and numpy makes them at once."""
    times = np.maximum(np.asarray(starts, dtype=np.int64), 0)
    top = int(times.max()) if len(times) else 0
    width = max(1, -(-top.bit_length() // 7))
    shifts = np.arange(width, dtype=np.int64) * 7
    groups = ((times[:, None] >> shifts) & 0x7F).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups.tobytes(), width


def _flow(bind_id: int | str) -> bytes:
    """Return an arrow's end; both are alike: one said to be the last is lost if a doubtful clock puts it first."""
    try:
        number = int(bind_id, 0) if isinstance(bind_id, str) else bind_id
    except ValueError:
        number = arrow_number(str(bind_id))
    packed = struct.pack("<Q", number & 0xFFFFFFFFFFFFFFFF)
    return b"\xf9\x02" + packed  # flow_ids


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
