"""The ``traceview`` command. Only click is loaded until a command runs.

Results go to stdout, warnings, progress and hints to stderr. Exit codes: 0, 2 usage or input, 5 output, 7 incomplete
data with ``--strict``, 10 a check failed, 130 interrupted.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

from traceview.console import print_json

__all__ = ["main"]

_SETTINGS: Final = {"help_option_names": ["-h", "--help"]}
_COMMANDS: Final = {
    "merge": "traceview.commands",
    "stats": "traceview.analysis",
    "stragglers": "traceview.analysis",
    "sessions": "traceview.analysis",
    "report": "traceview.analysis",
    "view": "traceview.analysis",
    "diff": "traceview.analysis",
    "validate": "traceview.commands",
    "convert": "traceview.commands",
    "collect": "traceview.collect",
    "tail": "traceview.tail",
}
"""Command to the module that has it, in the order of the help."""


class _Lazy(click.Group):
    """Loads a command's module when it is asked for."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        module = _COMMANDS.get(name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, context: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with 130 and no word."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            context.exit(130)


@click.group(cls=_Lazy, context_settings=_SETTINGS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As --json of the command; with --version: as JSON.")
@click.option("--version", is_flag=True, help="Print the version.")
@click.option("-q", "--quiet", is_flag=True, help="No warnings, no progress, no hints.")
@click.pass_context
def main(context: click.Context, /, *, as_json: bool, version: bool, quiet: bool) -> None:
    """Read the traces of a run: one timeline, statistics, who made whom wait, checks.

    INPUT is a trial directory (DIR/last: the newest in DIR), a trace directory, files or a quoted glob; .gz, .zst too.
    """
    context.obj = {"json": as_json, "quiet": quiet}
    if version:
        _print_version(as_json=as_json)
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def _print_version(*, as_json: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from traceview.processes import FORMAT

    try:
        number = version("zbus-runtime")
    except PackageNotFoundError:
        number = "unknown"
    if as_json:
        facts: dict[str, Any] = {"name": "traceview", "version": number, "trace_format": FORMAT}
        print_json({"schema": "zbus.version/1", **facts})
    else:
        click.echo(f"traceview {number}")
