"""From the user's INPUT arguments to events: finding files, splitting their content, decoding.

Memory is bounded whatever the size of a file. Damage is counted in ``Problems`` and never raised.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from traceview.batch import Batch, plain_event
from traceview.content import CHUNK, GZIP, ZSTD, read_bytes
from traceview.document import document_events, is_document
from traceview.event import BAD_JSON, Event, Repairer, args_of, decode_lines, encode_args, has_long_number
from traceview.problems import InputError, Problems

__all__ = [
    "Blocks",
    "Source",
    "default_output",
    "find_files",
    "find_sources",
    "read_batches",
    "read_columns",
    "read_events",
    "source_identity",
]

_MAX_LINE: Final = 16 << 20
_RANK_FILE: Final = re.compile(
    r"(?:traces?|sessions?)[_-]r?(\d+)(?:\.(\d+))?(?:\.fork(\d+))?(?:\.spill)?\.jsonl?(?:\.gz|\.zst)?$"
)
_SPILL: Final = re.compile(r"\.spill(?=\.jsonl)")
_LISTED: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_NAMED: Final = (*_LISTED, ".json", ".json.gz", ".json.zst")
_BLOCK_MARK: Final = b'"zbus_block"'


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: To open.
        label: To show: relative to the input the user named.
        role, rank: As far as the path tells; None where it does not.
        spill: A second file of the same process, to be read after this one.
        size: Bytes to read, if not all: what follows is torn and stands whole in the spill.
    """

    path: Path
    label: str
    role: str | None = None
    rank: int | None = None
    spill: Path | None = None
    size: int | None = None

    @property
    def packed(self) -> bool:
        """Whether the content is compressed, by its first bytes."""
        try:
            with self.path.open("rb") as file:
                head = file.read(4)
        except OSError:
            return False
        return head.startswith((GZIP, ZSTD))


def find_sources(inputs: Iterable[str], problems: Problems, *, exclude: Path | None = None) -> list[Source]:
    """Return the trace files behind ``inputs``: files, directories, trial directories or globs; each file once.

    Args:
        inputs: As typed by the user.
        problems: Told of what cannot be read.
        exclude: The output, should it lie in an input directory.

    Raises:
        InputError: An input does not exist or matches nothing, or no trace file is found at all.
    """
    sources = find_files(inputs, problems, exclude=exclude)
    if not sources:
        msg = f"no trace files in {', '.join(inputs)}"
        raise InputError(msg, hint="give a trial directory, a directory with traces_*.jsonl, a glob or files")
    return _with_spills(sources)


def find_files(
    inputs: Iterable[str], problems: Problems, *, exclude: Path | None = None, sessions: bool = False
) -> list[Source]:
    """Return the trace files, or the session files, behind ``inputs``; as ``find_sources``, but may be empty."""
    seen: set[tuple[int, int]] = set()
    sources: list[Source] = []
    skip = exclude.absolute() if exclude is not None else None
    for text in inputs:
        for path, base in _expand(text, sessions=sessions):
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
    return sorted(sources, key=lambda s: (s.role != "controller", s.role or "", s.rank or 0, s.label))


def _with_spills(sources: list[Source]) -> list[Source]:
    """Put each spill to the file of its process."""
    by_path = {source.path.absolute(): source for source in sources}
    for source in sources:
        main = by_path.get(source.path.absolute().with_name(_SPILL.sub("", source.path.name)))
        if main is not None and main.path != source.path:
            by_path[main.path.absolute()] = replace(main, spill=source.path)
            del by_path[source.path.absolute()]
    return list(by_path.values())


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


