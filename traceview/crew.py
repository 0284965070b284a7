"""Merges the files of one run by several processes: each fills a part file, and tells what it did as JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traceview.align import Shift
from traceview.ends import EndsFile
from traceview.keep import Keep
from traceview.output import OutputFile, Part, PartFile, temporary_fd
from traceview.part import merge_part
from traceview.part_report import PartJob, PartReport, ProcessReport
from traceview.problems import OutputError, Problems, Warned
from traceview.reader import Source

__all__ = ["Done", "run_parts"]


@dataclass(slots=True)
class Done:
    """What all jobs made.

    Attributes:
        parts: In the order of the jobs: (report, descriptor of the part file, part).
        ends: Descriptors of the files with the ends of arrows.
    """

    parts: list[tuple[PartReport, int, Part]]
    ends: list[int]


@contextlib.contextmanager
def run_parts(
    jobs: list[PartJob],
    form: str,
    out: OutputFile,
    problems: Problems,
    workers: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Done]:
    """Merge every file; the part files live as long as the context.

    Args:
        jobs: One per file.
        form: Format of the output.
        out: The output: its directory takes the part files, its suffix says whether they are compressed.
        problems: Told of all that was wrong.
        workers: Processes to use; 1: this one.
        on_progress: Told of files done and files in all.

    Raises:
        OutputError: A part cannot be written.
    """
    fds: list[int] = []
    try:
        if workers <= 1:
            fds += [temporary_fd(out.directory), temporary_fd(out.directory)]
            yield Done(_run_here(jobs, form, out, problems, (fds[0], fds[1]), on_progress), fds[1:])
        else:
            yield Done(_run_crew(jobs, form, out, problems, workers, fds, on_progress), fds[1::2])
    finally:
        for fd in fds:
            os.close(fd)


def _run_here(
    jobs: list[PartJob],
    form: str,
    out: OutputFile,
    problems: Problems,
    fds: tuple[int, int],
    on_progress: Callable[[int, int], None] | None,
) -> list[tuple[PartReport, int, Part]]:
    from traceview.merge import encoder_of

    fd = fds[0]
    file = PartFile(fd, compress=out.compress, shown=out.shown)
    ends = EndsFile(fds[1], out.shown)
    found = []
    for count, job in enumerate(jobs, 1):
        report = merge_part(job, encoder_of(form), out.directory, problems, file.write, ends)
        found.append((report, fd, file.end_part()))
        if on_progress is not None:
            on_progress(count, len(jobs))
    return found


def _run_crew(
    jobs: list[PartJob],
    form: str,
    out: OutputFile,
    problems: Problems,
    workers: int,
    fds: list[int],
    on_progress: Callable[[int, int], None] | None,
) -> list[tuple[PartReport, int, Part]]:
    """Share the files out by size, the largest first, and gather what the processes tell."""
    shares: list[list[PartJob]] = [[] for _ in range(workers)]
    sizes = [0] * workers
    for size, job in sorted(((_size(job), job) for job in jobs), key=lambda pair: -pair[0]):
        least = sizes.index(min(sizes))
        shares[least].append(job)
        sizes[least] += size
    found: dict[int, tuple[PartReport, int, Part]] = {}
    problems_of: dict[int, dict[str, Any]] = {}
    running: list[tuple[subprocess.Popen[str], int]] = []
    try:
        for share in filter(None, shares):
            pair = temporary_fd(out.directory), temporary_fd(out.directory)
            fds += pair
            running.append((_start(pair, share, form, out), pair[0]))
        for process, fd in running:
            assert process.stdout is not None  # noqa: S101  # we asked for a pipe
            for line in process.stdout:
                told = json.loads(line)
                if "error" in told:
                    raise OutputError(told["error"], hint=told["hint"])
                problems_of[told["number"]] = told["problems"]
                found[told["number"]] = (_report_of(told["report"]), fd, tuple(told["part"]))
                if on_progress is not None:
                    on_progress(len(found), len(jobs))
            if process.wait() != 0:
                msg = f"{out.shown} cannot be written: a merging process ended with code {process.returncode}"
                raise OutputError(msg, hint="--jobs 1 needs the least memory")
    finally:
        for process, _ in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    for job in jobs:  # in their order, whoever was first
        _tell(problems_of[job.number], problems)
    return [found[job.number] for job in jobs]


def _size(job: PartJob) -> int:
    try:
        return job.source.path.stat().st_size
    except OSError:
        return 0


def _start(fds: tuple[int, int], share: list[PartJob], form: str, out: OutputFile) -> subprocess.Popen[str]:
    work = {
        "fds": fds,
        "form": form,
        "compress": out.compress,
        "shown": out.shown,
        "directory": str(out.directory),
        "jobs": [_job_dict(job) for job in share],
    }
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-m", "traceview.crew"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=fds,
        text=True,
        env=env,
    )
    assert process.stdin is not None  # noqa: S101  # we asked for a pipe
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(work))
    return process


def _job_dict(job: PartJob) -> dict[str, Any]:
    found = asdict(job)
    found["source"]["path"] = str(job.source.path)
    found["source"]["spill"] = str(job.source.spill) if job.source.spill is not None else None
    found["keep"]["categories"] = sorted(job.keep.categories)
    return found


def _job_of(found: dict[str, Any]) -> PartJob:
    source, shift, keep = found.pop("source"), found.pop("shift"), found.pop("keep")
    source["path"] = Path(source["path"])
    source["spill"] = Path(source["spill"]) if source["spill"] else None
    shift["at_ns"], shift["offset_ns"] = tuple(shift["at_ns"]), tuple(shift["offset_ns"])
    keep["categories"] = frozenset(keep["categories"])
    keep["windows"] = None if keep["windows"] is None else tuple((a, b) for a, b in keep["windows"])
    return PartJob(source=Source(**source), shift=Shift(**shift), keep=Keep(**keep), **found)


def _report_of(found: dict[str, Any]) -> PartReport:
    processes = [ProcessReport(**process) for process in found.pop("processes")]
    rows = [(pid, tid, name, order) for pid, tid, name, order in found.pop("rows")]
    return PartReport(processes, rows, **found)


def _tell(told: dict[str, Any], problems: Problems) -> None:
    """Add another process's problems to ours."""
    first = {(code, kind): text for code, kind, text in reversed(told["first"])}
    counted: dict[tuple[str, str], int] = {(code, kind): count for code, kind, count in told["counts"]}
    for code, kind, text in told["first"]:
        problems.add(code, kind, text, 1)
        counted[code, kind] -= 1
    for (code, kind), count in counted.items():
        if count:
            problems.add(code, kind, first.get((code, kind), kind), count, shown=False)


def main() -> None:
    """Merge the files that standard input names, as one process of a crew."""
    import gc

    from traceview.merge import encoder_of

    gc.disable()  # millions of small objects and no cycles
    work = json.load(sys.stdin)
    file = PartFile(work["fds"][0], compress=work["compress"], shown=work["shown"])
    ends = EndsFile(work["fds"][1], work["shown"])
    directory = Path(work["directory"])
    for found in work["jobs"]:
        problems = Problems()
        job = _job_of(found)
        try:
            report = merge_part(job, encoder_of(work["form"]), directory, problems, file.write, ends)
            part = file.end_part()
        except OutputError as error:
            print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)  # noqa: T201  # our protocol
            return
        counts = [(code, kind, count) for (code, kind), count in problems.counts.items() if count]
        first = [_warned(warned) for warned in problems.first]
        told = {"counts": counts, "first": first}
        answer = {"number": job.number, "report": asdict(report), "part": part, "problems": told}
        print(json.dumps(answer), flush=True)  # noqa: T201  # our protocol
        del report, answer
        gc.collect()


def _warned(warned: Warned) -> tuple[str, str, str]:
    return warned.code, warned.kind, warned.text


if __name__ == "__main__":
    main()
