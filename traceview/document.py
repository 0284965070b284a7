"""Chrome JSON documents, whole or cut: their events, with a bound on memory whatever their size."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from traceview.batch import plain_event
from traceview.event import BAD_JSON, NO_ARGS, Event, Repairer, exact_float
from traceview.problems import Problems

if TYPE_CHECKING:
    from traceview.reader import Source

__all__ = ["document_events", "is_document"]

_BATCH: Final = 4096
_WHOLE_DOCUMENT: Final = 32 << 20
_MAX_OBJECT: Final = 16 << 20
_MANY_OBJECTS: Final = 1_000_000
_MANY_VALUES: Final = 4_000_000


def is_document(start: bytes) -> bool:
    """Return whether this is one JSON document (Chrome array or object form) rather than lines."""
    if start[:1] not in (b"[", b"{"):
        return False
    line = start.partition(b"\n")[0]
    try:
        first = msgspec.json.decode(line)
    except BAD_JSON:
        if start[:1] == b"[":
            return True
        return b'"traceEvents"' in start or line.strip() == b"{" or b'"ph"' not in line
    if isinstance(first, list):
        return not first or isinstance(first[0], dict)
    return "traceEvents" in first


def document_events(
    head: bytes, chunks: Iterator[bytes], source: Source, problems: Problems, repairer: Repairer
) -> Iterator[list[Event]]:
    """Stream the events of a Chrome JSON document, whole or cut; one of moderate size is decoded at once."""
    held, size = [head], len(head)
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size > _WHOLE_DOCUMENT:
            break
    whole = b"".join(held)
    if size <= _WHOLE_DOCUMENT and (raw := _raw_events(whole)) is not None:
        for at in range(0, len(raw), _BATCH):
            yield [event for place in range(at, min(at + _BATCH, len(raw))) for event in _one(raw, place, repairer)]
        return
    head, held = whole, []
    scan = _Scanner(head, chunks)
    if not scan.seek_events():
        problems.add("ZT0104", "other_records", f"{source.label} is JSON without trace events, skipped")
        return
    number = 0
    batch: list[Event] = []
    while not scan.at_end():
        number += 1
        where = f"{source.label}: event {number}"
        try:
            value = scan.next_value()
        except ValueError as error:
            problems.add("ZT0107", "truncated_tail", f"{where} cut off or not JSON ({error})")
            continue
        event = repairer.value(value, where)
        if event is not None:
            batch.append(event)
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    yield batch


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815  # the format's word


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _raw_events(data: bytes) -> list[msgspec.Raw] | None:
    """Return the events of a document without any fault, undecoded, else None."""
    if data.count(b"{") > _MANY_OBJECTS or data.count(b",") > _MANY_VALUES:
        return None  # so many small values would take more memory than their text
    try:
        data.decode()
        return _decode_array(data) if data.startswith(b"[") else _decode_document(data).traceEvents
    except BAD_JSON:
        return None


def _one(raw: list[msgspec.Raw], place: int, repairer: Repairer) -> list[Event]:
    data = raw[place]
    event = None if repairer.base_us else plain_event(bytes(data))
    if event is not None:
        event.args = msgspec.Raw(bytes(event.args)) if event.args is not NO_ARGS else NO_ARGS
        return [event]
    return repairer.line(bytes(data), place + 1, last=False)


class _Scanner:
    """Reads the values of a JSON array from pieces of text, holding one value and one piece."""

    def __init__(self, head: bytes, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = json.JSONDecoder(strict=False, parse_constant=lambda _: None, parse_float=exact_float)
        self._buffer = self._text.decode(head)
        self._at = 0

    def seek_events(self) -> bool:
        """Go into the array of events; False if there is none."""
        key = '"traceEvents"'
        if not self._buffer.startswith("["):
            while (at := self._buffer.find(key)) < 0:
                self._buffer = self._buffer[-len(key) :]
                if not self._more():
                    return False
            self._at = at + len(key)
        while (at := self._buffer.find("[", self._at)) < 0:
            if not self._more():
                return False
        self._at = at + 1
        return True

    def at_end(self) -> bool:
        """Skip separators; return whether the array or the text ends here."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in ", \r\n\t":
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at] == "]"
            if not self._more():
                return True

    def next_value(self) -> object:
        """Return the value here; raises ValueError, having gone on to the next object, if it is damaged."""
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                if not deep and len(self._buffer) - self._at < _MAX_OBJECT and self._more():
                    continue
                cut = len(self._buffer) - self._at
                # What is nested too deep is left behind as a whole, not tried again from each of its levels.
                start = self._buffer.find("}", self._at) if deep else self._at
                following = self._buffer.find('{"', start + 1) if start >= 0 else -1
                self._at = following if following >= 0 else len(self._buffer)
                msg = f"{cut if following < 0 else 'some'} characters ignored"
                raise ValueError(msg) from None
            return value

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._buffer = self._buffer[self._at :] + self._text.decode(chunk)
        self._at = 0
        return True
