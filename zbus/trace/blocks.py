"""A block: what one flush of one process takes from its rings, as bytes for the sidecar or as lines for a file."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from zbus.trace.events import Event, Expander, encode_event, encode_events, plain_json
from zbus.trace.tracer import SPAN_FIELDS, Record, span_records

__all__ = [
    "Block",
    "BlockLines",
    "ClockLine",
    "LossLine",
    "ThreadPart",
    "decode_block",
    "encode_block",
    "expand",
    "marker",
]


class ThreadPart(msgspec.Struct, array_like=True):
    """The records of one thread, in the order it made them; ``spans`` as in ``Ring.spans``."""

    tid: int
    name: str
    records: list[Any]
    spans: list[Any] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of records, spans too."""
        return len(self.records) + len(self.spans) // SPAN_FIELDS

    def halves(self) -> tuple[ThreadPart, ThreadPart]:
        """Return two parts, neither of them empty, that together are this one of two records or more."""
        records = [*span_records(self.spans), *self.records]
        half = len(records) // 2
        return ThreadPart(self.tid, self.name, records[:half]), ThreadPart(self.tid, self.name, records[half:])


class LossLine(msgspec.Struct, array_like=True):
    """Records lost for one reason between two moments of the process's monotonic clock."""

    reason: str
    lost: int
    since_ns: int
    until_ns: int


class ClockLine(msgspec.Struct, array_like=True):
    """One clock point (see ``zbus.trace.clocksync``) and the reference clock it is about."""

    at_ns: int
    offset_ns: int
    bound_ns: int
    rtt_ns: int
    n: int
    drift_ppb: int
    ref_boot_id: str
    ref_time_ns: int


class Block(msgspec.Struct, array_like=True):
    """What one flush brings."""

    threads: list[ThreadPart] = msgspec.field(default_factory=list)
    losses: list[LossLine] = msgspec.field(default_factory=list)
    clocks: list[ClockLine] = msgspec.field(default_factory=list)

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(map(len, self.threads))


class BlockLines(msgspec.Struct):
    """A block as lines: ``data``, its ``events``, and how many records were ``malformed`` and left out."""

    data: bytes
    events: list[Event]
    malformed: int


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=str)
_decoder: Final = msgspec.msgpack.Decoder(Block)


def encode_block(block: Block) -> bytes:
    """Return the block as bytes; a value that cannot be encoded is replaced by its text."""
    try:
        return _encoder.encode(block)
    except (ValueError, TypeError, OverflowError, RecursionError):
        for part in block.threads:
            part.name = plain_json(part.name)
            part.records = [_encodable(record) for record in [*part.records, *span_records(part.spans)]]
            part.spans = []
        return _encoder.encode(block)


def decode_block(data: bytes | memoryview) -> Block:
    """Return the block in ``data``.

    Raises:
        msgspec.DecodeError: These bytes are no block.
    """
    return _decoder.decode(data)


def _encodable(record: Record) -> Any:
    try:
        _encoder.encode(record)
    except (ValueError, TypeError, OverflowError, RecursionError):
        safe = plain_json(record)
        try:
            _encoder.encode(safe)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None  # malformed: counted when expanded
        return safe
    return record


def expand(block: Block, expander: Expander, names: dict[int, str], who: dict[str, Any], pid: int) -> BlockLines:
    """Turn a block into lines.

    Args:
        block: Which.
        expander: Of the process.
        names: Thread names already announced in this file, by thread id; updated.
        who: ``role`` and ``rank``, for thread names.
        pid: Of the process.
    """
    out: list[Event] = []
    malformed = 0
    turn = expander.expand
    for part in block.threads:
        if names.get(part.tid) != part.name:
            names[part.tid] = part.name
            out.append(Event("thread_name", "M", pid=pid, tid=part.tid, args={"name": part.name, **who}))
        records = part.records
        if part.spans:
            try:
                out += expander.spans(part.spans, part.tid)
            except Exception:  # noqa: BLE001  # one of them is malformed: one by one, then
                records = [*span_records(part.spans), *records]
        for record in records:
            before = len(out)
            try:
                turn(record, part.tid, out)
            except Exception:  # noqa: BLE001  # a malformed record must not cost its neighbours
                del out[before:]
                malformed += 1
    data = encode_events(out)
    extra = [_loss(loss, expander, pid) for loss in block.losses]
    extra += [_clock(line, expander, pid) for line in block.clocks]
    return BlockLines(data + b"".join(map(encode_event, extra)), out, malformed)


def marker(source: str, seq: int, records: int, size: int, pid: int) -> bytes:
    """Return the line that stands before the lines of a block."""
    args = {"source": source, "seq": seq, "records": records, "bytes": size}
    return encode_event(Event("zbus_block", "M", pid=pid, args=args))


def _loss(loss: LossLine, expander: Expander, pid: int) -> Event:
    args = {"reason": loss.reason, "lost": loss.lost}
    times = {"since_us": expander.ts(loss.since_ns), "until_us": expander.ts(loss.until_ns)}
    return Event("zbus_loss", "M", expander.ts(loss.until_ns), pid=pid, args={**args, **times})


def _clock(line: ClockLine, expander: Expander, pid: int) -> Event:
    return Event("zbus_clock", "M", expander.ts(line.at_ns), pid=pid, args=_named(line))


def _named(line: ClockLine) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}
