"""What ``run`` runs: a config that names its driver, a script, or a function."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from zbus.errors import ConfigError
from zbus.runtime.loader import import_file

__all__ = ["Target", "call_driver", "find_driver", "parse_target", "run_script", "takes_run"]

_CONFIG: Final = (".yaml", ".yml", ".toml")
_FUNCTION: Final = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

Driver = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A target taken apart; exactly one of the first three is set.

    Attributes:
        config: A YAML or TOML file that names its driver.
        script: A Python file run as ``__main__``.
        driver: ``file.py`` or a module name, with ``function`` beside it.
    """

    text: str
    config: Path | None = None
    script: Path | None = None
    driver: str | None = None
    function: str = ""

    @property
    def experiment(self) -> str:
        """A name for the experiment where nobody gave one: the file's or the module's."""
        place = self.config or self.script or Path(self.driver or "run")
        stem = place.stem if place.suffix in (".py", *_CONFIG) else place.name.rpartition(".")[2]
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:64].strip(".") or "run"


def parse_target(text: str, base: Path | None = None) -> Target:
    """Return the target ``text`` names; relative files are looked up from ``base`` (here if None).

    Raises:
        ConfigError: The file does not exist, or the text has none of the three forms.
    """
    path = (base or Path.cwd()) / text
    if path.suffix in _CONFIG:
        return Target(text, config=_existing(path, text))
    if path.suffix == ".py":
        return Target(text, script=_existing(path, text))
    if match := _FUNCTION.fullmatch(text):
        place, name = match["place"], match["name"]
        if place.endswith(".py"):
            return Target(text, driver=str(_existing((base or Path.cwd()) / place, place)), function=name)
        if _MODULE.fullmatch(place):
            return Target(text, driver=place, function=name)
    msg = f"target {text!r} is neither a config, a script, nor module:function"
    raise ConfigError(msg, hint="name a .yaml or .toml config, a .py script, or package.module:function")


def _existing(path: Path, text: str) -> Path:
    if path.is_file():
        return path.resolve()
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    hint = f"did you mean `{Path(text).with_name(near[0])}`?" if near else None
    msg = f"target {text} does not exist"
    raise ConfigError(msg, hint=hint, facts={"looked in": str(path.parent.resolve())})


def find_driver(target: Target) -> Driver:
    """Import the driver function.

    Raises:
        ConfigError: The module or the function does not exist. What the module itself raises passes through.
    """
    place = target.driver or ""
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    driver = getattr(module, target.function, None)
    if callable(driver):
        found: Driver = driver
        return found
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    near = difflib.get_close_matches(target.function, functions, 1)
    msg = f"{place} has no function `{target.function}`"
    raise ConfigError(msg, hint=f"did you mean `{near[0]}`?" if near else None)


def _load_file(file: Path) -> ModuleType:
    put_first(file.parent)
    return import_file(file)


def _load_module(name: str) -> ModuleType:
    put_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's module fails to import is a failure of the user's code, not of the target's name.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        msg = f"module {name} does not exist"
        raise ConfigError(msg, facts={"looked in": str(Path.cwd())}) from None


def put_first(directory: Path) -> None:
    """Make modules of ``directory`` importable, as Python does for a script's own directory."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def takes_run(driver: Driver) -> bool:
    """Return whether the function has a parameter for the ``Run``."""
    return any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        for p in inspect.signature(driver).parameters.values()
    )


def call_driver(driver: Driver, *arguments: object) -> Any:
    """Call the function; what a coroutine function returns is run to its end."""
    result = driver(*arguments)
    if inspect.iscoroutine(result):
        # The command owns this thread, so no loop of the user's can be running here.
        return asyncio.run(result)
    return result


def run_script(script: Path, arguments: list[str]) -> None:
    """Run a file as ``python /full/path/script.py ARGS`` would. What it raises passes through."""
    sys.argv = [str(script), *arguments]
    put_first(script.parent)
    runpy.run_path(str(script), run_name="__main__")
