"""One trace event: the typed fast path for good lines, and the repairs for the others.

``args`` stay undecoded bytes on the fast path. What cannot be decoded that way goes through ``Repairer``, which
keeps all that has a meaning, and counts what it changed or dropped.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np

from traceview.problems import Problems

__all__ = [
    "BAD_JSON",
    "MAX_DEPTH",
    "NO_ARGS",
    "PHASES",
    "Event",
    "Repairer",
    "args_of",
    "call_of",
    "decode_event",
    "decode_events",
    "decode_lines",
    "encode_args",
    "encode_event",
    "encode_events",
    "encode_lines",
    "exact_float",
    "has_long_number",
    "one_line",
]

NO_ARGS: Final = msgspec.Raw(b"")
PHASES: Final = frozenset("XBEiIMCbensftSTpFPNODRcvV(,)")
"""The phases of the Chrome trace format."""

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_MAX_RESCANS: Final = 8
_MANY_IDS: Final = 20_000
"""Textual pids and tids in one file, beyond which all others are one."""

_LONG_NUMBER: Final = 17


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """One event. ``ts`` and ``dur`` in microseconds; ``track`` as in ``docs/reference/trace-format.md``."""

    name: str = ""
    ph: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int = 0
    tid: int = 0
    cat: str = ""
    s: str = ""
    track: str = ""
    bind_id: int | str = ""
    flow_out: bool = False
    flow_in: bool = False
    id: int | str = ""
    id2: msgspec.Raw = NO_ARGS
    bp: str = ""
    args: msgspec.Raw = NO_ARGS


MAX_DEPTH: Final = 64
"""Args nested deeper than this are cut where they have to be taken apart."""

BAD_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for damage, or for values that are nested too deep."""

decode_event = msgspec.json.Decoder(Event).decode
"""Decode one line; raises one of ``BAD_JSON`` for anything but a well-typed event object."""

decode_lines = msgspec.json.Decoder(Event).decode_lines
"""As ``decode_event`` for many lines at once."""

decode_events = msgspec.json.Decoder(list[Event]).decode
"""As ``decode_event`` for a JSON array."""

encode_event = msgspec.json.Encoder().encode
encode_events = encode_event

encode_lines = msgspec.json.Encoder().encode_lines
"""Encode events as lines, each with its newline."""

_decode_any = msgspec.json.Decoder().decode


def one_line(event: Event) -> bytes:
    """Return an event as one line with its newline; args may come from a document that is spread over many."""
    return encode_event(event).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


_DIGITS: Final = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_MANY_BYTES: Final = 1 << 12
_HIGH_HALVES: Final = np.uint32(0xF0F0F0F0)
_OF_DIGITS: Final = np.uint32(0x30303030)


