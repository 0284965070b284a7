"""Which build of this package runs: the pure one, or the one whose call path is compiled to C."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Literal

__all__ = ["build"]


def build() -> Literal["compiled", "interpreted"]:
    """Return which build this is, told by its files, so that nothing is imported for it. Any thread.

    An extension module beside its source is what Python imports; so where one lies there, it is what runs.
    """
    place = Path(__file__).parent / "protocol"
    compiled = any((place / f"caller{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    return "compiled" if compiled else "interpreted"
