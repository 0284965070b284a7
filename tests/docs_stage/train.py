"""A run of a few steps, as the pages assume that the reader has one."""

from __future__ import annotations

from typing import Any


def main(run: Any) -> dict[str, float]:
    """Train."""
    actor = run.bus.group("actor")
    for step in range(50):
        actor.train([1, 2, 3], step)
        run.bus.save_perf_tracer(step)
    return {"steps": 50.0}
