"""Engine classes, and what roles name: ``module:Name`` or ``file.py:Name``, from the job record, never from a call.

Every failure is an ``EngineLoadError`` that names the path, what was found instead, and a near name.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from zbus.engine import EndpointSpec, Engine, endpoints_of, table_to_wire
from zbus.errors import EngineLoadError

__all__ = ["digest_of", "import_file", "load_engine", "load_object"]

_OURS: Final = ("workers", "controller", "traceview", "zbus")
_PRIVATE: Final = re.compile(r"^_zbus_file_\d+_")


def load_engine(path: str, *, base: Path | None = None) -> type[Engine]:
    """Import an engine class.

    Args:
        path: ``module:Class`` or ``file.py:Class`` (relative to ``base``).
        base: Directory that a relative file is looked up in; the current one by default.

    Raises:
        EngineLoadError: Bad path, import failure (the user's traceback is a fact), no such class, or not an Engine.
    """
    found = _load(path, "engine", "Class", base)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        msg = f"engine {path!r} is not a subclass of zbus.Engine"
        raise EngineLoadError(msg, hint="derive the class from zbus.Engine and mark its methods with @zbus.endpoint")
    return found


def load_object(path: str, what: str) -> Any:
    """Import what the arguments of a role name: a model's factory, a loss, a workflow, a reward.

    Args:
        path: ``package.module:name`` or ``file.py:name``; a relative file is looked up in the current directory, then
            in the directories of the import path, where the driver's own directory is.
        what: What it is, for messages: ``model``, ``loss 'sft'``.

    Raises:
        EngineLoadError: As ``load_engine``.
    """
    file = path.rpartition(":")[0]
    places = [Path.cwd(), *map(Path, sys.path)] if file.endswith(".py") else []
    return _load(path, what, "name", next((place for place in places if (place / file).is_file()), None))


def _load(path: str, what: str, kind: str, base: Path | None) -> Any:
    module_name, separator, name = path.rpartition(":")
    if not separator or not module_name or not name.isidentifier():
        msg = f"{what} {path!r} is not `module:{kind}`"
        raise EngineLoadError(msg, hint=f"write it as package.module:{kind} or file.py:{kind}")
    module = _load_module(module_name, f"{what} {path!r}", base)
    found = getattr(module, name, None)
    if found is None:
        listed = [key for key, value in vars(module).items() if kind == "name" or isinstance(value, type)]
        near = difflib.get_close_matches(name, listed, n=1)
        sort = "class" if kind == "Class" else kind
        msg = f"module {module_name!r} has no {sort} {name!r} for {what} {path!r}"
        raise EngineLoadError(
            msg,
            hint=f"did you mean `{module_name}:{near[0]}`?" if near else None,
            facts={"file": str(getattr(module, "__file__", "?")), **_clash(module_name, module)},
        )
    return found


def digest_of(cls: type[Engine], table: Mapping[str, EndpointSpec] | None = None) -> str:
    """Return a short digest of an engine's declarations and source: two sides with one digest mean the same engine."""
    import hashlib  # brings all of OpenSSL along: only ranks need it

    declared = json.dumps(table_to_wire(table if table is not None else endpoints_of(cls)), sort_keys=True)
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        source = ""
    # One side may have had to import the file under its private name.
    module = _PRIVATE.sub("", cls.__module__)
    text = f"{module}:{cls.__qualname__}\n{declared}\n{source}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _load_module(name: str, label: str, base: Path | None) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _load_file(name, label, base)
        return importlib.import_module(name)
    except EngineLoadError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            msg = f"{label}: there is no module {error.name!r}"
            raise EngineLoadError(
                msg,
                hint="set roles.<role>.cwd, or install the package where the workers run",
                facts={"searched": ", ".join(entry or "." for entry in sys.path[:4]), **_clash_by_name(name)},
            ) from error
        raise _import_failed(label, error) from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise _import_failed(label, error) from error
    except SystemExit as error:
        raise _import_failed(label, error) from error


def _load_file(name: str, label: str, base: Path | None) -> ModuleType:
    file = (base or Path.cwd()) / name
    if not file.is_file():
        msg = f"{label}: there is no file {str(file)!r}"
        raise EngineLoadError(msg, hint="the path is relative to the configuration file, or to the current directory")
    file = file.resolve()
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    return import_file(file)


def import_file(file: Path) -> ModuleType:
    """Import one ``.py`` file, once: under its stem, or under a private name where another module has that one.

    Raises:
        ImportError: The file is no Python source. What the module itself raises passes through.
    """
    for name in _names(file.stem):
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(file):
            return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        msg = f"{str(file)!r} cannot be imported as Python"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _names(stem: str) -> Iterator[str]:
    yield stem
    for number in itertools.count(2):
        yield f"_zbus_file_{number}_{stem}"


def _import_failed(label: str, error: BaseException) -> EngineLoadError:
    text = "".join(traceback.format_exception(error))
    frames = [line for line in text.splitlines() if "importlib" not in line]
    return EngineLoadError(
        f"importing {label} failed: {type(error).__name__}: {error}",
        hint="import the module in a Python shell in the same directory to see the failure",
        facts={"traceback": "\n".join(frames[-12:])},
    )


def _clash(name: str, module: ModuleType) -> dict[str, str]:
    """Explain a clash between the user's module and one of zbus's packages of the same name."""
    if name.split(".", maxsplit=1)[0] not in _OURS:
        return {}
    return {"clash": f"{name!r} is a package of zbus ({getattr(module, '__file__', '?')})", **_clash_by_name(name)}


def _clash_by_name(name: str) -> dict[str, str]:
    top = name.split(".", maxsplit=1)[0]
    if top not in _OURS:
        return {}
    ours = getattr(sys.modules.get(top), "__file__", None)
    others = [str(Path(entry or ".") / top) for entry in sys.path if (Path(entry or ".") / f"{top}.py").exists()]
    if not others:
        return {}
    return {"clash": f"{top!r} is zbus's own package ({ours}) and hides yours ({others[0]}.py): rename yours"}
