"""The ``zbus-worker`` command: start, env.

Only click is imported here; each command imports what it needs when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import difflib
import gc
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from zbus.errors import ConfigError, ZbusError

if TYPE_CHECKING:
    from workers.agent import AgentConfig
    from workers.environment import Identity
    from workers.template import Template

__all__ = ["cli", "main"]

_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_IDENTITY: Final = ("role", "rank", "world_size", "local_rank", "local_world_size", "node_rank")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "nproc": "1",
    "wait_controller": "10m",
    "grace": "10s",
    "lease": "5s",
    "transport": "ipc",
    "bind": "127.0.0.1",
    "devices": "",
    "no_template": False,
    "propagate_exit": False,
}


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001  # click's call
    if not value or context.resilient_parsing:
        return
    from zbus import __version__

    if "--json" in sys.argv[1:]:
        import platform

        from zbus.protocol.messages import PROTOCOL_VERSION

        facts = {
            "schema": "zbus.version/1",
            "program": "zbus-worker",
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "python": platform.python_version(),
        }
        click.echo(json.dumps(facts))
    else:
        click.echo(f"zbus-worker {__version__}")
    context.exit()


@click.group(context_settings=_SETTINGS)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("-v", "--verbose", count=True, help="Show more.")
@click.option("-q", "--quiet", is_flag=True, help="Show only results and errors.")
def cli(**_options: Any) -> None:
    """Run the ranks of a role on this host."""


def _identity_options(command: Any) -> Any:
    for option in reversed(
        (
            click.option("--role", help="Role these ranks belong to [ZBUS_ROLE]."),
            click.option("--rank", type=click.IntRange(min=0), help="First rank of this worker [detected]."),
            click.option("--world-size", type=click.IntRange(min=1), help="Ranks of the role [detected]."),
            click.option("--local-rank", type=click.IntRange(min=0), help="Place on this host [detected]."),
            click.option("--local-world-size", type=click.IntRange(min=1), help="Ranks on this host [detected]."),
            click.option("--node-rank", type=click.IntRange(min=0), help="Index of this host in the role [detected]."),
        )
    ):
        command = option(command)
    return command


@cli.command()
@_identity_options
@click.option("--trial-dir", help="The trial directory [ZBUS_TRIAL_DIR, or root, experiment and trial].")
@click.option("--root", help="Directory of all experiments [ZBUS_ROOT, zbus-runs].")
@click.option("-e", "--experiment", help="Experiment [ZBUS_EXPERIMENT].")
@click.option("-t", "--trial", help="Trial [ZBUS_TRIAL].")
@click.option("--nproc", help="Ranks to run: a number, auto (cores) or gpu [1].")
@click.option("--wait-controller", help="How long to wait for a controller [10m].")
@click.option("--controller-lost", type=click.Choice(["exit", "wait"]), help="Without a controller [as the job says].")
@click.option("--grace", help="Time ranks have to end in order [10s].")
@click.option("--lease", help="Silence after which this worker counts as dead [5s].")
@click.option("--transport", type=click.Choice(["ipc", "tcp"]), help="How ranks are reached [ipc].")
@click.option("--bind", help="Address for tcp sockets and held ports [ZBUS_BIND, 127.0.0.1].")
@click.option("--devices", help="Accelerators by local rank: `0,1;2,3` [as they are].")
@click.option("--launcher", hidden=True, help="PID:START of the process that started this worker.")
@click.option("--no-template", is_flag=True, default=None, help="Start one interpreter per rank instead of forking.")
@click.option("--propagate-exit", is_flag=True, default=None, help="End with the exit code of a lone rank.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def start(settings: tuple[str, ...], **options: Any) -> None:
    """Start the ranks of a role on this host and watch over them.

    Waits for the controller of the trial, starts the ranks it has a job for, restarts them as the job says, and ends
    when they have ended. Each option can also be given as KEY=VALUE, such as `role=actor nproc=4`.
    """
    # Its modules stay anyway, and their start is what a launch waits for: nothing of them is looked at for garbage.
    gc.disable()
    from workers.agent import run_agent

    gc.freeze()
    gc.enable()
    _set_up_log()
    config = _agent_config({**_from_settings(settings, options), **_given(options)}, os.environ)
    sys.exit(run_agent(config, click.get_current_context().find_root().obj))


@cli.command()
@_identity_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def env(as_json: bool, **options: Any) -> None:  # noqa: FBT001  # click's call
    """Show the detected identity and where each value comes from."""
    from workers.environment import detect

    found = detect(options, os.environ).to_json()
    if as_json or click.get_current_context().find_root().params.get("as_json"):
        click.echo(json.dumps({"schema": "zbus.env/1", **found}))
        return
    for name, entry in found.items():
        words = "-" if entry is None else f"{entry['value']:<10} {entry['source']}"
        click.echo(f"{name.replace('_', ' '):<18}{words}")


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _from_settings(settings: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``KEY=VALUE`` arguments: the names of the options, strictly."""
    found: dict[str, Any] = {}
    for number, text in enumerate(settings, 1):
        name, equals, value = text.partition("=")
        key = name.replace("-", "_")
        where = f"command line, argument {number}"
        if not equals:
            msg = f"{text!r} is not of the form KEY=VALUE"
            raise ConfigError(msg, facts={"from": where})
        if key not in options:
            close = difflib.get_close_matches(key, list(options), 1)
            msg = f"unknown config key `{name}`"
            hint = f"did you mean `{close[0]}`?" if close else "see zbus-worker start --help"
            raise ConfigError(msg, facts={"from": where}, hint=hint)
        if key in ("no_template", "propagate_exit"):
            found[key] = value.lower() in ("1", "true", "yes", "on")
        elif key in _IDENTITY and key != "role":
            if not value.isdigit():
                msg = f"{name} is {value!r}, not a natural number"
                raise ConfigError(msg, facts={"from": where})
            found[key] = int(value)
        else:
            found[key] = value
    return found


