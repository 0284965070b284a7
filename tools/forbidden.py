"""Refuse patterns that this project bans: code from bytes, and sockets outside their one factory.

``python tools/forbidden.py [PATH...]`` reads Python files as syntax, so comments and docstrings may name a pattern.
Exit 1 and one ``path:line: reason`` per violation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Violation", "check_source", "main"]

ROOTS: Final = ("zbus", "workers", "controller", "traceview", "examples", "benchmarks", "tools")
"""Checked when no path is given. Tests may pickle (errors must survive it) and open sockets (rivals, faults)."""

TRANSPORT: Final = "zbus/transport"
SOCKETS_ALLOWED: Final = (TRANSPORT, "benchmarks")
"""Benchmarks drive raw sockets beside ours."""

MODULES: Final = {
    "cloudpickle": "unpickling runs code",
    "dill": "unpickling runs code",
    "joblib": "joblib.load unpickles",
    "marshal": "marshal reads code",
    "pickle": "unpickling runs code",
    "shelve": "shelve unpickles",
}
NAMES: Final = {"eval": "runs text as code", "exec": "runs text as code"}
METHODS: Final = {
    "recv_pyobj": "unpickles what a peer sent",
    "recv_serialized": "runs a caller's decoder on raw frames; use zbus.codec",
    "send_pyobj": "pickles",
    "unsafe_load": "builds any object; use yaml.safe_load",
}
CALLS: Final = {
    ("torch", "load"): "unpickles; save arrays as .npz",
    ("torch", "save"): "pickles; save arrays as .npz",
    ("yaml", "full_load"): "builds objects; use yaml.safe_load",
    ("yaml", "load"): "builds objects; use yaml.safe_load",
}


class Violation(NamedTuple):
    """One banned use."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def check_source(text: str, path: str) -> list[Violation]:
    """Return every banned use in the Python source ``text``; ``path`` is relative to the repository, with ``/``."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [Violation(path, error.lineno or 0, f"does not parse: {error.msg}")]
    sockets_allowed = path.startswith(tuple(f"{place}/" for place in SOCKETS_ALLOWED))
    found = [
        Violation(path, getattr(node, "lineno", 0), reason)
        for node in ast.walk(tree)
        for reason in _reasons(node, sockets_allowed=sockets_allowed)
    ]
    return sorted(found)


def _reasons(node: ast.AST, *, sockets_allowed: bool) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield from _module(alias.name)
        case ast.ImportFrom(module=str(module), names=names):
            yield from _module(module)
            for alias in names:
                if (module, alias.name) in CALLS:
                    yield f"{module}.{alias.name}: {CALLS[module, alias.name]}"
        case ast.Name(id=name) if name in NAMES and isinstance(node.ctx, ast.Load):
            yield f"{name}: {NAMES[name]}"
        case ast.Attribute(value=owner, attr=attribute):
            yield from _attribute(owner, attribute)
        case ast.Call(func=ast.Attribute(value=owner, attr="socket")) if not sockets_allowed:
            # `socket.socket()` is the standard library's; every other `.socket()` is taken for a ZeroMQ context's.
            if not (isinstance(owner, ast.Name) and owner.id == "socket"):
                yield f".socket() outside {TRANSPORT}: only the socket factory makes sockets"
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
            pass
        case ast.keyword(arg="allow_pickle"):
            yield "allow_pickle: unpickling runs code"
        case _:
            pass


def _module(name: str) -> Iterator[str]:
    top = name.partition(".")[0].lstrip("_")
    if top in MODULES:
        yield f"import {name}: {MODULES[top]}"


def _attribute(owner: ast.expr, attribute: str) -> Iterator[str]:
    owner_name = owner.id if isinstance(owner, ast.Name) else None
    if attribute in METHODS:
        yield f".{attribute}: {METHODS[attribute]}"
    elif (owner_name, attribute) in CALLS:
        yield f"{owner_name}.{attribute}: {CALLS[owner_name or '', attribute]}"
    elif owner_name == "builtins" and attribute in NAMES:
        yield f"builtins.{attribute}: {NAMES[attribute]}"


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for name in paths:
        path = Path(name)
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: Sequence[str]) -> int:
    """Check the given files and directories, or the project's, relative to the current directory."""
    violations = [
        violation
        for path in _files(arguments or [root for root in ROOTS if Path(root).is_dir()])
        for violation in check_source(path.read_text(encoding="utf-8"), path.as_posix())
    ]
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
