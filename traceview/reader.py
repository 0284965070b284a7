"""From the user's INPUT arguments to events: finding files, inflating, splitting, decoding.

Memory is bounded whatever the size of a file. Damage is counted in ``Problems`` and never raised.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from traceview.event import Event, Repairer, decode_event
from traceview.problems import InputError, Problems

__all__ = ["Source", "default_output", "find_sources", "read_batches", "read_events", "source_identity"]

_CHUNK: Final = 1 << 20
_BATCH: Final = 4096
_MAX_LINE: Final = 64 << 20
_MAX_OBJECT: Final = 16 << 20
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_RANK_FILE: Final = re.compile(r"traces?[_-]r?(\d+)(?:\.(\d+))?(?:\.fork(\d+))?\.jsonl?(?:\.gz)?$")
_LISTED: Final = (".jsonl", ".jsonl.gz")
_NAMED: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: To open.
        label: To show: relative to the input the user named.
        role, rank: As far as the path tells; None where it does not.
    """

    path: Path
    label: str
    role: str | None = None
    rank: int | None = None


def find_sources(inputs: Iterable[str], problems: Problems, *, exclude: Path | None = None) -> list[Source]:
    """Return the files behind ``inputs``: files, directories, trial directories or globs; each file once.

    Args:
        inputs: As typed by the user.
        problems: Told of what cannot be read.
        exclude: The output, should it lie in an input directory.

    Raises:
        InputError: An input does not exist or matches nothing, or no trace file is found at all.
    """
    seen: set[tuple[int, int]] = set()
    sources: list[Source] = []
    skip = exclude.absolute() if exclude is not None else None
    for text in inputs:
        for path, base in _expand(text):
            if skip is not None and path.absolute() == skip:
                continue
            try:
                stat = path.stat()
            except OSError as error:
                problems.add("ZT0102", "unreadable", f"{path} cannot be read: {error.strerror}")
                continue
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                label = os.path.relpath(path, base) if base else str(path)
                sources.append(Source(path, label, *source_identity(path)))
    if not sources:
        msg = f"no trace files in {', '.join(inputs)}"
        raise InputError(msg, hint="give a trial directory, a directory with traces_*.jsonl, a glob or files")
    return sorted(sources, key=lambda s: (s.role != "controller", s.role or "", s.rank or 0, s.label))


def default_output(inputs: list[str]) -> Path:
    """Return ``<root>/merged.json.gz``: the trace root of a trial, the directory given, or the files' common parent."""
    first = Path(inputs[0])
    if len(inputs) == 1 and first.is_dir():
        return _trace_root(first) / "merged.json.gz"
    found = [str(path.absolute().parent) for text in inputs for path, _ in _expand(text)]
    return Path(os.path.commonpath(found)) / "merged.json.gz"


def source_identity(path: Path) -> tuple[str | None, int | None]:
    """Return (role, rank) told by a path such as ``actor/traces_3.1.jsonl``; None for what it does not tell."""
    match = _RANK_FILE.search(path.name)
    if match is None:
        return None, None
    return path.absolute().parent.name, int(match[1])


def read_events(source: Source, problems: Problems) -> Iterator[Event]:
    """Yield the events of one file in file order, repaired where possible."""
    for batch in read_batches(source, problems):
        yield from batch


def read_batches(source: Source, problems: Problems) -> Iterator[list[Event]]:
    """Yield the same as ``read_events``, some thousands at a time."""
    repairer = Repairer(source.label, problems)
    count = 0
    before = problems.counts["ZT0104", "other_records"]
    try:
        for batch in _batches(source, problems, repairer):
            count += len(batch)
            yield batch
    except OSError as error:
        problems.add("ZT0102", "unreadable", f"{source.label} cannot be read: {error.strerror}")
        return
    for number, text in repairer.names.items():
        for name in ("process_name", "thread_name"):
            yield [Event(name, "M", pid=number, tid=number, args=msgspec.Raw(json.dumps({"name": text}).encode()))]
    if not count and problems.counts["ZT0104", "other_records"] == before:
        problems.add("ZT0103", "no_events", f"{source.label} holds no events")


# -- finding -------------------------------------------------------------------------------------------------------


def _trace_root(directory: Path) -> Path:
    traces = directory / "traces"
    return traces if traces.is_dir() else directory


def _expand(text: str) -> list[tuple[Path, Path | None]]:
    """Return (file, base of its label) for one input."""
    path = Path(text)
    if path.is_dir():
        root = _trace_root(path)
        return [(file, path) for file in _walk(root)]
    if path.exists():
        return [(path, None)]
    matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # absolute patterns too
    if not matches:
        msg = f"{text} does not exist" if not glob.has_magic(text) else f"{text} matches nothing"
        raise InputError(msg)
    found: list[tuple[Path, Path | None]] = []
    for match in map(Path, matches):
        if match.is_dir():
            found.extend((file, match) for file in _walk(match))
        elif match.name.endswith(_NAMED):
            found.append((match, None))
    return found


