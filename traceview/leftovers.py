"""What a sidecar that was killed left behind: blocks in its spool, a torn end of a rank's file, missing numbers.

A trace root that had a sidecar is looked through before it is read: blocks that stand in the spool alone are put to
the file of their process as a spill is, a torn block is taken from where it is whole, and numbers that stand nowhere
are told: they are records that nobody counted. Nothing in the trace root is changed: that is ``traceview collect
--finish``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from traceview.problems import InputError, Problems
from traceview.reader import Source, source_identity
from traceview.reader import find_sources as find_files_of

if TYPE_CHECKING:
    from zbus.trace.intake import SeqSet
    from zbus.trace.spool import SpoolPart

__all__ = ["find_sources"]

_LOCK: Final = ".sidecar.lock"
_SHOWN: Final = 6
_scratch: list[tempfile.TemporaryDirectory[str]] = []  # of this program: removed at its end

Known = dict[str, "SeqSet"]
"""Blocks by source."""


def find_sources(inputs: Iterable[str], problems: Problems, *, exclude: Path | None = None) -> list[Source]:
    """Return the trace files behind ``inputs``, as ``reader.find_sources``, with what killed sidecars left of them.

    Args:
        inputs: As typed by the user.
        problems: Told of what cannot be read, of what was read from a spool, and of missing blocks.
        exclude: The output, should it lie in an input directory.

    Raises:
        InputError: An input does not exist or matches nothing, or no trace is found at all.
    """
    inputs = list(inputs)
    roots = {_root(Path(text)) for text in inputs if Path(text).is_dir()}
    try:
        sources = find_files_of(inputs, problems, exclude=exclude)
    except InputError:
        if not any((root / "spool").is_dir() for root in roots):
            raise
        sources = []
    by_root: dict[Path, list[Source]] = {root: [] for root in roots}
    for source in sources:
        by_root.setdefault(source.path.absolute().parent.parent, []).append(source)
    found: list[Source] = []
    for root, here in by_root.items():
        found += _Root(root, problems).complete(here, add=root in roots) if (root / _LOCK).exists() else here
    if not found:
        msg = f"no trace files in {', '.join(inputs)}"
        raise InputError(msg, hint="the spool of a killed sidecar is there, and nothing in it can be read")
    order = {source.label: place for place, source in enumerate(sources)}
    return sorted(found, key=lambda source: order.get(source.label, len(order)))


def _root(directory: Path) -> Path:
    traces = directory / "traces"
    return (traces if traces.is_dir() else directory).absolute()


class _Root:
    """One trace root that had a sidecar."""

    def __init__(self, root: Path, problems: Problems) -> None:
        self._root = root
        self._problems = problems
        self._segments = sorted((root / "spool").glob("*.spool"), key=lambda path: (len(path.stem), path.stem))

    def complete(self, sources: list[Source], *, add: bool) -> list[Source]:
        """Return the sources with what the spool holds of them; ``add``: also those that stand in the spool alone."""
        known: dict[Path, Known] = {}
        whole: list[Source] = []
        for source in sources:
            path = source.path.absolute()
            known[path], size = self._scan(source)
            if source.spill is not None:
                _join(known[path], self._scan(Source(source.spill, source.label))[0])
            whole.append(replace(source, size=size))
        files = {source.path.absolute() for source in sources}
        spills = self._read_spool(known, {s.path.absolute(): s.spill for s in sources}, files if not add else None)
        done = [self._with_spill(source, spills.pop(source.path.absolute(), None), known) for source in whole]
        for path, spill in spills.items():
            label = f"{path.relative_to(self._root)} (spool)"
            done.append(Source(spill, label, *source_identity(path)))
        self._tell_missing(known)
        return done

    def _scan(self, source: Source) -> tuple[Known, int | None]:
        """Return the blocks of a file, and up to where it is whole, if not all of it is."""
        from zbus.trace.spool import scan_blocks  # only where there was a sidecar

        if source.packed:
            return {}, None
        try:
            found, size = scan_blocks(source.path)
            torn = size < source.path.stat().st_size
        except OSError:
            return {}, None  # told by who reads it
        return found, size if torn else None

    def _with_spill(self, source: Source, spill: Path | None, known: dict[Path, Known]) -> Source:
        """Put a spill to a file, and leave out the file's torn end if it is whole elsewhere.

        Of a torn marker nobody can say whose it is; no record is in it, and blocks are missing nowhere unless told.
        """
        from zbus.trace.intake import SeqSet
        from zbus.trace.spool import block_at

        if spill is not None:
            source = replace(source, spill=spill)
        if source.size is not None:
            torn = block_at(source.path, source.size)
            blocks = known[source.path.absolute()]
            elsewhere = source.spill is not None if torn is None else torn[1] in blocks.get(torn[0], SeqSet())
            if not elsewhere:
                source = replace(source, size=None)
        return source

    def _read_spool(
        self, known: dict[Path, Known], spills: dict[Path, Path | None], only: set[Path] | None
    ) -> dict[Path, Path]:
        """Return files with what stands in the spool alone (after the process's spill), by the file it belongs to."""
        from zbus.trace.intake import SeqSet
        from zbus.trace.spool import read_spool

        made: dict[Path, Path] = {}
        opened: set[tuple[Path, str]] = set()
        blocks = 0
        for segment in self._segments:
            openings: dict[str, SpoolPart] = {}
            try:
                for part in read_spool(segment):
                    path = part.path.absolute()
                    if only is not None and path not in only:
                        continue
                    if part.seq is None:
                        openings[part.source] = part
                        continue
                    seen = known.setdefault(path, {}).setdefault(part.source, SeqSet())
                    if part.seq in seen:
                        continue
                    seen.add(part.seq)
                    if path not in made:
                        made[path] = _begin(path, spills.get(path))
                    with made[path].open("ab") as file:
                        if (path, part.source) not in opened:
                            file.write(openings[part.source].data)
                        file.write(part.data)
                    opened.add((path, part.source))
                    blocks += 1
            except OSError as error:
                self._problems.add("ZT0102", "unreadable", f"{segment} cannot be read: {error.strerror}")
        if blocks:
            text = f"{self._root / 'spool'} of a killed sidecar held {blocks} blocks: read"
            text += " (traceview collect --finish writes them)"
            self._problems.add("ZT0119", "spool_read", text, blocks)
        return made

    def _tell_missing(self, known: dict[Path, Known]) -> None:
        for path, sources in known.items():
            for seen in sources.values():
                missing = seen.missing()
                if missing:
                    some = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
                    text = f"{path.relative_to(self._root)} lacks blocks {some}: their records are lost and not counted"
                    self._problems.add("ZT0118", "missing_blocks", text, len(missing))


def _join(known: Known, more: Known) -> None:
    from zbus.trace.intake import SeqSet

    for source, seen in more.items():
        mine = known.setdefault(source, SeqSet())
        for seq in seen:
            mine.add(seq)


def _begin(path: Path, spill: Path | None) -> Path:
    """Begin a file for what the spool holds of another, with the process's own spill."""
    if not _scratch:
        _scratch.append(tempfile.TemporaryDirectory(prefix="traceview-"))
    made = Path(tempfile.mkstemp(dir=_scratch[0].name, prefix=f"{path.parent.name}.", suffix=f".{path.name}")[1])
    with made.open("wb") as out:
        if spill is not None:
            with spill.open("rb") as file:
                shutil.copyfileobj(file, out)
    return made
