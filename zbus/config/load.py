"""Merging sources into one checked config, with the origin of every value kept."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from zbus.config.checks import finish, require_engines
from zbus.config.schema import DURATION, SIZE, Config, RoleConfig
from zbus.config.sources import (
    KeyPath,
    Setting,
    dotted,
    read_data,
    read_environment,
    read_file,
    read_override,
)
from zbus.config.values import parse_duration, parse_size
from zbus.errors import ConfigError

__all__ = ["Resolved", "all_keys", "load_config", "user_config_file"]

_FREE: Final = ("params", "args", "kwargs")
_PARSERS: Final[dict[str, Callable[[object, str], float]]] = {DURATION: parse_duration, SIZE: parse_size}


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A checked config and where its values came from.

    Attributes:
        config: The config.
        origins: Origin of each key that somebody set, by dotted key; all others are defaults.
        directory: Directory that relative paths of the last config file refer to; None without a file.
    """

    config: Config
    origins: dict[str, str]
    directory: Path | None = None

    def origin(self, key: str) -> str:
        """Return where the value of a dotted key came from, ``default`` if nobody set it."""
        return self.origins.get(key, "default")

    def to_yaml(self) -> str:
        """Return the whole config as YAML, each set value with its origin as a comment."""
        return _with_origins(self.config.to_dict(), self.origins)


@dataclasses.dataclass(slots=True)
class _Merged:
    tree: dict[str, Any]
    origins: dict[KeyPath, str]
    raws: dict[KeyPath, str | None]


def load_config(
    files: Sequence[str | os.PathLike[str]] = (),
    overrides: Iterable[str | tuple[str, str]] = (),
    *,
    env: Mapping[str, str] | None = None,
    data: object = None,
    user_config: bool = True,
    complete: bool = True,
) -> Resolved:
    """Read all sources, later over earlier: defaults, user config, files, ``data``, environment, overrides.

    Args:
        files: YAML or TOML files; later ones win.
        overrides: ``key=value`` texts, or pairs of such a text and its origin.
        env: Environment to read; ``os.environ`` if None.
        data: A mapping, dataclass, ``Config``, or an object with ``model_dump()``, from the Python API.
        user_config: Whether ``$XDG_CONFIG_HOME/zbus/config.{toml,yaml}`` is read.
        complete: Whether every role must name its engine; not so where a script declares the roles.

    Raises:
        ConfigError: A source cannot be read, a key is unknown, or a value does not fit; says where it stands.
    """
    environment = os.environ if env is None else env
    settings: list[Setting] = []
    if user_config and (user_file := user_config_file(environment)) is not None:
        settings += read_file(user_file)
    names_of_files = [os.fspath(file) for file in (*_environment_files(environment), *files)]
    for file in names_of_files:
        settings += read_file(file)
    if data is not None:
        settings += read_data(_plain(data), "config given in Python")
    settings += read_environment(environment)
    for number, override in enumerate(overrides, 1):
        text, origin = override if isinstance(override, tuple) else (override, f"override {number}")
        settings += read_override(text, origin)

    merged = _merge(settings)
    tree = _check(merged.tree, Config, (), merged)
    config = msgspec.convert(tree, Config)
    directory = Path(names_of_files[-1]).resolve().parent if names_of_files else None
    origins = {dotted(path): origin for path, origin in merged.origins.items()}
    if complete:
        require_engines(config, origins)
    return Resolved(finish(config, origins, directory), origins, directory)


def user_config_file(env: Mapping[str, str]) -> Path | None:
    """Return the user's defaults file if there is one."""
    home = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", ""), ".config")  # noqa: PTH118 - HOME may be unset
    for suffix in ("toml", "yaml"):
        file = Path(home) / "zbus" / f"config.{suffix}"
        if file.is_absolute() and file.is_file():
            return file
    return None


def _environment_files(env: Mapping[str, str]) -> list[str]:
    return [name for name in env.get("ZBUS_CONFIG", "").split(":") if name]


def _plain(data: object) -> Mapping[Any, Any]:
    """Return nested mappings from any of the config objects people have."""
    plain: object = data
    if isinstance(data, Struct):
        plain = msgspec.to_builtins(data)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        plain = dataclasses.asdict(data)
    elif callable(dump := getattr(data, "model_dump", None)):
        plain = dump()
    elif type(data).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf  # type: ignore[import-not-found]

        plain = OmegaConf.to_container(data, resolve=True)
    if isinstance(plain, Mapping):
        return plain
    msg = f"a config must be a mapping, a dataclass or a Config, not {type(data).__name__}"
    raise ConfigError(msg)


# -- merging -----------------------------------------------------------------------------------------------------------


def _merge(settings: Iterable[Setting]) -> _Merged:
    merged = _Merged({}, {}, {})
    for setting in settings:
        node = merged.tree
        for part in setting.path[:-1]:
            below = node.get(part)
            if not isinstance(below, dict):
                below = node[part] = {}
            node = below
        last = setting.path[-1]
        if setting.value == {} and isinstance(node.get(last), dict):
            continue
        if isinstance(node.get(last), dict):
            _forget_below(merged, setting.path)
        node[last] = {} if setting.value == {} else setting.value
        merged.origins.pop(setting.path, None)  # the order tells which key was set last
        merged.origins[setting.path] = setting.origin
        merged.raws[setting.path] = setting.raw
    return merged


def _forget_below(merged: _Merged, path: KeyPath) -> None:
    for old in [p for p in merged.origins if p[: len(path)] == path]:
        del merged.origins[old]


