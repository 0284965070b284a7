"""Commands that write traces: ``merge``, ``validate`` and ``convert``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from traceview.console import (
    Progress,
    errors,
    fail,
    ledger,
    modes,
    numbers,
    output_options,
    print_json,
    range_of,
    source_options,
    sources,
    time_ns,
    warn,
    words,
)

if TYPE_CHECKING:
    from traceview.keep import Keep
    from traceview.merge import MergeReport

__all__ = ["convert", "merge", "validate"]

_MAX_BAD = 5


@click.command()
@source_options
@click.option("-o", "--output", type=click.Path(), help="Output file [default: <root>/merged.json.gz].")
@click.option("--format", "form", type=click.Choice(["chrome", "perfetto"]), help="[default: perfetto for .pftrace]")
@click.option("--steps", metavar="A-B", help="Only what touches these steps, by recorded markers.")
@click.option(
    "--since", metavar="TIME", help="Only what touches the time after this, such as 1.5s, on the run's clock."
)
@click.option("--until", metavar="TIME", help="Only what touches the time before this.")
@click.option("--category", metavar="A,B", default="", help="Only events of these categories (and counters).")
@click.option("--min-dur", metavar="TIME", help="Drop shorter spans, such as 50us; ends of arrows stay.")
@click.option(
    "--align",
    type=click.Choice(["clock", "rpc", "wall", "start", "none"]),
    default="clock",
    show_default=True,
    help="How to match clocks: measured offsets and calls, calls alone, wall clocks, each file from 0, not at all.",
)
@click.option("--add", metavar="FILE", multiple=True, help="Another file to merge in, of any tool (repeat).")
@click.option("--strict", is_flag=True, help="Exit 7 if any data is missing (the output is still written).")
@click.option("--report", "report_to", type=click.Path(dir_okay=False), help="Write the report as JSON to this file.")
@click.option("--jobs", type=click.IntRange(1), help="Processes to work with, each of about 90 MB [default: 2].")
@output_options
@click.pass_context
def merge(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Merge the files of all roles and ranks into one timeline.

    Clocks are matched, pids and tids made unique, overlapping spans laid out in lanes; damaged lines are skipped,
    counted and named. Open the output in Perfetto.
    """
    from traceview import merge as merging
    from traceview.reader import default_output

    as_json, quiet = modes(context, options)
    keep = _keep(options)
    ranks = numbers(options["ranks"])
    steps = range_of(options["steps"], "--steps") if options["steps"] else None
    with errors(as_json=as_json):
        output = Path(options["output"]) if options["output"] else default_output(list(inputs))
        report = merging.merge(
            (*inputs, *options["add"]),
            output,
            form=options["form"],
            roles=words(options["roles"]),
            ranks=ranks,
            steps=steps,
            keep=keep,
            all_runs=options["all_runs"],
            clocks=options["align"],
            jobs=options["jobs"],
            on_warning=None if quiet else warn,
            on_progress=Progress("merging", quiet=quiet or as_json),
        )
    _write_report(report, options["report_to"], as_json=as_json)
    if as_json:
        print_json(report.to_dict())
    else:
        _show_merge(report, quiet=quiet)
    if options["strict"] and report.incomplete:
        _fail_strict(report.problems, as_json=as_json)


def _keep(options: dict[str, Any]) -> Keep:
    from traceview.keep import Keep

    return Keep(
        time_ns(options["since"], "--since"),
        time_ns(options["until"], "--until"),
        time_ns(options["min_dur"], "--min-dur") or 0,
        frozenset(words(options["category"])),
    )


def _write_report(report: MergeReport, path: str | None, *, as_json: bool) -> None:
    from traceview.problems import OutputError

    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    except OSError as error:
        fail(OutputError(f"{path} cannot be written: {error.strerror}"), as_json=as_json)


