"""Makes ``docs/reference/config.md`` from the schema: ``python -m zbus.config.reference``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from zbus.config.schema import Config, RoleConfig

__all__ = ["page"]

_INTRO: Final = """\
# Configuration

Made from `zbus/config/schema.py`. A config file is YAML or TOML, told apart by its suffix. Every key may also be set by
an override on the command line (`scheduler.type=inline`) or by an environment variable
(`ZBUS_SCHEDULER__TYPE=inline`). What stands first in this list wins:

1. overrides and options of the command
2. environment variables
3. config files, later ones over earlier ones (`ZBUS_CONFIG` before `-c`, before a config TARGET)
4. your own defaults, `$XDG_CONFIG_HOME/zbus/config.toml` or `.yaml`
5. the defaults below

An unknown key, or a value of the wrong type, is an error (exit code 2) that says where it stands. The config of a run,
with the origin of each value, is kept as `config.yaml` in its trial directory; `--dry-run` prints it without starting
anything.

Durations are seconds, or text such as `250ms`, `30s`, `5m`, `1h30m`. Sizes are bytes, or text such as `64MiB`, `1.5GB`.
YAML is read by the rules of YAML 1.2: `on`, `off`, `yes` and `no` are words, `3e-4` is a number. An override's value is
read the same way: `params.layers=[1,2]`.
"""

_SHORT: Final = """\
## Environment variables with names of their own

| variable | key |
| --- | --- |
| `ZBUS_ROOT` | `root` |
| `ZBUS_EXPERIMENT` | `experiment` |
| `ZBUS_TRIAL` | `trial` |
| `ZBUS_TRACE` | `trace.level` |
| `ZBUS_TRACE_ROOT` | `trace.root` |
| `ZBUS_BIND` | `scheduler.bind` |
| `ZBUS_LOG_LEVEL` | `log.level` |
| `ZBUS_LOG_FORMAT` | `log.format` |
| `ZBUS_CONFIG` | config files, separated by `:` |
"""


def page() -> str:
    """Return the page."""
    parts = [_INTRO, *_section("", Config)]
    parts += _section("roles.ROLE.", RoleConfig)
    for name, hint in get_type_hints(Config).items():
        if isinstance(hint, type) and issubclass(hint, Struct):
            parts += _section(f"{name}.", hint)
    return "\n".join([*parts, _SHORT])


def _section(prefix: str, cls: type[Struct]) -> Iterator[str]:
    doc = inspect.getdoc(cls) or ""
    yield f"## `{prefix.rstrip('.')}`" if prefix else "## Top level"
    yield f"\n{doc.partition(chr(10))[0]}\n"
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    meanings = _meanings(doc)
    hints = get_type_hints(cls, include_extras=True)
    for info in msgspec.structs.fields(cls):
        hint = hints[info.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            continue
        default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
        shown = "" if default is None or default in ("", [], {}) else f"`{_plain(default)}`"
        meaning = meanings[info.name].replace("``", "`")
        yield f"| `{prefix}{info.name}` | {_type(hint)} | {shown} | {meaning} |"
    yield ""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _meanings(doc: str) -> dict[str, str]:
    """Return the text of each attribute; ``a, b: text`` counts for both."""
    found: dict[str, str] = {}
    text = doc.partition("Attributes:")[2]
    for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {6,}.*)*)", text, re.MULTILINE):
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found


def _type(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, Meta) and extra.extra:
                return str(extra.extra["unit"])
        low = next((extra.ge for extra in hint.__metadata__ if isinstance(extra, Meta)), None)
        return f"{_type(get_args(hint)[0])}, at least {low:g}" if low is not None else _type(get_args(hint)[0])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is list:
        return f"list of {_type(get_args(hint)[0])}"
    if origin is dict:
        return f"mapping to {_type(get_args(hint)[1])}"
    if origin is Union or type(hint).__name__ == "UnionType":
        return " or ".join(_type(part) for part in get_args(hint) if part is not type(None))
    names: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}
    return names.get(hint, "section")


if __name__ == "__main__":
    sys.stdout.write(page())
