"""The ``traceview`` command: ``merge``, ``stats`` and ``validate``.

Results go to stdout, warnings and hints to stderr. Exit codes: 0, 2 usage or input, 5 output, 7 incomplete data with
``--strict``, 10 a check failed. Only click is loaded until a command runs.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from traceview.merge import MergeReport
    from traceview.problems import Problems, Warned
    from zbus.errors import ZbusError

__all__ = ["main"]

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_MAX_BAD = 5


def _print_version(*, as_json: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from traceview.merge import FORMAT

    try:
        number = version("zbus-runtime")
    except PackageNotFoundError:
        number = "unknown"
    if as_json:
        _print_json({"schema": "zbus.version/1", "name": "traceview", "version": number, "trace_format": FORMAT})
    else:
        click.echo(f"traceview {number}")


def _output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("-q", "--quiet", is_flag=True, help="No warnings and no hints.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


@click.group(context_settings=_SETTINGS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As --json of the command; with --version: as JSON.")
@click.option("--version", is_flag=True, help="Print the version.")
@click.option("-q", "--quiet", is_flag=True, help="No warnings and no hints.")
@click.pass_context
def main(context: click.Context, /, *, as_json: bool, version: bool, quiet: bool) -> None:
    """Read the traces of a run: one timeline, statistics, checks.

    INPUT is a trial directory, a trace directory, files or a quoted glob; .gz is read too.
    """
    context.obj = {"json": as_json, "quiet": quiet}
    if version:
        _print_version(as_json=as_json)
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", type=click.Path(), help="Output file [default: <root>/merged.json.gz].")
@click.option("--format", "form", type=click.Choice(["chrome"]), default="chrome", help="Format of the output.")
@click.option("--roles", metavar="A,B", default="", help="Only these roles.")
@click.option("--ranks", metavar="0,2-5", default="", help="Only these ranks.")
@click.option("--all-runs", is_flag=True, help="Keep files of older runs in the same tree.")
@click.option("--strict", is_flag=True, help="Exit 7 if any data is missing (the output is still written).")
@_output_options
@click.pass_context
def merge(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Merge the files of all roles and ranks into one timeline.

    Clocks are matched, pids and tids made unique, overlapping spans laid out in lanes; damaged lines are skipped,
    counted and named. Open the output in Perfetto.
    """
    from pathlib import Path

    from traceview import merge as merging
    from traceview.reader import default_output
    from zbus.errors import ZbusError

    as_json, quiet = _modes(context, options)
    gc.disable()  # millions of small tuples and no cycles
    try:
        output = Path(options["output"]) if options["output"] else default_output(list(inputs))
        report = merging.merge(
            inputs,
            output,
            roles=[role for role in options["roles"].split(",") if role],
            ranks=_ranks(options["ranks"]),
            all_runs=options["all_runs"],
            on_warning=None if quiet else _warn,
        )
    except ZbusError as error:
        _fail(error, as_json=as_json)
    if as_json:
        _print_json(report.to_dict())
    else:
        _show_merge(report, quiet=quiet)
    if options["strict"] and report.incomplete:
        _fail_strict(report.problems, as_json=as_json)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--top", type=click.IntRange(1), default=30, show_default=True, help="Rows of the table.")
