"""What a launch is asked to do: config, arguments and command line put together, and a trial made for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from controller.context import current_run
from controller.role import Role
from zbus.config import Config, RoleConfig, TrialDir
from zbus.errors import ConfigError

__all__ = ["LaunchPlan"]


class LaunchPlan:
    """A launch, checked. Any thread."""

    def __init__(self, config: Config, roles: dict[str, Role], trial: TrialDir, run: Any) -> None:
        self.config = config
        self.roles = roles
        self.trial = trial
        self.run = run
        self.scheduler = config.scheduler.type
        self.startup_timeout = config.scheduler.startup_timeout

    @property
    def keeps_lock(self) -> bool:
        """Whether the run, not this controller, holds the trial's lock."""
        return self.run is not None

    @classmethod
    def of(  # private, one caller  # noqa: PLR0917
        cls,
        experiment: str | None,
        roles: Mapping[str, Role] | None,
        trial: str | None,
        root: str | os.PathLike[str] | None,
        scheduler: str | None,
        startup_timeout: float | None,
        resume: bool,  # noqa: FBT001  # private, one caller
        overwrite: bool,  # noqa: FBT001  # private, one caller
        config: Config | None,
    ) -> LaunchPlan:
        """Put them together; see ``Controller.launch``."""
        run = current_run()
        base = config if config is not None else run.config if run is not None else Config()
        settings = base.scheduler
        if scheduler is not None and not (run is not None and run.was_set("scheduler.type")):
            if scheduler not in ("inline", "local", "external"):
                msg = f"scheduler {scheduler!r} is not known"
                raise ConfigError(msg, hint="one of local, inline, external")
            settings = structs.replace(settings, type=scheduler)
        if startup_timeout is not None and not (run is not None and run.was_set("scheduler.startup_timeout")):
            settings = structs.replace(settings, startup_timeout=float(startup_timeout))
        base = structs.replace(base, scheduler=settings)
        chosen = dict(roles) if roles is not None else _config_roles(base.roles)
        if run is not None and roles is not None:
            chosen = {name: role.with_changes(run.role_overrides(name)) for name, role in chosen.items()}
        if not chosen:
            msg = "a trial needs at least one role"
            raise ConfigError(msg, hint='for example roles={"actor": Role("engines:Actor", replicas=2)}')
        for name, role in chosen.items():
            role.to_job(name, base.trace.level)  # refuse what cannot be placed before anything is made
        if run is not None:
            directory = run.make_trial(experiment or base.experiment or "default")
        else:
            directory = TrialDir.create(
                root if root is not None else base.root,
                experiment or base.experiment or "default",
                trial or base.trial or None,
                resume=resume,
                overwrite=overwrite,
            )
        return cls(base, chosen, directory, run)


def _config_roles(roles: Mapping[str, RoleConfig]) -> dict[str, Role]:
    found = {}
    for name, role in roles.items():
        if not role.engine:
            msg = f"role {name} names no engine"
            raise ConfigError(msg, hint=f"set roles.{name}.engine=package.module:Class")
        found[name] = Role.of(role)
    return found
