"""What ``zbus-controller run`` tells the code it runs: options that ``Controller.launch`` picks up.

A script that calls ``Controller.launch`` itself needs no change to obey ``--trial``, ``--role actor=4`` or
``scheduler.type=inline``: launch asks ``current_run()`` and applies what was said there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from zbus.config import TrialDir

if TYPE_CHECKING:
    from zbus.config import Config, Resolved

__all__ = ["Launched", "RunContext", "current_run", "running"]


class Launched(Protocol):
    """What a run asks of a controller that was launched in it."""

    def close(self) -> None:
        """Stop all workers in order."""
        ...


@dataclass(slots=True)
class RunContext:
    """The command line and config behind this process.

    Attributes:
        resolved: The config with the origin of each value.
        resume, overwrite: What to do with an existing trial.
        trial: The trial directory once it is made.
        launched: Controllers launched in this run, for an orderly stop.
        on_trial: Called once with the trial directory when it is made.
    """

    resolved: Resolved
    resume: bool = False
    overwrite: bool = False
    trial: TrialDir | None = None
    launched: list[Launched] = field(default_factory=list)
    on_trial: Callable[[TrialDir], None] | None = None

    @property
    def config(self) -> Config:
        """The config."""
        return self.resolved.config

    def make_trial(self, experiment: str) -> TrialDir:
        """Return this run's trial directory, made and locked on the first call.

        A script that launches once more after its first launch gets a further trial, unless a name was given.

        Args:
            experiment: Used where neither the command line nor a config names one.

        Raises:
            TrialError: It exists, is in use, or there is nothing to resume.
            ConfigError: It cannot be made.
        """
        again = self.trial is not None and bool(self.launched) and not self.config.trial
        if self.trial is None or again:
            self.trial = TrialDir.create(
                self.config.root,
                self.config.experiment or experiment,
                self.config.trial or None,
                resume=self.resume,
                overwrite=self.overwrite,
            )
            if self.on_trial is not None:
                self.on_trial(self.trial)
        return self.trial

    def role_overrides(self, role: str) -> dict[str, Any]:
        """Return the fields of a role that somebody set, by name; empty where nobody did."""
        found = self.config.roles.get(role)
        if found is None:
            return {}
        prefix = f"roles.{role}."
        keys = {key.removeprefix(prefix).partition(".")[0] for key in self.resolved.origins if key.startswith(prefix)}
        return {key: getattr(found, key) for key in sorted(keys)}

    def was_set(self, key: str) -> bool:
        """Return whether somebody set a dotted key, such as ``scheduler.type``."""
        return any(known == key or known.startswith(f"{key}.") for known in self.resolved.origins)


_current: list[RunContext] = []


def current_run() -> RunContext | None:
    """Return the context of the ``zbus-controller run`` this process executes, or None."""
    return _current[-1] if _current else None


@contextmanager
def running(context: RunContext) -> Iterator[RunContext]:
    """Make ``context`` the current one inside the block."""
    _current.append(context)
    try:
        yield context
    finally:
        _current.remove(context)