def _show_merge(report: MergeReport, *, quiet: bool) -> None:
    click.echo(report.output)
    if quiet:
        return
    count = len(report.processes)
    click.echo(f"{count} processes · {report.events} events · {_arrows(report)} · {report.wall_s} s", err=True)
    ways = (("measured", "measured while it ran"), ("rpc", "told by requests and replies"))
    for how, words_ in ways:
        bounds = [p.clock_bound_us for p in report.processes if p.clock == how and p.clock_bound_us is not None]
        if bounds:
            click.echo(f"clock error ≤ {max(bounds):.0f} µs ({len(bounds)} processes, {words_})", err=True)
    wall = sum(1 for p in report.processes if p.clock == "wall")
    if wall:
        click.echo(f"{wall} processes are matched by wall clock: offsets between hosts were not measured", err=True)
    click.echo(f"next: open it in Perfetto, or traceview stats {click.format_filename(report.output)}", err=True)


def _arrows(report: MergeReport) -> str:
    joined = report.arrows.get("joined")
    return f"{report.arrows.get('out')} arrows" if joined is None else f"{joined} arrows joined"


def _fail_strict(problems: dict[str, int], *, as_json: bool) -> NoReturn:
    from traceview.problems import IncompleteTraceError

    found = ", ".join(f"{kind} {count}" for kind, count in list(problems.items())[:_MAX_BAD])
    error = IncompleteTraceError(f"trace data is incomplete: {found}", hint="drop --strict to accept it")
    if not as_json:
        fail(error, as_json=False)
    sys.exit(error.exit_code)


@click.command()
@sources
@click.option("--repair", is_flag=True, help="Write what is good or can be repaired to the directory of -o.")
@click.option("-o", "--output", type=click.Path(file_okay=False), help="Directory for --repair.")
@output_options
@click.pass_context
def validate(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Check trace files; exit 10 if any data is damaged or missing.

    With --repair the damaged parts are left out or repaired in new files; the inputs stay as they are.
    """
    from traceview.validate import validate_files

    as_json, quiet = modes(context, options)
    if options["repair"] != bool(options["output"]):
        msg = "--repair needs -o DIR, and -o needs --repair"
        raise click.UsageError(msg)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        rows = validate_files(inputs, problems, repair=Path(options["output"]) if options["repair"] else None)
    good = not problems.counts
    if as_json:
        found = {"good": good, "files": rows, "problems": problems.by_kind(), "repaired": options["output"]}
        print_json({"schema": "zbus.traceview.validate/1", **found})
    else:
        events = sum(row["events"] for row in rows)
        verdict = "all good" if good else ", ".join(f"{kind} {n}" for kind, n in problems.by_kind().items())
        click.echo(f"{len(rows)} files, {events} events: {verdict}")
        if options["repair"] and not quiet:
            click.echo(f"repaired files: {options['output']}", err=True)
    if not good and not options["repair"]:
        sys.exit(10)


@click.command()
@sources
@click.option("-o", "--output", type=click.Path(), required=True, help="File, or directory for jsonl.")
@click.option("--to", type=click.Choice(["chrome", "perfetto", "jsonl", "otlp"]), help="[default: by the name of -o]")
@click.option(
    "--unit",
    type=click.Choice(["ns", "us", "ms", "s"]),
    default="us",
    show_default=True,
    help="In which the input counts, if its writer kept to no format; only with --to jsonl.",
)
@output_options
@click.pass_context
def convert(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Convert traces: ours, AReaL's, torch.profiler's, VizTracer's and other Chrome traces.

    To Chrome JSON (.json, .json.gz), Perfetto (.pftrace), JSON lines per role and rank (a directory), or OTLP JSON
    (.otlp.json).
    """
    from traceview import convert as converting

    as_json, quiet = modes(context, options)
    with errors(as_json=as_json):
        output = Path(options["output"])
        form = converting.form_of(output, options["to"])
        report = converting.convert(inputs, output, form, unit=options["unit"], on_warning=None if quiet else warn)
    if as_json:
        print_json({**report.to_dict(), "schema": "zbus.traceview.convert/1"})
    else:
        click.echo(report.output)
        if not quiet:
            click.echo(f"{len(report.processes)} processes · {report.events} events · {form}", err=True)
