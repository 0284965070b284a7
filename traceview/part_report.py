"""What is asked of the merge of one file, and what became of it; both travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from traceview.align import Shift
from traceview.keep import Keep
from traceview.reader import Source

__all__ = ["PartJob", "PartReport", "ProcessReport", "Row"]


@dataclass(frozen=True, slots=True)
class PartJob:
    """One file to merge.

    Attributes:
        source: The file.
        shift: Of its clock.
        number: Of the file, from 0; ``files`` is how many there are. They make pids and tids unique.
        base_us: See ``Choice``.
        role, rank: As far as known.
        keep: What to keep.
        memory_events: Encoded events held in memory at most.
        segment: Events laid out at once at most.
    """

    source: Source
    shift: Shift
    number: int
    files: int
    base_us: int = 0
    role: str | None = None
    rank: int | None = None
    keep: Keep = field(default_factory=Keep)
    memory_events: int = 60_000
    segment: int = 250_000


@dataclass(slots=True)
class ProcessReport:
    """One process of the merged trace.

    Attributes:
        name: As the viewer shows it.
        role, rank: None where nothing tells.
        file: Its input.
        pid: In the output.
        events: Written events, without metadata.
        complete: Whether its end event was there (None: a file that has none by nature).
        lost: Records its own process reported as lost, by reason.
        clock: How its times were matched, see ``align.Shift.how``.
        shift_us: What was added to its times.
        clock_bound_us: The error of that at most; None: unknown.
        first_us, last_us: Of its events, on the run's clock; None without events.
    """

    name: str
    role: str | None
    rank: int | None
    file: str
    pid: int = 0
    events: int = 0
    complete: bool | None = None
    lost: dict[str, int] = field(default_factory=dict)
    clock: str = "none"
    shift_us: float = 0.0
    clock_bound_us: float | None = None
    first_us: float | None = None
    last_us: float | None = None


Row = tuple[int, int, str, int]
"""(pid, tid, name, sort index) of one row of the output."""


@dataclass(slots=True)
class PartReport:
    """What became of one file.

    Attributes:
        processes: Of the file, in order of their first sign.
        rows: Of all of them.
        spans: Written.
        lanes: Rows added because spans overlapped.
        arrows: How many ends leave and arrive.
    """

    processes: list[ProcessReport] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    spans: int = 0
    lanes: int = 0
    arrows: list[int] = field(default_factory=lambda: [0, 0])
