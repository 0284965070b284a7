"""Requests and replies as both sides recorded them: when each was sent, arrived, was answered and received.

Of large traces only a part of the calls is taken, the same on both sides: told by the call's id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceview.align import MAX_US
from traceview.clockline import FAR_NS
from traceview.envelope import Limits
from traceview.event import BAD_JSON, NO_ARGS
from traceview.problems import Problems
from traceview.reader import Source, read_batches

__all__ = ["ANSWERED", "Pairs", "read_pairs"]

_CALLS_PER_FILE: Final = 1000
_LEAST_CALLS: Final = 20_000
"""Calls looked at, about: enough for a good offset every few seconds between any two."""

_MOST_CALLS: Final = 400_000
"""Calls kept of all files together, whatever their ids look like: 32 bytes of each side, and a few files' own books."""

_BYTES_PER_CALL: Final = 1000
_LONGEST_LINE: Final = 4 << 20
_READ: Final = 1 << 19
"""Bytes read at once, into the same place: larger pieces would not fit a processor's cache."""

_QUOTE: Final = ord('"')
_MARK: Final = b'"call":'
_UNKNOWN: Final = -(1 << 62)
_HEX: Final = 16
_ROUNDED_NS: Final = 4
_MOST_BITS: Final = 8
_MASK: Final = (1 << 63) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15

Ints = NDArray[np.int64]


class _Args(msgspec.Struct, gc=False):
    call: str = ""
    kind: str = ""
    attempt: int = 1
    outcome: str = ""
    status: str = ""


class _Line(msgspec.Struct, gc=False):
    name: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