def _trial_dir(options: Mapping[str, Any], environ: Mapping[str, str]) -> Path:
    from zbus.config import DEFAULT_ROOT, TrialDir

    if (path := options.get("trial_dir") or environ.get("ZBUS_TRIAL_DIR")) and "trial" not in options:
        return Path(os.path.abspath(path))  # noqa: PTH100  # links stay: other hosts may see them differently
    root = options.get("root") or environ.get("ZBUS_ROOT") or DEFAULT_ROOT
    experiment = options.get("experiment") or environ.get("ZBUS_EXPERIMENT")
    trial = options.get("trial") or environ.get("ZBUS_TRIAL")
    if not experiment or not trial:
        msg = "it is not said which trial to join"
        raise ConfigError(msg, hint="give --trial-dir DIR (the controller prints it), or --experiment and --trial")
    return TrialDir.at(root, experiment, trial).path


def _process_count(text: str) -> int:
    if text == "auto":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        from zbus.runtime.devices import find_gpus

        count = len(find_gpus())
        if not count:
            msg = "--nproc gpu: this host shows no accelerators"
            raise ConfigError(msg, hint="give a number")
        return count
    if not text.isdigit() or int(text) < 1:
        msg = f"--nproc is {text!r}, neither a positive number nor auto nor gpu"
        raise ConfigError(msg)
    return int(text)


def _agent_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> AgentConfig:
    from workers.agent import AgentConfig
    from workers.environment import detect
    from zbus.config import parse_duration

    who = detect({name: options.get(name) for name in _IDENTITY}, environ)
    if who.role is None:
        msg = "it is not said which role to run"
        raise ConfigError(msg, hint="give --role NAME, or set ZBUS_ROLE")
    settings = {**_DEFAULTS, **({"bind": environ["ZBUS_BIND"]} if environ.get("ZBUS_BIND") else {}), **options}
    nproc = _process_count(str(settings["nproc"]))
    return AgentConfig(
        trial_dir=_trial_dir(options, environ),
        role=who.role,
        nproc=nproc,
        ranks=_ranks(who, nproc),
        world_size=_world_size(who, nproc),
        group_rank=_group_rank(who, nproc),
        wait_controller_s=parse_duration(settings["wait_controller"], "--wait-controller"),
        grace_s=parse_duration(settings["grace"], "--grace"),
        lease_ttl_s=max(0.1, parse_duration(settings["lease"], "--lease")),
        launcher=_launcher(settings.get("launcher")),
        controller_lost=settings.get("controller_lost"),
        transport=settings["transport"],
        bind_host=settings["bind"],
        use_template=not settings["no_template"],
        propagate_exit=settings["propagate_exit"],
        devices=tuple(settings["devices"].split(";")) if settings["devices"] else (),
    )


def _launcher(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    pid, _, started = text.partition(":")
    if not (pid.isdigit() and started.isdigit()):
        msg = f"--launcher is {text!r}, not PID:START"
        raise ConfigError(msg)
    return int(pid), int(started)


def _ranks(who: Identity, nproc: int) -> tuple[int, ...] | None:
    """Return the ranks of this agent; None for any that are free."""
    if who.rank is None:
        if who.node_rank is None:
            return None
        first = who.node_rank * nproc
    else:
        # A launcher counts the processes it started, each of which is an agent.
        first = who.rank if who.counts_ranks("rank") else who.rank * nproc
    return tuple(range(first, first + nproc))


def _world_size(who: Identity, nproc: int) -> int | None:
    if who.world_size is None:
        return None
    return who.world_size if who.counts_ranks("world_size") else who.world_size * nproc


def _group_rank(who: Identity, nproc: int) -> int:
    if who.node_rank is not None:
        return who.node_rank
    if who.rank is None:
        return 0
    return who.rank // nproc if who.counts_ranks("rank") else who.rank


def _set_up_log() -> None:
    params = click.get_current_context().find_root().params
    level = logging.WARNING if params.get("quiet") else logging.DEBUG if params.get("verbose") else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("zbus")
    logger.addHandler(handler)
    logger.setLevel(level)


def _print_error(error: ZbusError) -> None:
    lines = [f"error[{error.code}]: {error}"]
    width = max((len(name) for name in error.facts), default=0)
    lines += [f"  {name:<{width}}  {value}" for name, value in error.facts.items()]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    lines.append(f"more: zbus-controller explain {error.code}")
    click.echo("\n".join(lines), err=True)


def main(arguments: Sequence[str] | None = None, template: Template | None = None) -> NoReturn:
    """Run ``zbus-worker`` and end the process with its exit code.

    Args:
        arguments: The command line; that of the process if None.
        template: A template that this process has forked already, for ``start``.
    """
    try:
        cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="zbus-worker",
            standalone_mode=False,
            obj=template,
        )
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ZbusError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    sys.exit(0)
