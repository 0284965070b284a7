"""Models and requests for the tests of generation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")

from waiting import scaled
from zbus.engine import Mesh
from zbus.runtime.context import Context

HERE = Path(__file__).resolve().parents[2]


@pytest.fixture
def models() -> Any:
    """Give the module with small models, as the engines load it."""
    sys.path.insert(0, str(HERE))
    import generate_models

    yield generate_models
    sys.path.remove(str(HERE))


@pytest.fixture
def engine(models: Any) -> Iterator[Any]:
    """Give what makes engines that are set up, and tears them down."""
    from workers.engines.generate import TorchRolloutEngine

    made: list[Any] = []

    def make(model: Any = "generate_models.py:Cached", *, cls: Any = TorchRolloutEngine, **kwargs: Any) -> Any:
        one = cls(model, **{"dtype": "float64", **kwargs})
        made.append(one)
        one.setup(Context(role="rollout", rank=0, world_size=1, mesh=Mesh({"dp": 1})))
        return one

    yield make
    for one in made:
        one.teardown()


@pytest.fixture
def run() -> Any:
    """Give what runs a coroutine to its end, within a deadline."""

    def to_end(coroutine: Any) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, scaled(60)))

    return to_end
