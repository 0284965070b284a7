"""Launching trials in tests: short roots, one start deadline, everything closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller import Controller, Role
from waiting import scaled

__all__ = ["launch", "probes"]

HERE = Path(__file__).parent


def probes(replicas: int = 2, **fields: Any) -> Role:
    """Return a role of ``Probe`` engines."""
    return Role("engines_under_test:Probe", replicas=replicas, sys_path=[str(HERE)], **fields)


@contextmanager
def launch(root: Path, roles: dict[str, Role] | None = None, **options: Any) -> Iterator[Controller]:
    """Launch a trial below ``root`` and close it at the end of the block."""
    options.setdefault("startup_timeout", scaled(90))
    with Controller.launch("test", roles or {"actor": probes()}, root=root, **options) as bus:
        yield bus
