"""``zbus-controller run``: from a target and options to a finished trial with a summary, and an exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from controller.console import Console, shown
from controller.context import RunContext, running
from controller.livetable import LiveTable, open_table
from controller.progress import Progress, open_progress
from controller.render import error_json, exit_code_of, render_error
from controller.report import Summary, merge_traces, plain_data
from controller.signals import Interrupts, Terminated
from controller.targets import Target, call_driver, find_driver, parse_target, run_script, takes_run
from zbus import __version__
from zbus.config import Resolved, TrialDir, format_duration, load_config, write_atomically
from zbus.errors import ConfigError, WorkerLost

if TYPE_CHECKING:
    from controller.controller import Controller

__all__ = ["Run", "RunOptions", "execute"]

_log = logging.getLogger("zbus.controller.run")

_STOP_ROOM_S: Final = 2.0
"""What an orderly stop may take beyond the grace of the ranks, before it is forced."""

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(slots=True)
class RunOptions:
    """The command line of ``run``.

    Attributes:
        target: Config, script, or ``module:function``.
        overrides: ``key=value`` texts with their origins, options first.
        files: Config files of ``-c``.
        arguments: What stood after ``--``, for a script.
        resume, overwrite: What to do with an existing trial.
        progress: See ``controller.progress.MODES``.
        merge: Whether traces are merged at the end; the config decides if None.
        dry_run: Only check and show the resolved config.
    """

    target: str
    overrides: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    resume: bool = False
    overwrite: bool = False
    progress: str = "auto"
    merge: bool | None = None
    dry_run: bool = False


class Run:
    """What a driver function gets: ``def main(run: Run) -> dict | None``.

    Attributes:
        bus: The controller, its roles ready.
        config: The ``params`` section as a plain dict.
        resume: Whether an earlier run of this trial shall be continued.
        recover: The section ``recover`` of the config, for ``Recover.of(run)``.
        trial_dir: Paths of the trial.
    """

    def __init__(
        self,
        bus: Controller,
        context: RunContext,
        progress: Callable[[float | None, str], Progress],
        table: Callable[[Sequence[str], int | None, str], LiveTable],
    ) -> None:
        self.bus = bus
        self.config: dict[str, Any] = context.config.params
        self.resume = context.resume
        self.recover = context.config.recover
        self.trial_dir: TrialDir = bus.trial
        self._progress = progress
        self._table = table

    def progress(self, total: float | None = None, text: str = "") -> Progress:
        """Return a progress line: ``with run.progress(100, "train") as bar: bar.update(1, loss=0.3)``."""
        return self._progress(total, text)

    def table(self, columns: Sequence[str], total: int | None = None, text: str = "step") -> LiveTable:
        """Return a table of steps: ``with run.table(["loss"], 100, "train") as table: table.row(step, loss=0.3)``."""
        return self._table(columns, total, text)


def execute(options: RunOptions, console: Console) -> int:
    """Run the target and return the exit code. Call it on the main thread.

    The failure of anything but the command line itself is shown as an error block and told by the exit code.

    Raises:
        ConfigError: Target or config are wrong; nothing was started.
    """
    began = time.monotonic()
    target, resolved = _prepare(options)
    if options.dry_run:
        console.result(resolved.to_yaml().rstrip("\n"))
        console.object({"schema": "zbus.config/1", "config": plain_data(resolved.config.to_dict())})
        return 0
    context = RunContext(resolved, resume=options.resume, overwrite=options.overwrite)
    execution = _Execution(options, console, context, target, began)
    return execution.run()


def _prepare(options: RunOptions) -> tuple[Target, Resolved]:
    """Resolve target and config: a config target is a config file too, and names the driver."""
    target = parse_target(options.target)
    files = list(options.files)
    if target.config is not None:
        # As typed where possible, so that messages name the file as the user does.
        files.append(options.target)
    resolved = load_config(files, options.overrides, complete=target.script is None)
    if target.config is not None:
        if not resolved.config.target:
            msg = f"config {options.target} names no target"
            raise ConfigError(msg, hint="add a line such as `target: driver.py:main`")
        driver = parse_target(resolved.config.target, target.config.parent)
        if driver.config is not None:
            msg = f"the target of a config must be Python, not {resolved.config.target}"
            raise ConfigError(msg, facts={"from": resolved.origin("target")})
        target = Target(options.target, target.config, driver.script, driver.driver, driver.function)
    return target, resolved


class _Execution:
    """One run from start to summary."""

    def __init__(
        self, options: RunOptions, console: Console, context: RunContext, target: Target, began: float
    ) -> None:
        self._options = options
        self._console = console
        self._context = context
        self._target = target
        self._began = began
        self._summary = Summary(
            target=options.target, version=__version__, started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z")
        )
        self._interrupts = Interrupts(console, self._at_once, context.config.scheduler.stop_grace + _STOP_ROOM_S)
        self._logs = contextlib.ExitStack()
        self._shown = False
        context.on_trial = self._trial_made

    def run(self) -> int:
        error: BaseException | None = None
        with self._logs, running(self._context), _results_apart(self._console), self._interrupts:
            log = self._context.config.log
            self._logs.enter_context(_console_logging(self._console, log.level, as_json=log.format == "json"))
            try:
                self._summary.metrics = self._drive()
            except BaseException as raised:  # noqa: BLE001 - whatever ends the run becomes a block and an exit code
                error = raised
            self._interrupts.closing()
            self._show_failure(error)
            error = self._close(error)
            if self._wants_merge(error):
                self._merge()
            self._finish(error)
        self._show(error)
        return self._summary.exit_code

    # -- the user's code -------------------------------------------------------------------------------------------

    def _drive(self) -> dict[str, Any]:
        if self._target.script is not None:
            run_script(self._target.script, self._options.arguments)
            return {}
        driver = find_driver(self._target)
        config = self._context.config
        if not takes_run(driver):
            # Such a function launches its own controller, as a script does.
            return _metrics(call_driver(driver))
        if not config.roles:
            msg = f"no roles are configured for {self._target.text}"
            raise ConfigError(msg, hint="name them in a config: -c FILE, or roles.actor.engine=package.module:Class")
        bus = self._launch()
        return _metrics(call_driver(driver, Run(bus, self._context, self._open_progress, self._open_table)))

    def _launch(self) -> Controller:
        from controller.controller import Controller

        config = self._context.config
        trial = self._context.make_trial(self._target.experiment)
        if config.scheduler.type == "external":
            self._say_what_to_start(trial)
        began = time.monotonic()
        bus = Controller.launch(config=config)
        took = time.monotonic() - began
        mark = self._console.err_style()("✓", "green")
        for name, role in config.roles.items():
            self._console.note(f"  {mark} {name:<10} {role.world_size}/{role.world_size} ready   {took:.1f} s")
        return bus

    def _say_what_to_start(self, trial: TrialDir) -> None:
        limit = format_duration(self._context.config.scheduler.startup_timeout)
        self._console.note(
            f"  waiting {limit} for ranks that are started by hand; the same line on every host, such as"
        )
        for name, role in self._context.config.roles.items():
            self._console.note(
                f"    zbus-worker start --role {name} --nproc {role.world_size} --trial-dir {trial.path}"
            )

    def _open_progress(self, total: float | None, text: str) -> Progress:
        return open_progress(self._console, self._options.progress, total, text)

    def _open_table(self, columns: Sequence[str], total: int | None, text: str) -> LiveTable:
        return open_table(self._console, self._options.progress, columns, total, text)

    def _trial_made(self, trial: TrialDir) -> None:
        """Announce the trial, keep the resolved config, and start its log."""
        config = self._context.config
        write_atomically(trial.config, self._context.resolved.to_yaml())
        self._logs.enter_context(_file_logging(trial))
        _log.info("zbus %s runs %s in %s, pid %d", __version__, self._target.text, trial.path, os.getpid())
        self._console.note(
            f"zbus {__version__} · {trial.name} · {config.scheduler.type} · logs, traces: {shown(trial.path)}"
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def _close(self, error: BaseException | None) -> BaseException | None:
        """Stop every controller in order; the first failure is the one that counts."""
        for bus in reversed(self._context.launched):
            try:
                self._summary.bus = plain_data(_report(bus))
                bus.close()
            except BaseException as raised:  # noqa: BLE001 - the others are closed all the same
                if error is None:
                    error = raised
                else:
                    _log.warning("while closing: %s", raised)
        return error

    def _wants_merge(self, error: BaseException | None) -> bool:
        stopped = self._interrupts.first is not None or isinstance(error, (KeyboardInterrupt, Terminated))
        wanted = self._options.merge if self._options.merge is not None else self._context.config.trace.merge
        return wanted and not stopped and self._context.trial is not None

    def _merge(self) -> None:
        trial = self._context.trial
        if trial is None:
            return
        merged = merge_traces(trial)
        self._summary.trace = str(merged.path) if merged.path else None
        self._summary.report = str(merged.report) if merged.report else None
        if merged.problem:
            self._console.warn(merged.problem)

    def _finish(self, error: BaseException | None) -> None:
        summary, trial = self._summary, self._context.trial
        summary.exit_code, summary.status = self._verdict(error)
        if error is not None and summary.status == "failed":
            summary.error = error_json(error, target=self._target.text)
        summary.wall_s = time.monotonic() - self._began
        if trial is None:
            return
        _log.info("ended after %.3f s: %s, exit code %d", summary.wall_s, summary.status, summary.exit_code)
        summary.experiment, summary.trial, summary.trial_dir = trial.experiment, trial.trial, str(trial.path)
        try:
            summary.write(trial)
        except OSError as failed:
            self._console.warn(f"summary.json was not written: {failed}")
        trial.unlock()

    def _verdict(self, error: BaseException | None) -> tuple[int, str]:
        signalled = self._interrupts.exit_code
        if signalled is not None:
            return signalled, "interrupted" if signalled == 130 else "terminated"
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return 0, "ok"
        if isinstance(error, KeyboardInterrupt):
            return 130, "interrupted"
        return exit_code_of(error), "failed"

    def _show(self, error: BaseException | None) -> None:
        console, summary = self._console, self._summary
        console.object(summary.to_dict())
        self._show_failure(error)
        trial = self._context.trial
        if trial is not None or summary.status == "ok":
            console.result(summary.text())
        if trial is None:
            return
        place = shown(trial.path)
        if summary.report:
            console.note(f"report: {shown(Path(summary.report))}")
        lost_a_rank = summary.exit_code == WorkerLost.exit_code and trial.recover_note.exists()
        if summary.status == "ok":
            console.next(f"traceview stats {place}" if summary.trace else f"zbus-controller status {place}")
        elif summary.status == "failed" and not lost_a_rank:
            console.next(f"zbus-controller status {place}")
        else:
            root = f" --root {shown(trial.root)}" if self._context.was_set("root") else ""
            console.next(f"zbus-controller run {self._target.text}{root} --trial {trial.trial} --resume")

    def _show_failure(self, error: BaseException | None) -> None:
        """Show the block once, at once: stopping ranks that hang may take seconds more."""
        console = self._console
        if error is None or self._shown or self._verdict(error)[1] != "failed":
            return
        self._shown = True
        if isinstance(error, SystemExit):
            error = _ExitCalled(error.code)
        console.error(
            render_error(
                error,
                style=console.err_style(),
                width=console.width,
                verbose=console.verbose,
                target=self._target.text,
            )
        )

    def _at_once(self, code: int) -> None:
        """Leave word of a forced end; workers die with this process."""
        if (trial := self._context.trial) is not None:
            self._summary.exit_code = code
            self._summary.status = "interrupted" if code == 130 else "terminated"
            self._summary.wall_s = time.monotonic() - self._began
            self._summary.experiment, self._summary.trial = trial.experiment, trial.trial
            self._summary.trial_dir = str(trial.path)
            with contextlib.suppress(OSError):
                self._summary.write(trial)


class _ExitCalled(Exception):
    """The user's code called ``sys.exit`` with a failure."""

    def __init__(self, code: object) -> None:
        super().__init__(f"sys.exit({code!r})")


