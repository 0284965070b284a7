from __future__ import annotations

import pytest

from zbus.registry import FileRegistry, MemoryRegistry
from zbus.testing.registry import CHECKS


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_file_registry_keeps_the_promise(check, tmp_path):
    """Every promise of the registry protocol holds on files."""
    check(lambda: FileRegistry(tmp_path / "registry"))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_memory_registry_keeps_the_promise(check):
    """Every promise of the registry protocol holds in memory."""
    table = MemoryRegistry()
    check(lambda: MemoryRegistry(table))
