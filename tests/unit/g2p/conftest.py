"""The example's modules are scripts beside each other: put their directory on the path, as the bus does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

G2P = Path(__file__).resolve().parents[3] / "examples" / "g2p"
_MODULES = ("data", "model", "training", "engines", "sft", "rewards", "spelling", "losses", "grpo")


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """Make ``import data`` mean the example's, and forget it afterwards: the names are common ones."""
    sys.path.insert(0, str(G2P))
    yield
    sys.path.remove(str(G2P))
    for name in _MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data() -> ModuleType:
    """Give the example's ``data`` module."""
    import data

    return data


@pytest.fixture(scope="module")
def words(data: ModuleType):
    """Give the whole dictionary: (training words, held-out words)."""
    return data.load()


@pytest.fixture(scope="module")
def rewards() -> ModuleType:
    """Give the example's ``rewards`` module."""
    import rewards

    return rewards