@_output_options
@click.pass_context
def stats(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Show how often and how long each span ran, per role and name."""
    from traceview.stats import collect_stats

    as_json, quiet = _modes(context, options)
    problems = _ledger(quiet=quiet)
    rows = _read(lambda: collect_stats(inputs, problems), as_json=as_json)
    if as_json:
        _print_json({"schema": "zbus.traceview.stats/1", "rows": rows, "problems": problems.by_kind()})
        return
    form = "{:<12} {:<32} {:>9} {:>12} {:>12} {:>12} {:>10}"
    click.echo(form.format("role", "name", "count", "p50", "p99", "max", "total"))
    for row in rows[: options["top"]]:
        times = [_duration(row[key]) for key in ("p50_us", "p99_us", "max_us", "total_us")]
        click.echo(form.format(_shown(row["role"], 12), _shown(row["name"], 32), row["count"], *times))
    if len(rows) > options["top"] and not quiet:
        click.echo(f"… {len(rows) - options['top']} more rows: --top {len(rows)}", err=True)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@_output_options
@click.pass_context
def validate(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Check trace files; exit 10 if any data is damaged or missing."""
    from traceview.validate import validate_files

    as_json, quiet = _modes(context, options)
    problems = _ledger(quiet=quiet)
    rows = _read(lambda: validate_files(inputs, problems), as_json=as_json)
    good = not problems.counts
    if as_json:
        found = {"good": good, "files": rows, "problems": problems.by_kind()}
        _print_json({"schema": "zbus.traceview.validate/1", **found})
    else:
        events = sum(row["events"] for row in rows)
        verdict = "all good" if good else ", ".join(f"{kind} {n}" for kind, n in problems.by_kind().items())
        click.echo(f"{len(rows)} files, {events} events: {verdict}")
    if not good:
        sys.exit(10)


# -- shared --------------------------------------------------------------------------------------------------------


def _modes(context: click.Context, options: dict[str, Any]) -> tuple[bool, bool]:
    return options["as_json"] or context.obj["json"], options["quiet"] or context.obj["quiet"]


def _ledger(*, quiet: bool) -> Problems:
    from traceview.problems import Problems

    return Problems(on_warning=None if quiet else _warn)


def _read(work: Callable[[], list[dict[str, Any]]], *, as_json: bool) -> list[dict[str, Any]]:
    from zbus.errors import ZbusError

    try:
        return work()
    except ZbusError as error:
        _fail(error, as_json=as_json)


def _show_merge(report: MergeReport, *, quiet: bool) -> None:
    click.echo(report.output)
    if quiet:
        return
    count = len(report.processes)
    click.echo(f"{count} processes · {report.events} events · {_arrows(report)} · {report.wall_s} s", err=True)
    wall = sum(1 for p in report.processes if p.clock == "wall")
    if wall:
        click.echo(f"{wall} processes are matched by wall clock: offsets between hosts were not measured", err=True)
    click.echo(f"next: open it in Perfetto, or traceview stats {click.format_filename(report.output)}", err=True)


def _arrows(report: MergeReport) -> str:
    joined = report.arrows.get("joined")
    return f"{report.arrows.get('out')} arrows" if joined is None else f"{joined} arrows joined"


def _ranks(text: str) -> list[int]:
    """Return the ranks of ``0,2-5``."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            msg = f"{part!r} is not a rank or a range such as 2-5"
            raise click.BadParameter(msg, param_hint="--ranks")
        ranks.extend(range(int(low), int(high if dash else low) + 1))
    return ranks


def _warn(warned: Warned) -> None:
    click.echo(f"warning[{warned.code}]: {_shown(warned.text, 400)}", err=True)


def _fail(error: ZbusError, *, as_json: bool) -> NoReturn:
    if as_json:
        facts = {"code": error.code, "message": error.message, "hint": error.hint}
        _print_json({"schema": "zbus.error/1", "error": facts})
    click.echo(f"error[{error.code}]: {_shown(error.message, 400)}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    sys.exit(error.exit_code)


def _fail_strict(problems: dict[str, int], *, as_json: bool) -> NoReturn:
    from traceview.problems import IncompleteTraceError

    found = ", ".join(f"{kind} {count}" for kind, count in list(problems.items())[:_MAX_BAD])
    error = IncompleteTraceError(f"trace data is incomplete: {found}", hint="drop --strict to accept it")
    if not as_json:
        _fail(error, as_json=False)
    sys.exit(error.exit_code)


def _shown(text: str, width: int) -> str:
    """Return foreign text safe for a terminal: control characters as escapes, cut at ``width``."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def _duration(us: float) -> str:
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / factor:.1f} {unit}"
    return f"{us / 1e6:.2f} s"


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False))
