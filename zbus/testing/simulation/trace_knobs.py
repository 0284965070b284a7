"""What tracing is like in one run, drawn from a generator of its own: a run is the same with it and without."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from zbus.testing.simulation.knobs import MS

__all__ = ["draw_tracing"]

_TRACED: Final = {"small": 0.04, "large": 0.25, "trace": 1.0}
"""Share of runs of a size in which the workers trace."""


def draw_tracing(rng: Random, size: str) -> dict[str, Any]:
    """Draw the knobs of tracing: by name, none where the workers of this run do not trace.

    Args:
        rng: A generator of its own, so that a run is the same with and without tracing.
        size: As in ``draw``.
    """
    r = rng.random
    if r() >= _TRACED[size]:
        return {}
    on = 0.0 if r() < 0.1 else 0.35

    def rate(top: float) -> float:
        return r() * top if r() < on else 0.0

    def count(top: int) -> int:
        return 1 + int(r() * top) if r() < on else 0

    return {
        "tracing": True,
        "trace_period": int((20 + r() * 60) * MS),
        "trace_blocks": 2 + int(r() * 4),
        "trace_backlog": (4, 12, 30, 1 << 20)[int(r() * 4)],
        "trace_pace": int((0.2 + r() * r() * 20) * MS),
        "trace_ends": rate(0.1),
        "trace_loss": rate(0.4),
        "trace_duplicate": rate(0.4),
        "trace_reorder": rate(0.3),
        "trace_crashes": count(3),
        "trace_crash_effects": count(3),
        "trace_kill_effects": rate(1.0),
        "trace_pauses": count(2),
        "trace_fills": count(2),
        "trace_same_address": r() < 0.5,
    }