_decode: Final = msgspec.json.Decoder(_Line).decode
_decode_lines: Final = msgspec.json.Decoder(_Line).decode_lines
_decode_args: Final = msgspec.json.Decoder(_Args).decode
ANSWERED: Final = ("", "ok", "OK", "APP_ERROR", "error")
"""Outcomes and states of a call that came with a reply."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Calls seen from both sides, a column each, sorted by caller and worker; times in ns on each file's own scale.

    Attributes:
        caller, worker: Numbers of the files.
        sent, received: By the caller; ``received`` is ``UNKNOWN`` where no reply came.
        arrived, answered: By the worker; ``answered`` is ``UNKNOWN`` where it did not get so far.
    """

    caller: Ints
    worker: Ints
    sent: Ints
    received: Ints
    arrived: Ints
    answered: Ints

    def __len__(self) -> int:
        return len(self.caller)

    def links(self) -> list[tuple[int, int]]:
        """Return the pairs of files, caller and worker, that have calls."""
        first = np.flatnonzero((np.diff(self.caller, prepend=-1) != 0) | (np.diff(self.worker, prepend=-1) != 0))
        return list(zip(self.caller[first].tolist(), self.worker[first].tolist(), strict=True))

    def _link(self, caller: int, worker: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return sent, received, arrived and answered of one link."""
        low, high = (int(np.searchsorted(self.caller, caller, side=side)) for side in ("left", "right"))
        mine = self.worker[low:high]
        first, last = (low + int(np.searchsorted(mine, worker, side=side)) for side in ("left", "right"))
        own = slice(first, last)
        return self.sent[own], self.received[own], self.arrived[own], self.answered[own]

    def firsts(self) -> dict[int, int]:
        """Return the earliest time of each file that has any."""
        found: dict[int, int] = {}
        for files, times in ((self.caller, self.sent), (self.worker, self.arrived)):
            for number in np.unique(files).tolist():
                first = int(times[files == number].min())
                found[number] = min(first, found.get(number, first))
        return found

    def limits(self, caller: int, worker: int, caller_ns: int, worker_ns: int) -> tuple[Limits, Limits]:
        """Return what the calls of one link say of the caller's clock minus the worker's, by either clock.

        Args:
            caller: Number of the file.
            worker: Number of the file.
            caller_ns: Added to the caller's times first.
            worker_ns: Added to the worker's times first.

        Returns:
            The offset caller minus worker at times of the worker, and worker minus caller at times of the caller.
        """
        sent, received, arrived, answered = self._link(caller, worker)
        back = (answered != _UNKNOWN) & (received != _UNKNOWN)
        there = np.concatenate([arrived, answered[back]]) + worker_ns
        here = np.concatenate([sent, received[back]]) + caller_ns
        most = np.arange(len(there)) >= len(sent)
        good = (np.abs(there) < FAR_NS) & (np.abs(here) < FAR_NS)
        there, here, most = there[good], here[good], most[good]
        return Limits(there, here - there, most), Limits(here, there - here, ~most)

    def backwards(self, moved: Sequence[Any]) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the links with calls that arrive before they are sent, or return before they are answered.

        Args:
            moved: For each file, what turns its times into those of the run.

        Returns:
            By link: how many such calls, and by how many ns at most.
        """
        found = {}
        for caller, worker in self.links():
            sent, received, arrived, answered = self._link(caller, worker)
            late = moved[caller](sent) - moved[worker](arrived)
            both = (answered != _UNKNOWN) & (received != _UNKNOWN)
            back = moved[worker](answered[both]) - moved[caller](received[both])
            wrong = int((late > _ROUNDED_NS).sum() + (back > _ROUNDED_NS).sum())
            if wrong:
                found[caller, worker] = wrong, int(max(late.max(initial=0), back.max(initial=0)))
        return found


def read_pairs(sources: Sequence[Source], bases_us: Sequence[int]) -> Pairs:
    """Return calls that two of these files recorded, one as the caller and one as the worker.

    Args:
        sources: The files, with their spills.
        bases_us: Of each file, what is subtracted from its times where they become floating point.
    """
    total = sum(_size(source) for source in sources)
    enough = max(_LEAST_CALLS, _CALLS_PER_FILE * len(sources))
    bits = 0
    while bits < _MOST_BITS and total // _BYTES_PER_CALL >> bits > enough:
        bits += 1
    pairs = _read(sources, bases_us, _Chosen(bits))
    return pairs if len(pairs) or not bits else _read(sources, bases_us, _Chosen(0))


def _read(sources: Sequence[Source], bases_us: Sequence[int], chosen: _Chosen) -> Pairs:
    sides: tuple[list[Ints], list[Ints]] = [], []
    most = max(_CALLS_PER_FILE, _MOST_CALLS // max(1, len(sources)))
    room = bytearray(_LONGEST_LINE + _READ)
    for number, (source, base_us) in enumerate(zip(sources, bases_us, strict=True)):
        calls = _Calls(chosen, most, room)
        for one in _files(source):
            calls.read(one, base_us)
        for side, found in zip(sides, (calls.callers, calls.workers), strict=True):
            if found:
                keys = np.fromiter(found, dtype=np.int64, count=len(found))
                times = np.array(list(found.values()), dtype=np.int64)
                side.append(np.column_stack([keys, np.full(len(keys), number), times]))
    return _join(*(_once(np.concatenate(side)) if side else np.zeros((0, 4), dtype=np.int64) for side in sides))


class _Chosen:
    """Which calls are taken: one of 2 to the power of ``bits``, by a checksum of their ids.

    All of an id counts: of ids that count upwards, a part by their last digits alone may be those of a few ranks.

    Attributes:
        named: Finds where a line names a call, from behind the first quote: there are fewer of the letter.
    """

    named: Final = re.compile(rb'call": ?"([^"\n]*)"')

    def __init__(self, bits: int) -> None:
        self._mask = (1 << bits) - 1

    def __contains__(self, call: bytes) -> bool:
        return not crc32(call) & self._mask


def _join(callers: Ints, workers: Ints) -> Pairs:
    _, a, b = np.intersect1d(callers[:, 0], workers[:, 0], assume_unique=True, return_indices=True)
    one, two = callers[a], workers[b]
    known = (one[:, 2] != _UNKNOWN) & (two[:, 2] != _UNKNOWN) & (one[:, 1] != two[:, 1])
    one, two = one[known], two[known]
    order = np.lexsort((two[:, 1], one[:, 1]))
    one, two = one[order], two[order]
    return Pairs(one[:, 1], two[:, 1], one[:, 2], one[:, 3], two[:, 2], two[:, 3])


def _once(rows: Ints) -> Ints:
    """Leave out calls that several files claim: runs that lie in one tree, or ids that are none."""
    _, first, count = np.unique(rows[:, 0], return_index=True, return_counts=True)
    found: Ints = rows[first[count == 1]]
    return found


def _files(source: Source) -> list[Source]:
    return [source] if source.spill is None else [source, Source(source.spill, source.label)]


def _size(source: Source) -> int:
    return sum(one.path.stat().st_size for one in _files(source) if one.path.exists()) * (8 if source.packed else 1)


class _Calls:
    """The calls of one file, by key: [sent, received] as a caller, [arrived, answered] as a worker.

    Of a call that is there twice, as after a retry, the widest times are kept: they are true of each try. Of too many
    calls, half are left out as often as need be, by their keys: so the same ones stay on the other side.
    """

    def __init__(self, chosen: _Chosen, most: int, room: bytearray) -> None:
        self.callers: dict[int, list[int]] = {}
        self.workers: dict[int, list[int]] = {}
        self._chosen = chosen
        self._most = most
        self._room = room  # for what is read
        self._left_out = 0  # a key stays if none of these bits is set in its mix

    def read(self, source: Source, base_us: int) -> None:
        """Take the calls of a file."""
        try:
            if source.packed or not _is_lines(source):
                self._read_events(source, base_us)
            else:
                self._read_lines(source, base_us)
        except OSError:
            return  # told by whoever reads the file for its events

    def _read_lines(self, source: Source, base_us: int) -> None:
        """Look at lines that name a call; only those of the chosen calls are decoded."""
        data, held = self._room, 0
        with source.path.open("rb", buffering=0) as file, memoryview(data) as view:
            while count := file.readinto(view[held : held + _READ]):
                end = held + count
                cut = data.rfind(b"\n", 0, end) + 1
                self._take_lines(self._chosen_lines(data, cut), base_us)
                held = end - cut if end - cut < _LONGEST_LINE else 0
                view[:held] = data[cut : cut + held]
        if held:
            data[held : held + 1] = b"\n"
            self._take_lines(self._chosen_lines(data, held + 1), base_us)

    def _chosen_lines(self, data: bytearray, end: int) -> list[bytearray]:
        lines = []
        stop = -1
        chosen = self._chosen
        for found in chosen.named.finditer(data, 0, end):
            if found[1] not in chosen:
                continue
            at = found.start()
            if at > stop and data[at - 1] == _QUOTE:  # else a line that names two
                begin, stop = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
                lines.append(data[begin:stop])
        return lines

    def _take_lines(self, lines: list[bytearray], base_us: int) -> None:
        try:
            events = _decode_lines(b"\n".join(lines))
        except BAD_JSON:
            events = [event for line in lines if (event := _line(line)) is not None]
        for event in events:
            if event.ph == "X":
                self._take(event.name, event.ts - base_us, event.dur, event.args)

    def _read_events(self, source: Source, base_us: int) -> None:
        for batch in read_batches(source, Problems(), base_us):
            for event in batch:
                if event.ph != "X" or event.args is NO_ARGS or _MARK not in (raw := bytes(event.args)):
                    continue
                try:
                    args = _decode_args(raw)
                except BAD_JSON:
                    continue
                if event.ts is not None and args.call.encode("utf-8", "replace") in self._chosen:
                    self._take(event.name, event.ts, event.dur or 0.0, args)

    def _take(self, name: str, ts: float, dur: float, args: _Args) -> None:
        """Take one span of a call: of the bus by its kind, of others by the names ``rpc.client``, ``rpc.server``."""
        if not args.call or not -MAX_US < ts < MAX_US or not 0 <= dur < MAX_US:
            return
        kind = args.kind
        if not kind:
            key = (_key(args.call) * _SPREAD + args.attempt) & _MASK
            if name == "rpc.client":
                self._caller(key, ts, ts + dur if args.status in ANSWERED else None)
            elif name == "rpc.server":
                self._worker(key, ts, ts + dur)
            return
        key = _key(args.call)
        if kind in {"send", "wire"}:  # the earlier: a request may arrive before the caller notes that it was sent
            self._caller(key, ts, None)
        elif kind == "client":
            self._caller(key, None, ts + dur if args.outcome in ANSWERED else None)
        elif kind == "queue":
            self._worker(key, ts, None)
        elif kind == "reply":
            self._worker(key, None, ts)  # where the method returned: the answer leaves before it counts as encoded

    def _known(self, side: dict[int, list[int]], key: int) -> list[int]:
        """Return the times of a call on one side; of one that is left out, a list that nobody reads."""
        known = side.get(key)
        if known is None:
            known = [_UNKNOWN, _UNKNOWN]
            if not self._left_out or not _mix(key) & self._left_out:
                side[key] = known
                if len(side) > self._most:
                    self._leave_out_half()
        return known

    def _leave_out_half(self) -> None:
        self._left_out = 2 * self._left_out + 1
        for side in (self.callers, self.workers):
            for key in [key for key in side if _mix(key) & self._left_out]:
                del side[key]

    def _caller(self, key: int, sent: float | None, received: float | None) -> None:
        known = self._known(self.callers, key)
        if sent is not None:
            at = round(sent * 1000)
            known[0] = at if known[0] == _UNKNOWN else min(known[0], at)
        if received is not None:
            known[1] = max(known[1], round(received * 1000))

    def _worker(self, key: int, arrived: float | None, answered: float | None) -> None:
        known = self._known(self.workers, key)
        if arrived is not None:
            known[0] = max(known[0], round(arrived * 1000))
        if answered is not None:
            at = round(answered * 1000)
            known[1] = at if known[1] == _UNKNOWN else min(known[1], at)


def _line(line: bytearray) -> _Line | None:
    """Return what a line holds; None if it is damaged, which whoever reads the file for its events counts."""
    try:
        return _decode(line)
    except BAD_JSON:
        return None


def _mix(key: int) -> int:
    """Return bits of a key that are even where its own are not."""
    return (key * _SPREAD & _MASK) >> 32


def _key(call: str) -> int:
    """Return a number for a call's id; ours are 16 hex digits."""
    if len(call) <= _HEX:
        try:
            return int(call, 16) & _MASK
        except ValueError:
            pass
    return int.from_bytes(hashlib.blake2b(call.encode("utf-8", "replace"), digest_size=8).digest(), "little") & _MASK


def _is_lines(source: Source) -> bool:
    """Return whether a plain file holds a JSON object per line, rather than one document."""
    with source.path.open("rb") as file:
        head = file.read(4096).lstrip()
    return head.startswith(b"{") and b'"traceEvents"' not in head
