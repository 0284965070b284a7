"""Many files, one timeline: aligned, with unique pids and tids, own names, lanes and arrows.

Files are merged each by itself, several at once where there are several processors, and their parts joined: memory
does not grow with the input, and viewers sort across processes anyway. Damage is reported, not raised.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from traceview.choose import Choice, choose, total_bytes
from traceview.chrome import ChromeEncoder, chrome_end, chrome_head
from traceview.crew import run_parts
from traceview.encoder import Encoder
from traceview.ends import count_joined
from traceview.keep import Keep
from traceview.leftovers import find_sources
from traceview.output import OutputFile
from traceview.part_report import PartJob, PartReport, ProcessReport
from traceview.problems import InputError, Problems, Warned
from traceview.processes import FORMAT
from traceview.steps import step_windows

__all__ = ["FORMAT", "MergeReport", "ProcessReport", "encoder_of", "merge", "output_format"]

_DOUBTFUL: Final = {"wall": "clock not measured", "none": "clock unknown"}
_MANY_BYTES: Final = 8 << 20
_BIG_EVENTS: Final = 1_000_000
_MOST_WORKERS: Final = 2
"""Processes unless more are asked for: with this one they stay below 256 MB in all, whatever the size of the input."""


@dataclass(slots=True)
class MergeReport:
    """What a merge did; ``to_dict`` is the JSON form.

    Attributes:
        output: The file written.
        format: ``chrome`` or ``perfetto``.
        events: Events in it, without metadata.
        spans: Spans among them.
        lanes: Rows added because spans overlapped on one thread.
        arrows: ``out`` and ``in`` ends, and how many ids had both (``joined``).
        processes: Every process, in the viewer's order.
        problems: Damage and doubts, by kind.
        warnings: The first places of each kind, as (code, text).
        incomplete: Whether ``--strict`` would refuse.
        bytes: Size of the output.
        wall_s: Seconds taken.
    """

    output: str
    format: str = "chrome"
    events: int = 0
    spans: int = 0
    lanes: int = 0
    arrows: dict[str, int] = field(default_factory=dict)
    processes: list[ProcessReport] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    incomplete: bool = False
    bytes: int = 0
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with its schema name."""
        return {"schema": "zbus.traceview.merge/1", **asdict(self)}


def output_format(output: Path, asked: str | None = None) -> str:
    """Return ``perfetto`` or ``chrome``: as asked for, else by the output's suffix."""
    if asked:
        return asked
    name = output.name.removesuffix(".gz")
    return "perfetto" if name.endswith((".pftrace", ".perfetto-trace")) else "chrome"


def encoder_of(form: str) -> Encoder:
    """Return a new encoder of a format."""
    if form == "perfetto":
        from traceview.perfetto import PerfettoEncoder

        return PerfettoEncoder()
    return ChromeEncoder()


def merge(
    inputs: Collection[str],
    output: Path,
    *,
    form: str | None = None,
    roles: Collection[str] = (),
    ranks: Collection[int] = (),
    steps: tuple[int, int] | None = None,
    keep: Keep | None = None,
    all_runs: bool = False,
    clocks: str = "clock",
    jobs: int | None = None,
    on_warning: Callable[[Warned], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    run_events: int = 60_000,
    segment: int = 250_000,
) -> MergeReport:
    """Merge the trace files behind ``inputs`` into one trace.

    Args:
        inputs: Trial directories, directories, files or globs.
        output: Written whole or not at all; gz by suffix. Never one of the inputs.
        form: ``chrome`` or ``perfetto``; None: by the output's suffix.
        roles: Only these roles; empty: all.
        ranks: Only these ranks; empty: all.
        steps: Only what touches the steps from … to, both included.
        keep: Which events to keep; None: all.
        all_runs: Keep files of older runs that lie in the same tree.
        clocks: How to match clocks, see ``choose``.
        jobs: Processes to work with, each of about 90 MB; None: two, if there are processors and the input is large.
        on_warning: Told of the first problems of each kind, at once.
        on_progress: Told of files done and files in all.
        run_events: Encoded events held in memory at most, by each process.
        segment: Events of one file laid out at once at most.

    Raises:
        InputError: No input, or the output is one of the inputs, or the steps are not in the trace.
        OutputError: The output cannot be written; nothing of it stays behind.
    """
    began = time.monotonic()
    problems = Problems(on_warning=on_warning)
    sources = find_sources(inputs, problems, exclude=output)
    _refuse_overwrite(inputs, output)
    kept = choose(sources, problems, roles=roles, ranks=ranks, all_runs=all_runs, clocks=clocks)
    keep = keep or Keep()
    if steps is not None:
        keep = Keep(keep.since_ns, keep.until_ns, keep.min_dur_ns, keep.categories, step_windows(kept, steps))
    form = output_format(output, form)
    parts = [_job(choice, number, len(kept), keep, run_events, segment) for number, choice in enumerate(kept)]
    workers = jobs if jobs is not None else _workers(kept)
    report = MergeReport(str(output), form)
    with OutputFile(output) as out:
        with run_parts(parts, form, out, problems, workers, on_progress) as done:
            reports = [report for report, _, _ in done.parts]
            _sum_up(report, reports, problems, done.ends)
            out.write(_head(report, reports, form))
            for _, fd, part in done.parts:
                out.add_part(fd, part)
        if form == "chrome":
            out.write(chrome_end(_facts(report)))
        out.commit()
        report.bytes = out.bytes
    report.wall_s = round(time.monotonic() - began, 3)
    return report


def _job(choice: Choice, number: int, files: int, keep: Keep, run_events: int, segment: int) -> PartJob:
    return PartJob(
        choice.source,
        choice.shift,
        number,
        files,
        choice.base_us,
        choice.role,
        choice.rank,
        keep,
        run_events,
        segment,
    )


def _workers(kept: list[Choice]) -> int:
    if len(kept) == 1 or total_bytes(kept) < _MANY_BYTES:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), len(kept), _MOST_WORKERS))