# -- checking against the schema ---------------------------------------------------------------------------------------


def _check(value: Any, hint: Any, path: KeyPath, merged: _Merged) -> Any:
    """Return ``value`` made to fit ``hint``; refuses unknown keys and misfits with their origin."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _check_struct(value, hint, path, merged)
    origin = get_origin(hint)
    if origin is dict and path[-1] not in _FREE and isinstance(value, Mapping):
        inner = get_args(hint)[1]
        return {key: _check(item, inner, (*path, key), merged) for key, item in value.items()}
    if hint is str and isinstance(value, (int, float)):
        raw = merged.raws.get(path)
        value = raw if raw is not None else str(value)
    unit = _unit(hint)
    try:
        if unit is not None and isinstance(value, str):
            value = _PARSERS[unit](value, f"value of `{dotted(path)}`")
        return msgspec.to_builtins(msgspec.convert(value, hint))
    except msgspec.ValidationError as error:
        raise _misfit(path, value, _expected(hint) or str(error), merged) from None
    except ConfigError as error:
        error.facts["from"] = _where(path, merged)
        raise


def _check_struct(value: Any, cls: type[Struct], path: KeyPath, merged: _Merged) -> dict[str, Any]:
    if isinstance(value, Struct):
        value = msgspec.to_builtins(value)
    if not isinstance(value, Mapping):
        msg = f"config key `{dotted(path)}` holds a section, not {value!r}"
        raise ConfigError(msg, facts={"from": _where(path, merged)})
    hints = get_type_hints(cls, include_extras=True)
    for key in value:
        if key not in hints:
            raise _unknown((*path, key), merged)
    return {key: _check(item, hints[key], (*path, key), merged) for key, item in value.items()}


def _unit(hint: Any) -> str | None:
    if get_origin(hint) is Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, Meta) and extra.extra:
                unit = extra.extra.get("unit")
                return unit if isinstance(unit, str) else None
    return None


def _where(path: KeyPath, merged: _Merged) -> str:
    """Return the origin of a key, of the first key below it, or of the nearest key above it."""
    below = [origin for known, origin in merged.origins.items() if known[: len(path)] == path]
    if path in merged.origins or below:
        return merged.origins.get(path, below[0] if below else "default")
    return _where(path[:-1], merged) if path else "default"


def _expected(hint: Any) -> str | None:
    """Return the choices of a literal as a sentence; msgspec does not list them."""
    if get_origin(hint) is not Literal:
        return None
    *most, last = (f"`{choice}`" for choice in get_args(hint))
    return f"expected {', '.join(most)} or {last}"


def _misfit(path: KeyPath, value: Any, problem: str, merged: _Merged) -> ConfigError:
    sentence = problem.partition(" - at ")[0]
    sentence = sentence[:1].lower() + sentence[1:]
    return ConfigError(
        f"bad value for config key `{dotted(path)}`: {sentence}",
        facts={"from": _where(path, merged), "value": repr(value)},
    )


def _unknown(path: KeyPath, merged: _Merged) -> ConfigError:
    key = dotted(path)
    guess = _closest(path, merged.tree)
    return ConfigError(
        f"unknown config key `{key}`",
        facts={"from": _where(path, merged)},
        hint=f"did you mean `{guess}`?" if guess else "the keys are listed in docs/reference/config.md",
    )


def all_keys(roles: Iterable[str] = ("<role>",)) -> list[str]:
    """Return every dotted key of the schema; a role's keys once for each name in ``roles``."""
    keys: list[str] = []

    def visit(cls: type[Struct], above: KeyPath) -> None:
        for name, hint in get_type_hints(cls, include_extras=True).items():
            path = (*above, name)
            keys.append(dotted(path))
            if isinstance(hint, type) and issubclass(hint, Struct):
                visit(hint, path)
            elif get_origin(hint) is dict and get_args(hint)[1] is RoleConfig:
                for role in roles:
                    visit(RoleConfig, (*path, role))

    visit(Config, ())
    return keys


def _closest(path: KeyPath, tree: Mapping[str, Any]) -> str | None:
    roles = tree.get("roles")
    keys = all_keys(roles if isinstance(roles, Mapping) else ())
    section = dotted(path[:-1])
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(dotted(path), siblings, 1, 0.75)
    near = near or difflib.get_close_matches(dotted(path), keys, 1, 0.7)
    same_name = [key for key in keys if key.rpartition(".")[2] == path[-1]]
    return near[0] if near else (same_name[0] if same_name else None)


# -- writing -----------------------------------------------------------------------------------------------------------


def _with_origins(data: dict[str, Any], origins: Mapping[str, str]) -> str:
    """Return block YAML of ``data`` with origins as comments."""
    lines: list[str] = []

    def scalar(value: Any) -> str:
        return msgspec.json.encode(value).decode()

    def visit(node: Mapping[str, Any], above: KeyPath) -> None:
        for key, value in node.items():
            path = (*above, key)
            shown = key if re.fullmatch(r"[A-Za-z_][\w-]*", key) else scalar(key)
            indent = "  " * len(above)
            if isinstance(value, Mapping) and value:
                lines.append(f"{indent}{shown}:")
                visit(value, path)
            else:
                origin = origins.get(dotted(path))
                comment = "  # " + " ".join(origin.split()) if origin else ""
                lines.append(f"{indent}{shown}: {scalar(value)}{comment}")

    visit(data, ())
    return "\n".join(lines) + "\n"
