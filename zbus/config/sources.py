"""Config sources: files, environment and command line, each flattened to settings with their origin."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from zbus.errors import ConfigError

__all__ = ["KeyPath", "Setting", "dotted", "read_data", "read_environment", "read_file", "read_override"]

KeyPath = tuple[str, ...]

_PLAIN: Final[dict[str, KeyPath]] = {
    "ZBUS_ROOT": ("root",),
    "ZBUS_EXPERIMENT": ("experiment",),
    "ZBUS_TRIAL": ("trial",),
    "ZBUS_TRACE": ("trace", "level"),
    "ZBUS_TRACE_ROOT": ("trace", "root"),
    "ZBUS_BIND": ("scheduler", "bind"),
    "ZBUS_LOG_LEVEL": ("log", "level"),
    "ZBUS_LOG_FORMAT": ("log", "format"),
}
_MAX_FILE: Final = 8 << 20
_MAX_DEPTH: Final = 32
_MAX_SETTINGS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Setting:
    """One value somebody set.

    Attributes:
        path: Keys from the top.
        value: A scalar, a list, or an empty mapping.
        origin: Where it stands, for a person: ``sft.yaml:12``, ``environment variable ZBUS_ROOT``, …
        raw: The scalar as written, or None.
    """

    path: KeyPath
    value: Any
    origin: str
    raw: str | None = None


def dotted(path: Sequence[str]) -> str:
    """Return ``a.b.c``."""
    return ".".join(path)


# -- YAML: the 1.2 core schema, so that `off`, `no` and `1:30` stay text and `3e-4` is a number ------------------------


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), [*_first, ""] if _tag == "null" else list(_first)
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _yaml_settings(text: str, name: str) -> list[Setting]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            msg = f"{name} does not hold a mapping at the top"
            raise ConfigError(msg, facts={"from": f"{name}:{node.start_mark.line + 1}"})
        settings = list(itertools.islice(_flatten_yaml(loader, node, (), name), _MAX_SETTINGS + 1))
        if len(settings) > _MAX_SETTINGS:
            msg = f"{name} sets more than {_MAX_SETTINGS:,} keys"
            raise ConfigError(msg)
        return settings
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or str(error)
        msg = f"{name} is not valid YAML: {problem}"
        raise ConfigError(msg, facts={"from": where}) from error
    finally:
        loader.dispose()


def _flatten_yaml(loader: _Loader, node: yaml.MappingNode, above: KeyPath, name: str) -> Iterator[Setting]:
    if len(above) > _MAX_DEPTH:
        msg = f"config key `{dotted(above[:3])}…` is nested more than {_MAX_DEPTH} deep, or refers to itself"
        raise ConfigError(msg, facts={"from": f"{name}:{node.start_mark.line + 1}"})
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            msg = f"config key `{dotted((*above, key))}` stands twice"
            raise ConfigError(msg, facts={"from": f"{name}:{key_node.start_mark.line + 1}"})
        seen.add(key)
    # Merged keys come first in the flattened node, so the mapping's own win over them.
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        path = (*above, str(key_node.value))
        origin = f"{name}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten_yaml(loader, value_node, path, name)
            continue
        raw = str(value_node.value) if isinstance(value_node, yaml.ScalarNode) else None
        yield Setting(path, loader.construct_document(value_node), origin, raw)


# -- TOML --------------------------------------------------------------------------------------------------------------

_TOML_TABLE: Final = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_TOML_KEY: Final = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_TOML_PART: Final = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")


def _toml_settings(text: str, name: str) -> list[Setting]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        where = f"{name}:{line[1]}" if line else name
        msg = f"{name} is not valid TOML: {error}"
        raise ConfigError(msg, facts={"from": where}) from error
    lines = _toml_lines(text)
    return [
        Setting(s.path, s.value, f"{name}:{_nearest(lines, s.path)}" if lines else name, s.raw)
        for s in read_data(data, name)
    ]


def _toml_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of each key; the parser keeps none, so this is a second, rougher reading."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TOML_TABLE.match(line):
            table = tuple(part.strip("\"'") for part in _TOML_PART.findall(match[1]))
            lines.setdefault(table, number)
        elif match := _TOML_KEY.match(line):
            lines.setdefault((*table, *(part.strip("\"'") for part in _TOML_PART.findall(match[1]))), number)
    return lines


def _nearest(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


# -- the four kinds of source ------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> list[Setting]:
    """Return the settings of a YAML or TOML file, told apart by suffix.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not valid; the line is named where known.
    """
    name = os.fspath(path)
    suffix = Path(name).suffix.lower()
    if suffix not in {".yaml", ".yml", ".toml"}:
        msg = f"config file {name} is neither YAML nor TOML"
        raise ConfigError(msg, hint="name it with .yaml, .yml or .toml at the end")
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        msg = f"config file {name} cannot be read: {reason}"
        raise ConfigError(msg) from error
    if len(data) > _MAX_FILE:
        msg = f"config file {name} is larger than 8 MiB"
        raise ConfigError(msg)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        msg = f"config file {name} is not UTF-8 text (byte {error.start})"
        raise ConfigError(msg) from error
    return _toml_settings(text, name) if suffix == ".toml" else _yaml_settings(text, name)


def read_data(data: Mapping[Any, Any], origin: str, above: KeyPath = ()) -> list[Setting]:
    """Return the settings of nested mappings; a key that is not text is taken as its text."""
    found: list[Setting] = []
    for key, value in data.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            found += read_data(value, origin, path)
        else:
            found.append(Setting(path, value, origin, None if isinstance(value, bool) else _raw(value)))
    return found


def _raw(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) else None


def read_override(text: str, origin: str) -> list[Setting]:
    """Return the settings of one ``key=value``; the value is read as YAML, an empty one is empty text.

    Raises:
        ConfigError: There is no ``=``, a part of the key is empty, or the value is not valid.
    """
    key, equals, raw = text.partition("=")
    if key.startswith("+"):
        msg = f"override {text!r} starts with `+`"
        raise ConfigError(msg, facts={"from": origin}, hint=f"new keys need no plus sign: {key.lstrip('+')}={raw}")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        msg = f"{text!r} is not an override"
        raise ConfigError(msg, facts={"from": origin}, hint="write key=value, such as scheduler.type=inline")
    return _from_text(path, raw, origin)


def _from_text(path: KeyPath, raw: str, origin: str) -> list[Setting]:
    if not raw.strip():
        return [Setting(path, raw.strip(), origin, raw)]
    loader = _Loader(raw)
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        msg = f"value of `{dotted(path)}` cannot be read: {problem}"
        raise ConfigError(msg, facts={"from": origin, "value": raw}, hint="put quotes around text") from error
    finally:
        loader.dispose()
    if isinstance(value, Mapping) and value:
        return read_data(value, origin, path)
    return [Setting(path, value, origin, raw)]


def read_environment(env: Mapping[str, str]) -> list[Setting]:
    """Return the settings of ``ZBUS_<SECTION>__<KEY>`` and of the short variables such as ``ZBUS_ROOT``.

    Key parts become lower case, except below ``env``: ``ZBUS_ROLES__ACTOR__ENV__OMP_NUM_THREADS`` keeps its end.

    Raises:
        ConfigError: A value cannot be read.
    """
    found: list[Setting] = []
    for variable in sorted(env):
        origin = f"environment variable {variable}"
        if (path := _PLAIN.get(variable)) is not None:
            if env[variable]:
                found.append(Setting(path, env[variable], origin, env[variable]))
        elif variable.startswith("ZBUS_") and "__" in variable:
            found += _from_text(_variable_path(variable), env[variable], origin)
    return found


def _variable_path(variable: str) -> KeyPath:
    parts = variable.removeprefix("ZBUS_").split("__")
    path: list[str] = []
    for part in parts:
        path.append(part if "env" in path else part.lower())
    return tuple(path)