def has_long_number(data: bytes) -> bool:
    """Return whether a number of 20 digits or more stands here; viewers read those beyond 64 bits as 0."""
    if len(data) > _MANY_BYTES:  # 20 digits hold four words of four bytes in a row: without such there is none
        words = np.frombuffer(data, dtype=np.uint32, count=len(data) // 4)
        full = (words & _HIGH_HALVES) == _OF_DIGITS
        pairs = full[1:] & full[:-1]
        if not (pairs[2:] & pairs[:-2]).any():
            return False
    return data.translate(_DIGITS).find(b"0" * 20) >= 0


def encode_args(args: Any) -> msgspec.Raw:
    """Return ``args`` as strict JSON bytes; empty for an empty mapping."""
    return msgspec.Raw(encode_event(_plain(args))) if args else NO_ARGS


def args_of(event: Event) -> dict[str, Any]:
    """Return the args of an event, decoded; empty if it has none that are an object."""
    if event.args is NO_ARGS:
        return {}
    try:
        args = _decode_any(event.args)
    except BAD_JSON:
        try:
            args = json.loads(bytes(event.args))  # takes numbers too large for any type, as infinity
        except (ValueError, RecursionError):
            return {}
    return args if isinstance(args, dict) else {}


def call_of(data: bytes) -> bytes:
    """Return the text of ``call`` that encoded args name last, or an event with them; empty if none."""
    for mark in _CALL_MARKS:
        at = data.rfind(mark)
        if at >= 0:
            at += len(mark)
            return data[at : data.find(b'"', at)]
    return b""


_CALL_MARKS: Final = (b'"call":"', b'"call": "')


class Repairer:
    """Makes events of what the fast path refused; one per file.

    Args:
        path: Shown in problems.
        problems: Where every repair and drop is counted.
        base_us: Subtracted from all times, before they are rounded to floating point.
    """

    def __init__(self, path: str, problems: Problems, base_us: int = 0) -> None:
        self.base_us = base_us
        self._path = path
        self._problems = problems
        self._ids: dict[str, int] = {}
        self._constants = 0
        self._decoder = json.JSONDecoder(strict=False, parse_constant=self._constant, parse_float=exact_float)
        self.names: dict[int, str] = {}
        """Ids given to textual pids and tids, with their text."""

    def line(self, line: bytes, number: int, *, last: bool) -> list[Event]:
        """Return the events that can be saved from a line the fast path refused."""
        where = f"{self._path}:{number}"
        clean = line.strip(b"\0\r \t")
        if len(clean) < len(line.rstrip(b"\r")) and b"\0" in line:
            self._problems.add("ZT0107", "nul_bytes", f"{where} holds {line.count(0)} NUL bytes, skipped")
        if not clean:
            return []
        try:
            text = clean.decode()
        except UnicodeDecodeError:
            text = clean.decode("utf-8", "replace")
            self._problems.add("ZT0108", "bad_utf8", f"{where} is not valid UTF-8: replaced")
        try:
            found = [self._decoder.decode(text)]
        except (ValueError, RecursionError):
            found = self._rescan(text)
            cut = "cut off" if last else "cut off or not JSON"
            lost = f"{len(clean)} bytes ignored" if not found else f"{len(found)} later event kept"
            self._problems.add("ZT0107", "truncated_tail" if last else "bad_line", f"{where} {cut} ({lost})")
        events = [event for value in found if (event := self.value(value, where)) is not None]
        self._note_constants(where)
        return events

    def value(self, value: Any, where: str) -> Event | None:
        """Return the event a decoded value stands for, or None (counted) if it has no meaning."""
        if not isinstance(value, dict):
            self._problems.add("ZT0107", "not_an_object", f"{where} is not a JSON object, skipped")
            return None
        phase = value.get("ph")
        if not isinstance(phase, str) or phase not in PHASES:
            self._drop("no_phase" if phase is None else "unknown_phase", where)
            return None
        ts = self._number(value.get("ts"), "ts", where)
        if ts is None and phase != "M":
            self._drop("no_ts", where)
            return None
        event = Event(name=_text(value.get("name", "")), ph=phase, ts=ts, cat=_text(value.get("cat", "")))
        event.dur = self._number(value.get("dur"), "dur", where) if phase == "X" else None
        event.pid, event.tid = self.identity(value.get("pid", 0)), self.identity(value.get("tid", 0))
        for key in ("s", "track", "bp"):
            if isinstance(value.get(key), str):
                setattr(event, key, value[key])
        for key in ("id", "bind_id"):
            if isinstance(value.get(key), int | str) and value[key] is not True:
                setattr(event, key, value[key])
        event.flow_out, event.flow_in = value.get("flow_out") is True, value.get("flow_in") is True
        if isinstance(value.get("id2"), dict):
            event.id2 = encode_args(value["id2"])
        args = value.get("args")
        event.args = encode_args(args if isinstance(args, dict) or args is None else {"value": args})
        return event

    def identity(self, value: Any) -> int:
        """Return a pid or tid as a number; texts such as ``cuda:0`` get numbers of their own, kept in ``names``."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        text = _text(value) if len(self._ids) < _MANY_IDS or value in self._ids else "more"
        number = self._ids.setdefault(text, -1 - len(self._ids))
        self.names[number] = text
        return number

    def _rescan(self, text: str) -> list[Any]:
        """Find a whole object behind a torn one: a crash tore a line and a restarted process went on in it."""
        at = 0
        for _ in range(_MAX_RESCANS):
            at = text.find('{"', at + 1)
            if at < 0:
                return []
            try:
                value, end = self._decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and "ph" in value and not text[end:].strip():
                return [value]
        return []

    def _number(self, value: Any, key: str, where: str) -> float | None:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
            self._problems.add("ZT0108", f"text_{key}", f"{where} has {key} as text: read as a number")
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            return None
        try:
            number = float(value - self.base_us) if key == "ts" and self.base_us else float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None

    def _drop(self, kind: str, where: str) -> None:
        self._problems.add("ZT0109", kind, f"{where} dropped: {kind.replace('_', ' ')}")

    def _constant(self, _name: str) -> None:
        self._constants += 1

    def _note_constants(self, where: str) -> None:
        if self._constants:
            self._problems.add("ZT0108", "nan", f"{where} holds NaN or Infinity: null instead", self._constants)
            self._constants = 0


def exact_float(text: str) -> float | Decimal:
    """Return a JSON number with fraction; as Decimal where floating point would lose digits that times have."""
    return float(text) if len(text) < _LONG_NUMBER else Decimal(text)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {_text(k): _plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, depth - 1) for v in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        return str(value)
    return value