def _sum_up(report: MergeReport, parts: list[PartReport], problems: Problems, ends: list[int]) -> None:
    names: Counter[str] = Counter()
    report.processes = [process for part in parts for process in part.processes]
    matched = any(process.clock_bound_us is not None for process in report.processes)
    for process in report.processes:
        known = f"{process.role}/{process.rank}" if process.role is not None and process.rank is not None else ""
        name = process.name or known or Path(process.file).name
        if matched and process.clock in _DOUBTFUL:
            name = f"{name} ({_DOUBTFUL[process.clock]})"
        names[name] += 1
        process.name = name if names[name] == 1 else f"{name} #{names[name]}"
    report.events = sum(p.events for p in report.processes)
    report.spans = sum(part.spans for part in parts)
    report.lanes = sum(part.lanes for part in parts)
    out, into = sum(p.arrows[0] for p in parts), sum(p.arrows[1] for p in parts)
    report.arrows = {"out": out, "in": into, "joined": count_joined(ends, out + into)}
    if report.events > _BIG_EVENTS and report.format == "chrome":
        text = f"{report.events} events: viewers get slow; --steps, --min-dur or -o merged.pftrace help"
        problems.add("ZT0116", "large", text)
    report.problems = problems.by_kind()
    report.warnings = [(w.code, w.text) for w in problems.first]
    report.incomplete = problems.incomplete()


def _head(report: MergeReport, parts: list[PartReport], form: str) -> bytes:
    """Return what names all processes and rows."""
    names: list[tuple[str, int, int, dict[str, Any]]] = []
    for place, process in enumerate(report.processes):
        who = {"name": process.name, "role": process.role, "rank": process.rank}
        names.append(("process_name", process.pid, 0, {k: v for k, v in who.items() if v is not None}))
        names.append(("process_sort_index", process.pid, 0, {"sort_index": place}))
    rows = [row for part in parts for row in part.rows]
    if form == "perfetto":
        from traceview.perfetto import process_packet, thread_packet

        packets = [process_packet(p.pid, p.name, place) for place, p in enumerate(report.processes)]
        return b"".join(packets + [thread_packet(*row) for row in rows])
    for pid, tid, name, order in rows:
        names.append(("thread_name", pid, tid, {"name": name}))
        names.append(("thread_sort_index", pid, tid, {"sort_index": order}))
    return chrome_head(names)


def _facts(report: MergeReport) -> dict[str, Any]:
    return {
        "tool": "zbus traceview",
        "processes": [asdict(p) for p in report.processes],
        "problems": report.problems,
        "warnings": report.warnings,
        "arrows": report.arrows,
    }


def _refuse_overwrite(inputs: Collection[str], output: Path) -> None:
    """Refuse an output that is an input under any name."""
    if not output.exists():
        return
    for text in inputs:
        path = Path(text)
        if path.is_file() and path.samefile(output):
            msg = f"the output {output} is one of the inputs"
            raise InputError(msg, hint="name another output with -o")
    if output.name.endswith((".jsonl", ".jsonl.gz")):
        msg = f"the output {output} exists and looks like a trace of one rank"
        raise InputError(msg, hint="name another output with -o, such as merged.json.gz")
