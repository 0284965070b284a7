"""The Chrome trace format: the JSON object form, made of parts that may be encoded apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from traceview.encoder import Placed
from traceview.event import Event, call_of, encode_args, encode_event, encode_events, encode_lines

__all__ = ["ChromeEncoder", "chrome_end", "chrome_head"]

_NEWLINE: Final = ord("\n")

Ints = NDArray[np.int64]


_FLOW: Final = (b"", b',"flow_out":true', b',"flow_in":true', b',"flow_out":true,"flow_in":true')


class ChromeEncoder:
    """Encodes events as members of a JSON array: all but the row's numbers first, those when the rows are known."""

    several_arrows: Final = False
    trim: Final = (1, 2)
    """A body stands between the brace that opens its line, and the one that closes it with the newline."""

    def __init__(self) -> None:
        self._heads: dict[int, bytes] = {}

    def bodies(
        self, events: list[Event], pids: Ints, starts: Ints, ends: Ints, spans: NDArray[np.bool_]
    ) -> tuple[bytes, NDArray[np.int32]]:
        """Return events as lines, without pid and tid, and the size of each."""
        times: list[float] = (starts / 1000).tolist()
        lengths: list[float | None] = ((ends - starts) / 1000).tolist()
        for place in np.flatnonzero(~spans).tolist():
            lengths[place] = None
        for event, ts, dur in zip(events, times, lengths, strict=True):
            event.ts = ts
            event.dur = dur
            event.pid = event.tid = 0
        lines = encode_lines(events)
        newlines = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == _NEWLINE)
        if len(newlines) == len(events):
            sizes = newlines.astype(np.int32)
            sizes[1:] -= newlines[:-1]
            sizes[0] += 1
            return lines, sizes
        apart = [encode_event(event) + b"\n" for event in events]  # args that hold newlines, as people write them
        return b"".join(apart), np.fromiter(map(len, apart), dtype=np.int32, count=len(apart))

    def place(self, placed: Placed) -> bytes:
        """Return events on their rows, each behind a comma."""
        bodies, tids, heads = placed.bodies, placed.tids.tolist(), self._heads
        for tid in set(tids).difference(heads):
            heads[tid] = b'},\n{"pid":%d,"tid":%d,' % (placed.pids[tids.index(tid)], tid)
        arrows = placed.arrows
        for place, number, out, into in zip(arrows.places, arrows.numbers, arrows.out, arrows.into, strict=True):
            bodies[place] += b',"bind_id":"0x%x"%b' % (number, _FLOW[out + 2 * into])
        for place, number in placed.kept.items():
            bodies[place] += b',"id":"0x%x","bp":"e"' % number
        pieces = [b"}"] * (2 * len(bodies) + 1)
        pieces[:-1:2] = map(heads.__getitem__, tids)
        pieces[1::2] = bodies
        pieces[0] = pieces[0][1:]
        return b"".join(pieces)

    def calls(self, bodies: list[bytes]) -> list[bytes]:
        """Return the call that the args of each span name, empty where there is none."""
        return list(map(call_of, bodies))

    def finish(self) -> bytes:
        """Return what ends the part: nothing."""
        return b""


def chrome_head(names: list[tuple[str, int, int, dict[str, Any]]]) -> bytes:
    """Return the beginning of the file with its metadata events, given as (name, pid, tid, args)."""
    events = [Event(name, "M", pid=pid, tid=tid, args=encode_args(args)) for name, pid, tid, args in names]
    return b'{"displayTimeUnit":"ms","traceEvents":[\n' + encode_events(events)[1:-1]


def chrome_end(facts: Mapping[str, Any]) -> bytes:
    """Return the end of the file, with ``otherData``."""
    return b'\n],"otherData":%b}\n' % encode_events(facts)