def _walk(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_LISTED) and not name.startswith((".", "sessions")):
                yield Path(directory) / name


# -- bytes ---------------------------------------------------------------------------------------------------------


def _chunks(source: Source, problems: Problems) -> Iterator[bytes]:
    """Yield the content in pieces; gz is told by its first bytes, never by the name."""
    with source.path.open("rb", buffering=0) as file:
        data = file.read(_CHUNK)
        if data.startswith(_ZSTD):
            problems.add("ZT0102", "zstd", f"{source.label} is zstd-compressed: decompress it first")
            return
        if not data.startswith(_GZIP):
            while data:
                yield data
                data = file.read(_CHUNK)
            return
        inflate = zlib.decompressobj(31)
        try:
            while data:
                out = inflate.decompress(data, _CHUNK)
                if out:
                    yield out
                data = inflate.unconsumed_tail or inflate.unused_data
                if inflate.eof:
                    data = (data or file.read(_CHUNK)).lstrip(b"\0")
                    inflate = zlib.decompressobj(31)
                elif not data:
                    data = file.read(_CHUNK)
                    if not data:
                        yield inflate.flush()
                        problems.add("ZT0107", "truncated_gz", f"{source.label} cut off inside its gzip stream")
        except zlib.error as error:
            problems.add("ZT0107", "bad_gz", f"{source.label} has a damaged gzip stream ({error}), rest ignored")


def _batches(source: Source, problems: Problems, repairer: Repairer) -> Iterator[list[Event]]:
    chunks = _chunks(source, problems)
    head = b""
    for chunk in chunks:  # enough to tell the kind
        head += chunk
        if len(head.lstrip()) >= 4096 or len(head) > _CHUNK:
            break
    start = head.lstrip(b"\xef\xbb\xbf \r\n\t\0")
    if _is_document(start):
        return _document(start, chunks, source, problems, repairer)
    return _lines(head, chunks, source, problems, repairer)


def _is_document(start: bytes) -> bool:
    """Return whether this is one JSON document (Chrome array or object form) rather than lines."""
    if start[:1] not in (b"[", b"{"):
        return False
    line = start.partition(b"\n")[0]
    try:
        first = msgspec.json.decode(line)
    except msgspec.DecodeError:
        if start[:1] == b"[":
            return True
        return b'"traceEvents"' in start or line.strip() == b"{" or b'"ph"' not in line
    if isinstance(first, list):
        return not first or isinstance(first[0], dict)
    return "traceEvents" in first


def _lines(
    head: bytes, chunks: Iterator[bytes], source: Source, problems: Problems, repairer: Repairer
) -> Iterator[list[Event]]:
    number = others = 0
    rest = b""
    for chunk in _chain(head, chunks):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        batch: list[Event] = []
        for line in lines:
            number += 1
            event = _fast(line)
            if event is not None:
                batch.append(event)
            elif _is_other(line):
                others += 1
            else:
                batch.extend(repairer.line(line, number, last=False))
        yield batch
        if len(rest) > _MAX_LINE:
            problems.add("ZT0107", "bad_line", f"{source.label}:{number + 1} is longer than 64 MiB, skipped")
            rest = b""
    if others:
        problems.add("ZT0104", "other_records", f"{source.label} holds {others} records that are no events, skipped")
    if rest.strip():
        event = _fast(rest)
        yield [event] if event is not None else repairer.line(rest, number + 1, last=True)


_FAST_PHASES: Final = frozenset("XMCiIBEbenstf")
"""Phases that the merger handles; others take the slow path once, to be named or dropped."""


def _fast(line: bytes) -> Event | None:
    """Return the event of a good line, or None: then it needs a closer look."""
    try:
        event = decode_event(line)
        if not line.isascii():
            line.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    phase = event.ph
    return event if phase in _FAST_PHASES and (event.ts is not None or phase == "M") else None


def _is_other(line: bytes) -> bool:
    """Return whether a line is a record of another kind, such as a session: an object without a phase."""
    if b'"ph"' in line:
        return False
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return isinstance(value, dict) and bool(value)


def _chain(head: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from chunks


def _document(
    head: bytes, chunks: Iterator[bytes], source: Source, problems: Problems, repairer: Repairer
) -> Iterator[list[Event]]:
    """Stream the events of a Chrome JSON document, whole or cut, without holding it."""
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


class _Scanner:
    """Reads the values of a JSON array from pieces of text, holding one value and one piece."""

    def __init__(self, head: bytes, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
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
            except (ValueError, RecursionError):
                if len(self._buffer) - self._at < _MAX_OBJECT and self._more():
                    continue
                cut = len(self._buffer) - self._at
                following = self._buffer.find('{"', self._at + 1)
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
