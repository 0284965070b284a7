from __future__ import annotations

import ast
import importlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("zbus", "controller", "zbus.rl")
HEAVY = ("torch", "numpy", "zmq", "msgspec", "msgpack", "yaml", "rich", "asyncio")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_where_the_table_says(package):
    """Each name of ``__all__`` loads from its home and is a public name there."""
    module = importlib.import_module(package)

    for name, home in module._HOME_OF.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        exported = getattr(importlib.import_module(home), "__all__", None)
        assert exported is None or name in exported, f"{home}.__all__ lacks {name}"
    assert set(module._HOME_OF) <= set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names_as_the_program(package):
    """The imports under TYPE_CHECKING and the table of homes say the same."""
    module = importlib.import_module(package)
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert seen == module._HOME_OF


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package):
    """A misspelt name fails as on any module."""
    module = importlib.import_module(package)

    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Enginee'"):
        _ = module.Enginee


def _seconds(code: str) -> float:
    """Return the processor time of a program; the machine may be busy with others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("package", ["zbus", "controller", "workers", "traceview"])
def test_importing_a_package_is_cheap(package):
    """``import zbus`` costs at most 0.25 s of a processor beyond bare Python and loads nothing heavy."""
    code = (
        f"import sys; import {package}; found = set({HEAVY!r}) & set(sys.modules); sys.exit(str(found) if found else 0)"
    )

    assert min(_seconds(code) for _ in range(3)) - min(_seconds("pass") for _ in range(3)) < scaled(0.25)


def test_engine_declarations_do_not_load_torch_or_numpy():
    """An engine module without torch of its own stays without it, and without numpy."""
    code = (
        "import sys, zbus\n"
        "class E(zbus.Engine):\n"
        "    @zbus.endpoint(zbus.Split('dp'), collect=zbus.Concat(), effect='pure')\n"
        "    def f(self, x): ...\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))
