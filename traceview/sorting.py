"""Sort the events of one file in bounded memory: sorted runs, spilled to one unnamed file when there are several."""

from __future__ import annotations

import heapq
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from traceview.event import Event, decode_event, encode_event

__all__ = ["Keyed", "Sorter"]

Keyed = tuple[int, int, int, Event]
"""(start ns, minus duration ns, place in the file, event): an enclosing span sorts before what it encloses."""

_BLOCK: Final = 1 << 16


class Sorter:
    """Collects the events of one file and gives them back in order of time; use it once.

    Args:
        directory: For spilled runs; needs about the size of the input file.
        run_events: Events held in memory at most.
    """

    def __init__(self, directory: Path, run_events: int = 100_000) -> None:
        self._directory = directory
        self._limit = run_events
        self._run: list[Keyed] = []
        self._spill: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []  # offset and length in the spill
        self._count = 0

    def add(self, start_ns: int, end_ns: int, event: Event) -> None:
        """Take one event."""
        run = self._run
        run.append((start_ns, start_ns - end_ns, self._count, event))
        self._count += 1
        if len(run) >= self._limit:
            self._spill_run()

    def events(self) -> Iterator[Keyed]:
        """Yield all events in order, then release the memory and the spill."""
        self._run.sort()
        if self._spill is None:
            run, self._run = self._run, []
            yield from run
            return
        with self._spill:
            sources: list[Iterator[Keyed]] = [self._read(offset, length) for offset, length in self._runs]
            sources.append(iter(self._run))
            yield from heapq.merge(*sources)

    def close(self) -> None:
        """Release what ``events`` did not, after an error."""
        self._run = []
        if self._spill is not None:
            self._spill.close()

    def _spill_run(self) -> None:
        self._run.sort()
        if self._spill is None:
            self._spill = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  # closed in events or close
        offset = self._spill.tell()
        lines = [b"%d %d %d %b\n" % (start, dur, place, encode_event(event)) for start, dur, place, event in self._run]
        self._spill.write(b"".join(lines))
        self._runs.append((offset, self._spill.tell() - offset))
        self._run = []

    def _read(self, offset: int, length: int) -> Iterator[Keyed]:
        spill: Any = self._spill
        end = offset + length
        rest = b""
        spill.flush()
        while offset < end:
            block = os.pread(spill.fileno(), min(_BLOCK, end - offset), offset)
            offset += len(block)
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            for line in lines:
                start, dur, place, body = line.split(b" ", 3)
                yield int(start), int(dur), int(place), decode_event(body)
