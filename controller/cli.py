"""The ``zbus-controller`` command: run, status, stop, explain.

Nothing heavy is imported here: each command imports what it needs when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import click

from controller.console import Console
from zbus.errors import ConfigError, ZbusError

__all__ = ["cli", "main"]

_F = TypeVar("_F", bound=Callable[..., Any])
_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _shared(command: _F) -> _F:
    """Add the options every command takes; each may stand before or after the command's name."""
    for option in reversed(
        (
            click.option(
                "-v", "--verbose", count=True, help="Show more: hidden frames, log records. Repeat for debug."
            ),
            click.option("-q", "--quiet", is_flag=True, help="Show only results and errors."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
            click.option("--root", metavar="DIR", help="Directory of all experiments [zbus-runs]."),
            click.option(
                "--color",
                type=click.Choice(["auto", "always", "never"]),
                help="Colours on stderr and stdout [auto; NO_COLOR and FORCE_COLOR count].",
            ),
        )
    ):
        command = option(command)
    return command


def _console(options: dict[str, Any]) -> tuple[Console, str | None]:
    """Take the shared options out of a command's and the group's options."""
    context = click.get_current_context()
    above: dict[str, Any] = context.find_root().params if context.parent is not None else {}
    verbosity = options.pop("verbose", 0) + above.get("verbose", 0)
    quiet = options.pop("quiet", False) or above.get("quiet", False)
    as_json = options.pop("as_json", False) or above.get("as_json", False)
    color = options.pop("color", None) or above.get("color") or "auto"
    root = options.pop("root", None) or above.get("root")
    return Console(json=as_json, verbosity=-1 if quiet else verbosity, color=color), root


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's call
    if not value or context.resilient_parsing:
        return
    from zbus import __version__
    from zbus.build import build

    if "--json" in context.obj:
        import json
        import platform

        from zbus.protocol.messages import PROTOCOL_VERSION

        click.echo(
            json.dumps(
                {
                    "schema": "zbus.version/1",
                    "program": "zbus-controller",
                    "version": __version__,
                    "build": build(),
                    "protocol": PROTOCOL_VERSION,
                    "python": platform.python_version(),
                }
            )
        )
    else:
        click.echo(f"zbus-controller {__version__}{' (compiled)' if build() == 'compiled' else ''}")
    context.exit()


@click.group(context_settings=_SETTINGS)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
@_shared
def cli(**_options: Any) -> None:
    """Run and operate trials: one controller process, workers that host engines, a bus between them."""


class _RunCommand(click.Command):
    """Keeps what follows ``--`` apart, and the place of each argument for error messages."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        before, after = args[:cut], args[cut + 1 :]
        ctx.meta["zbus.arguments"] = after
        ctx.meta["zbus.typed"] = list(before)
        return super().parse_args(ctx, before)


@cli.command("run", cls=_RunCommand)
@click.argument("target")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]... [-- ARGS]...")
@click.option("-c", "--config", "files", multiple=True, metavar="FILE", help="Config file (YAML, TOML); repeatable.")
@click.option("-e", "--experiment", metavar="NAME", help="Name of the experiment.")
@click.option("-t", "--trial", metavar="NAME", help="Name of the trial [time and a random suffix].")
@click.option("--role", "roles", multiple=True, metavar="NAME=N", help="Number of ranks of a role; repeatable.")
@click.option("--scheduler", metavar="TYPE", help="inline, local or external [local].")
@click.option("--startup-timeout", metavar="TIME", help="Time until all ranks must be ready [60s].")
@click.option("--resume", is_flag=True, help="Go on in an existing trial.")
@click.option("--overwrite", is_flag=True, help="Replace an existing trial.")
@click.option("--trace", metavar="LEVEL", help="off, rpc or full [rpc].")
@click.option("--merge/--no-merge", default=None, help="Merge the traces at the end [merge].")
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved config, start nothing.")
@click.option(
    "--progress",
    type=click.Choice(["auto", "bar", "plain", "json", "none"]),
    default="auto",
    show_default=True,
    help="How progress is shown on stderr.",
)
@_shared
def run_command(**options: Any) -> None:
    """Start a trial and run TARGET in this process.

    TARGET is a YAML or TOML config that names its driver, a Python script, or module:function.
    KEY=VALUE sets a config key, such as scheduler.type=inline; what follows -- goes to a script.
    """
    console, root = _console(options)
    from controller.run import RunOptions, execute

    if options["resume"] and options["overwrite"]:
        msg = "--resume and --overwrite exclude each other"
        raise ConfigError(msg, hint="--resume keeps what the trial has, --overwrite removes it")
    context = click.get_current_context()
    raise SystemExit(
        execute(
            RunOptions(
                target=options["target"],
                overrides=[*_flag_overrides(options, root), *_numbered(options["overrides"], context)],
                files=list(options["files"]),
                arguments=context.meta["zbus.arguments"],
                resume=options["resume"],
                overwrite=options["overwrite"],
                progress=options["progress"],
                merge=options["merge"],
                dry_run=options["dry_run"],
            ),
            console,
        )
    )


def _flag_overrides(options: dict[str, Any], root: str | None) -> list[tuple[str, str]]:
    """Return options that are config keys as overrides."""
    keys = {
        "experiment": options["experiment"],
        "trial": options["trial"],
        "scheduler": options["scheduler"],
        "startup-timeout": options["startup_timeout"],
        "trace": options["trace"],
        "root": root,
    }
    places = {"scheduler": "scheduler.type", "startup-timeout": "scheduler.startup_timeout", "trace": "trace.level"}
    found = [
        (f"{places.get(flag, flag)}={value}", f"command line, --{flag}")
        for flag, value in keys.items()
        if value is not None
    ]
    for text in options["roles"]:
        name, equals, count = text.partition("=")
        if not (name and equals and count):
            msg = f"--role {text!r} is not of the form NAME=N"
            raise ConfigError(msg, hint="write --role actor=4")
        found.append((f"roles.{name}.replicas={count}", "command line, --role"))
    return found


def _numbered(overrides: Sequence[str], context: click.Context) -> list[tuple[str, str]]:
    typed: list[str] = context.meta["zbus.typed"]
    return [(text, f"command line, argument {typed.index(text) + 1}") for text in overrides]


@cli.command("status")
@click.argument("trial", required=False)
@_shared
def status_command(trial: str | None, **options: Any) -> None:
    """Show the roles and ranks of TRIAL: a directory, EXPERIMENT/TRIAL, TRIAL, or the newest one."""
    console, root = _console(options)
    from controller.status import show_status

    raise SystemExit(show_status(console, root, trial))


@cli.command("stop")
@click.argument("trial", required=False)
@click.option("--grace", default="20s", show_default=True, metavar="TIME", help="Time for an orderly stop.")
@click.option("--force", is_flag=True, help="Kill at once.")
@_shared
def stop_command(trial: str | None, grace: str, *, force: bool, **options: Any) -> None:
    """Stop TRIAL in order, then terminate, then kill; only this trial's own processes."""
    console, root = _console(options)
    from controller.stop import stop_trial
    from zbus.config import parse_duration

    raise SystemExit(stop_trial(console, root, trial, grace_s=parse_duration(grace, "--grace"), force=force))


@cli.command("explain")
@click.argument("code", required=False)
@_shared
def explain_command(code: str | None, **options: Any) -> None:
    """Explain an error code such as ZB0301, offline; without CODE list all."""
    console, _ = _console(options)
    from controller.explain import TEXTS, text_of

    if code is None:
        console.result("\n".join(f"{name}  exit {entry.exit_code:>2}  {entry.title}" for name, entry in TEXTS.items()))
        console.object(
            {
                "schema": "zbus.explain/1",
                "codes": [{"code": c, "title": e.title, "exit_code": e.exit_code} for c, e in TEXTS.items()],
            }
        )
        return
    name = code.strip().upper().strip("[]")
    if name not in TEXTS:
        import difflib

        near = difflib.get_close_matches(name, TEXTS, 1)
        msg = f"there is no error code {code!r}"
        raise ConfigError(msg, hint=f"did you mean {near[0]}?" if near else "list them with: zbus-controller explain")
    console.result(text_of(name))
    console.object({"schema": "zbus.explain/1", "code": name, **TEXTS[name]._asdict()})


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with the code of ``docs/reference/exit-codes.md``."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = cli.main(args=typed, prog_name="zbus-controller", standalone_mode=False, obj=typed)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        _usage_error(error, typed)
        code = 2
    except (ZbusError, ExceptionGroup) as error:
        code = _fail(error, typed)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader went away (`| head`): nothing more can be said, and Python must not try to at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: click.ClickException, typed: Sequence[str]) -> None:
    """Show a usage error in the house's form, with click's own suggestion as it is."""
    from controller.render import Block, render_block

    context = getattr(error, "ctx", None)
    message = error.format_message()
    path = context.command_path if context is not None else "zbus-controller"
    console = Console(json="--json" in typed)
    console.object({"schema": "zbus.error/1", "error": {"code": "ZB0101", "message": message, "exit_code": 2}})
    first, *rest = message.splitlines()
    block = Block("ZB0101", first[:1].lower() + first[1:].rstrip("."), hint=" ".join([*rest, f"see {path} --help"]))
    console.error(render_block(block, console.err_style(), console.width))


def _fail(error: Exception, typed: Sequence[str]) -> int:
    from controller.render import error_json, exit_code_of, render_error

    # Click's context is gone by now, and an error may come before the options were understood.
    console = Console(json="--json" in typed, verbosity=sum(text in ("-v", "-vv", "--verbose") for text in typed))
    if (at := _index(typed, "--color")) is not None and typed[at + 1 : at + 2]:
        console.color = typed[at + 1]
    console.object({"schema": "zbus.error/1", "error": error_json(error)})
    console.error(render_error(error, style=console.err_style(), width=console.width, verbose=console.verbose))
    return exit_code_of(error)


def _index(texts: Sequence[str], text: str) -> int | None:
    return texts.index(text) if text in texts else None


if __name__ == "__main__":
    main()
