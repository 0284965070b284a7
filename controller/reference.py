"""Makes ``docs/reference/cli.md`` from the command itself: ``python -m controller.reference``."""

from __future__ import annotations

import inspect
import sys
from typing import Final

import click

from controller.cli import cli

__all__ = ["page"]

_INTRO: Final = """\
# zbus-controller

Made from `controller/cli.py`.

- stdout carries the result, stderr everything else. With `--json` stdout is exactly one object with a `schema`, such as
  `zbus.run/1`; what a driver prints goes to stderr then.
- Exit codes are listed in [exit codes](exit-codes.md), error codes in [error codes](errors.md), which
  `zbus-controller explain CODE` prints offline.
- `KEY=VALUE` sets a key of the [configuration](config.md).
- The options `-v`, `-q`, `--json`, `--root` and `--color` may stand before or after the command's name.
- Shell completion is click's own: `eval "$(_ZBUS_CONTROLLER_COMPLETE=bash_source zbus-controller)"`.

## Ctrl-C

The first Ctrl-C cancels what runs and stops all workers in order (at most `scheduler.stop_grace` plus 2 s, then by
force); the command ends with 130. A second one ends it at once, and local workers follow within 2 s. SIGTERM is an
orderly stop too, with 143.

## What a TARGET is

- `job.yaml` or `job.toml`: a config whose `target:` names the driver, `file.py:function` relative to the config, or
  `module:function`. The roles are launched first; the function gets a `run` with `bus`, `config` (the `params`
  section), `resume`, `trial_dir`, `progress(total, text)` and `table(columns, total, text)`; the mapping it returns
  becomes the metrics in `summary.json`.
- `module:function` or `file.py:function`: the same, with the roles from `-c FILE`.
- `script.py`: run as `python script.py` would. A `Controller.launch` in it obeys the options of this command.

## What a run leaves

`<root>/<experiment>/<trial>/`: `config.yaml` (resolved, with origins), `logs/`, `traces/`, `crash/`, `checkpoints/`,
`report.html` and `summary.json`:

| key | meaning |
| --- | --- |
| `schema` | `zbus.run/1` |
| `status` | `ok`, `failed`, `interrupted` or `terminated` |
| `exit_code` | of the command |
| `experiment`, `trial`, `trial_dir`, `target` | what ran, and where |
| `started_at`, `wall_s`, `version` | when, how long, by which version |
| `trace` | the merged timeline, or null |
| `report` | the page that explains it, or null |
| `metrics` | what the driver returned |
| `bus` | figures of the bus, such as `retries` |
| `error` | null, or code, type, message, role, rank, … of the root cause |
"""


_SHARED: Final = {parameter.name for parameter in cli.params}


def page() -> str:
    """Return the page."""
    parts = [_INTRO]
    root = click.Context(cli, info_name="zbus-controller")
    parts.append("## Options of every command\n")
    parts += _table([parameter for parameter in cli.params if parameter.name != "version"], root)
    for name in cli.list_commands(root):
        command = cli.commands[name]
        context = click.Context(command, info_name=name, parent=root)
        own = [parameter for parameter in command.params if parameter.name not in _SHARED]
        usage = " ".join(parameter.make_metavar(context) for parameter in own if isinstance(parameter, click.Argument))
        parts.append(f"## `zbus-controller {name}`\n")
        parts.append(f"```text\nzbus-controller {name} [OPTIONS] {usage}\n```\n")
        parts.append(inspect.cleandoc(command.help or "") + "\n")
        parts += _table(own, context)
    return "\n".join(parts).rstrip("\n") + "\n"


def _table(parameters: list[click.Parameter], context: click.Context) -> list[str]:
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context)) is not None]
    if not records:
        return []
    rows = [f"| `{form.replace('|', ' or ')}` | {' '.join(meaning.split())} |" for form, meaning in records]
    return ["| option | meaning |", "| --- | --- |", *rows, ""]


if __name__ == "__main__":
    sys.stdout.write(page())
