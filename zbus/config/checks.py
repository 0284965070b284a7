"""What the schema cannot say: valid names, engines, and meshes that fit the number of ranks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from zbus import names
from zbus.config.schema import Config, RoleConfig
from zbus.errors import ConfigError

__all__ = ["finish", "require_engines"]

_ENGINE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_ENGINE_FILE: Final = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)")


def finish(config: Config, origins: Mapping[str, str], directory: Path | None) -> Config:
    """Check names and sizes, and make ``file.py:Class`` engines absolute, their directory importable.

    Raises:
        ConfigError: A name is not valid, an engine cannot be meant, or a mesh does not fit the number of ranks.
    """
    for value, what in ((config.experiment, "experiment"), (config.trial, "trial")):
        if value:
            _named(value, what, what, origins)
    roles = {}
    for name, role in config.roles.items():
        _named(name, "role", f"roles.{name}", origins)
        roles[name] = _finish_role(name, role, origins, directory)
    return msgspec.structs.replace(config, roles=roles)


def require_engines(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse a role without an engine.

    Raises:
        ConfigError: Names the role, and the existing one it may be a misspelling of.
    """
    for name, role in config.roles.items():
        if not role.engine:
            near = difflib.get_close_matches(name, [other for other, r in config.roles.items() if r.engine], 1)
            msg = f"config key `roles.{name}.engine` is missing"
            raise ConfigError(
                msg,
                facts={"from": _first_origin(f"roles.{name}", origins)},
                hint=f"did you mean `roles.{near[0]}`?" if near else f"add roles.{name}.engine=package.module:Class",
            )


def _finish_role(name: str, role: RoleConfig, origins: Mapping[str, str], directory: Path | None) -> RoleConfig:
    size = 1
    for axis in role.mesh.values():
        size *= axis
    replicas = role.replicas if role.replicas is not None else size
    mesh = role.mesh
    if replicas != size and len(mesh) == 1 and _outranks(f"roles.{name}.replicas", f"roles.{name}.mesh", origins):
        mesh, size = {next(iter(mesh)): replicas}, replicas
    if mesh and replicas != size:
        shape = " x ".join(f"{axis} {n}" for axis, n in role.mesh.items())
        msg = f"role `{name}` has {replicas} replicas, but its mesh ({shape}) needs {size}"
        raise ConfigError(
            msg,
            facts={"from": _set_last(f"roles.{name}", ("mesh", "replicas"), origins)},
            hint=_fit_mesh(name, role.mesh, replicas, size),
        )
    engine, sys_path = role.engine, list(role.sys_path)
    base = directory or Path.cwd()
    sys_path = [str((base / entry).resolve()) for entry in sys_path]
    if match := _ENGINE_FILE.fullmatch(engine):
        file = (base / match["file"]).resolve()
        if not file.is_file():
            msg = f"engine file of role `{name}` does not exist: {file}"
            raise ConfigError(msg, facts={"from": origins.get(f"roles.{name}.engine", "default")})
        engine, sys_path = f"{file}:{match['name']}", [str(file.parent), *sys_path]
    elif engine and not _ENGINE.fullmatch(engine):
        msg = f"engine of role `{name}` is not of the form module:Class: {engine!r}"
        raise ConfigError(msg, facts={"from": origins.get(f"roles.{name}.engine", "default")})
    if directory is not None and str(directory) not in sys_path:
        sys_path.append(str(directory))
    return msgspec.structs.replace(role, replicas=replicas, mesh=mesh, engine=engine, sys_path=sys_path)


def _outranks(key: str, other: str, origins: Mapping[str, str]) -> bool:
    """Return whether ``key`` was set for this run while ``other`` stands in a file: `--role actor=4` stretches it."""
    now = ("command line", "override", "environment")
    return origins.get(key, "").startswith(now) and not _first_origin(other, origins).startswith(now)


def _fit_mesh(name: str, mesh: Mapping[str, int], replicas: int, size: int) -> str:
    if len(mesh) == 1:
        return f"set roles.{name}.mesh.{next(iter(mesh))}={replicas} too, or roles.{name}.replicas={size}"
    return f"set roles.{name}.replicas={size} or change roles.{name}.mesh"


def _set_last(above: str, keys: tuple[str, ...], origins: Mapping[str, str]) -> str:
    """Return the origin of whichever of two keys was set last."""
    found = [(key, o) for key, o in origins.items() if key.startswith(tuple(f"{above}.{k}" for k in keys))]
    return found[-1][1] if found else "default"


def _first_origin(key: str, origins: Mapping[str, str]) -> str:
    """Return the origin of a key or of the first one below it."""
    return origins.get(key) or next((o for k, o in origins.items() if k.startswith(f"{key}.")), "default")


def _named(value: str, what: str, key: str, origins: Mapping[str, str]) -> None:
    try:
        names.check(value, what)
    except ConfigError as error:
        error.facts["from"] = _first_origin(key, origins)
        raise