def _metrics(result: Any) -> dict[str, Any]:
    """Return what a driver returned as metrics."""
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return {str(key): plain_data(value) for key, value in result.items()}
    return {"result": plain_data(result)}


def _report(bus: object) -> dict[str, Any]:
    report = getattr(bus, "report", None)
    found = report() if callable(report) else {}
    if not isinstance(found, Mapping):
        return {}
    # Sending a call again is what a person calls a retry; no call runs twice because of it.
    return {"retries": found.get("retransmissions", 0), **found}


class _JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "schema": "zbus.log/1",
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


# -- output ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _results_apart(console: Console) -> Iterator[None]:
    """With ``--json``, send whatever the user's code prints to stderr, also from C and from children."""
    if not console.json:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextlib.contextmanager
def _console_logging(console: Console, level: str, *, as_json: bool) -> Iterator[None]:
    """Show zbus's own log records on stderr; the root logger is the user's."""
    handler = logging.StreamHandler(console.stderr)
    handler.setFormatter(_JsonLines() if as_json else logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    shown = {1: "INFO", 2: "DEBUG"}.get(min(console.verbosity, 2), level.upper())
    handler.setLevel("ERROR" if console.quiet else shown)
    logger = logging.getLogger("zbus")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel("DEBUG" if console.verbosity > 1 else "INFO")
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextlib.contextmanager
def _file_logging(trial: TrialDir) -> Iterator[None]:
    handler = logging.FileHandler(trial.controller_log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger = logging.getLogger("zbus")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
