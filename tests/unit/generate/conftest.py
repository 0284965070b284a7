"""Engines for the tests of generation, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")

from waiting import scaled
from zbus.engine import Mesh
from zbus.runtime.context import Context

HERE = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """Give what makes engines that are set up, and tears them down."""
    from workers.engines.generate import TorchRolloutEngine

    made: list[Any] = []

    def make(model: Any = "Cached", *, cls: Any = TorchRolloutEngine, **kwargs: Any) -> Any:
        spec = f"{HERE}/generate_models.py:{model}" if isinstance(model, str) else model
        one = cls(spec, **{"dtype": "float64", **kwargs})
        one.setup(Context(role="rollout", rank=0, world_size=1, mesh=Mesh({"dp": 1})))
        made.append(one)
        return one

    yield make
    for one in made:
        one.teardown()


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Give what runs a coroutine to its end, within a deadline."""

    def to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, scaled(30)))

    return to_end
