"""Public names of a package that are loaded from their homes on first use (PEP 562), so that importing it is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["loaders"]


def loaders(package: str, home_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its full name.
        home_of: The module of each public name.
    """

    def load(name: str) -> Any:
        """Load a public name from its home and keep it."""
        module = sys.modules[package]
        home = home_of.get(name)
        if home is None:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg, name=name, obj=module)
        value = getattr(importlib.import_module(home), name)
        vars(module)[name] = value
        return value

    def listed() -> list[str]:
        """Return all names, loaded or not."""
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, listed