class Blocks:
    """The blocks of a process that were read already: a sidecar's file and a spill may both hold one."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.doubled = 0

    def are_new(self, events: list[Event]) -> bool:
        """Return whether no block that begins among these events was read before; if so, all are noted."""
        begun = [_block_of(event) for event in events if event.ph == "M" and event.name == "zbus_block"]
        if len(set(begun)) < len(begun) or not self.seen.isdisjoint(begun):
            return False
        self.seen.update(begun)
        return True


def _block_of(event: Event) -> tuple[str, str]:
    """Return (source, sequence number) of the block that a ``zbus_block`` event begins."""
    args = args_of(event)
    return str(args.get("source")), str(args.get("seq"))


def read_batches(
    source: Source, problems: Problems, base_us: int = 0, blocks: Blocks | None = None
) -> Iterator[list[Event]]:
    """Yield the same as ``read_events``, some thousands at a time; the arguments are those of ``read_columns``."""
    for batch in read_columns(source, problems, base_us, blocks):
        yield batch.events


def read_columns(source: Source, problems: Problems, base_us: int = 0, blocks: Blocks | None = None) -> Iterator[Batch]:
    """Yield the same as ``read_events``, some thousands at a time, with their columns.

    Args:
        source: The file; its spill is not read.
        problems: Told of damage.
        base_us: Subtracted from all times, exactly.
        blocks: Blocks to skip; those of this file are added.
    """
    repairer = Repairer(source.label, problems, base_us)
    count = 0
    before = problems.counts["ZT0104", "other_records"]
    try:
        for batch in _batches(source, problems, repairer, blocks or Blocks()):
            count += len(batch)
            yield batch
            del batch  # before the next one is made: in its place, which the processor's cache still holds
    except OSError as error:
        problems.add("ZT0102", "unreadable", f"{source.label} cannot be read: {error.strerror}")
        return
    for number, text in repairer.names.items():
        yield Batch.of([Event("text_id", "M", pid=number, tid=number, args=encode_args({"name": text}))])
    if not count and problems.counts["ZT0104", "other_records"] == before:
        problems.add("ZT0103", "no_events", f"{source.label} holds no events")


# -- finding -------------------------------------------------------------------------------------------------------


def _trace_root(directory: Path) -> Path:
    traces = directory / "traces"
    return traces if traces.is_dir() else directory


def _expand(text: str, *, sessions: bool = False) -> list[tuple[Path, Path | None]]:
    """Return (file, base of its label) for one input."""
    path = Path(text)
    if path.is_dir():
        root = _trace_root(path)
        return [(file, path) for file in _walk(root, sessions=sessions)]
    if path.exists():
        return [(path, None)]
    matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # absolute patterns too
    if not matches:
        msg = f"{text} does not exist" if not glob.has_magic(text) else f"{text} matches nothing"
        raise InputError(msg)
    found: list[tuple[Path, Path | None]] = []
    for match in map(Path, matches):
        if match.is_dir():
            found.extend((file, match) for file in _walk(match, sessions=sessions))
        elif match.name.endswith(_NAMED):
            found.append((match, None))
    return found


def _walk(root: Path, *, sessions: bool = False) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_LISTED) and not name.startswith(".") and name.startswith("sessions") == sessions:
                yield Path(directory) / name


# -- bytes ---------------------------------------------------------------------------------------------------------


def _batches(source: Source, problems: Problems, repairer: Repairer, blocks: Blocks) -> Iterator[Batch]:
    chunks = read_bytes(source, problems)
    head = b""
    for chunk in chunks:  # enough to tell the kind
        head = head + chunk if head.strip() else chunk  # a whole piece of blanks is forgotten
        if len(head.lstrip()) >= 4096 or len(head) > CHUNK:
            break
    start = head.lstrip(b"\xef\xbb\xbf \r\n\t\0")
    if is_document(start):
        return map(Batch.of, document_events(start, chunks, source, problems, repairer))
    return _lines(_whole_lines(_chain(head, chunks), source, problems), source, problems, repairer, blocks)


def _whole_lines(chunks: Iterator[bytes], source: Source, problems: Problems) -> Iterator[bytes]:
    """Yield pieces that end at the end of a line; only the last may not."""
    rest: list[bytes] = []
    held = 0
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join((*rest, chunk[:cut])) if rest else chunk[:cut]
            rest, held = [], 0
        if cut < len(chunk):
            rest.append(chunk[cut:])
            held += len(chunk) - cut
        if held > _MAX_LINE:
            problems.add("ZT0107", "bad_line", f"{source.label} has a line longer than 16 MiB, skipped")
            rest, held = [], 0
    if rest:
        yield b"".join(rest)


def _lines(
    pieces: Iterator[bytes], source: Source, problems: Problems, repairer: Repairer, blocks: Blocks
) -> Iterator[Batch]:
    number = others = skip = 0
    for piece in pieces:
        quick = None if skip or repairer.base_us else _quick(piece)
        if quick is not None and ("M" not in quick.phases or blocks.are_new(quick.events)):
            number += piece.count(b"\n")
            yield quick
            del quick
            continue
        if skip or _BLOCK_MARK in piece:
            lines, skip = _first_only(piece, blocks, skip)
            piece = b"".join(lines)  # noqa: PLW2901  # the same piece without what was read before
        batch: list[Event] = []
        for line in piece.split(b"\n")[: -1 if piece.endswith(b"\n") else None]:
            number += 1
            event = None if repairer.base_us else plain_event(line)
            if event is not None:
                batch.append(event)
            elif _is_other(line):
                others += 1
            else:
                last = not piece.endswith(b"\n") and piece.endswith(line)
                batch.extend(repairer.line(line, number, last=last))
        yield Batch.of(batch)
    if others:
        problems.add("ZT0104", "other_records", f"{source.label} holds {others} records that are no events, skipped")


def _first_only(piece: bytes, blocks: Blocks, skip: int) -> tuple[list[bytes], int]:
    """Return the lines but those of blocks read before, and how many bytes of the next piece to skip."""
    kept: list[bytes] = []
    for line in piece.splitlines(keepends=True):
        if skip > 0 and _BLOCK_MARK not in line:
            skip -= len(line)
            continue
        skip = 0
        if _BLOCK_MARK in line and (event := plain_event(line)) is not None and event.name == "zbus_block":
            size = args_of(event).get("bytes")
            key = _block_of(event)
            if key in blocks.seen and isinstance(size, int):
                blocks.doubled += 1
                skip = size
                continue
            blocks.seen.add(key)
        kept.append(line)
    return kept, skip


def _quick(piece: bytes) -> Batch | None:
    """Return the events of a piece without any fault, or None: then each line needs a closer look."""
    if has_long_number(piece):
        return None
    try:
        events = decode_lines(piece)
        if not piece.isascii():
            piece.decode()
    except BAD_JSON:
        return None
    return Batch.of_plain(events)


def _is_other(line: bytes) -> bool:
    """Return whether a line is a record of another kind, such as a session: an object without a phase."""
    if b'"ph"' in line:
        return False
    try:
        value = msgspec.json.decode(line)
    except BAD_JSON:
        return False
    return isinstance(value, dict) and bool(value)


def _chain(head: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from chunks
